"""Processes that a rank forks, and that train, save or ask with what they have inherited."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

import fsshard
from fsshard.comm.agreement import per_rank
from fsshard.errors import LaunchError
from tests.models import with_sgd
from tests.sets import often

SECONDS = 60.0  # what takes longer hangs


def in_child(work: Callable[[], Any]) -> str:
    """Kind and text of what the work raises in a forked process, or what it returns."""
    here, there = multiprocessing.Pipe()
    child = os.fork()
    if child == 0:
        try:
            there.send(str(work()))
        except BaseException as error:
            there.send(f"{type(error).__name__}: {error}")
        finally:
            os._exit(0)
    try:
        return str(here.recv()) if here.poll(SECONDS) else "hangs"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def job_forks(backend: str, folder: str) -> dict[str, str]:
    model, optimizer = with_sgd(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), backend=backend)
    loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    group = dist.group.WORLD
    works = {
        "forward": lambda: model(torch.ones(2, 4)).sum(),
        "evaluation mode": lambda: model.eval()(torch.ones(2, 4)).sum().backward(),
        "evaluation": lambda: evaluated(model),
        "step": optimizer.step,
        "clip": lambda: model.clip_grad_norm_(1.0),
        "state": model.state_dict,
        "whole": lambda: model.full_parameters().__enter__(),
        "load": lambda: model.load_state_dict({}, strict=False),
        "save": lambda: fsshard.save(Path(folder, "ckpt"), model, timeout=SECONDS),
        "agree": lambda: per_rank(group, 1),
        "anew": own_group,
    }
    found = {name: in_child(work) for name, work in works.items()}
    optimizer.step()  # and the rank goes on
    return found


def evaluated(model: fsshard.ShardedModule) -> Any:
    with torch.no_grad():
        return model.eval()(torch.ones(2, 4)).shape


def own_group() -> list[int]:
    """A group of the child's own is nobody else's."""
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    return per_rank(group, 7)


@pytest.mark.parametrize("backend", often(["ddp", "fsdp", "fsdp2", "fairscale"], "fsdp2", "ddp"))
def test_a_forked_process_is_told_at_once(ranks: Any, tmp_path: Path, backend: str) -> None:
    for rank, found in enumerate(ranks.run(job_forks, 2, backend, str(tmp_path))):
        assert found.pop("anew") == "[7]"
        whole = backend in ("ddp", "fairscale")
        assert not whole or found.pop("evaluation") == "torch.Size([2, 1])"
        for name, said in found.items():
            assert said.startswith(LaunchError.__name__) and f"was forked from rank {rank}" in said, (name, said)
