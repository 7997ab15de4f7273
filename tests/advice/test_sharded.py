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
from tests.advice.following import DIVIDED, Scale, batch, cases, is_right, plain, refused, square
from tests.models import net
from tests.training_runs import differences, shared_folder

ENGINES = ("ddp", "fairscale", *DIVIDED)


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
            for module in (net, plain):  # with complex weights and without
                model = fsshard.wrap(module(), backend=backend)
                optimizer = fsshard.build_optimizer(model, torch.optim.Adam, lr=0.1)
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
                step(model, optimizer)
                model.load_state_dict(states[0])
                optimizer.load_state_dict(states[1])
                assert not list(differences(states, [model.state_dict(), optimizer.state_dict()]))


def case_optimizers_of_others() -> None:
    build, sgd = "fsshard.build_optimizer", torch.optim.SGD
    module = plain()
    stepped = sgd(module.parameters(), lr=0.1, momentum=0.9)
    square(module, batch(0, 0)).backward()
    stepped.step()
    with shared_folder() as folder:
        file = folder / "both.pt"
        with refused(
            "build the optimizer of the wrapped model with fsshard.build_optimizer, and fsshard.load(file, model"
        ):
            fsshard.wrap(module, stepped, backend="fsdp2")
        if dist.get_rank() == 0:
            torch.save({"model": module.state_dict(), "optimizer": stepped.state_dict()}, file)
        dist.barrier()
        for backend in ENGINES:
            model = fsshard.wrap(plain(), backend=backend)
            optimizer = fsshard.build_optimizer(model, sgd, lr=0.1, momentum=0.9)
            fsshard.load(file, model, optimizer)
            found, weights = optimizer.state_dict()["state"], model.state_dict()
            for name, parameter in module.named_parameters():
                assert torch.equal(found[name]["momentum_buffer"], stepped.state[parameter]["momentum_buffer"])
                assert torch.equal(weights[name], parameter)
    with refused("optimizer is an empty list; leave it out, and build one with fsshard.build_optimizer"):
        fsshard.wrap(plain(), [], backend="fsdp2")
    with refused("wrap it first"):
        fsshard.build_optimizer(plain(), sgd, lr=0.1)
    model = fsshard.wrap(plain(), backend="fsdp2")
    with refused("pass None for all parameters"):
        fsshard.build_optimizer(model, sgd, [], lr=0.1)
    assert len(fsshard.build_optimizer(model, sgd, None, lr=0.1).entries) == 5
    weight = "0.weight"
    with refused("leave the group out"):
        fsshard.build_optimizer(model, sgd, [{"params": [weight]}, {"params": []}], lr=0.1)
    fsshard.build_optimizer(model, sgd, [{"params": [weight]}], lr=0.1)
    with refused("pass its name instead"):
        fsshard.build_optimizer(model, sgd, [plain()[0].weight], lr=0.1)
    fsshard.build_optimizer(model, sgd, ["0.weight"], lr=0.1)
    module, other = plain(), plain()
    with refused("hand over the optimizer of this model"):
        fsshard.wrap(module, sgd(other.parameters(), lr=0.1), backend="fsdp2")
    step(*fsshard.wrap(module, sgd(module.parameters(), lr=0.1), backend="fsdp2"))
    module = plain()
    before = sgd(module.parameters(), lr=0.1)
    model, optimizer = fsshard.wrap(module, before, backend="fsdp2")
    with refused("use the one that wrap returned"):
        step(model, before)
    step(model, optimizer)
    pairs = fsshard.tensorfy(net())
    with refused(f"hand over the bare model, or build the optimizer with {build}"):
        fsshard.wrap(pairs, sgd(pairs.parameters(), lr=0.1), backend="ddp")
    bare = net()
    step(*fsshard.wrap(bare, sgd(bare.parameters(), lr=0.1), backend="ddp"))
    model = fsshard.wrap(fsshard.tensorfy(net()), backend="ddp")
    step(model, fsshard.build_optimizer(model, sgd, lr=0.1))
    for backend, make in (("ddp", net), ("fairscale", plain), ("fsdp", plain)):
        model = fsshard.wrap(make(), backend=backend)
        if backend == "fairscale":
            fsshard.build_optimizer(model, sgd, lr=0.1)
        with refused(f"build the optimizer with {build}"):
            square(model, batch()).backward()
            sgd(model.parameters(), lr=0.1).step()
        is_right(fsshard.wrap(make(), backend=backend), make)


