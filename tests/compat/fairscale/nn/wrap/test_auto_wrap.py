"""wrap, auto_wrap and their policies: FairScale's behaviour, checked against the real one."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import fairscale
import fairscale.nn.wrap
import pytest
import torch
from torch import Tensor, nn

import fsshard.compat.fairscale as mirror
from tests.oss.trainings import refusal

real = sys.modules["fairscale.nn.wrap.auto_wrap"]
ours = sys.modules["fsshard.compat.fairscale.nn.wrap.auto_wrap"]


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module, tag: str = "", level: int = 0) -> None:
        super().__init__()
        self.module, self.tag, self.level = module, tag, level

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


@pytest.fixture(params=[real, ours], ids=["real", "ours"])
def library(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield request.param
    request.param.ConfigAutoWrap.disable_autowrap_context()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), nn.ModuleList([nn.Linear(9, 9)])
    )


def shape(module: nn.Module) -> Any:
    """The tree of a module: what is wrapped, with which settings."""
    inner = [shape(child) for child in module.children()]
    return (type(module).__name__, getattr(module, "tag", None), getattr(module, "level", None), inner)


# ------------------------------------------------------------------------------------------------ the names


@pytest.mark.parametrize("package", [fairscale, mirror], ids=["real", "ours"])
def test_wrap_is_function_and_package(package: Any) -> None:
    name = package.__name__
    assert inspect.isfunction(package.nn.wrap) and inspect.ismodule(sys.modules[f"{name}.nn.wrap"])
    found = {}
    exec(f"from {name}.nn.wrap import auto_wrap, enable_wrap, wrap", found)
    assert found["wrap"] is package.nn.wrap and found["auto_wrap"] is package.nn.auto_wrap
    exec(f"from {name}.nn.wrap.auto_wrap import ConfigAutoWrap", found)
    assert importlib.import_module(f"{name}.nn.wrap.auto_wrap").ConfigAutoWrap is found["ConfigAutoWrap"]
    with pytest.raises(ImportError):
        exec(f"import {name}.nn.wrap.auto_wrap as hidden_by_the_function", found)


# ------------------------------------------------------------------------------------------------ wrap


def test_wrap(library: Any) -> None:
    """The context's settings come first, then those of the module, then those of the call."""
    layer, own = nn.Linear(5, 5), nn.Linear(5, 5)
    own.wrapper_config = {"tag": "mine", "level": 1}
    assert library.wrap(layer) is library.auto_wrap(layer) is layer
    with library.enable_wrap(wrapper_cls=Wrapper, tag="outer", level=5):
        wrapped = [library.wrap(layer), library.wrap(layer, level=2), library.wrap(own), library.wrap(own, level=3)]
    assert [(each.tag, each.level) for each in wrapped] == [("outer", 5), ("outer", 2), ("mine", 1), ("mine", 3)]
    with pytest.raises(KeyError), library.enable_wrap(wrapper_cls=Wrapper):
        raise KeyError
    assert library.wrap(layer) is layer and library.ConfigAutoWrap.wrapper_cls is None


def test_what_the_real_one_does_not() -> None:
    """Raw: it stays in a context after a missing class, works once, and takes no ``wrapper_cls`` of a module."""
    layer = nn.Linear(5, 5)
    layer.wrapper_config = {"wrapper_cls": nn.Sequential}
    for library in (real, ours):
        context = library.ConfigAutoWrap(wrapper_cls=Wrapper)
        with context:
            seen = refusal(lambda library=library: library.wrap(layer))
        again = refusal(context.__enter__)
        library.ConfigAutoWrap.disable_autowrap_context()
        with pytest.raises(AssertionError), library.enable_wrap():
            pass
        stuck = library.ConfigAutoWrap.in_autowrap_context
        library.ConfigAutoWrap.disable_autowrap_context()
        told = [None if each is None else each[0] for each in (seen, again)]
        assert (told, stuck) == ((["TypeError", "AssertionError"], True) if library is real else ([None, None], False))


