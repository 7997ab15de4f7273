"""The advice of fsshard/model, complex_params and planning, followed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from tests.advice.following import DIVIDED, batch, cases, is_right, plain, refuse, refused, right
from tests.models import net

ENGINES = ("ddp", "fairscale", *DIVIDED)
FSDP2 = {"backend": "fsdp2"}
COMPILED: dict[str, Any] = {**FSDP2, "compile": {"backend": "aot_eager"}}


def with_third(module: nn.Module) -> Any:
    return nn.Sequential(*plain(), module)


def hollow(build: Callable[[], Any] = plain) -> Any:
    with torch.device("meta"):
        return build()


def fill(module: Any) -> None:
    for value in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        nn.init.ones_(value)


class Table(nn.Module):
    """A buffer that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Any:
        return x * self.table


def case_shapes_and_places() -> None:
    lazy = with_third(nn.LazyLinear(3))
    refuse("run one forward first", lambda: lazy, **FSDP2)
    lazy(torch.ones(1, 4))
    right(lambda: copy.deepcopy(lazy), **FSDP2)
    split = plain()
    split[0].to("meta")
    refuse("build the whole model under torch.device('meta'), or all of it outside", lambda: split, **FSDP2)
    told = "no such method in 1 (Scale); pass a function that initialises a module"
    refuse(told, hollow, param_init_fn="reset_parameters", **FSDP2)
    fsshard.wrap(hollow(), param_init_fn=fill, **FSDP2)
    first = dist.get_rank() == 0
    right(lambda: plain() if first else hollow(), plain, **FSDP2)
    refuse("make rank 0's the real one", lambda: hollow() if first else plain(), **FSDP2)
    model = fsshard.wrap(hollow(), **FSDP2)
    with refused("load a state dict that has them, or wrap with a param_init_fn that sets them"):
        model(batch())
    model.load_state_dict(plain().state_dict())
    is_right(model)


def case_buffers_without_values() -> None:
    def build() -> Any:
        return with_third(Table())

    model = fsshard.wrap(hollow(build), **FSDP2)
    model.load_state_dict(plain().state_dict())
    with refused("wrap with a param_init_fn that sets them (what it leaves alone can come from a state dict"):
        model(batch())
    model = fsshard.wrap(hollow(build), param_init_fn=lambda m: fill(m) if isinstance(m, Table) else None, **FSDP2)
    model.load_state_dict(plain().state_dict())
    is_right(model, build)
    half = with_third(hollow(Table))
    told = "materialise them before wrap, or build the whole model under torch.device('meta')"
    refuse(told, lambda: half, **FSDP2)
    half[3].table = torch.ones(2)
    right(lambda: half, build, **FSDP2)


def doubled(model: Any = None) -> Any:
    model = plain() if model is None else model
    model.register_forward_hook(lambda module, _, output: output * 2)
    return model


def compiled(build: Callable[[], Any] = plain) -> Any:
    return torch.compile(build(), backend="aot_eager")


def case_compiled_models() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    scripted = with_third(torch.jit.script(nn.Linear(2, 2)))
    refuse("wrap the module that torch.jit was given (fsshard.wrap(..., compile=True)", lambda: scripted, **FSDP2)
    right(**COMPILED)
    refuse("leave one out", compiled, **COMPILED)
    right(compiled, plain, **FSDP2)
    told = "register them on the module before torch.compile, or on what wrap returns"
    refuse(told, lambda: doubled(compiled()), **FSDP2)
    right(lambda: compiled(doubled), doubled, **FSDP2)
    is_right(doubled(fsshard.wrap(compiled(), **FSDP2)), doubled)
    refuse("wrap the bare module", lambda: torch.compiler.disable(plain()), **FSDP2)
    before = with_third(checkpoint_wrapper(nn.Linear(2, 2)))
    refuse("remove it and use activation_checkpointing=", lambda: before, auto_wrap_policy=None, **COMPILED)
    settings = {"activation_checkpointing": {nn.Linear}, **COMPILED}
    told = "name the blocks in auto_wrap_policy, too, so that each is compiled by itself"
    refuse(told, auto_wrap_policy=None, **settings)
    right(auto_wrap_policy={nn.Linear}, **settings)


def trains(model: Any, dtype: torch.dtype = torch.float32) -> None:
    """Train one step that changes every weight; of what is narrower there is no other judge here."""
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(batch().to(dtype)).float().square().mean().backward()
    optimizer.step()
    after = model.state_dict()
    assert any(not torch.equal(before[name], after[name]) for name, _ in model.named_parameters())


class SharedBuffer(nn.Module):
    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.net = net()
        self.net.middle[0].register_buffer("shift", torch.ones(1))
        self.net.last.register_buffer("shift", self.net.middle[0].shift if shared else torch.ones(1))

    def forward(self, x: Tensor) -> Any:
        return self.net(x)


class Box:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class MakesFloats(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = plain()

    def forward(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return self.layers(x["value"] if isinstance(x, dict) else x.value)
        return self.layers(x.float() + torch.ones(4))


def case_precisions() -> None:
    with refused("leave fp32_units=None"):
        fsshard.Precision(fp32_units=torch.bfloat16)
    precision = fsshard.Precision(param=torch.bfloat16, fp32_units=None)
    trains(fsshard.wrap(net(), backend="ddp", mixed_precision=precision))
    with refused("call model.float() before wrap, or leave mixed_precision=None"):
        fsshard.wrap(plain().bfloat16(), backend="ddp", mixed_precision="bf16")
    trains(fsshard.wrap(plain().bfloat16().float(), backend="ddp", mixed_precision="bf16"))
    trains(fsshard.wrap(plain().bfloat16(), backend="ddp"), torch.bfloat16)
    narrow = {"mixed_precision": fsshard.Precision(param=torch.bfloat16, buffer=torch.bfloat16)}
    with refused("leave buffer=None, or give each its own tensor"):
        fsshard.wrap(SharedBuffer(shared=True), backend="ddp", **narrow)
    trains(fsshard.wrap(SharedBuffer(shared=False), backend="ddp", **narrow))
    trains(fsshard.wrap(SharedBuffer(shared=True), backend="ddp", mixed_precision="bf16"))
    with torch.no_grad():
        for backend in ENGINES:
            model = fsshard.wrap(MakesFloats(), backend=backend, mixed_precision="bf16", auto_wrap_policy=None)
            with refused("call the model under `with model.autocast():`, which casts per operation too"):
                model(batch())
            with model.autocast():
                model(batch())
            with refused("pass them in a dict, list, tuple or dataclass"):
                model(Box(batch()))
            model({"value": batch()})


def case_complex_parameters() -> None:
    from fsshard.compat.fairscale.nn.data_parallel import FullyShardedDataParallel

    with refused("which takes complex ones"):
        FullyShardedDataParallel(net())
    right(net, **FSDP2)


@pytest.mark.parametrize("case", cases(globals()), ids=lambda case: case.__name__)
def test_advice_is_right(ranks: Any, case: Any) -> None:
    ranks.run(case, 2)
