"""Optimizers whose state is divided among ranks, recognised by class, whichever implementation they are of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from fsshard.errors import MisuseError

__all__ = ["PartitionedOptimizer", "local_optimizer", "partitioned_within"]

FAIRSCALES = ("fairscale.optim.oss", "OSS")


class PartitionedOptimizer:
    """An optimizer of all parameters whose ranks each update those that they own: ours, and FairScale's OSS.

    Attributes:
        optim: this rank's optimizer, with all groups, of which it has its own parameters.
        group: the ranks, of which this one is number ``rank`` of ``world_size``.
    """

    optim: Optimizer
    group: dist.ProcessGroup
    rank: int
    world_size: int
    _param_to_rank: Mapping[Tensor, int]

    def owner_of(self, parameter: Tensor) -> int | None:
        """The rank of the group that updates ``parameter``; None where this optimizer does not have it."""
        return self._param_to_rank.get(parameter)

    def send_parameters(self) -> None:
        """Send the parameters from their owners to all ranks, as at the end of a step. Collective."""
        self._broadcast_params()

    def _broadcast_params(self) -> None:
        raise NotImplementedError


def local_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer that has this rank's state: one within, where the state is divided by owner."""
    return optimizer.optim if isinstance(optimizer, PartitionedOptimizer) else optimizer


def partitioned_within(optimizer: Any) -> PartitionedOptimizer | None:
    """The optimizer that divides its state among ranks: this one, or what it hands attributes on to (AdaScale).

    Raises:
        MisuseError: it is the OSS of FairScale itself, which does not say which rank owns what.
    """
    found = getattr(getattr(optimizer, "owner_of", None), "__self__", None)
    if isinstance(found, PartitionedOptimizer):
        return found
    # Taken for an optimizer that all ranks have whole, an overflow on one rank would let the others wait forever.
    if any((cls.__module__, cls.__qualname__) == FAIRSCALES for cls in type(optimizer).__mro__):
        raise MisuseError(
            "expected an OSS of fsshard, got FairScale's own, imported past the redirect; import OSS as the script "
            "imports FairScale's other names, or train with fsshard.wrap(model, backend='fairscale')"
        )
    return None