def case_schedulers() -> None:
    adam, decay = torch.optim.Adam, torch.optim.lr_scheduler.ExponentialLR
    module = plain()
    optimizer = adam(module.parameters())
    scheduler = decay(optimizer, 0.5)
    with refused("hand over its optimizer, too: fsshard.wrap(model, optimizer, scheduler)"):
        fsshard.wrap(module, scheduler=scheduler, backend="fsdp2")
    model, handed, rate = fsshard.wrap(module, optimizer, scheduler, backend="fsdp2")
    step(model, handed)
    rate.step()
    assert handed.param_groups[0]["lr"] == 0.0005
    module = plain()
    model, handed = fsshard.wrap(module, adam(module.parameters()), backend="fsdp2")
    rate = decay(handed, 0.5)
    step(model, handed)
    rate.step()
    assert handed.param_groups[0]["lr"] == 0.0005
    module = plain()
    first, second = adam(module[0].parameters()), adam(module[2].parameters())
    rates = [decay(first, 0.5), decay(second, 0.5)]
    with refused("pass it to fsshard.wrap, too: wrap(model, [optimizer, other], [scheduler, ...])"):
        fsshard.wrap(module, first, rates[1], backend="fsdp2")
    fsshard.wrap(module, [first, second], rates, backend="fsdp2")


def case_groups_that_change() -> None:
    model = fsshard.wrap(plain(), backend="fairscale")
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, ["0.weight", "0.bias"], lr=0.1)
    with refused("build a second optimizer over the new parameters"):
        optimizer.add_param_group({"params": ["1.weight", "2.weight", "2.bias"]})
    second = fsshard.build_optimizer(model, torch.optim.SGD, ["1.weight", "2.weight", "2.bias"], lr=0.1)
    square(model, batch()).backward()
    optimizer.step()
    second.step()
    bare = plain()
    (sum(square(bare, batch(0, rank)) for rank in range(2)) / 2).backward()
    for name, parameter in bare.named_parameters():
        assert torch.allclose(model.state_dict()[name], parameter - 0.1 * parameter.grad)
    model = fsshard.wrap(plain(), backend="fsdp2")
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    with refused("give each parameter that is to be stepped once"):
        optimizer.param_groups = [{"params": ["0.weight"]}, {"params": ["0.weight"]}]
    optimizer.param_groups = [{"params": ["0.weight"]}, {"params": ["0.bias"]}]
    step(model, optimizer)


class WithMode(torch.optim.SGD):
    def train(self) -> None:
        raise AssertionError("on this rank's parts")


def case_methods_of_an_optimizer() -> None:
    model = fsshard.wrap(plain(), backend="fsdp2")
    optimizer: Any = fsshard.build_optimizer(model, WithMode, lr=0.1)
    with refused("use what torch.optim.Optimizer has, such as param_groups[0]['lr']"):
        optimizer.train()
    assert optimizer.param_groups[0]["lr"] == 0.1
    with refused("keep its state_dict() instead"):
        copy.deepcopy(optimizer)
    assert copy.deepcopy(optimizer.state_dict())["param_groups"][0]["lr"] == 0.1


def case_unused_parameters() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.spare = plain(), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Any:
            return self.layers(x)

    def build() -> Any:
        torch.manual_seed(0)
        return Unused()

    for backend in ENGINES:
        model = fsshard.wrap(build(), backend=backend)
        optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
        with refused("pass find_unused_parameters=True to fsshard.wrap"):
            step(model, optimizer)
        is_right(fsshard.wrap(build(), backend=backend, find_unused_parameters=True), build)


