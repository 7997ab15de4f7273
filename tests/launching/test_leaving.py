"""Groups are kept until nothing can deadlock on them."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from fsshard.launching.context import init
from fsshard.launching.leaving import groups, keep_group, tear_down


def test_groups_are_referenced_past_their_destruction(bare: pytest.MonkeyPatch) -> None:
    init()
    world, group = dist.group.WORLD, dist.new_group()
    assert any(kept is world for kept in groups)
    assert keep_group(group) is group
    assert any(kept is group for kept in groups)
    another = dist.new_group()
    tear_down()
    assert not dist.is_initialized()
    assert any(kept is another for kept in groups)
    assert sum(kept is group for kept in groups) == 1
