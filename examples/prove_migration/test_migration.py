import pytest


@pytest.mark.fsshard_parity(scripts=["old_train.py", "new_train.py"], world_size=2)
def test_migration():
    pass
