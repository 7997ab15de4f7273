"""OSS: the weights and the state of the plain optimizer, to the last bit, and what FairScale's users do with it.

Tests fsshard/oss/gradient_norm.py, fsshard/oss/partitioned.py too.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsshard.oss.optimizer import OSS
from tests.oss.trainings import (
    OPTIMIZERS,
    batches,
    both,
    build,
    ddp,
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


def job_every_optimizer(grouped: bool) -> list[str]:
    return [name for name in OPTIMIZERS if not both(train, name, grouped)]


@pytest.mark.parametrize(
    ("world_size", "grouped"),
    [(2, True), *(pytest.param(*row, marks=pytest.mark.long) for row in ((2, False), (3, False), (3, True)))],
)
def test_every_optimizer_computes_what_the_plain_one_does(ranks: Any, grouped: bool, world_size: int) -> None:
    assert ranks.run(job_every_optimizer, world_size, grouped) == [[]] * world_size


def clipped(kind: str, norm_type: float, limit: float) -> Any:
    model = ddp(mlp())
    optimizer = build(kind, model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    norms = []
    for batch in batches(3):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        if kind == "plain":
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit, norm_type))
        else:
            norms.append(optimizer.clip_grad_norm(limit, norm_type))
        optimizer.step()
    return norms, weights(model), [p.grad for p in model.parameters()]


def job_clipping() -> list[Any]:
    cases = [(norm_type, limit) for norm_type in (1, 1.0, 2, 3.0, math.inf) for limit in (0.01, 100)]
    return [case for case in cases if not both(clipped, *case)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_norms_and_clipped_gradients_are_those_of_torch(ranks: Any, world_size: int) -> None:
    assert ranks.run(job_clipping, world_size) == [[]] * world_size


def job_filter() -> Any:
    model = mlp()
    optimizer = OSS(model.parameters(), lr=0.1)
    for p in model.parameters():
        p.grad = torch.full_like(p, 2.0)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    want = nn.utils.get_total_norm([p.grad for p in matrices])
    got = optimizer.clip_grad_norm(1.0, filter_params_fn=lambda own: (p for p in own if p.ndim > 1))
    scaled = all(bool((p.grad < 2.0).all()) for p in model.parameters() if p.grad is not None)
    return torch.equal(got, want), scaled


def test_a_filter_chooses_what_counts_and_all_are_scaled(ranks: Any) -> None:
    assert ranks.run(job_filter, 2) == [(True, True)] * 2


# ------------------------------------------------------------------------------------------------ partition and buffers


def job_partition() -> Any:
    parameters = [nn.Parameter(torch.rand(size, 1)) for size in (9, 7, 5, 3) * dist.get_world_size()]
    optimizer = OSS(parameters[:-1], lr=0.1)
    before = dict(optimizer._param_to_rank)
    optimizer.add_param_group({"params": [parameters[-1]]})
    sizes = [sum(p.numel() for g in groups for p in g["params"]) for groups in optimizer.partition_parameters()]
    kept = all(optimizer._param_to_rank[p] == owner for p, owner in before.items())
    own = sum(p.numel() for g in optimizer.optim.param_groups for p in g["params"])
    return sizes, kept, own, len(optimizer.param_groups), len(optimizer.optim.param_groups)


def test_parameters_are_spread_by_size_and_owners_stay(ranks: Any) -> None:
    assert ranks.run(job_partition, 2) == [([24, 24], True, 24, 2, 2)] * 2


def job_frozen_are_spread() -> Any:
    parameters = [nn.Parameter(torch.rand(size), requires_grad=size < 50) for size in (100, 3, 5, 2, 6, 4)]
    optimizer = OSS(parameters, lr=0.1)
    optimizer.add_param_group({"params": [torch.rand(3)]})
    return [optimizer._param_to_rank[p] for p in parameters], len(optimizer.optim.param_groups)


def test_a_big_frozen_parameter_counts_one(ranks: Any) -> None:
    assert ranks.run(job_frozen_are_spread, 2) == [([0, 1, 0, 1, 1, 0], 2)] * 2


def job_same_memory() -> Any:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    twin = nn.Parameter(model.weight.data)
    optimizer = OSS(other.parameters(), lr=0.1)
    late = refusal(lambda: optimizer.add_param_group({"params": [model.weight, twin]}))
    return refusal(lambda: OSS([model.weight, model.bias, twin], lr=0.1)), late, len(optimizer.param_groups)


def test_two_parameters_over_the_same_memory_are_refused(ranks: Any) -> None:
    for at_once, late, groups in ranks.run(job_same_memory, 2):
        assert at_once[0] == "OptimizerError" and "parameters 0 and 2 are different objects" in at_once[1]
        assert late[0] == "OptimizerError" and groups == 1


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


def job_layouts() -> Any:
    model, reference = Layouts(), Layouts()
    optimizer = OSS(model.parameters(), lr=0.1)
    found = []
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        found.append(torch.equal(p, q) and p.stride() == q.stride())
    torch.view_as_complex(model.pairs.detach())
    buckets = optimizer.buckets[torch.device("cpu")]
    size = sum(buffer.numel() for bucket in buckets.values() for buffer in bucket.buffers.values())
    return all(found), sorted(buckets), size == sum(p.numel() for p in model.parameters())


def test_parameters_become_views_of_buffers_and_keep_values_and_strides(ranks: Any) -> None:
    assert ranks.run(job_layouts, 2) == [(True, [0, 1], True)] * 2


def moved(kind: str, change: str) -> Any:
    model = mlp()
    optimizer = build(kind, model.parameters(), torch.optim.SGD, lr=0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    if change == "double":
        model.double()
    elif change == "data":
        model[0].weight.data = model[0].weight.data * 2
    else:
        model.load_state_dict(mlp(5).state_dict(), assign=False)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return weights(model)


def job_moved() -> list[str]:
    return [change for change in ("double", "data", "load") if not both(moved, change)]


def test_parameters_whose_memory_was_replaced_are_sent_as_they_are_now(ranks: Any) -> None:
    assert ranks.run(job_moved, 2) == [[]] * 2


def job_subgroup() -> Any:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    model = mlp()
    optimizer = OSS(model.parameters(), lr=0.1, momentum=0.9, group=group)
    reference = mlp()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    equal = []
    for _ in range(3):
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            q.grad = q.detach().clone()
            p.grad = q.grad.clone() if optimizer._param_to_rank[p] == optimizer.rank else None
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        equal.append(torch.equal(optimizer.clip_grad_norm(0.5), norm))
        optimizer.step()
        plain.step()
    equal += [same(weights(model), weights(reference)), same(optimizer.state_dict(all_ranks=True), plain.state_dict())]
    optimizer.consolidate_state_dict(recipient_rank=1)
    equal.append((optimizer._shards is not None) == (optimizer.rank == 1))
    return equal, optimizer.rank, optimizer.global_rank, optimizer.world_size, optimizer.backend


def test_a_group_whose_ranks_are_not_the_global_ones(ranks: Any) -> None:
    _, *found = ranks.run(job_subgroup, 3)
    assert found == [([True] * 6, rank, rank + 1, 2, "gloo") for rank in (0, 1)]


def job_few_parameters() -> Any:
    model = nn.Linear(3, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = OSS(model.parameters(), optim=torch.optim.AdamW, lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    norm = optimizer.clip_grad_norm(1.0)
    optimizer.step()
    return model.weight.detach().clone(), norm, len(optimizer.optim.param_groups[0]["params"])


def test_ranks_that_own_nothing(ranks: Any) -> None:
    found = ranks.run(job_few_parameters, 3)
    assert [own for *_, own in found] == [1, 0, 0]
    assert all(torch.equal(one, found[0][0]) and torch.equal(norm, found[0][1]) for one, norm, _ in found)
    assert float(found[0][1]) == pytest.approx(math.sqrt(12))


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


def one(optimizer_class: Any, **settings: Any) -> tuple[Tensor, OSS]:
    weight = torch.tensor([1.0], requires_grad=True)
    optimizer = OSS([weight], optimizer_class, lr=0.1, **settings)
    weight.backward()
    return weight, optimizer


def job_keywords() -> Any:
    seen: list[int] = []
    weight, optimizer = one(Remembering)
    optimizer.step(0, seen=seen)
    other, bare = one(Bare)
    bare.step()
    return seen, optimizer.param_groups[0]["left"], weight.tolist(), other.tolist()


def test_keywords_reach_the_optimizer_and_its_settings_come_back(ranks: Any) -> None:
    assert ranks.run(job_keywords, 1) == [([5], 0.1, [pytest.approx(0.9)], [pytest.approx(0.9)])]


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


def job_closure() -> bool:
    return both(closured)


def test_a_closure_is_called_and_its_loss_returned(ranks: Any) -> None:
    assert ranks.run(job_closure, 2) == [True] * 2


def job_zero_grad() -> Any:
    told: list[Any] = []

    class Reducer:
        def finish_gradients(self) -> None:
            told.append("finish")

        def discard_gradients(self, parameters: list[Tensor]) -> None:
            told.append(len(parameters))

    model, reducer = mlp(), Reducer()
    optimizer = OSS(model.parameters(), lr=0.1)
    optimizer.attach(reducer)
    optimizer.attach(reducer)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.zero_grad(set_to_none=False)
    zeros = all(not p.grad.any() for p in model.parameters())
    optimizer.zero_grad()
    optimizer.step(lambda: torch.tensor(0.0))
    optimizer.clip_grad_norm(1.0)
    del reducer
    optimizer.step()
    return zeros, all(p.grad is None for p in model.parameters()), told


def test_reducers_are_told(ranks: Any) -> None:
    (found,) = ranks.run(job_zero_grad, 1)
    assert found == (True, True, [6, 6, "finish", "finish", "finish"])


def two(kind: str) -> Any:
    """Generator and discriminator, one after the other, and the other's gradients left to be dropped."""
    generator, critic = ddp(mlp(1)), ddp(nn.Linear(3, 1))
    nn.init.constant_(critic.module.weight, 0.5)
    nn.init.zeros_(critic.module.bias)
    optimizers = [build(kind, m.parameters(), torch.optim.Adam, lr=0.01) for m in (generator, critic)]
    for batch in batches(3):
        for optimizer, sign in zip(optimizers, (1, -1), strict=True):
            for each in optimizers:
                each.zero_grad()
            (sign * critic(generator(batch)).mean()).backward()
            optimizer.step()
    return weights(generator), weights(critic), [whole_state(each) for each in optimizers]


