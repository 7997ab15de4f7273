"""A checkpoint that a save replaces while it is read: a load gets one checkpoint, whole."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fsshard
from fsshard.checkpoint import dividing, loading, reader
from fsshard.checkpoint.format import index as index_module
from fsshard.checkpoint.format.division import piece_key, rank_file
from fsshard.checkpoint.format.index import Index, ModelInfo, Origin, write_index
from fsshard.checkpoint.format.tensors_file import Item, write
from fsshard.checkpoint.reader import Reader
from fsshard.errors import CheckpointError
from tests.models import net
from tests.on_ranks import on_ranks


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


@on_ranks()
def test_a_load_reads_one_whole_checkpoint_while_it_is_replaced(tmp_path: Path) -> None:
    """The values that a load gives where a rank replaces the checkpoint after one of its steps."""
    folder = tmp_path
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
    assert found[:2] == [[2.0]] * 2, "files that are not open yet are gone: the new one is read"
    assert found[2] == [1.0], "all files are open, whatever has their names"


def of_ranks(folder: Path, ranks: int) -> None:
    """Write a checkpoint of one tensor, of which each of ``ranks`` has saved one number."""
    tables = [{"model/w": ["float32", [ranks], rank, rank + 1]} for rank in range(ranks)]
    tensors = dividing.divide(tables, "save")
    files = {}
    for rank in range(ranks):
        begin, end = dividing.written_by(rank, ranks, tensors)["model/w"]
        key = piece_key("model/w", ranks, (begin, end))
        item = Item(key, torch.float32, (end - begin,), torch.arange(begin, end, dtype=torch.float32))
        name = rank_file(rank, ranks)
        files[name] = write(folder / name, [item], {"format": "pt", "checkpoint": "ab"})
    origin = Origin("0", "0", "fsdp2", ranks)
    time = "2026-11-28T00:00:00.000+00:00"
    write_index(folder, Index("ab", 1, time, origin, files, tensors, ModelInfo({"w": "model/w"}, {}, {})))


def test_a_checkpoint_of_many_ranks_needs_few_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 300 files, where 128 may be open in all: a rank reads all of them, or checks its share."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    of_ranks(tmp_path, 300)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    here = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (here + 80, before[1]))
    try:
        with Reader(tmp_path) as opened_checkpoint:
            opened_checkpoint.check_headers()
            assert torch.equal(opened_checkpoint.read("model/w", (0, 300)), torch.arange(300.0))
            opened = []
            with monkeypatch.context() as patch:
                real = opened_checkpoint._open
                patch.setattr(opened_checkpoint, "_open", lambda name: opened.append(name) or real(name))
                opened_checkpoint.check_headers(3, 100)
            assert opened == [rank_file(rank, 300) for rank in (3, 103, 203)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_an_index_that_would_not_be_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "MAX_BYTES", 400)
    with pytest.raises(CheckpointError, match="at most 400 are read; save fewer tensors together"):
        of_ranks(tmp_path, 4)
    assert not (tmp_path / "index.json").exists()
