"""Makes a recipe of a plan: a model of its units and parameters, and a forward that uses each parameter once."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from fsshard.parity.recipe import Recipe
from fsshard.planning.plan import Plan

__all__ = ["planned_recipe"]


def planned_recipe(plan: Plan) -> Recipe:
    """Return a training of the plan's parameters in the plan's units, without activations."""
    return Recipe(
        build=functools.partial(_built, plan),
        batches=_one_number,
        loss=_sum,
        precision=plan.precision,
        settings={"auto_wrap_policy": _is_unit if len(plan.units) > 1 else None},
        name=f"plan of {len(plan.parameters)} parameters",
    )


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


def _built(plan: Plan) -> nn.Module:
    root = PlannedUnit()
    for unit in plan.units:
        _descend(root, unit.name).is_unit = bool(unit.name)
    for name, info in plan.parameters.items():
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


def _is_unit(module: nn.Module) -> bool:
    return isinstance(module, PlannedUnit) and module.is_unit


def _one_number(rank: int, world_size: int, number: int) -> Tensor:
    return torch.ones(1)


def _sum(model: Any, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).sum()
    return loss
