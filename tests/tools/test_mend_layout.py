"""Checkpoints that were written in the order of memory: made by hand as they were, and put right."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from fsshard.checkpoint.format.index import Piece, read_index
from fsshard.checkpoint.format.tensors_file import Item, write
from fsshard.checkpoint.reader import Reader
from fsshard.errors import CheckpointError, StateDictError
from tools.mend_layout import mend_layout


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """The group of one rank that wrap makes goes with the tests."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


ONE, TWO = "rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors"
PERMUTED = ("0.weight", "3.weight")


def laid() -> nn.Sequential:
    """Convolutions in channels_last, and a transposed weight. Contiguous: biases, and a kernel of one pixel."""
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1), nn.Flatten(), nn.Linear(32, 6))
    layers = layers.to(memory_format=torch.channels_last)
    layers[3].weight = nn.Parameter(layers[3].weight.detach().t().contiguous().t())  # type: ignore[union-attr, operator]
    return layers


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()


def bare(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model that has nothing of ours."""
    model = laid()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, steps)
    return model, optimizer


def as_of_then(good: Path, path: Path, strides: dict[str, tuple[int, ...]]) -> None:
    """Write what fsdp wrote on two ranks: flat parameters as they lie in memory, cut in two, an index of format 1."""
    path.mkdir()
    index = read_index(good)
    items: dict[str, list[Item]] = {ONE: [], TWO: []}
    tensors = {}
    with Reader(good) as reader:
        for name, info in index.tensors.items():
            value = reader.tensor(name)
            shapes = {p: laid().get_parameter(p).shape for p in strides if f"/{p}" in name}
            parameter = next((p for p, shape in shapes.items() if value.shape == shape), "")
            if parameter:  # as FlatParamHandle.flatten_tensors takes it (torch 2.13)
                lying = torch.empty_strided(value.shape, strides[parameter]).copy_(value)
                value = lying.as_strided((value.numel(),), (1,))
            flat, pieces = value.reshape(-1), []
            cut = len(flat) // 2
            for file, start, stop in ((ONE, 0, cut), (TWO, cut, len(flat))):
                if stop > start:
                    key = name if (start, stop) == (0, len(flat)) else f"{name}@{start}"
                    items[file].append(Item(key, flat.dtype, (stop - start,), flat[start:stop].clone()))
                    pieces.append(Piece(file, key, start, stop))
            tensors[name] = info._replace(pieces=tuple(pieces))
    written = {file: write(path / file, of, {"checkpoint": index.id}) for file, of in items.items()}
    then = dataclasses.replace(
        index,
        tensors=tensors,
        origin=index.origin._replace(backend="fsdp", world_size=2),
        files=written,
        rng=None,
        objects={},
    )
    value = json.loads(then.to_json())
    del value["sha256"]
    unused = [name for name in value["tensors"] if name.startswith(("rng/", "objects/"))]
    for name in unused:
        del value["tensors"][name]
    (path / "index.json").write_text(json.dumps({**value, "format_version": 1}, separators=(",", ":")))


@pytest.fixture(scope="module")
def then(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of then, of two steps."""
    folder = tmp_path_factory.mktemp("mending")
    model = fsshard.wrap(laid(), backend="none")
    optimizer = fsshard.build_optimizer(model, torch.optim.AdamW, lr=0.01)
    train(model, optimizer, 2)
    fsshard.save(folder / "good", model, optimizer)
    strides = {name: p.stride() for name, p in laid().named_parameters() if not p.is_contiguous()}
    assert set(PERMUTED) <= strides.keys()
    as_of_then(folder / "good", folder / "then", strides)
    return folder / "then"


def same(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


def contiguous() -> nn.Module:
    model = laid().to(memory_format=torch.contiguous_format)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()
    return model


def test_the_permutation_is_undone(then: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wrong = fsshard.wrap(contiguous(), backend="none")
    with caplog.at_level(logging.WARNING, "fsshard"):
        fsshard.load(then, wrong)
    assert "mend_layout" in caplog.text, "it cannot be told here whether the numbers are in order"
    reference, reference_optimizer = bare(2)
    assert same(wrong.state_dict(), reference.state_dict()) == list(PERMUTED), "the checkpoint is as they were"

    assert mend_layout(then, tmp_path / "mended", laid()) == PERMUTED
    for make in (laid, contiguous):
        caplog.clear()
        model = fsshard.wrap(make(), backend="none")
        optimizer = fsshard.build_optimizer(model, torch.optim.AdamW, lr=0.01)
        fsshard.load(tmp_path / "mended", model, optimizer, verify=True)
        assert not caplog.records and same(model.state_dict(), reference.state_dict()) == []
        for name, parameter in reference.named_parameters():
            assert same(optimizer.state_dict()["state"][name], reference_optimizer.state[parameter]) == []
    train(model, optimizer, 1), train(reference, reference_optimizer, 1)
    assert all(torch.allclose(model.state_dict()[name], value) for name, value in reference.state_dict().items())
    assert fsshard.latest(tmp_path) == tmp_path / "mended" and read_index(then).format_version == 1


def test_a_model_that_is_laid_out_so_is_not_loaded_wrong(then: Path, tmp_path: Path) -> None:
    model = fsshard.wrap(laid(), backend="none")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"not contiguous .*\(0\.weight, .*3\.weight\).*mend_layout"):
        fsshard.load(then, model)
    assert same(model.state_dict(), before) == []
    assert mend_layout(then, tmp_path / "as-it-is", contiguous()) == (), "if it was contiguous, this is the way"
    fsshard.load(tmp_path / "as-it-is", model)


def test_what_cannot_be_mended(then: Path, tmp_path: Path) -> None:
    with pytest.raises(StateDictError, match=r"0\.weight: expected \('float32', \(4, 3, 2, 2\)\)"):
        mend_layout(then, tmp_path / "mended", nn.Sequential(nn.Conv2d(3, 4, 2)))
    sliced = laid()
    sliced[0].weight = nn.Parameter(torch.zeros(8, 3, 3, 3)[::2])  # type: ignore[union-attr, operator]
    with pytest.raises(CheckpointError, match=r"0\.weight is a slice of a larger tensor"):
        mend_layout(then, tmp_path / "mended", sliced)
    with pytest.raises(CheckpointError, match=r"format 2, written under 'none' on 1 rank\(s\).*load it as it is"):
        mend_layout(then.parent / "good", tmp_path / "mended", laid())
    assert list(tmp_path.iterdir()) == []


def test_fsdp_wrote_memory_as_it_lies() -> None:
    """:func:`as_of_then` does what torch's FSDP1 does to its flat parameters."""
    from torch.distributed.fsdp._flat_param import FlatParamHandle

    found: list[Tensor] = [torch.arange(24.0).reshape(2, 3, 2, 2).contiguous(memory_format=torch.channels_last)]
    handle: Any = FlatParamHandle.__new__(FlatParamHandle)
    handle._use_orig_params = True
    flat = FlatParamHandle.flatten_tensors(handle, found, aligned_numel=0)
    assert torch.equal(flat, found[0].as_strided((24,), (1,))) and not torch.equal(flat, found[0].reshape(-1))
