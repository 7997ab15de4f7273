"""Manual optimization: each ``self(...)`` of a training step is a forward of the engine, with its backward after it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from torch import nn

from fsshard.complex_params.slots import public_name
from fsshard.errors import ConfigurationError
from fsshard.sharded.module import ShardedModule
from fsshard.torch_private.autograd import current_graph_task_id
from fsshard.torch_private.fsdp1 import WRAPPED

__all__ = ["ThroughEngine"]


class ThroughEngine:
    """Sends a LightningModule's calls of itself to its wrapper while a training step runs outside of it.

    Args:
        module: the LightningModule, whose calls are redirected before its hooks run: they run once, within the
            wrapper's call, and to the engine its forward ends there.
        wrapped: what ``fsshard.wrap`` made of it.
    """

    def __init__(self, module: nn.Module, wrapped: ShardedModule) -> None:
        own = module.forward
        self._wrapped = wrapped
        self._active = self._within = False
        changed: Any = module
        changed.__class__ = self._redirected(module)
        changed.forward, changed.toggle_optimizer = functools.partial(self._through, own), _refuse_to_toggle
        for name, part in module.named_modules():
            if part is not module and next(part.parameters(recurse=False), None) is not None:
                part.register_forward_pre_hook(self._guard(_users_name(name)))

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around ``training_step``."""
        self._active = True
        try:
            yield
        finally:
            self._active = False

    def _redirected(self, module: nn.Module) -> Any:
        """The class of ``module``, under its own name, with calls of ``module`` that go through the wrapper."""
        base: Any = type(module)

        def call(this: Any, *args: Any, **kwargs: Any) -> Any:
            own = functools.partial(base.__call__, this)
            return (self._through if this is module else _plainly)(own, *args, **kwargs)

        named = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
        return type(base)(base.__name__, (base,), {"__call__": call, **named})

    @property
    def _is_outside(self) -> bool:
        """Whether the training step is what calls: neither the engine, nor a backward, which computes again."""
        return self._active and not self._within and current_graph_task_id() == -1

    def _through(self, own: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._is_outside:
            return own(*args, **kwargs)
        self._within = True
        try:
            return self._wrapped(*args, **kwargs)
        finally:
            self._within = False

    def _guard(self, name: str) -> Any:
        def check(*_: Any) -> None:
            if self._is_outside:
                raise ConfigurationError(
                    f"training_step calls {name!r} past the engine, which gathers weights and gradients in self(...) "
                    "only; with manual optimization let forward call the parts: self('generator', noise)"
                )

        return check


def _users_name(name: str) -> str:
    return ".".join(part for part in public_name(name).split(".") if part != WRAPPED)


def _plainly(own: Any, *args: Any, **kwargs: Any) -> Any:
    return own(*args, **kwargs)


def _refuse_to_toggle(*_: Any, **__: Any) -> None:
    raise ConfigurationError(
        "toggle_optimizer (and toggle_model) switches requires_grad of parameters whose gradients an engine waits for; "
        "leave it out and call zero_grad of an optimizer right before the backward that is its own"
    )
