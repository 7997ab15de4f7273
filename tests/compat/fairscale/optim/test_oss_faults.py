"""Faults of FairScale 0.4.13's OSS on torch 2.13, and their absence here."""

from __future__ import annotations

import copy
import pickle
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsshard.compat.fairscale.optim import OSS
from tests.oss.trainings import (
    batches,
    both,
    build,
    ddp,
    mlp,
    refusal,
    same,
    step,
    weights,
    whole_state,
)


def raw_oss() -> Any:
    from fairscale.optim.oss import OSS as Raw

    return Raw


def fill(parameters: Any, value: float = 1.0) -> None:
    for p in parameters:
        p.grad = torch.full_like(p, value)


# ------------------------------------------------------------------------------------------------ 3: frozen layers


FROZEN = {
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "weight decay": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
}


def frozen(kind: str, name: str) -> Any:
    cls, settings = FROZEN[name]
    model = mlp()
    optimizer = build(kind, model.parameters(), cls, **settings)
    for number, batch in enumerate(batches(6)):
        if number == 2:
            model[0].requires_grad_(False)
        step(ddp(model), optimizer, batch, set_to_none=False)
    return weights(model), whole_state(optimizer)


def job_raw_frozen() -> list[Tensor]:
    cls, settings = FROZEN["momentum"]
    model = mlp()
    optimizer = raw_oss()(model.parameters(), optim=cls, **settings)
    for number, batch in enumerate(batches(6)):
        if number == 2:
            model[0].requires_grad_(False)
            optimizer.refresh_trainable()  # as ShardedDataParallel does
        step(ddp(model), optimizer, batch, set_to_none=False)
    return weights(model)


@pytest.mark.fairscale_row(3)
def test_row_3_raw_ranks_drift_apart(ranks: Any) -> None:
    here, there = ranks.run(job_raw_frozen, 2)
    assert max(float((a - b).abs().max()) for a, b in zip(here, there, strict=True)) > 1e-3


def job_frozen() -> list[str]:
    return [name for name in FROZEN if not both(frozen, name)]


@pytest.mark.fairscale_row(3)
@pytest.mark.parametrize("world_size", [2, 3])
def test_row_3_a_frozen_layer_that_its_owner_moves_is_sent(ranks: Any, world_size: int) -> None:
    assert ranks.run(job_frozen, world_size) == [[]] * world_size


