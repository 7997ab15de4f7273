"""The demo as people run it: several engines, spawned or under torchrun.

Tests fsshard/demo/common.py too.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path

import pytest

from fsshard.demo import tfno_darcy
from fsshard.launching.pool import RankPool
from tests.forked import run_script

SCRIPT = Path(__file__).resolve().parent.parent.parent / "examples" / "tfno_darcy.py"
SMALL = ["--n-train", "16", "--n-test", "4", "--batch-size", "8", "--epochs", "2"]
BACKENDS = ["fairscale", "fsdp", "fsdp2", "ddp"]


@pytest.fixture(scope="module")
def environment(cache: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(cache), "COLUMNS": "120"}


def run(arguments: list[str], environment: dict[str, str]) -> str:
    done = run_script(SCRIPT, [*SMALL, *arguments], environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_here(arguments: list[str], environment: dict[str, str]) -> str:
    """What a rank of the pool prints: to the script it is a rank that a launcher started."""
    os.environ.update(environment)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        tfno_darcy.main([*SMALL, *arguments])
    return output.getvalue()


@pytest.fixture(scope="module")
def spawned(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes]:
    """What the script itself prints for all engines, and its picture."""
    picture = tmp_path_factory.mktemp("picture") / "darcy.png"
    return run(["--backend", *BACKENDS, "--picture", str(picture)], environment), picture.read_bytes()


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


def test_as_launched(ranks: RankPool, environment: dict[str, str], spawned: tuple[str, bytes]) -> None:
    """torchrun itself is tested with the elastic example."""
    launched, _ = ranks.run(run_here, 2, ["--backend", "fsdp2"], environment)
    assert errors(launched) == {"fsdp2": errors(spawned[0])["fsdp2"]}


def test_with_neuraloperators_trainer(ranks: RankPool, environment: dict[str, str], tmp_path: Path) -> None:
    arguments = ["--backend", "fairscale", "fsdp2", "--trainer", "neuralop"]
    output, _ = ranks.run(run_here, 2, [*arguments, "--save-dir", str(tmp_path / "checkpoints")], environment)
    assert "largest difference in loss, fairscale - fsdp2: 0.0" in output
    assert list((tmp_path / "checkpoints").iterdir())


def test_one_process(ranks: RankPool, environment: dict[str, str]) -> None:
    (output,) = ranks.run(run_here, 1, ["--backend", "none", "--nprocs", "1"], environment)
    assert list(errors(output)) == ["none"]


def test_one_step_has_no_bytes_to_show(ranks: RankPool, environment: dict[str, str]) -> None:
    """They are counted from the second step on, when the optimizer has its state."""
    once = ["--backend", "none", "--nprocs", "1", "--epochs", "1", "--batch-size", "16"]
    (output,) = ranks.run(run_here, 1, once, environment)
    assert re.search(r"│ none +│ +[\d.]+ % │ +[\d.]+ %( │ +-){4} │", output)


def test_a_bad_batch_size_is_said_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        tfno_darcy.main(["--batch-size", "7", "--nprocs", "2"])
    assert end.value.code == 2
    assert "--batch-size 7 must be a multiple of --nprocs 2" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--nprocs", "--epochs", "--batch-size", "--n-train", "--n-test"])
def test_nothing_to_do_is_said_before_anything_starts(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        tfno_darcy.main([option, "0"])
    assert f"{option} 0 must be at least 1" in capsys.readouterr().err
