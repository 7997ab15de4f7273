"""The folders of ``save_state``: read by slices, under any engine, and as Accelerate's own DDP writes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.utils import MODEL_NAME, OPTIMIZER_NAME, SAFE_MODEL_NAME
from safetensors.torch import load_model
from torch import nn

import fsshard
from fsshard.comm.agreement import agree
from fsshard.comm.channel import Channel
from fsshard.errors import CheckpointError
from fsshard.sharded.module import ShardedModule

from ..native_state import by_name
from .optimizer import PreparedOptimizer

__all__ = ["check_optimizers", "load_models", "meet", "world"]

PATIENCE = 300.0
"""Seconds that ranks wait for one another."""


def world() -> dist.ProcessGroup | None:
    """All ranks."""
    return dist.group.WORLD if dist.is_initialized() else None


def meet(call: str) -> None:
    """Return when all ranks have come here. Accelerate's DDP lets one rank save by itself, and scripts do.

    Args:
        call: as users write it.

    Raises:
        CheckpointError: a rank did not come in time, or came for something else; it is named.
    """
    Channel.of(world()).arrive(f"accelerator.{call}()", PATIENCE)


def check_optimizers(folder: Path, optimizers: Sequence[PreparedOptimizer]) -> None:
    """Raise unless each has a file that fits. One collective.

    Raises:
        CheckpointError: there is none.
        StateDictError: groups of other sizes, or state of another shape. Both on every rank.
    """

    def check() -> None:
        for number, prepared in enumerate(optimizers):
            saved = torch.load(_file(folder, [f"{OPTIMIZER_NAME}{{}}.bin"], number), "cpu", mmap=True)
            prepared.optimizer.check_state_dict(by_name(saved, prepared.optimizer))

    agree(world(), check)


def load_models(folder: Path, models: Sequence[nn.Module], *, strict: bool = True) -> None:
    """Give models their weights. Collective.

    Raises:
        CheckpointError: there is no file.
        StateDictError: names every key that is missing, unexpected or of another shape.
    """
    kinds = [f"{SAFE_MODEL_NAME}{{}}.safetensors", f"{MODEL_NAME}{{}}.bin"]
    paths = agree(world(), lambda: [_file(folder, kinds, number) for number in range(len(models))])
    for path, model in zip(paths, models, strict=True):
        if isinstance(model, ShardedModule):
            fsshard.load(path, model, strict=strict, rng=False)
        elif path.suffix == ".safetensors":  # of a model that was prepared for evaluation
            load_model(model, path, strict=strict)
        else:
            model.load_state_dict(torch.load(path, "cpu"), strict=strict)


def _file(folder: Path, kinds: Sequence[str], number: int) -> Path:
    names = [kind.format(f"_{number}" if number else "") for kind in kinds]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise CheckpointError(f"{folder} has no {' and no '.join(names)}")
