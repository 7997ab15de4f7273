"""Who writes what."""

from __future__ import annotations

import random

import pytest

from fsshard.checkpoint.format.pieces import Piece, cover, divide, first_holders, piece_shape

Range = tuple[int, int]


def covered(name: str, written: list[dict[str, Range]]) -> list[Range]:
    return sorted(part[name] for part in written if name in part)


def test_copies_are_shared_evenly_and_few_tensors_are_cut() -> None:
    held = {f"w{i}": [(0, 100)] * 4 for i in range(10)}
    written = divide(held, dict.fromkeys(held, 4))
    assert [sum(b - a for a, b in part.values()) for part in written] == [250] * 4
    cut = [name for name in held if len(covered(name, written)) > 1]
    assert len(cut) <= 3


def test_shards_are_written_where_they_are() -> None:
    written = divide({"w": [(0, 6), (6, 12), None]}, {"w": 8})
    assert written == [{"w": (0, 6)}, {"w": (6, 12)}, {}]


def test_replicas_of_shards_share_each_shard() -> None:
    written = divide({"w": [(0, 6), (6, 12), (0, 6), (6, 12)]}, {"w": 8})
    assert written == [{"w": (0, 3)}, {"w": (6, 9)}, {"w": (3, 6)}, {"w": (9, 12)}]


@pytest.mark.parametrize("seed", range(20))
def test_every_element_once(seed: int) -> None:
    chance = random.Random(seed)
    ranks = chance.randint(1, 5)
    held, sizes, item_bytes = {}, {}, {}
    for index in range(chance.randint(1, 12)):
        name, n = f"w{index}", chance.choice([0, 1, 2, 7, 1000])
        sizes[name], item_bytes[name] = n, chance.choice([1, 2, 4, 8, 16])
        kind = chance.randint(0, 2)
        if kind == 0:
            held[name] = [(0, n)] * ranks
        elif kind == 1:
            owner = chance.randrange(ranks)
            held[name] = [(0, n) if rank == owner else None for rank in range(ranks)]
        else:
            cuts = sorted(chance.choices(range(n + 1), k=ranks - 1))
            held[name] = list(zip([0, *cuts], [*cuts, n], strict=True))
    written = divide(held, item_bytes)
    for name, n in sizes.items():
        parts = covered(name, written)
        assert [x for a, b in parts for x in range(a, b)] == list(range(n))


def test_what_a_reader_needs_of_the_pieces() -> None:
    one, two, three = pieces = [Piece("f", "w", start, stop) for start, stop in [(0, 4), (4, 9), (9, 12)]]
    assert list(cover(pieces, (3, 10))) == [(one, 3, 4), (two, 4, 9), (three, 9, 10)]
    assert list(cover(pieces, (4, 4))) == []


def test_who_is_asked() -> None:
    held = {"whole": [(0, 6), (0, 6), (0, 6)], "parts": [None, (0, 4), (4, 6)], "none": [(0, 0), None, (0, 0)]}
    assert first_holders(held, 3) == [{"whole": (0, 6)}, {"parts": (0, 4)}, {"parts": (4, 6)}]


def test_shape_of_a_piece() -> None:
    assert piece_shape((4, 3), (0, 12)) == (4, 3)
    assert piece_shape((4, 3), (3, 9)) == (2, 3)
    assert piece_shape((4, 3), (3, 8)) == (5,)
    assert piece_shape((), (0, 1)) == ()
    assert piece_shape((5,), (1, 3)) == (2,)
