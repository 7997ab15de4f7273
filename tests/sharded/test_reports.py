"""Checks the cost of units by ``model.explain()``, and memory by kind as it lies now and as a step needs it.

Tests fsshard/simulation/memory_tracker.py too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsshard
from fsshard.backends.cost import unit_cost
from fsshard.planning.bounds import sent
from fsshard.sharded.reports import MemoryReport
from fsshard.simulation.tracking import Tracker
from tests.models import batch, net, take_step, with_adam, with_sgd
from tests.on_ranks import on_ranks
from tests.training_runs import DISTRIBUTED

BACKENDS = [*DISTRIBUTED, "none"]
WHOLE = sum(p.numel() * p.element_size() for p in net().parameters())
"""Bytes of a copy of the parameters; complex numbers take 8."""
STEPS = 8  # the buffer, an int64
PADDING = 16 * 8
ALIGNMENT = 64
"""Bytes at multiples of which OSS lets parameters begin; costs are those of the numbers."""
"""More than FSDP1 (parameters to 16 bytes) and FSDP2 (rows to the number of ranks) add to eight parameters' shards."""


def held(report: MemoryReport) -> dict[str, int]:
    return dict(report.ranks[0].by_kind)


def job_report(backend: str) -> list[dict[str, int]]:
    """When wrapped; after a backward; after a step; after a backward under no_sync; with all parameters whole."""
    model, optimizer = with_adam(net(), backend=backend)
    found = [held(model.memory_report())]
    model(batch(0)).square().mean().backward()
    found.append(held(model.memory_report()))
    take_step(optimizer)
    found.append(held(model.memory_report()))
    with model.no_sync():
        model(batch(1)).square().mean().backward()
    found.append(held(model.memory_report()))
    model.zero_grad()
    with model.full_parameters():
        found.append(held(model.memory_report()))
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_held(ranks: Any, backend: str) -> None:
    """Over the ranks, sharded kinds add up to one copy (with padding), others to one per rank."""
    size = 1 if backend == "none" else 2
    results = ranks.run(job_report, size, backend)
    sharded = {"fsdp": {"parameters", "gradients"}, "fsdp2": {"parameters", "gradients"}}.get(backend, set())
    sharded |= {"gradients"} if backend == "fairscale" else set()
    wrapped, graded, stepped, waiting, whole = ([rank[moment] for rank in results] for moment in range(5))

    def check(found: list[dict[str, int]], kind: str, *, divided: bool, copies: int = 1) -> None:
        total, want = sum(rank[kind] for rank in found), copies * WHOLE * (1 if divided else size)
        begins = ALIGNMENT * size * len(list(net().parameters())) if backend == "fairscale" else 0
        assert want <= total <= want + copies * (PADDING * size + begins), (kind, total, want)

    check(wrapped, "parameters", divided="parameters" in sharded)
    assert all(rank["buffers"] == STEPS and not rank["gradients"] and not rank["optimizer state"] for rank in wrapped)
    check(graded, "gradients", divided="gradients" in sharded)
    check(graded, "parameters", divided="parameters" in sharded)
    check(stepped, "optimizer state", divided=size > 1 and backend != "ddp", copies=2)
    # FSDP1 keeps its flat gradients until the next forward, though the parameters' own are gone.
    assert all(bool(rank["gradients"]) == (backend == "fsdp" and size > 1) for rank in stepped)
    check(waiting, "gradients", divided=False)  # nothing was reduced, so every rank holds all of them
    check(whole, "parameters", divided="parameters" in sharded)
    assert all(rank["gathered units"] >= WHOLE * (backend in ("fsdp", "fsdp2")) for rank in whole)


def job_all_ranks(backend: str) -> tuple[MemoryReport, int, int]:
    model = fsshard.wrap(net(), backend=backend)
    report = model.memory_report(all_ranks=True)
    return report, len(model.memory_report().ranks), report.worst.total


def test_all_ranks_in_one_report(ranks: Any) -> None:
    (report, alone, worst), (same, *_) = ranks.run(job_all_ranks, 2, "fsdp2")
    assert report == same and [rank.rank for rank in report.ranks] == [0, 1] and alone == 1
    head, columns, first, second = str(report).splitlines()
    assert head == "memory under backend 'fsdp2', 2 ranks, device cpu: held now"
    assert columns.split() == ["rank", "parameters", "buffers", "total"] and [first[0], second[0]] == ["0", "1"]
    told = json.loads(report.to_json())
    assert told["ranks"][1]["by_kind"] == report.ranks[1].by_kind
    assert max(rank["total"] for rank in told["ranks"]) == worst
    with pytest.raises(AttributeError):
        report.what = "else"  # type: ignore[misc]


