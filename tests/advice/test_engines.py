"""The advice of fsshard/backends, followed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from tests.advice.following import DIVIDED, Scale, batch, cases, is_right, plain, refused, square


def units(backend: str, kind: type[nn.Module] = Scale) -> dict[str, Any]:
    """Make each ``kind`` a unit, where FSDP2 would merge those of a tiny model."""
    return {"auto_wrap_policy": {kind}, **({"merge_below": 0} if backend == "fsdp2" else {})}


def with_dtype(dtype: torch.dtype) -> Any:
    model = plain()
    model[0].steps = nn.Parameter(torch.ones(6).to(dtype), requires_grad=False)
    model[0].register_forward_hook(lambda module, _, output: output * module.steps.to(output.dtype))
    return model


def integers_as_buffers() -> Any:
    model = plain()
    model[0].register_buffer("steps", torch.ones(6, dtype=torch.int64))
    return model


def case_integer_parameters() -> None:
    for backend in DIVIDED:
        with refused("make what is not trained a buffer, module.register_buffer(name, tensor), or use backend='ddp'"):
            fsshard.wrap(with_dtype(torch.int64), backend=backend)
        is_right(fsshard.wrap(integers_as_buffers(), backend=backend), integers_as_buffers)
    integers = nn.Sequential(plain(), Scale(torch.ones(2, dtype=torch.int64), requires_grad=False))
    with refused("make what is not trained a buffer"):  # "Cannot flatten integer dtype tensors" (FSDP1, torch 2.13)
        fsshard.wrap(integers, backend="fsdp", auto_wrap_policy={Scale})
    is_right(fsshard.wrap(with_dtype(torch.int64), backend="ddp"), lambda: with_dtype(torch.int64))


def own_module(value: Tensor) -> Callable[[], Any]:
    return lambda: nn.Sequential(*plain(), Scale(value.clone()))


def case_several_dtypes() -> None:
    build = own_module(torch.full((2,), 1.5, dtype=torch.float64))
    for backend in DIVIDED:
        with refused("put them into modules of their own and pass these in auto_wrap_policy"):
            fsshard.wrap(with_dtype(torch.float64), backend=backend)
        is_right(fsshard.wrap(build(), backend=backend, auto_wrap_policy={Scale}), build)
    is_right(fsshard.wrap(with_dtype(torch.float64), backend="ddp"), lambda: with_dtype(torch.float64))
    with refused("build one optimizer per dtype with build_optimizer(model, cls, param_groups=[...])"):
        is_right(fsshard.wrap(build(), backend="fairscale", implementation="real"), build)
    is_right(fsshard.wrap(build(), backend="fairscale", implementation="native"), build)
    model = fsshard.wrap(build(), backend="fairscale", implementation="real")
    real = [p for p in model.parameters() if p.dtype == torch.float32]
    double = [p for p in model.parameters() if p.dtype == torch.float64]
    optimizers = [fsshard.build_optimizer(model, torch.optim.SGD, [{"params": ps}], lr=0.1) for ps in (real, double)]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    square(model, batch()).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert not any(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def case_empty_parameters() -> None:
    def build() -> Any:
        model = plain()
        model[0].none = nn.Parameter(torch.ones(0))
        return model

    for backend in DIVIDED:
        with refused("remove them, or use backend='ddp'"):
            fsshard.wrap(build(), backend=backend)
    is_right(fsshard.wrap(build(), backend="ddp", find_unused_parameters=True), build)


def case_item_assignment() -> None:
    model = fsshard.wrap(plain(), backend="fsdp2")
    weight = next(model.parameters())
    with refused("write within `with torch.no_grad(), model.full_parameters(writeback=True):`, alike on every rank"):
        weight[0] = 3.0
    for backend in (*DIVIDED, "fairscale", "ddp"):
        model = fsshard.wrap(plain(), backend=backend)
        with torch.no_grad(), model.full_parameters(writeback=True):
            model.module[0].weight[0] = 3.0
        assert model.state_dict()["0.weight"][0].tolist() == [3.0] * 4


def case_data_assignment() -> None:
    model = fsshard.wrap(plain(), backend="fsdp2")
    weight: Any = next(model.parameters())
    with refused("change the model before fsshard.wrap"):
        weight.data = torch.ones(2, 2)
    changed = plain()
    changed[0].weight.data = torch.ones(6, 4)
    assert fsshard.wrap(changed, backend="fsdp2").state_dict()["0.weight"].eq(1).all()
    from torch.distributed.tensor import Replicate, distribute_tensor

    whole = distribute_tensor(torch.full((6, 4), 2.0), weight.device_mesh, [Replicate()])
    with refused("give the whole tensor, or value.redistribute(...) to these"):
        weight.data = whole
    weight.data = whole.redistribute(weight.device_mesh, weight.placements)
    assert model.state_dict()["0.weight"].eq(2).all()
    weight.data = torch.full((6, 4), 3.0)
    assert model.state_dict()["0.weight"].eq(3).all()
    with torch.no_grad():
        weight.copy_(distribute_tensor(torch.full((6, 4), 4.0), weight.device_mesh, weight.placements))
    assert model.state_dict()["0.weight"].eq(4).all()


def case_numbers_of_parts() -> None:
    model = fsshard.wrap(plain(), backend="fsdp2")
    total: Any = sum(p.detach().square().sum() for p in model.parameters())
    with refused("On every rank write value.full_tensor().item(), or compute with the whole weights within"):
        total.item()
    expected = sum(p.detach().double().square().sum() for p in plain().parameters())
    assert total.full_tensor().item() == pytest.approx(float(expected))
    with model.full_parameters():
        assert sum(p.detach().square().sum() for p in model.module.parameters()).item() == pytest.approx(
            float(expected)
        )


def halved(_: Any, bucket):  # type: ignore[no-untyped-def]
    """Send a bucket in bfloat16; torch's own hook does so on accelerators only."""
    narrow = bucket.buffer().to(torch.bfloat16) / 2
    work: Any = dist.all_reduce(narrow, async_op=True)
    result: torch.futures.Future[Tensor] = work.get_future().then(lambda done: bucket.buffer().copy_(done.value()[0]))
    return result


