"""estimate(): memory and traffic of a training step, before it is launched."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsshard.backends import backend_class
from fsshard.backends.base import no_offload
from fsshard.backends.registry import wrapper_classes
from fsshard.complex_params.slots import ModuleTable
from fsshard.complex_params.tensorfy import dtensor_parameters
from fsshard.errors import ConfigurationError, RecipeError
from fsshard.model.checks import check_not_wrapped
from fsshard.model.outputs import grad_tensors
from fsshard.nested import map_tensors
from fsshard.parallel.meshes import role_of
from fsshard.planning.bounds import Bounds, Circumstances, bounds_of
from fsshard.planning.plan import Plan
from fsshard.planning.text import is_count
from fsshard.planning.torch_settings import KEEP_GATHERED
from fsshard.recipes.recipe import Recipe, Sizes, check_mesh, check_steps_alone, resolve, splits
from fsshard.sharded.optimizer import constructor_arguments
from fsshard.simulation.collectives import Traffic
from fsshard.simulation.machine import Machine, check_device, machine_of
from fsshard.simulation.result import Estimate
from fsshard.simulation.simulation import Job, Measured, Settings
from fsshard.simulation.work import Work
from fsshard.simulation.worker import packed, simulate_all
from fsshard.torch_private.modules import is_compiled

Several = list[Any] | tuple[Any, ...]


@overload
def estimate(subject: Any, *, backend: str = ..., world_size: int = ..., **arguments: Any) -> Estimate: ...
@overload
def estimate(
    subject: Any, *, backend: Several, world_size: int | Several = ..., **arguments: Any
) -> list[Estimate]: ...
@overload
def estimate(
    subject: Any, *, backend: str | Several = ..., world_size: Several, **arguments: Any
) -> list[Estimate]: ...
def estimate(
    subject: Any,
    *,
    backend: str | Several = "auto",
    world_size: int | Several = 1,
    batch: Any = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer: Any = None,
    auto_wrap_policy: object = ...,
    mixed_precision: object = ...,
    activation_checkpointing: object = ...,
    accumulation: int | None = None,
    cpu_offload: bool = False,
    average: bool = False,
    device_mesh: Any = None,
    mesh: Sizes | None = None,
    device: str = "cpu",
    machine: Any = None,
    real: bool = False,
    progress: Callable[[int, int], None] | None = None,
    **settings: Any,
) -> Estimate | list[Estimate]:
    """Memory, traffic and time of a training step of one rank in a job of ``world_size`` ranks.

    The real engines run two steps on tensors without memory, in a process of its own: no GPU, no process group and no
    memory for the model are needed, and nothing changes in this process.

    Args:
        subject: a bare module (give ``batch`` too); a recipe as for ``fsshard.parity.compare``, or its name
            ``"module:attribute"``; or a :class:`~fsshard.planning.plan.Plan`, without forward and activations.
        backend: a backend's name; several, or several world sizes, give a list.
        world_size: ranks of the job.
        batch: of a module: one rank's arguments of its forward, as a tensor, a tuple, or a dict of keywords.
        loss: ``(model, batch) -> scalar``; by default the output's ``loss``, or the mean square of what it holds.
        optimizer: a class, a ``functools.partial`` of one, or an optimizer, whose class and settings are taken.
        auto_wrap_policy: as for :func:`fsshard.wrap`.
        mixed_precision: as for :func:`fsshard.wrap`.
        activation_checkpointing: as for :func:`fsshard.wrap`.
        accumulation: backward passes per step.
        cpu_offload: count what stays on the device while shards are in host memory (``fsdp``, ``fsdp2``).
        average: keep a :class:`fsshard.EMA` of the model, updated at each step; it counts as optimizer state.
        device_mesh: its shape, (ranks,) or (replicas, shards), or a ``DeviceMesh`` whose shape is taken. A job may have
            other dimensions: the mesh has to divide the world size.
        mesh: sizes by name, ``{"data": 4, "tp": 2}``, of a mesh over which the recipe's ``split`` divides the model: a
            rank's parts are counted, and what is sent along all dimensions. It says how many ranks there are.
        device: ``"cpu"`` or ``"cuda"``: for which device; there optimizers are ``foreach`` by default, and memory comes
            in pieces of 512 bytes.
        machine: whose constants the time is predicted by: a name (``"a100"``, ``"h100"``, ``"h200"``, ``"cpu"``), the
            file that ``fsshard doctor --measure`` has written, or a :class:`~fsshard.simulation.machine.Machine`.
            None: ``"h100"`` for CUDA, else ``"cpu"``. The time is a sum of five terms, as if nothing overlapped.
        real: run the step on real tensors, as one rank: for a step that depends on the values of tensors.
        progress: called with how many simulations are done, and how many there are.
        **settings: of :func:`fsshard.wrap`: ``sharding_strategy``, ``find_unused_parameters``, a backend's options.

    Returns:
        An :class:`~fsshard.simulation.result.Estimate`, or a list of them, all world sizes of the first backend first.

    Raises:
        ConfigurationError: an argument has no meaning.
        ModelError: the step depends on the values of tensors, or fails.
        RecipeError: ``subject`` is not a recipe.
    """
    source = recipe_source(subject, batch, loss, real)
    constants = machine_of(machine, device)
    changes = {}
    if mixed_precision is not ...:
        changes["precision"] = mixed_precision
    if activation_checkpointing is not ...:
        changes["activation_checkpointing"] = activation_checkpointing
    changes.update(optimizer_settings(optimizer))
    if accumulation is not None:
        changes["accumulate"] = accumulation
    if auto_wrap_policy is not ...:
        settings["auto_wrap_policy"] = auto_wrap_policy
    fields = {
        "source": source,
        "changes": changes,
        "device": device,
        "cpu_offload": cpu_offload,
        "real": real,
        "settings": settings,
        "average": average,
    }
    if mesh is not None:
        sizes = whole_mesh(mesh, source, world_size, device_mesh)
        # The mesh says how many ranks there are, and which of them share the work.
        fields["whole_mesh"] = sizes
        world_size = math.prod(sizes.values())
        device_mesh = data_shape(sizes)
    backends = list(backend) if isinstance(backend, (list, tuple)) else [backend]
    world_sizes = list(world_size) if isinstance(world_size, (list, tuple)) else [world_size]
    if not backends or not world_sizes:
        raise ConfigurationError(f"backend={backend!r}, world_size={world_size!r}: expected one of each, or several")
    jobs = []
    for name in backends:
        jobs += [job_of(name, size, device_mesh, **fields) for size in world_sizes]
    estimates = []
    sizes_of_jobs = world_sizes * len(backends)
    for size, job, measured in zip(sizes_of_jobs, jobs, simulate_all(jobs, progress), strict=True):
        estimates.append(estimate_of(size, job, measured, constants))
    several = isinstance(backend, (list, tuple)) or isinstance(world_size, (list, tuple))
    return estimates if several else estimates[0]


def recipe_source(subject: Any, batch: Any, loss: Any, real: bool) -> Any:
    """Return what the simulating process makes a recipe of."""
    if not isinstance(subject, nn.Module):
        source = _planned_recipe(subject) if isinstance(subject, Plan) else subject
        resolve(source)
        if batch is not None or loss is not None:
            raise ConfigurationError("batch=, loss=: a plan has no forward, and a recipe has its own; leave them out")
        return source
    _check_module(subject)
    if batch is None:
        raise ConfigurationError(
            "batch: expected one rank's batch for the module's forward (a tensor, tuple or dict of keywords), got None"
        )
    return Recipe(
        build=packed(subject, real=real),
        batches=functools.partial(_same_batch, map_tensors(_on_host, batch)),
        loss=loss or default_loss,
        name=type(subject).__name__,
    )


def _check_module(model: nn.Module) -> None:
    """Raise for a module that is wrapped or compiled, or that a mesh of this job divides."""
    table = ModuleTable(model)
    # An engine would be simulated within an engine.
    check_not_wrapped(table.modules, wrapper_classes())
    if any(map(is_compiled, table.modules.values())):
        raise ConfigurationError("what compiled code allocates is not known; pass it as it was before torch.compile")
    names = [name for name, *_ in dtensor_parameters(table.modules)]
    if names:
        raise ConfigurationError(
            f"{names[0]!r} and {len(names) - 1} other parameters are DTensors; pass a recipe whose split(model, mesh) "
            'makes them, and mesh={"data": ..., "tp": ...}; or estimate(fsshard.plan(model), ...), without activations'
        )


def _on_host(tensor: Tensor) -> Tensor:
    # The process that simulates has no GPU; of a tensor without numbers the shape is all that is needed.
    return torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor.detach().to("cpu")


def _same_batch(batch: Any, rank: int, world_size: int, number: int) -> Any:
    return batch


def default_loss(model: Any, batch: Any) -> Tensor:
    """Return the output's own loss, as transformers' models give it with labels, or the mean square of it."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, tuple):
        output = model(*batch)
    else:
        output = model(batch)
    own = getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    parts = []
    for tensor in grad_tensors(output):
        real = tensor.abs() if tensor.is_complex() else tensor
        parts.append(real.square().mean())
    if not parts:
        raise ConfigurationError("the model's output takes no gradient; pass loss=, (model, batch) -> scalar")
    return functools.reduce(torch.add, parts)


