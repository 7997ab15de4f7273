"""The simulation: the real engine on fake tensors, as one rank of a fake job, and the same step on real ranks."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsshard.backends.cost import divided_among
from fsshard.backends.whole import owned, whole_owners
from fsshard.complex_params.tensorfy import has_dtensors
from fsshard.errors import ConfigurationError
from fsshard.model.host_copies import offloading_to
from fsshard.nested import map_leaves
from fsshard.oss.partitioned import PartitionedOptimizer
from fsshard.parallel.data_rank import data_rank
from fsshard.parallel.meshes import role_of
from fsshard.planning.plan import Plan
from fsshard.recipes.recipe import Recipe, check_loss, resolve, seed_all, split_by
from fsshard.sharded.averages import EMA
from fsshard.sharded.controller import controller_of
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer, build_optimizer
from fsshard.simulation.fakes import Fakes, GlooBuffers, UsedParameters, fake_ranks
from fsshard.simulation.tracking import GRANULARITY, Tracker, Usage
from fsshard.simulation.work import RECOMPUTATION
from fsshard.torch_private.c10d import flattened
from fsshard.torch_private.patching import replaced
from fsshard.torch_private.tensors import LOCAL_TENSOR
from fsshard.wrapping import wrap

STEPS = 2  # the optimizer makes its state in the first one; one step is enough after _make_state()


@dataclass(frozen=True, kw_only=True)
class Job:
    """One simulation, as it is sent to the process that runs it."""

    source: Any  # what fsshard.recipes.recipe.resolve() makes a recipe of
    changes: Mapping[str, Any]  # fields of the recipe to replace
    backend: str
    mesh: tuple[int, ...]  # shape of the ranks of data: (ranks,), or (replicas, shards)
    # Sizes by name of the mesh that recipe.split divides the model over; None: it is not divided.
    whole_mesh: Mapping[str, int] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # further arguments of wrap()
    device: str = "cpu"  # the device type that it is for: what the optimizer and the allocator would do there
    cpu_offload: bool = False  # count what is left on the device under cpu_offload=True
    average: bool = False  # with an EMA of the weights
    real: bool = False  # with real tensors

    @property
    def world_size(self) -> int:
        """Number of ranks that share the work: those that see other samples."""
        return math.prod(self.mesh)

    @property
    def ranks(self) -> int:
        """Number of all ranks, those that have parts of the model among them."""
        return self.world_size if self.whole_mesh is None else math.prod(self.whole_mesh.values())

    def recipe(self) -> Recipe:
        """Return the recipe with its changes, and with the optimizer as it would be on the device."""
        recipe = resolve(self.source)
        changed = replace(recipe, **self.changes, settings={**recipe.settings, **self.settings})
        if compiled := changed.settings.get("compile"):
            raise ConfigurationError(
                f"compile={compiled!r}: what compiled code allocates cannot be estimated; leave it out to estimate "
                "the same training without compilation"
            )
        choice = changed.settings.get("activation_checkpointing", changed.activation_checkpointing)
        if self.real and self.device == "cuda" and getattr(choice, "offload_to_cpu", False):
            raise ConfigurationError(
                "Checkpointing(offload_to_cpu=True) with real=True: real tensors are in host memory already; leave out "
                "real=True"
            )
        known = inspect.signature(changed.optimizer.__init__).parameters
        if self.device != "cuda" or "foreach" not in known or {"foreach", "fused", "capturable"} & set(changed.hyper):
            return changed
        # torch's default on a GPU, which on the CPU device that stands for it would be False (torch 2.13).
        return replace(changed, hyper={**changed.hyper, "foreach": True})


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One rank's training step."""

    rank: int
    usage: Usage  # of the step with the highest peak; its collectives and its work are the last step's
    state_ratio: float  # bytes of optimizer state per byte of parameter, counters left out
    # Payloads of the last step's reductions, largest first, where gradients are sent in buffers of their own that go
    # when they have arrived, to owners of whole matrices too; else empty.
    in_flight: tuple[int, ...]
    plan: Plan
    comm_groups: Mapping[str, tuple[str, ...]]  # unit -> the parameters that were sent with it
    optimizer: str  # with its settings, as text


