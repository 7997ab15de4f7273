"""The reference that contains nothing of fsshard: replicas of the bare model, their gradients averaged by hand.

Each rank has a replica, torch's own optimizer over it, and its own batches. After a backward the ranks tell each other
their gradients, and each puts ``(a + b) / 2`` in their place: what two data-parallel ranks compute, by definition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Loop = Callable[[Any, Any, Callable[[], Tensor], Callable[[], None]], Tensor]
"""``(model, optimizer, loss of this rank's batch, gradients are averaged here)`` -> the loss of one step."""


def plain(model: Any, optimizer: Any, loss: Callable[[], Tensor], averaged: Callable[[], None]) -> Tensor:
    """Forward, backward, step."""
    found = loss()
    found.backward()
    averaged()
    optimizer.step()
    optimizer.zero_grad()
    return found


@dataclass
class Trained:
    """What a training computed.

    Attributes:
        losses: this rank's, step by step.
        weights: the state dict.
        state: parameter's name -> key -> value, of the optimizer.
    """

    losses: list[float] = field(default_factory=list)
    weights: dict[str, Any] = field(default_factory=dict)
    state: dict[str, dict[str, Any]] = field(default_factory=dict)


def pack(model: nn.Module) -> nn.Module:
    """Close the gaps of parameters that are slices of larger tensors; all others stay as they are."""
    for parameter in model.parameters():
        reach = 1 + sum((n - 1) * stride for n, stride in zip(parameter.shape, parameter.stride(), strict=True))
        if reach > parameter.numel():
            parameter.data = parameter.data.clone()
    return model


def average(model: nn.Module) -> None:
    """Put the mean of the ranks' gradients in their place, by ``(a + b) / 2``. Collective."""
    graded = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for gradients in by_dtype(graded):
        mine = torch.cat([gradient.reshape(-1) for gradient in gradients])
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        first, *others = everyone
        for other in others:
            first = first + other
        mean = (first / len(everyone)).split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, mean, strict=True):
            gradient.copy_(part.view(gradient.shape))


def by_dtype(gradients: list[Tensor]) -> list[list[Tensor]]:
    """Real views of gradients, those of one dtype in one list."""
    found: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
        found.setdefault(real.dtype, []).append(real)
    return list(found.values())


def same_buffers(model: nn.Module) -> None:
    """Rank 0's buffers to all, as DDP does before a forward. Collective."""
    for buffer in model.buffers():
        dist.broadcast(torch.view_as_real(buffer) if buffer.is_complex() else buffer, 0)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Any, int, int], Tensor],
    steps: range,
    loop: Loop = plain,
) -> list[float]:
    """Train this rank's replica and return its losses. Collective.

    Args:
        model: the same on every rank.
        optimizer: torch's own over it.
        loss: ``(model, rank, step)`` -> the loss on that rank's batch.
        steps: their numbers.
        loop: how a step is made.
    """
    losses = []
    for step in steps:
        found = loop(model, optimizer, lambda: loss(model, dist.get_rank(), step), lambda: average(model))  # noqa: B023
        same_buffers(model)
        losses.append(float(found.detach()))
    return losses


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """The optimizer's state by the parameters' names."""
    return dict(_states(model, optimizer))


def _states(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, parameter in model.named_parameters():
        if optimizer.state.get(parameter):
            yield name, copied(optimizer.state[parameter])


def copied(values: Any) -> dict[str, Any]:
    """The same values in memory of their own."""
    return {key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in values.items()}
