"""The demo as people run it: several engines, spawned or launched; torchrun is tested with the elastic example.

Tests fsshard/demo/common.py and fsshard/demo/tfno_darcy.py.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path

import pytest

from fsshard.cli.app import main
from fsshard.demo import darcy
from fsshard.launching.pool import RankPool
from tests.forked import run_script

SCRIPT = Path(__file__).resolve().parent.parent.parent / "examples" / "tfno_darcy.py"
SMALL = ["--n-train", "16", "--n-test", "4", "--batch-size", "8", "--epochs", "1"]
BACKENDS = ["fairscale", "fsdp", "fsdp2", "ddp"]


@pytest.fixture(scope="module")
def environment(cache: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(cache), "COLUMNS": "120"}


def run(arguments: list[str], environment: dict[str, str]) -> str:
    done = run_script(SCRIPT, [*SMALL, *arguments], environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_here(arguments: list[str], environment: dict[str, str]) -> str:
    """Return what a rank of the pool prints: to the script it is a rank that a launcher started."""
    os.environ.update(environment)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert main(["demo", *SMALL, *arguments]) == 0
    return output.getvalue()


@pytest.fixture(scope="module")
def spawned(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes]:
    """Return what the script itself prints for all engines, and its picture."""
    picture = tmp_path_factory.mktemp("picture") / "darcy.png"
    return run(["--backends", ",".join(BACKENDS), "--plot", str(picture)], environment), picture.read_bytes()


def errors(output: str) -> dict[str, tuple[str, ...]]:
    """Backend -> its errors at the two resolutions, in percent."""
    return {m[1]: m.groups()[1:] for m in re.finditer(r"│ (\w+) +│ +([\d.]+) % │ +([\d.]+) %", output)}


def test_every_engine_gives_the_same_losses(spawned: tuple[str, bytes]) -> None:
    output, picture = spawned
    for backend in BACKENDS[1:]:
        assert f"largest difference in loss, fairscale - {backend}: 0.0" in output
    assert list(errors(output)) == BACKENDS
    assert len(set(errors(output).values())) == 1
    assert picture[:4] == b"\x89PNG"


def test_with_neuraloperators_trainer(ranks: RankPool, environment: dict[str, str], tmp_path: Path) -> None:
    arguments = ["--backend", "fairscale,fsdp2", "--trainer", "neuralop"]  # the alias of --backends
    output, _ = ranks.run(run_here, 2, [*arguments, "--save-dir", str(tmp_path / "checkpoints")], environment)
    assert "largest difference in loss, fairscale - fsdp2: 0.0" in output
    assert list((tmp_path / "checkpoints").iterdir())


def test_one_step_has_no_bytes_to_show(ranks: RankPool, environment: dict[str, str]) -> None:
    """They are counted from the second step on, when the optimizer has its state."""
    once = ["--backend", "none", "--nprocs", "1", "--epochs", "1", "--batch-size", "16"]
    (output,) = ranks.run(run_here, 1, once, environment)
    assert re.search(r"│ none +│ +[\d.]+ % │ +[\d.]+ %( │ +-){4} │", output)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batch-size", "7", "--nprocs", "2"], "--batch-size 7 must be a multiple of --world-size 2"),
        (["--backends", "fsdp2,fsdp9"], "got 'fsdp9'"),
        (["--plot", "darcy.jpg"], "ends in .png, .svg or .pdf"),
        (["--epochs", "0"], "'--epochs'"),
        (["--clip", "-1"], "'--clip'"),
        (["--data-dir", "missing/data"], "there is no folder 'missing/data'; name one that exists"),
        (["--trainer", "neuralop", "--save-dir", "missing/here"], "missing'; name one that exists"),
        (["--save-dir", "."], "--save-dir needs --trainer neuralop"),
    ],
)
def test_bad_input_is_said_before_anything_is_solved(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(darcy, "load", lambda *_, **__: pytest.fail("it solved"))
    assert main(["demo", *arguments]) == 2
    assert said in capsys.readouterr().err