class Trained(NamedTuple):
    """The objects that a step trains."""

    recipe: Recipe
    model: ShardedModule
    optimizer: ShardedOptimizer
    average: EMA | None

    def update_average(self, tracker: Tracker) -> None:
        """Take a step into the average of the weights, if there is one: it counts as state of the optimizer. Local."""
        if self.average is not None:
            self.average.update()
            tracker.mark([list(state.values()) for state in self.average.held.state.values()], "optimizer state")


def simulate(job: Job) -> Measured:
    """Simulate the training step of the rank that needs the most memory."""
    recipe = job.recipe()
    found = _simulate_rank(job, recipe, 0)
    if not isinstance(found, Measured):
        found = _simulate_rank(job, recipe, found)
    assert isinstance(found, Measured)
    return found


def _simulate_rank(job: Job, recipe: Recipe, rank: int) -> int | Measured:
    """Return rank ``rank``'s step if no other one trains more, else which rank does."""
    gc.collect()
    with fake_ranks(rank, job.ranks, "fake" if job.device == "cuda" else "gloo"):
        mesh = _mesh(job)
        seed_all(recipe.seed)
        fakes = None if job.real else shared_fakes()
        tracker = Tracker(granularity=GRANULARITY.get(job.device, 1))
        # The CPU stands for the GPU: what goes to the host goes where nothing is counted, and no number is kept.
        offloads = offloading_to("meta") if fakes and job.device == "cuda" else contextlib.nullcontext()
        with fakes or contextlib.nullcontext(), offloads:
            module = fakes.built(recipe.build) if fakes else recipe.build()
            with tracker:
                with _slicing(fakes):
                    recipe, module, settings = _divided(job, recipe, module, mesh)
                first = has_dtensors(module.modules())  # DTensor asks once for shapes, on tensors
                with fakes.wrapping(module) if fakes else contextlib.nullcontext():
                    given = {"backend": job.backend, **settings}
                    trained = under_backend(recipe, module, given, fake=True, average=job.average)
                place = rank if job.whole_mesh is None else data_rank(mesh).rank
                heaviest = _heaviest_rank(trained, place)
                if heaviest != place:
                    # The first of the ranks that see the samples of this number.
                    sizes = job.whole_mesh or {"data": job.world_size}
                    places = tuple(0 if role_of(name) == "model" else slice(None) for name in sizes)
                    return int(np.arange(job.ranks).reshape(tuple(sizes.values()))[places].flat[heaviest])
                batch = batches_of(job, recipe, place, fakes)
                partly = bool(recipe.settings.get("find_unused_parameters"))
                with contextlib.ExitStack() as stack:
                    if job.device != "cuda":
                        stack.enter_context(GlooBuffers())  # type: ignore[no-untyped-call]
                    if fakes and partly:
                        stack.enter_context(UsedParameters())
                    # Else only a step shows which parameters have states, or a second one what all that follow need.
                    ahead = fakes is not None and not partly and not first
                    if ahead:
                        _make_state(trained, tracker)
                    return _run_steps(trained, tracker, batch, rank, 1 if ahead else STEPS, job.cpu_offload)


def _divided(job: Job, recipe: Recipe, module: Any, mesh: Any) -> tuple[Recipe, Any, dict[str, Any]]:
    """Return the recipe with this rank's loss, this rank's part of the model, and what wrap is told of it."""
    if job.whole_mesh is None:
        return recipe, module, {"device_mesh": mesh}
    split = split_by(recipe, module, mesh)
    divided = module if split.model is None else split.model
    if getattr(data := split.settings.get("device_mesh"), "ndim", 1) == 2:
        flattened(data)  # wrap() asks for it, and would find it made
    return replace(recipe, loss=split.loss or recipe.loss), divided, dict(split.settings)


def _slicing(fakes: Fakes | None) -> AbstractContextManager[Any]:
    """Let meshes be sliced: torch reads their ranks from memory, and without numbers this rank is in no slice."""
    from torch.distributed.device_mesh import DeviceMesh

    slice_of = DeviceMesh.__getitem__

    def sliced(mesh: Any, names: Any) -> Any:
        with fakes.left() if fakes else contextlib.nullcontext():
            return slice_of(mesh, names)

    return replaced(DeviceMesh, "__getitem__", sliced)


