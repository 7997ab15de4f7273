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
from fairscale.internal.params import calc_grad_norm
from fairscale.optim.oss import OSS as Raw
from fairscale.optim.oss import _broadcast_object
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsshard.compat.fairscale.optim import OSS
from tests.models import take_step
from tests.on_ranks import on_ranks
from tests.oss.trainings import batches, both, build, clip, ddp, fill, mlp, refusal, same, step, weights, whole_state


def told(call: Any) -> tuple[str, str]:
    """Return what is raised."""
    found = refusal(call)
    assert found is not None, "nothing was raised"
    return found


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


@pytest.mark.fairscale_row(3)
@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_row_3_a_frozen_layer_that_its_owner_moves_is_sent(world_size: int) -> None:
    assert [name for name in FROZEN if not both(frozen, name)] == []


@pytest.mark.parametrize("trunk", [False, True])
@on_ranks()
def test_nothing_but_trainable_parameters_is_sent(trunk: bool) -> None:
    model = mlp()
    model[0].requires_grad_(not trunk)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = OSS(model.parameters(), lr=0.1, momentum=0.9)
    sent = []
    calls = {"broadcast": dist.broadcast, "all_reduce": dist.all_reduce}

    def counting(name: str) -> Any:
        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            sent[-1] += tensor.nbytes
            return calls[name](tensor, *args, **kwargs)

        return call

    with mock.patch.multiple(dist, **{name: counting(name) for name in calls}):
        for _ in range(3):
            sent.append(0)
            fill(trainable)
            optimizer.step()
    assert sent[1:] == [sum(-(-p.nbytes // 64) * 64 for p in trainable)] * 2  # each begins at 64 bytes


# ------------------------------------------------------------------------------------------------ 6, 7: new groups


def orphans(optimizer: Any) -> list[int]:
    """Sizes of the parameters that this rank owns and does not update."""
    updated = {id(p) for group in optimizer.optim.param_groups for p in group["params"]}
    own = [p for p, rank in optimizer._param_to_rank.items() if rank == optimizer.rank]
    return [p.numel() for p in own if id(p) not in updated]


def grown(kind: str, freeze: bool) -> Any:
    model = mlp()
    trunk, head = list(model[:4].parameters()), list(model[4].parameters())
    model[4].requires_grad_(False)
    optimizer = build(kind, trunk, torch.optim.AdamW, lr=0.01)
    wrapped = ddp(model)
    for number, batch in enumerate(batches(5)):
        if number == 2:
            model[4].requires_grad_(True)
            model[2].requires_grad_(not freeze)
            wrapped = ddp(model)
            optimizer.add_param_group({"params": head, "lr": 0.05})
        step(wrapped, optimizer, batch)
    return weights(model), whole_state(optimizer)


@pytest.mark.fairscale_row(6, 7)
@on_ranks()
def test_row_6_7_a_group_that_comes_later() -> None:
    assert both(grown, False) and both(grown, True)
    model = mlp()
    optimizer = OSS(model[:4].parameters(), optim=torch.optim.Adam, lr=0.1)
    owners, version = dict(optimizer._param_to_rank), optimizer._partition_version
    kind, text = told(lambda: optimizer.add_param_group({"params": model[0].parameters()}))
    assert kind == "ValueError" and "more than one parameter group" in text  # and leaves nothing
    assert len(optimizer.param_groups) == len(optimizer.optim.param_groups) == 1
    model[2].requires_grad_(False)
    optimizer.add_param_group({"params": model[4].parameters()})
    assert orphans(optimizer) == [] and optimizer._partition_version > version
    assert all(optimizer._param_to_rank[p] == rank for p, rank in owners.items())


# ------------------------------------------------------------------------------------------------ 9, 20, 21: norms


@pytest.mark.fairscale_row(9)
@on_ranks()
def test_row_9_a_layer_that_is_unfrozen_counts() -> None:
    def norms(cls: Any) -> list[Tensor]:
        model = mlp()
        optimizer = cls(model.parameters(), lr=0.1)
        fill(model[4])
        found = [optimizer.clip_grad_norm(1e6)]
        fill(model)
        return [*found, optimizer.clip_grad_norm(1e6)]

    model = mlp()
    want = [nn.utils.get_total_norm([torch.ones_like(p) for p in part.parameters()]) for part in (model[4], model)]
    raw = norms(Raw)
    assert torch.equal(raw[1], raw[0]) and not torch.allclose(raw[1], want[1]) and same(norms(OSS), want)


@pytest.mark.fairscale_row(20)
@on_ranks()
def test_row_20_a_rank_without_gradients_in_bfloat16() -> None:
    weight, other = (nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = OSS([weight], lr=0.1)
    fill([weight, other], 0.3)
    own = [p for group in optimizer.optim.param_groups for p in group["params"]]
    # The raw library gives these to one all_reduce: EnforceNotMet, and gloo ends the process.
    assert calc_grad_norm(own, 2.0).dtype == (torch.bfloat16 if optimizer.rank == 0 else torch.float32)
    assert same(optimizer.clip_grad_norm(0.5), nn.utils.clip_grad_norm_([other], 0.5))
    assert same(weight.grad, other.grad)


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
        norms.append(clip(optimizer, model, 1.0))
        optimizer.step()
    return norms, weights(model), whole_state(optimizer)


@pytest.mark.fairscale_row(20, 21)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_row_21_several_dtypes_in_one(world_size: int) -> None:
    assert both(mixed)
    if world_size == 1:
        kind, text = told(lambda: Raw(Mixed().parameters(), lr=0.1))
        assert kind == "AssertionError" and "Different types" in text


# ------------------------------------------------------------------------------------------------ 15, 17: refused


@pytest.mark.fairscale_row(15)
@on_ranks()
def test_row_15_an_optimizer_that_needs_all_parameters_is_refused() -> None:
    kind, text = told(lambda: OSS(mlp().parameters(), optim=torch.optim.LBFGS))
    assert kind == "UnsupportedByBackend"
    assert "optim=LBFGS on 2 ranks" in text and "DistributedDataParallel" in text


@pytest.mark.fairscale_row(17)
@on_ranks()
def test_row_17_weights_are_not_rounded() -> None:
    model = mlp()
    before = weights(model)
    raw = Raw(model.parameters(), lr=0.0, broadcast_fp16=True)
    fill(model)
    raw.step()
    assert not same(before, weights(model))  # by a learning rate of zero
    optimizer = OSS(mlp().parameters(), lr=0.1, broadcast_fp16=False)
    optimizer.broadcast_fp16 = False
    at_once = told(lambda: OSS(mlp().parameters(), lr=0.1, broadcast_fp16=True))
    assert at_once == told(lambda: setattr(optimizer, "broadcast_fp16", True))
    assert at_once[0] == "UnsupportedByBackend" and "broadcast_fp16=True" in at_once[1]
    assert "leave it False" in at_once[1] and "model.to(torch.bfloat16)" in at_once[1]


# ------------------------------------------------------------------------------------------------ 23, 24, 25: arguments

LIGHTNING = ["SGD", "Adam", "AdamW", "Adadelta", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax", "ASGD", "Rprop"]
LIGHTNING += ["Adafactor", "SparseAdam"]


def lightning(kind: str, name: str) -> Any:
    model = ddp(mlp())
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
    if kind == "oss":
        optimizer = OSS(params=optimizer.param_groups, optim=type(optimizer), **optimizer.defaults)
    if name != "SparseAdam":  # takes sparse gradients only
        for batch in batches(2):
            step(model, optimizer, batch)
    return weights(model), whole_state(optimizer), optimizer.defaults


@pytest.mark.fairscale_row(23)
@on_ranks()
def test_row_23_built_from_the_defaults_of_another() -> None:
    assert [name for name in LIGHTNING if not both(lightning, name)] == []
    plain = torch.optim.AdamW(mlp().parameters())
    for wrong, make in (
        ("decoupled_weight_decay", lambda: Raw(params=plain.param_groups, optim=type(plain), **plain.defaults)),
        ("nonsense", lambda: OSS(mlp().parameters(), optim=torch.optim.AdamW, nonsense=1)),
        ("decoupled_", lambda: OSS(mlp().parameters(), optim=torch.optim.AdamW, decoupled_weight_decay=False)),
    ):
        kind, text = told(make)
        assert kind == "TypeError" and wrong in text


def cycled(kind: str, name: str) -> Any:
    lr_scheduler = torch.optim.lr_scheduler
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


@pytest.mark.fairscale_row(24)
@on_ranks()
def test_row_24_schedulers_that_change_betas_and_momentum() -> None:
    assert both(cycled, "OneCycleLR") and both(cycled, "CyclicLR")
    raw = Raw(mlp().parameters(), optim=torch.optim.AdamW, lr=0.01)
    assert told(lambda: torch.optim.lr_scheduler.OneCycleLR(raw, 0.1, total_steps=8))[0] == "ValueError"


@pytest.mark.fairscale_row(25)
@on_ranks()
def test_row_25_numpy_numbers_in_groups() -> None:
    raw = refusal(lambda: _broadcast_object({"lr": np.float64(0.005)}, src_rank=0, group=dist.group.WORLD))
    assert raw is None if dist.get_rank() == 0 else raw is not None and raw[0] == "UnpicklingError"
    model = mlp()
    optimizer = OSS(model.parameters(), optim=torch.optim.Adam, lr=0.01, force_broadcast_object=True)
    for group in optimizer.param_groups:
        group["lr"] = np.float64(0.005)
    fill(model)
    optimizer.step()
    found = optimizer.state_dict(all_ranks=True)
    assert len(found["state"]) == 6 and type(found["param_groups"][0]["lr"]) is np.float64


# ------------------------------------------------------------------------------------------------ 26, 28, 34


@pytest.mark.fairscale_row(26)
@on_ranks()
def test_row_26_copies_are_refused() -> None:
    assert not hasattr(copy.deepcopy(Raw(mlp().parameters(), lr=0.1)), "optim")
    optimizer = OSS(mlp().parameters(), lr=0.1)
    for way in (copy.deepcopy, pickle.dumps):
        kind, text = told(lambda way=way: way(optimizer))
        assert kind == "NotCopyable" and "state_dict()" in text


def empty_first(kind: str) -> Any:
    model = ddp(mlp())
    optimizer = build(kind, [{"params": []}, {"params": list(model.parameters())}], torch.optim.Adam, lr=0.01)
    for batch in batches(2):
        step(model, optimizer, batch)
    return weights(model), whole_state(optimizer)


@pytest.mark.fairscale_row(28)
@on_ranks()
def test_row_28_an_empty_first_group() -> None:
    assert both(empty_first)
    assert told(Raw([{"params": []}, {"params": list(mlp().parameters())}], lr=0.1).step)[0] == "IndexError"


@pytest.mark.fairscale_row(28)
@on_ranks()
def test_row_28_torchs_distributed_checkpoint() -> None:
    raw_model, model, other = mlp(), mlp(), mlp(5)
    raw = Raw(raw_model.parameters(), optim=torch.optim.Adam, lr=0.01)
    optimizer = OSS(model.parameters(), optim=torch.optim.Adam, lr=0.01)
    for each, part, kind, steps in ((raw, raw_model, "RuntimeError", 2.0), (optimizer, model, "NotConsolidated", 1.0)):
        fill(part)
        take_step(each)
        assert told(lambda each=each, part=part: get_optimizer_state_dict(part, each))[0] == kind
        # the raw one has made a step that nobody asked for
        assert {float(state["step"]) for state in each.optim.state.values()} == {steps}
    optimizer.consolidate_state_dict(-1)
    found = get_optimizer_state_dict(model, optimizer)
    assert sorted(found["state"]) == sorted(name for name, _ in model.named_parameters())
    fresh = OSS(other.parameters(), optim=torch.optim.Adam, lr=0.5)
    set_optimizer_state_dict(other, fresh, copy.deepcopy(found))
    assert same(whole_state(fresh), whole_state(optimizer))


@pytest.mark.fairscale_row(34)
@on_ranks()
def test_row_34_hooks_run_once() -> None:
    for cls, last in ((Raw, 2), (OSS, 1)):
        model, ran = mlp(), []
        optimizer = cls(model.parameters(), lr=0.1)
        handles = [
            register_optimizer_step_pre_hook(lambda *_, ran=ran: ran.append("all before")),
            register_optimizer_step_post_hook(lambda *_, ran=ran: ran.append("all after")),
        ]
        optimizer.register_step_pre_hook(lambda *_, ran=ran: ran.append("pre"))
        optimizer.register_step_post_hook(lambda *_, ran=ran: ran.append("post"))
        optimizer.optim.register_step_post_hook(lambda *_, ran=ran: ran.append("inner"))
        fill(model)
        optimizer.step()
        for handle in handles:
            handle.remove()
        assert ran.count("all after") == last
        if cls is OSS:
            assert sorted(ran) == ["all after", "all before", "inner", "post", "pre"]
