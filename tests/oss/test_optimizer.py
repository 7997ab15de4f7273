"""OSS: the weights and the state of the plain optimizer, to the last bit, and what FairScale's users do with it.

Tests fsshard/oss/norm_and_scaling.py, fsshard/oss/partition.py too.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsshard.oss.optimizer import OSS
from tests.on_ranks import on_ranks
from tests.oss.trainings import (
    OPTIMIZERS,
    batches,
    both,
    build,
    clip,
    ddp,
    fill,
    mlp,
    refusal,
    same,
    step,
    two_groups,
    weights,
    whole_state,
)

# ------------------------------------------------------------------------------------------------ parity


def train(kind: str, name: str, grouped: bool) -> Any:
    cls, settings = OPTIMIZERS[name]
    model = ddp(mlp())
    optimizer = build(
        kind, two_groups(model) if grouped else model.parameters(), getattr(torch.optim, cls), **copy.deepcopy(settings)
    )
    for batch in batches(4):
        step(model, optimizer, batch)
    return weights(model), whole_state(optimizer)


@pytest.mark.parametrize(
    ("world_size", "grouped"),
    [(2, True), *(pytest.param(*row, marks=pytest.mark.long) for row in ((2, False), (3, False), (3, True)))],
)
@on_ranks()
def test_every_optimizer_computes_what_the_plain_one_does(world_size: int, grouped: bool) -> None:
    assert [name for name in OPTIMIZERS if not both(train, name, grouped)] == []


def clipped(kind: str, norm_type: float, limit: float) -> Any:
    model = ddp(mlp())
    optimizer = build(kind, model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    norms = []
    for batch in batches(3):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        norms.append(clip(optimizer, model, limit, norm_type))
        optimizer.step()
    return norms, weights(model), [p.grad for p in model.parameters()]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_norms_and_clipped_gradients_are_those_of_torch(world_size: int) -> None:
    cases = [(norm_type, limit) for norm_type in (1, 1.0, 2, 3.0, math.inf) for limit in (0.01, 100)]
    assert [case for case in cases if not both(clipped, *case)] == []


@on_ranks()
def test_a_filter_chooses_what_counts_and_all_are_scaled() -> None:
    model = mlp()
    optimizer = OSS(model.parameters(), lr=0.1)
    fill(model, 2.0)
    want = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.ndim > 1])
    got = optimizer.clip_grad_norm(1.0, filter_params_fn=lambda own: (p for p in own if p.ndim > 1))
    assert torch.equal(got, want)
    assert all(bool((p.grad < 2.0).all()) for p in model.parameters() if p.grad is not None)

    def fails_on_rank_1(own: list[Tensor]) -> list[Tensor]:
        if dist.get_rank() == 1:
            raise KeyError("mine")
        return own

    kind, text = refusal(lambda: optimizer.clip_grad_norm(1.0, filter_params_fn=fails_on_rank_1))
    assert kind == ("KeyError" if dist.get_rank() == 1 else "RankMismatch") and "mine" in text


# ------------------------------------------------------------------------------------------------ partition and buffers


@on_ranks()
def test_parameters_are_spread_by_size_and_owners_stay() -> None:
    parameters = [nn.Parameter(torch.rand(size, 1)) for size in (9, 7, 5, 3) * dist.get_world_size()]
    optimizer = OSS(parameters[:-1], lr=0.1)
    before = dict(optimizer._param_to_rank)
    optimizer.add_param_group({"params": [parameters[-1]]})
    sizes = [sum(p.numel() for g in groups for p in g["params"]) for groups in optimizer.partition_parameters()]
    assert sizes == [24, 24] and all(optimizer._param_to_rank[p] == owner for p, owner in before.items())
    assert sum(p.numel() for g in optimizer.optim.param_groups for p in g["params"]) == 24
    assert len(optimizer.param_groups) == len(optimizer.optim.param_groups) == 2
    mixed = [nn.Parameter(torch.rand(size), requires_grad=size < 50) for size in (100, 3, 5, 2, 6, 4)]
    optimizer = OSS(mixed, lr=0.1)
    assert [optimizer._param_to_rank[p] for p in mixed] == [0, 1, 0, 1, 1, 0]  # a frozen one counts one element


class Layouts(nn.Module):
    """Complex behind odd, channels last, a scalar, an empty one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.odd = nn.Parameter(torch.randn(3))
        self.pairs = nn.Parameter(torch.randn(5, 2))
        self.spectral = nn.Parameter(torch.randn(3, 3, dtype=torch.complex64))
        self.image = nn.Parameter(torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last))
        self.transposed = nn.Parameter(torch.randn(4, 6).t())
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.zeros(0))


