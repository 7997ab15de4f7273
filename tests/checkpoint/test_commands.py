"""The commands inspect, export and import: exit codes, and what goes to which stream.

Tests fsshard/cli/commands.py too.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import fsshard
from fsshard.cli import app as cli
from tests.checkpoint.in_and_out import job_save, same


@pytest.fixture(scope="module")
def saved(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint, and its state dict."""
    path = tmp_path_factory.mktemp("commands") / "ckpt"
    return path, ranks.run(job_save, 1, path, "none")[0][0]


def run(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


def test_inspect(saved: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", saved[0]) == 0
    printed = capsys.readouterr()
    assert "whole (sizes and headers" in printed.out and "model/layers.1.weight" in printed.out and not printed.err
    assert run("inspect", saved[0], "--verify", "--json", "-") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["verified"] and "checksums agree" in printed.err
    assert run("inspect", saved[0].parent) == 0
    assert "latest" in capsys.readouterr().out


def test_inspect_tells_what_is_damaged(saved: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = Path(shutil.copytree(saved[0], tmp_path / "ckpt"))
    file = next(copy.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert run("inspect", copy) == 0
    assert run("inspect", copy, "--verify", "--progress", "--json", tmp_path / "found.json") == 1
    printed = capsys.readouterr()
    assert "INVALID" in printed.out and file.name in printed.out and "checksums" in printed.err
    assert not json.loads((tmp_path / "found.json").read_text())["ok"]
    file.unlink()
    assert run("inspect", copy) == 1
    assert run("inspect", tmp_path / "nothing") == 2
    assert "does not exist" in capsys.readouterr().err
    assert run("export", copy, tmp_path / "model.pt") == 1
    assert capsys.readouterr().err.startswith("fsshard: ")


NAMES = ("red\x1b[31m", "title\x1b]0;owned\x07", "line\n\rfsshard: all is well", "c1\x9b31m", "\u202eleft")


@pytest.mark.usefixtures("alone")
def test_names_do_not_reach_the_terminal_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A terminal would obey them: red, the title of its window, a line of its own, from right to left."""
    module = torch.nn.Module()
    for name in NAMES:
        module.register_parameter(name, torch.nn.Parameter(torch.zeros(2)))
    fsshard.save(tmp_path / "odd\x1b[2J", fsshard.wrap(module, backend="none"), **{"object\x1b[5m": 3})
    assert run("inspect", tmp_path / "odd\x1b[2J") == 0 == run("inspect", tmp_path)
    assert run("export", tmp_path / "odd\x1b[2J", tmp_path) == 2
    printed = capsys.readouterr()
    for text in (printed.out, printed.err):
        assert all(character.isprintable() for character in text.replace("\n", "")), text
        assert "\nfsshard: all is well" not in text
    assert all(
        name.encode("unicode_escape").decode() in printed.out for name in (*NAMES, "object\x1b[5m", "odd\x1b[2J")
    )


def test_export_and_import(saved: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, state = saved
    assert run("export", checkpoint, tmp_path / "model.pt", "--optimizer") == 0
    assert capsys.readouterr().out == f"{tmp_path / 'model.pt'}\n"
    assert same(state, torch.load(tmp_path / "model.pt", weights_only=True)["model"])
    assert run("export", checkpoint, tmp_path / "model.pt") == 2
    assert "exists" in capsys.readouterr().err
    assert run("export", checkpoint, tmp_path / "model.pt", "--overwrite", "--optimizer") == 0
    assert run("export", checkpoint, tmp_path / "m.safetensors", "--max-shard-bytes", 300) == 0
    assert "m-00001-of-" in capsys.readouterr().out
    assert run("export", checkpoint, tmp_path / "dcp", "--format", "dcp", "--optimizer") == 0
    capsys.readouterr()
    assert run("import", tmp_path / "dcp", tmp_path / "ours") == 2
    assert "trust_pickle=True" in capsys.readouterr().err
    assert run("import", tmp_path / "dcp", tmp_path / "ours", "--trust-pickle") == 0
    assert capsys.readouterr().out == f"{tmp_path / 'ours'}\n"
    assert run("import", tmp_path / "model.pt", tmp_path / "others") == 2
    assert run("import", tmp_path / "model.pt", tmp_path / "others", "--no-optimizer") == 0
    for made in ("ours", "others"):
        file = tmp_path / f"{made}.pt"
        fsshard.export(tmp_path / made, file)
        assert same(state, torch.load(file, weights_only=True))
