"""The loop that a recipe goes through under any engine, on one rank."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.activation import checkpoint_blocks
from fsshard.errors import RecipeError
from fsshard.parity.engine import Engine, WrappedEngine, make_engine
from fsshard.parity.joined import unchanged
from fsshard.parity.recipe import Recipe, resolve
from fsshard.parity.trace import digest, real_view
from fsshard.parity.watch import ForwardWatch

__all__ = ["INITIAL", "Job", "Training", "copied", "norm_of", "random_state", "states_of"]

INITIAL = -1
"""The step number under which weights before the first step are kept."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run, as it is sent to the ranks.

    Attributes:
        source: the recipe, or what :func:`~fsshard.parity.recipe.resolve` makes one of.
        engine: what trains it.
        steps: optimizer steps.
        world_size: ranks whose batches are trained on; a job on one rank joins them.
        folder: of the reference's trace.
        reference_joined: whether the trace is of one process on the joined batches.
        device: ``"cpu"`` or ``"cuda"``.
    """

    source: Any
    engine: Any
    steps: int
    world_size: int
    folder: str
    reference_joined: bool = False
    device: str = "cpu"


class Training:
    """The loop that every run goes through, one step's stages at a time."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.recipe: Recipe = resolve(job.source)
        self.rank = dist.get_rank()
        self.joins = dist.get_world_size() == 1 and job.world_size > 1
        _seed(self.recipe.seed)
        module = self.recipe.build()
        self.watch = ForwardWatch(module)
        checkpoint_blocks(module, self.recipe.activation_checkpointing)
        self.engine: Engine = make_engine(job.engine, self.recipe, module.to(job.device))
        scheduler = self.recipe.scheduler
        self.scheduler = None if scheduler is None else scheduler(self.engine.optimizer)
        _seed(self.recipe.seed + 1 + self.rank)

    def batches(self, step: int) -> list[list[Any]]:
        """Per accumulated batch, those of the ranks that this process trains on."""
        ranks = range(self.job.world_size) if self.joins else [self.rank]
        first = step * self.recipe.accumulate
        numbers = range(first, first + self.recipe.accumulate)
        return [[_to(self.recipe.batches(r, self.job.world_size, n), self.job.device) for r in ranks] for n in numbers]

    def losses(self, batches: list[list[Any]]) -> float:
        """Forward and backward of one step; the mean of this process's losses."""
        total, last = 0.0, len(batches) - 1
        for number, parts in enumerate(batches):
            with self.engine.accumulating() if number < last else contextlib.nullcontext():
                with self.watch.forward():
                    loss = self.recipe.loss(self.engine.model, self.recipe.joined(parts)) / len(batches)
                _check_loss(loss)
                self.engine.backward(loss)
            total += float(loss.detach())
        return total

    def clip(self) -> float | None:
        """Clip if the recipe says so; the engine's own norm."""
        return None if self.recipe.clipping is None else self.engine.clip(*self.recipe.clipping)

    def finish(self) -> None:
        """Step, and drop the gradients."""
        self.engine.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.engine.zero_grad()

    def magnitudes(self, batches: list[list[Any]]) -> dict[str, Tensor]:
        """Sum over ranks of |local gradient| / N, from an extra backward that reduces nothing. Collective."""
        engine, found = self.engine, dict[str, Tensor]()
        assert isinstance(engine, WrappedEngine)
        assert not engine.model.backend.partitions_optimizer  # a reference holds replicas, see comparison.py
        with unchanged(engine, random_numbers=True):
            for parts in batches:
                with engine.model.no_sync():
                    with self.watch.forward():
                        loss = self.recipe.loss(engine.model, parts[0]) / len(batches)
                    loss.backward()
                    for name, gradient in engine.local_gradients():
                        if gradient is not None:
                            found[name] = found.get(name, 0) + real_view(gradient).abs()
                engine.zero_grad()
        for value in found.values():
            dist.all_reduce(value)
            value /= self.job.world_size
        return found

    def reductions(self, names: Iterable[str]) -> dict[str, int]:
        """How many reductions make up a step's gradient of each parameter, at most, as the last forward ran."""
        recipe = self.recipe
        if recipe.accumulate == 1:
            return dict.fromkeys(names, 1)
        if not recipe.no_sync:
            return dict.fromkeys(names, recipe.accumulate)
        # FSDP2 (torch 2.13) ends a unit's backward at each of its uses: for a unit that runs several times in a
        # forward, the first of them reduces what no_sync() had accumulated, and the last one what is new.
        repeated = self.watch.repeated()
        return {name: 2 if any(name.startswith(f"{m}.") or not m for m in repeated) else 1 for name in names}


def _seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def _to(value: Any, device: str) -> Any:
    if device == "cpu":
        return value
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return type(value)((key, _to(item, device)) for key, item in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_to(item, device) for item in value))
    return type(value)(_to(item, device) for item in value) if isinstance(value, (list, tuple)) else value


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
        got = f"shape {tuple(loss.shape)}, {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
        raise RecipeError(f"recipe.loss must return one real number as a tensor, got {got}")


def norm_of(gradients: dict[str, Tensor | None]) -> float:
    """L2 norm over all numbers, in float64."""
    squares = (float(real_view(g).double().square().sum()) for g in gradients.values() if g is not None)
    return math.sqrt(sum(squares))


def random_state() -> str:
    """A digest of everything random that a training on this rank could draw from."""
    cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return digest([torch.get_rng_state(), *cuda])


def states_of(engine: Engine) -> tuple[list[tuple[str, Tensor]], dict[str, Any]]:
    """Tensors of the optimizer's state by "parameter: key", and what is no tensor."""
    tensors: list[tuple[str, Tensor]] = []
    plain: dict[str, Any] = {}
    for name, state in engine.states():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors.append((f"{name}: {key}", value))
            elif isinstance(value, (bool, int, float, str, type(None))):
                plain[f"{name}: {key}"] = value
    return tensors, plain


def copied(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach().clone()
