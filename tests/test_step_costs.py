"""Counts what a step costs, without a clock: calls of Python functions, and collectives, per version of torch."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsshard
from tests.models import Spectral

CALLS: dict[str, dict[str, tuple[int, int]]] = {
    "torch 2.13, Python 3.11": {
        "none": (71, 9),
        "ddp": (135, 9),  # three of the nine find out whether torch.compile traces, four are torch's for a hook
        "fairscale": (345, 23),
        "fsdp": (2621, 1153),
        "fsdp2": (898, 129),
    }
}
"""Backend -> calls of Python functions in a step on top of bare torch's: with two units, and for each further one.

A unit has a complex weight and a real one. Only ever lowered, or the commit says why.
"""
MARGIN = 1.25
"""Of the largest numbers above, under versions that are not there."""
COLLECTIVES = {
    "ddp": "all_reduce 72",
    "fairscale": "all_reduce 1, all_reduce 5, all_reduce 5, all_to_all 160, broadcast 48, broadcast 48",
    "fsdp": "all_gather 18, all_gather 18, all_gather 18, all_gather 18, all_reduce 1, all_to_all 36, all_to_all 36",
    "fsdp2": "all_reduce 1, all_to_all 72, broadcast 36, broadcast 36",
}
"""Backend -> the collectives of a clipped step of two units, with how many numbers this rank gives to each."""


def stepping(backend: str, units: int) -> Callable[[], None]:
    """Return a training step after five of them; ``bare`` is torch alone."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(Spectral(4) for _ in range(units)))
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    if backend == "bare":
        optimizer: Any = torch.optim.AdamW(model.parameters())
    else:
        model = fsshard.wrap(model, backend=backend, auto_wrap_policy={Spectral})
        optimizer = fsshard.build_optimizer(model, torch.optim.AdamW)

    def step(clip: bool = False) -> None:
        model(x).square().mean().backward()
        if clip:
            model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):
        step()
    return step


def calls_of_step(backend: str, units: int) -> int:
    step = stepping(backend, units)
    events: list[str] = []
    gc.collect()
    gc.disable()  # finalizers are calls
    sys.setprofile(lambda frame, event, _: events.append(event))
    step()
    sys.setprofile(None)
    gc.enable()
    return events.count("call")


def job_calls(backend: str) -> tuple[int, int]:
    few, many = (calls_of_step(backend, units) - calls_of_step("bare", units) for units in (2, 4))
    return few, (many - few) // 2


@pytest.mark.parametrize("backend", ["none", "ddp", "fairscale", "fsdp", "fsdp2"])
def test_calls_of_a_step(ranks: Any, backend: str) -> None:
    version = f"torch {'.'.join(torch.__version__.split('.')[:2])}, Python {sys.version_info[0]}.{sys.version_info[1]}"
    calls = ranks.run(job_calls, 1 if backend == "none" else 2, backend)[0]
    if version in CALLS:
        assert calls == CALLS[version][backend]
        return
    print(f"{version} is not among the versions whose calls are known: {', '.join(CALLS)}")
    assert all(count <= MARGIN * known for count, known in zip(calls, list(CALLS.values())[-1][backend], strict=True))


def job_collectives(backend: str) -> str:
    step: Any = stepping(backend, 2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        step(clip=True)
    texts = []
    for event in profile.events():
        if event.name.startswith("gloo:"):
            numbers = sum(torch.Size(shape).numel() for shape in event.input_shapes)
            texts.append(f"{event.name.removeprefix('gloo:')} {numbers}")
    return ", ".join(sorted(texts))


@pytest.mark.parametrize("backend", COLLECTIVES)
def test_collectives_of_a_clipped_step(ranks: Any, backend: str) -> None:
    assert ranks.run(job_collectives, 2, backend)[0] == COLLECTIVES[backend]
