"""A script that has finished destroys the process group that it made; one that has failed does not."""

from __future__ import annotations

import atexit
import os
import sys

import pytest
import torch.distributed as dist
from torch import nn

import fsshard
from fsshard import patches
from fsshard.launching import leaving
from fsshard.patches import END_OF_PROCESS, Patch


@pytest.mark.parametrize("failed", [False, True])
def test_a_finished_script_destroys_the_group_that_it_made(bare: pytest.MonkeyPatch, failed: bool) -> None:
    bare.setattr(leaving, "_failed", False)
    bare.setattr(sys, "excepthook", lambda *_: None)
    at_exit = []
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
