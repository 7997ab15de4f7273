"""The judge that holds nothing of ours: replicas of a bare model, whose gradients are averaged by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def train(
    model: nn.Module, optimizer: Any, loss: Callable[[Any, int, int], Tensor], *, steps: int, ranks: int
) -> list[list[float]]:
    """Train one model as all replicas, one after the other, on one process.

    Args:
        model: bare; it is what each replica is after the training.
        optimizer: over its parameters.
        loss: ``(model, rank, step)`` -> this rank's loss.
        steps: optimizer steps.
        ranks: number of replicas.

    Returns:
        The losses of each rank.
    """
    losses = [[] for _ in range(ranks)]
    for step in range(steps):
        replicas = []
        for rank in range(ranks):
            optimizer.zero_grad()
            value = loss(model, rank, step)
            value.backward()
            losses[rank].append(value.item())
            replicas.append([parameter.grad for parameter in model.parameters()])
        for parameter, *parts in zip(model.parameters(), *replicas, strict=True):
            known = [gradient for gradient in parts if gradient is not None]
            parameter.grad = sum(known[1:], known[0]) / ranks if known else None
        optimizer.step()
    return losses
