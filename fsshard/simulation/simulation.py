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
from torch import nn

from fsshard.backends.cost import divided_among
from fsshard.backends.whole import owned, whole_owners
from fsshard.complex_params.tensorfy import has_dtensors
from fsshard.errors import ConfigurationError
from fsshard.model.host_copies import offloading_to
from fsshard.nested import map_tensors, tensors
from fsshard.oss.partitioned import PartitionedOptimizer
from fsshard.parallel.data_rank import data_rank
from fsshard.parallel.meshes import role_of
from fsshard.planning.plan import Plan
from fsshard.recipes.recipe import Arguments, Recipe, Sizes, check_loss, resolve, seed_all, split_by
from fsshard.sharded.averages import EMA
from fsshard.sharded.controller import controller_of
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer, build_optimizer
from fsshard.simulation.fakes import Fakes, GlooBuffers, UsedParameters, fake_ranks
from fsshard.simulation.tracking import GRANULARITY, Tracker, Usage
from fsshard.simulation.work import RECOMPUTATION
from fsshard.state_objects import tensors_in
from fsshard.torch_private.c10d import flattened
from fsshard.torch_private.patching import replaced
from fsshard.torch_private.tensors import LOCAL_TENSOR
from fsshard.wrapping import wrap

# Arguments of wrap() by name.
Settings = dict[str, Any]

# The optimizer makes its state in the first one; one step is enough after _make_state().
STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Job:
    """One simulation, as it is sent to the process that runs it."""

    source: Any  # what fsshard.recipes.recipe.resolve() makes a recipe of
    changes: Arguments  # fields of the recipe to replace
    backend: str
    mesh: tuple[int, ...]  # shape of the ranks of data: (ranks,), or (replicas, shards)
    # Sizes by name of the mesh that recipe.split divides the model over; None: it is not divided.
    whole_mesh: Sizes | None = None
    settings: Arguments = field(default_factory=dict)  # further arguments of wrap()
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
        if self.whole_mesh is None:
            return self.world_size
        return math.prod(self.whole_mesh.values())

    def recipe(self) -> Recipe:
        """Return the recipe with its changes, and with the optimizer as it would be on the device."""
        recipe = resolve(self.source)
        settings = {**recipe.settings, **self.settings}
        recipe = replace(recipe, **self.changes, settings=settings)
        compiled = settings.get("compile")
        if compiled:
            raise ConfigurationError(
                f"compile={compiled!r}: what compiled code allocates cannot be estimated; leave it out to estimate "
                "the same training without compilation"
            )
        if self.device != "cuda":
            return recipe
        choice = settings.get("activation_checkpointing", recipe.activation_checkpointing)
        if self.real and getattr(choice, "offload_to_cpu", False):
            raise ConfigurationError(
                "Checkpointing(offload_to_cpu=True) with real=True: real tensors are in host memory already; leave out "
                "real=True"
            )
        parameters = inspect.signature(recipe.optimizer.__init__).parameters
        if "foreach" not in parameters or {"foreach", "fused", "capturable"} & set(recipe.hyper):
            return recipe
        # torch's default on a GPU, which on the CPU device that stands for it would be False (torch 2.13).
        return replace(recipe, hyper={**recipe.hyper, "foreach": True})


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
    samples: int  # of this rank in a step


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
            _mark_state(self.average.held.state, tracker)


def _mark_state(states: Mapping[Any, Arguments], tracker: Tracker) -> None:
    tracker.mark(list(tensors_in(list(states.values()))), "optimizer state")


def simulate(job: Job) -> Measured:
    """Simulate the training step of the rank that needs the most memory."""
    recipe = job.recipe()
    measured = _simulate_rank(job, recipe, 0)
    if not isinstance(measured, Measured):
        measured = _simulate_rank(job, recipe, measured)
    assert isinstance(measured, Measured)
    return measured


