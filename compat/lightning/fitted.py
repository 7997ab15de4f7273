"""What Lightning and its callbacks find: after ``fit()`` a module that an engine has, and optimizers by their names."""

from __future__ import annotations

import functools
from typing import Any

from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

from fsshard.errors import ConfigurationError
from fsshard.model.checks import is_managed

__all__ = ["WholeLauncher", "check_bare", "named_after"]


def check_bare(module: Any) -> None:
    """Raise if ``fit()`` cannot take a module.

    Raises:
        ConfigurationError: something else than a Trainer over fsshard has put it under an engine; on every rank.
    """
    if is_managed(module):
        raise ConfigurationError(
            "fit() of a module that fsshard.wrap, or Fabric, has put under an engine; pass the bare module, or take a "
            "new one and its checkpoint, ckpt_path=..."
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