# ------------------------------------------------------------------------------------------------ the tracker


class Written:
    """Keeps what a TensorBoard writer is told."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, int, int]] = []

    def add_scalar(self, tag: str, value: int, step: int) -> None:
        self.scalars.append((tag, value, step))


def job_tracked(backend: str) -> tuple[list[MemoryReport], MemoryReport, dict[str, int], list[tuple[str, int, int]]]:
    """Two steps; what was alive after the backward of the second; all ranks' peaks; what was written."""
    model, optimizer = with_adam(net(), backend=backend)
    writer, steps = Written(), []
    with fsshard.MemoryTracker(model, writer=writer, first_step=5) as memory:
        for step in range(2):
            data = memory.inputs(batch(step))
            loss = model(data).square().mean()
            loss.backward()
            del loss
            alive = dict(memory.live().ranks[0].by_kind)
            take_step(optimizer)
            steps.append(memory.step())
    return steps, memory.report(all_ranks=True), alive, writer.scalars


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tracked_training(ranks: Any, backend: str) -> None:
    size = 1 if backend == "none" else 2
    results = ranks.run(job_tracked, size, backend)
    for rank, (steps, peaks, alive, written) in enumerate(results):
        first, second = (step.ranks[0] for step in steps)
        assert [step.what for step in steps] == ["peak of step 5", "peak of step 6"]
        assert first.rank == rank and sum(first.by_kind.values()) == max(first.phases.values()) == first.total
        assert alive["buffers"] == STEPS and alive["inputs"] == 3 * 4 * 4 and alive["gradients"] > 0
        assert ("gathered units" in backend) or bool(second.highest["gathered units"]) == (backend in ("fsdp", "fsdp2"))
        assert second.highest["activations"] > 0 and second.moment
        assert peaks.ranks[rank].total == max(first.total, second.total) and len(peaks.ranks) == size
        assert (f"memory/rank{rank}/total", second.total, 6) in written
        assert (f"memory/rank{rank}/optimizer_state", second.by_kind["optimizer state"], 6) in written
        kinds, phases = str(steps[1]).splitlines()[1::2]
        assert kinds.split()[:2] == ["rank", "parameters"] and kinds.endswith("total")
        assert phases.split("  ")[-1] == "peak at" and "in backward" in phases
        assert max(map(len, str(steps[1]).splitlines())) <= 120
    moments = sum(steps[1].ranks[0].highest["optimizer state"] for steps, *_ in results)
    copies = 2 * (size if backend == "ddp" else 1)  # Adam's, of which all but DDP keep each number on one rank
    assert copies * WHOLE <= moments <= copies * WHOLE + 2 * PADDING * size


def test_a_plain_module_and_what_ends_in_an_exception() -> None:
    model = nn.Linear(8, 8, bias=False)
    resize = torch.UntypedStorage.resize_
    memory = fsshard.MemoryTracker(model)
    assert "no step" in str(memory)
    with pytest.raises(ZeroDivisionError), memory:
        raise ZeroDivisionError
    assert memory.highest is None and torch.UntypedStorage.resize_ is resize
    with memory:
        model(torch.ones(2, 8)).sum().backward()
        with pytest.raises(fsshard.ConfigurationError, match="already active"), memory:
            pass
    report = memory.report()
    assert report.backend == "" and report.ranks[0].by_kind["parameters"] == 8 * 8 * 4
    assert report.ranks[0].highest["gradients"] == 8 * 8 * 4 and str(memory) == str(report)


def test_a_folder_for_tensorboard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, made = nn.Linear(8, 8, bias=False), mock.MagicMock()
    monkeypatch.setattr(sys.modules[fsshard.MemoryTracker.__module__], "summary_writer", lambda: made)
    memory = fsshard.MemoryTracker(model, writer=tmp_path)
    assert not made.called, "a tracker that is never entered writes nothing"
    with memory:
        model(torch.ones(2, 8))
    made.assert_called_once_with(str(tmp_path / "rank0"))
    assert made.return_value.close.called
    assert mock.call("memory/rank0/parameters", 8 * 8 * 4, 0) in made.return_value.add_scalar.mock_calls
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(fsshard.MissingExtra, match=r"pip install 'fsshard\[tensorboard\]'"):
        fsshard.MemoryTracker(model, writer=str(tmp_path))


# ------------------------------------------------------------------------------------------------ explain()

