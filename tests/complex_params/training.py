"""Helpers for tests of complex parameters: a training, and comparisons."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fsshard.complex_params.slots import parameter_slots
from tests.models import take_step
from tests.training_runs import call, differences
from tests.zoo import ZOO


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Gradients by the user's names, in the user's view."""
    found = {}
    for slot in parameter_slots(model):
        gradient = slot.parameter.grad
        found[slot.name] = None if gradient is None else slot.kind.to_user(gradient)
    return found


def train(model: nn.Module, name: str, steps: int = 3) -> list[dict[str, Any]]:
    """Adam on ``model.parameters()``; everything each step computed."""
    case = ZOO[name]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    trace = []
    for step in range(steps):
        output = call(model, case.batch(0, step))
        loss = case.loss(output)
        loss.backward()
        trace.append({"output": output.detach(), "loss": loss.detach(), "gradients": copy.deepcopy(gradients(model))})
        take_step(optimizer)
    return trace


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The state dict without neuraloperator's constructor arguments."""
    return {key: value for key, value in model.state_dict().items() if key != "_metadata"}


def changed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of the same form with other values."""
    return {
        key: value * 2 + 1 if value.is_floating_point() or value.is_complex() else value for key, value in state.items()
    }


def equal(one: Any, other: Any) -> bool:
    """Equal to the last bit, dtypes, shapes and order of keys included."""
    return not list(differences(one, other))


def allocated(action: Callable[[], Any]) -> int:
    """Bytes that the CPU allocator gave out during ``action``."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        action()
    return sum(max(event.self_cpu_memory_usage, 0) for event in profiler.events())
