"""The training loop of a recipe under any engine, on one rank."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.nested import map_leaves
from fsshard.parity.engine import Engine, make_engine
from fsshard.parity.recipe import Recipe, check_loss, resolve
from fsshard.parity.seeding import random_state, seed_all
from fsshard.parity.shadow import Shadow, built
from fsshard.parity.trace import digest, real_view
from fsshard.parity.trainers import FreshScheduler
from fsshard.parity.watch import ForwardWatch

__all__ = ["INITIAL", "Job", "Stage", "Training", "norm_of"]

Stage = tuple[str, Any]
"""A quantity, and what a step gave of it."""
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
        mesh: sizes of the mesh by name, where the model is divided too; ``world_size`` is that of data then.
    """

    source: Any
    engine: Any
    steps: int
    world_size: int
    folder: str = ""
    reference_joined: bool = False
    device: str = "cpu"
    mesh: Mapping[str, int] | None = None


class Training:
    """The loop that every run goes through, one step's stages at a time.

    Attributes:
        rank: of this process.
        sample_rank: whose samples it trains on: ranks that share samples have the same number.
        joins: whether it trains on the samples of all ranks.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.recipe: Recipe = resolve(job.source)
        self.rank = self.sample_rank = dist.get_rank()
        self.joins = dist.get_world_size() == 1 and job.world_size > 1
        self.engine, self.watch = self._made()
        self.scheduler = self._scheduled()
        self._shadow: Shadow | None = None
        seed_all(self.recipe.seed + 1 + self.sample_rank)

    def _scheduled(self) -> Any:
        make = self.recipe.scheduler
        if isinstance(make, FreshScheduler):  # an epoch's steps are fewer on more ranks
            return make(self.engine.optimizer, self.job.world_size)
        return None if make is None else make(self.engine.optimizer)

    def _made(self) -> tuple[Engine, ForwardWatch]:
        """The engine, over a fresh model, and a watch on its modules. Collective."""
        module, watch = built(self.recipe, self.job.device)
        return make_engine(self.job.engine, self.recipe, module), watch

    def batches(self, step: int) -> list[list[Any]]:
        """Per accumulated batch, those of the ranks that this process trains on."""
        ranks = range(self.job.world_size) if self.joins else [self.sample_rank]
        first = step * self.recipe.accumulate
        numbers = range(first, first + self.recipe.accumulate)
        return [[_to(self.recipe.batches(r, self.job.world_size, n), self.job.device) for r in ranks] for n in numbers]

    def losses(self, batches: list[list[Any]]) -> float:
        """Forward and backward of one step; the mean of this process's losses."""
        total, last = 0.0, len(batches) - 1
        for number, parts in enumerate(batches):
            with self.engine.accumulating() if number < last else contextlib.nullcontext():
                with self.watch.forward(), self.engine.forward():
                    loss = check_loss(self.loss(self.engine.model, self.recipe.joined(parts))) / len(batches)
                self.engine.backward(loss)
            total += float(loss.detach())
        return total

    def stages(self, step: int, rounding: contextlib.AbstractContextManager[Any] | None = None) -> Iterator[Stage]:
        """Train one step, and yield what each of its stages gives, by the names of ``QUANTITIES``, as it comes.

        Whoever reads takes every tensor of a stage before the next one, on all ranks alike: taking them is collective.

        Args:
            step: its number; the first one begins with the initial weights.
            rounding: entered around forward and backward.
        """
        if step == 0:
            yield "initial weight", self.engine.weights()
        batches = self.batches(step)
        yield "batch", batches
        self.watch.take()
        with contextlib.nullcontext() if rounding is None else rounding:
            loss = self.losses(batches)
        yield "loss", (loss, self.watch.take())
        gradients = gradients_of(self.engine)
        yield "gradient", gradients
        yield "norm", (norm_of(gradients), self.clip())
        yield "param_groups", groups_of(self.engine)
        self.finish()
        yield "weight", self.engine.weights()
        yield "state", states_of(self.engine)
        yield "buffer", self.engine.buffers()
        yield "random state", random_state()

    def loss(self, model: Any, batch: Any) -> Tensor:
        """Run one batch, on this process."""
        return self.recipe.loss(model, batch)

    def loss_of_all(self, value: float) -> float:
        """Return the mean of the ranks' losses. Collective."""
        total = torch.tensor(value, dtype=torch.float64, device=self.job.device)
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    def clip(self) -> float | None:
        """Clip if the recipe says so; the engine's own norm."""
        return None if self.recipe.clipping is None else self.engine.clip(*self.recipe.clipping)

    def finish(self) -> None:
        """Step, and drop the gradients."""
        self.engine.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.engine.zero_grad()

    def shadow(self) -> Shadow:
        """A bare copy of the model with the engine's weights and buffers as they are now. Collective."""
        if self._shadow is None:
            self._shadow = Shadow(self.recipe, self.job.device)
        self._shadow.load(self.engine.weights(), self.engine.buffers())
        return self._shadow

    def magnitudes(self, step: int) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Sum over ranks of |local gradient| / N, and how many reductions make up each gradient. Collective."""
        shadow = self.shadow()
        found = shadow.moduli(lambda: [parts[0] for parts in self.batches(step)])
        for dtype in {value.dtype: None for value in found.values()}:  # in one reduction for many small tensors
            names = [name for name, value in found.items() if value.dtype == dtype]
            flat = torch.cat([found[name].reshape(-1) for name in names])
            dist.all_reduce(flat)
            flat /= self.job.world_size
            for name, value in zip(names, flat.split([found[name].numel() for name in names]), strict=True):
                found[name] = value.view_as(found[name])
        return found, self.reductions(found, shadow)

    def reductions(self, names: Iterable[str], shadow: Shadow) -> dict[str, int]:
        """Return how many reductions make up each parameter's gradient, at most, as the shadow's forwards ran."""
        recipe = self.recipe
        if recipe.accumulate == 1:
            return dict.fromkeys(names, 1)
        if not recipe.no_sync:
            return dict.fromkeys(names, recipe.accumulate)
        # FSDP2 (torch 2.13) ends a unit's backward at each of its uses: for a unit that runs several times in a
        # forward, the first of them reduces what no_sync() had accumulated, and the last one what is new.
        repeated = shadow.watch.repeated()
        return {name: 2 if any(name.startswith(f"{m}.") or not m for m in repeated) else 1 for name in names}


def _to(value: Any, device: str) -> Any:
    if device == "cpu":
        return value
    return map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)


def norm_of(gradients: dict[str, Tensor | None]) -> float:
    """L2 norm over all numbers, in float64."""
    squares = (float(real_view(g).double().square().sum()) for g in gradients.values() if g is not None)
    return math.sqrt(sum(squares))


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
            else:  # a list of tensors, say: compared as one, and not put back
                plain[f"{name}: {key}"] = {"digest": digest(value)}
    return tensors, plain


def gradients_of(engine: Engine) -> dict[str, Tensor | None]:
    """Copies of whole gradients by name; an empty one (of a parameter without elements) is none. Collective."""
    found = ((name, value) for name, value in engine.gradients())
    return {name: None if value is None or not value.numel() else value.detach().clone() for name, value in found}


def groups_of(engine: Engine) -> list[dict[str, Any]]:
    """The optimizer's groups as plain data: names, numbers, texts; digests of anything else."""
    return [{key: _as_json_value(value) for key, value in group.items()} for group in engine.groups()]


def _as_json_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_as_json_value(item) for item in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else {"digest": digest(value)}
