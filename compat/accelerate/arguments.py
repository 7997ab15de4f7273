"""Arguments of Accelerate that no engine can honour: each refusal says what to ask for instead."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.utils import DistributedDataParallelKwargs

from fsshard.backends.registry import backend_class
from fsshard.comm.agreement import per_rank
from fsshard.errors import ConfigurationError

from ..trainers import Arguments, State, data_rank_of

# As it is before anybody puts ours in its place.
THEIRS = accelerate.Accelerator

ENGINE = 'the engine is named by fsshard={"backend": ...}; leave it out'
MESH = (
    'for replicas and shards pass fsshard={"device_mesh": init_device_mesh(device, (replicas, shards))}; a model that '
    "is split over ranks takes fsshard.compat.lightning.FabricStrategy (docs/meshes.md)"
)
COMPILE = 'pass fsshard={"compile": True}, which compiles unit by unit'
# Argument -> what to do.
INSTEAD = {
    "deepspeed_plugin": ENGINE,
    "deepspeed_plugins": ENGINE,
    "dynamo_backend": COMPILE,
    "dynamo_plugin": COMPILE,
    "fsdp_plugin": ENGINE,
    "megatron_lm_plugin": ENGINE,
    "parallelism_config": MESH,
    "torch_tp_plugin": MESH,
}
# Variables that accelerate launch sets -> what to do.
ENVIRONMENT = {
    "ACCELERATE_DYNAMO_BACKEND": COMPILE,
    "ACCELERATE_USE_DEEPSPEED": ENGINE,
    "ACCELERATE_USE_FSDP": ENGINE,
    "ACCELERATE_USE_MEGATRON_LM": ENGINE,
    "ACCELERATE_USE_PARALLELISM_CONFIG": MESH,
}
# Arguments of torch's DDP that are arguments of fsshard.wrap, too.
OURS = ("broadcast_buffers", "find_unused_parameters")
# Kinds of jobs, in Accelerate's words.
SERVED = ("NO", "MULTI_CPU", "MULTI_GPU")


def check_settings(settings: Any) -> None:
    """Raise ConfigurationError if what was passed as ``fsshard=`` is no dict of arguments of ``fsshard.wrap``."""
    # The library hands these over.
    taken = ("model", "optimizer", "scheduler")
    if not isinstance(settings, Mapping) or not all(isinstance(key, str) and key not in taken for key in settings):
        raise ConfigurationError(
            f'fsshard={settings!r}: expected a dict of arguments of fsshard.wrap, such as {{"backend": "fsdp2"}}'
        )


def check_one_precision(autocast: str, settings: Arguments) -> None:
    """Raise ConfigurationError if ``autocast``, as its users write it, is asked for and units that are cast whole."""
    if settings.get("mixed_precision") is not None:
        raise ConfigurationError(
            f"{autocast} is autocast, fsshard={{'mixed_precision': {settings['mixed_precision']!r}}} casts whole "
            "units; choose one"
        )


def check_arguments(
    args: tuple[Any, ...],
    arguments: Arguments,
    settings: Any,
) -> State:
    """Return all of Accelerate's arguments by name, or raise ConfigurationError for one, before anything is made."""
    check_settings(settings)
    own = dict(inspect.signature(THEIRS).bind_partial(*args, **arguments).arguments)
    for name, advice in INSTEAD.items():
        if own.get(name) is not None:
            raise ConfigurationError(f"Accelerator({name}=...): {advice}")
    for name, advice in ENVIRONMENT.items():
        if os.environ.get(name, "").lower() not in ("", "0", "no", "false"):
            raise ConfigurationError(f"{name}={os.environ[name]} is set (accelerate's configuration): {advice}")
    precision = str(own.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION") or "no").lower()
    if precision == "fp8":
        raise ConfigurationError("mixed_precision='fp8': no engine of fsshard computes in it; use 'bf16'")
    if precision != "no":
        check_one_precision(f"Accelerator(mixed_precision={precision!r})", settings)
    _check_handlers(own.get("kwargs_handlers") or (), settings)
    return own


def _check_handlers(handlers: Iterable[Any], settings: Arguments) -> None:
    for handler in handlers:
        name = type(handler).__name__
        if "Recipe" in name:
            raise ConfigurationError(f"kwargs_handlers=[{name}(...)]: no engine of fsshard computes in fp8")
        if not isinstance(handler, DistributedDataParallelKwargs):
            continue
        for key in handler.to_kwargs():  # those that were changed
            if key not in OURS:
                advice = f'leave it out, or pass fsshard={{"{key}": ...}} where the backend takes it'
                raise ConfigurationError(f"kwargs_handlers=[{name}({key}=...)]: {advice}")
            if key in settings:
                raise ConfigurationError(f"{key} is in {name} and in fsshard=; choose one")


def check_state(accelerator: Any) -> None:
    """Raise ConfigurationError if Accelerate sees another job than there is, or has promised what nobody does."""
    kind = accelerator.distributed_type.value
    ranks = accelerator.num_processes
    if kind not in SERVED:
        raise ConfigurationError(
            f"accelerate's state is {kind}, by its configuration or an earlier Accelerator of this process: {ENGINE}"
        )
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if world != ranks:
        raise ConfigurationError(
            f"accelerate sees {ranks} of {world} ranks, and would give each of them the same samples; start the ranks "
            "with torchrun, fsshard.launch or, on GPUs, accelerate launch, and pass cpu=True for ranks on the CPU"
        )
    check_scaled(accelerator)


def check_scaled(accelerator: Any) -> None:
    """Raise ConfigurationError if fp16 is asked for where Accelerate makes no scaler and computes in float32."""
    if accelerator.mixed_precision == "fp16" and accelerator.scaler is None:
        raise ConfigurationError(
            f"fp16: Accelerate silently computes in float32 on {accelerator.device.type!r}; use bf16"
        )


def check_samples(settings: Arguments, ranks: int) -> None:
    """Raise ConfigurationError if some of the ranks have to see the same samples, which Accelerate gives to no two."""
    place = data_rank_of(settings)
    if place is not None and place.size != ranks:
        raise ConfigurationError(
            f"device_mesh: {place.size} parts of the data for {ranks} ranks, so that some share samples, which "
            "Accelerate gives to no two ranks and would count twice in gather_for_metrics; write the loop with "
            "fsshard.wrap and samplers from fsshard.data_rank(mesh), or use fsshard.compat.lightning.FabricStrategy"
        )


def check_batches(loader: Any, settings: Arguments) -> None:
    """Raise ConfigurationError if ranks get several numbers of batches and gather weights in each forward. Collective.

    Args:
        loader: Accelerate's, with or without a length.
        settings: what was passed as ``fsshard=``.
    """
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None or backend_class(settings.get("backend", "auto"), world.size()).facts.divides != "elements":
        return
    try:
        number: int | None = len(loader)
    except TypeError:
        number = None
    numbers = per_rank(world, number)
    if len(set(numbers)) > 1:
        raise ConfigurationError(
            f"even_batches=False: the ranks get {', '.join(map(str, numbers))} batches of this loader, and need one "
            "another for every forward; leave it at True (gather_for_metrics drops what was added), or drop_last=True"
        )


def wrap_settings(accelerator: Any, settings: Arguments, *, placed: bool) -> State:
    """Return what ``fsshard.wrap`` gets: what was asked for, and for the rest what the library's DDP would do.

    Args:
        accelerator: Accelerate's.
        settings: what was passed as ``fsshard=``.
        placed: whether the model is moved to the accelerator's device.
    """
    handler = accelerator.ddp_handler
    device = accelerator.device
    keywords = {} if handler is None else handler.to_kwargs()
    if placed:
        keywords["device"] = torch.device("cpu") if device.type == "cpu" else device  # FSDP1 does not take "cpu:0"
    return keywords | dict(settings)