@functools.cache
def shared_fakes() -> Fakes:
    """Return the fake mode of all jobs of this process: what a recipe caches is of one kind then."""
    return Fakes()


def batches_of(job: Job, recipe: Recipe, rank: int, fakes: Fakes | None) -> Callable[[int], Any]:
    """Return a function of the step's number: the batch that ``rank`` gets there."""

    def batch(number: int) -> Any:
        with fakes.left() if fakes else contextlib.nullcontext():
            made = recipe.batches(rank, job.world_size, number)
        return fakes.of(made) if fakes else made

    return batch


def _mesh(job: Job) -> Any:
    # Made outside of the fake mode: torch reads a mesh's ranks from memory (torch 2.13: a data-dependent error).
    from torch.distributed.device_mesh import init_device_mesh

    if job.whole_mesh is not None:
        return init_device_mesh("cpu", tuple(job.whole_mesh.values()), mesh_dim_names=tuple(job.whole_mesh))
    names = ("replicate", "shard")[-len(job.mesh) :]
    mesh: Any = init_device_mesh("cpu", job.mesh, mesh_dim_names=names)
    if len(names) == 2:
        flattened(mesh)  # see above
    return mesh


def _heaviest_rank(trained: Trained, rank: int) -> int:
    """Return the rank that trains most; where nothing is frozen, engines that cut parameters give rank 0 most."""
    nbytes: Counter[int] = Counter()
    backend, optimizer = trained.model.backend, trained.optimizer.inner
    trainable = [entry for entry in backend.entries.values() if entry.parameter.requires_grad]
    if isinstance(optimizer, PartitionedOptimizer):  # whole parameters
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            owner = optimizer.owner_of(parameter)
            if owner is not None:
                nbytes[owner] += parameter.numel() * parameter.element_size()
    elif (owners := whole_owners(optimizer)) is not None:
        for entry in (entry for entry in trainable if entry.name in owners.owner):
            nbytes[owners.owner[entry.name]] += entry.stored_shape.numel() * entry.parameter.dtype.itemsize
    elif backend.facts.divides == "elements" and len(trainable) < len(backend.entries):
        ranks = range(divided_among(backend))  # a frozen layer can fill the whole shard of a rank of FSDP1
        for entry in trainable:
            first = bisect_left(ranks, True, key=lambda rank: entry.part(rank)[1] > 0)
            for owner in ranks[first:]:
                start, stop = entry.part(owner)
                if start == stop:
                    break
                nbytes[owner] += (stop - start) * entry.parameter.dtype.itemsize
    return min(nbytes, key=lambda owner: (-nbytes[owner], owner), default=rank)


def under_backend(
    recipe: Recipe, module: nn.Module, settings: Mapping[str, Any], *, fake: bool, average: bool = False
) -> Trained:
    """Wrap ``module``, and build its optimizer and the average of its weights. Collective."""
    given = {"mixed_precision": recipe.precision, "activation_checkpointing": recipe.activation_checkpointing}
    model = wrap(module, **{**given, **recipe.settings, **settings})
    groups = None if recipe.param_groups is None else recipe.param_groups(list(model.backend.entries))
    optimizer = build_optimizer(model, recipe.optimizer, groups, **recipe.hyper)
    # A loss scale adds a few numbers, and reads from memory whether a step is taken: left out.
    controller_of(model).scaled = True
    if fake:
        controller_of(model).simulate()
    return Trained(recipe, model, optimizer, EMA(model) if average else None)


def _make_state(trained: Trained, tracker: Tracker) -> None:
    """Let the optimizer make its state, by a step on gradients of zeros. Collective."""
    backend, inner = trained.model.backend, trained.optimizer.inner
    trainable = [entry for entry in backend.entries.values() if entry.parameter.requires_grad and owned(backend, entry)]
    entries = [entry for entry in trainable if entry.parameter.numel()]  # FSDP1 gives an empty part no gradient
    for entry in entries:
        entry.parameter.grad = torch.zeros_like(entry.parameter, requires_grad=False)
    inner.step()
    for entry in entries:
        entry.parameter.grad = None
    tracker.mark([list(state.values()) for state in trained.optimizer.state.values()], "optimizer state")
    trained.update_average(tracker)
    controller_of(trained.model).buffers.differ = True  # so that the forward sends them


