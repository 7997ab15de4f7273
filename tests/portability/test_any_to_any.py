"""Saved by any engine on any number of ranks, loaded by any other on any other number."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from fsshard.ranks import RankPool
from tests.portability import runs

WORLDS = (1, 2, 3, 4)
SAVERS = [(backend, world) for world in WORLDS for backend in runs.SHARDED] + [("none", 1)]
LOADERS = SAVERS


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
    """Every saver with every world size, and with every backend; in turn the optimizers."""
    optimizers = itertools.cycle(runs.OPTIMIZERS)
    pairs = []
    for index, saver in enumerate(SAVERS):
        for turn, world in enumerate(WORLDS):
            backends = (*runs.SHARDED, "none") if world == 1 else runs.SHARDED
            pairs.append((saver, (backends[(index + turn) % len(backends)], world), next(optimizers)))
        if saver[1] > 1:
            pairs.append((saver, saver, next(optimizers)))
    return pairs


@pytest.mark.parametrize(
    ("saver", "loader", "optimizer"),
    [pytest.param(*p, id=f"{p[0][0]}{p[0][1]}-{p[1][0]}{p[1][1]}-{p[2]}") for p in covering()],
)
def test_loads_and_goes_on(
    ranks: RankPool, folder: Path, saver: tuple[str, int], loader: tuple[str, int], optimizer: str
) -> None:
    name = saved(folder, ranks, *saver, optimizer)
    for differences in ranks.run(runs.job_load, loader[1], str(folder), name, loader[0]):
        assert differences == []


def test_the_covering_covers() -> None:
    pairs = covering()
    assert {(a, b[1]) for a, b, _ in pairs} == set(itertools.product(SAVERS, WORLDS))
    assert {(a[0], b[0]) for a, b, _ in pairs} >= set(itertools.product(runs.SHARDED, runs.SHARDED))