def optimizer_settings(optimizer: Any) -> Settings:
    """Return what ``optimizer=`` changes in a recipe."""
    if optimizer is None:
        return {}
    kind = optimizer
    hyper = {}
    if isinstance(optimizer, Optimizer):
        kind = type(optimizer)
        hyper = constructor_arguments(optimizer)
    elif isinstance(optimizer, functools.partial) and not optimizer.args:
        kind = optimizer.func
        hyper = dict(optimizer.keywords)
    if isinstance(kind, type) and issubclass(kind, Optimizer):
        check_steps_alone(kind)
        return {"optimizer": kind, "hyper": hyper}
    raise ConfigurationError(f"optimizer={optimizer!r}: expected an optimizer, a class, or a functools.partial of one")


def _planned_recipe(plan: Plan) -> Any:
    """Return a training that uses each of the plan's parameters once, in the plan's units, without activations."""
    return Recipe(
        build=functools.partial(_built, plan),
        batches=functools.partial(_same_batch, torch.ones(1)),
        loss=_sum,
        precision=plan.precision,
        settings={"auto_wrap_policy": {PlannedUnit} if len(plan.units) > 1 else None},
        name=f"plan of {len(plan.parameters)} parameters",
    )


class PlannedModule(nn.Module):
    """Stands for any module of the plan."""

    def forward(self, x: Tensor) -> Tensor:
        for name, parameter in list(self.named_parameters(recurse=False)):
            # An engine may show another tensor by that name than the parameter that it trains.
            tensor = getattr(self, name)
            if parameter.requires_grad and tensor.numel():
                x = _use(x, tensor)
        for child in self.children():
            x = child(x)
        return x


