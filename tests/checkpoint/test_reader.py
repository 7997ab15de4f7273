"""A checkpoint that a save replaces while it is read: a load gets one checkpoint, whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import fsshard
from fsshard.checkpoint import loading, reader
from tests.models import net


def filled(value: float) -> fsshard.ShardedModule:
    model = net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return fsshard.wrap(model, backend="ddp")


def after(function: Callable[..., Any], once: Callable[[], Any]) -> Callable[..., Any]:
    """The function, after whose first call something happens."""
    left = [once]

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        while left:
            left.pop()()
        return result

    return call


def job_replaced(folder: Path) -> list[list[float]]:
    """The values that a load gives where a rank replaces the checkpoint after one of its steps."""
    rank, path, found = dist.get_rank(), folder / "last", []
    for where, name in [(loading, "resolve"), (reader, "read_index"), (loading._Load, "check")]:
        fsshard.save(path, filled(1.0))
        fsshard.save(folder / "new", filled(2.0))

        def replace() -> None:
            os.rename(path, folder / f"old-{len(found)}")
            os.rename(folder / "new", path)
            for file in (folder / f"old-{len(found)}").iterdir():
                file.unlink()

        replacing = replace if rank == (0 if name == "resolve" else 1) else lambda: None
        model = filled(0.0)
        with mock.patch.object(where, name, after(getattr(where, name), replacing)):
            fsshard.load(path, model, verify=True)
        found.append(sorted({float(value) for p in model.parameters() for value in p.detach().flatten()}))
    return found


def test_a_load_reads_one_whole_checkpoint_while_it_is_replaced(ranks: Any, tmp_path: Path) -> None:
    for found in ranks.run(job_replaced, 2, tmp_path):
        assert found[:2] == [[2.0]] * 2, "files that are not open yet are gone: the new one is read"
        assert found[2] == [1.0], "all files are open, whatever has their names"
