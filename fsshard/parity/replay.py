"""Repeats one optimizer step on one process with a run's own gradients, to know what its weights must be."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsshard.parity.engine import norm_dtype

if TYPE_CHECKING:
    from fsshard.parity.trace import TraceReader
    from fsshard.parity.training import Training

__all__ = ["Replay"]


class Replay:
    """The recipe's optimizer on whole tensors, from the reference's weights and state before the step.

    Nothing is computed until something is asked for.
    """

    def __init__(
        self,
        run: Training,
        reader: TraceReader,
        step: int,
        gradients: dict[str, Tensor | None],
        norm: float | None,
        groups: list[dict[str, Any]],
    ) -> None:
        self._run, self._reader, self._step = run, reader, step
        self._gradients, self._norm, self._groups = gradients, norm, groups

    def weights(self, name: str) -> Tensor | None:
        """The weight after the step, or None where the optimizer does not know it."""
        parameter = self._stepped[0].get(name)
        return None if parameter is None else parameter.detach()

    def states(self, name: str) -> Tensor | None:
        """State ``"parameter: key"`` after the step."""
        parameters, optimizer = self._stepped
        parameter, _, key = name.rpartition(": ")
        value = optimizer.state.get(parameters[parameter], {}).get(key) if parameter in parameters else None
        return value if isinstance(value, Tensor) else None

    @cached_property
    def _stepped(self) -> tuple[dict[str, torch.nn.Parameter], torch.optim.Optimizer]:
        weights = self._reader.open(self._step - 1, "weight")
        scale, device = self._scale(), self._run.job.device
        parameters: dict[str, torch.nn.Parameter] = {}
        for name in [name for group in self._groups for name in group["params"]]:
            parameter = parameters[name] = torch.nn.Parameter(weights[name].to(device))
            gradient = self._gradients.get(name)
            if gradient is not None:
                # multiplied where the run multiplied: kernels of another device may round otherwise
                parameter.grad = (
                    gradient.clone() if scale is None else gradient * scale.to(gradient.device, gradient.dtype)
                )
        groups = [{**group, "params": [parameters[name] for name in group["params"]]} for group in self._groups]
        recipe = self._run.recipe
        optimizer = recipe.optimizer(groups, **recipe.hyper)
        if self._step > 0:
            self._load(optimizer, parameters)
        optimizer.step()
        return parameters, optimizer

    def _scale(self) -> Tensor | None:
        clipping = self._run.recipe.clipping
        if clipping is None or self._norm is None:
            return None
        # torch.nn.utils.clip_grad_norm_'s formula, from the norm that this run clipped with.
        norm = torch.tensor(self._norm, dtype=norm_dtype(self._gradients))
        return torch.clamp(clipping[0] / (norm + 1e-6), max=1.0)

    def _load(self, optimizer: torch.optim.Optimizer, parameters: dict[str, torch.nn.Parameter]) -> None:
        plain = self._reader.facts(self._step - 1)["plain"]
        for name, value in [*self._reader.open(self._step - 1, "state").items(), *plain.items()]:
            parameter, _, key = name.rpartition(": ")
            held = parameters[parameter]
            counter = isinstance(value, Tensor) and not value.dim()  # torch keeps these on the CPU
            optimizer.state[held][key] = value if counter or not isinstance(value, Tensor) else value.to(held.device)
