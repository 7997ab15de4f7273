"""``fsshard.wrap(model, auto_wrap_policy="tuned")``: the search inside of a running job."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fsshard.comm.agreement import exchange
from fsshard.errors import ConfigurationError
from fsshard.sharded.optimizer import constructor_arguments
from fsshard.simulation.tuning.tuning import tune
from fsshard.torch_private.c10d import takes_only_cuda

__all__ = ["Tuned"]

KNOWN = ("batch", "loss", "optimizer", "memory", "accumulation", "limit")


class Tuned:
    """``auto_wrap_policy="tuned"``: the backend, units, recomputed blocks and options that :func:`fsshard.tune` finds.

    Args:
        arguments: of :func:`fsshard.tune`, :data:`KNOWN` of them; ``"batch"`` is needed. Checked when it searches, so
            that all ranks hear of what is wrong on one.
    """

    def __init__(self, arguments: object = None) -> None:
        self.arguments = arguments

    def find_settings(
        self, model: nn.Module, optimizer: Optimizer | None, given: Mapping[str, Any], group: dist.ProcessGroup
    ) -> dict[str, Any]:
        """The arguments of wrap() that the search has found. Collective.

        Rank 0 searches and tells the others: one process simulates per job and not one per rank, and ranks that differ
        (in their batch, in a library's version) cannot come to different plans. An error there is raised on every rank.

        Args:
            model: the bare model.
            optimizer: the live one, if it was handed over.
            given: arguments of wrap() that are not searched, the backend among them.
            group: the ranks that share the work.
        """
        fixed = {**given, "device": "cuda"} if takes_only_cuda(group) else given

        def search() -> dict[str, Any] | None:
            _check(self.arguments)
            assert isinstance(self.arguments, Mapping)
            if dist.get_rank(group):
                return None
            trained: Any = self.arguments.get("optimizer")
            if trained is None and optimizer is not None:
                trained = functools.partial(type(optimizer), **constructor_arguments(optimizer))
            found = tune(model, world_size=group.size(), **{**fixed, **self.arguments, "optimizer": trained})
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
            f"tuning={{{unknown[0]!r}: ...}}: unknown argument; known are {', '.join(KNOWN)}. Pass the arguments of "
            "wrap() to wrap()"
        )
    if not tuning or tuning.get("batch") is None:
        raise ConfigurationError(
            f"auto_wrap_policy='tuned' simulates training steps, for which it needs one rank's batch: pass {example}"
        )
