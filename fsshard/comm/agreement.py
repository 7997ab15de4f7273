"""Runs a step that can fail on some ranks, and gives its results, or the failure, to all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from fsshard import errors
from fsshard.comm.channel import Channel
from fsshard.comm.forks import check_not_inherited
from fsshard.errors import CheckpointError, FsshardError, RankMismatch

__all__ = ["agree", "exchange", "per_rank"]

Over = dist.ProcessGroup | Channel | None
"""How ranks talk: in the group that they train in, or over a channel of their own; None is a rank alone."""


def per_rank(group: dist.ProcessGroup, value: Any) -> list[Any]:
    """Return ``value`` of every rank of the group, in rank order. Collective; small Python objects only."""
    check_not_inherited(group, "a call of all ranks")
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def agree(over: Over, work: Callable[[], Any]) -> Any:
    """Run ``work`` on every rank; if it raises anywhere, raise everywhere. One collective. See :func:`exchange`."""
    results: list[Any] = []  # need not travel
    exchange(over, lambda: results.append(work()))
    return results[0]


def exchange(over: Over, work: Callable[[], Any], timeout: float | None = None) -> list[Any]:
    """Run ``work`` on every rank, and return all results, by rank; if it raises anywhere, raise everywhere.

    In a group the rank whose work failed raises its own error, and the others one of that kind which names the rank:
    RankMismatch, if it is none of ours. Over a channel all raise the same, whose ``failures`` says what went wrong on
    which rank: of the kind that these raised, else CheckpointError.

    Args:
        over: how the ranks talk.
        work: local, that is without collectives. It returns a small object; over a channel one that JSON can say.
        timeout: seconds, over a channel; None for its group's own. A rank's work may take that much longer than
            another's.
    """
    result, error = None, None
    try:
        result = work()
    except Exception as raised:
        error = raised
    except BaseException:  # Ctrl-C, say: the others must not wait for this rank
        if isinstance(over, Channel):
            over.drop()
        raise
    if over is None or (over.size if isinstance(over, Channel) else over.size()) == 1:
        if error is not None:
            raise error
        return over.gather(result) if isinstance(over, Channel) else [result]
    report = {"result": result} if error is None else {"error": _described(error)}
    try:
        reports = over.gather(report, timeout) if isinstance(over, Channel) else per_rank(over, report)
    except CheckpointError as lost:
        raise lost from error
    failures = {rank: report["error"] for rank, report in enumerate(reports) if "error" in report}
    if failures and isinstance(over, Channel):
        raise _combined(over, failures, error) from error
    if error is not None:
        raise error
    for rank, failure in failures.items():
        kind = getattr(errors, failure["kind"], RankMismatch)
        raise _error(kind, f"rank {rank}: {failure['text']}", failure["attributes"])
    return [report["result"] for report in reports]


def _combined(channel: Channel, failures: Mapping[int, dict[str, Any]], error: Exception | None) -> Exception:
    """Return what all ranks raise, from what some of them have raised; ``error`` is this rank's."""
    texts = {rank: failure["text"] for rank, failure in failures.items()}
    kinds = {failure["kind"] for failure in failures.values()}
    kind = getattr(errors, kinds.pop(), CheckpointError) if len(kinds) == 1 else CheckpointError
    if error is not None and isinstance(error, kind) and len(texts) == channel.size and len(set(texts.values())) == 1:
        return error
    combined = CheckpointError(f"{channel.what} failed{channel.among}", texts)
    if kind is CheckpointError:
        return combined
    attributes = next(iter(failures.values()))["attributes"] if error is None else vars(error)
    return _error(kind, str(combined), {**attributes, "failures": combined.failures})


def _described(error: Exception) -> dict[str, Any]:
    """Describe an error as JSON can; only errors of ours keep their kind."""
    known = [kind for kind in type(error).__mro__ if vars(errors).get(kind.__name__) is kind is not FsshardError]
    name = "" if known[:1] == [type(error)] else f"{type(error).__name__}: "
    attributes = json.loads(json.dumps(vars(error) if known else {}, default=str, skipkeys=True))
    return {"kind": known[0].__name__ if known else "", "text": f"{name}{error}", "attributes": attributes}


def _error(kind: type[FsshardError], message: str, attributes: Mapping[str, Any]) -> FsshardError:
    error = kind.__new__(kind)  # whose constructor takes other arguments
    error.args = (message,)
    error.__dict__.update(attributes)
    return error
