"""The user's handle of a split field: how it is cut, put together and measured."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fsshard.parallel.domain.losses import DomainH1Loss, DomainLpLoss, DomainMSELoss, mean_of_squares
from fsshard.parallel.domain.slabs import Slabs

__all__ = ["Domain"]


class Domain(Slabs):
    """The ranks that share every sample, each with a slab of it. Made by :func:`fsshard.parallel.shard_domain`.

    Beside what :class:`~fsshard.parallel.domain.slabs.Slabs` has (``scatter``, ``gather``, ``shape``, ``bytes_sent``):
    losses of slabs, with the values and gradients of one process that has the whole fields.
    """

    def mse_loss(self, prediction: Tensor, target: Tensor) -> Tensor:
        """The mean of squares over the whole batch and field, as ``torch.nn.functional.mse_loss``. Collective."""
        return mean_of_squares(self, prediction, target)

    def LpLoss(self, *args: Any, **kwargs: Any) -> DomainLpLoss:
        """neuraloperator's ``LpLoss`` over the whole field, of slabs; takes the same arguments."""
        return DomainLpLoss(self, *args, **kwargs)

    def H1Loss(self, *args: Any, **kwargs: Any) -> DomainH1Loss:
        """neuraloperator's ``H1Loss`` over the whole field, of slabs, which it gathers; takes the same arguments."""
        return DomainH1Loss(self, *args, **kwargs)

    def MSELoss(self) -> DomainMSELoss:
        """neuraloperator's ``MSELoss`` over the whole field, of slabs: a mean per sample, summed over the batch."""
        return DomainMSELoss(self)
