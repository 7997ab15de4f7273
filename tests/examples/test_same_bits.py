"""The example that moves one training between numbers of ranks, as it is run by its page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples/same_bits.py"


@pytest.mark.long
def test_the_moved_training_has_the_bits_of_the_other(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curve.png"
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", str(EXAMPLE), "--plot", str(picture)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    moved, stayed = (line.split()[-1] for line in ran.stdout.splitlines()[-2:])
    assert moved == stayed and len(moved) == 64
    assert picture.stat().st_size > 10_000


def test_it_is_short_enough_to_read() -> None:
    assert len(EXAMPLE.read_text("utf-8").splitlines()) <= 80