def job_two() -> bool:
    return both(two)


def test_two_at_once(ranks: Any) -> None:
    assert ranks.run(job_two, 2) == [True] * 2


class Subclass(OSS):
    """As mmcv writes it."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, optim=torch.optim.AdamW, **settings)


def job_subclass() -> Any:
    model, reference = mlp(), mlp()
    optimizer = Subclass(model.named_parameters(), lr=0.01, weight_decay=0.3)
    plain = torch.optim.AdamW(reference.named_parameters(), lr=0.01, weight_decay=0.3)
    for _ in range(2):
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
        optimizer.step()
        plain.step()
    names = [name for group in optimizer.optim.param_groups for name in group["param_names"]]
    own = [name for name, p in model.named_parameters() if optimizer._param_to_rank[p] == optimizer.rank]
    return same(weights(model), weights(reference)), same(whole_state(optimizer), plain.state_dict()), names == own


def test_a_subclass_and_names(ranks: Any) -> None:
    assert ranks.run(job_subclass, 2) == [(True, True, True)] * 2


class Sparse(nn.Module):
    """An embedding with sparse gradients behind a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 8, sparse=True)
        self.layer = nn.Linear(8, 3)

    def forward(self, batch: Tensor) -> Tensor:
        found: Tensor = self.layer(self.embedding((batch[:, 0].abs() * 7).long() % 20))
        return found


