"""Lightning's weight averaging over an engine that divides the weights: each rank keeps the average whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import callbacks
from torch import Tensor

from fsshard.sharded.module import ShardedModule

__all__ = ["AVERAGING", "average_whole"]

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
    callback.take_whole()


class _OverParts(AVERAGING or object):  # type: ignore[misc]
    """A class between Lightning's base and the user's, which reads and writes whole weights."""

    sharded: Callable[[], ShardedModule | None]
    users_kind: type
    _average_model: Any

    def take_whole(self) -> None:
        """Let the average be updated from whole weights. Collective, as all that follow."""
        average = self._average_model
        own = average.update_parameters
        average.update_parameters = lambda module: own(_Whole(average, self._model))

    @property
    def _model(self) -> ShardedModule:
        model = self.sharded()
        assert model is not None, "averages come after setup"
        return model

    def _swap_models(self, module: Any) -> None:
        own: Any = super()
        if self.sharded() is None:
            own._swap_models(module)
            return
        average = self._average_model.module
        current = _Whole(self._average_model, self._model)
        kept = [value.detach().clone() for value in (*current.weights, *current.held)]
        _OverParts._copy_average_to_current(self, module)
        with torch.no_grad():
            for target, value in zip((*average.parameters(), *average.buffers()), kept, strict=True):
                target.copy_(value)

    def _copy_average_to_current(self, module: Any) -> None:
        own: Any = super()
        if self.sharded() is None:
            own._copy_average_to_current(module)
            return
        average, model = self._average_model.module, self._model
        live = dict(model.named_buffers())
        with torch.no_grad():  # those that no state dict has, too
            for name, value in average.named_buffers():
                live[name].copy_(value)
        model.load_state_dict(average.state_dict())

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        """Let the user's callback load the current weights into the wrapped module."""
        own: Any = super()
        own.on_load_checkpoint(trainer, module if self.sharded() is None else _Target(self._model), checkpoint)


class _Whole:
    """The wrapped module's whole weights and its buffers, in the order of the average's. Collective."""

    def __init__(self, average: Any, sharded: ShardedModule) -> None:
        state, live = sharded.state_dict(), dict(sharded.named_buffers())
        self.weights: list[Tensor] = [state[name] for name, _ in average.module.named_parameters()]
        self.held: list[Tensor] = [live[name] for name, _ in average.module.named_buffers()]

    def parameters(self) -> Iterator[Tensor]:
        """Iterate as a module does."""
        return iter(self.weights)

    def buffers(self) -> Iterator[Tensor]:
        """Iterate as a module does."""
        return iter(self.held)


class _Target:
    """A target for the current weights of a checkpoint."""

    def __init__(self, sharded: ShardedModule) -> None:
        self.load_state_dict = sharded.load_state_dict
