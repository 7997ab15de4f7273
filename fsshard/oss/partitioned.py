"""Optimizers whose state is divided among ranks, recognised by class, whichever implementation they are of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from fsshard.errors import MisuseError
from fsshard.oss.collectives import used_anywhere

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
        """Return the rank of the group that updates ``parameter``; None where this optimizer does not have it."""
        return self._param_to_rank.get(parameter)

    def send_parameters(self) -> None:
        """Send the parameters from their owners to all ranks, as at the end of a step. Collective."""
        self._broadcast_params()

    def _broadcast_params(self) -> None:
        raise NotImplementedError

    def with_gradient_at_owner(self, frozen: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Return those frozen parameters that their owner's optimizer moves: an old gradient is left. Collective."""
        # Momentum, weight decay and Adam's averages go on. FairScale 0.4.13 sends trainable parameters only, and the
        # ranks drift apart.
        flags = [self.owner_of(p) == self.rank and p.grad is not None for p in frozen]
        moved = used_anywhere(flags, self.group, device) if flags else []
        return [parameter for parameter, flag in zip(frozen, moved, strict=True) if flag]


def local_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that has this rank's state: one within, where the state is divided by owner."""
    return optimizer.optim if isinstance(optimizer, PartitionedOptimizer) else optimizer


def partitioned_within(optimizer: Any) -> PartitionedOptimizer | None:
    """Return the optimizer that divides its state among ranks: this one, or one that it wraps (AdaScale).

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
