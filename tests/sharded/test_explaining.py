"""What ``model.explain()`` says that units cost: the bytes that a real step sends, and what the ranks hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsshard
from fsshard.backends.cost import unit_cost
from fsshard.planning.bounds import sent
from fsshard.simulation.tracking import Tracker
from tests.models import batch, net
from tests.training_runs import DISTRIBUTED

KINDS = {
    "ddp": {"all_reduce"},
    "fairscale": {"all_to_all", "broadcast"},
    "fsdp": {"all_gather", "reduce_scatter"},
    "fsdp2": {"all_gather", "reduce_scatter", "broadcast", "all_to_all"},  # the latter in place of them, on gloo
}
"""Of the collectives that carry parameters and gradients; others agree on flags."""
CASES: list[tuple[str, dict[str, Any]]] = [
    *((backend, settings) for backend in DISTRIBUTED for settings in ({}, {"mixed_precision": "bf16"})),
    ("fsdp", {"sharding_strategy": "SHARD_GRAD_OP"}),
    ("fsdp2", {"reshard_after_forward": False}),
    ("fsdp2", {"reshard_after_forward": True}),
    ("fsdp2", {"merge_below": 2**20}),
]


def job_costs(backend: str, settings: dict[str, Any]) -> tuple[float, float, int, int, str]:
    """Bytes to send as told and as a real step sends them; bytes held as told and as they are; what is printed."""
    model = fsshard.wrap(net(), backend=backend, **settings)
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    text = model.explain() if dist.get_rank() == 0 else ""  # local: the others take no part
    costs = [unit_cost(model.backend, unit) for unit in model.plan.units]
    told = sum(sent(payload.kind, payload.nbytes, payload.ranks) for cost in costs for payload in cost.payloads)
    with Tracker() as tracker:
        model(batch(0)).float().square().mean().backward()
        optimizer.step()
    seen = [c for c in tracker.collectives if c.kind in KINDS[backend]]
    held = model.memory_report().ranks[0].by_kind["parameters"]
    really = sum(sent(c.kind, c.nbytes, c.ranks) for c in seen)
    return told, really, sum(cost.held for cost in costs), held, text


@pytest.mark.parametrize(("backend", "settings"), CASES, ids=lambda value: str(value).strip("{}"))
def test_costs_are_those_of_a_real_step(ranks: Any, backend: str, settings: dict[str, Any]) -> None:
    results = ranks.run(job_costs, 2, backend, settings)
    text = results[0][-1]
    # Beside gradients, a byte per parameter says whether a backward has reached it; parts begin at 16 bytes.
    more = 17 * len(list(net().parameters())) if backend == "fairscale" else 0
    for told, really, held, holds, _ in results:
        assert 0 < told <= really <= told + more and held == holds
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
a rank sends 1.11 KiB per step (bound 1002 B, ratio 1.13)""",
}
"""FSDP2's table depends on whether it pads complex weights too."""


def job_with_estimate(world_size: int, parameters: int) -> str:
    """With an estimate made up here."""
    from fsshard.planning.bounds import Bounds
    from fsshard.simulation.result import Estimate
    from fsshard.simulation.tracking import Moment

    estimate = Estimate(
        name="Net",
        backend="ddp",
        world_size=world_size,
        mesh=(world_size,),
        device="cpu",
        rank=0,
        optimizer="SGD()",
        parameters=parameters,
        units=3,
        peak=4096,
        interval=(4096, 4096),
        by_kind={"parameters": 4096},
        highest={"parameters": 4096},
        phases={},
        moment=Moment("backward", "last", "aten::mm"),
        collectives=(),
        bounds=Bounds(peak=2048, by_kind={"parameters": 4096}),
    )
    return fsshard.wrap(net(), backend="ddp").explain(estimate)


def test_an_estimate_stands_below(ranks: Any) -> None:
    size = sum(p.numel() * p.element_size() for p in net().parameters())
    shown = ranks.run(job_with_estimate, 2, 2, size)[0]
    assert "\n\nNet, backend 'ddp' on 2 ranks, for cpu: rank 0 needs 4.00 KiB\n" in shown
    (error, *_) = ranks.run_expecting_errors(job_with_estimate, 2, 4, size + 4)
    assert isinstance(error, fsshard.ConfigurationError)
    assert "mesh (4,), not (2,)" in str(error) and f"bytes of parameters {size + 4}, not {size}" in str(error)


def job_alone() -> str:
    return fsshard.wrap(net(), backend="none").explain()


def test_one_rank_sends_nothing(ranks: Any) -> None:
    (text,) = ranks.run(job_alone, 1)
    assert text.startswith("backend 'none' on 1 rank, device cpu\n3 units") and "sent" not in text
