"""A short run of ``python -m tests.checkpoint.kills``, in which ranks that save are killed (SIGKILL)."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

KILLS = [sys.executable, "-m", "tests.checkpoint.kills"]


@pytest.mark.long
def test_kills() -> None:
    # A process of its own: the lives are forked from it, and pytest's has threads.
    options = ["--ranks", "2", "4", "--kills", "5", "3", "--steps", "15"]
    done = subprocess.run([*KILLS, *options], capture_output=True, text=True, check=False)
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert [report["surprises"] for report in reports] == [[], []] and done.returncode == 0, done.stdout + done.stderr
    assert [(report["ranks"], report["kills"]) for report in reports] == [(2, 5), (4, 3)]
    # Of either number of ranks it may be none: on a busy machine the few lives of four ranks can end before they save.
    assert sum(sum(report["loaded"].values()) for report in reports) > 0, "lives go on from checkpoints"


@pytest.mark.long
def test_lives_on_other_numbers_of_ranks() -> None:
    """Under other engines each time, with the bits of the run that never moved: weights, moments, averages, scaler."""
    options = ["--ranks", "4", "--kills", "5", "--steps", "15", "--moving"]
    done = subprocess.run([*KILLS, *options], capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    assert report["surprises"] == [] and report["kills"] == 5, done.stdout + done.stderr
    assert sum(report["loaded"].values()) > 0, "lives go on from checkpoints"
