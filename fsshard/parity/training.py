"""The training loop of a recipe under any engine, on one rank: over data alone, over a mesh, or bare on one process."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsshard.errors import ModelError, RecipeError
from fsshard.nested import map_tensors
from fsshard.parallel.data_rank import data_rank
from fsshard.parity.bounds import DRAWS_RANDOM_NUMBERS, NotComparable, note_batches, part_of
from fsshard.parity.engine import Engine, WrappedEngine, bare_optimizer, make_engine
from fsshard.parity.one_process import Shadow, built, random_state
from fsshard.parity.sketch import digest, real_view
from fsshard.parity.trace import NamedTensors, Step, TensorItems, Values
from fsshard.planning.policies import resolve_precision
from fsshard.recipes.recipe import Recipe, Sizes, Split, check_loss, resolve, seed_all, split_by


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run, as it is sent to the ranks.

    Attributes:
        source: the recipe, or what :func:`~fsshard.recipes.recipe.resolve` makes one of.
        engine: what trains it.
        steps: optimizer steps.
        world_size: ranks whose batches are trained on; a mesh has more.
        processes: that join these batches and divide their samples anew; 0: each trains on its own.
        folder: of the reference's tensors, or the file of a recorded training's.
        device: ``"cpu"`` or ``"cuda"``.
        mesh: sizes of the mesh by name, where the model is divided too.
    """

    source: Any
    engine: Any
    steps: int
    world_size: int
    processes: int = 0
    folder: str = ""
    device: str = "cpu"
    mesh: Sizes | None = None


