"""Runs a step that can fail on some ranks, and gives its results, or the failure, to all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from fsshard.comm.forks import check_not_inherited
from fsshard.errors import FsshardError, RankMismatch

__all__ = ["agree", "exchange", "per_rank"]


def per_rank(group: dist.ProcessGroup, value: Any) -> list[Any]:
    """``value`` of every rank of the group, in rank order. Collective; small Python objects only."""
    check_not_inherited(group, "a call of all ranks")
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, value, group=group)
    return found


def agree(group: dist.ProcessGroup | None, work: Callable[[], Any]) -> Any:
    """Run ``work`` on every rank; if it raises anywhere, raise everywhere. One collective.

    The rank whose work failed raises its own error; the others raise an error of the same kind that names that rank.
    """
    kept: list[Any] = []  # the result need not travel
    exchange(group, lambda: kept.append(work()))
    return kept[0]


def exchange(group: dist.ProcessGroup | None, work: Callable[[], Any]) -> list[Any]:
    """As :func:`agree`, and what ``work`` returned on every rank, in rank order: small Python objects only."""
    result, error = None, None
    try:
        result = work()
    except Exception as raised:
        error = raised
    if group is None or group.size() == 1:
        if error is not None:
            raise error
        return [result]
    ours = isinstance(error, FsshardError)  # another class may not travel by pickle
    report = None if error is None else (type(error) if ours else type(error).__name__, str(error))
    reports = per_rank(group, (report, result))
    if error is not None:
        raise error
    for rank, (report, _) in enumerate(reports):
        if report is not None:
            kind, message = report
            raise _same_kind(kind, f"rank {rank}: {message}")
    return [found for _, found in reports]


def _same_kind(kind: type[FsshardError] | str, message: str) -> Exception:
    """An error of the failing rank's kind if that is one of ours, else a RankMismatch."""
    if isinstance(kind, str):
        return RankMismatch(f"{kind} on another rank: {message}")
    error = kind.__new__(kind)
    error.args = (message,)
    return error
