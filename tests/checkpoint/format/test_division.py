"""Pieces by a rule: the same as in a table that is made by hand, of any number of ranks."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsshard.checkpoint.dividing import divide
from fsshard.checkpoint.format.division import Division, Layout, Piece, Range, Spread, cover, pieces_in, rank_file
from fsshard.checkpoint.format.index import FileEntry, Index, ModelInfo, Origin, TensorInfo, sealed
from fsshard.errors import CorruptCheckpoint


@st.composite
def divisions_together(draw: st.DrawFn) -> list[Division]:
    """Draw some tensors that the same ranks hold and write together."""
    shards = draw(st.integers(1, 8))
    inner = draw(st.integers(1, 2))
    ranks = shards * inner * draw(st.integers(1, 3))
    sizes = draw(st.lists(st.tuples(st.integers(0, 100), st.sampled_from([1, 2, 4, 8, 16])), min_size=1, max_size=6))
    total = sum(numel * itemsize for numel, itemsize in sizes)
    divisions = []
    before = 0
    for number, (numel, itemsize) in enumerate(sizes):
        stride = draw(st.integers(max(-(-numel // shards), 1), max(numel, 1) + 3))
        layout = Layout(shards, inner, stride, draw(st.integers(0, shards * stride - numel)))
        divisions.append(Division(f"w{number}", numel, itemsize, ranks, layout, Spread(before, total)))
        before += numel * itemsize
    return divisions


def written_by_hand(division: Division) -> list[Range]:
    """What each rank writes, said in another way: by numbers of bytes that are marked one by one."""
    layout, spread = division.layout, division.spread
    ranges = []
    for rank in range(division.ranks):
        shard = rank // layout.inner % layout.shards
        copy = rank // (layout.inner * layout.shards) * layout.inner + rank % layout.inner
        held = [
            element
            for element in range(division.numel)
            if shard * layout.stride <= element + layout.offset < (shard + 1) * layout.stride
        ]
        mine = []
        for place, element in enumerate(held):
            # The byte of the whole tensor at the same share of it.
            at = spread.before + place * division.numel * division.itemsize // len(held)
            owner = max(k for k in range(division.copies) if k * spread.total // division.copies <= at)
            if owner == copy:
                mine.append(element)
        ranges.append((mine[0], mine[-1] + 1) if mine else (0, 0))
    return ranges


@given(divisions_together())
def test_each_element_is_written_once_by_a_rank_that_holds_it(divisions: list[Division]) -> None:
    for division in divisions:
        assert division.is_sound()
        by_hand = written_by_hand(division)
        for rank, expected in enumerate(by_hand):
            start, stop = division.written(rank)
            assert (start, stop) == expected or (start == stop and expected == (0, 0))
        elements = [element for piece in division.all() for element in range(piece.start, piece.stop)]
        assert elements == list(range(division.numel))


@given(divisions_together(), st.floats(0, 1), st.floats(0, 1))
def test_a_rule_reads_like_the_table_of_its_pieces(divisions: list[Division], one: float, other: float) -> None:
    for division in divisions:
        table = tuple(division.all())
        for rank in range(division.ranks):
            file = rank_file(rank, division.ranks)
            assert pieces_in(division, file) == pieces_in(table, file)
        low, high = sorted((round(one * division.numel), round(other * division.numel)))
        assert list(cover(division, (low, high))) == list(cover(table, (low, high)))
        info = TensorInfo("float32", (division.numel,), division._replace(itemsize=4))
        assert TensorInfo.of(division.name, json.loads(json.dumps(info.described()))) == info


def test_copies_write_as_much_each() -> None:
    layouts = Layout(4, 1, 25, 0)
    tables = [{f"w{i}": ["float32", [100], 0, 25, layouts] for i in range(40)}]
    tensors = divide([*tables, *[{}] * 7], "save")
    shares = [0] * 8
    for info in tensors.values():
        assert isinstance(info.pieces, Division)
        for rank in range(8):
            start, stop = info.pieces.written(rank)
            shares[rank] += stop - start
    assert shares == [500] * 8
    cut = [info for info in tensors.values() if len(list(info.pieces.all())) > 4]  # type: ignore[union-attr]
    assert len(cut) <= 1, "few tensors are cut"


def test_a_thousand_ranks_and_tensors_have_a_short_index() -> None:
    """And a rank finds its pieces, and those that it needs, without a look at all of them."""
    ranks = 1024
    table = {}
    for number in range(1024):
        for name in (f"model/w{number}", f"optimizer/o/w{number}/exp_avg", f"optimizer/o/w{number}/exp_avg_sq"):
            table[name] = ["float32", [4096, 1024], 0, 4096, Layout(ranks, 1, 4096, 0)]
    tensors = divide([table, *[{}] * (ranks - 1)], "save")
    files = {rank_file(rank, ranks): FileEntry(3 * 1024 * 4096 * 4, rank) for rank in range(ranks)}
    keys = {f"w{number}": f"model/w{number}" for number in range(1024)}
    index = Index("ab", 1, "", Origin("0", "0", "fsdp2", ranks), files, tensors, ModelInfo(keys, {}, {}))
    text = index.to_json()
    assert len(text) < 5_000_000
    assert Index.from_json(text, "index.json") == index
    for info in tensors.values():
        (piece,) = pieces_in(info.pieces, rank_file(700, ranks))
        assert (piece.start, piece.stop) == (700 * 4096, 701 * 4096)
        assert len(list(cover(info.pieces, (700 * 4096 + 1, 702 * 4096)))) == 2


@pytest.mark.parametrize(
    "numbers",
    [
        [2, 2, 1, 2, 0, 0, 24],  # the last element is nobody's
        [3, 2, 1, 3, 0, 0, 24],  # ranks that are no multiple of shards
        [2, 2, 1, 3, -1, 0, 24],
        [2, 0, 1, 3, 0, 0, 24],
        [2, 2, 1, 3, 0, 0],
        [4, 2, 1, 3, 0, 0, 24],  # files that are not there
    ],
)
def test_rules_that_leave_something_out_are_no_index(numbers: list[int]) -> None:
    files = {rank_file(rank, 2): FileEntry(200, 1) for rank in range(2)}
    info = TensorInfo("float32", (6,), Division("w", 6, 4, 2, Layout(2, 1, 3, 0), Spread(0, 24)))
    index = Index("ab", 1, "", Origin("0", "0", "fsdp2", 2), files, {"w": info}, ModelInfo({"w": "w"}, {}, {}))
    assert Index.from_json(index.to_json(), "index.json") == index
    text = index.to_json().decode()
    altered = json.loads(text)
    altered["tensors"]["w"]["division"] = numbers
    del altered["sha256"]
    with pytest.raises(CorruptCheckpoint):
        Index.from_json(sealed(altered), "index.json")


def test_pieces_of_a_file_of_another_name() -> None:
    division = Division("w", 6, 4, 2, Layout(2, 1, 3, 0), Spread(0, 24))
    assert pieces_in(division, "rank-00000-of-00003.safetensors") == []
    assert pieces_in(division, "w.safetensors") == []
    assert pieces_in(division, rank_file(1, 2)) == [Piece(rank_file(1, 2), "w@3", 3, 6)]
