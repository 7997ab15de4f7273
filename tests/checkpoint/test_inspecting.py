"""The reports of inspect, and the commands inspect, export and import: exit codes, and what goes to which stream.

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
from fsshard.checkpoint.inspecting import Inspection, Listing, inspect
from fsshard.cli import app as cli
from fsshard.errors import CheckpointError
from tests.checkpoint.in_and_out import job_save, same
from tests.models import net


@pytest.fixture(scope="module")
def saved(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks."""
    path = tmp_path_factory.mktemp("inspecting") / "ckpt"
    ranks.run(job_save, 2, path, "fsdp2")
    return path


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    """One to damage."""
    return Path(shutil.copytree(saved, tmp_path / "ckpt"))


def text(found: Inspection | Listing) -> str:
    """As a terminal shows it."""
    return "\n".join(found.render())


def one(path: Path, **arguments: Any) -> Inspection:
    found = inspect(path, **arguments)
    assert isinstance(found, Inspection)
    return found


def test_what_is_in_it(saved: Path) -> None:
    found, held = one(saved), one(saved).contents
    assert found.ok and not found.verified and held["ordinal"] == 1
    assert held["origin"] == {
        "fsshard": fsshard.__version__,
        "torch": held["origin"]["torch"],
        "backend": "fsdp2",
        "world_size": 2,
    }
    rows = {row["name"]: row for row in held["tensors"]}
    weight, scale = rows["model/layers.1.weight"], rows["model/scale"]
    assert weight == {"name": weight["name"], "dtype": "complex64", "shape": [8, 8], "pieces": 2, "bytes": 512}
    assert scale["shape"] == [] and scale["bytes"] == 4
    assert held["tied"] == {"layers.2.weight": "layers.0.weight"}
    (optimizer,) = held["optimizers"].values()
    assert optimizer["class"].endswith(".AdamW")
    assert [(group["lr"], group["params"]) for group in optimizer["groups"]] == [(1e-2, 2), (2e-2, 4)]
    assert held["objects"] == {"epoch": "all"} and held["rng"] == 2 and len(held["files"]) == 2
    lines = text(found).splitlines()
    assert any(line.split() == ["model/layers.1.weight", "complex64", "8", "x", "8", "2", "512", "B"] for line in lines)
    assert 'tied: {"layers.2.weight": "layers.0.weight"}' in lines and 'objects: {"epoch": "all"}' in lines
    again = json.loads(found.to_json())
    assert again["ok"] and again["path"] == str(saved) and again["tensors"][0]["name"] in rows


def test_checksums_with_progress(copied: Path) -> None:
    told = []
    assert one(copied, verify=True, progress=lambda done, total: told.append((done, total))).verified
    total = sum(path.stat().st_size for path in copied.glob("*.safetensors"))
    assert told[-1] == (total, total) and [done for done, _ in told] == sorted(done for done, _ in told)
    first, second = sorted(copied.glob("*.safetensors"))
    content = bytearray(second.read_bytes())
    content[-1] ^= 1
    second.write_bytes(content)
    assert one(copied).ok
    (problem,) = one(copied, verify=True).problems
    assert second.name in problem and first.name not in problem and "checksum" in problem and "model/" in problem


def job_several(path: Path) -> None:
    model = fsshard.wrap(net(), backend="ddp")
    for number in (2, 1, 3):
        fsshard.save(path / f"step-{number}", model)


def test_a_directory_of_checkpoints(ranks: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ranks.run(job_several, 1, tmp_path)
    (tmp_path / "notes").mkdir()
    fsshard.export(tmp_path / "step-1", tmp_path / "model.safetensors")  # does not make it a directory of the Hub
    found = inspect(tmp_path)
    assert isinstance(found, Listing) and found.ok
    assert [row["name"] for row in found.checkpoints] == ["step-2", "step-1", "step-3"]  # in the order of the saves
    assert [row["latest"] for row in found.checkpoints] == [False, False, True]
    assert text(found).splitlines()[-1].split()[-1] == "latest"
    (tmp_path / ".step-4.partial-1").mkdir()  # of a save of another host
    found = inspect(tmp_path)
    assert isinstance(found, Listing) and found.leftovers == [".step-4.partial-1"]
    assert ".step-4.partial-1; remove those that no save is writing" in text(found)
    (tmp_path / ".step-4.partial-1").rmdir()
    next((tmp_path / "step-3").glob("*.safetensors")).unlink()
    found = inspect(tmp_path)
    assert isinstance(found, Listing) and not found.ok
    assert [row["latest"] for row in found.checkpoints] == [False, True, False]
    assert "step-3: " in text(found) and "INVALID" in text(found) and not json.loads(found.to_json())["ok"]
    assert not caplog.records


def test_what_is_none(tmp_path: Path, saved: Path) -> None:
    with pytest.raises(CheckpointError, match="got nothing there"):
        inspect(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="is not a checkpoint and contains none"):
        inspect(tmp_path)
    (tmp_path / "file").write_text("no checkpoint")
    with pytest.raises(CheckpointError, match="got a file"):
        inspect(tmp_path / "file")
    fsshard.export(saved, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"of another kind \(safetensors\).*fsshard import"):
        inspect(tmp_path / "model.safetensors")


@pytest.fixture(scope="module")
def one_rank(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint, and its state dict."""
    path = tmp_path_factory.mktemp("commands") / "ckpt"
    return path, ranks.run(job_save, 1, path, "none")[0][0]


def run(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


def test_inspect_tells_what_is_damaged(one_rank: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = Path(shutil.copytree(one_rank[0], tmp_path / "ckpt"))
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
    assert "got nothing there" in capsys.readouterr().err
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
    assert all(name.encode("unicode_escape").decode() in printed.out for name in (*NAMES, "odd\x1b[2J"))
    assert "object\\u001b[5m" in printed.out


def test_export_and_import(one_rank: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, state = one_rank
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
    assert run("import", tmp_path / "dcp", tmp_path / "ours") == 0
    assert capsys.readouterr().out == f"{tmp_path / 'ours'}\n"
    assert run("import", tmp_path / "model.pt", tmp_path / "others", "--key", "optimizer.state") == 2
    assert run("import", tmp_path / "model.pt", tmp_path / "others", "--no-optimizer", "--key", "model") == 0
    for made in ("ours", "others"):
        file = tmp_path / f"{made}.pt"
        fsshard.export(tmp_path / made, file)
        assert same(state, torch.load(file, weights_only=True))
