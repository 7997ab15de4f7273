import pytest
from model import recipe

test_parity = pytest.mark.fsshard_parity(backends=["fairscale", "fsdp", "fsdp2"], world_size=2)(recipe)