def _simulate_rank(job: Job, recipe: Recipe, rank: int) -> int | Measured:
    """Return rank ``rank``'s step if no other one trains more, else which rank does."""
    gc.collect()
    with contextlib.ExitStack() as stack:
        stack.enter_context(fake_ranks(rank, job.ranks, "fake" if job.device == "cuda" else "gloo"))
        mesh = _mesh(job)
        seed_all(recipe.seed)
        fakes = None if job.real else shared_fakes()
        tracker = Tracker(granularity=GRANULARITY.get(job.device, 1))
        if fakes is not None:
            stack.enter_context(fakes)
            # The CPU stands for the GPU: what goes to the host goes where nothing is counted, and no number is kept.
            if job.device == "cuda":
                stack.enter_context(offloading_to("meta"))
        module = recipe.build() if fakes is None else fakes.built(recipe.build)
        stack.enter_context(tracker)
        with _slicing(fakes):
            recipe, module, settings = _divided(job, recipe, module, mesh)
        # DTensor asks once for shapes, on tensors.
        asks_once = has_dtensors(module.modules())
        with contextlib.nullcontext() if fakes is None else fakes.wrapping(module):
            arguments = {"backend": job.backend, **settings}
            trained = under_backend(recipe, module, arguments, fake=True, average=job.average)
        place = rank if job.whole_mesh is None else data_rank(mesh).rank
        heaviest = _heaviest_rank(trained, place)
        if heaviest != place:
            return _first_rank_of(job, heaviest)
        batch = batches_of(job, recipe, place, fakes)
        if job.device != "cuda":
            stack.enter_context(GlooBuffers())  # type: ignore[no-untyped-call]
        partly = bool(recipe.settings.get("find_unused_parameters"))
        if fakes is not None and partly:
            stack.enter_context(UsedParameters())
        steps = STEPS
        # Else only a step shows which parameters have states, or a second one what all that follow need.
        if fakes is not None and not partly and not asks_once:
            _make_state(trained, tracker)
            steps = 1
        return _run_steps(trained, tracker, batch, rank, steps, job.cpu_offload)


def _first_rank_of(job: Job, place: int) -> int:
    """Return the first of the ranks that see the samples of this number."""
    sizes = job.whole_mesh or {"data": job.world_size}
    ranks = np.arange(job.ranks).reshape(tuple(sizes.values()))
    index = tuple(0 if role_of(name) == "model" else slice(None) for name in sizes)
    return int(ranks[index].flat[place])


def _divided(
    job: Job,
    recipe: Recipe,
    module: Any,
    mesh: Any,
) -> tuple[Recipe, Any, Settings]:
    """Return the recipe with this rank's loss, this rank's part of the model, and what wrap is told of it."""
    if job.whole_mesh is None:
        return recipe, module, {"device_mesh": mesh}
    split = split_by(recipe, module, mesh)
    if split.model is not None:
        module = split.model
    if split.loss is not None:
        recipe = replace(recipe, loss=split.loss)
    data = split.settings.get("device_mesh")
    if getattr(data, "ndim", 1) == 2:
        # wrap() asks for the flattened mesh, and finds it made.
        flattened(data)
    return recipe, module, dict(split.settings)


def _slicing(fakes: Fakes | None) -> AbstractContextManager[Any]:
    """Let meshes be sliced: torch reads their ranks from memory, and without numbers this rank is in no slice."""
    from torch.distributed.device_mesh import DeviceMesh

    slice_of = DeviceMesh.__getitem__

    def sliced(mesh: Any, names: Any) -> Any:
        with contextlib.nullcontext() if fakes is None else fakes.left():
            return slice_of(mesh, names)

    return replaced(DeviceMesh, "__getitem__", sliced)


@functools.cache
def shared_fakes() -> Fakes:
    """Return the fake mode of all jobs of this process: what a recipe caches is of one kind then."""
    return Fakes()


def batches_of(job: Job, recipe: Recipe, rank: int, fakes: Fakes | None) -> Callable[[int], Any]:
    """Return a function of the step's number: the batch that ``rank`` gets there."""

    def batch(number: int) -> Any:
        if fakes is None:
            return recipe.batches(rank, job.world_size, number)
        with fakes.left():
            real = recipe.batches(rank, job.world_size, number)
        return fakes.of(real)

    return batch


