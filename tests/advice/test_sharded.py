"""The advice of fsshard/sharded, followed."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import fsshard
from tests import optimizers as written
from tests.advice.following import (
    DIVIDED,
    Scale,
    batch,
    cases,
    is_right,
    is_trained,
    plain,
    refuse,
    refused,
    right,
    square,
    train,
)
from tests.models import net
from tests.training_runs import differences, shared_folder

ENGINES = ("ddp", "fairscale", *DIVIDED)
SGD, Adam = torch.optim.SGD, torch.optim.Adam


def step(model: Any, optimizer: Any) -> None:
    square(model, batch()).backward()
    optimizer.step()
    optimizer.zero_grad()


class AppState:
    """As in torch's tutorial on distributed checkpoints."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        whole = StateDictOptions(full_state_dict=True)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=whole)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state.get("optim", {})
        )


def case_torchs_state_dicts() -> None:
    advice = "write fsshard.save(folder, model, optimizer) and fsshard.load(folder, model, optimizer), or for a file "
    with shared_folder() as folder:
        for backend in ENGINES:
            model = fsshard.wrap(net(), backend=backend)
            optimizer = fsshard.build_optimizer(model, Adam, lr=0.1)
            step(model, optimizer)
            with refused(advice + "take model.state_dict() and optimizer.state_dict()"):
                dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=folder / "theirs")
            states = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
            with refused(advice):
                AppState(model, optimizer).load_state_dict({"model": states[0], "optim": states[1]})
            fsshard.save(folder / "ours", model, optimizer)
            step(model, optimizer)
            fsshard.load(folder / "ours", model, optimizer)
            assert not list(differences(states, [model.state_dict(), optimizer.state_dict()]))


def case_optimizers_from_before() -> None:
    module = plain()
    stepped = SGD(module.parameters(), lr=0.1, momentum=0.9)
    square(module, batch(0, 0)).backward()
    stepped.step()
    told = "build the optimizer of the wrapped model with fsshard.build_optimizer, and fsshard.load(file, model"
    with shared_folder() as folder:
        with refused(told):
            fsshard.wrap(module, stepped, backend="fsdp2")
        if dist.get_rank() == 0:
            torch.save({"model": module.state_dict(), "optimizer": stepped.state_dict()}, folder / "both.pt")
        dist.barrier()
        model = fsshard.wrap(plain(), backend="fsdp2")
        optimizer = fsshard.build_optimizer(model, SGD, lr=0.1, momentum=0.9)
        fsshard.load(folder / "both.pt", model, optimizer)
    found, weights = optimizer.state_dict()["state"], model.state_dict()
    for name, parameter in module.named_parameters():
        assert torch.equal(found[name]["momentum_buffer"], stepped.state[parameter]["momentum_buffer"])
        assert torch.equal(weights[name], parameter)
    module = plain()
    before = SGD(module.parameters(), lr=0.1)
    model, optimizer = fsshard.wrap(module, before, backend="fsdp2")
    with refused("use the one that wrap returned"):
        step(model, before)
    step(model, optimizer)
    pairs, build = fsshard.tensorfy(net()), "fsshard.build_optimizer"
    with refused(f"hand over the bare model, or build the optimizer with {build}"):
        fsshard.wrap(pairs, SGD(pairs.parameters(), lr=0.1), backend="ddp")
    for backend, make in (("ddp", net), ("fairscale", plain), ("fsdp", plain)):
        model = fsshard.wrap(make(), backend=backend)
        if backend == "fairscale":
            fsshard.build_optimizer(model, SGD, lr=0.1)
        with refused(f"build the optimizer with {build}"):
            square(model, batch()).backward()
            SGD(model.parameters(), lr=0.1).step()


