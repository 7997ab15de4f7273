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

from ..trainers import by_name, by_number

log = logging.getLogger("fsshard")
OPTIMIZER = "optimizer.pt"
SCHEDULER = "scheduler.pt"
# Within a checkpoint: a directory of save, in which every rank has written what it holds.
PARTS = "fsshard"
EARLIER = (SCHEDULER, OPTIMIZER, SCALER_NAME, "model*.safetensors", "adapter_model*", "pytorch_model*", "*.index.json")


def clear(folder: Path, model: ShardedModule, *, whole: bool, writes: bool) -> None:
    """Remove the checkpoint of an earlier run from a folder, of whichever kind. Collective, before anything is written.

    Args:
        folder: the checkpoint's.
        model: the wrapped model.
        whole: whether whole weights come; else :func:`fsshard.save` replaces earlier parts by itself.
        writes: whether this rank writes what is not in parts.
    """

    def remove() -> None:
        if not writes:
            return
        # Without trainer_state.json Hugging Face's Trainer does not go on. It is the first that goes, and the last that
        # is written: a folder in which a killed run has left something of both runs is not resumed from.
        (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
        for name in (PARTS, f"{PARTS}.previous") if whole else ():
            if (folder / name).is_dir():
                shutil.rmtree(folder / name)
        for pattern in EARLIER:
            for path in list(folder.glob(pattern)):
                path.unlink(missing_ok=True)

    agree(model.backend.settings.group, remove)


def save_optimizer(
    folder: Path,
    optimizer: ShardedOptimizer,
    scheduler: Any,
    *,
    whole: bool,
    writes: bool,
) -> None:
    """Write both files; an optimizer that is in parts needs none. Collective; a writer's error is raised on all.

    Args:
        folder: the checkpoint's.
        optimizer: its state is assembled one parameter at a time, in host memory.
        scheduler: anything with ``state_dict``.
        whole: whether the optimizer is written.
        writes: whether this rank does.
    """
    state = by_number(optimizer, keep=writes) if whole else None

    def write() -> None:
        if not writes:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if state is not None:
            torch.save(state, folder / OPTIMIZER)
        torch.save(scheduler.state_dict(), folder / SCHEDULER)

    agree(optimizer.model.backend.settings.group, write)


def load_optimizer(folder: Path, optimizer: ShardedOptimizer, scheduler: Any) -> None:
    """Read what any engine, or Hugging Face's DDP, wrote, whole or in parts, of which the model comes here. Collective.

    A checkpoint without them (``save_only_model=True``) leaves both as they are, as in Hugging Face's Trainer, with a
    warning.

    Raises:
        StateDictError: groups of other sizes, or state of another shape.
    """
    parts = parts_of(folder)

    def read() -> Any:
        paths = [folder / SCHEDULER, *([] if parts else [folder / OPTIMIZER])]
        if not all(path.is_file() for path in paths):
            return None
        found = [torch.load(path, map_location="cpu", weights_only=True, mmap=True) for path in paths]
        return (found[0], None if parts else by_name(found[1], optimizer))

    found = agree(optimizer.model.backend.settings.group, read)
    if found is None:
        name = SCHEDULER if parts else OPTIMIZER
        log.warning("%s has no %s: optimizer and learning rate start from scratch", folder, name)
    if parts:
        library.load(parts, optimizer.model, None if found is None else optimizer, rng=False)
    elif found is not None:
        optimizer.load_state_dict(found[1])
    if found is not None:
        scheduler.load_state_dict(found[0])


def parts_of(folder: str | Path) -> Path | None:
    """Return the directory with every rank's parts, if the checkpoint has one.

    Raises:
        CheckpointError: there is a whole optimizer next to it: which of them was written last, nothing tells.
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