def case_local_gradients() -> None:
    for backend in ENGINES:
        model = fsshard.wrap(plain(), backend=backend)
        optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
        with model.no_sync():
            square(model, batch(0)).backward()
        with refused("run the last micro-batch outside of it (also in an incomplete last round of accumulation)"):
            optimizer.step()
        square(model, batch(1)).backward()
        optimizer.step()
        bare = plain()
        (sum(square(bare, batch(micro, rank)) for micro in (0, 1) for rank in (0, 1)) / 2).backward()
        for name, parameter in bare.named_parameters():
            assert torch.allclose(model.state_dict()[name], parameter - 0.1 * parameter.grad, atol=1e-6)


def case_loss_scales() -> None:
    with refused("for a plain model use torch.amp.GradScaler"):
        fsshard.GradScaler(plain())  # type: ignore[arg-type]
    bare = plain()
    scaler: Any = torch.amp.GradScaler("cpu")
    optimizer: Any = torch.optim.SGD(bare.parameters(), lr=0.1)
    scaler.scale(square(bare, batch())).backward()
    scaler.step(optimizer)
    model = fsshard.wrap(plain(), backend="ddp")
    scaler = fsshard.GradScaler(model)
    with refused("build it with fsshard.build_optimizer"):
        scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))
    scaled(fsshard.wrap(plain(), backend="ddp"))
    for backend in (*DIVIDED, "fairscale"):
        model = fsshard.wrap(plain(), backend=backend)
        optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(square(model, batch())).backward()
        with refused("use fsshard.GradScaler(model)"):
            scaler.step(optimizer)
        scaled(fsshard.wrap(plain(), backend=backend))
    model = fsshard.wrap(plain(), backend="ddp")
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    scaler = fsshard.GradScaler(model, init_scale=2.0 ** dist.get_rank())
    scaler.scale(square(model, batch())).backward()
    with refused("create the scaler with the same init_scale, and load its state, on every rank"):
        scaler.step(optimizer)
    optimizer.zero_grad()
    scaled(model)


def scaled(model: Any) -> None:
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    scaler = fsshard.GradScaler(model, init_scale=8.0)
    scaler.scale(square(model, batch())).backward()
    scaler.step(optimizer)
    scaler.update()
    bare = plain()
    (sum(square(bare, batch(0, rank)) for rank in range(2)) / 2).backward()
    for name, parameter in bare.named_parameters():
        assert torch.allclose(model.state_dict()[name], parameter - 0.1 * parameter.grad, atol=1e-6)


