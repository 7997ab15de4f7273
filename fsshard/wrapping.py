"""wrap(): validate, plan, flatten, sync, shard; each step is one line of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fsshard.activation import apply_checkpointing, check_checkpointing
from fsshard.backends import backend_class
from fsshard.backends.base import Settings, per_rank
from fsshard.backends.memory_order import packed
from fsshard.checks import (
    agree,
    check_model,
    check_parameters,
    check_same_model,
    check_sparse_gradients,
    mark_managed,
    shares_memory,
)
from fsshard.comm import presence
from fsshard.compiling import check_compilation, compile_units, resolve_compilation
from fsshard.complex_params import check_tensorfiable, tensorfy
from fsshard.derivatives import watch_derivatives
from fsshard.errors import ConfigurationError, RankMismatch
from fsshard.handing_over import HandedOver, listed
from fsshard.launch import init, keep_group, watch_uncaught
from fsshard.meta import Source, check_resettable, initialiser, is_meta, take_out
from fsshard.optimizer import ShardedOptimizer, watch_foreign_optimizers
from fsshard.plan import plan
from fsshard.policies import Checkpointing, resolve_checkpointing
from fsshard.precision import cast_borders, cast_buffers, check_buffers, check_precision, present, shield_islands
from fsshard.sharded import ShardedModule, broadcast_tensors
from fsshard.state_dict_types import watch_state_dict_types
from fsshard.torch_words import takes_torchs_words

__all__ = ["wrap"]


_Scheduler = TypeVar("_Scheduler", bound=LRScheduler)


@overload
def wrap(
    model: nn.Module, optimizer: None = None, scheduler: None = None, *, backend: str = ..., **settings: Any
) -> ShardedModule: ...
@overload
def wrap(
    model: nn.Module, optimizer: Optimizer, scheduler: None = None, *, backend: str = ..., **settings: Any
) -> tuple[ShardedModule, ShardedOptimizer]: ...
@overload
def wrap(
    model: nn.Module, optimizer: Sequence[Optimizer], scheduler: None = None, *, backend: str = ..., **settings: Any
) -> tuple[ShardedModule, list[ShardedOptimizer]]: ...
@overload
def wrap(
    model: nn.Module, optimizer: Optimizer, scheduler: _Scheduler, *, backend: str = ..., **settings: Any
) -> tuple[ShardedModule, ShardedOptimizer, _Scheduler]: ...
@overload
def wrap(
    model: nn.Module, optimizer: Optimizer, scheduler: Sequence[_Scheduler], *, backend: str = ..., **settings: Any
) -> tuple[ShardedModule, ShardedOptimizer, list[_Scheduler]]: ...
@overload
def wrap(
    model: nn.Module, optimizer: Sequence[Optimizer], scheduler: _Scheduler, *, backend: str = ..., **settings: Any
) -> tuple[ShardedModule, list[ShardedOptimizer], _Scheduler]: ...
@overload
def wrap(
    model: nn.Module,
    optimizer: Sequence[Optimizer],
    scheduler: Sequence[_Scheduler],
    *,
    backend: str = ...,
    **settings: Any,
) -> tuple[ShardedModule, list[ShardedOptimizer], list[_Scheduler]]: ...
@takes_torchs_words
def wrap(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    scheduler: Any = None,
    *,
    backend: str = "auto",
    auto_wrap_policy: object = "auto",
    mixed_precision: object = None,
    activation_checkpointing: object = None,
    sharding_strategy: object = None,
    cpu_offload: object = False,
    device_mesh: Any = None,
    device: torch.device | str | None = None,
    sync_module_states: bool = True,
    find_unused_parameters: bool = False,
    broadcast_buffers: bool = True,
    param_init_fn: object = None,
    compile: object = False,
    tuning: Mapping[str, Any] | None = None,
    **backend_options: Any,
) -> Any:
    """Put ``model`` under an engine. Collective over the ranks that share the work.

    Args:
        model: a bare module, complex parameters welcome. It is changed in place; use what is returned.
        optimizer: a live torch optimizer over ``model`` that has not stepped; it is rebuilt over the sharded
            parameters with its groups and hyper-parameters, and must not be used afterwards. Or a list of them.
        scheduler: an LR scheduler over that optimizer, or a list of them: it goes on from where it is, and drives the
            optimizer that is returned.
        backend: ``"fsdp2"``, ``"fsdp"``, ``"fairscale"``, ``"ddp"``, ``"none"``; ``"auto"`` is ``"none"`` on one
            process and ``"fsdp2"`` on several.
        auto_wrap_policy: which modules are sharding units; see :func:`fsshard.plan`. ``"tuned"``: the units, recomputed
            blocks and options that :func:`fsshard.tune` finds, but for what is given here; see ``tuning``.
        mixed_precision: None or ``"fp32"``, ``"bf16"``, ``"fp16"`` (units compute in that dtype, gradients travel and
            outputs come in float32), :class:`~fsshard.Precision`, or torch's ``MixedPrecision`` /
            ``MixedPrecisionPolicy``; with one meaning under every backend (docs/precision.md). Modules that own
            complex weights, and BatchNorms, compute in float32.
        activation_checkpointing: blocks that compute their activations again in the backward pass; True for the plan's
            own, or see :func:`fsshard.plan`. Their configs' ``use_cache`` (transformers) is set to False, and stays so.
        sharding_strategy: torch's ``ShardingStrategy`` or its name, where the backend has several.
        cpu_offload: keep shards in host memory between steps (``fsdp``, ``fsdp2`` on a GPU).
        device_mesh: a 1-D ``DeviceMesh`` slice such as ``mesh["data"]``, or a 2-D one (replicas, shards) for
            ``fsdp2`` and for ``fsdp`` with ``HYBRID_SHARD``. None: all ranks.
        device: where to move the model first; None leaves it where it is, except that a model on the CPU moves to this
            rank's GPU in a job over nccl.
        sync_module_states: give every rank rank 0's parameters and buffers first.
        find_unused_parameters: a forward may leave out parameters, on all ranks or (``ddp``, ``fairscale``, within a
            unit that runs everywhere also ``fsdp``, ``fsdp2``) on some. Off, a step without some gradient raises.
        broadcast_buffers: give every rank rank 0's buffers before each forward that follows a training forward.
        param_init_fn: for a model on the meta device: ``"reset_parameters"``, or a function that gives one module's own
            parameters and buffers their numbers (rank 0's are taken). It is called with each module that has some,
            children before their parents, in one order under every backend; it may leave some to ``load_state_dict``.
            None: rank 0 has a real model and its numbers are sent tensor by tensor; or all ranks have none, and
            ``load_state_dict`` brings them before the first forward. A unit is sharded before the next one is made.
        compile: compile the forward of each unit that holds no other unit (the root: where it is the only one), in
            place. True, or a dict of ``torch.compile``'s ``backend``, ``fullgraph``, ``dynamic``, ``mode``,
            ``options``, ``recompile_limit``. Recomputed blocks must not lie inside of such a unit.
        tuning: for ``auto_wrap_policy="tuned"``: arguments of :func:`fsshard.tune`, of which ``"batch"``, one rank's,
            is needed; ``"memory"``, ``"loss"``, ``"optimizer"``, ``"accumulation"`` and ``"limit"`` may be given.
        **backend_options: see each backend's ``option_names``; arguments of torch's FSDP, ``fully_shard`` and DDP by
            their own names (docs/migration.md).

    Returns:
        A :class:`~fsshard.sharded.ShardedModule`; with a :class:`~fsshard.optimizer.ShardedOptimizer` if an optimizer
        was handed over, and the scheduler if one was: each alone, or in a list if it came in a list.

    Raises:
        FsshardError: a kind of it for every input that cannot work, on every rank, before anything was changed; only
            what ``param_init_fn`` does is found out while units are made, and leaves a model that is of no use.
    """
    group = _group(device_mesh)
    if tuning is not None or (isinstance(auto_wrap_policy, str) and auto_wrap_policy == TUNED):
        given = {
            "backend": backend,
            "auto_wrap_policy": auto_wrap_policy,
            "mixed_precision": mixed_precision,
            "activation_checkpointing": activation_checkpointing,
            "sharding_strategy": sharding_strategy,
            "find_unused_parameters": find_unused_parameters,
            "broadcast_buffers": broadcast_buffers,
            "cpu_offload": cpu_offload,
            "device_mesh": device_mesh,
            **backend_options,
        }
        found = _tuned(model, next(iter(listed(optimizer)), None), tuning, given, group)
        backend, auto_wrap_policy = found.pop("backend"), found.pop("auto_wrap_policy", "auto")
        activation_checkpointing = found.pop("activation_checkpointing", None)
        sharding_strategy = found.pop("sharding_strategy", sharding_strategy)
        backend_options = {name: value for name, value in found.items() if name not in given} | backend_options

    handed = HandedOver(optimizer, scheduler)

    def prepare() -> tuple[type[Any], Settings]:
        checked = check_model(model)
        chosen = backend_class(backend, group.size())
        settings = Settings(
            plan=plan(
                checked,
                auto_wrap_policy=auto_wrap_policy,
                mixed_precision=mixed_precision,
                activation_checkpointing=activation_checkpointing,
            ),
            group=group,
            mesh=device_mesh,
            device=_device(checked, device, group),
            sharding_strategy=_strategy_name(sharding_strategy),
            cpu_offload=_offload(cpu_offload),
            find_unused_parameters=find_unused_parameters,
            options=backend_options,
            compilation=resolve_compilation(compile),
        )
        check_compilation(settings.compilation, settings.device, settings.plan)
        check_precision(settings.plan, settings.device)
        check_buffers(checked, settings.plan)
        chosen.check(settings)
        check_sparse_gradients(checked, settings.precision, chosen)
        check_tensorfiable(checked, scalars=chosen.stores_scalars_as_vectors, in_order=chosen.stores_contiguous)
        check_parameters(checked, chosen)  # after what no backend can do: it names backends that can
        check_checkpointing(resolve_checkpointing(activation_checkpointing), settings.device)
        check_resettable(checked, initialiser(param_init_fn))
        handed.check(checked)
        return chosen, settings

    chosen, settings = agree(group, prepare)
    checkpointing = resolve_checkpointing(activation_checkpointing)
    check_same_model(model, _asked(backend, settings, checkpointing, broadcast_buffers, compile, handed), group)
    if handed.optimizers:
        agree(group, lambda: handed.check_separable(chosen, group.size(), warn=group.rank() == 0))
    _own_memory(model)
    source = _source(model, settings, initialiser(param_init_fn))
    if source is None:
        model.to(settings.device)
    tensorfy(model, scalars=chosen.stores_scalars_as_vectors, in_order=chosen.stores_contiguous)
    if sync_module_states and group.size() > 1:
        broadcast_tensors([t for t in (*model.parameters(), *model.buffers()) if not t.is_meta], group)
    modules = dict(model.named_modules())
    buffers = cast_buffers(model, settings.plan)
    compile_units(model, settings.plan, settings.compilation)
    apply_checkpointing(model, settings.plan, checkpointing)
    shield_islands(model, settings.plan)
    if not chosen.presents_parameters:
        present(model, settings.plan)
    backend_object = chosen(model, dataclasses.replace(settings, source=source))
    sharded = ShardedModule(backend_object, broadcast_buffers=broadcast_buffers, buffer_dtypes=buffers)
    cast_borders(modules, settings.plan)
    mark_managed(model)
    watch_foreign_optimizers()
    watch_derivatives()
    watch_state_dict_types()
    return handed.given_back(sharded)


def _asked(
    backend: str,
    settings: Settings,
    checkpointing: Checkpointing,
    broadcast_buffers: bool,
    compile: object,
    handed: HandedOver,
) -> dict[str, Any]:
    """What ranks have to ask for alike, as they tell each other."""
    recomputed = [*settings.plan.recomputed, checkpointing.offload_to_cpu, checkpointing.preserve_rng_state]
    return {
        "backend": backend,
        "units": [unit.name for unit in settings.plan.units],
        "activation_checkpointing": recomputed,
        "sharding_strategy": settings.sharding_strategy,
        "find_unused_parameters": settings.find_unused_parameters,
        "broadcast_buffers": broadcast_buffers,
        "options": sorted((key, _plain(value)) for key, value in settings.options.items()),
        "cpu_offload": settings.cpu_offload,
        "mixed_precision": settings.precision,
        "compile": None if settings.compilation is None else (settings.compilation.backend, _plain(compile)),
        "device_mesh": None if settings.mesh is None else tuple(settings.mesh.shape),
        "optimizer": handed.asked(),
    }


TUNED = "tuned"
DEFAULTS = {"find_unused_parameters": False, "broadcast_buffers": True, "cpu_offload": False}


def _tuned(
    model: nn.Module,
    optimizer: Optimizer | None,
    tuning: Mapping[str, Any] | None,
    given: dict[str, Any],
    group: dist.ProcessGroup,
) -> dict[str, Any]:
    """The backend, units, recomputed blocks and options that the search has found. Collective."""
    # The tuner stands on wrap(); this is the one place where wrap() asks for it.
    from fsshard.tuning.wrapped import tuned_settings

    if given.pop("auto_wrap_policy") != TUNED:
        raise ConfigurationError(f"tuning={tuning!r} goes with auto_wrap_policy='tuned'; give both, or neither")
    fixed = {name: value for name, value in given.items() if value is not None and value != DEFAULTS.get(name, ...)}
    if "cpu_offload" in fixed:
        fixed["cpu_offload"] = _offload(fixed["cpu_offload"])
    if dist.get_backend(group) == "nccl":
        fixed["device"] = "cuda"
    return tuned_settings(model, optimizer, tuning, fixed, group)


def _group(device_mesh: Any) -> dist.ProcessGroup:
    """The ranks that share the work; makes a one-rank group where there is none and nobody launched us."""
    if not dist.is_initialized():
        init()
    if device_mesh is None:
        group = dist.group.WORLD
        assert group is not None
    elif getattr(device_mesh, "ndim", 0) == 1:
        group = device_mesh.get_group()
    elif getattr(device_mesh, "ndim", 0) == 2:
        group = device_mesh._flatten().get_group()
    else:
        raise ConfigurationError(
            f"device_mesh={device_mesh!r}: expected a 1-D DeviceMesh slice such as mesh['data'], or a 2-D one "
            "(replicas, shards)"
        )
    keep_group(group)
    watch_uncaught()
    for each in (dist.group.WORLD, group):
        presence.join(each)
    return group


def _device(model: nn.Module, device: torch.device | str | None, group: dist.ProcessGroup) -> torch.device:
    chosen = torch.device(device) if device is not None else next(model.parameters()).device
    if chosen.type == "meta":
        chosen = torch.device("cpu")
    on_gpus = dist.get_backend(group) == "nccl"
    if device is None and on_gpus and chosen.type == "cpu":
        chosen = torch.device("cuda")  # where init() has put this rank
    if on_gpus and chosen.type == "cpu":
        raise ConfigurationError("device='cpu' in a job over nccl, which moves CUDA tensors only; leave device out")
    if chosen.type == "cuda" and chosen.index is None:  # DDP and FSDP1 want the index
        chosen = torch.device("cuda", torch.cuda.current_device())
    return chosen


def _source(model: nn.Module, settings: Settings, init: Any) -> Source | None:
    """Where the numbers come from if any rank's model is on the meta device. Collective."""
    group = settings.group
    flags = [is_meta(model)] if group is None else per_rank(group, is_meta(model))
    if not any(flags):
        return None
    if flags[0] and not all(flags):
        real = flags.index(False)
        raise RankMismatch(
            f"the model is on the meta device on rank 0 and real on rank {real}; make rank 0's the real one"
        )
    held = {} if flags[settings.rank] else take_out(model)
    if not flags[0]:
        init = None
    _move_buffers(model, settings.device)
    return Source(model, settings.device, group, init, from_rank0=not flags[0], held=held if settings.rank == 0 else {})


def _own_memory(model: nn.Module) -> None:
    """Close the gaps of parameters that are slices of a larger tensor; give buffers memory that can be written to.

    Engines hold parameters without gaps, and kernels may sum in another order where there are some: closed under all
    of them alike. Buffers that are expanded, lazily conjugated or negated get memory that holds their numbers.

    torch refuses to broadcast into the first ("more than one element of the written-to tensor refers to a single memory
    location") and to view the others as real numbers (2.13).
    """
    for parameter in model.parameters():
        held = parameter.detach()
        if (dense := packed(held)) is not held:
            parameter.data = dense
    resolved: dict[int, Tensor] = {}
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is None or buffer.is_meta:
                continue
            if shares_memory(buffer) or buffer.is_conj() or buffer.is_neg():
                if id(buffer) not in resolved:
                    resolved[id(buffer)] = buffer.detach().resolve_conj().resolve_neg().contiguous()
                module._buffers[key] = resolved[id(buffer)]


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[key] = buffer.to(device)


def _plain(value: object) -> str:
    """A text that is the same on every rank: that of plain values and enums, else the type's name."""
    return repr(value) if isinstance(value, (bool, int, float, str, Enum, type(None))) else type(value).__name__


STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
"""torch's, by name."""


def _strategy_name(strategy: object) -> str | None:
    name = getattr(strategy, "name", strategy)
    if isinstance(name, str):
        name = name.upper()  # transformers and accelerate write "full_shard"
    if name is None or (isinstance(name, str) and name in STRATEGIES):
        return name
    raise ConfigurationError(
        f"sharding_strategy={strategy!r}: expected torch's ShardingStrategy or its name: {', '.join(STRATEGIES[:4])}"
    )


def _offload(cpu_offload: object) -> bool:
    wanted = getattr(cpu_offload, "offload_params", cpu_offload is not None and cpu_offload)  # torch's CPUOffload
    if not isinstance(wanted, bool):
        raise ConfigurationError(f"cpu_offload={cpu_offload!r}: expected a bool or torch's CPUOffload")
    return wanted
