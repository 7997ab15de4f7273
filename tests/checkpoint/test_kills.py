"""A short run of ``python -m tests.checkpoint.kills``, in which ranks that save are killed (SIGKILL)."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.long
def test_kills() -> None:
    # A process of its own: the lives are forked from it, and pytest's has threads.
    options = ["--ranks", "2", "4", "--kills", "5", "3", "--steps", "15"]
    command = [sys.executable, "-m", "tests.checkpoint.kills", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert [report["surprises"] for report in reports] == [[], []] and done.returncode == 0, done.stdout + done.stderr
    assert [(report["ranks"], report["kills"]) for report in reports] == [(2, 5), (4, 3)]
    # Of either number of ranks it may be none: on a busy machine the few lives of four ranks can end before they save.
    assert sum(sum(report["loaded"].values()) for report in reports) > 0, "lives go on from checkpoints"
