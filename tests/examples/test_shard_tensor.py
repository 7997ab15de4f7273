"""PhysicsNeMo's ShardTensor inputs under every engine, where PhysicsNeMo is installed."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

from examples import shard_tensor
from tests.forked import run_script

ROOT = Path(__file__).parents[2]
INSTALLED = importlib.util.find_spec("physicsnemo") is not None


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_script(ROOT / "examples" / "shard_tensor.py", arguments, {})


@pytest.mark.skipif(not INSTALLED, reason="PhysicsNeMo is not installed: pip install nvidia-physicsnemo")
def test_losses_are_those_of_one_process() -> None:
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("largest difference from one process") == 2 * len(shard_tensor.ENGINES)


@pytest.mark.skipif(INSTALLED, reason="PhysicsNeMo is installed")
def test_it_says_what_it_needs() -> None:
    done = run("--backend", "ddp")
    assert done.returncode == 1 and "pip install nvidia-physicsnemo" in done.stderr
