"""neuraloperator's own files: fetched once, checked, and a clear word where they cannot be had; pip is a stub.

Tests fsshard/cli/demo.py too.
"""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsshard.cli.app import main
from fsshard.demo import official

Fetch = Callable[..., Any]


def pip(calls: list[list[str]], contents: dict[str, bytes], error: str = "") -> Fetch:
    """Does as ``pip download`` would, with a wheel of these files."""

    def run(command: list[str], **_: Any) -> Any:
        calls.append(command)
        if error:
            return SimpleNamespace(returncode=1, stderr=f"WARNING: retrying\n{error}\n")
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "neuraloperator-0.3.0-py3-none-any.whl", "w") as wheel:
            for name, content in contents.items():
                wheel.writestr(f"{official.WITHIN}/{name}", content)
        return SimpleNamespace(returncode=0, stderr="")

    return run


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Small files of the same form, whose digests are taken for the right ones."""
    contents = {}
    for name, side in (("darcy_train_16.pt", 16), ("darcy_test_16.pt", 16), ("darcy_test_32.pt", 32)):
        torch.save({"x": torch.ones(3, side, side) > 0, "y": torch.ones(3, side, side)}, tmp_path / name)
        contents[name] = (tmp_path / name).read_bytes()
    monkeypatch.setattr(official, "SHA256", {name: hashlib.sha256(c).hexdigest() for name, c in contents.items()})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return contents


def test_it_is_fetched_once(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", pip(calls, files))
    folder = official.official_files()
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == files
    (folder / "darcy_test_16.pt").write_bytes(b"damaged")
    assert official.official_files() == folder == official.official_files()
    assert len(calls) == 2 and calls[0][1:5] == ["-m", "pip", "download", "--no-deps"]
    assert (folder / "darcy_test_16.pt").read_bytes() == files["darcy_test_16.pt"]


def test_other_files_than_the_published_ones_are_refused(
    files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", pip([], files | {"darcy_test_32.pt": b"other"}))
    with pytest.raises(FileNotFoundError, match=r"another darcy_test_32\.pt than the wheel that was published"):
        official.official_files()


def test_without_a_network_it_says_what_to_do(
    files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subprocess, "run", pip([], files, "ERROR: No matching distribution found"))
    assert main(["demo", "--data", "official"]) == 2
    said = capsys.readouterr().err
    assert "(ERROR: No matching distribution found)" in said and "pip download --no-deps neuraloperator==0.3.0" in said


def test_the_digests_are_of_sha256() -> None:
    assert all(len(digest) == 64 and int(digest, 16) for digest in official.SHA256.values())
