"""Lightning's weight averaging over an engine that divides the weights: each rank keeps the average whole."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import callbacks

from fsshard.sharded.module import ShardedModule

AVERAGING: Any = getattr(callbacks, "WeightAveraging", ())
"""The base of ``EMAWeightAveraging``, since Lightning 2.5.6."""


def average_whole(callback: Any, sharded: Callable[[], ShardedModule | None]) -> None:
    """Give a callback whole weights where it would read, or write, this rank's parts.

    Args:
        callback: a ``WeightAveraging`` whose ``setup`` has run.
        sharded: gives the wrapped module; None after ``fit``, when the module has its weights again.
    """
    kind = getattr(type(callback), "users_kind", type(callback))  # of a fit() before
    bases = (_OverParts,) if kind is AVERAGING else (kind, _OverParts)
    callback.__class__ = type(kind.__name__, bases, {"sharded": staticmethod(sharded), "users_kind": kind})
    own = callback._average_model.update_parameters

    def update_parameters(module: Any) -> None:
        whole, buffers = callback.whole()
        own(SimpleNamespace(parameters=lambda: iter(whole), buffers=lambda: iter(buffers)))

    callback._average_model.update_parameters = update_parameters


class _OverParts(AVERAGING or object):  # type: ignore[misc]
    """A class between Lightning's base and the user's, which reads and writes whole weights. Collective."""

    sharded: Callable[[], ShardedModule | None]
    users_kind: type
    _average_model: Any

    def whole(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the wrapped module's whole weights and its buffers, in the order of the average's."""
        model, average = self.sharded(), self._average_model.module
        assert model is not None, "averages come after setup"
        state, live = model.state_dict(), dict(model.named_buffers())
        return [state[name] for name, _ in average.named_parameters()], [live[n] for n, _ in average.named_buffers()]

    def _swap_models(self, module: Any) -> None:
        if self.sharded() is None:
            super()._swap_models(module)
            return
        average = self._average_model.module
        weights, buffers = self.whole()
        kept = [value.detach().clone() for value in (*weights, *buffers)]
        _OverParts._copy_average_to_current(self, module)
        with torch.no_grad():
            for target, value in zip((*average.parameters(), *average.buffers()), kept, strict=True):
                target.copy_(value)

    def _copy_average_to_current(self, module: Any) -> None:
        model = self.sharded()
        if model is None:
            super()._copy_average_to_current(module)
            return
        average, live = self._average_model.module, dict(model.named_buffers())
        with torch.no_grad():  # those that no state dict has, too
            for name, value in average.named_buffers():
                live[name].copy_(value)
        model.load_state_dict(average.state_dict())

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        """Load the current weights into the wrapped module."""
        model = self.sharded()
        target = module if model is None else SimpleNamespace(load_state_dict=model.load_state_dict)
        super().on_load_checkpoint(trainer, target, checkpoint)