class Training:
    """The loop that every run goes through, step by step.

    Attributes:
        rank: of this process.
        sample_rank: whose samples it trains on: ranks that share samples have the same number.
        joins: whether it trains on samples of all ranks, joined: on all of them, or its part.
        leaves: micro-batches of a step that go through ``model.leaves``, in which this process trains on the batches of
            all ranks one by one, with the bits of these ranks; 0 where it trains on them joined.
        mesh: of all ranks, where the model is divided.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.recipe: Recipe = resolve(job.source)
        self.rank = dist.get_rank()
        self.sample_rank = self.rank
        self._ranks = dist.get_world_size()
        self.joins = job.mesh is None and self._ranks != job.world_size
        self.mesh = None
        if job.mesh is not None:
            sizes = tuple(job.mesh.values())
            # The model is divided along the dimensions of this mesh that are none of data.
            self.mesh = init_device_mesh(job.device, sizes, mesh_dim_names=tuple(job.mesh))
            self.sample_rank = data_rank(self.mesh).rank
        module, self.watch = built(self.recipe, job.device, outputs=self.mesh is None)
        self._split = Split()
        if self.mesh is not None:
            self._split = split_by(self.recipe, module, self.mesh)
        if self._split.model is not None:
            module = self._split.model.to(job.device)
        self.engine = make_engine(job.engine, self.recipe, module, self._split.settings)
        self.leaves = self._count_leaves()
        self.scheduler = self._make_scheduler()
        self._shadow: Shadow | None = None
        # Ranks that share samples draw the same random numbers, all others their own.
        seed_all(self.recipe.seed + 1 + self.sample_rank)

    def _make_scheduler(self) -> Any:
        make: Any = self.recipe.scheduler
        if make is None:
            return None
        # A trainer's schedule per epoch depends on the number of batches, which ranks share.
        if getattr(make, "takes_world_size", False):
            return make(self.engine.optimizer, self.job.world_size)
        return make(self.engine.optimizer)

    def batches(self, step: int) -> list[list[Any]]:
        """Return per accumulated batch those of the ranks whose samples this process trains on."""
        world_size = self.job.world_size
        ranks = range(world_size) if self.joins else [self.sample_rank]
        first = step * self.recipe.accumulate
        batches = []
        for number in range(first, first + self.recipe.accumulate):
            parts = [self.recipe.batches(rank, world_size, number) for rank in ranks]
            batches.append(_to(parts, self.job.device))
        return batches

    def _count_leaves(self) -> int:
        """Return how many leaves have the tree of the ranks whose samples these are; 0 if none have."""
        ranks = self.job.world_size
        accumulate = self.recipe.accumulate
        # A rank adds up more than two micro-batches one after the other, and without no_sync reduces each.
        accumulates_in_pairs = accumulate == 1 or (accumulate == 2 and self.recipe.no_sync)
        is_power_of_two = ranks & (ranks - 1) == 0
        precision = self.recipe.settings.get("mixed_precision", self.recipe.precision)
        if not self.joins or not isinstance(self.engine, WrappedEngine):
            return 0
        # A recipe that joins batches in a way of its own may weight ranks, or leave some out.
        if self.recipe.join is not None:
            return 0
        if not accumulates_in_pairs or not is_power_of_two or ranks % self._ranks:
            return 0
        # In low precision joined kernels are no measure of the ranks' own.
        if not resolve_precision(precision).is_full:
            return 0
        return ranks * accumulate

    def _losses_by_leaves(self, batches: list[list[Any]]) -> float:
        """Run forward and backward of one step, batch by batch; return the mean of all ranks' losses."""
        model = cast(Any, self.engine.model)
        total = 0.0
        try:
            for leaf in model.leaves(self.leaves):
                rank, micro = divmod(leaf, len(batches))
                batch = batches[micro][rank]
                before = random_state()
                with self.watch.forward(), self.engine.forward():
                    loss = check_loss(self.recipe.loss(model, batch))
                if random_state() != before:
                    raise NotComparable(DRAWS_RANDOM_NUMBERS)
                self.engine.backward(loss)
                share = loss / len(batches)
                total += float(share.detach())
        except ModelError as error:
            raise NotComparable(f"one process trains on the ranks' batches one by one, and {error}") from error
        return total * self._ranks / self.job.world_size

    def losses(self, batches: list[list[Any]]) -> float:
        """Run forward and backward of one step; return the mean of this process's losses."""
        if self.leaves:
            return self._losses_by_leaves(batches)
        total = 0.0
        last = len(batches) - 1
        for number, parts in enumerate(batches):
            accumulating = contextlib.nullcontext() if number == last else self.engine.accumulating()
            batch = self.recipe.joined(parts)
            with accumulating:
                with self.watch.forward(), self.engine.forward():
                    loss = self._loss(batch) / len(batches)
                self.engine.backward(loss)
            total += float(loss.detach())
        return total

    def _loss(self, batch: Any) -> Tensor:
        if self.joins and self._ranks > 1:
            batch = part_of(batch, self.rank, self._ranks)
        function = self._split.loss or self.recipe.loss
        loss = function(self.engine.model, batch)
        if self.mesh is not None and hasattr(loss, "full_tensor"):
            raise RecipeError(
                "the loss is a DTensor, and it is not known whether ranks have parts or copies of it; return "
                "loss.full_tensor()"
            )
        return check_loss(loss)

    def step(
        self,
        number: int,
        *,
        rounding: contextlib.AbstractContextManager[Any] | None = None,
        sketched: bool = False,
        noted: Callable[[Step], None] = lambda step: None,
    ) -> tuple[Step, dict[str, NamedTensors]]:
        """Train one step; return what it gave, and its tensors by quantity and name. Collective.

        ``rounding`` is entered around forward and backward; ``sketched`` asks for sketches of the batches;
        ``noted`` is called once these are noted, before they are trained on.
        """
        step = Step(batches=[], loss=0.0, norm=0.0)
        batches = self.batches(number)
        # Noted now, since a loss may change its batch in place.
        note_batches(step, batches, sketched=sketched)
        noted(step)
        self.watch.take()
        with rounding or contextlib.nullcontext():
            step.loss = self.losses(batches)
        step.outputs = self.watch.take()
        gradients = self._gradients()
        squares = []
        for gradient in gradients.values():
            square = real_view(gradient).double().square().sum()
            squares.append(float(square))
        # sum() of recent Pythons carries what it rounds away, which records must do alike.
        step.norm = math.sqrt(sum(squares))
        if self.recipe.clipping is not None:
            step.clipped_norm = self.engine.clip(*self.recipe.clipping)
        for group in self.engine.groups():
            plain = {}
            for key, value in group.items():
                plain[key] = _as_json_value(value)
            step.groups.append(plain)
        self.finish()
        tensors = {"gradient": gradients, "weight": self.weights()}
        tensors["state"], step.plain = states_of(self.engine)
        tensors["buffer"] = self._kept(self.engine.buffers())
        step.random = random_state()
        return step, tensors

    def _gradients(self) -> NamedTensors:
        """Return copies of the gradients that have elements. Collective."""
        gradients = {}
        for name, gradient in self.engine.gradients():
            if gradient is not None and gradient.numel():
                gradients[name] = gradient.detach().clone()
        return gradients

    def weights(self) -> NamedTensors:
        """Return whole weights by name, which later steps leave as they are. Collective."""
        return self._kept(self.engine.weights())

    def _kept(self, named: TensorItems) -> NamedTensors:
        # fsshard's engines gather weights into memory of their own, and nothing frees their buffers.
        if isinstance(self.engine, WrappedEngine):
            return dict(named)
        # An engine of one's own may yield what it trains, or what it frees at the end: FSDP.summon_full_params does.
        return {name: value.detach().clone() for name, value in named}

    def finish(self) -> None:
        """Step, and drop the gradients."""
        self.engine.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.engine.zero_grad()

    def loss_of_all(self, value: float) -> float:
        """Return the mean of the ranks' losses; along some dimensions of a mesh they add up. Collective."""
        total = torch.tensor(value, dtype=torch.float64, device=self.job.device)
        dist.all_reduce(total)
        mean = float(total) / self._ranks
        if self.mesh is None:
            return mean
        sizes = [self.mesh[name].size() for name in self._split.adds]
        return mean * math.prod(sizes)

    def shadow(self) -> Shadow:
        """Return a bare copy of the model with the engine's weights and buffers as they are now. Collective."""
        if self._shadow is None:
            self._shadow = Shadow(self.recipe, self.job.device)
        self._shadow.load(self.engine.weights(), self.engine.buffers())
        return self._shadow

    def magnitudes(self, step: int) -> tuple[NamedTensors, dict[str, int]]:
        """Sum over ranks of |local gradient| / N, and how many reductions make up each gradient at most. Collective."""
        shadow = self.shadow()

        def own_batches() -> list[Any]:
            return [own for own, *_ in self.batches(step)]

        sums = shadow.moduli(own_batches)
        for value in sums.values():
            dist.all_reduce(value)
            value /= self.job.world_size
        if not self.recipe.no_sync:
            return sums, dict.fromkeys(sums, self.recipe.accumulate)
        counts = dict.fromkeys(sums, 1)
        if self.recipe.accumulate == 1:
            return sums, counts
        # FSDP2 (torch 2.13) ends a unit's backward at each of its uses: for a unit that runs several times in a
        # forward, the first of them reduces what no_sync() had accumulated, and the last one what is new.
        for module in shadow.watch.repeated():
            for name in sums:
                if not module or name.startswith(f"{module}."):
                    counts[name] = 2
        return sums, counts


