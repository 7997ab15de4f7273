"""wrap(): validates, plans, stores complex weights as pairs, synchronises, shards; each step is a line or two of it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fsshard.backends import backend_class
from fsshard.backends.registry import check_known, wrapper_classes
from fsshard.backends.settings import Settings
from fsshard.comm import watchdog
from fsshard.comm.agreement import agree, per_rank
from fsshard.comm.watchdog import taking_part
from fsshard.complex_params.flattened import showing_the_users
from fsshard.complex_params.slots import ModuleTable, ParameterSlot
from fsshard.complex_params.tensorfy import check_tensorfiable, flatten_modules, has_dtensors, keep_local_parts
from fsshard.errors import ConfigurationError, RankMismatch
from fsshard.launching.context import init
from fsshard.launching.leaving import keep_group, watch_end
from fsshard.model.activation_checkpointing import apply_checkpointing, check_checkpointing
from fsshard.model.checks import (
    check_model,
    check_modules,
    check_not_wrapped,
    check_parameters,
    check_same_model,
    mark_managed,
)
from fsshard.model.compiling import check_compilation, compile_units, resolve_compilation, takes_compiled_models
from fsshard.model.ignored import Ignored
from fsshard.model.memory_layout import own_memory
from fsshard.model.meta import check_resettable, initialiser, ranks_on_meta, value_source
from fsshard.model.precision import (
    cast_buffers,
    cast_params,
    cast_unit_inputs_and_outputs,
    check_buffers,
    check_precision,
    shield_fp32_units,
)
from fsshard.parallel.meshes import data_mesh
from fsshard.parallel.model_mesh import ModelMesh, find_model_mesh
from fsshard.parallel.replicas import check_even_dtensors, check_same_on_mesh, check_split_fields, send_values
from fsshard.planning.arguments import (
    BackendName,
    IgnoredStates,
    Initialiser,
    PrecisionChoice,
    Recomputed,
    Replicated,
    Sharded,
    Strategy,
    WrapPolicy,
    WrapSettings,
)
from fsshard.planning.plan import plan_table
from fsshard.planning.policies import Checkpointing, resolve_checkpointing
from fsshard.planning.torch_settings import (
    asks_for_hybrid,
    asks_for_offload,
    device_for,
    strategy_name,
    takes_torchs_words,
)
from fsshard.sharded.handover import HandedOver
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer, refuse_foreign_optimizers
from fsshard.sharded.optimizer_checks import rank_independent_text
from fsshard.sharded.state_dict import honour_state_dict_type
from fsshard.torch_private.c10d import flattened

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import CPUOffload
    from typing_extensions import Unpack

_ONLY_CHECKS: ContextVar[bool] = ContextVar("_ONLY_CHECKS", default=False)

_Scheduler = TypeVar("_Scheduler", bound=LRScheduler)

WHAT = "fsshard.wrap()"


@overload
def wrap(
    model: nn.Module, optimizer: None = None, scheduler: None = None, **settings: Unpack[WrapSettings]
) -> ShardedModule: ...
@overload
def wrap(
    model: nn.Module, optimizer: Optimizer, scheduler: None = None, **settings: Unpack[WrapSettings]
) -> tuple[ShardedModule, ShardedOptimizer]: ...
@overload
def wrap(
    model: nn.Module, optimizer: Sequence[Optimizer], scheduler: None = None, **settings: Unpack[WrapSettings]
) -> tuple[ShardedModule, list[ShardedOptimizer]]: ...
@overload
def wrap(
    model: nn.Module, optimizer: Optimizer, scheduler: _Scheduler, **settings: Unpack[WrapSettings]
) -> tuple[ShardedModule, ShardedOptimizer, _Scheduler]: ...
@overload
def wrap(
    model: nn.Module, optimizer: Optimizer, scheduler: Sequence[_Scheduler], **settings: Unpack[WrapSettings]
) -> tuple[ShardedModule, ShardedOptimizer, list[_Scheduler]]: ...
@overload
def wrap(
    model: nn.Module, optimizer: Sequence[Optimizer], scheduler: _Scheduler, **settings: Unpack[WrapSettings]
) -> tuple[ShardedModule, list[ShardedOptimizer], _Scheduler]: ...
@overload
def wrap(
    model: nn.Module, optimizer: Sequence[Optimizer], scheduler: Sequence[_Scheduler], **settings: Unpack[WrapSettings]
) -> tuple[ShardedModule, list[ShardedOptimizer], list[_Scheduler]]: ...
@takes_torchs_words
@takes_compiled_models
def wrap(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    *,
    backend: BackendName = "auto",
    auto_wrap_policy: WrapPolicy = "auto",
    mixed_precision: PrecisionChoice = None,
    activation_checkpointing: Recomputed = None,
    sharding_strategy: Strategy = None,
    cpu_offload: bool | CPUOffload = False,
    device_mesh: DeviceMesh | None = None,
    device: torch.device | str | None = None,
    sync_module_states: bool = True,
    find_unused_parameters: bool = False,
    broadcast_buffers: bool = True,
    param_init_fn: Initialiser = None,
    compile: bool | Mapping[str, Any] = False,
    replicated: Replicated = None,
    sharded: Sharded = None,
    ignored_states: IgnoredStates = None,
    **backend_options: Any,
) -> Any:
    r"""Put ``model`` under an engine. Collective over the ranks that share the work.

    docs/torch-arguments.md has a section on each of the longer arguments.

    Args:
        model: a bare module, with complex parameters or without. It is changed in place; use what is returned.
        optimizer: a live torch optimizer over ``model`` that has not stepped, or a list of them. It is rebuilt over the
            sharded parameters with its groups and hyper-parameters, and must not be used afterwards.
        scheduler: an LR scheduler over that optimizer, or a list of them. It continues from where it is and drives the
            optimizer that is returned.
        backend: ``"fsdp2"``, ``"fsdp"``, ``"fairscale"``, ``"ddp"``, ``"none"``; ``"auto"`` is ``"none"`` on one
            process and ``"fsdp2"`` on several. A backend of your own: its registered name, or ``"module:Class"``.
        auto_wrap_policy: which modules are sharding units; see :func:`fsshard.plan`. :func:`fsshard.tune` searches for
            the best policy that fits in memory: ``wrap(model, **fsshard.tune(...).settings)``.
        mixed_precision: None or ``"fp32"``, ``"bf16"``, ``"fp16"``, a :class:`~fsshard.Precision`, or torch's
            ``MixedPrecision`` or ``MixedPrecisionPolicy``; it means the same under every backend (docs/precision.md).
            Modules that own complex weights, and BatchNorms, compute in float32.
        activation_checkpointing: blocks whose activations are computed again in the backward pass: True for the plan's
            units, or what :func:`fsshard.plan` accepts. A :class:`~fsshard.Checkpointing` can also keep them in host
            memory. Transformers' ``use_cache`` is set to False for these blocks.
        sharding_strategy: torch's ``ShardingStrategy`` or its name, where the backend has several.
        cpu_offload: keep shards in host memory between steps (``fsdp`` and ``fsdp2``, on a GPU).
        device_mesh: a 1-D slice of a ``DeviceMesh`` such as ``mesh["data"]``; or a 2-D mesh of replicas and shards for
            ``fsdp2``, ``fsdp`` and ``fairscale``, with dimensions named ``("replicate", "shard")`` or together with
            ``HYBRID_SHARD`` (docs/meshes.md). None: all ranks.
        device: where to move the model first. None: it stays where it is, but in a job over nccl a model on the CPU
            moves to this rank's GPU.
        sync_module_states: first give every rank the parameters and buffers of rank 0.
        find_unused_parameters: a forward may leave out parameters. If False, a step raises when a gradient is missing
            (under ``none`` that parameter stays as it is, as with torch).
        broadcast_buffers: give every rank the buffers of rank 0 before each forward that follows a training forward.
            If False, each rank keeps its own.
        param_init_fn: for a model on the meta device: ``"reset_parameters"``, or a function that sets the parameters
            and buffers of one module. None: values come from rank 0's real model, or from ``load_state_dict``.
        compile: compile each unit that contains no other unit. True, or a dict of ``torch.compile``'s ``backend``,
            ``fullgraph``, ``dynamic``, ``mode``, ``options``, ``recompile_limit``.
        replicated: plain parameters that the ranks of another mesh dimension share, each with a part of their gradient:
            ``{"norm|pos_embed": mesh["cp"]}``. Keys are names, regular expressions or module classes. Gradients are
            summed over these ranks; ``(mesh["cp"], "mean")`` averages them.
        sharded: plain parameters that the ranks of another mesh dimension hold in parts, one after the other along a
            dim: ``{r"\.qkv\.": (mesh["tp"], 0)}``. DTensor parameters need no entry in either argument.
        ignored_states: parameters, or modules with all of theirs, that no engine gets: each rank has them whole, with
            gradients of its own, and state dicts have rank 0's. Frozen quantised weights are such; one that trains is
            stepped by a torch optimizer of its own.
        **backend_options: options of one backend, such as ``reshard_after_forward=`` of ``fsdp2`` or
            ``implementation="native"`` of ``fairscale``, and the arguments of torch's FSDP, ``fully_shard`` and DDP by
            their own names. docs/torch-arguments.md lists them.

    Returns:
        A :class:`~fsshard.ShardedModule`. If an optimizer was passed, a tuple of it, a
        :class:`~fsshard.ShardedOptimizer` and, if one was passed, the scheduler; each is a list if it came in a list.

    Raises:
        FsshardError: a subclass of it for every input that cannot work, on every rank and before anything is changed.
            Only errors of ``param_init_fn`` come later; they leave a model that cannot be used.
    """
    device_mesh = data_mesh(device_mesh, hybrid=asks_for_hybrid(sharding_strategy))
    group = _group(device_mesh)
    ignored = Ignored(model, ignored_states)
    request = _WrapRequest(
        backend=backend,
        auto_wrap_policy=auto_wrap_policy,
        mixed_precision=mixed_precision,
        activation_checkpointing=activation_checkpointing,
        sharding_strategy=sharding_strategy,
        cpu_offload=cpu_offload,
        device_mesh=device_mesh,
        device=device,
        find_unused_parameters=find_unused_parameters,
        broadcast_buffers=broadcast_buffers,
        param_init_fn=param_init_fn,
        compile=compile,
        ignored=ignored,
        options=backend_options,
    )
    handed = HandedOver(optimizer, scheduler)
    with ignored.hidden():
        table = ModuleTable(model)
        mesh = _model_mesh(table, group, device_mesh, replicated, sharded)
        # Of DTensors; put back where something is refused.
        with taking_part(group, WHAT), contextlib.nullcontext() if mesh is None else keep_local_parts(table.modules):
            everyone = group if mesh is None else mesh.group
            engine, settings, slots = agree(everyone, lambda: _validated(table, request, handed, group, mesh))
            asked = _asked(request, settings, handed)
            agree(None if mesh is None else everyone, lambda: check_same_model(table.buffers(), slots, asked, group))
            if settings.model_mesh is not None:
                check_same_on_mesh(table, slots, settings.model_mesh, settings.rank)
            if handed.optimizer is not None:
                agree(settings.everyone, lambda: handed.check_separable(engine, settings))
            on_meta = ranks_on_meta(slots, group)
            if _ONLY_CHECKS.get():
                raise _Passed
        wrapped = _sharded(table, request, engine, settings, slots, on_meta, sync_module_states)
    ignored.move(settings.device)
    return handed.given_back(wrapped)


def _sharded(
    table: ModuleTable,
    request: _WrapRequest,
    engine: Any,
    settings: Settings,
    slots: list[ParameterSlot],
    on_meta: Sequence[bool],
    sync_module_states: bool,
) -> ShardedModule:
    """Put a model that has passed all checks under its engine. Collective."""
    group = settings.group
    assert group is not None, "wrap() makes one where there is none"
    # From here on the model is changed: all that can be refused has been. Its modules stay until an engine takes them.
    modules = table.modules
    own_memory(modules.values())
    if any(on_meta):
        init = initialiser(request.param_init_fn)
        settings = replace(settings, source=value_source(modules, slots, on_meta, settings.device, group, init))
    elif any(tensor.device != settings.device for tensor in (slots[0].parameter, *table.buffers().values())):
        table.root.to(settings.device)  # all parameters are on one device
    flatten_modules(modules, scalars=engine.facts.divides == "elements", in_order=engine.facts.stores_contiguous)
    with taking_part(group, WHAT):
        if sync_module_states:
            send_values(table, group, settings.model_mesh)
        # Units are put into the dtypes and the form that they compute in.
        buffers = cast_buffers(table, settings.plan)
        compile_units(modules, settings.plan, settings.compilation)
        apply_checkpointing(table, settings.plan, request.checkpointing)
        shield_fp32_units(modules, settings.plan)
        rounds_as_it_gathers = engine.facts.gathers_narrower and settings.shards > 1
        cast_params(table, settings.plan, rounds_as_it_gathers=rounds_as_it_gathers)
        backend = engine(table.root, settings)
        wrapped = ShardedModule(backend, broadcast_buffers=request.broadcast_buffers, buffer_dtypes=buffers)
        cast_unit_inputs_and_outputs(modules, settings.plan)
    mark_managed(modules.values())
    showing_the_users(modules.values())
    refuse_foreign_optimizers(wrapped)
    honour_state_dict_type(wrapped)
    return wrapped


class _Passed(Exception):
    """All that wrap() can refuse has been looked at; on its way out, what the checks have moved is put back."""


def check_wrap(model: nn.Module, optimizer: Any = None, scheduler: Any = None, **settings: Any) -> None:
    """Raise what :func:`wrap` would for the same arguments, and change nothing. Collective.

    For whoever wraps several models: the first one is not changed yet where the second one is refused.

    Raises:
        FsshardError: see :func:`wrap`.
    """
    token = _ONLY_CHECKS.set(True)
    try:
        wrap(model, optimizer, scheduler, **settings)
    except _Passed:
        pass
    finally:
        _ONLY_CHECKS.reset(token)


def _model_mesh(
    table: ModuleTable, group: dist.ProcessGroup, device_mesh: Any, replicated: object, sharded: object
) -> ModelMesh | None:
    """Return the other mesh dimensions; None where there are none. Collective where there can be some."""
    named = replicated is not None or sharded is not None or has_dtensors(table.modules.values())
    if group.size() < dist.get_world_size():
        told = per_rank(group, named)
        if not all(told) and any(told):
            raise RankMismatch(
                f"{sum(told)} of the {len(told)} data-parallel ranks passed replicated=, sharded= or a model with "
                f"DTensors, and rank {told.index(False)} of them did not; pass the same on all of them"
            )
    if not named or not table.modules:  # what is no module is refused by check_model(), on every rank
        return None
    check_not_wrapped(table.modules, wrapper_classes())
    return find_model_mesh(table, group, replicated, sharded, device_mesh)


@dataclass(frozen=True, kw_only=True)
class _WrapRequest:
    """The settings that :func:`wrap` was asked for, but for the objects that it works on."""

    backend: str
    auto_wrap_policy: object
    mixed_precision: object
    activation_checkpointing: object
    sharding_strategy: object
    cpu_offload: object
    device_mesh: Any
    device: torch.device | str | None
    find_unused_parameters: bool
    broadcast_buffers: bool
    param_init_fn: object
    compile: object
    ignored: Ignored
    options: dict[str, Any]

    @property
    def checkpointing(self) -> Checkpointing:
        """Return how blocks are recomputed."""
        return resolve_checkpointing(self.activation_checkpointing)


def _validated(
    table: ModuleTable,
    request: _WrapRequest,
    handed: HandedOver,
    group: dist.ProcessGroup,
    model_mesh: ModelMesh | None,
) -> tuple[type[Any], Settings, list[ParameterSlot]]:
    """Return the backend's class, its settings and the model's parameters, after all checks of one rank. Local."""
    request.ignored.check()
    modules, slots = table.modules, check_model(table, wrapper_classes())
    check_split_fields(modules.values(), slots, group, model_mesh)
    engine = backend_class(request.backend, group.size())
    settings = Settings(
        plan=plan_table(table, slots, request.auto_wrap_policy, request.mixed_precision, request.checkpointing),
        group=group,
        mesh=request.device_mesh,
        device=device_for(slots[0].parameter.device, request.device, group),
        sharding_strategy=strategy_name(request.sharding_strategy),
        cpu_offload=asks_for_offload(request.cpu_offload),
        find_unused_parameters=request.find_unused_parameters,
        options=request.options,
        compilation=resolve_compilation(request.compile),
        model_mesh=model_mesh,
        ignored=request.ignored,
    )
    check_compilation(settings.compilation, settings.device, settings.plan)
    check_precision(settings.plan, settings.device)
    check_buffers(table, settings.plan)
    check_known(engine, settings)
    settings = engine.check(settings)
    check_modules(modules, settings.precision, engine, settings.world_size)
    check_tensorfiable(slots, scalars=engine.facts.divides == "elements", in_order=engine.facts.stores_contiguous)
    check_even_dtensors(slots, engine)
    check_parameters(table.buffers(), slots, engine)  # after what no backend can do: it names backends that can
    check_checkpointing(request.checkpointing, settings.device)
    check_resettable(modules, initialiser(request.param_init_fn))
    handed.check(slots, request.ignored)
    return engine, settings, slots


def _asked(request: _WrapRequest, settings: Settings, handed: HandedOver) -> dict[str, Any]:
    """Return what ranks have to ask for alike, as they tell each other."""
    checkpointing, compilation = request.checkpointing, settings.compilation
    blocks = [*settings.plan.recomputed, *settings.plan.offloaded]
    recomputed = [*blocks, checkpointing.offload_to_cpu, checkpointing.preserve_rng_state, checkpointing.recompute]
    compiler = None if compilation is None else (compilation.backend, rank_independent_text(request.compile))
    return {
        "backend": request.backend,
        "units": [unit.name for unit in settings.plan.units],
        "activation_checkpointing": recomputed,
        "sharding_strategy": settings.sharding_strategy,
        "find_unused_parameters": settings.find_unused_parameters,
        "broadcast_buffers": request.broadcast_buffers,
        "options": sorted((key, rank_independent_text(value)) for key, value in settings.options.items()),
        "cpu_offload": settings.cpu_offload,
        "mixed_precision": settings.precision,
        "compile": compiler,
        "device_mesh": None if settings.mesh is None else tuple(settings.mesh.shape),
        "ignored_states": list(request.ignored.parameters),
        "optimizer": handed.asked(),
    }


def _group(device_mesh: Any) -> dist.ProcessGroup:
    """Return the ranks that share the work; make a one-rank group where there is no group and no launcher."""
    if not dist.is_initialized():
        init()
    if device_mesh is None:
        group = dist.group.WORLD
        assert group is not None
    elif getattr(device_mesh, "ndim", 0) == 1:
        group = device_mesh.get_group()
    elif getattr(device_mesh, "ndim", 0) == 2:
        group = flattened(device_mesh).get_group()
    else:
        raise ConfigurationError(
            f"device_mesh={device_mesh!r}: expected a 1-D DeviceMesh slice such as mesh['data'], or a 2-D one "
            "(replicas, shards)"
        )
    watch_end(keep_group(group))
    watchdog.join()
    return group
