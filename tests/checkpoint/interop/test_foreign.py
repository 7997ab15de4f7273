"""Somebody else's files that hang, grow or never end: refused with a word, before anything of them is read.

Tests fsshard/checkpoint/interop/foreign_names.py too.
"""

from __future__ import annotations

import os
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

WEIGHT = torch.ones(1 << 20)
STATE = {"weight": torch.ones(2, 2), "bias": torch.zeros(2)}


def saved(value: Any) -> Callable[[Path], Path]:
    def make(place: Path) -> Path:
        torch.save(value, place / "it.pt")
        return place / "it.pt"

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


def piped(place: Path) -> Path:
    os.mkfifo(place / "pytorch_model.bin")  # nobody writes to it: an open that waits would hang here
    return place


BAD: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a pipe among weights": (piped, r"pytorch_model\.bin: not a regular file"),
    "without numbers": (saved({"model": {**STATE, "bias": torch.empty(2, device="meta")}}), "meta device"),
    "compressed": (compressed, "a compressed archive"),
}


@pytest.mark.parametrize("trust_pickle", [False, True])
@pytest.mark.parametrize("what", BAD)
def test_what_does_not_end_is_refused(tmp_path: Path, what: str, trust_pickle: bool) -> None:
    make, text = BAD[what]
    path = make(tmp_path)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(CorruptCheckpoint, match=text):
        import_checkpoint(path, tmp_path / "ours", trust_pickle=trust_pickle)
    assert sorted(os.listdir(tmp_path)) == before


def test_tensors_that_are_no_plain_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Refused among weights, left out with a word beside them."""
    tensor = torch.eye(3).to_sparse()
    torch.save({"model": {"w": tensor}}, tmp_path / "it.pt")
    text = "a tensor of torch.sparse_coo; only plain ones are read"
    with pytest.raises(CheckpointError, match=text):
        import_checkpoint(tmp_path / "it.pt", tmp_path / "ours")
    assert os.listdir(tmp_path) == ["it.pt"]
    torch.save({"model": STATE, "graph": [tensor]}, tmp_path / "it.pt")
    import_checkpoint(tmp_path / "it.pt", tmp_path / "ours")
    assert "'graph' is left out" in caplog.text and text in caplog.text


def test_what_is_shared_and_small_is_taken(tmp_path: Path) -> None:
    """A weight under many names, a mask that is expanded, and state that two places have."""
    model, twice = nn.Linear(2, 2), {"best": 1.0, "at": torch.arange(3)}
    weights = {f"copy{number}": WEIGHT for number in range(20)}
    state = {**STATE, **weights, "mask": torch.ones(1, 64).expand(64, 64)}
    often = [torch.zeros(1 << 13)] * 2000
    torch.save({"model": state, "a": twice, "b": [twice, twice], "c": often, "d": often}, tmp_path / "it.pt")
    import_checkpoint(tmp_path / "it.pt", tmp_path / "ours")
    files = sum(file.stat().st_size for file in (tmp_path / "ours").iterdir())
    assert files < 6 << 20, "what is shared is written once"
    loaded = fsshard.load(tmp_path / "ours", fsshard.wrap(model, backend="none"), strict=False)
    assert torch.equal(model.weight, STATE["weight"])
    assert [loaded.state["a"]["at"].tolist(), loaded.state["b"][1]["at"].tolist()] == [[0, 1, 2]] * 2


def test_only_a_dcp_directory_is_overwritten(tmp_path: Path) -> None:
    fsshard.save(tmp_path / "ckpt", fsshard.wrap(nn.Linear(2, 2), backend="none"))
    for _ in range(2):
        fsshard.export(tmp_path / "ckpt", tmp_path / "dcp", "dcp", overwrite=True)
    (tmp_path / "dcp" / "photo.jpg").write_text("mine")
    with pytest.raises(CheckpointError, match="holds no DCP checkpoint alone"):
        fsshard.export(tmp_path / "ckpt", tmp_path / "dcp", "dcp", overwrite=True)
    assert (tmp_path / "dcp" / "photo.jpg").read_text() == "mine"