@on_ranks()
def test_parameters_become_views_of_buffers_and_keep_values_and_strides() -> None:
    model, reference = Layouts(), Layouts()
    optimizer = OSS(model.parameters(), lr=0.1)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q) and p.stride() == q.stride()
    torch.view_as_complex(model.pairs.detach())
    buckets = optimizer.buckets[torch.device("cpu")]
    size = sum(buffer.nbytes for bucket in buckets.values() for buffer in bucket.buffers.values())
    assert sorted(buckets) == [0, 1] and size == sum(-(-p.nbytes // 64) * 64 for p in model.parameters())
    assert all(p.data_ptr() % 64 == 0 for p in model.parameters() if p.numel())


def moved(kind: str, change: str) -> Any:
    """Weights are kept by reference while training goes on in other memory."""
    model = mlp()
    optimizer = build(kind, model.parameters(), torch.optim.SGD, lr=0.1)
    kept, other = [p.data for p in model.parameters()], mlp(5)
    for late in (False, True):
        if late and change == "double":
            model.double()
        elif late and change == "load":
            model.load_state_dict(other.state_dict())
        elif late:
            for p, value in zip(model.parameters(), other.parameters(), strict=True):
                p.data = value.data if change == "exchange" else p.data * 2
        fill(model)
        optimizer.step()
    return weights(model), kept if change != "load" else []


@on_ranks()
def test_parameters_whose_memory_was_replaced_are_sent_as_they_are_now_and_the_old_is_not_written_to() -> None:
    assert [change for change in ("double", "data", "load", "exchange") if not both(moved, change)] == []


@on_ranks(3)
def test_a_group_whose_ranks_are_not_the_global_ones() -> None:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    model, reference = mlp(), mlp()
    optimizer = OSS(model.parameters(), lr=0.1, momentum=0.9, group=group)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            q.grad = q.detach().clone()
            p.grad = q.grad.clone() if optimizer._param_to_rank[p] == optimizer.rank else None
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        assert torch.equal(optimizer.clip_grad_norm(0.5), norm)
        optimizer.step()
        plain.step()
    assert same(weights(model), weights(reference))
    assert same(optimizer.state_dict(all_ranks=True), plain.state_dict())
    optimizer.consolidate_state_dict(recipient_rank=1)
    assert (optimizer._shards is not None) == (optimizer.rank == 1)
    assert (optimizer.rank + 1, optimizer.world_size, optimizer.backend) == (optimizer.global_rank, 2, "gloo")


@on_ranks(3)
def test_ranks_that_own_nothing() -> None:
    model = nn.Linear(3, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = OSS(model.parameters(), optim=torch.optim.AdamW, lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    assert float(optimizer.clip_grad_norm(1.0)) == pytest.approx(math.sqrt(12))
    optimizer.step()
    assert len(optimizer.optim.param_groups[0]["params"]) == (dist.get_rank() == 0)
    assert model.weight.tolist() == [[pytest.approx(0.899, rel=1e-3)] * 3]


# ------------------------------------------------------------------------------------------------ what a step does


class Remembering(torch.optim.SGD):
    """Takes a keyword, and leaves something in its groups."""

    def step(self, closure: Any = None, seen: list[int] | None = None) -> Any:
        loss = super().step(closure if callable(closure) else None)
        if seen is not None:
            seen.append(5)
        self.param_groups[0]["left"] = 0.1
        return loss


class Bare(torch.optim.SGD):
    """Has a step without arguments."""

    def step(self) -> Any:
        return super().step()


@on_ranks(1)
def test_keywords_reach_the_optimizer_and_its_settings_come_back() -> None:
    seen = []
    for cls, args, kwargs in ((Remembering, (0,), {"seen": seen}), (Bare, (), {})):
        weight = torch.tensor([1.0], requires_grad=True)
        optimizer = OSS([weight], cls, lr=0.1)
        weight.backward()
        optimizer.step(*args, **kwargs)
        assert weight.tolist() == [pytest.approx(0.9)]
        assert cls is Bare or optimizer.param_groups[0]["left"] == 0.1
    assert seen == [5]


def closured(kind: str) -> Any:
    model = ddp(mlp())
    optimizer = build(kind, model.parameters(), torch.optim.RMSprop, lr=0.01)
    losses = []
    for batch in batches(3):

        def closure(batch: Tensor = batch) -> Tensor:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            return loss

        losses.append(optimizer.step(closure=closure).detach())
    return losses, weights(model)


@on_ranks()
def test_a_closure_is_called_and_its_loss_returned() -> None:
    assert both(closured)


@on_ranks()
def test_named_parameters() -> None:
    model, reference = mlp(), mlp()
    optimizer = OSS(model.named_parameters(), torch.optim.AdamW, lr=0.01, weight_decay=0.3)
    plain = torch.optim.AdamW(reference.named_parameters(), lr=0.01, weight_decay=0.3)
    for _ in range(2):
        fill(model)
        fill(reference)
        optimizer.step()
        plain.step()
    assert same(weights(model), weights(reference)) and same(whole_state(optimizer), plain.state_dict())
    own = [name for name, p in model.named_parameters() if optimizer._param_to_rank[p] == optimizer.rank]
    assert [name for group in optimizer.optim.param_groups for name in group["param_names"]] == own


class Sparse(nn.Module):
    """An embedding with sparse gradients behind a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 8, sparse=True)
        self.layer = nn.Linear(8, 3)

    def forward(self, batch: Tensor) -> Tensor:
        return self.layer(self.embedding((batch[:, 0].abs() * 7).long() % 20))


def sparse(kind: str) -> Any:
    model = ddp(Sparse())
    optimizer = build(kind, model.parameters(), torch.optim.SGD, lr=0.1)
    for batch in batches(3):
        step(model, optimizer, batch)
    return weights(model)


@on_ranks()
def test_sparse_gradients() -> None:
    assert both(sparse)
    model = Sparse()
    optimizer = OSS(model.parameters(), lr=0.1)
    model(torch.ones(3, 8)).sum().backward()
    before = [p.grad.clone() for p in model.parameters()]
    want = nn.utils.get_total_norm([g.coalesce().values() if g.is_sparse else g for g in before])
    assert torch.equal(optimizer.clip_grad_norm(0.5), want)
    scaled = [(g * (0.5 / (want + 1e-6))).to_dense() for g in before]
    assert same([p.grad.to_dense() for p in model.parameters()], scaled)


def toggled(kind: str) -> Any:
    """The first parameter is frozen and unfrozen in turn, in a model of two groups that overlap the model's order."""
    model = mlp()
    parameters = list(model.parameters())
    groups = [{"params": parameters[:-3] + parameters[-1:], "lr": 1e-2}, {"params": parameters[-3:-1], "lr": 1e-1}]
    optimizer = build(kind, groups, torch.optim.SGD, lr=1e-2, momentum=0.9)
    for batch in batches(6):
        step(ddp(model), optimizer, batch, set_to_none=False)
        parameters[0].requires_grad = not parameters[0].requires_grad
    return weights(model), whole_state(optimizer)


@on_ranks()
def test_parameters_that_are_frozen_and_unfrozen_in_turn() -> None:
    assert both(toggled)


# ------------------------------------------------------------------------------------------------ loss scaling


class Stepping(OSS):
    """A subclass whose step takes no scaler."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


@pytest.mark.parametrize("kind", [OSS, Stepping])
@on_ranks()
def test_a_rank_without_gradients_takes_part(kind: Any) -> None:
    """It owns nothing; and gradients are unscaled for a step that takes no scaler, too."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = kind([parameter], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    if dist.get_rank() == 0 or kind is Stepping:
        parameter.grad = torch.full((3,), 2.0)
    scaler.step(optimizer)
    scaler.update()
    assert parameter.tolist() == [0.5] * 3
