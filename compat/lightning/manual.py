"""Manual optimization: each ``self(...)`` of a training step is a forward of the engine, with its backward after it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn

from fsshard.complex_params.slots import public_name
from fsshard.errors import ConfigurationError
from fsshard.planning.entries import Entry
from fsshard.sharded.controller import controller_of
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer
from fsshard.torch_private.autograd import current_graph_task_id


class ThroughEngine:
    """Sends a LightningModule's calls of itself to its wrapper while a training step runs outside of it.

    Args:
        module: the LightningModule, whose calls are redirected before its hooks run: they run once, within the
            wrapper's call, and to the engine its forward ends there.
        wrapped: what ``fsshard.wrap`` made of it.
        optimizers: all of its own.
    """

    def __init__(
        self,
        module: nn.Module,
        wrapped: ShardedModule,
        optimizers: Sequence[ShardedOptimizer],
    ) -> None:
        own = module.forward
        self._optimizers = optimizers
        self._toggled: ShardedOptimizer | None = None
        self._others: list[tuple[Entry, Tensor | None]] = []  # what it is not to touch, and their gradients before
        self._wrapped = wrapped
        self._active = self._within = False
        changed: Any = module
        changed.__class__ = self._redirected(module)
        changed.forward = functools.partial(self._through, own)
        changed.toggle_optimizer = self._toggle
        changed.untoggle_optimizer = self._untoggle
        for name, part in module.named_modules():
            if part is not module and next(part.parameters(recurse=False), None) is not None:
                part.register_forward_pre_hook(self._guard(public_name(name)))

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Context manager around ``training_step``: the module's calls of itself go to the engine."""
        self._active = True
        try:
            yield
        finally:
            self._active = False

    def _redirected(self, module: nn.Module) -> Any:
        """Return the class of ``module``, under its own name, whose calls of ``module`` go through the wrapper."""
        base: Any = type(module)

        def call(this: Any, *args: Any, **kwargs: Any) -> Any:
            own = functools.partial(base.__call__, this)
            if this is module:
                return self._through(own, *args, **kwargs)
            return own(*args, **kwargs)

        named = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
        return type(base)(base.__name__, (base,), {"__call__": call, **named})

    def _toggle(self, optimizer: Any) -> None:
        """Leave, until :meth:`_untoggle`, the gradients of all others' parameters as they are. Collective."""
        if controller_of(self._wrapped).step.is_silent:
            raise ConfigurationError(
                "toggle_model(sync_grad=False), or toggle_optimizer without synchronisation: what is toggled needs the "
                "sum over the ranks; leave sync_grad at True, which accumulates as well"
            )
        # Lightning takes the others' requires_grad away, which engines have built upon. Here they get gradients, which
        # are taken from them again.
        self._toggled = _bare(optimizer)
        own = {entry.name for entry in self._toggled.entries}
        entries = {}
        for optimizer in self._optimizers:
            for entry in optimizer.entries:
                if entry.name not in own:
                    entries[entry.name] = entry
        controller_of(self._wrapped).finish_gradients(list(entries.values()))
        before = [(entry, entry.grad()) for entry in entries.values()]
        self._others = [(entry, None if gradient is None else gradient.clone()) for entry, gradient in before]

    def _untoggle(self, optimizer: Any) -> None:
        """Give the others their gradients of before back. Collective."""
        backend = self._wrapped.backend
        others = self._others
        self._toggled = None
        self._others = []
        controller_of(self._wrapped).finish_gradients([entry for entry, _ in others])
        for entry, before in others:
            now = entry.grad()
            if before is None or now is None:
                backend.zero_grad([entry], set_to_none=True)
            else:
                now.copy_(before)

    def check_may_step(self, optimizer: Any) -> None:
        """Raise ConfigurationError where another optimizer is toggled."""
        if self._toggled is not None and _bare(optimizer) is not self._toggled:
            raise ConfigurationError(
                "an optimizer steps while another one is toggled, and has no gradients then; call untoggle_optimizer "
                "of the other one first"
            )

    @property
    def _is_outside(self) -> bool:
        """Return whether the training step calls, and neither the engine nor a backward, which computes again."""
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


def _bare(optimizer: Any) -> Any:
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