def case_half_without_a_scale() -> None:
    def stepped(precision: str, scaler: bool) -> None:
        model = fsshard.wrap(plain(), backend="ddp", mixed_precision=precision)
        optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
        scale = fsshard.GradScaler(model, init_scale=8.0, enabled=scaler)
        scale.scale(model(batch()).float().square().mean()).backward()
        scale.step(optimizer)

    with pytest.warns(UserWarning, match=r"use fsshard\.GradScaler\(model\), or mixed_precision='bf16'"):
        stepped("fp16", scaler=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        stepped("fp16", scaler=True)
        stepped("bf16", scaler=False)


def case_kernels_of_complex_numbers() -> None:
    for backend in ENGINES:
        model = fsshard.wrap(net(), backend=backend)
        with refused("use foreach=True, or see_complex=False, which shows the optimizer real pairs"):
            fsshard.build_optimizer(model, torch.optim.AdamW, fused=True)
        step(model, fsshard.build_optimizer(model, torch.optim.AdamW, foreach=True))
        model = fsshard.wrap(net(), backend=backend)
        step(model, fsshard.build_optimizer(model, torch.optim.AdamW, fused=True, see_complex=False))


class KeepsModuli(torch.optim.Optimizer):
    """Its state is real for complex weights."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["moduli"] = parameter.grad.abs()
                parameter.data -= group["lr"] * parameter.grad


def case_states_of_another_kind() -> None:
    model = fsshard.wrap(net(), backend="fsdp2")
    with refused("use 'fairscale' or 'ddp', or see_complex=False"):
        step(model, fsshard.build_optimizer(model, KeepsModuli, separable=True))
    for backend in ("fairscale", "ddp"):
        model = fsshard.wrap(net(), backend=backend)
        step(model, fsshard.build_optimizer(model, KeepsModuli, separable=True))
    model = fsshard.wrap(net(), backend="fsdp2")
    step(model, fsshard.build_optimizer(model, KeepsModuli, separable=True, see_complex=False))


def case_optimizers_that_need_more() -> None:
    names = {"MyMuon": ("fairscale", "ddp"), "ClipsInside": ("ddp",)}
    for name, able in names.items():
        cls = getattr(written, name)
        advice = "use backend='fairscale' or 'ddp'" if len(able) == 2 else "use backend='ddp'"
        with refused(advice):
            fsshard.build_optimizer(fsshard.wrap(plain(), backend="fsdp2"), cls)
        for backend in able:
            model = fsshard.wrap(plain(), backend=backend)
            step(model, fsshard.build_optimizer(model, cls))
        model = fsshard.wrap(plain(), backend="fsdp2")
        step(model, fsshard.build_optimizer(model, cls, separable=True))  # as who is told "if that is wrong" says
    with pytest.raises(fsshard.FsshardError, match="pass the same on every rank"):
        fsshard.build_optimizer(fsshard.wrap(plain(), backend="ddp"), torch.optim.SGD, lr=0.1 + dist.get_rank())


def case_matrices() -> None:
    for backend in ("ddp", "fairscale"):
        for see_complex in (True, False):
            model = fsshard.wrap(net(), backend=backend)
            with refused("'first.bias' is real, of shape (6,); give it the names of matrices"):
                fsshard.build_optimizer(model, torch.optim.Muon)
            weight = "middle.0.weight"
            with refused(f"{weight!r} is complex, of shape (6, 6); give it the names of matrices"):
                fsshard.build_optimizer(model, torch.optim.Muon, [weight], see_complex=see_complex)
            matrices = ["first.weight", "last.weight"]
            muon = fsshard.build_optimizer(model, torch.optim.Muon, matrices)
            rest = [name for name, _ in model.named_parameters() if name not in matrices]
            others = fsshard.build_optimizer(model, torch.optim.AdamW, rest)
            square(model, batch()).backward()
            muon.step()
            others.step()
        module = net()
        with refused("'middle.0.weight' is complex, of shape (6, 6)"):
            fsshard.wrap(module, torch.optim.Muon([module.middle[0].weight]), backend=backend)


def case_copies_and_moves() -> None:
    for backend in ENGINES:
        model = fsshard.wrap(plain(), backend=backend)
        with refused("keep model.state_dict(), or"):
            copy.deepcopy(model)
        if backend in ("ddp", "fairscale"):
            assert torch.equal(copy.deepcopy(model.module)[0].weight, plain()[0].weight)
        copied = plain()
        copied.load_state_dict(model.state_dict())
        before = plain()
        copied = copy.deepcopy(before)
        fsshard.wrap(before, backend=backend)
        with refused("before fsshard.wrap"):
            model.double()
        is_right(
            fsshard.wrap(plain().double(), backend=backend),
            lambda: plain().double(),
            lambda m, x: square(m, x.double()),
        )
        images: Any = fsshard.wrap(nn.Sequential(nn.Conv2d(1, 1, 1)), backend=backend)
        with refused("model.to(memory_format=...) before fsshard.wrap"):
            images.to(memory_format=torch.channels_last)
        fsshard.wrap(nn.Sequential(nn.Conv2d(1, 1, 1)).to(memory_format=torch.channels_last), backend=backend)
        with refused("use assign=False"):
            model.load_state_dict(plain().state_dict(), assign=True)
        model.load_state_dict(plain().state_dict(), assign=False)


class Generates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = plain()

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)

    def save_pretrained(self, folder: str) -> Any:
        return self.layers.state_dict()


def case_methods_that_need_whole_weights() -> None:
    x = torch.ones(1, 4)
    for backend in ("fsdp", "fsdp2"):
        model: Any = fsshard.wrap(Generates(), backend=backend)
        with refused("inside `with model.full_parameters():` (entered on every rank), or use model.state_dict()"):
            model.save_pretrained("folder")
        with model.full_parameters(), torch.no_grad():
            found = model.save_pretrained("folder")
            with refused("leave the context first"):
                model(x)
        assert torch.equal(found["0.weight"], plain().state_dict()["0.weight"])
        model(x)


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
    model.load_state_dict(plain().state_dict())
    with refused("clip with model.clip_grad_norm_(max_norm)"):
        weight.grad  # noqa: B018
    assert model.clip_grad_norm_(1.0) > 0
    with refused("that fsshard.build_optimizer(model, torch.optim.AdamW, ...) has made"):
        torch.optim.AdamW(model.parameters()).zero_grad()  # before the first step, in a loop that begins with it
    optimizer = fsshard.build_optimizer(model, torch.optim.AdamW)
    optimizer.zero_grad()
    square(model, batch()).backward()
    optimizer.step()
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

    for backend in DIVIDED:
        model: Any = fsshard.wrap(plain(), backend=backend)
        with refused("expected torch's FullStateDictConfig, since fsshard returns whole tensors"):
            model.state_dict(config=ShardedStateDictConfig())
        full = FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
        assert bool(model.state_dict(config=full)) == (dist.get_rank() == 0)
        with refused("give one of them"):
            model.state_dict(config=full, rank0_only=True)
        with refused("pass the same everywhere"):
            model.state_dict(rank0_only=dist.get_rank() == 0)
        assert model.state_dict(rank0_only=False)
        with refused("pass what fsshard.wrap returned, and call its state_dict()"):
            inner = model.module[1] if backend == "fsdp" else model.module
            FullyShardedDataParallel.set_state_dict_type(inner, StateDictType.FULL_STATE_DICT, full)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, full):
            assert bool(model.state_dict()) == (dist.get_rank() == 0)


class Doubles(Scale):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return super().forward(x)


class DoublesOutside(Scale):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 2)


def with_unit(kind: type[Scale]) -> Any:
    model = plain()
    model[1] = kind(model[1].weight.detach().clone())
    return model


def case_units_that_write_to_their_input() -> None:
    for backend in ENGINES:
        apart = {"merge_below": 0} if backend == "fsdp2" else {}
        model = fsshard.wrap(with_unit(Doubles), backend=backend, auto_wrap_policy={Doubles}, **apart)
        fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
        with refused("make the operation out of place, or leave the module out of auto_wrap_policy"):
            model(batch())
        right = {"backend": backend, **apart}
        is_right(
            fsshard.wrap(with_unit(DoublesOutside), auto_wrap_policy={DoublesOutside}, **right),
            lambda: with_unit(DoublesOutside),
        )
        is_right(fsshard.wrap(with_unit(Doubles), auto_wrap_policy=None, **right), lambda: with_unit(Doubles))


def case_derivatives_by_functions() -> None:
    from torch.autograd import forward_ad

    x = torch.ones(3, 4)
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
    expected = torch.func.jvp(plain(), (x,), (torch.ones(3, 4),))[1]
    apart = {"auto_wrap_policy": {nn.Linear}, "merge_below": 0}
    refusing: tuple[dict[str, Any], ...] = (
        {"backend": "fsdp2", **apart},
        {"backend": "ddp", "find_unused_parameters": True},
    )
    for settings in refusing:
        model = fsshard.wrap(plain(), **settings)
        advice = "use torch.func.jvp (under 'ddp' without find_unused_parameters), or backend='fairscale'"
        with refused(advice), forward_ad.dual_level():
            model(forward_ad.make_dual(x, torch.ones(3, 4)))
        model = fsshard.wrap(plain(), **{**settings, "find_unused_parameters": False})
        assert torch.allclose(torch.func.jvp(model, (x,), (torch.ones(3, 4),))[1], expected)
    model = fsshard.wrap(plain(), backend="fairscale")
    fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones(3, 4)))).tangent
    assert torch.allclose(found, expected)


def case_trackers() -> None:
    with refused("hand over a torch.utils.tensorboard.SummaryWriter, a MemoryTracker takes a folder too"):
        fsshard.wrap(plain(), backend="ddp").memory_report().write(object(), 0)
    model = fsshard.wrap(plain(), backend="ddp")
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    tracker = fsshard.MemoryTracker(model)
    with tracker:
        with refused("call step() after the optimizer's, or leave the context"):
            tracker.report()
        step(model, optimizer)
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
