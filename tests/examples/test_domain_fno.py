"""The example that splits fields: a limit that one process meets, the same losses on every mesh, a picture."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fsshard
from examples import domain_fno
from examples.domain_fno import MIB, Outcome, memory_limit, parse, picture, table

pytest.importorskip("neuralop")
SMALL = ["--points", "20", "--samples", "4", "--epochs", "1", "--width", "8", "--modes", "6", "--memory", "4096"]


def train(arguments: list[str], groups: int, ranks: int) -> Outcome:
    """Train on a rank."""
    return domain_fno.train(fsshard.init(), parse(arguments), groups, ranks)


@pytest.fixture(scope="module")
def outcomes(ranks: Any) -> list[Outcome]:
    """Rank 0's, of one process with the whole batch, and of four ranks, two by two."""
    return [ranks.run(train, n * m, SMALL, n, m)[0] for n, m in ((1, 1), (2, 2))]


def test_losses_are_those_of_one_process(outcomes: list[Outcome]) -> None:
    alone, *split = outcomes
    assert len(alone.losses) == 2
    for each in split:
        assert each.losses == pytest.approx(alone.losses, abs=2e-6)  # of order 1, in float32: two steps
        assert each.seam < 2e-6 and each.kept < 0.3 * alone.kept
        assert each.sent > 0 and each.held > 0


def test_the_table_and_the_picture(outcomes: list[Outcome], tmp_path: Path) -> None:
    args = parse(SMALL)
    stopped = Outcome("one process", kept=3 * MIB, stopped="can't allocate memory")
    shown = table([stopped, *outcomes], args)
    assert "3.0 MiB, and stopped at the limit: can't allocate memory" in shown and "2 x 2, fsdp2" in shown
    picture(str(tmp_path / "domain.png"), outcomes[-1], args, 2)
    assert (tmp_path / "domain.png").stat().st_size > 10_000


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA holds on Linux alone")
def test_the_limit_is_real_and_goes_away() -> None:
    size = 256 * MIB // 4
    with memory_limit(torch.device("cpu"), 64), pytest.raises(RuntimeError, match="memory"):
        torch.empty(size)
    assert torch.empty(size).numel() == size