def case_communication_hooks() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    group = dist.group.WORLD
    narrow = fsshard.Precision(param=torch.bfloat16, reduce=torch.bfloat16)
    model = fsshard.wrap(plain(), backend="ddp", mixed_precision=narrow)
    with refused("set mixed_precision=fsshard.Precision(param=..., reduce=torch.float32) and narrow them in your hook"):
        model.register_comm_hook(group, default_hooks.allreduce_hook)
    precision = fsshard.Precision(param=torch.bfloat16, reduce=torch.float32)
    model = fsshard.wrap(plain(), backend="ddp", mixed_precision=precision)
    model.register_comm_hook(None, halved)
    fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    square(model, batch()).backward()
    model = fsshard.wrap(plain(), backend="fsdp2")
    with refused("or use backend='ddp'"):
        model.register_comm_hook(group, default_hooks.allreduce_hook)
    model = fsshard.wrap(plain(), backend="ddp")
    model.register_comm_hook(group, default_hooks.allreduce_hook)
    is_right(model)


def case_torch_func() -> None:
    def jacobian(model: Any) -> Tensor:
        result: Tensor = torch.func.jvp(model, (batch(),), (torch.ones(3, 4),))[1]
        return result

    expected = jacobian(plain())
    model = fsshard.wrap(plain(), backend="ddp", find_unused_parameters=True)
    with refused("leave them off, or use backend='fairscale'"):
        torch.func.vmap(partial(model))(batch())
    for backend in ("ddp", "fairscale"):
        model = fsshard.wrap(plain(), backend=backend)
        fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
        assert torch.equal(torch.func.vmap(partial(model))(batch()), model(batch()))
        assert torch.allclose(jacobian(model), expected)
    model = fsshard.wrap(plain(), backend="fsdp")
    with refused("use backend='ddp' or 'fairscale'"):
        torch.func.vmap(partial(model))(batch())


def twice(model: Any, x: Tensor) -> Tensor:
    y = model(x)
    return y.square().mean() + y.abs().mean()  # type: ignore[no-any-return]


def case_second_backward() -> None:
    for backend in ("ddp", "fsdp"):
        model = fsshard.wrap(plain(), backend=backend)
        fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
        y = model(batch())
        with refused("dd the losses and call backward() once, or use backend='fsdp2' or 'fairscale'"):
            y.square().mean().backward(retain_graph=True)
            y.abs().mean().backward()
        is_right(fsshard.wrap(plain(), backend=backend), loss=twice)
    for backend in ("fsdp2", "fairscale"):
        model = fsshard.wrap(plain(), backend=backend)
        optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
        y = model(batch())
        y.square().mean().backward(retain_graph=True)
        y.abs().mean().backward()
        optimizer.step()
        other = fsshard.wrap(plain(), backend=backend)
        optimizer = fsshard.build_optimizer(other, torch.optim.SGD, lr=0.1)
        twice(other, batch()).backward()
        optimizer.step()
        for name, value in model.state_dict().items():
            assert torch.allclose(value, other.state_dict()[name], atol=1e-6)