def case_arguments_of_optimizers() -> None:
    module, other = plain(), plain()
    with refused("optimizer is an empty list; leave it out, and build one with fsshard.build_optimizer"):
        fsshard.wrap(module, [], backend="fsdp2")
    with refused("hand over the optimizer of this model"):
        fsshard.wrap(module, SGD(other.parameters(), lr=0.1), backend="fsdp2")
    with refused("wrap it first"):
        fsshard.build_optimizer(module, SGD, lr=0.1)
    model = fsshard.wrap(module, backend="fsdp2")
    groups: tuple[tuple[str, list[Any]], ...] = (
        ("pass None for all parameters", []),
        ("leave the group out", [{"params": ["0.weight"]}, {"params": []}]),
        ("pass its name instead", [plain()[0].weight]),
    )
    for told, given in groups:
        with refused(told):
            fsshard.build_optimizer(model, SGD, given, lr=0.1)
    for names in (None, ["0.weight"], [{"params": ["0.weight"]}]):
        fsshard.build_optimizer(model, SGD, names, lr=0.1)
    with refused("pass the same on every rank"):
        fsshard.build_optimizer(fsshard.wrap(plain(), backend="ddp"), SGD, lr=0.1 + dist.get_rank())


def case_schedulers() -> None:
    module, decay = plain(), torch.optim.lr_scheduler.ExponentialLR
    first, second = Adam(module[0].parameters()), Adam(module[2].parameters())
    rates = [decay(first, 0.5), decay(second, 0.5)]
    with refused("hand over its optimizer, too: fsshard.wrap(model, optimizer, scheduler)"):
        fsshard.wrap(module, scheduler=rates[0], backend="fsdp2")
    with refused("pass it to fsshard.wrap, too: wrap(model, [optimizer, other], [scheduler, ...])"):
        fsshard.wrap(module, first, rates[1], backend="fsdp2")
    model, optimizers, rates = fsshard.wrap(module, [first, second], rates, backend="fsdp2")
    square(model, batch()).backward()
    for optimizer, rate in zip(optimizers, rates, strict=True):
        optimizer.step()
        rate.step()
        assert optimizer.param_groups[0]["lr"] == 0.0005


def case_groups_that_change() -> None:
    model = fsshard.wrap(plain(), backend="fairscale")
    optimizer = fsshard.build_optimizer(model, SGD, ["0.weight", "0.bias"], lr=0.1)
    with refused("build a second optimizer over the new parameters"):
        optimizer.add_param_group({"params": ["1.weight", "2.weight", "2.bias"]})
    second = fsshard.build_optimizer(model, SGD, ["1.weight", "2.weight", "2.bias"], lr=0.1)
    square(model, batch()).backward()
    optimizer.step()
    second.step()
    is_trained(model.state_dict(), steps=1)
    model = fsshard.wrap(plain(), backend="fsdp2")
    optimizer = fsshard.build_optimizer(model, SGD, lr=0.1)
    with refused("give each parameter that is to be stepped once"):
        optimizer.param_groups = [{"params": ["0.weight"]}, {"params": ["0.weight"]}]
    optimizer.param_groups = [{"params": ["0.weight"]}, {"params": ["0.bias"]}]
    step(model, optimizer)
    with refused("keep its state_dict() instead"):
        copy.deepcopy(optimizer)


class WithMode(torch.optim.SGD):
    def train(self) -> None:
        raise AssertionError("on this rank's parts")