def _to(value: Any, device: str) -> Any:
    if device == "cpu":
        return value
    return map_tensors(lambda tensor: tensor.to(device), value)


def states_of(engine: Engine) -> tuple[NamedTensors, Values]:
    """Return tensors of the optimizer's state by "parameter: key", and what is no tensor. Collective."""
    tensors = {}
    plain = {}
    for name, state in engine.states():
        for key, value in state.items():
            place = f"{name}: {key}"
            if isinstance(value, Tensor):
                tensors[place] = value
            else:
                plain[place] = _scalar_or_digest(value)
    return tensors, plain


def _scalar_or_digest(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    # A list of tensors, say, is compared as one, and not put back.
    return {"digest": digest(value)}


def _as_json_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return list(map(_as_json_value, value))
    return _scalar_or_digest(value)


class Bare(Engine):
    """The recipe's own model and optimizer on one process."""

    name: ClassVar[str] = "one process"

    def __init__(self, recipe: Recipe, module: nn.Module) -> None:
        super().__init__(recipe, module)
        self.model = self.module = module
        parameters = dict(module.named_parameters())
        groups = [{"params": list(parameters)}]
        if recipe.param_groups is not None:
            groups = recipe.param_groups(list(parameters))
        filled = []
        for group in groups:
            members = [parameters[name] for name in group["params"]]
            filled.append({**group, "params": members})
        self.optimizer = bare_optimizer(recipe, filled)
