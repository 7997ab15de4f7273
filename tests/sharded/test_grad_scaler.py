"""Gradients: their norm over the original numbers, and GradScaler, by which all ranks take a step, or none does.

Tests fsshard/sharded/grad_norm.py too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import fsshard
from fsshard.backends.whole import gather_grads
from fsshard.errors import OptimizerError, RankMismatch
from fsshard.launching.pool import RankPool
from tests.models import batch, net, with_sgd
from tests.on_ranks import on_backends, on_ranks
from tests.optimizers import average
from tests.sharded.training import ALL
from tests.training_runs import DISTRIBUTED, lost_by_saving, ranks_of


def weights(model: fsshard.ShardedModule) -> torch.Tensor:
    """All weights in one tensor."""
    values = [value for key, value in model.state_dict().items() if key != "steps"]
    return torch.cat([(torch.view_as_real(v) if v.is_complex() else v).reshape(-1) for v in values])


def job_overflow(backend: str, where: int, explicit: bool) -> list[Any]:
    """Three steps, the second with an infinite loss on rank ``where``: scales, and whether weights moved."""
    torch.manual_seed(0)
    few = nn.Linear(4, 1, bias=False)  # of one parameter ranks hold nothing, or own nothing
    model = fsshard.wrap(net() if explicit else few, backend=backend)
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    scaler = fsshard.GradScaler(model, init_scale=1024.0, growth_interval=2)
    found = []
    for step in range(4):
        before = weights(model)
        loss = model(batch(step)).square().mean()
        if step == 1 and dist.get_rank() == where:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if explicit:
            scaler.unscale_(optimizer)
            model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append((scaler.get_scale(), not torch.equal(before, weights(model))))
    return [*found, weights(model)]


@pytest.mark.covering
@pytest.mark.parametrize("explicit", [False, True], ids=["one parameter", "clipped"])
@pytest.mark.parametrize("backend", ALL)
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: RankPool, backend: str, explicit: bool) -> None:
    where = ranks_of(backend) - 1
    results = ranks.run(job_overflow, ranks_of(backend), backend, where, explicit)
    for *found, values in results:
        assert found == [(1024.0, True), (512.0, False), (512.0, True), (1024.0, True)]
        assert torch.equal(values, results[0][-1]) and torch.isfinite(values).all()


@on_backends(ALL)
def test_several_optimizers(backend: str) -> None:
    """The gradients of one optimizer overflow: it skips, the other steps, the scale falls once."""
    model = fsshard.wrap(net(), backend=backend)
    names = [name for name, _ in model.named_parameters()]
    one = fsshard.build_optimizer(model, torch.optim.SGD, names[:3], lr=0.1)
    two = fsshard.build_optimizer(model, torch.optim.SGD, names[3:], lr=0.1)
    scaler = fsshard.GradScaler(model, init_scale=64.0)
    before = model.state_dict()
    loss = model(batch(0)).square().mean()
    scaler.scale(loss).backward()
    one.finish_gradients()
    for gradient in one.local_gradients() if dist.get_rank() == 0 else []:
        gradient.fill_(float("nan"))
    scaler.step(one)
    scaler.step(two)
    scaler.update()
    after = model.state_dict()
    moved = [not torch.equal(before[name], after[name]) for name in names]
    result = [any(moved[:3]), all(moved[3:]), scaler.get_scale()]
    assert result == [False, True, 32.0]


# ------------------------------------------------------------------------------------------------ misuse


@pytest.mark.parametrize(("backend", "how"), [("ddp", "made"), ("fsdp2", "loaded"), ("fairscale", "loaded")])
@on_ranks()
def test_other_scales_on_other_ranks_are_told_of_on_all(backend: str, how: str) -> None:
    """Rank 0 scales by another number; whether the weights stayed."""
    model, optimizer = with_sgd(net(), backend=backend, mixed_precision="fp16")
    first = dist.get_rank() == 0
    scaler = fsshard.GradScaler(model, init_scale=8.0 if first and how == "made" else 1024.0)
    if first and how == "loaded":
        scaler.load_state_dict({**scaler.state_dict(), "scale": 4.0})
    before = weights(model)
    scaler.scale(model(batch(0)).float().mean()).backward()
    with pytest.raises(RankMismatch, match=r"scales differ, from (8|4)\.0 to 1024\.0"):
        scaler.step(optimizer)
    assert torch.equal(before, weights(model))


@on_backends(ALL)
def test_torchs_own_scaler_is_refused_where_ranks_could_disagree(backend: str) -> None:
    model, optimizer = with_sgd(net(), backend=backend)
    scaler = torch.amp.GradScaler("cpu")
    loss = model(batch(0)).square().mean()
    if dist.get_rank() == 0:
        loss = loss * float("inf")
    scaler.scale(loss).backward()
    if backend in ("none", "ddp"):
        scaler.step(optimizer)
    else:
        with pytest.raises(OptimizerError, match=r"use fsshard\.GradScaler\(model\)"):
            scaler.step(optimizer)


@on_backends(DISTRIBUTED)
def test_torchs_sharded_scaler_is_taken(backend: str) -> None:
    """FSDP's own scaler asks all ranks too: an infinite loss on rank 1, then a step."""
    model, optimizer = with_sgd(net(), backend=backend)
    scaler = ShardedGradScaler("cpu", init_scale=64.0)
    found = []
    for step in range(2):
        before = weights(model)
        loss = model(batch(step)).square().mean()
        scaler.scale(loss * (float("inf") if step == 0 and dist.get_rank() == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found += [scaler.get_scale(), torch.equal(before, weights(model))]
    assert found == [32.0, True, 32.0, False]


# ------------------------------------------------------------------------------------------------ the norm


def job_norm(backend: str, norm_type: float) -> tuple[float, float]:
    model, optimizer = with_sgd(net(), backend=backend)
    model(batch(0)).square().mean().backward()
    ours = float(model.clip_grad_norm_(0.01, norm_type))
    optimizer.step()
    native = net()
    whole = torch.cat([batch_of(rank) for rank in range(dist.get_world_size())])
    native(whole).square().mean().backward()
    return ours, float(torch.nn.utils.clip_grad_norm_(native.parameters(), 0.01, norm_type))


def batch_of(rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))


@pytest.mark.covering
@pytest.mark.parametrize("norm_type", [0.5, 1.0, 2.0, float("inf")])
@pytest.mark.parametrize("backend", ALL)
def test_norm_counts_complex_numbers(ranks: Any, backend: str, norm_type: float) -> None:
    """The value of torch's own function on the unsharded model with native complex weights.

    1e-5: torch sums in float32 over some hundred numbers, and 0.5 takes the square of a sum.
    """
    ours = ranks.run(job_norm, ranks_of(backend), backend, norm_type)
    assert len({value for value, _ in ours}) == 1
    assert ours[0][0] == pytest.approx(ours[0][1], rel=1e-5)


class Wide(nn.Module):
    """float64 and complex128."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 5, dtype=torch.float64), nn.Linear(3, 1, dtype=torch.float64)
        self.weight = nn.Parameter(torch.randn(5, 3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return self.last((torch.tanh(self.first(x)) * (1 + 0.5j) @ self.weight).abs())


NEAR = 8 * torch.finfo(torch.float64).eps
"""Another order of the same sums in float64."""


@on_ranks()
def test_the_norm_of_float64_gradients_is_float64() -> None:
    wrong = []
    x = batch(0).double()
    for backend in DISTRIBUTED:
        for p in (2.0, 3.0, float("inf")):
            bare = Wide()
            bare(x).square().mean().backward()
            average(bare)
            want = torch.nn.utils.clip_grad_norm_(bare.parameters(), 0.01, p)
            model = fsshard.wrap(Wide(), backend=backend)
            optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
            model(x).square().mean().backward()
            norm = model.clip_grad_norm_(0.01, p)
            clipped = {e.name: e.kind.to_user(g) for e, g in gather_grads(model.backend) if g is not None}
            apart = max(float((clipped[n] - q.grad).abs().max()) for n, q in bare.named_parameters())
            if norm.dtype != want.dtype or abs(norm - want) > NEAR * want or apart > 0.01 * NEAR:
                wrong.append(f"{backend} {p}: {norm} ({norm.dtype}) for {want}, {apart}")
        optimizer.step()  # by the last
        torch.optim.SGD(bare.parameters(), lr=0.1, momentum=0.9).step()
        state = model.state_dict()
        apart = max(float((state[name] - value).detach().abs().max()) for name, value in bare.named_parameters())
        if apart > 0.01 * NEAR or {v.dtype for v in state.values()} != {torch.float64, torch.complex128}:
            wrong.append(f"{backend}: weights {apart}")
        wrong += lost_by_saving(model, optimizer, Wide, torch.optim.SGD, lr=0.1, momentum=0.9)
    assert not wrong
