"""Who writes what of a checkpoint."""

from __future__ import annotations

import random
from typing import Any

import pytest

from fsshard.checkpoint.parts import divide, written_by
from fsshard.errors import CheckpointError

Range = tuple[int, int]


def shares(held: dict[str, list[Range | None]], bytes: int = 4, shared: bool = True) -> list[dict[str, Range]]:
    """The part that each rank writes, given the range of each tensor that it holds."""
    dtype = {1: "int8", 2: "int16", 4: "float32", 8: "complex64", 16: "complex128"}[bytes]
    tables: list[dict[str, Any]] = [{} for _ in next(iter(held.values()))]
    for name, ranges in held.items():
        size = max(part[1] for part in ranges if part is not None)
        for table, part in zip(tables, ranges, strict=True):
            if part is not None:
                table[name] = [dtype, [size], *part]
    tensors = divide(tables, "save", shared=shared)
    return [written_by(rank, len(tables), tensors) for rank in range(len(tables))]


def covered(name: str, written: list[dict[str, Range]]) -> list[Range]:
    return sorted(part[name] for part in written if name in part)


def test_copies_are_shared_evenly_and_few_tensors_are_cut() -> None:
    held: Any = {f"w{i}": [(0, 100)] * 4 for i in range(10)}
    written = shares(held)
    assert [sum(b - a for a, b in part.values()) for part in written] == [250] * 4
    assert len([name for name in held if len(covered(name, written)) > 1]) <= 3


def test_shards_are_written_where_they_are_and_replicas_share_each() -> None:
    assert shares({"w": [(0, 6), (6, 12), None]}) == [{"w": (0, 6)}, {"w": (6, 12)}, {}]
    written = shares({"w": [(0, 6), (6, 12), (0, 6), (6, 12)]})
    assert written == [{"w": (0, 3)}, {"w": (6, 9)}, {"w": (3, 6)}, {"w": (9, 12)}]


def test_an_export_asks_the_first_that_has_it() -> None:
    held: Any = {"whole": [(0, 6), (0, 6), (0, 6)], "parts": [None, (0, 4), (4, 6)], "none": [(0, 0), None, (0, 0)]}
    assert shares(held, shared=False) == [{"whole": (0, 6)}, {"parts": (0, 4)}, {"parts": (4, 6)}]


@pytest.mark.parametrize("seed", range(20))
def test_every_element_once(seed: int) -> None:
    chance = random.Random(seed)
    ranks = chance.randint(1, 5)
    held: Any = {}
    for index in range(chance.randint(1, 12)):
        n, kind, owner = chance.choice([0, 1, 2, 7, 1000]), chance.randint(0, 2), chance.randrange(ranks)
        cuts = sorted(chance.choices(range(n + 1), k=ranks - 1))
        held[f"w{index}"] = [
            [(0, n)] * ranks,
            [(0, n) if rank == owner else None for rank in range(ranks)],
            list(zip([0, *cuts], [*cuts, n], strict=True)),
        ][kind]
    written = shares(held, chance.choice([1, 2, 4, 8, 16]))
    for name, ranges in held.items():
        parts = covered(name, written)
        assert [x for a, b in parts for x in range(a, b)] == list(range(max(part[1] for part in ranges if part)))


def test_ranks_that_disagree_are_told() -> None:
    tables = [{"w": ["float32", [6], 0, 3]}, {"w": ["float32", [7], 3, 7]}]
    with pytest.raises(CheckpointError, match=r"save: the ranks disagree on w: rank 1 has float32 \(7,\), another"):
        divide(tables, "save")