def case_around_the_wrapper() -> None:
    model = fsshard.wrap(plain(), backend="ddp")
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    with refused("call model(x). Or every backward since the last step ran under no_sync(): run the last one outside"):
        square(model.module, batch()).backward()
        optimizer.step()
    is_right(fsshard.wrap(plain(), backend="ddp"))
    model = fsshard.wrap(plain(), backend="fsdp2", **units("fsdp2"))
    with refused("call what wrap returned"):
        model.module[1](torch.ones(3, 6))
    is_right(fsshard.wrap(plain(), backend="fsdp2"))


def case_graphs_of_gradients() -> None:
    model = fsshard.wrap(plain(), backend="ddp")
    found = torch.autograd.grad(square(model, batch()), list(model.parameters()), create_graph=True)
    expected = torch.autograd.grad(square(bare := plain(), batch()), list(bare.parameters()))
    assert all(torch.allclose(one, other) for one, other in zip(found, expected, strict=True))
    model = fsshard.wrap(plain(), backend="fsdp")
    with refused("use backend='fsdp2' or 'fairscale'"):
        square(model, batch()).backward(create_graph=True)
    for backend in ("fsdp2", "fairscale"):
        model = fsshard.wrap(plain(), backend=backend)
        fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
        square(model, batch()).backward(create_graph=True)
    x = batch().requires_grad_()
    with refused("use backend='fsdp2', 'fairscale' or 'ddp'"):
        torch.autograd.grad(square(fsshard.wrap(plain(), backend="fsdp"), x), x, create_graph=True)
    (expected,) = torch.autograd.grad(square(plain(), x), x)
    for backend in ("fsdp2", "fairscale", "ddp"):
        model = fsshard.wrap(plain(), backend=backend)
        fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
        (found,) = torch.autograd.grad(square(model, x), x, create_graph=True)
        assert torch.allclose(found, expected)


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


def case_forwards_that_write() -> None:
    for backend in DIVIDED:
        model = fsshard.wrap(with_unit(Writes)(), backend=backend, **units(backend, Writes))
        with refused("Change weights after optimizer.step(), within `with torch.no_grad(), model.full_parameters("):
            for _ in range(2):  # fsdp2 looks from the second forward on
                model(batch())
        build = with_unit(Clamps)
        is_right(fsshard.wrap(build(), backend=backend, auto_wrap_policy={Clamps}), build)
        model = fsshard.wrap(plain(), backend=backend)
        with torch.no_grad(), model.full_parameters(writeback=True):
            model.module[1].weight.clamp_(-0.6, 0.6)
        assert model.state_dict()["1.weight"].max() == torch.tensor(0.6)
    for backend in ("fairscale", "ddp"):
        is_right(fsshard.wrap(with_unit(Writes)(), backend=backend), with_unit(Writes))


class CallsFunctional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = plain()
        self.first, self.unit, self.last = layers

    def forward(self, x: Tensor) -> Any:
        weight = {"weight": self.first.bias * 2}
        return self.last(torch.func.functional_call(self.unit, weight, self.first(x)))


def functional_net() -> Any:
    return CallsFunctional()


def case_weights_that_are_replaced() -> None:
    for backend in DIVIDED:
        model = fsshard.wrap(functional_net(), backend=backend, **units(backend))
        with refused("Load values with model.load_state_dict, or use backend='fairscale' or 'ddp'"):
            model(batch())
        state = functional_net().state_dict()
        state["unit.weight"] = torch.full((6,), 3.0)
        model.load_state_dict(state)
        assert model.state_dict()["unit.weight"].eq(3).all()
    for backend in ("fairscale", "ddp"):
        is_right(fsshard.wrap(functional_net(), backend=backend, find_unused_parameters=True), functional_net)


class ReadsUnit(CallsFunctional):
    def forward(self, x: Tensor) -> Any:
        return self.last(self.unit(self.first(x))) + self.unit.weight.abs().sum()


def case_weights_of_other_units() -> None:
    for backend in DIVIDED:
        model = fsshard.wrap(ReadsUnit(), backend=backend, **units(backend))
        with refused("with auto_wrap_policy=None the model is one unit), or use backend='fairscale' or 'ddp'"):
            model(batch())
        is_right(fsshard.wrap(ReadsUnit(), backend=backend, auto_wrap_policy=None), ReadsUnit)
        is_right(fsshard.wrap(ReadsUnit(), backend=backend, auto_wrap_policy={nn.Linear}), ReadsUnit)
    for backend in ("fairscale", "ddp"):
        is_right(fsshard.wrap(ReadsUnit(), backend=backend), ReadsUnit)


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