def _run_steps(
    trained: Trained,
    tracker: Tracker,
    batch: Callable[[int], Any],
    rank: int,
    steps: int = STEPS,
    offloaded: bool = False,
) -> Measured:
    """Train ``steps`` steps within ``tracker``, on what ``batch`` returns for their numbers. Collective."""
    recipe, model, optimizer = trained.recipe, trained.model, trained.optimizer
    tracker.watch(model.module)
    seen: list[Usage] = []
    for step in range(steps):
        batches = [batch(step * recipe.accumulate + number) for number in range(recipe.accumulate)]
        tracker.mark(batches, "inputs")
        tracker.reset()
        _one_step(trained, batches)
        trained.update_average(tracker)
        seen.append(tracker.usage(offloaded=offloaded))
    highest = max(reversed(seen), key=lambda usage: usage.peak)
    backend, work = model.backend, seen[-1].work
    blocks = len(model.plan.recomputed) + len(model.plan.offloaded)
    work = replace(work, operators=work.operators + RECOMPUTATION * blocks * recipe.accumulate)
    copied = backend.facts.divides == "owners" or (
        model.plan.precision.reduce_dtype is not None and backend.facts.divides != "elements"
    )
    kinds = ("reduce", "all_reduce") if copied else ("all_to_all",) if whole_owners(optimizer) is not None else ()
    reduced = (c.nbytes for c in tracker.collectives if c.kind in kinds)
    group = optimizer.param_groups[0]
    chosen = ", ".join(f"{key}={group[key]}" for key in ("foreach", "fused", "capturable") if group.get(key))
    return Measured(
        rank=rank,
        usage=replace(highest, traffic=seen[-1].traffic, work=work),
        state_ratio=_state_ratio(trained),
        in_flight=tuple(sorted(reduced, reverse=True)),
        plan=model.plan,
        comm_groups=backend.groups,
        optimizer=f"{recipe.optimizer.__name__}({chosen})",
    )


def _one_step(trained: Trained, batches: list[Any]) -> None:
    recipe, model = trained.recipe, trained.model
    for number, parts in enumerate(batches):
        silent = recipe.no_sync and number + 1 < len(batches)
        with model.no_sync() if silent else contextlib.nullcontext():
            with model.autocast():
                loss = check_loss(recipe.loss(model, parts)) / len(batches)
            loss.backward()
        del loss
    if recipe.clipping is not None:
        model.clip_grad_norm_(*recipe.clipping)
    trained.optimizer.step()
    model.zero_grad()


def _state_ratio(trained: Trained) -> float:
    locals_: list[Any] = [getattr(p, LOCAL_TENSOR, p) for p in trained.optimizer.state]
    kept = [trained.optimizer.state, *([] if trained.average is None else [trained.average.held.state])]
    values = [value for states in kept for state in states.values() for value in state.values()]
    held = sum(local.nbytes for local in locals_)
    state = sum(value.nbytes for value in values if isinstance(value, Tensor) and value.dim())
    return state / held if held else 0.0


def measure(job: Job, steps: int = STEPS + 1) -> Measured:
    """Run the same step on real tensors, on this rank of a running job of ``job.ranks`` ranks. Collective."""
    recipe, rank = job.recipe(), dist.get_rank()
    mesh = None if job.whole_mesh is None else _mesh(job)
    rank = rank if mesh is None else data_rank(mesh).rank
    seed_all(recipe.seed)
    tracker = Tracker(granularity=GRANULARITY.get(job.device, 1), device=job.device)
    made = batches_of(job, recipe, rank, None)

    def batch(number: int) -> Any:
        return map_leaves(lambda leaf: leaf.to(job.device) if isinstance(leaf, Tensor) else leaf, made(number))

    gc.collect()
    with tracker:
        module, settings = recipe.build(), dict[str, Any]()
        if mesh is not None:
            recipe, module, settings = _divided(job, recipe, module, mesh)
        given = {"backend": job.backend, **settings}
        trained = under_backend(recipe, module, given, fake=False, average=job.average)
        return _run_steps(trained, tracker, batch, rank, steps)
