"""``fsshard.wrap(model, auto_wrap_policy="tuned")``: the search within a running job."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fsshard.agreement import exchange
from fsshard.errors import ConfigurationError
from fsshard.optimizer import constructor_arguments

__all__ = ["tuned_settings"]

KNOWN = ("batch", "loss", "optimizer", "memory", "accumulation", "limit")


def tuned_settings(
    model: nn.Module,
    optimizer: Optimizer | None,
    tuning: object,
    given: Mapping[str, Any],
    group: dist.ProcessGroup,
) -> dict[str, Any]:
    """The arguments of wrap() that the search has found. Collective.

    Rank 0 searches and tells the others: one process simulates per job and not one per rank, and ranks that differ (in
    their batch, in a library's version) cannot come to different plans. An error there is raised on every rank.

    Args:
        model: the bare model.
        optimizer: the live one, if it was handed over.
        tuning: arguments of :func:`fsshard.tune`, :data:`KNOWN` of them; ``"batch"`` is needed.
        given: arguments of wrap() that are not searched, the backend among them.
        group: the ranks that share the work.
    """

    def search() -> dict[str, Any] | None:
        _check(tuning)
        assert isinstance(tuning, Mapping)
        if dist.get_rank(group):
            return None
        from fsshard.tuning.tuning import tune

        trained: Any = tuning.get("optimizer")
        if trained is None and optimizer is not None:
            trained = functools.partial(type(optimizer), **constructor_arguments(optimizer))
        found = tune(model, world_size=group.size(), **{**given, **tuning, "optimizer": trained})
        return found.settings

    settings = exchange(group, search)[0]
    assert isinstance(settings, dict)
    return settings


def _check(tuning: object) -> None:
    """Raise for what the search cannot begin with."""
    example = 'tuning={"batch": batch, "memory": "40GiB"}'
    if tuning is not None and not isinstance(tuning, Mapping):
        raise ConfigurationError(f"tuning={tuning!r}: expected a dict of arguments of fsshard.tune, such as {example}")
    unknown = sorted(set(tuning or ()) - set(KNOWN), key=str)
    if unknown:
        raise ConfigurationError(
            f"tuning={{{unknown[0]!r}: ...}}: no such argument; there are {', '.join(KNOWN)}. What wrap() takes itself "
            "is given there"
        )
    if not tuning or tuning.get("batch") is None:
        raise ConfigurationError(
            f"auto_wrap_policy='tuned' simulates training steps, for which it needs one rank's batch: pass {example}"
        )
