"""Who writes what of a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from fsshard.checkpoint.dividing import divide, written_by
from fsshard.checkpoint.format.division import Layout
from fsshard.checkpoint.parts import _grid_of
from fsshard.errors import CheckpointError

Range = tuple[int, int]


def shares(held: dict[str, list[Range | None]], layout: Layout | None = None) -> list[Any]:
    """The part that each rank writes, given the range of each tensor that it holds, by a rule or by none."""
    tables = [{} for _ in next(iter(held.values()))]
    for name, ranges in held.items():
        size = max(part[1] for part in ranges if part is not None)
        for table, part in zip(tables, ranges, strict=True):
            if part is None:
                continue
            table[name] = ["float32", [size], *part]
            if layout is not None:
                table[name].append(layout)
                break
    tensors = divide(tables, "save")
    return [written_by(rank, len(tables), tensors) for rank in range(len(tables))]


def test_shards_are_written_where_they_are_and_replicas_share_each() -> None:
    assert shares({"w": [(0, 6), (6, 12), None]}) == [{"w": (0, 6)}, {"w": (6, 12)}, {}]
    written = shares({"w": [(0, 6), (6, 12), (0, 6), (6, 12)]}, Layout(2, 1, 6, 0))
    assert written == [{"w": (0, 3)}, {"w": (6, 9)}, {"w": (3, 6)}, {"w": (9, 12)}]


def test_what_is_held_by_no_rule_is_written_by_the_first_that_has_it() -> None:
    held = {"whole": [(0, 6), (0, 6), (0, 6)], "parts": [None, (0, 4), (4, 6)], "none": [(0, 0), None, (0, 0)]}
    assert shares(held) == [{"whole": (0, 6)}, {"parts": (0, 4)}, {"parts": (4, 6)}]


@pytest.mark.parametrize("members", [[0, 1], [0, 2], [1, 3], [0, 4], [2, 6], [0, 1, 2, 3], [4, 5, 6, 7], [3, 7], [5]])
def test_a_group_whose_ranks_lie_apart_alike_has_a_rule(members: list[int]) -> None:
    grid = _grid_of(members, 8)
    assert grid is not None
    layout = Layout(*grid, 1, 0)
    shards = [layout.place(rank) for rank in members]
    assert [shard for shard, _ in shards] == list(range(len(members)))
    assert len({copy for _, copy in shards}) == 1


@pytest.mark.parametrize("members", [[0, 3], [1, 0], [1, 2], [0, 1, 3], [2, 4], [0, 1, 2]])
def test_other_groups_have_none(members: list[int]) -> None:
    assert _grid_of(members, 8) is None


def test_ranks_that_disagree_are_told() -> None:
    tables = [{"w": ["float32", [6], 0, 3]}, {"w": ["float32", [7], 3, 7]}]
    with pytest.raises(CheckpointError, match=r"save: the ranks disagree on w: rank 1 has float32 \(7,\), another"):
        divide(tables, "save")
