"""The advice of fsshard/backends, followed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from tests.advice.following import DIVIDED, Scale, batch, cases, is_right, plain, refuse, refused, right, square

REPLICAS = ("ddp", "fairscale")


def units(backend: str, kind: type[nn.Module] = Scale) -> dict[str, Any]:
    """Make each ``kind`` a unit, where FSDP2 would merge those of a tiny model."""
    return {"backend": backend, "auto_wrap_policy": {kind}, **({"merge_below": 0} if backend == "fsdp2" else {})}


def with_dtype(dtype: torch.dtype) -> Callable[[], Any]:
    def build() -> Any:
        model = plain()
        model[0].steps = nn.Parameter(torch.ones(6).to(dtype), requires_grad=False)
        model[0].register_forward_hook(lambda module, _, output: output * module.steps.to(output.dtype))
        return model

    return build


def with_buffer() -> Any:
    model = plain()
    model[0].register_buffer("steps", torch.ones(6, dtype=torch.int64))
    return model


def with_empty() -> Any:
    model = plain()
    model[0].none = nn.Parameter(torch.ones(0))
    return model


def with_double() -> Any:
    return nn.Sequential(*plain(), Scale(torch.full((2,), 1.5, dtype=torch.float64)))


def case_dtypes_of_parameters() -> None:
    for backend in DIVIDED:
        told = "make what is not trained a buffer, module.register_buffer(name, tensor), or use backend='ddp'"
        refuse(told, with_dtype(torch.int64), backend=backend)
        right(with_buffer, backend=backend)
        told = "put them into modules of their own and pass these in auto_wrap_policy"
        refuse(told, with_dtype(torch.float64), backend=backend)
        right(with_double, backend=backend, auto_wrap_policy={Scale})
        refuse("remove them, or use backend='ddp'", with_empty, backend=backend)
    right(with_dtype(torch.int64), backend="ddp")
    right(with_empty, backend="ddp", find_unused_parameters=True)
    real = {"backend": "fairscale", "implementation": "real"}
    refuse("build one optimizer per dtype with build_optimizer(model, cls, param_groups=[...])", with_double, **real)
    model = fsshard.wrap(with_double(), **real)
    groups = [[p for p in model.parameters() if p.dtype == dtype] for dtype in (torch.float32, torch.float64)]
    optimizers = [fsshard.build_optimizer(model, torch.optim.SGD, [{"params": each}], lr=0.1) for each in groups]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    square(model, batch()).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert not any(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def case_values_are_assigned() -> None:
    from torch.distributed.tensor import Replicate, distribute_tensor

    model = fsshard.wrap(plain(), backend="fsdp2")
    weight: Any = next(model.parameters())
    with refused("write within `with torch.no_grad(), model.full_parameters(writeback=True):`, alike on every rank"):
        weight[0] = 3.0
    with refused("change the model before fsshard.wrap"):
        weight.data = torch.ones(2, 2)
    whole = distribute_tensor(torch.full((6, 4), 2.0), weight.device_mesh, [Replicate()])
    with refused("give the whole tensor, or value.redistribute(...) to these"):
        weight.data = whole
    weight.data = whole.redistribute(weight.device_mesh, weight.placements)
    assert model.state_dict()["0.weight"].eq(2).all()
    weight.data = torch.full((6, 4), 3.0)
    assert model.state_dict()["0.weight"].eq(3).all()
    total: Any = sum(p.detach().square().sum() for p in model.parameters())
    with refused("On every rank write value.full_tensor().item(), or compute with the whole weights within"):
        total.item()
    with model.full_parameters():
        expected = float(sum(p.detach().double().square().sum() for p in model.module.parameters()))
    assert total.full_tensor().item() == pytest.approx(expected)


def halved(_: Any, bucket):  # type: ignore[no-untyped-def]
    """Send a bucket in bfloat16; torch's own hook does so on accelerators only."""
    narrow = bucket.buffer().to(torch.bfloat16) / 2
    work: Any = dist.all_reduce(narrow, async_op=True)
    result: torch.futures.Future[Tensor] = work.get_future().then(lambda done: bucket.buffer().copy_(done.value()[0]))
    return result