class PlannedUnit(PlannedModule):
    """Stands for a unit below the root."""


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
    modules = {"": PlannedModule()}
    units = set(plan.unit_names)

    def module_at(path: str) -> nn.Module:
        if path not in modules:
            above, _, own = path.rpartition(".")
            modules[path] = PlannedUnit() if path in units else PlannedModule()
            module_at(above).add_module(own, modules[path])
        return modules[path]

    for unit in plan.units:
        module_at(unit.name)
    for name, info in plan.parameters.items():
        path, _, own = name.rpartition(".")
        value = torch.empty(info.shape, dtype=info.dtype)
        module_at(path).register_parameter(own, nn.Parameter(value, info.requires_grad))
    return modules[""]


def _sum(model: Any, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).sum()
    return loss


def job_of(backend: Any, world_size: Any, device_mesh: Any, **more: Any) -> Job:
    """Return one simulation, checked, under a backend and on a mesh; ``more`` are the other fields of a job."""
    if not is_count(world_size):
        raise ConfigurationError(f"world_size={world_size!r}: expected a positive whole number of ranks, or several")
    check_device(more["device"])
    for name in ("cpu_offload", "average"):
        if not isinstance(more.get(name, False), bool):
            raise ConfigurationError(f"{name}={more[name]!r}: expected True or False")
    mesh = mesh_shape(device_mesh, world_size)
    cls = backend_class(backend, math.prod(mesh))
    if more["cpu_offload"] and cls.facts.divides != "elements":
        raise no_offload(cls.name)
    return Job(backend=cls.name, mesh=mesh, **more)


