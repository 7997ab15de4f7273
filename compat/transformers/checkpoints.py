"""Hugging Face's ``optimizer.pt`` and ``scheduler.pt``, whole and as its Trainer under DDP writes them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

import fsshard as library
from fsshard.comm.agreement import agree
from fsshard.sharded.optimizer import ShardedOptimizer

from ..native_state import by_name, by_number

__all__ = ["PARTS", "load_optimizer", "load_parts", "parts_of", "save_optimizer", "save_scheduler"]

log = logging.getLogger("fsshard")
OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"
PARTS = "fsshard"
"""Within a checkpoint: a directory of :func:`fsshard.save`, in which every rank has written what it holds."""


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
    """The directory with every rank's parts, if the checkpoint has one."""
    found = Path(folder) / PARTS
    return found if found.is_dir() else None


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
