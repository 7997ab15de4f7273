"""Precision(send=...): weights that are sent narrower than they compute, judged by replicas that round by hand.

Tests fsshard/comm/narrow_gather.py too.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call

import fsshard
from fsshard.errors import PrecisionError, UnsupportedByBackend
from fsshard.launching.pool import RankPool
from tests.forked import forking
from tests.models import Spectral, take_step
from tests.on_ranks import on_ranks
from tests.training_runs import check_equal

BACKENDS = ("ddp", "fsdp2", "fairscale")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
STEPS = 3


class Operator(nn.Module):
    """Complex weights beside real ones, with an odd number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(6, 10)
        self.blocks = nn.ModuleList([Spectral(10), Spectral(10)])
        self.out = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for block in self.blocks:
            x = x + block(x).real
        return self.out(x)


def operator() -> Operator:
    """Return the same weights at every call."""
    torch.manual_seed(0)
    return Operator()


def batch(rank: int, number: int) -> Tensor:
    """Return what a rank trains on."""
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + rank))


def as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor's numbers, to the nearest of ``dtype``."""
    near = as_real(tensor).to(dtype).to(torch.float32)
    return torch.view_as_complex(near) if tensor.is_complex() else near


def added(parts: list[Tensor]) -> Tensor:
    """Return the sum in an aligned tree."""
    while len(parts) > 1:
        parts = [first + second for first, second in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def by_hand(
    ranks: int, dtype: torch.dtype, micro_batches: int = 1, send: bool = True
) -> tuple[list[float], dict[str, Tensor]]:
    """Train bare replicas, in one process: rank 0's losses, and the weights at the end.

    Each replica's micro-batches are added in float32, and the sum is rounded once; with ``send`` weights are, too.
    """
    model = operator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for number in range(STEPS):
        gradients = {}
        for rank in range(ranks):
            near = {}
            for name, weight in model.named_parameters():
                near[name] = (rounded(weight.detach(), dtype) if send else weight.detach().clone()).requires_grad_()
            for micro_batch in range(micro_batches):
                loss = functional_call(model, near, batch(rank, number + 100 * micro_batch)).square().mean()
                if not rank:
                    losses.append(loss.item())
                loss.backward()
            for name, weight in near.items():
                assert weight.grad is not None
                gradients.setdefault(name, []).append(as_real(weight.grad).to(dtype) / ranks)
        for name, weight in model.named_parameters():
            mean = added(gradients[name]).to(torch.float32)
            weight.grad = torch.view_as_complex(mean) if weight.is_complex() else mean
        optimizer.step()
    return losses, dict(model.state_dict())


def job_trained(
    backend: str, precision: dict[str, torch.dtype], extra: dict[str, Any], micro_batches: int = 1
) -> tuple[list[float], dict[str, Tensor], float]:
    """Train under an engine; return losses, weights, and a loss of whole parameters."""
    if "mesh" in extra:
        mesh = init_device_mesh("cpu", extra["mesh"], mesh_dim_names=("replicate", "shard"))
        extra = {"device_mesh": mesh}
    model = fsshard.wrap(operator(), backend=backend, mixed_precision=fsshard.Precision(**precision), **extra)
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    rank = torch.distributed.get_rank()
    losses = []
    for number in range(STEPS):
        for micro_batch in range(micro_batches):
            is_last = micro_batch == micro_batches - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = model(batch(rank, number + 100 * micro_batch)).square().mean()
                losses.append(loss.item())
                loss.backward()
        take_step(optimizer)
    with torch.no_grad():
        after = model(batch(rank, 0)).square().mean().item()
        with model.full_parameters():
            assert model.module(batch(rank, 0)).square().mean().item() == after, "whole weights are rounded, too"
    return losses, model.state_dict(), after


CASES = [
    *[(ranks, backend, "send", dtype, 1, {}) for ranks, dtype in ((2, "fp16"), (4, "bf16")) for backend in BACKENDS],
    *[(1, backend, field, "bf16", 3, {}) for field in ("send", "reduce") for backend in (*BACKENDS, "none")],
    *[(2, backend, field, "bf16", 3, {}) for field in ("send", "reduce") for backend in BACKENDS],
    *[(4, each, field, "bf16", 3, {"mesh": (2, 2)}) for field in ("send", "reduce") for each in ("fsdp2", "fairscale")],
]


@pytest.mark.parametrize(("ranks_", "backend", "field", "dtype", "micro_batches", "extra"), CASES)
def test_as_replicas_that_round_by_hand(
    ranks: RankPool, ranks_: int, backend: str, field: str, dtype: str, micro_batches: int, extra: dict[str, Any]
) -> None:
    narrow = DTYPES[dtype]
    losses, weights = by_hand(ranks_, narrow, micro_batches, send=field == "send")
    (first, state, _), *_ = ranks.run(job_trained, ranks_, backend, {field: narrow}, extra, micro_batches)
    assert first == losses
    for name, weight in weights.items():
        assert torch.equal(state[name], weight), name
    kept = as_real(state["blocks.0.weight"])
    assert not torch.equal(kept, kept.to(narrow).float()), "the optimizer's weights are not rounded"


@pytest.mark.parametrize(
    "extra",
    [{"activation_checkpointing": {"Spectral"}}, {"auto_wrap_policy": {nn.Linear, Spectral}}],
    ids=["recomputed", "many units"],
)
def test_engines_agree_on_other_plans(ranks: RankPool, extra: dict[str, Any]) -> None:
    results = [ranks.run(job_trained, 2, backend, {"send": torch.bfloat16}, extra)[0] for backend in BACKENDS]
    for losses, state, after in results[1:]:
        assert (losses, after) == (results[0][0], results[0][2])
        check_equal(dict(results[0][1]), dict(state))


@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
def test_half_the_bytes_are_sent(backend: str) -> None:
    with forking():
        sent = []
        for precision in (None, fsshard.Precision(send=torch.bfloat16)):
            arguments = {"batch": torch.ones(4, 64), "backend": backend, "world_size": 4}
            if backend == "fsdp2":
                arguments["merge_below"] = 0
            model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
            one = fsshard.estimate(model, mixed_precision=precision, auto_wrap_policy={nn.Linear}, **arguments)
            assert one.sent >= one.bounds.sent - 1
            sent.append(one.sent)
    assert sent[1] == pytest.approx(sent[0] / 2, rel=0.01)


@on_ranks()
def test_fsdp1_says_what_to_use() -> None:
    arguments = {"mixed_precision": fsshard.Precision(send=torch.bfloat16)}
    with pytest.raises(UnsupportedByBackend, match="use backend='fsdp2'; or Precision"):
        fsshard.wrap(operator(), backend="fsdp", **arguments)
    fsshard.wrap(operator(), backend="fsdp2", **arguments)
    fsshard.wrap(operator(), backend="fsdp", mixed_precision=fsshard.Precision(reduce=torch.bfloat16))


def test_the_plan_says_so_and_narrow_units_are_sent_as_they_compute() -> None:
    plan = fsshard.plan(operator(), mixed_precision=fsshard.Precision(param=torch.float16, send=torch.bfloat16))
    sent = {unit.name: unit.send for unit in plan.units}
    assert sent == {"": None, "blocks.0": torch.bfloat16, "blocks.1": torch.bfloat16}
    assert "float32 units compute with weights rounded to bfloat16" in plan.explain()
    with pytest.raises(PrecisionError, match=r"Precision\(send=...\): expected a floating-point dtype"):
        fsshard.Precision(send=torch.int8)