def mesh_shape(device_mesh: Any, world_size: int) -> tuple[int, ...]:
    """Return the shape of the mesh of ranks that share the work."""
    if device_mesh is None:
        return (world_size,)
    shape = getattr(device_mesh, "shape", device_mesh)
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if not 1 <= len(shape) <= 2 or not all(isinstance(n, int) and n > 0 for n in shape):
        raise ConfigurationError(
            f"device_mesh={device_mesh!r}: expected a mesh of data-parallel ranks, or its shape, (ranks,) or "
            "(replicas, shards)"
        )
    size = math.prod(shape)
    if world_size % size:
        raise ConfigurationError(
            f"device_mesh={shape!r} has {size} ranks, which does not divide world_size={world_size}; give a multiple"
        )
    return shape


def whole_mesh(mesh: Any, source: Any, world_size: Any, device_mesh: Any) -> dict[str, int]:
    """Return a mesh's sizes by name; raise if the recipe cannot be divided over it, or other arguments contradict."""
    sizes = check_mesh(mesh)
    ranks = math.prod(sizes.values())
    if device_mesh is not None:
        raise ConfigurationError("mesh= and device_mesh=: mesh also defines how data is divided; leave device_mesh out")
    if world_size not in (1, ranks):
        raise ConfigurationError(f"world_size={world_size!r}: mesh={sizes} has {ranks} ranks; leave world_size out")
    if splits(sizes) and resolve(source).split is None:
        raise RecipeError(
            f"mesh={sizes}: the recipe does not say how its model is divided over {', '.join(splits(sizes))}; give it "
            "a function split(model, mesh), as for fsshard.parity.compare (a module or a plan has none)"
        )
    return sizes


def data_shape(sizes: Sizes) -> tuple[int, ...]:
    """Return the shape of the ranks of data in a mesh: (ranks,), or (replicas, shards)."""
    data = {role_of(name): size for name, size in sizes.items() if role_of(name) != "model"}
    if list(data) == ["replicas", "shards"]:
        return tuple(data.values())
    return (math.prod(data.values()),)


