"""A checkpoint that a save replaces while it is read: a load gets one checkpoint, whole."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import fsshard
from fsshard.checkpoint import loading, reader
from fsshard.checkpoint.format.index import sealed
from fsshard.errors import CorruptCheckpoint
from tests.models import batch, net


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
    for where, name in [(loading, "_choose"), (reader, "read_index"), (loading._Load, "check")]:
        fsshard.save(path, filled(1.0))
        fsshard.save(folder / "new", filled(2.0))

        def replace() -> None:
            os.rename(path, folder / f"old-{len(found)}")
            os.rename(folder / "new", path)
            for file in (folder / f"old-{len(found)}").iterdir():
                file.unlink()

        replacing = replace if rank == (0 if name == "_choose" else 1) else lambda: None
        model = filled(0.0)
        with mock.patch.object(where, name, after(getattr(where, name), replacing)):
            fsshard.load(path, model, verify=True)
        found.append(sorted({float(value) for p in model.parameters() for value in p.detach().flatten()}))
    return found


def test_a_load_reads_one_whole_checkpoint_while_it_is_replaced(ranks: Any, tmp_path: Path) -> None:
    for found in ranks.run(job_replaced, 2, tmp_path):
        assert found[:2] == [[2.0]] * 2, "files that are not open yet are gone: the new one is read"
        assert found[2] == [1.0], "all files are open, whatever has their names"


def job_step_without_a_number(folder: Path) -> dict[str, str]:
    """What a load says of a counter of steps whose tensor is empty, and whether anything has changed."""
    told = {}
    for backend in ("ddp", "fsdp2"):
        model = fsshard.wrap(net(), backend=backend)
        optimizer = fsshard.build_optimizer(model, torch.optim.Adam, lr=0.1)
        model(batch(0)).sum().backward()
        optimizer.step()
        fsshard.save(folder / backend, model, optimizer)
        if dist.get_rank() == 0:
            file = folder / backend / "index.json"
            index = json.loads(file.read_text())
            del index["sha256"]
            name = next(name for name in index["tensors"] if name.endswith("/step"))
            index["tensors"][name] |= {"shape": [2, 0], "pieces": []}
            file.write_bytes(sealed(index))
        dist.barrier()
        before = optimizer.state_dict()["state"]
        try:
            fsshard.load(folder / backend, model, optimizer)
        except CorruptCheckpoint as error:
            same = all(
                torch.equal(value, before[name][key])
                for name, state in optimizer.state_dict()["state"].items()
                for key, value in state.items()
            )
            told[backend] = f"{same} {error}"
    return told


def test_a_count_of_steps_that_is_no_number_is_refused(ranks: Any, tmp_path: Path) -> None:
    for told in ranks.run(job_step_without_a_number, 2, tmp_path):
        for message in (told["ddp"], told["fsdp2"]):
            assert message.startswith("True ") and "state 'step' of " in message and "shape (2, 0)" in message