KINDS = {
    "ddp": {"all_reduce"},
    "fairscale": {"all_to_all", "broadcast"},
    "fsdp": {"all_gather", "all_to_all"},
    "fsdp2": {"all_gather", "reduce_scatter", "broadcast", "all_to_all"},  # the latter in place of them, on gloo
}
"""Names of the collectives that carry parameters and gradients; others agree on flags."""
CASES: list[tuple[str, dict[str, Any]]] = [
    *((backend, settings) for backend in DISTRIBUTED for settings in ({}, {"mixed_precision": "bf16"})),
    ("fsdp", {"sharding_strategy": "SHARD_GRAD_OP"}),
    ("fsdp2", {"reshard_after_forward": False}),
    ("fsdp2", {"reshard_after_forward": True}),
    ("fsdp2", {"merge_below": 2**20}),
]


def job_costs(backend: str, settings: dict[str, Any]) -> tuple[float, float, int, int, str]:
    """Bytes to send as told and as a real step sends them; bytes held as told and as they are; what is printed."""
    model, optimizer = with_sgd(net(), backend=backend, **settings)
    text = model.explain() if dist.get_rank() == 0 else ""  # local: the others take no part
    costs = [unit_cost(model.backend, unit) for unit in model.plan.units]
    told = sum(sent(payload.kind, payload.nbytes, payload.ranks) for cost in costs for payload in cost.payloads)
    with Tracker() as tracker:
        model(batch(0)).float().square().mean().backward()
        optimizer.step()
    seen = [c for c in tracker.collectives if c.kind in KINDS[backend]]
    held = model.memory_report().ranks[0].by_kind["parameters"]
    really = sum(sent(c.kind, c.nbytes, len(c.members)) for c in seen)
    return told, really, sum(cost.held for cost in costs), held, text


@pytest.mark.parametrize(("backend", "settings"), CASES, ids=lambda value: str(value).strip("{}"))
def test_costs_are_those_of_a_real_step(ranks: Any, backend: str, settings: dict[str, Any]) -> None:
    results = ranks.run(job_costs, 2, backend, settings)
    text = results[0][-1]
    # Beside gradients, a byte per parameter says whether a backward has reached it.
    begins = ALIGNMENT * len(list(net().parameters())) if backend == "fairscale" else 0
    more = begins + len(list(net().parameters())) if backend == "fairscale" else 0
    for told, really, held, holds, _ in results:
        assert 0 < told <= really <= told + 2 * more and held <= holds <= held + begins
    if not settings and backend in EXPLAINED:
        assert text == EXPLAINED[backend]
    assert max(map(len, text.splitlines())) <= 120


EXPLAINED = {
    "fsdp": """\
backend 'fsdp' on 2 ranks, device cpu
3 units, 8 parameters (0 frozen), 772 B
unit        bytes  dtypes             on a rank   gathered   sent  bound  ratio  why
(root)      148 B  float32                 88 B  1 x 176 B  176 B  148 B   1.19  1
  middle.0  312 B  complex64+float32      160 B  2 x 320 B  480 B  468 B   1.03  2
  middle.1  312 B  complex64+float32      160 B  2 x 320 B  480 B  468 B   1.03  2
why 1: the root: everything else
why 2: owns complex weights; float32 unit
a rank holds 408 B of parameters (bound 386 B, ratio 1.06), the largest unit has 320 B while it is gathered
a rank sends 1.11 KiB per step (bound 1002 B, ratio 1.13)"""
}
"""FSDP2's table depends on whether it pads complex weights too."""


class Estimate:
    """Stands for one."""

    def __init__(self, world_size: int, parameters: int) -> None:
        self.name, self.backend, self.mesh, self.parameters, self.units = "Net", "ddp", (world_size,), parameters, 3

    def __str__(self) -> str:
        return "Net, rank 0 needs 4.00 KiB"


def job_with_estimate(world_size: int, parameters: int) -> str:
    return fsshard.wrap(net(), backend="ddp").explain(Estimate(world_size, parameters))


def test_an_estimate_stands_below(ranks: Any) -> None:
    assert ranks.run(job_with_estimate, 2, 2, WHOLE)[0].endswith("\n\nNet, rank 0 needs 4.00 KiB")
    (error, *_) = ranks.run_expecting_errors(job_with_estimate, 2, 4, WHOLE + 4)
    assert isinstance(error, fsshard.ConfigurationError)
    ours, theirs = str(error).split(", got Net with ")
    assert f"'mesh': (2,), 'bytes of parameters': {WHOLE}" in ours
    assert f"'mesh': (4,), 'bytes of parameters': {WHOLE + 4}" in theirs
    assert "give fsshard.estimate the settings of fsshard.wrap" in str(error)


@on_ranks(1)
def test_one_rank_sends_nothing() -> None:
    text = fsshard.wrap(net(), backend="none").explain()
    assert text.startswith("backend 'none' on 1 rank, device cpu\n3 units") and "sent" not in text
