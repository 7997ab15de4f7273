"""The arithmetic of what collectives send, by kind, payload and number of ranks."""

from __future__ import annotations

__all__ = ["sent"]

SENDS_AND_RECEIVES_WHOLE = 2.0
"""An all_reduce is at least a reduce_scatter and an all_gather: each rank sends (N - 1) / N of the payload twice."""


def sent(kind: str, nbytes: int, ranks: int) -> float:
    """Bytes that a rank has to send at least for a payload of ``nbytes``, on average over ``ranks`` ranks."""
    share = (ranks - 1) / ranks if ranks else 0.0
    if kind == "receive":
        return 0.0
    return nbytes * (1.0 if kind == "send" else share * (SENDS_AND_RECEIVES_WHOLE if kind == "all_reduce" else 1.0))
