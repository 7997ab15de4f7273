"""Some of the planted changes and equal pairs, each time; all of them by ``make planted``.

Tests fsshard/parity/scripts/gradient_norms.py, fsshard/parity/scripts/facts.py and
fsshard/parity/scripts/copies.py too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fsshard
from fsshard.parity.scripts.comparing import compare_scripts
from tests.parity.scripts.planted import CHANGES, EQUAL, Change, Training, compared, row


@pytest.mark.parametrize("change", CHANGES[::12], ids=lambda one: one[0])
def test_a_change_is_found_and_named(tmp_path: Path, change: Change) -> None:
    what, cause, old, new = change
    found = compared(tmp_path, old, new)
    assert not found.ok and row(what, cause, found)[1], str(found)


@pytest.mark.parametrize("pair", EQUAL[4::5], ids=lambda one: one[0])
def test_an_equal_pair_is_called_the_same(tmp_path: Path, pair: Any) -> None:
    found = compared(tmp_path, *pair[1:])
    assert found.ok and not found.causes, str(found)


def mean(s: Any, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean over the targets of this rank that count."""
    return F.cross_entropy(s.model(x), y, ignore_index=1)


def shared_mean(s: Any, x: Tensor, y: Tensor) -> Tensor:
    """Return this rank's part of the mean over those of all ranks."""
    parts = dist.get_world_size() * s.parts
    rows = range(4 * parts * s.number, 4 * parts * (s.number + 1))
    total = sum(row % 3 != 1 for row in rows)
    return F.cross_entropy(s.model(x), y, ignore_index=1, reduction="sum") * (parts / total)


def job_recorded(folder: Path) -> None:
    for name, compute in {"means": mean, "all": shared_mean, "again": shared_mean}.items():
        for parts in (1, 2):
            with fsshard.trace(folder / f"{name}{parts}"):
                Training(
                    compute=compute,
                    parts=parts,
                    engine=nn.parallel.DistributedDataParallel,
                    rows=lambda step, size=4 * parts: range(size * step, size * (step + 1)),
                ).run()


def test_a_mean_of_means_over_two_ranks(ranks: Any, tmp_path: Path) -> None:
    """Of four rows two or three count; with and without accumulation."""
    ranks.run(job_recorded, 2, tmp_path)
    for parts in (1, 2):
        found = compare_scripts(tmp_path / f"means{parts}", tmp_path / f"all{parts}")
        assert not found.ok and found.causes[0].startswith("step 0: the new script alone weighs the losses"), found
        found = compare_scripts(tmp_path / f"all{parts}", tmp_path / f"means{parts}")
        assert not found.ok and found.causes[0].startswith("step 0: the old script alone weighs the losses"), found
        assert compare_scripts(tmp_path / f"all{parts}", tmp_path / f"again{parts}").causes == []
