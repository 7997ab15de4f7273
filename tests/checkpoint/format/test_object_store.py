"""Checkpoints at URLs: whole or absent without a rename, on fsspec's own file systems."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pytest
import torch
import torch.distributed as dist

import fsshard
from fsshard.checkpoint.format.object_store import StoredCheckpoint, is_url
from fsshard.checkpoint.inspecting import inspect
from fsshard.errors import CheckpointError, CorruptCheckpoint
from tests.models import batch, net, take_step
from tests.on_ranks import on_ranks


def trained(backend: str) -> tuple[Any, Any]:
    model = fsshard.wrap(net(), backend=backend)
    optimizer = fsshard.build_optimizer(model, torch.optim.AdamW, lr=0.1)
    step(model, optimizer)
    return model, optimizer


def step(model: Any, optimizer: Any) -> None:
    model(batch(dist.get_rank() if dist.is_initialized() else 0)).square().mean().backward()
    take_step(optimizer)


def weights(model: Any) -> dict[str, Any]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("s3://bucket/x", True),
        ("memory://x", True),
        ("gs://b", True),
        ("ckpt/last", False),
        ("c:/x", False),
        (Path("a"), False),
    ],
)
def test_which_paths_are_urls(path: Any, expected: bool) -> None:
    assert is_url(path) is expected


@on_ranks(1)
def test_a_run_on_a_store() -> None:
    model, optimizer = trained("none")
    store = fsspec.filesystem("memory")
    handle = fsshard.save("memory://run/step-1", model, optimizer, step=1)
    assert handle.path == "memory://run/step-1"
    first = weights(model)
    step(model, optimizer)
    fsshard.save("memory://run/step-2", model, optimizer, block=False, step=2).wait()
    second = weights(model)
    assert fsshard.latest("memory://run") == "memory://run/step-2"
    assert fsshard.latest("memory://run/step-1") == "memory://run/step-1", "its own place"
    step(model, optimizer)
    loaded = fsshard.load("memory://run/step-1", model, optimizer, verify=True)
    assert loaded.path == "memory://run/step-1"
    assert loaded["step"] == 1
    assert same(weights(model), first)
    # To the same path: one index, and the files that it names alone.
    fsshard.load("memory://run/step-2", model, optimizer)
    fsshard.save("memory://run/step-1", model, optimizer)
    assert same(weights(model), second)
    assert len([entry for entry in store.ls("/run/step-1") if entry["type"] == "directory"]) == 1
    assert fsshard.latest("memory://run") == "memory://run/step-1", "it was saved last"
    # The newest two stay.
    fsshard.save("memory://run/step-3", model, optimizer, keep=2)
    assert sorted(entry["name"] for entry in store.ls("/run")) == ["/run/step-1", "/run/step-3"]
    assert fsshard.latest("memory://elsewhere") is None


@on_ranks(1)
def test_what_is_broken_off_or_damaged() -> None:
    model, optimizer = trained("none")
    store = fsspec.filesystem("memory")
    fsshard.save("memory://some/broken", model, optimizer)
    before = weights(model)
    step(model, optimizer)
    real = type(store).pipe_file

    def full(self: Any, path: str, *given: Any, **options: Any) -> None:
        if path.endswith("index.json"):
            raise OSError("the disk is full")
        real(self, path, *given, **options)

    with mock.patch.object(type(store), "pipe_file", full), pytest.raises(CheckpointError, match="the disk is full"):
        fsshard.save("memory://some/broken", model, optimizer)
    fsshard.load("memory://some/broken", model, optimizer, verify=True)
    assert same(weights(model), before), "the one before, whole"
    (folder,) = [entry["name"] for entry in store.ls("/some/broken") if entry["type"] == "directory"]
    (file,) = [entry["name"] for entry in store.ls(folder)]
    whole = store.cat_file(file)
    store.pipe_file(file, whole[:-8])
    with pytest.raises(CorruptCheckpoint, match=f"{len(whole) - 8} bytes where {len(whole)} were written"):
        fsshard.load("memory://some/broken", model, optimizer)
    assert fsshard.latest("memory://some") is None
    store.pipe_file(file, whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CorruptCheckpoint, match="checksum differs"):
        fsshard.load("memory://some/broken", model, optimizer, verify=True)
    store.rm_file(file)
    with pytest.raises(CorruptCheckpoint, match="is missing"):
        fsshard.load("memory://some/broken", model, optimizer)
    # Where a URL has no place, and where pathlib has taken a slash from it: no folder of the name "memory:".
    for call in (
        lambda: fsshard.save(Path("memory://some/broken"), model, optimizer),
        lambda: fsshard.load(Path("memory://some/broken"), model, optimizer),
        lambda: fsshard.export("memory://some/broken", "here.safetensors"),
        lambda: fsshard.export(model, "memory://there.safetensors"),
        lambda: inspect("memory://some/broken"),
    ):
        with pytest.raises(CheckpointError, match=r"expected a local path, got a URL; .*take URLs, as text"):
            call()
    assert not Path("memory:").exists()
    with pytest.raises(CheckpointError, match="there is no checkpoint at memory://nowhere"):
        fsshard.load("memory://nowhere", model, optimizer)
    with pytest.raises(CheckpointError, match=r"cannot open nothing://x.*Protocol not known"):
        fsshard.save("nothing://x", model, optimizer)


def job_several_ranks(url: str, backend: str, saves: bool) -> list[dict[str, Any]]:
    model, optimizer = trained(backend)
    if saves:
        fsshard.save(url, model, optimizer)
        step(model, optimizer)
        return [weights(model)]
    fsshard.load(url, model, optimizer)
    step(model, optimizer)
    return [weights(model)]


def test_several_ranks_write_and_others_read(ranks: Any, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/last"
    stayed = ranks.run(job_several_ranks, 2, url, "fsdp2", True)[0][0]
    moved = ranks.run(job_several_ranks, 2, url, "fairscale", False)[0][0]
    assert same(stayed, moved)
    assert len(ranks.run(job_several_ranks, 4, url, "fsdp", False)) == 4


def job_copies(url: str) -> list[str]:
    """The files that a rank copies to load its part."""
    model, optimizer = trained("fsdp2")
    fsshard.save(url, model, optimizer)
    copied = []
    fetch = StoredCheckpoint.fetch

    def counted(self: Any, id: str, name: str, path: Path) -> None:
        copied.append(name)
        fetch(self, id, name, path)

    with mock.patch.object(StoredCheckpoint, "fetch", counted):
        fsshard.load(url, model, optimizer, rng=False)
    return sorted(copied)


def test_a_rank_copies_what_it_needs(ranks: Any, tmp_path: Path) -> None:
    """Its own file, and that of rank 0 with the buffers."""
    first, second, *_ = ranks.run(job_copies, 4, f"file://{tmp_path}/last")
    assert first == ["rank-00000-of-00004.safetensors"]
    assert second == ["rank-00000-of-00004.safetensors", "rank-00001-of-00004.safetensors"]
