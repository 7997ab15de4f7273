"""Hugging Face's ``optimizer.pt`` and ``scheduler.pt``, whole and as its Trainer under DDP writes them."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import SCALER_NAME, TRAINER_STATE_NAME

import fsshard as library
from fsshard.comm.agreement import agree
from fsshard.errors import CheckpointError
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer

from ..native_state import by_name, by_number

__all__ = ["PARTS", "clear", "load_optimizer", "load_parts", "parts_of", "save_optimizer", "save_scheduler"]

log = logging.getLogger("fsshard")
OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"
PARTS = "fsshard"
"""Within a checkpoint: a directory of :func:`fsshard.save`, in which every rank has written what it holds."""
EARLIER = (SCHEDULER, OPTIMIZER, SCALER_NAME, "model*.safetensors", "adapter_model*", "pytorch_model*", "*.index.json")


def clear(folder: Path, model: ShardedModule, *, whole: bool, writes: bool) -> None:
    """Remove the checkpoint of an earlier run from a folder, of whichever kind. Collective, before anything is written.

    ``trainer_state.json``, without which Hugging Face's Trainer does not go on, is the first that goes, and the last
    that is written: a folder of which a killed run has left something of both runs is not resumed from.

    Args:
        folder: the checkpoint's.
        model: the wrapped model.
        whole: whether whole weights come; else :func:`fsshard.save` replaces earlier parts by itself.
        writes: whether this rank writes what is not in parts.
    """

    def remove() -> None:
        if not writes:
            return
        (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
        for name in (PARTS, f"{PARTS}.previous") if whole else ():
            if (folder / name).is_dir():
                shutil.rmtree(folder / name)
        for path in [path for pattern in EARLIER for path in folder.glob(pattern)]:
            path.unlink(missing_ok=True)

    agree(model.backend.settings.group, remove)


def save_optimizer(folder: Path, optimizer: ShardedOptimizer, scheduler: Any, *, writes: bool) -> None:
    """Write both files. Collective; an error of a rank that writes is raised on all.

    Args:
        folder: the checkpoint's.
        optimizer: its state is assembled one parameter at a time, in host memory.
        scheduler: anything with ``state_dict``.
        writes: whether this rank does.
    """
    state = by_number(optimizer, keep=writes)

    def write() -> None:
        if writes:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(state, folder / OPTIMIZER)
            torch.save(scheduler.state_dict(), folder / SCHEDULER)

    agree(optimizer.model.backend.settings.group, write)


def load_optimizer(folder: Path, optimizer: ShardedOptimizer, scheduler: Any) -> None:
    """Read what any engine, or Hugging Face's DDP, wrote. Collective.

    A checkpoint without them (``save_only_model=True``) leaves both as they are, as in Hugging Face's Trainer, with a
    warning.

    Raises:
        StateDictError: groups of other sizes, or state of another shape.
    """
    found = agree(optimizer.model.backend.settings.group, lambda: _read(folder, optimizer))
    if found is None:
        log.warning("%s has no %s: optimizer and learning rate start anew", folder, OPTIMIZER)
        return
    optimizer.load_state_dict(found[0])
    scheduler.load_state_dict(found[1])


def _read(folder: Path, optimizer: ShardedOptimizer) -> tuple[dict[str, Any], dict[str, Any]] | None:
    paths = [folder / OPTIMIZER, folder / SCHEDULER]
    if not all(path.is_file() for path in paths):
        return None
    saved = torch.load(paths[0], map_location="cpu", weights_only=True, mmap=True)
    return by_name(saved, optimizer), torch.load(paths[1], map_location="cpu", weights_only=True)


# ------------------------------------------------------------------------------------------------ in parts


def parts_of(folder: str | Path) -> Path | None:
    """Return the directory with every rank's parts, if the checkpoint has one.

    Raises:
        CheckpointError: there is a whole optimizer beside it: which of them was written last, nothing tells.
    """
    found = Path(folder) / PARTS
    if not found.is_dir():
        return None
    if (found.parent / OPTIMIZER).exists():
        raise CheckpointError(
            f"{folder} has a checkpoint in parts, {PARTS}, and {OPTIMIZER} of a whole one: two runs have "
            "written there; remove the files of one of them, or go on from another checkpoint"
        )
    return found


def save_scheduler(folder: Path, optimizer: ShardedOptimizer, scheduler: Any, *, writes: bool) -> None:
    """Write what is not in the parts. Collective."""

    def write() -> None:
        if writes:
            torch.save(scheduler.state_dict(), folder / SCHEDULER)

    agree(optimizer.model.backend.settings.group, write)


def load_parts(folder: Path, optimizer: ShardedOptimizer, scheduler: Any) -> None:
    """Load model, optimizer and scheduler from parts; what ``save_only_model=True`` wrote is the model. Collective."""

    def read() -> Any:
        path = folder / SCHEDULER
        return torch.load(path, map_location="cpu", weights_only=True) if path.is_file() else None

    state = agree(optimizer.model.backend.settings.group, read)
    if state is None:
        log.warning("%s has no %s: optimizer and learning rate start anew", folder, SCHEDULER)
    library.load(folder / PARTS, optimizer.model, None if state is None else optimizer, rng=False)
    if state is not None:
        scheduler.load_state_dict(state)
