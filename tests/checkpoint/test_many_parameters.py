"""Twice as many parameters are twice as much work: bytecodes are counted, since no test measures time."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsshard
from tests.training_runs import DISTRIBUTED

ROOMS = tuple(str(Path(fsshard.__file__).parent / room) for room in ("checkpoint", "sharded", "backends"))


def bytecodes(of: Callable[[], Any]) -> Counter[str]:
    """How many bytecodes each function of these rooms, comprehensions included, ran during a call."""
    counted = Counter()

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if event == "call":
            if not frame.f_code.co_filename.startswith(ROOMS):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            counted[frame.f_code] += 1
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        of()
    finally:
        sys.settrace(former)
    result = Counter()
    for code, count in counted.items():
        result[f"{Path(code.co_filename).name}:{code.co_firstlineno} {code.co_name}"] += count
    return result


def work(backend: str, path: str, layers: int) -> Counter[str]:
    """Count for saving, loading, loading of torch's file and both state dicts of a model of that many layers."""
    model = fsshard.wrap(nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers))), backend=backend)
    optimizer = fsshard.build_optimizer(model, torch.optim.Adam, lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()

    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if dist.get_rank() == 0:
        torch.save(states, f"{path}.pt")

    def everything() -> None:
        fsshard.save(path, model, optimizer)
        fsshard.load(path, model, optimizer)
        fsshard.load(f"{path}.pt", model, optimizer)
        model.load_state_dict(model.state_dict())
        optimizer.load_state_dict(optimizer.state_dict())

    return bytecodes(everything)


def job_growth(path: str, backends: list[str]) -> list[str]:
    """The functions of ours that do more than in proportion, with their bytecodes for 8 and 16 layers."""
    found = []
    for backend in backends:
        work(backend, path, 2)  # what is done once per process
        few, many = (work(backend, path, layers) for layers in (8, 16))
        found += [
            f"{backend}: {function} ran {few[function]} and then {count} bytecodes"
            for function, count in many.items()
            if count > 1000 and count > 2.5 * few[function]
        ]
    return found


@pytest.mark.parametrize("backends", [["none"], pytest.param(list(DISTRIBUTED), marks=pytest.mark.long)])
def test_saving_and_loading_are_linear_in_the_parameters(ranks: Any, tmp_path: Path, backends: list[str]) -> None:
    """Not so where every parameter was compared with the keys of all others, for each of them."""
    for found in ranks.run(job_growth, 1 if backends == ["none"] else 2, str(tmp_path / "c"), backends):
        assert not found