def _mesh(job: Job) -> Any:
    # Made outside of the fake mode: torch reads a mesh's ranks from memory (torch 2.13: a data-dependent error).
    from torch.distributed.device_mesh import init_device_mesh

    if job.whole_mesh is not None:
        return init_device_mesh("cpu", tuple(job.whole_mesh.values()), mesh_dim_names=tuple(job.whole_mesh))
    names = ("replicate", "shard")[-len(job.mesh) :]
    mesh = init_device_mesh("cpu", job.mesh, mesh_dim_names=names)
    if len(names) == 2:
        # What is flattened is made outside of the fake mode, too.
        flattened(mesh)
    return mesh


def _heaviest_rank(trained: Trained, rank: int) -> int:
    """Return the rank that trains most; where nothing is frozen, engines that cut parameters give rank 0 most."""
    nbytes: Counter[int] = Counter()
    backend = trained.model.backend
    optimizer = trained.optimizer.inner
    trainable = [entry for entry in backend.entries.values() if entry.parameter.requires_grad]
    owners = whole_owners(optimizer)
    # Ranks own whole parameters.
    if isinstance(optimizer, PartitionedOptimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                owner = optimizer.owner_of(parameter)
                if owner is not None:
                    nbytes[owner] += parameter.numel() * parameter.element_size()
    elif owners is not None:
        for entry in trainable:
            if entry.name in owners.owner:
                owner = owners.owner[entry.name]
                nbytes[owner] += entry.stored_shape.numel() * entry.parameter.dtype.itemsize
    elif backend.facts.divides == "elements" and len(trainable) < len(backend.entries):
        # A frozen layer can fill the whole shard of a rank of FSDP1.
        ranks = range(divided_among(backend))
        for entry in trainable:
            first = bisect_left(ranks, True, key=lambda rank: entry.part(rank)[1] > 0)
            for owner in ranks[first:]:
                start, stop = entry.part(owner)
                if start == stop:
                    break
                nbytes[owner] += (stop - start) * entry.parameter.dtype.itemsize
    return min(nbytes, key=lambda owner: (-nbytes[owner], owner), default=rank)


def under_backend(
    recipe: Recipe,
    module: nn.Module,
    settings: Arguments,
    *,
    fake: bool,
    average: bool = False,
) -> Trained:
    """Wrap ``module``, and build its optimizer and the average of its weights. Collective."""
    arguments = {
        "mixed_precision": recipe.precision,
        "activation_checkpointing": recipe.activation_checkpointing,
        **recipe.settings,
        **settings,
    }
    model = wrap(module, **arguments)
    groups = None
    if recipe.param_groups is not None:
        groups = recipe.param_groups(list(model.backend.entries))
    optimizer = build_optimizer(model, recipe.optimizer, groups, **recipe.hyper)
    # A loss scale adds a few numbers, and reads from memory whether a step is taken: left out.
    controller_of(model).scaled = True
    if fake:
        controller_of(model).simulate()
    return Trained(recipe, model, optimizer, EMA(model) if average else None)


def _make_state(trained: Trained, tracker: Tracker) -> None:
    """Let the optimizer make its state, by a step on gradients of zeros. Collective."""
    backend = trained.model.backend
    parameters = []
    for entry in backend.entries.values():
        parameter = entry.parameter
        # FSDP1 gives an empty part no gradient.
        if parameter.requires_grad and owned(backend, entry) and parameter.numel():
            parameters.append(parameter)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter, requires_grad=False)
    trained.optimizer.inner.step()
    for parameter in parameters:
        parameter.grad = None
    _mark_state(trained.optimizer.state, tracker)
    trained.update_average(tracker)
    # The forward sends the buffers then.
    controller_of(trained.model).buffers.differ = True