def sparse(kind: str) -> Any:
    model = ddp(Sparse())
    optimizer = build(kind, model.parameters(), torch.optim.SGD, lr=0.1)
    for batch in batches(3):
        step(model, optimizer, batch)
    return weights(model)


def job_sparse() -> Any:
    model = Sparse()
    optimizer = OSS(model.parameters(), lr=0.1)
    model(torch.ones(3, 8)).sum().backward()
    before = [p.grad.clone() for p in model.parameters()]
    parts = [g.coalesce().values() if g.is_sparse else g for g in before]
    norm, want = optimizer.clip_grad_norm(0.5), nn.utils.get_total_norm(parts)
    clipped = [p.grad.to_dense() for p in model.parameters()]
    scaled = [(g * (0.5 / (want + 1e-6))).to_dense() for g in before]
    return both(sparse), torch.equal(norm, want), same(clipped, scaled)


def test_sparse_gradients(ranks: Any) -> None:
    assert ranks.run(job_sparse, 2) == [(True, True, True)] * 2


def scheduled(kind: str, name: str) -> Any:
    lr_scheduler = torch.optim.lr_scheduler
    model = ddp(mlp())
    optimizer = build(kind, two_groups(model), torch.optim.SGD, lr=0.1, momentum=0.9)
    schedulers: dict[str, Callable[[], Any]] = {
        "step": lambda: lr_scheduler.StepLR(optimizer, 1, 0.5),
        "cosine": lambda: lr_scheduler.CosineAnnealingLR(optimizer, 4),
        "lambda": lambda: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
        "restarts": lambda: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2),
        "plateau": lambda: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    }
    scheduler = schedulers[name]()
    for batch in batches(4):
        step(model, optimizer, batch)
        scheduler.step(*([1.0] if name == "plateau" else []))
    return weights(model), [group["lr"] for group in optimizer.param_groups]


