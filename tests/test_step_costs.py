"""Counts what a step costs, without a clock: calls of Python functions, and collectives, per version of torch."""

from __future__ import annotations

import gc
import math
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsshard
from tests.forked import forking
from tests.models import Spectral

# Torch and Python -> backend -> calls of Python functions in a step: with two units, and for each further one; bare
# torch has about 130 and 21. A unit has a complex weight and a real one. Only ever lowered, or the commit says why;
# elsewhere a quarter more may be.
CALLS = {
    "2.13, 3.11": {
        "none": (190, 29),
        "ddp": (247, 29),
        "fairscale": (463, 43),
        "fsdp": (2497, 1056),
        "fsdp2": (965, 132),
    }
}
# Backend -> the collectives of a clipped step of two units, with how many numbers this rank gives to each.
COLLECTIVES = {
    "ddp": "all_reduce 72",
    "fairscale": "all_reduce 1, all_reduce 5, all_to_all 160, broadcast 48, broadcast 48",
    "fsdp": "all_gather 18, all_gather 18, all_gather 18, all_gather 18, all_reduce 1, all_to_all 36, all_to_all 36",
    "fsdp2": "all_reduce 1, all_to_all 72, broadcast 36, broadcast 36",
}


def stepping(backend: str, units: int) -> Any:
    """Return a training step after five of them."""
    model = nn.Sequential(*(Spectral(4) for _ in range(units)))
    x = torch.randn(3, 4) + dist.get_rank()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = fsshard.wrap(model, optimizer, backend=backend, auto_wrap_policy={Spectral})

    def step(clip: bool = False) -> None:
        model(x).square().mean().backward()
        if clip:
            model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):
        step()
    gc.collect()
    return step


def calls_of_step(backend: str, units: int) -> int:
    step = stepping(backend, units)
    events = []
    gc.disable()  # finalizers are calls
    sys.setprofile(lambda _, event, __: events.append(event))
    step()
    sys.setprofile(None)
    gc.enable()
    return events.count("call")


def job_calls(ctx: fsshard.Context, backends: list[str]) -> dict[str, tuple[int, int]]:
    calls = {}
    for backend in backends:
        few, many = (calls_of_step(backend, units) for units in (2, 4))
        calls[backend] = few, (many - few) // 2
    return calls


@pytest.fixture(scope="module")
def counted() -> dict[str, tuple[int, int]]:
    """Count in processes of their own: what others have wrapped in one costs a call here and there."""
    with forking():
        return {**fsshard.launch(job_calls, 1, (["none"],)), **fsshard.launch(job_calls, 2, (list(COLLECTIVES),))}


@pytest.mark.parametrize("backend", ["none", *COLLECTIVES])
def test_calls_of_a_step(counted: dict[str, tuple[int, int]], backend: str) -> None:
    version = f"{torch.__version__[:4]}, {sys.version[:4]}"
    few, each = counted[backend]
    if version in CALLS:
        assert (few, each) == CALLS[version][backend]
    else:
        print("no calls are known of torch and Python", version)
        most, most_each = [*CALLS.values()][-1][backend]
        assert max(few / most, each / most_each) <= 1.25


def job_collectives(backend: str) -> str:
    step = stepping(backend, 2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        step(clip=True)
    sent = [event for event in profile.events() if event.name.startswith("gloo:")]
    return ", ".join(sorted(f"{event.name[5:]} {math.prod(event.input_shapes[0])}" for event in sent))


@pytest.mark.parametrize("backend", COLLECTIVES)
def test_collectives_of_a_clipped_step(ranks: Any, backend: str) -> None:
    assert ranks.run(job_collectives, 2, backend)[0] == COLLECTIVES[backend]
