"""The reference that contains nothing of fsshard: replicas of the bare model, their gradients averaged by hand.

Each rank has a replica, torch's own optimizer over it, and its own batches. After a backward each puts the mean of the
ranks' gradients in their place: what data-parallel ranks compute, by definition.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass
class Trained:
    """Everything that a training computed.

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
    for gradient in [parameter.grad for parameter in model.parameters() if parameter.grad is not None]:
        real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
        total = real.contiguous()
        dist.all_reduce(total)
        real.copy_(total / dist.get_world_size())


def same_buffers(model: nn.Module) -> None:
    """Rank 0's buffers to all, as DDP does before a forward. Collective."""
    for buffer in model.buffers():
        dist.broadcast(torch.view_as_real(buffer) if buffer.is_complex() else buffer, 0)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """The optimizer's state by the parameters' names."""
    named = model.named_parameters()
    return {name: copied(optimizer.state[p]) for name, p in named if optimizer.state.get(p)}


def copied(values: Any) -> dict[str, Any]:
    """The same values in memory of their own."""
    return {key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in values.items()}
