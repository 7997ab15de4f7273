"""A FairScale script three ways: under FairScale, under ``python -m fsshard.compat``, and rewritten; one training."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import fsshard

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
SCRIPT, REWRITTEN = EXAMPLES / "fairscale_oss.py", EXAMPLES / "fairscale_oss_rewritten.py"
SMALL = ["--n-train", "40", "--n-test", "4", "--batch-size", "8", "--epochs", "2", "--width", "32", "--blocks", "2"]
needs_fairscale = pytest.mark.skipif(importlib.util.find_spec("fairscale") is None, reason="needs fairscale")


def lines_of(output: str) -> list[str]:
    """Return what a run prints: the losses of all epochs and the error, each with all of its digits."""
    lines = output.splitlines()
    assert [re.sub(r"[\d.e-]+$", "...", line) for line in lines] == [
        "epoch 1: loss ...",
        "epoch 2: loss ...",
        "relative error on unseen ground: ...",
    ]
    return lines


@pytest.fixture(scope="module")
def served(cache: Path) -> list[str]:
    """Under the command, as its users type it, with the zero_grad that the real library gets wrong."""
    command = [sys.executable, "-W", "ignore", "-m", "fsshard.compat", str(SCRIPT), "--zero-grad", "optimizer", *SMALL]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return lines_of(done.stdout)


def train(script: Path, cache: Path, rendezvous: Path, arguments: list[str]) -> str:
    """Return what the script's own ``train`` prints on a rank of the pool."""
    os.environ["XDG_CACHE_HOME"] = str(cache)
    rank = dist.get_rank()
    code = runpy.run_path(str(script), run_name="script")
    sys.argv = [str(script), *SMALL, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        if script == REWRITTEN:
            code["train"](fsshard.init(), code["parse"]())
        else:
            dist.destroy_process_group()  # the script makes its own
            code["train"](rank, code["parse"](), str(rendezvous))
    return output.getvalue()


@pytest.fixture
def printed(ranks: Any, cache: Path, tmp_path: Path, served: list[str]) -> Callable[..., list[str]]:
    """Return what a script prints on the pool, where the samples that ``served`` solved are found."""

    def printed(script: Path, *arguments: str) -> list[str]:
        return lines_of(ranks.run(train, 2, script, cache, tmp_path / "rendezvous", list(arguments))[0])

    return printed


@needs_fairscale
@pytest.mark.long
def test_the_real_library_trains_the_same(printed: Callable[..., list[str]], served: list[str]) -> None:
    """With ``model.zero_grad()``; its scaler is off on the CPU, and ours multiplies by powers of two."""
    assert printed(SCRIPT, "--zero-grad", "model") == served


@pytest.mark.long
def test_rewritten_it_trains_the_same(printed: Callable[..., list[str]], served: list[str]) -> None:
    assert printed(REWRITTEN) == served


@pytest.mark.long
@needs_fairscale
@pytest.mark.fairscale_row(1)
def test_row_1_the_other_zero_grad(printed: Callable[..., list[str]], served: list[str]) -> None:
    """The same line of the script: the real library trains on stale gradients, ours as if nothing were."""
    assert printed(SCRIPT, "--zero-grad", "optimizer") != served


def test_the_page_shows_the_lines_that_the_scripts_have() -> None:
    page = (EXAMPLES.parent / "docs" / "fairscale.md").read_text(encoding="utf-8")
    shown = page.partition("```diff\n")[2].partition("```")[0].splitlines()
    before, after = (path.read_text(encoding="utf-8").splitlines() for path in (SCRIPT, REWRITTEN))
    removed, added = ([line[1:] for line in shown if line.startswith(sign)] for sign in "-+")
    assert len(removed) > 10 and len(added) > 6
    assert [line for line in removed if line not in before or line in after] == []
    assert [line for line in added if line not in after or line in before] == []