def estimate_of(world_size: int, job: Job, measured: Measured, machine: Machine) -> Estimate:
    """Return what was measured in a simulation, with its bounds, and its time by the machine's constants."""
    backend = backend_class(job.backend, job.world_size)
    recipe = job.recipe()
    plan = measured.plan
    usage = measured.usage
    work = usage.work
    if job.cpu_offload:
        # A pass copies this rank's shard to the device.
        shard = -(-plan.nbytes // job.mesh[-1])
        work = replace(work, shards=shard * recipe.accumulate)
    circumstances = _circumstances(job, recipe, measured)
    bounds = _as_sent(bounds_of(plan, backend.facts.divides, circumstances), usage.collectives)
    late = sum(measured.in_flight[:THREADS]) if job.world_size > 1 else 0
    return Estimate(
        **vars(replace(usage, work=work)),
        name=recipe.name,
        backend=job.backend,
        world_size=world_size,
        mesh=job.mesh if job.whole_mesh is None else tuple(job.whole_mesh.values()),
        device=job.device,
        rank=measured.rank,
        optimizer=measured.optimizer,
        parameters=plan.nbytes,
        units=len(plan.units),
        interval=(usage.peak, usage.peak + late),
        machine=machine.name,
        terms=machine.terms(work, usage.collectives),
        samples=measured.samples * job.world_size,
        best_seconds=machine.best_seconds({dtype: PASSES * count for dtype, count in work.forward.items()}),
        bounds=bounds,
        notes=tuple(_notes(job, recipe, late, work)),
    )


def _circumstances(job: Job, recipe: Recipe, measured: Measured) -> Circumstances:
    settings = recipe.settings
    strategy = settings.get("sharding_strategy")
    keeps_gathered = str(getattr(strategy, "name", strategy)).upper() in KEEP_GATHERED
    return Circumstances(
        shards=job.mesh[-1],
        replicas=job.mesh[0] if len(job.mesh) == 2 else 1,
        state_ratio=measured.state_ratio,
        activations=measured.usage.saved,
        micro_batches=recipe.accumulate,
        reduces=1 if recipe.no_sync else recipe.accumulate,
        stays_gathered=keeps_gathered or settings.get("reshard_after_forward") is False,
        offloaded=job.cpu_offload,
        partly=bool(settings.get("find_unused_parameters")),
        comm_groups=measured.comm_groups,
    )


# A forward, and a backward that takes twice as many flops: what counts as the model's own, whatever is recomputed.
PASSES = 3
# Collective -> the one by which FSDP2 does it over gloo, and our OSS everywhere, with the same payload of a unit.
STAND_INS = {"all_gather": "broadcast", "reduce_scatter": "all_to_all", "reduce": "all_to_all"}


def _as_sent(bounds: Bounds, traffic: Iterable[Traffic]) -> Bounds:
    """Name the bounds of payloads by the kinds of collectives that are used."""
    sent = {one.kind: one.nbytes for one in traffic}
    payloads = {}
    for kind, bound in bounds.payloads.items():
        stand_in = STAND_INS.get(kind, kind)
        # Of a divided model also the layers use collectives: those of the engine are the ones that are large enough.
        if sent.get(kind, -1) < bound and sent.get(stand_in, -1) >= bound:
            kind = stand_in
        payloads[kind] = bound
    return replace(bounds, payloads=payloads)


# gloo's worker threads. Each can hold on to the buffer of its last reduction for a moment after wait() has returned,
# so where gradients are sent in buffers of their own (to their owners, or in a narrower dtype under replicas), the
# two largest buffers can live longer than the simulation knows.
THREADS = 2


def _notes(job: Job, recipe: Any, late: int, work: Work) -> list[str]:
    notes = ["tensors only: workspaces of kernels, fragments of the allocator and buffers of gloo or NCCL come on top"]
    if late:
        notes.append("the upper end assumes that the last two reductions release their buffers late")
    if recipe.settings.get("find_unused_parameters"):
        notes.append("bounds do not count what parameters without a gradient do not need")
        if backend_class(job.backend, job.world_size).facts.divides == "owners" and job.world_size > 1:
            notes.append("of the rank that owns most; one that owns less, but trains more of it, can need more")
    if job.whole_mesh is not None:
        dims = ", ".join(f"{name} {size}" for name, size in job.whole_mesh.items())
        notes.append(f"mesh of {dims}; bounds count what is sent along data alone")
    if work.uncounted:
        notes.append(f"flops of {', '.join(work.uncounted)} are missing: there is no formula; the step takes longer")
    if job.cpu_offload:
        notes.append(
            "cpu_offload: the same step without what lies in host memory; a pass copies shards there and back once"
        )
        notes.append(
            "cpu_offload: the optimizer's step on the host, which takes longer there, is timed as on the device"
        )
    if recipe.precision == "fp16":
        notes.append("the loss scale of float16 is left out: a few numbers")
    if job.real:
        notes.append("on real tensors, as one rank: the numbers that other ranks would send are made up")
    return notes
