"""Builds a model from a plan: its units and parameters, and a forward that uses each of them once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fsshard.planning.plan import Plan

__all__ = ["PlannedModel", "planned_batch", "planned_loss", "unit_policy"]


class PlannedUnit(nn.Module):
    """Stands for any module of the plan."""

    is_unit = False

    def forward(self, x: Tensor) -> Tensor:
        for name, parameter in list(self.named_parameters(recurse=False)):
            shown = getattr(self, name)
            if parameter.requires_grad and shown.numel():
                x = _use(x, shown)
        for child in self.children():
            x = child(x)
        return x


class _Use(torch.autograd.Function):
    """Passes ``x`` on and gives the parameter a gradient: the memory of a gradient, and no activations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor) -> Tensor:
        ctx.save_for_backward(parameter)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (parameter,) = ctx.saved_tensors
        return gradient, torch.zeros_like(parameter)


_use: Any = _Use.apply


class PlannedModel:
    """Builds it."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def __call__(self) -> nn.Module:
        root = PlannedUnit()
        for unit in self._plan.units:
            _descend(root, unit.name).is_unit = bool(unit.name)
        for name, info in self._plan.parameters.items():
            owner, _, own = name.rpartition(".")
            value = nn.Parameter(torch.empty(info.shape, dtype=info.dtype), info.requires_grad)
            _descend(root, owner).register_parameter(own, value)
        return root


def _descend(root: PlannedUnit, name: str) -> PlannedUnit:
    module = root
    for part in name.split(".") if name else ():
        if part not in module._modules:
            module.add_module(part, PlannedUnit())
        module = module._modules[part]  # type: ignore[assignment]
    return module


def unit_policy(module: nn.Module) -> bool:
    """The plan's own units."""
    return isinstance(module, PlannedUnit) and module.is_unit


def planned_batch(rank: int, world_size: int, number: int) -> Tensor:
    """Return one number."""
    return torch.ones(1, requires_grad=False)


def planned_loss(model: Any, batch: Tensor) -> Tensor:
    """Return the sum of what comes out, which is what goes in."""
    loss: Tensor = model(batch).sum()
    return loss
