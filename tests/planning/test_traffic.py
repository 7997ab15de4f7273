"""Bytes that a rank sends: the sums of ring algorithms, by hand."""

from __future__ import annotations

import pytest

from fsshard.planning.traffic import sent


@pytest.mark.parametrize(
    ("kind", "ranks", "expected"),
    [
        ("all_gather", 4, 750),
        ("reduce_scatter", 4, 750),
        ("all_reduce", 4, 1500),
        ("broadcast", 2, 500),
        ("send", 4, 1000),
        ("receive", 4, 0),
        ("all_reduce", 1, 0),
        ("all_gather", 0, 0),
    ],
)
def test_a_rank_sends_its_share(kind: str, ranks: int, expected: float) -> None:
    assert sent(kind, 1000, ranks) == expected