def _run_steps(
    trained: Trained,
    tracker: Tracker,
    batch: Callable[[int], Any],
    rank: int,
    steps: int,
    offloaded: bool = False,
) -> Measured:
    """Train ``steps`` steps within ``tracker``, on what ``batch`` returns for their numbers. Collective."""
    recipe = trained.recipe
    plan = trained.model.plan
    tracker.watch(trained.model.module)
    usages = []
    samples = 0
    for step in range(steps):
        first = step * recipe.accumulate
        batches = [batch(first + number) for number in range(recipe.accumulate)]
        samples = sum(map(_samples, batches))
        tracker.mark(batches, "inputs")
        tracker.reset()
        _one_step(trained, batches)
        trained.update_average(tracker)
        usages.append(tracker.usage(offloaded=offloaded))
    last = usages[-1]
    highest = max(reversed(usages), key=lambda usage: usage.peak)
    blocks = len(plan.recomputed) + len(plan.offloaded)
    operators = last.work.operators + RECOMPUTATION * blocks * recipe.accumulate
    work = replace(last.work, operators=operators)
    group = trained.optimizer.param_groups[0]
    settings = [f"{key}={group[key]}" for key in ("foreach", "fused", "capturable") if group.get(key)]
    return Measured(
        rank=rank,
        usage=replace(highest, collectives=last.collectives, work=work),
        state_ratio=_state_ratio(trained),
        in_flight=_in_flight(trained, tracker),
        plan=plan,
        comm_groups=trained.model.backend.groups,
        optimizer=f"{recipe.optimizer.__name__}({', '.join(settings)})",
        samples=samples,
    )


def _samples(batch: Any) -> int:
    """Return the length of the first dimension of a batch's first tensor; 1 if no tensor has a dimension."""
    for tensor in tensors(batch):
        if tensor.dim():
            return tensor.shape[0]
    return 1


def _in_flight(trained: Trained, tracker: Tracker) -> tuple[int, ...]:
    """Return the payloads of the last step's reductions, as :class:`Measured` has them."""
    divides = trained.model.backend.facts.divides
    narrowed = trained.model.plan.precision.reduce_dtype is not None
    kinds: tuple[str, ...] = ()
    if divides == "owners" or (narrowed and divides != "elements"):
        kinds = ("reduce", "all_reduce")
    elif whole_owners(trained.optimizer) is not None:
        kinds = ("all_to_all",)
    payloads = [collective.nbytes for collective in tracker.collectives if collective.kind in kinds]
    return tuple(sorted(payloads, reverse=True))


def _one_step(trained: Trained, batches: list[Any]) -> None:
    recipe = trained.recipe
    model = trained.model
    for number, batch in enumerate(batches):
        silent = recipe.no_sync and number + 1 < len(batches)
        with model.no_sync() if silent else contextlib.nullcontext():
            with model.autocast():
                loss = check_loss(recipe.loss(model, batch)) / len(batches)
            loss.backward()
        del loss
    if recipe.clipping is not None:
        model.clip_grad_norm_(*recipe.clipping)
    trained.optimizer.step()
    model.zero_grad()


def _state_ratio(trained: Trained) -> float:
    parameters = 0
    for parameter in trained.optimizer.state:
        parameters += getattr(parameter, LOCAL_TENSOR, parameter).nbytes
    states = list(trained.optimizer.state.values())
    if trained.average is not None:
        states += trained.average.held.state.values()
    nbytes = 0
    for state in states:
        for tensor in tensors_in(state):
            if tensor.dim():
                nbytes += tensor.nbytes
    return nbytes / parameters if parameters else 0.0


def measure(job: Job, steps: int = STEPS + 1) -> Measured:
    """Run the same step on real tensors, on this rank of a running job of ``job.ranks`` ranks. Collective."""
    recipe = job.recipe()
    rank = dist.get_rank()
    mesh = None
    if job.whole_mesh is not None:
        mesh = _mesh(job)
        rank = data_rank(mesh).rank
    seed_all(recipe.seed)
    tracker = Tracker(granularity=GRANULARITY.get(job.device, 1), device=job.device)
    batch_on_cpu = batches_of(job, recipe, rank, None)

    def batch(number: int) -> Any:
        return map_tensors(lambda tensor: tensor.to(job.device), batch_on_cpu(number))

    gc.collect()
    with tracker:
        module = recipe.build()
        arguments = {"backend": job.backend}
        if mesh is not None:
            recipe, module, settings = _divided(job, recipe, module, mesh)
            arguments |= settings
        trained = under_backend(recipe, module, arguments, fake=False, average=job.average)
        return _run_steps(trained, tracker, batch, rank, steps)
