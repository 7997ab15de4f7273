"""Saved by any engine on any number of ranks, loaded by any other on any other number.

Tests fsshard/checkpoint/loading.py too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fsshard.launching.pool import RankPool
from tests.portability import runs

WORLDS = (1, 2, 3, 4)
SAVERS = [(backend, world) for world in WORLDS for backend in runs.SHARDED] + [("none", 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("portability")


def saved(folder: Path, ranks: RankPool, backend: str, world: int, optimizer: str) -> str:
    """The checkpoint's name; made at its first use."""
    name = f"{backend}-{world}-{optimizer}"
    if not (folder / f"{name}.rank0.pt").exists():
        ranks.run(runs.job_save, world, str(folder), backend, optimizer)
    return name


def covering() -> list[tuple[tuple[str, int], tuple[str, int], str]]:
    """Pairs that cover each two of: who saves, on how many ranks, who loads, on how many; in turn the optimizers."""
    optimizers = itertools.cycle(runs.OPTIMIZERS)
    pairs = []
    for index, saver in enumerate(SAVERS):
        for turn in (0, 1):
            world = WORLDS[(index + index // len(WORLDS) + 2 * turn) % len(WORLDS)]
            backends = (*runs.SHARDED, "none") if world == 1 else runs.SHARDED
            pairs.append(
                (saver, (backends[(index + index // len(WORLDS) + turn) % len(backends)], world), next(optimizers))
            )
        if saver[1] in (1, 4):
            pairs.append((saver, saver, next(optimizers)))
    return pairs


def rows() -> Iterator[Any]:
    """At every commit each engine saves and loads, on each number of ranks, and each optimizer goes on."""
    met = set()
    for saver, loader, optimizer in covering():
        values = set(enumerate((*saver, *loader, optimizer)))
        marks = [pytest.mark.long] if values <= met else []
        name = f"{saver[0]}{saver[1]}-{loader[0]}{loader[1]}-{optimizer}"
        yield pytest.param(saver, loader, optimizer, id=name, marks=marks)
        met |= values


@pytest.mark.parametrize(("saver", "loader", "optimizer"), [*rows()])
def test_loads_and_goes_on(
    ranks: RankPool, folder: Path, saver: tuple[str, int], loader: tuple[str, int], optimizer: str
) -> None:
    name = saved(folder, ranks, *saver, optimizer)
    for differences in ranks.run(runs.job_load, loader[1], str(folder), name, loader[0]):
        assert differences == []


def test_the_covering_covers() -> None:
    pairs = [(*saver, *loader) for saver, loader, _ in covering()]
    backends, worlds = set(runs.SHARDED), set(WORLDS)
    assert {(a[0], a[2]) for a in pairs} >= set(itertools.product(backends, backends))
    assert {(a[0], a[3]) for a in pairs} >= set(itertools.product(backends, worlds))
    assert {(a[1], a[2]) for a in pairs} >= set(itertools.product(worlds, backends))
    assert {(a[1], a[3]) for a in pairs} >= set(itertools.product(worlds, worlds))
    assert {name for _, _, name in covering()} == set(runs.OPTIMIZERS)