class KeepsModuli(torch.optim.Optimizer):
    """Its state is real for complex weights."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["moduli"] = parameter.grad.abs()
                parameter.data -= group["lr"] * parameter.grad


def case_kinds_of_optimizers() -> None:
    optimizer: Any = fsshard.build_optimizer(fsshard.wrap(plain(), backend="fsdp2"), WithMode, lr=0.1)
    with refused("use what torch.optim.Optimizer has, such as param_groups[0]['lr']"):
        optimizer.train()
    for name, able in {"MyMuon": ("fairscale", "ddp"), "ClipsInside": ("ddp",)}.items():
        cls = getattr(written, name)
        model = fsshard.wrap(plain(), backend="fsdp2")
        with refused("use backend='fairscale' or 'ddp'" if len(able) == 2 else "use backend='ddp'"):
            fsshard.build_optimizer(model, cls)
        step(model, fsshard.build_optimizer(model, cls, separable=True))  # as who is told "if that is wrong" says
        for backend in able:
            model = fsshard.wrap(plain(), backend=backend)
            step(model, fsshard.build_optimizer(model, cls))
    for backend in ENGINES:
        with refused("use foreach=True, or see_complex=False, which shows the optimizer real pairs"):
            fsshard.build_optimizer(fsshard.wrap(net(), backend=backend), torch.optim.AdamW, fused=True)
        for settings in ({"foreach": True}, {"fused": True, "see_complex": False}):
            model = fsshard.wrap(net(), backend=backend)
            step(model, fsshard.build_optimizer(model, torch.optim.AdamW, **settings))
    for backend, settings in (("fsdp2", {"see_complex": False}), ("fairscale", {}), ("ddp", {}), ("fsdp2", {})):
        model = fsshard.wrap(net(), backend=backend)
        optimizer = fsshard.build_optimizer(model, KeepsModuli, separable=True, **settings)
        if settings or backend != "fsdp2":
            step(model, optimizer)
            continue
        with refused("use 'fairscale' or 'ddp', or see_complex=False"):
            step(model, optimizer)


def case_matrices() -> None:
    weight = "middle.0.weight"
    for backend in ("ddp", "fairscale"):
        model = fsshard.wrap(net(), backend=backend)
        with refused("'first.bias' is real, of shape (6,); give it the names of matrices"):
            fsshard.build_optimizer(model, torch.optim.Muon)
        for see_complex in (True, False):
            with refused(f"{weight!r} is complex, of shape (6, 6); give it the names of matrices"):
                fsshard.build_optimizer(model, torch.optim.Muon, [weight], see_complex=see_complex)
        matrices = ["first.weight", "last.weight"]
        rest = [name for name, _ in model.named_parameters() if name not in matrices]
        optimizers = [
            fsshard.build_optimizer(model, torch.optim.Muon, matrices),
            fsshard.build_optimizer(model, torch.optim.AdamW, rest),
        ]
        square(model, batch()).backward()
        for optimizer in optimizers:
            optimizer.step()


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.spare = plain(), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


def unused() -> Any:
    torch.manual_seed(0)
    return Unused()


def twice_as_much(model: Any, x: Tensor) -> Tensor:
    return square(model, x) + square(model, 2 * x)


def case_gradients_that_lack() -> None:
    for backend in ENGINES:
        refuse("pass find_unused_parameters=True to fsshard.wrap", unused, backend=backend)
        right(unused, backend=backend, find_unused_parameters=True)
        model = fsshard.wrap(plain(), backend=backend)
        optimizer = fsshard.build_optimizer(model, SGD, lr=0.1)
        with model.no_sync():
            square(model, batch(0)).backward()
        with refused("run the last micro-batch outside of it (also in an incomplete last round of accumulation)"):
            optimizer.step()
        square(model, 2 * batch(0)).backward()
        optimizer.step()
        is_trained(model.state_dict(), loss=twice_as_much, steps=1)


def scaled(model: Any) -> None:
    optimizer = fsshard.build_optimizer(model, SGD, lr=0.1)
    scaler = fsshard.GradScaler(model, init_scale=8.0)
    scaler.scale(square(model, batch())).backward()
    scaler.step(optimizer)
    scaler.update()
    is_trained(model.state_dict(), steps=1)


def case_loss_scales() -> None:
    with refused("for a plain model use torch.amp.GradScaler"):
        fsshard.GradScaler(plain())  # type: ignore[arg-type]
    model = fsshard.wrap(plain(), backend="ddp")
    with refused("build it with fsshard.build_optimizer"):
        fsshard.GradScaler(model).step(SGD(model.parameters(), lr=0.1))
    for backend in (*DIVIDED, "fairscale"):
        model = fsshard.wrap(plain(), backend=backend)
        optimizer: Any = fsshard.build_optimizer(model, SGD, lr=0.1)
        scaler: Any = torch.amp.GradScaler("cpu")
        scaler.scale(square(model, batch())).backward()
        with refused("use fsshard.GradScaler(model)"):
            scaler.step(optimizer)
        scaled(fsshard.wrap(plain(), backend=backend))
    model = fsshard.wrap(plain(), backend="ddp")
    optimizer = fsshard.build_optimizer(model, SGD, lr=0.1)
    scaler = fsshard.GradScaler(model, init_scale=2.0 ** dist.get_rank())
    scaler.scale(square(model, batch())).backward()
    with refused("create the scaler with the same init_scale, and load its state, on every rank"):
        scaler.step(optimizer)
    optimizer.zero_grad()
    scaled(model)

    def half(precision: str, scaler: bool) -> None:
        model = fsshard.wrap(plain(), backend="ddp", mixed_precision=precision)
        optimizer = fsshard.build_optimizer(model, SGD, lr=0.1)
        scale = fsshard.GradScaler(model, init_scale=8.0, enabled=scaler)
        scale.scale(model(batch()).float().square().mean()).backward()
        scale.step(optimizer)

    with pytest.warns(UserWarning, match=r"use fsshard\.GradScaler\(model\), or mixed_precision='bf16'"):
        half("fp16", scaler=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        half("fp16", scaler=True)
        half("bf16", scaler=False)


def images() -> Any:
    return nn.Sequential(nn.Conv2d(1, 1, 1))


def case_copies_and_moves() -> None:
    for backend in ENGINES:
        model: Any = fsshard.wrap(plain(), backend=backend)
        with refused("keep model.state_dict(), or"):
            copy.deepcopy(model)
        with refused("before fsshard.wrap"):
            model.double()
        is_right(
            fsshard.wrap(plain().double(), backend=backend),
            lambda: plain().double(),
            lambda m, x: square(m, x.double()),
        )
        with refused("use assign=False"):
            model.load_state_dict(plain().state_dict(), assign=True)
        model.load_state_dict(plain().state_dict(), assign=False)
        wrapped: Any = fsshard.wrap(images(), backend=backend)
        with refused("model.to(memory_format=...) before fsshard.wrap"):
            wrapped.to(memory_format=torch.channels_last)
        fsshard.wrap(images().to(memory_format=torch.channels_last), backend=backend)


class Generates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = plain()

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)

    def save_pretrained(self, folder: str) -> Any:
        return self.layers.state_dict()


def case_methods_that_need_whole_weights() -> None:
    for backend in DIVIDED:
        model: Any = fsshard.wrap(Generates(), backend=backend)
        with refused("inside `with model.full_parameters():` (entered on every rank), or use model.state_dict()"):
            model.save_pretrained("folder")
        with model.full_parameters(), torch.no_grad():
            found = model.save_pretrained("folder")
            with refused("leave the context first"):
                model(torch.ones(1, 4))
        assert torch.equal(found["0.weight"], plain().state_dict()["0.weight"])


def case_parameters_without_values() -> None:
    model = fsshard.wrap(plain(), backend="fsdp")
    square(model, batch()).backward()
    weight = next(model.parameters())
    with refused("write to them within model.full_parameters(writeback=True), or through model.load_state_dict"):
        with torch.no_grad():
            weight.fill_(1.0)
    with torch.no_grad(), model.full_parameters(writeback=True):
        model.module[0].weight.fill_(1.0)
    assert model.state_dict()["0.weight"].eq(1).all()
    with refused("clip with model.clip_grad_norm_(max_norm)"):
        weight.grad  # noqa: B018
    assert model.clip_grad_norm_(1.0) > 0
    with refused("that fsshard.build_optimizer(model, torch.optim.AdamW, ...) has made"):
        torch.optim.AdamW(model.parameters()).zero_grad()  # before the first step, in a loop that begins with it
    for backend in ("ddp", "fsdp2"):
        model = fsshard.wrap(net(), backend=backend)
        square(model, batch()).backward()
        parameter = next(p for p in model.parameters() if p.is_complex())
        with refused("change it in place, or drop it"):
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.mul_(0)
        parameter.grad = None
        with refused("compute it within the model's forward"):
            (square(model, batch()) + next(p for p in model.parameters() if p.is_complex()).abs().sum()).backward()


def case_state_dicts() -> None:
    from torch.distributed.fsdp import (
        FullStateDictConfig,
        FullyShardedDataParallel,
        ShardedStateDictConfig,
        StateDictType,
    )

    first = dist.get_rank() == 0
    for backend in DIVIDED:
        model: Any = fsshard.wrap(plain(), backend=backend)
        full = FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
        for told, arguments in (
            (
                "expected torch's FullStateDictConfig, since fsshard returns whole tensors",
                {"config": ShardedStateDictConfig()},
            ),
            ("give one of them", {"config": full, "rank0_only": True}),
            ("pass the same everywhere", {"rank0_only": first}),
        ):
            with refused(told):
                model.state_dict(**arguments)
        assert bool(model.state_dict(config=full)) == first
        with refused("pass what fsshard.wrap returned, and call its state_dict()"):
            inner = model.module[1] if backend == "fsdp" else model.module
            FullyShardedDataParallel.set_state_dict_type(inner, StateDictType.FULL_STATE_DICT, full)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, full):
            assert bool(model.state_dict()) == first


class Doubles(Scale):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return super().forward(x)


def doubling() -> Any:
    model = plain()
    model[1] = Doubles(model[1].weight.detach().clone())
    return model


def case_units_that_write_to_their_input() -> None:
    for backend in ENGINES:
        apart = {"backend": backend, **({"merge_below": 0} if backend == "fsdp2" else {})}
        told = "make the operation out of place, or leave the module out of auto_wrap_policy"
        refuse(told, doubling, auto_wrap_policy={Doubles}, **apart)
        right(doubling, auto_wrap_policy=None, **apart)


def case_derivatives_by_functions() -> None:
    from torch.autograd import forward_ad

    x, tangent = torch.ones(3, 4), torch.ones(3, 4)
    settings: dict[str, Any] = {"auto_wrap_policy": {nn.Linear}, "activation_checkpointing": {nn.Linear}}
    model = fsshard.wrap(plain(), backend="ddp", **settings)
    with refused("use torch.autograd.grad(..., create_graph=True), or leave activation_checkpointing off"):
        torch.func.grad(lambda value: model(value).sum())(x)
    value = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(plain()(value).sum(), value)
    (found,) = torch.autograd.grad(model(value).sum(), value, create_graph=True)
    assert torch.equal(found, expected)
    model = fsshard.wrap(plain(), backend="ddp")
    assert torch.equal(torch.func.grad(lambda value: model(value).sum())(x), expected)
    expected = torch.func.jvp(plain(), (x,), (tangent,))[1]
    refusing: tuple[dict[str, Any], ...] = (
        {"backend": "fsdp2", "auto_wrap_policy": {nn.Linear}, "merge_below": 0},
        {"backend": "ddp", "find_unused_parameters": True},
    )
    for settings in refusing:
        model = fsshard.wrap(plain(), **settings)
        told = "use torch.func.jvp (under 'ddp' without find_unused_parameters), or backend='fairscale'"
        with refused(told), forward_ad.dual_level():
            model(forward_ad.make_dual(x, tangent))
        model = fsshard.wrap(plain(), **{**settings, "find_unused_parameters": False})
        assert torch.allclose(torch.func.jvp(model, (x,), (tangent,))[1], expected)
    model = fsshard.wrap(plain(), backend="ddp", find_unused_parameters=True)
    with refused("leave them off, or use backend='fairscale'"):
        torch.func.vmap(lambda rows: model(rows))(batch())
    model = fsshard.wrap(plain(), backend="fsdp")
    with refused("use backend='ddp' or 'fairscale'"):
        torch.func.vmap(lambda rows: model(rows))(batch())


def case_trackers() -> None:
    model = fsshard.wrap(plain(), backend="ddp")
    with refused("hand over a torch.utils.tensorboard.SummaryWriter, a MemoryTracker takes a folder too"):
        model.memory_report().write(object(), 0)
    tracker = fsshard.MemoryTracker(model)
    with tracker:
        with refused("call step() after the optimizer's, or leave the context"):
            tracker.report()
        train(model, steps=1)
        tracker.step()
        tracker.report()
    with refused("hand over one model, or several"):
        fsshard.MemoryTracker()
    compiled = fsshard.wrap(plain(), backend="ddp", compile={"backend": "aot_eager"})
    with refused("track it without compile="):
        fsshard.MemoryTracker(compiled).__enter__()
    with refused("make another one, or leave it first"), tracker, tracker:
        pass


@pytest.mark.parametrize("case", cases(globals()), ids=lambda case: case.__name__)
def test_advice_is_right(ranks: Any, case: Any) -> None:
    ranks.run(case, 2)
