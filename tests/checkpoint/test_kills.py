"""A short run of ``python -m tests.checkpoint.kills``, in which ranks that save are killed (SIGKILL)."""

from __future__ import annotations

import json
import subprocess
import sys


def test_kills() -> None:
    # A process of its own: the lives are forked from it, and pytest's has threads.
    options = ["--ranks", "2", "4", "--kills", "8", "4", "--steps", "15"]
    command = [sys.executable, "-m", "tests.checkpoint.kills", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert [report["surprises"] for report in reports] == [[], []] and done.returncode == 0, done.stdout + done.stderr
    assert [(report["ranks"], report["kills"]) for report in reports] == [(2, 8), (4, 4)]
    assert all(sum(report["loaded"].values()) > 0 for report in reports), "lives go on from checkpoints"
