"""The training loop of a recipe under any engine, on one rank: over data alone, over a mesh, or bare on one process."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsshard.errors import RecipeError
from fsshard.nested import map_leaves
from fsshard.parallel.data_rank import data_rank
from fsshard.parity.engine import Engine, make_engine, optimizer_of
from fsshard.parity.one_process import ForwardWatch, Shadow, built, random_state
from fsshard.parity.sketch import digest, real_view
from fsshard.parity.trainers import FreshScheduler
from fsshard.recipes.recipe import Recipe, Split, check_loss, resolve, seed_all, split_by

__all__ = [
    "Bare",
    "Job",
    "SplitTraining",
    "Stage",
    "Training",
]

Stage = tuple[str, Any]
"""A quantity, and what a step gave of it."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run, as it is sent to the ranks.

    Attributes:
        source: the recipe, or what :func:`~fsshard.recipes.recipe.resolve` makes one of.
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
        make = self.recipe.scheduler
        given: list[Any] = [self.engine.optimizer]
        if isinstance(make, FreshScheduler):  # an epoch's steps are fewer on more ranks
            given.append(job.world_size)
        self.scheduler = None if make is None else make(*given)
        self._shadow: Shadow | None = None
        seed_all(self.recipe.seed + 1 + self.sample_rank)

    def _made(self) -> tuple[Engine, ForwardWatch]:
        """Return the engine, over a fresh model, and a watch on its modules. Collective."""
        module, watch = built(self.recipe, self.job.device)
        return make_engine(self.job.engine, self.recipe, module), watch

    def batches(self, step: int) -> list[list[Any]]:
        """Return per accumulated batch those of the ranks that this process trains on."""
        ranks = range(self.job.world_size) if self.joins else [self.sample_rank]
        first = step * self.recipe.accumulate
        numbers = range(first, first + self.recipe.accumulate)
        return [[_to(self.recipe.batches(r, self.job.world_size, n), self.job.device) for r in ranks] for n in numbers]

    def losses(self, batches: list[list[Any]]) -> float:
        """Run forward and backward of one step; return the mean of this process's losses."""
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
        # copies; an empty one, of a parameter without elements, is none
        whole = self.engine.gradients()
        gradients = {n: None if g is None or not g.numel() else g.detach().clone() for n, g in whole}
        yield "gradient", gradients
        squares = (float(real_view(g).double().square().sum()) for g in gradients.values() if g is not None)
        clipping = self.recipe.clipping
        yield "norm", (math.sqrt(sum(squares)), None if clipping is None else self.engine.clip(*clipping))
        yield "param_groups", [{k: _as_json_value(v) for k, v in group.items()} for group in self.engine.groups()]
        self.finish()
        yield "weight", self.engine.weights()
        yield "state", states_of(self.engine)
        yield "buffer", self.engine.buffers()
        yield "random state", random_state()

    def loss(self, model: Any, batch: Any) -> Tensor:
        """Return the loss of one batch, on this process."""
        return self.recipe.loss(model, batch)

    def loss_of_all(self, value: float) -> float:
        """Return the mean of the ranks' losses. Collective."""
        total = torch.tensor(value, dtype=torch.float64, device=self.job.device)
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    def finish(self) -> None:
        """Step, and drop the gradients."""
        self.engine.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.engine.zero_grad()

    def shadow(self) -> Shadow:
        """Return a bare copy of the model with the engine's weights and buffers as they are now. Collective."""
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


def states_of(engine: Engine) -> tuple[list[tuple[str, Tensor]], dict[str, Any]]:
    """Return tensors of the optimizer's state by "parameter: key", and what is no tensor. Collective."""
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


def _as_json_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_as_json_value(item) for item in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else {"digest": digest(value)}


# -------------------------------------------------------------------------------------------------- other than data


class Bare(Engine):
    """The recipe's own model and optimizer on one process."""

    name: ClassVar[str] = "one process"

    def __init__(self, recipe: Recipe, module: nn.Module) -> None:
        super().__init__(recipe, module)
        self.model = self.module = module
        named = dict(module.named_parameters())
        groups = [{"params": list(named)}] if recipe.param_groups is None else recipe.param_groups(list(named))
        held = [{**group, "params": [named[name] for name in group["params"]]} for group in groups]
        self.optimizer = optimizer_of(recipe, lambda: recipe.optimizer(held, **recipe.hyper))


class SplitTraining(Training):
    """Over a mesh, whose ranks along other dimensions than data have the same samples.

    Attributes:
        mesh: all ranks.
        split: what the recipe has made of the model.
    """

    def __init__(self, job: Job) -> None:
        sizes = job.mesh
        assert sizes is not None
        self.mesh = init_device_mesh(job.device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        self.split = Split()
        super().__init__(job)

    def _made(self) -> tuple[Engine, ForwardWatch]:
        self.sample_rank = data_rank(self.mesh).rank
        module, watch = built(self.recipe, self.job.device, outputs=False)
        self.split = split_by(self.recipe, module, self.mesh)
        module = module if self.split.model is None else self.split.model.to(self.job.device)
        return make_engine(self.job.engine, self.recipe, module, self.split.settings), watch

    def loss(self, model: Any, batch: Any) -> Tensor:
        found = (self.split.loss or self.recipe.loss)(model, batch)
        if hasattr(found, "full_tensor"):
            raise RecipeError(
                "the loss is a DTensor, and whether ranks have parts of it or the same is for the recipe to say: "
                "return loss.full_tensor()"
            )
        return found

    def loss_of_all(self, value: float) -> float:
        return super().loss_of_all(value) * math.prod(self.mesh[name].size() for name in self.split.adds)