def test_move_module_cuda_half(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "cuda", lambda self: self)
    with library.enable_wrap(wrapper_cls=Wrapper, move_module_cuda_half=True):
        assert library.wrap(nn.Linear(2, 2)).module.weight.dtype == torch.float16
    with library.enable_wrap(wrapper_cls=Wrapper):
        assert library.wrap(nn.Linear(2, 2)).module.weight.dtype == torch.float32


def test_bad_use(library: Any) -> None:
    with library.enable_wrap(wrapper_cls=Wrapper):
        with pytest.raises(NotImplementedError), library.enable_wrap(wrapper_cls=Wrapper):
            pass
        with pytest.raises(AssertionError):
            library.auto_wrap(nn.Sequential(Wrapper(nn.Linear(2, 2))))
        layer = nn.Linear(2, 2)
        layer.wrapper_config = "no dict"
        with pytest.raises(AssertionError):
            library.wrap(layer)
    with pytest.raises(AssertionError), library.enable_wrap(tag="without wrapper_cls"):
        pass


# ------------------------------------------------------------------------------------------------ auto_wrap


POLICIES: dict[str, dict[str, Any]] = {
    "small": {"min_num_params": 20},
    "pairs": {"min_num_params": 60},
    "root too": {"min_num_params": 60, "skip_params_check_for_root": True},
    "all": {"min_num_params": 0},
    "none": {},
    "leaves": {"min_num_params": 20, "force_leaf_modules": {nn.Sequential}},
    "no linear": {"min_num_params": 20, "exclude_wrap_modules": {nn.Linear}},
}


@pytest.mark.parametrize("kind", list(POLICIES))
def test_auto_wrap_as_the_real_one(kind: str) -> None:
    shapes = []
    for library in (real, ours):
        policy = functools.partial(library.default_auto_wrap_policy, **POLICIES[kind])
        with library.enable_wrap(wrapper_cls=Wrapper, tag="outer"):
            by_argument = library.auto_wrap(model(), policy, level=4)
        with library.enable_wrap(policy, wrapper_cls=Wrapper):
            by_context = library.auto_wrap(model())
        shapes.append((shape(by_argument), shape(by_context)))
    assert shapes[0] == shapes[1]


def test_attention_is_a_leaf(library: Any) -> None:
    attention = nn.Sequential(nn.MultiheadAttention(8, 1), nn.Linear(8, 8))
    with library.enable_wrap(wrapper_cls=Wrapper):
        wrapped = library.auto_wrap(attention, functools.partial(library.default_auto_wrap_policy, min_num_params=40))
    assert isinstance(wrapped.module[0], nn.MultiheadAttention) and isinstance(wrapped.module[1], Wrapper)
    assert not isinstance(wrapped.module[0].out_proj, Wrapper)


def test_config_policy(library: Any) -> None:
    layers = model()
    layers[1].wrapper_config = {"tag": "tagged"}
    layers[1][0].wrapper_config = {"level": 2}
    with library.enable_wrap(library.config_auto_wrap_policy, wrapper_cls=Wrapper):
        wrapped = library.auto_wrap(layers)
    assert isinstance(wrapped[0], nn.Linear) and wrapped[1].tag == "tagged"
    assert wrapped[1].module[0].level == 2 and isinstance(wrapped[1].module[1], nn.Linear)


def test_a_function_as_wrapper() -> None:
    """``wrapper_cls=checkpoint_wrapper``: FairScale asks isinstance of it, a TypeError."""
    policy = functools.partial(real.default_auto_wrap_policy, min_num_params=20)
    with real.enable_wrap(wrapper_cls=fairscale.nn.checkpoint_wrapper), pytest.raises(TypeError, match="isinstance"):
        real.auto_wrap(model(), policy)
    layers = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    with ours.enable_wrap(wrapper_cls=mirror.nn.checkpoint_wrapper, offload_to_cpu=False):
        wrapped = ours.auto_wrap(layers, policy)
    assert wrapped is layers and all("forward" in layer.__dict__ for layer in layers)

    def run(module: nn.Module) -> Tensor:
        return module(torch.ones(2, 5))

    run(wrapped).sum().backward()
    assert layers[0].weight.grad is not None
