"""How a loss reduces over the batch, and what that means for ranks that each see a part of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from neuralop.losses.data_losses import MSELoss
from torch import Tensor

__all__ = ["Reduction", "WithValue", "loss_reduction"]

Reduction = Literal["sum", "mean"]


def loss_reduction(loss: Any) -> Reduction | None:
    """Return whether ``loss`` sums or averages over the batch; None if it does not say, or its parts disagree.

    Known are losses with a ``reduction`` attribute (neuralop's and torch's), their bound methods (``LpLoss().abs``),
    neuralop's ``MSELoss`` and its aggregates of losses.
    """
    loss = getattr(loss, "__self__", loss)
    if isinstance(loss, MSELoss):  # neuraloperator 2.0.0: sums over the batch, and has no attribute that says so
        return "sum"
    found = getattr(loss, "reduction", None)
    if found in ("sum", "mean"):
        return found  # type: ignore[no-any-return]
    parts = getattr(loss, "losses", None) or ()
    members = list(parts.values()) if isinstance(parts, Mapping) else list(parts)
    kinds = {loss_reduction(part[0] if isinstance(part, tuple) else part) for part in members}
    return kinds.pop() if len(kinds) == 1 else None


class WithValue(torch.autograd.Function):
    """``loss`` to whoever calls backward, ``value`` to whoever reads the number."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, value: Tensor) -> Tensor:
        """Return the value, in the dtype of the loss."""
        return value.to(loss.dtype, copy=True).reshape(loss.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient of the loss, untouched."""
        return gradients[0], None
