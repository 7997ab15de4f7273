"""Somebody else's files that hang, grow or never end: refused with a word, before anything of them is read.

Tests fsshard/checkpoint/interop/foreign_names.py too.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsshard
from fsshard.checkpoint.interop.importing import import_checkpoint
from fsshard.errors import CheckpointError, CorruptCheckpoint

pytestmark = pytest.mark.usefixtures("alone")

STATE = {"weight": torch.ones(2, 2), "bias": torch.zeros(2)}


def saved(value: Any) -> Callable[[Path], Path]:
    def make(place: Path) -> Path:
        torch.save(value, place / "it.pt")
        return place / "it.pt"

    return make


def planted(name: str, target: str = "", **files: Any) -> Callable[[Path], Path]:
    """A folder with a pipe of that name, or a link to something else, and other files that torch has saved."""

    def make(place: Path) -> Path:
        folder = place / "folder"
        folder.mkdir()
        for other, value in files.items():
            torch.save(value, folder / f"{other}.pt")
        if target:
            (folder / name).symlink_to(target)
        else:
            os.mkfifo(folder / name)
        return folder

    return make


def compressed(place: Path) -> Path:
    torch.save({"model": {"w": torch.zeros(1 << 20)}}, place / "plain.pt")
    with (
        zipfile.ZipFile(place / "plain.pt") as plain,
        zipfile.ZipFile(place / "it.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for member in plain.infolist():
            packed.writestr(member.filename, plain.read(member))
    return place / "it.pt"


BAD: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a pipe among weights": (planted("pytorch_model.bin"), r"pytorch_model\.bin: not a regular file"),
    "a device among weights": (planted("pytorch_model.bin", "/dev/zero"), r"pytorch_model\.bin: not a regular file"),
    "a device among tensors": (planted("model.safetensors", "/dev/zero"), "not a regular file"),
    "a pipe among tensors": (planted("model.safetensors"), "not a regular file"),
    "a link to nothing": (planted("pytorch_model.bin", "nothing"), r"pytorch_model\.bin: missing"),
    "a pipe as the index": (planted("model.safetensors.index.json"), "index.json: not a regular file"),
    "a device as the index": (planted("x.bin.index.json", "/dev/zero"), "index.json: not a regular file"),
    "a pipe as the manifest": (planted("manifest.pt", model_state_dict=STATE), "manifest.pt: not a regular file"),
    "a pipe as the optimizer": (planted("optimizer.pt", model_state_dict=STATE), "optimizer.pt: not a regular file"),
    "a pipe as DCP's metadata": (planted(".metadata"), r"\.metadata: not a regular file"),
    "a device as DCP's metadata": (planted(".metadata", "/dev/zero"), r"\.metadata: not a regular file"),
    "without numbers": (saved({"model": {**STATE, "bias": torch.empty(2, device="meta")}}), "meta device"),
    "compressed": (compressed, "a compressed archive"),
}


@pytest.mark.parametrize("trust_pickle", [False, True])
@pytest.mark.parametrize("what", BAD)
def test_what_does_not_end_is_refused(tmp_path: Path, what: str, trust_pickle: bool) -> None:
    make, text = BAD[what]
    path = make(tmp_path)
    before = sorted(os.listdir(tmp_path))
    model = fsshard.wrap(nn.Linear(2, 2), backend="none")
    if "DCP" in what and not trust_pickle:
        text = "is a pickle"
    for call in (
        lambda: import_checkpoint(path, tmp_path / "ours", trust_pickle=trust_pickle),
        lambda: fsshard.load(path, model, trust_pickle=trust_pickle),
    ):
        with pytest.raises(CheckpointError if "pickle" in text else CorruptCheckpoint, match=text):
            call()
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("tensor", [torch.eye(3).to_sparse()], ids=["coo"])
def test_tensors_that_are_no_plain_ones(tmp_path: Path, tensor: torch.Tensor) -> None:
    for value in ({"model": {"w": tensor}}, {"model": STATE, "graph": [tensor]}):
        torch.save(value, tmp_path / "it.pt")
        with pytest.raises(CheckpointError, match=r"a tensor of torch\.sparse_coo; only plain ones are read"):
            import_checkpoint(tmp_path / "it.pt", tmp_path / "ours")
    assert os.listdir(tmp_path) == ["it.pt"]


def test_what_is_shared_and_small_is_taken(tmp_path: Path) -> None:
    """A weight under many names, a mask that is expanded, and state that two places have."""
    model, twice = nn.Linear(2, 2), {"best": 1.0, "at": torch.arange(3)}
    weights = {**{f"copy{number}": torch.ones(1 << 20) for number in range(1)}}
    weights |= {f"copy{number}": weights["copy0"] for number in range(1, 20)}
    state = {**STATE, **weights, "mask": torch.ones(1, 64).expand(64, 64)}
    often = [torch.zeros(1 << 13)] * 2000  # 4,000 copies of it would be more than a file of this size may stand for
    torch.save({"model": state, "a": twice, "b": [twice, twice], "c": often, "d": often}, tmp_path / "it.pt")
    import_checkpoint(tmp_path / "it.pt", tmp_path / "ours")
    files = sum(file.stat().st_size for file in (tmp_path / "ours").iterdir())
    assert files < 6 << 20, "what is shared is written once"
    loaded = fsshard.load(tmp_path / "ours", fsshard.wrap(model, backend="none"), strict=False)
    assert torch.equal(model.weight, STATE["weight"])
    assert [loaded.state["a"]["at"].tolist(), loaded.state["b"][1]["at"].tolist()] == [[0, 1, 2]] * 2


def test_files_of_dcp_that_are_none(tmp_path: Path) -> None:
    fsshard.save(tmp_path / "ckpt", fsshard.wrap(nn.Linear(2, 2), backend="none"))
    fsshard.export(tmp_path / "ckpt", tmp_path / "dcp", "dcp")
    (data,) = (tmp_path / "dcp").glob("*.distcp")
    metadata = pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())
    metadata.storage_data = {
        key: dataclasses.replace(info, relative_path="../../dev/zero") for key, info in metadata.storage_data.items()
    }
    (tmp_path / "led away").mkdir()
    (tmp_path / "led away" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptCheckpoint, match=r"'\.\./\.\./dev/zero' is no file of it"):
        import_checkpoint(tmp_path / "led away", tmp_path / "ours", trust_pickle=True)
    data.unlink()
    os.mkfifo(data)
    with pytest.raises(CorruptCheckpoint, match=f"{data.name}: not a regular file"):
        import_checkpoint(tmp_path / "dcp", tmp_path / "ours", trust_pickle=True)


def test_only_a_dcp_directory_is_overwritten(tmp_path: Path) -> None:
    fsshard.save(tmp_path / "ckpt", fsshard.wrap(nn.Linear(2, 2), backend="none"))
    for _ in range(2):
        fsshard.export(tmp_path / "ckpt", tmp_path / "dcp", "dcp", overwrite=True)
    (tmp_path / "dcp" / "photo.jpg").write_text("mine")
    with pytest.raises(CheckpointError, match="holds no DCP checkpoint alone"):
        fsshard.export(tmp_path / "ckpt", tmp_path / "dcp", "dcp", overwrite=True)
    assert (tmp_path / "dcp" / "photo.jpg").read_text() == "mine"
