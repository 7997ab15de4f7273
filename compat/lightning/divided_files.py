"""Lightning's checkpoints as directories, in which every rank writes its own parts: fsshard's own format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsshard
from fsshard.errors import ConfigurationError
from fsshard.sharded.module import ShardedModule

__all__ = ["DividedState", "is_divided", "load_divided", "save_divided"]

MODEL, OPTIMIZERS, OTHERS = "state_dict", "optimizer_states", "lightning"


class DividedState(dict[str, Any]):
    """What Lightning keeps beside weights and optimizers, which have been loaded."""


def is_divided(path: Any) -> bool:
    """Whether a checkpoint is a directory."""
    return Path(path).is_dir()


def save_divided(path: Any, model: ShardedModule, optimizers: list[Any], checkpoint: Mapping[str, Any]) -> None:
    """Write rank 0's checkpoint, and every rank's parts. Collective.

    Args:
        path: of the directory.
        model: the wrapped module.
        optimizers: all of its own, which are saved where the checkpoint has states of optimizers.
        checkpoint: Lightning's, the same on every rank; only plain values and tensors, for nothing is pickled.

    Raises:
        CheckpointError: names the value that is something else (``hparams`` of a user's own class, say).
    """
    others = {name: value for name, value in checkpoint.items() if name not in (MODEL, OPTIMIZERS)}
    stepped = optimizers if OPTIMIZERS in checkpoint else None
    fsshard.save(path, model, stepped, rng=False, lightning=others)


def load_divided(path: Any, model: ShardedModule | None, optimizers: list[Any] | None) -> DividedState:
    """Load such a directory, of any engine and number of ranks, and give what is left of it. Collective.

    Raises:
        ConfigurationError: no engine has the module.
    """
    if model is None:
        raise ConfigurationError(
            f"{path} is a sharded checkpoint, which goes into a module in fit(ckpt_path=...), or that fit() has "
            "wrapped; for a bare module make one file of it, fsshard export"
        )
    found = fsshard.load(path, model, optimizers, rng=False)
    return DividedState({**found.state[OTHERS], MODEL: {}, OPTIMIZERS: []})
