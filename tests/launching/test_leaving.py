"""Groups are kept until nothing can deadlock on them."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable

import pytest
import torch.distributed as dist
from torch import nn

import fsshard
from fsshard import patches
from fsshard.launching import leaving
from fsshard.launching.context import init
from fsshard.launching.leaving import groups, keep_group, tear_down
from fsshard.patches import END_OF_PROCESS, Patch


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


@pytest.mark.parametrize("failed", [False, True])
def test_a_finished_script_destroys_the_group_that_it_made(bare: pytest.MonkeyPatch, failed: bool) -> None:
    bare.setattr(leaving, "_failed", False)
    bare.setattr(sys, "excepthook", lambda *_: None)
    at_exit: list[Callable[[], None]] = []
    bare.setattr(atexit, "register", at_exit.append)
    bare.setattr(leaving, "END_OF_PROCESS", Patch(END_OF_PROCESS._put))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    fsshard.wrap(nn.Linear(2, 2), backend="ddp")
    (end,) = [each for each in at_exit if each.__module__ == patches.__name__]
    with pytest.MonkeyPatch.context() as child:
        child.setattr(os, "getpid", lambda: 0)  # forked by this process
        end()
    assert dist.is_initialized()
    if failed:  # what is under way on this rank may never be complete
        sys.excepthook(ValueError, ValueError("boom"), None)
    end()
    assert dist.is_initialized() == failed