def case_communication_hooks() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    narrow = fsshard.Precision(param=torch.bfloat16, reduce=torch.bfloat16)
    model = fsshard.wrap(plain(), backend="ddp", mixed_precision=narrow)
    with refused("set mixed_precision=fsshard.Precision(param=..., reduce=torch.float32) and narrow them in your hook"):
        model.register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook)
    precision = fsshard.Precision(param=torch.bfloat16, reduce=torch.float32)
    model = fsshard.wrap(plain(), backend="ddp", mixed_precision=precision)
    model.register_comm_hook(None, halved)
    fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    square(model, batch()).backward()
    with refused("or use backend='ddp'"):
        fsshard.wrap(plain(), backend="fsdp2").register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook)


def twice(model: Any, x: Tensor) -> Tensor:
    y = model(x)
    return y.square().mean() + y.abs().mean()  # type: ignore[no-any-return]


def case_backwards() -> None:
    for backend in ("ddp", "fsdp"):
        model = fsshard.wrap(plain(), backend=backend)
        fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
        y = model(batch())
        with refused("dd the losses and call backward() once, or use backend='fsdp2' or 'fairscale'"):
            y.square().mean().backward(retain_graph=True)
            y.abs().mean().backward()
        is_right(fsshard.wrap(plain(), backend=backend), loss=twice)
    told = "call model(x). Or every backward since the last step ran under no_sync(): run the last one outside"
    refuse(told, loss=lambda model, x: square(model.module, x), backend="ddp")
    with refused("call what wrap returned"):
        fsshard.wrap(plain(), **units("fsdp2")).module[1](torch.ones(3, 6))
    model = fsshard.wrap(plain(), backend="fsdp")
    model(batch())
    with refused("whole in forwards of the wrapped model (call model(x), not model.module(x))"):
        model.module(batch())
    is_right(model)
    with refused("use backend='fsdp2' or 'fairscale'"):
        square(fsshard.wrap(plain(), backend="fsdp"), batch()).backward(create_graph=True)


class Writes(Scale):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.6, 0.6)
        return super().forward(x)


class Clamps(Scale):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.clamp(-0.6, 0.6)


def with_unit(kind: type[Scale]) -> Callable[[], Any]:
    def build() -> Any:
        model = plain()
        model[1] = kind(model[1].weight.detach().clone())
        return model

    return build


class CallsFunctional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.unit, self.last = plain()

    def forward(self, x: Tensor) -> Any:
        weight = {"weight": self.first.bias * 2}
        return self.last(torch.func.functional_call(self.unit, weight, self.first(x)))


class ReadsUnit(CallsFunctional):
    def forward(self, x: Tensor) -> Any:
        return self.last(self.unit(self.first(x))) + self.unit.weight.abs().sum()


def reads_from_before(kept: bool) -> Callable[[], Any]:
    def build() -> Any:
        model = plain()
        weights = [model[0].weight] if kept else []
        model.register_forward_hook(lambda m, _, output: output * (weights or [m[0].weight])[0].sum())
        return model

    return build


def case_weights_in_forwards() -> None:
    for backend in DIVIDED:
        told = "Change weights after optimizer.step(), within `with torch.no_grad(), model.full_parameters("
        refuse(told, with_unit(Writes), **units(backend, Writes))
        right(with_unit(Clamps), backend=backend, auto_wrap_policy={Clamps})
        told = "Load values with model.load_state_dict, or use backend='fairscale' or 'ddp'"
        refuse(told, CallsFunctional, **units(backend))
        told = "with auto_wrap_policy=None the model is one unit), or use backend='fairscale' or 'ddp'"
        refuse(told, ReadsUnit, **units(backend))
        for policy in (None, {nn.Linear}):
            right(ReadsUnit, backend=backend, auto_wrap_policy=policy)
        right(reads_from_before(kept=False), backend=backend)
    told = "read it as an attribute of its module, and build the optimizer with fsshard.build_optimizer"
    refuse(told, reads_from_before(kept=True), backend="fsdp2")
    for backend in REPLICAS:
        right(with_unit(Writes), backend=backend)
        right(CallsFunctional, backend=backend, find_unused_parameters=True)
        right(ReadsUnit, backend=backend)


def squares(model: Any) -> Tensor:
    return sum((p.square().sum() for p in model.parameters()), torch.zeros(()))


