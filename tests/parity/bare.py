"""The reference that contains nothing of fsshard: replicas of the bare model, their gradients averaged by hand.

One process computes what two data-parallel ranks would: each replica takes the batches and the random numbers of one
rank, ``(a + b) / 2`` of the gradients is put into both, and torch's own optimizer steps each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

RANKS = 2


@dataclass
class Bare:
    """What the replicas computed; values are of rank 0's replica, losses of every one.

    Attributes:
        losses: per step, per rank.
        weights: the state dict at the end.
        state: parameter's name -> key -> value, of torch's optimizer.
    """

    losses: list[list[float]] = field(default_factory=list)
    weights: dict[str, Any] = field(default_factory=dict)
    state: dict[str, dict[str, Any]] = field(default_factory=dict)


def train(
    build: Callable[[], nn.Module],
    loss_of: Callable[[nn.Module, int, int], Tensor],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    steps: int,
) -> Bare:
    """Train ``RANKS`` replicas.

    Args:
        build: makes the model, the same one each time.
        loss_of: ``(model, rank, step)`` -> the loss on that rank's batch.
        optimizer: makes torch's optimizer of parameters.
        steps: how many.
    """
    models = [build() for _ in range(RANKS)]
    optimizers = [optimizer(model.parameters()) for model in models]
    draws = [torch.Generator().manual_seed(rank).get_state() for rank in range(RANKS)]
    found = Bare()
    for step in range(steps):
        losses = []
        for rank, model in enumerate(models):
            torch.set_rng_state(draws[rank])
            loss = loss_of(model, rank, step)
            loss.backward()
            draws[rank] = torch.get_rng_state()
            losses.append(float(loss.detach()))
        found.losses.append(losses)
        average(models)
        for one in optimizers:
            one.step()
            one.zero_grad()
        for buffers in zip(*(model.buffers() for model in models), strict=True):  # as DDP does before each forward
            for other in buffers[1:]:
                other.copy_(buffers[0])
    found.weights = {key: _copied(value) for key, value in models[0].state_dict().items()}
    found.state = dict(_states(models[0], optimizers[0]))
    return found


def average(models: list[nn.Module]) -> None:
    """Put the mean of the replicas' gradients into each, by ``(a + b) / 2``."""
    for parameters in zip(*(model.parameters() for model in models), strict=True):
        gradients = [parameter.grad for parameter in parameters]
        if any(gradient is None for gradient in gradients):
            assert all(gradient is None for gradient in gradients), "a gradient on one rank only"
            continue
        first, *others = (gradient for gradient in gradients if gradient is not None)
        mean = first.clone()
        for other in others:
            mean = mean + other
        mean = mean / len(models)
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.copy_(mean)


def _states(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, parameter in model.named_parameters():
        if parameter in optimizer.state:
            yield name, {key: _copied(value) for key, value in optimizer.state[parameter].items()}


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