def decayed(backend: str) -> None:
    """The gradient of a penalty by 0.05 times the squares is a weight decay of 0.1."""
    model = fsshard.wrap(plain(), backend=backend)
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1, weight_decay=0.2)
    square(model, batch()).backward()
    optimizer.step()
    bare = plain()
    (sum(square(bare, batch(0, rank)) for rank in range(2)) / 2 + 0.1 * squares(bare)).backward()
    for name, parameter in bare.named_parameters():
        assert torch.allclose(model.state_dict()[name], parameter - 0.1 * parameter.grad, atol=1e-6)


def squares(model: Any) -> Tensor:
    return sum((p.square().sum() for p in model.parameters()), torch.zeros(()))


def case_penalties_outside() -> None:
    for backend in DIVIDED:
        model = fsshard.wrap(plain(), backend=backend, **units(backend, nn.Linear))
        if backend == "fsdp":
            with refused("Compute a penalty in the forward and return it, or use the optimizer's weight_decay, or"):
                penalty(model, batch()).backward()
        model(batch())
        ours = refused("Compute it in the forward of the weight's unit and return it, use the optimizer's weight_decay")
        with ours if backend == "fsdp" else refused("mixed torch.Tensor and DTensor", RuntimeError):
            (squares(model.module) + square(model, batch())).backward()
        is_right(fsshard.wrap(PenaltyInside(), backend=backend, auto_wrap_policy=None), PenaltyInside, returned)
        decayed(backend)
        model = fsshard.wrap(plain(), backend=backend)
        with torch.no_grad(), model.full_parameters():
            assert squares(model.module) == squares(plain())
    is_right(fsshard.wrap(plain(), backend="fsdp2"), loss=gathered, reference=penalty)
    for backend in ("fairscale", "ddp"):
        is_right(fsshard.wrap(plain(), backend=backend), loss=penalty)


def case_references_from_before() -> None:
    def build(kept: bool) -> Any:
        model = plain()
        weights = [model[0].weight] if kept else []
        model.register_forward_hook(lambda m, _, output: output * (weights or [m[0].weight])[0].sum())
        return model

    model = fsshard.wrap(build(kept=True), backend="fsdp2")
    with refused("read it as an attribute of its module, and build the optimizer with fsshard.build_optimizer"):
        model(batch()).sum().backward()
    for backend in DIVIDED:
        is_right(fsshard.wrap(build(kept=False), backend=backend), lambda: build(kept=False))


def case_outside_of_forwards() -> None:
    model = fsshard.wrap(plain(), backend="fsdp")
    model(batch())
    with refused("whole in forwards of the wrapped model (call model(x), not model.module(x))"):
        model.module(batch())
    is_right(model)


def case_thawing() -> None:
    model = fsshard.wrap(plain(), backend="fsdp")
    model.module[0].requires_grad_(False)
    with refused("set requires_grad before fsshard.wrap, or use backend='fsdp2', 'fairscale' or 'ddp'"):
        model(batch())

    def frozen() -> Any:
        build = plain()
        build[0].requires_grad_(False)
        return build

    is_right(fsshard.wrap(frozen(), backend="fsdp"), frozen)
    for backend in ("fsdp2", "fairscale", "ddp"):
        model = fsshard.wrap(plain(), backend=backend)
        model.module[0].requires_grad_(False)
        is_right(model, frozen)


def case_optimizers_from_before() -> None:
    module = plain()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = fsshard.wrap(module, backend="fsdp2")
    with refused("build the optimizer with fsshard.build_optimizer"):
        square(model, batch()).backward()
        optimizer.step()
    is_right(fsshard.wrap(plain(), backend="fsdp2"))


def case_orders_of_gathering() -> None:
    with refused("leave it out: it gathers a unit while another computes (BACKWARD_PRE); or use backend='fsdp'"):
        fsshard.wrap(plain(), backend="fsdp2", backward_prefetch="BACKWARD_POST")
    is_right(fsshard.wrap(plain(), backend="fsdp2"))
    is_right(fsshard.wrap(plain(), backend="fsdp", backward_prefetch="BACKWARD_POST"))


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
        copied = plain()
        copied.load_state_dict(model.state_dict())
        if backend == "fsdp":
            told = "call copy.deepcopy within `with model.full_parameters():` on every rank (backend 'fsdp'), or"
            with refused(told):
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
    is_right(fsshard.wrap(plain(), backend="fairscale"))


@pytest.mark.parametrize("case", cases(globals()), ids=lambda case: case.__name__)
def test_advice_is_right(ranks: Any, case: Any) -> None:
    ranks.run(case, 2)
