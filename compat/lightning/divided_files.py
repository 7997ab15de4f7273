"""Lightning's checkpoints as directories, in which every rank writes its own parts: fsshard's own format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsshard
from fsshard.checkpoint.reader import Reader
from fsshard.errors import CheckpointError, ConfigurationError
from fsshard.sharded.module import ShardedModule

__all__ = ["DividedState", "check_place", "is_divided", "load_divided", "read_others", "save_divided"]

MODEL, OPTIMIZERS, OTHERS = "state_dict", "optimizer_states", "lightning"


class DividedState(dict[str, Any]):
    """Lightning's part of a checkpoint, without weights and optimizers, which engines load from the files.

    Attributes:
        path: of the directory.
    """

    path: Path


def is_divided(path: Any) -> bool:
    """Return whether a checkpoint is a directory."""
    return Path(path).is_dir()


def check_place(path: Any, strategy: Any) -> None:
    """Raise if ``path`` is a directory, into which Lightning would move a whole checkpoint. Collective.

    Raises:
        CheckpointError: a directory is there; on every rank.
    """
    if strategy.broadcast(is_divided(path)):
        raise CheckpointError(
            f"{path} is a directory, such as a checkpoint in parts, and a whole checkpoint is a file; remove it, save "
            "under another name, or take save_distributed_checkpoint=True, which replaces a checkpoint in parts"
        )


def save_divided(path: Any, model: ShardedModule, optimizers: list[Any], checkpoint: Mapping[str, Any]) -> None:
    """Write rank 0's checkpoint, and every rank's parts. Collective.

    Raises:
        CheckpointError: names the value that is something else (``hparams`` of a user's own class, say).
    """
    others = {name: value for name, value in checkpoint.items() if name not in (MODEL, OPTIMIZERS)}
    stepped = optimizers if OPTIMIZERS in checkpoint else None
    fsshard.save(path, model, stepped, rng=False, lightning=others)


def read_others(path: Any) -> DividedState:
    """Read what such a directory has for callbacks, loops and the like. Local.

    Raises:
        CheckpointError: it is none of Lightning's.
    """
    with Reader.at(path) as reader:
        saved = reader.index.objects.get(OTHERS, {})
        if "all" not in saved:
            raise CheckpointError(
                f"{path} has nothing of Lightning's, so that fit() cannot go on from it: make one file of its weights "
                "(fsshard export), which module.load_state_dict takes before fit()"
            )
        found = DividedState({**reader.tree(saved["all"]), MODEL: {}, OPTIMIZERS: []})
    found.path = Path(path)
    return found


def load_divided(path: Any, model: ShardedModule | None, optimizers: list[Any] | None) -> None:
    """Load weights of such a directory, and optimizers if there are any, of any engine and number of ranks. Collective.

    Raises:
        CheckpointError: optimizers are to go on, and the checkpoint has weights only.
        ConfigurationError: no engine has the module.
    """
    if model is None:
        raise ConfigurationError(
            f"{path} is a sharded checkpoint, which goes into a module in fit(ckpt_path=...), or that fit() has "
            "wrapped; for a bare module make one file of it, fsshard export"
        )
    try:
        fsshard.load(path, model, optimizers, rng=False)
    except CheckpointError as error:
        if "no optimizer was saved" not in str(error):
            raise
        raise CheckpointError(
            f"fit(ckpt_path={str(path)!r}): the checkpoint has weights only (ModelCheckpoint(save_weights_only=True)), "
            "and fit() goes on with optimizers, too; go on from a checkpoint that has them, or make one file of the "
            "weights (fsshard export), which module.load_state_dict takes before fit()"
        ) from error
