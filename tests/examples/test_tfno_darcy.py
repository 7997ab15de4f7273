"""The example as people run it: one script, several engines, spawned or under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent.parent / "examples" / "tfno_darcy.py"
SMALL = ["--n-train", "16", "--n-test", "4", "--batch-size", "8", "--epochs", "2"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A cache of its own, so that the few samples are solved once for all tests here."""
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")), "COLUMNS": "120"}


def run(arguments: list[str], environment: dict[str, str], launcher: list[str] | None = None) -> str:
    command = [sys.executable, "-W", "ignore", *(launcher or []), str(SCRIPT), *SMALL, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_engine_gives_the_same_losses(environment: dict[str, str], tmp_path: Path) -> None:
    picture = tmp_path / "darcy.png"
    backends = ["fairscale", "fsdp", "fsdp2", "ddp"]
    output = run(["--backend", *backends, "--picture", str(picture)], environment)
    for backend in backends[1:]:
        assert f"largest difference in loss, fairscale - {backend}: 0.0" in output
    rows = {m[1]: m[2] for m in re.finditer(r"│ (\w+) +│ +([\d.]+) % │", output)}
    assert list(rows) == backends
    assert len(set(rows.values())) == 1
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_under_torchrun(environment: dict[str, str]) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    alone, launched = (run(["--backend", "fsdp2"], environment, how) for how in (None, launcher))
    errors = [re.findall(r"([\d.]+) %", output) for output in (alone, launched)]
    assert errors[0] == errors[1] and len(errors[0]) == 2


def test_with_neuraloperators_trainer(environment: dict[str, str], tmp_path: Path) -> None:
    arguments = ["--backend", "fairscale", "fsdp2", "--trainer", "neuralop"]
    output = run([*arguments, "--save-dir", str(tmp_path / "checkpoints")], environment)
    assert "largest difference in loss, fairscale - fsdp2: 0.0" in output
    assert list((tmp_path / "checkpoints").iterdir())


def test_one_process(environment: dict[str, str]) -> None:
    assert "none" in run(["--backend", "none", "--nprocs", "1"], environment)


def test_a_bad_batch_size_is_said_before_anything_starts(environment: dict[str, str]) -> None:
    command = [sys.executable, str(SCRIPT), "--batch-size", "7", "--nprocs", "2"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 2
    assert "--batch-size 7 must be a multiple of --nprocs 2" in done.stderr
