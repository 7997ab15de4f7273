"""A FairScale script three ways: under FairScale, under ``python -m fsshard.compat``, and rewritten; one training."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
SCRIPT, REWRITTEN = EXAMPLES / "fairscale_oss.py", EXAMPLES / "fairscale_oss_rewritten.py"
SMALL = ["--n-train", "40", "--n-test", "4", "--batch-size", "8", "--epochs", "2", "--width", "32", "--blocks", "2"]
needs_fairscale = pytest.mark.skipif(importlib.util.find_spec("fairscale") is None, reason="needs fairscale")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A cache of its own, so that the few samples are solved once for all tests here."""
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}


def printed(environment: Mapping[str, str], *arguments: object) -> list[str]:
    """What a run prints: the losses of all epochs and the error, each with all of its digits."""
    command = [sys.executable, "-W", "ignore", *map(str, arguments), *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(environment), timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [re.sub(r"[\d.e-]+$", "...", line) for line in lines] == [
        "epoch 1: loss ...",
        "epoch 2: loss ...",
        "relative error on unseen ground: ...",
    ]
    return lines


@pytest.fixture(scope="module")
def served(environment: dict[str, str]) -> list[str]:
    """With the zero_grad that the real library gets wrong."""
    return printed(environment, "-m", "fsshard.compat", SCRIPT, "--zero-grad", "optimizer")


@needs_fairscale
def test_the_real_library_trains_the_same(environment: dict[str, str], served: list[str]) -> None:
    """With ``model.zero_grad()``; its scaler is off on the CPU, and ours multiplies by powers of two."""
    assert printed(environment, SCRIPT, "--zero-grad", "model") == served


def test_rewritten_it_trains_the_same(environment: dict[str, str], served: list[str]) -> None:
    assert printed(environment, REWRITTEN) == served


@needs_fairscale
@pytest.mark.fairscale_row(1)
def test_row_1_the_other_zero_grad(environment: dict[str, str], served: list[str]) -> None:
    """The same line of the script: the real library trains on stale gradients, ours as if nothing were."""
    assert printed(environment, SCRIPT, "--zero-grad", "optimizer") != served


def test_the_page_shows_the_lines_that_the_scripts_have() -> None:
    page = (EXAMPLES.parent / "docs" / "migration.md").read_text(encoding="utf-8")
    shown = page.partition("```diff\n")[2].partition("```")[0].splitlines()
    before, after = (path.read_text(encoding="utf-8").splitlines() for path in (SCRIPT, REWRITTEN))
    removed, added = ([line[1:] for line in shown if line.startswith(sign)] for sign in "-+")
    assert len(removed) > 10 and len(added) > 6
    assert [line for line in removed if line not in before or line in after] == []
    assert [line for line in added if line not in after or line in before] == []
