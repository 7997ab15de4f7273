"""Manual optimization: each ``self(...)`` of a training step is a forward of the engine, with its backward after it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from fsshard.complex_params.slots import public_name
from fsshard.errors import ConfigurationError
from fsshard.sharded.module import ShardedModule

__all__ = ["ThroughEngine"]


class ThroughEngine:
    """Sends a LightningModule's calls of itself to its wrapper while a training step runs outside of it.

    Args:
        module: the LightningModule, whose ``forward`` is replaced.
        wrapped: what ``fsshard.wrap`` made of it.
    """

    def __init__(self, module: nn.Module, wrapped: ShardedModule) -> None:
        self._own, self._wrapped = module.forward, wrapped
        self._active = self._within = False
        changed: Any = module
        changed.forward, changed.toggle_optimizer = self._forward, _refuse_to_toggle
        for name, part in module.named_modules():
            if part is not module and next(part.parameters(recurse=False), None) is not None:
                part.register_forward_pre_hook(self._guard(public_name(name)))

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around ``training_step``."""
        self._active = True
        try:
            yield
        finally:
            self._active = False

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._active or self._within:
            return self._own(*args, **kwargs)
        self._within = True
        try:
            return self._wrapped(*args, **kwargs)
        finally:
            self._within = False

    def _guard(self, name: str) -> Any:
        def check(*_: Any) -> None:
            if self._active and not self._within:
                raise ConfigurationError(
                    f"training_step calls {name!r} past the engine, which gathers weights and gradients in self(...) "
                    "only; with manual optimization let forward call the parts: self('generator', noise)"
                )

        return check


def _refuse_to_toggle(*_: Any, **__: Any) -> None:
    raise ConfigurationError(
        "toggle_optimizer (and toggle_model) switches requires_grad of parameters whose gradients an engine waits for; "
        "leave it out and call zero_grad of an optimizer right before the backward that is its own"
    )
