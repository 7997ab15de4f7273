"""What Lightning and its callbacks find: after ``fit()`` a module that an engine has, and optimizers by their names."""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakSet

from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from fsshard.errors import ConfigurationError
from fsshard.model.checks import is_managed
from fsshard.sharded.module import ShardedModule

__all__ = ["WholeLauncher", "check_bare", "named_after", "note_divided"]

_divided: WeakSet[nn.Module] = WeakSet()


def note_divided(module: nn.Module) -> None:
    """Remember that a rank has parts of its weights only."""
    _divided.add(module)


def check_bare(trainer: Any, sharded: ShardedModule | None) -> None:
    """Whether a Trainer can take its module.

    Args:
        trainer: Lightning's.
        sharded: what this Trainer's own ``fit()`` has made of the module.

    Raises:
        ConfigurationError: another Trainer has put it under an engine; on every rank.
    """
    module, function = trainer.lightning_module, trainer.state.fn
    fitting = function == TrainerFn.FITTING
    if sharded is not None or not (is_managed(module) if fitting else module in _divided):
        return
    raise ConfigurationError(
        f"{function.value}() of a module that fit() of another Trainer has put under an engine; "
        + ("" if fitting else f"call {function.value}() of that Trainer, or ")
        + "take a new module and its checkpoint, ckpt_path=..."
    )


def named_after(optimizer: Any, kind: str) -> None:
    """Let an optimizer's class have the name of the user's, which Lightning's LearningRateMonitor writes."""
    base: Any = type(optimizer)
    optimizer.__class__ = _named(kind, base)


@functools.cache  # which counts optimizers of one class
def _named(kind: str, base: Any) -> Any:
    return type(kind, (base,), {"__module__": base.__module__})


class WholeLauncher(_MultiProcessingLauncher):
    """Gives the process that has started the ranks whole weights back."""

    def _collect_rank_zero_results(self, trainer: Any, results: Any) -> Any:
        sharded, module = trainer.strategy._sharded, trainer.lightning_module
        if sharded is None:
            return super()._collect_rank_zero_results(trainer, results)
        whole = sharded.state_dict(rank0_only=True, offload_to_cpu=True)  # Lightning asks the module, which has parts
        module.state_dict = lambda: whole
        try:
            return super()._collect_rank_zero_results(trainer, results)
        finally:
            del module.state_dict