def penalty(model: Any, x: Tensor) -> Tensor:
    return square(model, x) + 0.1 * squares(model)


class PenaltyInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = plain()

    def forward(self, x: Tensor) -> Any:
        return self.layers(x), 0.1 * squares(self)


def returned(model: Any, x: Tensor) -> Tensor:
    y, extra = model(x)
    return y.square().mean() + extra  # type: ignore[no-any-return]


def gathered(model: Any, x: Tensor) -> Tensor:
    weights: list[Any] = list(model.parameters())
    return square(model, x) + 0.1 * sum(p.full_tensor().square().sum() for p in weights)


def case_penalties_outside() -> None:
    told = "Compute a penalty in the forward and return it, or use the optimizer's weight_decay, or"
    refuse(told, loss=penalty, **units("fsdp", nn.Linear))
    for backend in DIVIDED:
        model = fsshard.wrap(plain(), **units(backend, nn.Linear))
        model(batch())
        ours = refused("Compute it in the forward of the weight's unit and return it, use the optimizer's weight_decay")
        with ours if backend == "fsdp" else refused("mixed torch.Tensor and DTensor", RuntimeError):
            (squares(model.module) + square(model, batch())).backward()
        is_right(fsshard.wrap(PenaltyInside(), backend=backend, auto_wrap_policy=None), PenaltyInside, returned)
    is_right(fsshard.wrap(plain(), backend="fsdp2"), loss=gathered, reference=penalty)
    for backend in REPLICAS:
        is_right(fsshard.wrap(plain(), backend=backend), loss=penalty)


def frozen() -> Any:
    model = plain()
    model[0].requires_grad_(False)
    return model


def case_settings() -> None:
    model = fsshard.wrap(plain(), backend="fsdp")
    model.module[0].requires_grad_(False)
    with refused("set requires_grad before fsshard.wrap, or use backend='fsdp2', 'fairscale' or 'ddp'"):
        model(batch())
    right(frozen, backend="fsdp")
    for backend in ("fsdp2", *REPLICAS):
        model = fsshard.wrap(plain(), backend=backend)
        model.module[0].requires_grad_(False)
        is_right(model, frozen)
    told = "leave it out: it gathers a unit while another computes (BACKWARD_PRE); or use backend='fsdp'"
    refuse(told, backend="fsdp2", backward_prefetch="BACKWARD_POST")
    right(backend="fsdp", backward_prefetch="BACKWARD_POST")


def case_state_of_a_part() -> None:
    for backend in DIVIDED:
        model = fsshard.wrap(plain(), backend=backend)
        with refused("on every rank write `state = model.state_dict(rank0_only=True, offload_to_cpu=True)`"):
            model.module.state_dict()
        state = model.state_dict(rank0_only=True, offload_to_cpu=True)
        assert bool(state) == (dist.get_rank() == 0)
        with refused("call load_state_dict of what fsshard.wrap returned, on every rank, or fsshard.load"):
            model.module.load_state_dict(plain().state_dict())
        model.load_state_dict(plain().state_dict())
    model = fsshard.wrap(plain(), backend="fsdp")
    with refused("call copy.deepcopy within `with model.full_parameters():` on every rank (backend 'fsdp'), or"):
        copy.deepcopy(model.module)
    with model.full_parameters():
        copied = copy.deepcopy(model.module)
    assert all(torch.equal(a, b) for a, b in zip(copied.parameters(), plain().parameters(), strict=True))


def case_no_optimizer_yet() -> None:
    model = fsshard.wrap(plain(), backend="fairscale")
    with refused("before the first training step add: optimizer = fsshard.build_optimizer(model, torch.optim.Adam)"):
        model(batch())
    fsshard.build_optimizer(model, torch.optim.Adam)
    square(model, batch()).backward()
    model = fsshard.wrap(plain(), backend="fairscale")
    names = [name for name, _ in model.named_parameters()]
    fsshard.build_optimizer(model, torch.optim.SGD, names[:2], lr=0.1)
    with refused("Freeze them, or add them to build_optimizer's param_groups"):
        model(batch())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names[:2])
    square(model, batch()).backward()


@pytest.mark.parametrize("case", cases(globals()), ids=lambda case: case.__name__)
def test_advice_is_right(ranks: Any, case: Any) -> None:
    ranks.run(case, 2)
