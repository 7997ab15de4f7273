"""The factor that makes sums of losses a mean over all that ranks have: tokens, points, valid pixels.

Engines average gradients over ranks. If each rank takes the mean over its own tokens, that is a mean of means, in which
the tokens of a rank that has few of them count more. Start at :func:`mean_factor`.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.backends.base import Backend
from fsshard.backends.settings import Settings
from fsshard.comm.agreement import exchange, has_numbers
from fsshard.comm.watchdog import taking_part
from fsshard.errors import ConfigurationError, OptimizerError, RankMismatch
from fsshard.sharded.gradient_leaves import check_leaves

Count: TypeAlias = float | Tensor
CALL = "model.mean_factor()"


class _Row(NamedTuple):
    """What one rank tells the others, each number as a float64."""

    failed: float = 1.0
    # Ranks that see the same samples have the same one.
    data_rank: float = 0.0
    # 0 for a batch that fsshard.join repeats.
    active: float = 0.0
    # The leaves of the step; 0 without model.leaves.
    leaves: float = 0.0
    tokens: float = 0.0


def mean_factor(backend: Backend, counts: Count | Sequence[Count], leaves: int | None) -> float:
    """Return by what this rank multiplies the sums of its losses; see ``ShardedModule.mean_factor``. Collective."""
    settings = backend.settings
    own_row = functools.partial(_own_row, backend, counts, leaves)
    # A rank that raised here would leave the others waiting.
    try:
        row = own_row()
    except Exception:
        row = _Row()
    with taking_part(settings.everyone, CALL):
        rows = _gather(settings, row)
        if any(each.failed for each in rows):
            # It fails again, on every rank now.
            exchange(settings.everyone, own_row)
    by_data_rank = _by_data_rank(rows)
    # Rounded once: the order of the ranks does not matter.
    total = math.fsum(each.tokens for each in by_data_rank)
    if total == 0:
        raise ConfigurationError(
            f"{CALL}: expected at least one token (or point) in a step, but all ranks have counted 0, and a mean over "
            "nothing has no value; leave this step out, on every rank"
        )
    # As many as the gradients are averaged over.
    shares = sum(each.active for each in by_data_rank)
    if leaves is not None:
        shares *= leaves // settings.world_size
    return shares / total


def _own_row(backend: Backend, counts: object, leaves: int | None) -> _Row:
    """Check the arguments and the state of the step, and return what the other ranks have to know. Local."""
    settings = backend.settings
    backend.step.refuse_means(CALL)
    if backend.step.local:
        raise OptimizerError(
            f"{CALL}: expected one call before the first backward of a step, got one between two of its micro-batches; "
            "count them all at once: model.mean_factor([count of the first, count of the second, ...])"
        )
    if leaves is not None:
        check_leaves(leaves, settings.world_size)
    count = _number(counts)
    row = _Row(failed=0.0, data_rank=settings.rank, leaves=leaves or 0)
    # The gradients of a batch that fsshard.join repeats count as zeros.
    if backend.rank_weight == 0:
        return row
    return row._replace(active=1.0, tokens=count)


def _number(count: object) -> float:
    """Return a count, or the sum of several."""
    if isinstance(count, Tensor) and has_numbers(count):
        count = count.tolist()
    if isinstance(count, (list, tuple)):
        return math.fsum(map(_number, count))
    number = math.nan
    if isinstance(count, numbers.Real) and not isinstance(count, bool):
        number = float(count)
    if 0 <= number < math.inf:
        return number
    got = repr(count)
    raise ConfigurationError(
        f"{CALL}: expected how many tokens (or points) this rank has in the step, a finite number of at least 0 such "
        f"as mask.sum(), or a list with one for each micro-batch; got {got[:80]}"
    )


def _gather(settings: Settings, row: _Row) -> list[_Row]:
    """Return the rows of all ranks, also of those that see the same samples. Collective."""
    group = settings.everyone
    if group is None or group.size() == 1:
        return [row]
    told = torch.tensor(row, dtype=torch.float64, device=settings.device)
    answers = told.new_empty(group.size() * len(row))
    dist.all_gather_single(answers, told, group=group)
    return list(map(_Row._make, answers.view(-1, len(row)).tolist()))


def _by_data_rank(rows: Sequence[_Row]) -> list[_Row]:
    """Return one row of those that see the same samples.

    Raises:
        RankMismatch: these have counted differently, or a rank asks for other leaves.
    """
    # A data rank -> the first rank of it.
    first_of: dict[float, int] = {}
    for rank, row in enumerate(rows):
        if row.leaves != rows[0].leaves:
            raise RankMismatch(
                f"{CALL}: expected the same leaves= on every rank, got {rows[0].leaves:g} on rank 0 and "
                f"{row.leaves:g} on rank {rank} (0: none); pass the argument of model.leaves"
            )
        first = first_of.setdefault(row.data_rank, rank)
        if row != rows[first]:
            raise RankMismatch(
                f"{CALL}: ranks {first} and {rank} differ in other mesh dimensions than data, so they see the same "
                f"samples: expected the same count, got {rows[first].tokens:g} and {row.tokens:g}; count whole "
                "samples, also where each of these ranks has a part of them"
            )
    return [rows[first] for first in first_of.values()]
