"""A second, bare copy of the model, to compute things without touching the model that is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsshard.complex_params.slots import public_name
from fsshard.model.activation_checkpointing import checkpoint_blocks
from fsshard.model.unit_inputs import mark_unit_inputs
from fsshard.parity.recipe import Recipe, check_loss
from fsshard.parity.seeding import kept_random_numbers, random_state, seed_all
from fsshard.parity.trace import real_view
from fsshard.parity.watch import ForwardWatch
from fsshard.planning.plan import plan

__all__ = ["Draw", "Shadow", "built"]


def built(recipe: Recipe, device: str, *, outputs: bool = True) -> tuple[nn.Module, ForwardWatch]:
    """The recipe's model from its seed, and a watch on its modules, with their outputs or without."""
    seed_all(recipe.seed)
    module = recipe.build()
    watch = ForwardWatch(module, outputs=outputs)
    return module.to(device), watch


@dataclass
class Draw:
    """Loss and gradients of one evaluation; ``drew``: whether it took random numbers."""

    loss: float
    gradients: dict[str, Tensor]
    drew: bool


class Shadow:
    """The recipe's model on this process alone, with sums in the engines' order at the inputs of units."""

    def __init__(self, recipe: Recipe, device: str) -> None:
        with kept_random_numbers():
            self.module, self.watch = built(recipe, device, outputs=False)
        self._recipe = recipe
        modules = {public_name(name): module for name, module in self.module.named_modules()}
        policy = recipe.settings.get("auto_wrap_policy", "auto")
        checkpoint_blocks(self.module, recipe.activation_checkpointing, auto_wrap_policy=policy)
        for name in plan(self.module, auto_wrap_policy=policy).unit_names:
            mark_unit_inputs(modules[public_name(name)])
        self._buffers: list[tuple[str, Tensor]] = []

    def load(self, weights: Iterable[tuple[str, Tensor]], buffers: Iterable[tuple[str, Tensor]]) -> None:
        """Take over weights and buffers."""
        mine = {public_name(name): parameter for name, parameter in self.module.named_parameters()}
        with torch.no_grad():
            for name, value in weights:
                mine[name].copy_(value)
        self._buffers = [(name, buffer.detach().clone()) for name, buffer in buffers]

    def evaluate(self, batches: Callable[[], Sequence[Any]]) -> Draw:
        """Loss and gradients of one step from the loaded weights and buffers, random numbers put back.

        Args:
            batches: makes them, anew for each evaluation, since a loss may change its batch in place.
        """
        return self._evaluate(batches, lambda: None, self._gradients)

    def moduli(self, batches: Callable[[], Sequence[Any]]) -> dict[str, Tensor]:
        """Sum over the batches of a step of |gradient|, element by element of the real view."""
        found: dict[str, Tensor] = {}

        def collect() -> None:
            for name, gradient in self._gradients().items():
                found[name] = found.get(name, 0) + real_view(gradient).abs()
            self.module.zero_grad(set_to_none=True)

        self._evaluate(batches, collect, dict)
        return found

    def _evaluate(
        self,
        batches: Callable[[], Sequence[Any]],
        after_each: Callable[[], None],
        gradients: Callable[[], dict[str, Tensor]],
    ) -> Draw:
        self._put_buffers()
        self.module.zero_grad(set_to_none=True)
        self.watch.take()
        before = random_state()
        with kept_random_numbers():
            loss, given = 0.0, batches()
            for batch in given:
                with self.watch.forward():
                    part = check_loss(self._recipe.loss(self.module, batch)) / len(given)
                part.backward()
                loss += float(part.detach())
                after_each()
            drew = random_state() != before
        return Draw(loss, gradients(), drew)

    def _gradients(self) -> dict[str, Tensor]:
        named = ((public_name(name), parameter.grad) for name, parameter in self.module.named_parameters())
        return {name: gradient.clone() for name, gradient in named if gradient is not None}

    def _put_buffers(self) -> None:
        """By assignment: a forward may have replaced a buffer by one of another shape."""
        owners = {public_name(name): module for name, module in self.module.named_modules()}
        for name, value in self._buffers:
            owner, _, own = name.rpartition(".")
            if owner in owners:  # else of a module that is made in a forward still to come
                owners[owner]._buffers[own] = value.clone()