def job_schedulers() -> list[str]:
    return [name for name in ("step", "cosine", "lambda", "restarts", "plateau") if not both(scheduled, name)]


def test_schedulers(ranks: Any) -> None:
    assert ranks.run(job_schedulers, 2) == [[]] * 2


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


def job_toggled() -> bool:
    return both(toggled)


def test_parameters_that_are_frozen_and_unfrozen_in_turn(ranks: Any) -> None:
    assert ranks.run(job_toggled, 2) == [True] * 2


def job_exchanged(kind: str, exchange: bool) -> list[Tensor]:
    """Weights are kept by reference while training goes on in other memory, or change places with others'."""
    model = mlp()
    optimizer = build(kind, model.parameters(), torch.optim.Adam, lr=0.05)
    kept = [p.data for p in model.parameters()]
    other = [p.detach().clone() for p in model.parameters()]
    wrapped = ddp(model)
    for number, batch in enumerate(batches(4)):
        step(wrapped, optimizer, batch)
        if number == 1:
            for p, value in zip(model.parameters(), other, strict=True):
                p.data = value if exchange else p.data.clone()
    return [*weights(model), *(value.clone() for value in (other if exchange else kept))]


def job_both_exchanged(exchange: bool) -> bool:
    plain, sharded = job_exchanged("plain", exchange), job_exchanged("oss", exchange)
    half = len(plain) // 2
    # What was taken out of the model as ``kept`` is the model's memory until then; what was put in as ``other`` is
    # its own after, of the plain optimizer, and a copy of it under OSS.
    theirs = slice(half, None) if not exchange else slice(0, 0)
    return same(plain[:half], sharded[:half]) and same(plain[theirs], sharded[theirs])


@pytest.mark.parametrize("exchange", [True, False])
def test_memory_that_a_parameter_has_left_is_not_written_to(ranks: Any, exchange: bool) -> None:
    assert ranks.run(job_both_exchanged, 2, exchange) == [True, True]