def job_bytes(trunk: bool) -> Any:
    """Bytes that each step sends, and how many the trainable parameters have."""
    model = mlp()
    model[0].requires_grad_(not trunk)
    optimizer = OSS(model.parameters(), lr=0.1, momentum=0.9)
    sent: list[int] = []
    calls = {"broadcast": dist.broadcast, "all_reduce": dist.all_reduce}

    def counting(name: str) -> Any:
        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            sent[-1] += tensor.nbytes
            return calls[name](tensor, *args, **kwargs)

        return call

    with mock.patch.multiple(dist, **{name: counting(name) for name in calls}):
        for _ in range(3):
            sent.append(0)
            fill(p for p in model.parameters() if p.requires_grad)
            optimizer.step()
    return sent[1:], sum(p.nbytes for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("trunk", [False, True])
def test_nothing_but_trainable_parameters_is_sent(ranks: Any, trunk: bool) -> None:
    for sent, trainable in ranks.run(job_bytes, 2, trunk):
        assert sent == [trainable, trainable]


# ------------------------------------------------------------------------------------------------ 6, 7: new groups


def job_raw_orphans() -> list[int]:
    model, extra = mlp(), nn.Linear(8, 8)
    optimizer = raw_oss()(model.parameters(), lr=0.1)
    model[2].requires_grad_(False)
    optimizer.add_param_group({"params": list(extra.parameters())})
    updated = {id(p) for group in optimizer.optim.param_groups for p in group["params"]}
    own = [
        p for group in optimizer.param_groups for p in group["params"] if optimizer._param_to_rank[p] == optimizer.rank
    ]
    return [p.numel() for p in own if id(p) not in updated]


@pytest.mark.fairscale_row(7)
def test_row_7_raw_parameters_change_hands_and_are_updated_by_nobody(ranks: Any) -> None:
    assert any(ranks.run(job_raw_orphans, 2))


def grown(kind: str, freeze: bool) -> Any:
    model = mlp()
    trunk, head = list(model[:4].parameters()), list(model[4].parameters())
    for p in head:
        p.requires_grad_(False)
    optimizer = build(kind, trunk, torch.optim.AdamW, lr=0.01)
    wrapped = ddp(model)
    for number, batch in enumerate(batches(5)):
        if number == 2:
            for p in head:
                p.requires_grad_(True)
            model[2].requires_grad_(not freeze)
            wrapped = ddp(model)
            optimizer.add_param_group({"params": head, "lr": 0.05})
        step(wrapped, optimizer, batch)
    return weights(model), whole_state(optimizer)


def job_grown() -> Any:
    model = mlp()
    optimizer = OSS(model[:4].parameters(), lr=0.1)
    owners, version = dict(optimizer._param_to_rank), optimizer._partition_version
    model[2].requires_grad_(False)
    optimizer.add_param_group({"params": model[4].parameters()})
    updated = {id(p) for group in optimizer.optim.param_groups for p in group["params"]}
    orphans = [p for p, rank in optimizer._param_to_rank.items() if rank == optimizer.rank and id(p) not in updated]
    kept = all(optimizer._param_to_rank[p] == rank for p, rank in owners.items())
    return both(grown, False), both(grown, True), orphans, kept, optimizer._partition_version > version


@pytest.mark.fairscale_row(6, 7)
def test_row_6_7_a_group_that_comes_later(ranks: Any) -> None:
    assert ranks.run(job_grown, 2) == [(True, True, [], True, True)] * 2


def job_bad_group() -> Any:
    model = mlp()
    optimizer = OSS(model[:4].parameters(), optim=torch.optim.Adam, lr=0.1)
    bad = refusal(lambda: optimizer.add_param_group({"params": model[0].parameters()}))
    return bad, len(optimizer.param_groups), len(optimizer.optim.param_groups), len(optimizer._param_to_rank)


def test_a_group_that_is_refused_leaves_nothing(ranks: Any) -> None:
    for (kind, text), *counts in ranks.run(job_bad_group, 2):
        assert kind == "ValueError" and "more than one parameter group" in text
        assert counts == [1, 1, 4]


# ------------------------------------------------------------------------------------------------ 9, 20, 21: norms


def norms_around_unfreezing(cls: Any) -> list[Tensor]:
    model = mlp()
    optimizer = cls(model.parameters(), lr=0.1)
    fill(model[4].parameters())
    found = [optimizer.clip_grad_norm(1e6)]
    fill(model.parameters())
    return [*found, optimizer.clip_grad_norm(1e6)]


def job_unfreezing() -> Any:
    model = mlp()
    want = [nn.utils.get_total_norm([torch.ones_like(p) for p in part.parameters()]) for part in (model[4], model)]
    return norms_around_unfreezing(raw_oss()), norms_around_unfreezing(OSS), want


@pytest.mark.fairscale_row(9)
def test_row_9_a_layer_that_is_unfrozen_counts(ranks: Any) -> None:
    for raw, ours, want in ranks.run(job_unfreezing, 2):
        assert torch.equal(raw[1], raw[0]) and not torch.allclose(raw[1], want[1])
        assert same(ours, want)


def job_bfloat16() -> Any:
    from fairscale.internal.params import calc_grad_norm

    weight = nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
    optimizer = OSS([weight], lr=0.1)
    weight.grad = torch.full_like(weight, 0.3)
    own = [p for group in optimizer.optim.param_groups for p in group["params"]]
    raw = calc_grad_norm(own, 2.0).dtype
    other = nn.Parameter(weight.detach().clone())
    other.grad = weight.grad.clone()
    want = nn.utils.clip_grad_norm_([other], 0.5)
    return str(raw), same(optimizer.clip_grad_norm(0.5), want), same(weight.grad, other.grad)


@pytest.mark.fairscale_row(20)
def test_row_20_a_rank_without_gradients_in_bfloat16(ranks: Any) -> None:
    found = ranks.run(job_bfloat16, 2)
    # The raw library gives these to one all_reduce: EnforceNotMet, and gloo ends the process.
    assert [raw for raw, *_ in found] == ["torch.bfloat16", "torch.float32"]
    assert [rest for _, *rest in found] == [[True, True]] * 2


class Mixed(nn.Module):
    """All dtypes that are trained, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.single = nn.Parameter(torch.randn(5, 3))
        self.brain = nn.Parameter(torch.randn(7, dtype=torch.bfloat16))
        self.wide = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.spectral = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))
        self.more = nn.Parameter(torch.randn(2, 3, dtype=torch.complex64))
        self.table = nn.Parameter(torch.arange(4), requires_grad=False)


def mixed(kind: str) -> Any:
    model = Mixed()
    optimizer = build(kind, model.parameters(), torch.optim.AdamW, lr=0.1)
    generator = torch.Generator().manual_seed(3)
    norms = []
    for _ in range(3):
        for p in model.parameters():
            if p.requires_grad:
                p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        if kind == "plain":
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        else:
            norms.append(optimizer.clip_grad_norm(1.0))
        optimizer.step()
    return norms, weights(model), whole_state(optimizer)


def job_mixed() -> Any:
    return refusal(lambda: raw_oss()(Mixed().parameters(), lr=0.1)), both(mixed)


@pytest.mark.fairscale_row(20, 21)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_row_21_several_dtypes_in_one(ranks: Any, world_size: int) -> None:
    found = ranks.run(job_mixed, world_size)
    assert any(raw is not None and raw[0] == "AssertionError" and "Different types" in raw[1] for raw, _ in found)
    assert all(ours for _, ours in found)


# ------------------------------------------------------------------------------------------------ 15, 17: refused


def job_lbfgs() -> Any:
    return refusal(lambda: OSS(mlp().parameters(), optim=torch.optim.LBFGS))


def job_raw_lbfgs() -> bool:
    model = mlp(1)
    wrapped = ddp(model)
    optimizer = raw_oss()(model.parameters(), optim=torch.optim.LBFGS, lr=0.1)
    for batch in batches(2):

        def closure(batch: Tensor = batch) -> Tensor:
            model.zero_grad()
            loss = wrapped(batch).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    reference = mlp(1)
    wrapped = ddp(reference)
    plain = torch.optim.LBFGS(reference.parameters(), lr=0.1)
    for batch in batches(2):

        def again(batch: Tensor = batch) -> Tensor:
            reference.zero_grad()
            loss = wrapped(batch).square().mean()
            loss.backward()
            return loss

        plain.step(again)
    return same(weights(model), weights(reference))


@pytest.mark.fairscale_row(15)
def test_row_15_raw_searches_in_each_shard(ranks: Any) -> None:
    assert ranks.run(job_raw_lbfgs, 2) == [False, False]


@pytest.mark.fairscale_row(15)
def test_row_15_an_optimizer_that_needs_all_parameters_is_refused(ranks: Any) -> None:
    for kind, text in ranks.run(job_lbfgs, 2):
        assert kind == "UnsupportedByBackend"
        assert "optim=LBFGS on 2 ranks" in text and "DistributedDataParallel" in text
    assert ranks.run(job_lbfgs, 1) == [None]


def job_fp16() -> Any:
    model = mlp()
    before = weights(model)
    raw = raw_oss()(model.parameters(), lr=0.0, broadcast_fp16=True)
    fill(model.parameters())
    raw.step()
    changed = not same(before, weights(model))
    optimizer = OSS(mlp().parameters(), lr=0.1, broadcast_fp16=False)
    optimizer.broadcast_fp16 = False
    at_once = refusal(lambda: OSS(mlp().parameters(), lr=0.1, broadcast_fp16=True))
    later = refusal(lambda: setattr(optimizer, "broadcast_fp16", True))
    advised = mlp().to(torch.bfloat16)  # as the refusal says
    optimizer = OSS(advised.parameters(), lr=0.1)
    fill(advised.parameters())
    optimizer.step()
    moved = not same(weights(advised), weights(mlp().to(torch.bfloat16)))
    return changed, at_once, later, optimizer.broadcast_fp16 is False and moved


@pytest.mark.fairscale_row(17)
def test_row_17_weights_are_not_rounded(ranks: Any) -> None:
    for changed, at_once, later, now in ranks.run(job_fp16, 2):
        assert changed  # by a step of the raw library with a learning rate of zero
        assert at_once == later and later[0] == "UnsupportedByBackend"
        assert "broadcast_fp16=True" in later[1] and "leave it False" in later[1]
        assert "model.to(torch.bfloat16)" in later[1] and now is True


# ------------------------------------------------------------------------------------------------ 23, 24, 25: arguments

LIGHTNING = ["SGD", "Adam", "AdamW", "Adadelta", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax", "ASGD", "Rprop"]
LIGHTNING += ["Adafactor", "SparseAdam"]


def lightning(kind: str, name: str) -> Any:
    model = ddp(mlp())
    optimizer: Any = getattr(torch.optim, name)(model.parameters(), lr=0.01)
    if kind == "oss":
        optimizer = OSS(params=optimizer.param_groups, optim=type(optimizer), **optimizer.defaults)
    if name != "SparseAdam":  # takes sparse gradients only
        for batch in batches(2):
            step(model, optimizer, batch)
    return weights(model), whole_state(optimizer), optimizer.defaults


def job_lightning() -> Any:
    plain = torch.optim.AdamW(mlp().parameters())
    raw = refusal(lambda: raw_oss()(params=plain.param_groups, optim=type(plain), **plain.defaults))
    wrong = [name for name in LIGHTNING if not both(lightning, name)]
    unknown = refusal(lambda: OSS(mlp().parameters(), optim=torch.optim.AdamW, nonsense=1))
    other = refusal(lambda: OSS(mlp().parameters(), optim=torch.optim.AdamW, decoupled_weight_decay=False))
    return raw, wrong, unknown, other


@pytest.mark.fairscale_row(23)
def test_row_23_built_from_the_defaults_of_another(ranks: Any) -> None:
    for raw, wrong, unknown, other in ranks.run(job_lightning, 2):
        assert raw[0] == "TypeError" and "decoupled_weight_decay" in raw[1]
        assert wrong == []
        assert unknown[0] == "TypeError" and "nonsense" in unknown[1]
        assert other[0] == "TypeError" and "decoupled_weight_decay" in other[1]


def cycled(kind: str, name: str) -> Any:
    lr_scheduler: Any = torch.optim.lr_scheduler
    model = ddp(mlp())
    if name == "OneCycleLR":
        optimizer = build(kind, model.parameters(), torch.optim.AdamW, lr=0.01)
        scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)
    else:
        optimizer = build(kind, model.parameters(), torch.optim.SGD, lr=0.1)
        scheduler = lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=2)
    for batch in batches(5):
        step(model, optimizer, batch)
        scheduler.step()
    return weights(model), whole_state(optimizer)


def job_cycled() -> Any:
    raw = raw_oss()(mlp().parameters(), optim=torch.optim.AdamW, lr=0.01)
    refused = refusal(lambda: torch.optim.lr_scheduler.OneCycleLR(raw, 0.1, total_steps=8))
    return refused, [name for name in ("OneCycleLR", "CyclicLR") if not both(cycled, name)]


@pytest.mark.fairscale_row(24)
def test_row_24_schedulers_that_change_betas_and_momentum(ranks: Any) -> None:
    for raw, wrong in ranks.run(job_cycled, 2):
        assert raw[0] == "ValueError"
        assert wrong == []


def job_numpy() -> Any:
    from fairscale.optim.oss import _broadcast_object

    value = {"lr": np.float64(0.005)}
    raw = refusal(lambda: _broadcast_object(value, src_rank=0, group=dist.group.WORLD))
    model = mlp()
    optimizer = OSS(model.parameters(), optim=torch.optim.Adam, lr=0.01, force_broadcast_object=True)
    for group in optimizer.param_groups:
        group["lr"] = np.float64(0.005)
    fill(model.parameters())
    optimizer.step()
    found = optimizer.state_dict(all_ranks=True)
    return raw, len(found["state"]), type(found["param_groups"][0]["lr"]).__name__


@pytest.mark.fairscale_row(25)
def test_row_25_numpy_numbers_in_groups(ranks: Any) -> None:
    found = ranks.run(job_numpy, 2)
    assert found[0][0] is None and found[1][0][0] == "UnpicklingError"
    assert [rest for _, *rest in found] == [[6, "float64"]] * 2


# ------------------------------------------------------------------------------------------------ 26, 28, 34


def job_copies() -> Any:
    raw = copy.deepcopy(raw_oss()(mlp().parameters(), lr=0.1))
    optimizer = OSS(mlp().parameters(), lr=0.1)
    return hasattr(raw, "optim"), refusal(lambda: copy.deepcopy(optimizer)), refusal(lambda: pickle.dumps(optimizer))


@pytest.mark.fairscale_row(26)
def test_row_26_copies_are_refused(ranks: Any) -> None:
    for raw, deep, pickled in ranks.run(job_copies, 2):
        assert raw is False
        assert deep == pickled and deep[0] == "NotCopyable" and "state_dict()" in deep[1]


def empty_first(kind: str) -> Any:
    model = ddp(mlp())
    optimizer = build(kind, [{"params": []}, {"params": list(model.parameters())}], torch.optim.Adam, lr=0.01)
    for batch in batches(2):
        step(model, optimizer, batch)
    return weights(model), whole_state(optimizer)


def job_empty_first() -> Any:
    raw = raw_oss()([{"params": []}, {"params": list(mlp().parameters())}], lr=0.1)
    return refusal(raw.step), both(empty_first)


@pytest.mark.fairscale_row(28)
def test_row_28_an_empty_first_group(ranks: Any) -> None:
    for raw, ours in ranks.run(job_empty_first, 2):
        assert raw[0] == "IndexError"
        assert ours


def job_distributed_checkpoint() -> Any:
    raw_model = mlp()
    raw = raw_oss()(raw_model.parameters(), optim=torch.optim.Adam, lr=0.01)
    model = mlp()
    optimizer = OSS(model.parameters(), optim=torch.optim.Adam, lr=0.01)
    for each, parameters in ((raw, list(raw_model.parameters())), (optimizer, list(model.parameters()))):
        fill(parameters)
        each.step()
        each.zero_grad()
    refused = refusal(lambda: get_optimizer_state_dict(raw_model, raw))
    spoilt = [float(state["step"]) for state in raw.optim.state.values()]
    ours = refusal(lambda: get_optimizer_state_dict(model, optimizer))
    kept = [float(state["step"]) for state in optimizer.optim.state.values()]
    optimizer.consolidate_state_dict(-1)
    found = get_optimizer_state_dict(model, optimizer)
    other = mlp(5)
    fresh = OSS(other.parameters(), optim=torch.optim.Adam, lr=0.5)
    set_optimizer_state_dict(other, fresh, copy.deepcopy(found))
    return (
        refused,
        set(spoilt),
        ours,
        set(kept),
        sorted(found["state"]),
        same(whole_state(fresh), whole_state(optimizer)),
    )


@pytest.mark.fairscale_row(28)
def test_row_28_torchs_distributed_checkpoint(ranks: Any) -> None:
    for refused, spoilt, ours, kept, names, equal in ranks.run(job_distributed_checkpoint, 2):
        assert refused[0] == "RuntimeError" and spoilt == {2.0}  # a step that nobody asked for
        assert ours[0] == "NotConsolidated" and "consolidate_state_dict" in ours[1] and kept == {1.0}
        assert names == sorted(name for name, _ in mlp().named_parameters()) and equal


def hooks(cls: Any) -> dict[str, int]:
    model = mlp()
    optimizer = cls(model.parameters(), lr=0.1)
    found = dict.fromkeys(("pre", "post", "inner", "all before", "all after"), 0)

    def count(name: str) -> Any:
        return lambda *_: found.__setitem__(name, found[name] + 1)

    handles = [
        register_optimizer_step_pre_hook(count("all before")),
        register_optimizer_step_post_hook(count("all after")),
    ]
    optimizer.register_step_pre_hook(count("pre"))
    optimizer.register_step_post_hook(count("post"))
    optimizer.optim.register_step_post_hook(count("inner"))
    fill(model.parameters())
    optimizer.step()
    for handle in handles:
        handle.remove()
    return found


def job_hooks() -> Any:
    return hooks(raw_oss()), hooks(OSS)


@pytest.mark.fairscale_row(34)
def test_row_34_hooks_run_once(ranks: Any) -> None:
    for raw, ours in ranks.run(job_hooks, 2):
        assert raw["all after"] == 2
        assert ours == dict.fromkeys(("pre", "post", "inner", "all before", "all after"), 1)
