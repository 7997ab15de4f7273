"""Translates the arguments of torch's wrappers (FSDP1, ``fully_shard``, DDP) into those of fsshard.wrap.

docs/torch-arguments.md has the table; what no setting of ours means raises with what to do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from fsshard.errors import ConfigurationError
from fsshard.torch_private.c10d import takes_only_cuda

Wrap = Callable[..., Any]

HYBRID_ZERO2 = "_HYBRID_SHARD_ZERO2"
# Strategies of replicas that are sharded within.
HYBRIDS = ("HYBRID_SHARD", HYBRID_ZERO2)
# torch's strategies, by name.
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", *HYBRIDS)
# Under these what a forward gathers stays until the backward.
KEEP_GATHERED = ("SHARD_GRAD_OP", HYBRID_ZERO2)

# torch's words for what stays out; all are the second one here.
IGNORED = ("ignored_modules", "ignored_states", "ignored_parameters", "ignored_params")
# torch's word -> ours, where the value is the same.
RENAMED = {
    "fsdp_auto_wrap_policy": "auto_wrap_policy",  # torch 1.11
    "mesh": "device_mesh",
    "mp_policy": "mixed_precision",
    "init_sync": "sync_module_states",
}


def takes_torchs_words(wrap: Wrap) -> Wrap:
    """Let ``wrap`` take the arguments of torch's wrappers, too."""

    @functools.wraps(wrap)
    def wrapped(*args: Any, **settings: Any) -> Any:
        return wrap(*args, **in_our_words(settings))

    return wrapped


def in_our_words(settings: dict[str, Any]) -> dict[str, Any]:
    """Return ``settings`` with torch's words replaced by those of :func:`fsshard.wrap`."""
    translated: dict[str, Any] = {}
    for name, value in settings.items():
        ours, meaning = _meaning(name, value)
        if ours is None:
            continue
        if ours in translated and translated[ours] != meaning:
            raise ConfigurationError(
                f"{name}={value!r} is {ours}={meaning!r}, and {ours}={translated[ours]!r} is given; drop one"
            )
        translated[ours] = meaning
    return translated


def asks_for_hybrid(strategy: object) -> bool:
    """Return whether ``sharding_strategy=``, of whatever form, is one of replicas that are sharded within."""
    return str(getattr(strategy, "name", strategy)).upper() in HYBRIDS


def _meaning(name: str, value: Any) -> tuple[str | None, Any]:
    """Return our word and the value; no word for what is done anyway."""
    # None means something as a policy: the root is the only unit.
    if name == "fsdp_auto_wrap_policy":
        return RENAMED[name], value
    if name in RENAMED:
        return _unless_none(RENAMED[name], value)
    if name in ("device_id", "device_ids", "output_device"):
        return _unless_none("device", _device(name, value))
    if name == "process_group":
        return _unless_none("device_mesh", _mesh(value))
    if name == "offload_policy":
        return "cpu_offload", _offloads(value)
    if name in IGNORED:
        # One by itself is taken, too: a tensor would be its rows.
        if isinstance(value, torch.Tensor) or not isinstance(value, (Iterable, type(None))):
            value = [value]
        members = list(value or ())
        return ("ignored_states", members) if members else (None, None)
    if name in _ONLY:
        only, why = _ONLY[name]
        if value is not only and value != only:
            raise ConfigurationError(f"{name}={value!r}: {why}")
        return None, None
    return name, value


def _unless_none(name: str, value: Any) -> tuple[str | None, Any]:
    return (None, None) if value is None else (name, value)


# Words with one value that is what is done anyway, and why there is no other.
_ONLY: dict[str, tuple[Any, str]] = {
    "use_orig_params": (True, "parameters keep their names and shapes under every backend; leave it out"),
    "shard_placement_fn": (None, "where a parameter is cut is decided for every backend alike; leave it out"),
    "dim": (0, "a batch is divided among ranks by your loader, along dim 0; leave it out"),
}


def _device(name: str, value: Any) -> torch.device | None:
    if isinstance(value, (list, tuple)):
        if len(value) > 1:
            raise ConfigurationError(f"{name}={value!r}: one device per process; start a process per GPU")
        value = value[0] if value else None
    if value is None:
        return None
    if isinstance(value, int):
        return torch.device("cuda", value)
    return torch.device(value)


def _mesh(group: Any) -> Any:
    """Return a process group as a mesh of one dimension; None for all ranks."""
    if group is None or group is dist.group.WORLD:
        return None
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigurationError(
            f"process_group={group!r}: expected one group that this rank is in; for replicas and shards pass "
            "device_mesh=init_device_mesh(device, (replicas, shards))"
        )
    return _mesh_of(group)


# The cache keeps the group alive.
@functools.lru_cache(maxsize=2)
def _mesh_of(group: dist.ProcessGroup) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group, "cuda" if takes_only_cuda(group) else "cpu")


def _offloads(policy: Any) -> bool:
    """Return whether one of ``fully_shard``'s offload policies keeps shards on the host."""
    kind = type(policy).__name__
    if policy is not None and kind not in ("OffloadPolicy", "CPUOffloadPolicy"):
        raise ConfigurationError(f"offload_policy={policy!r}: expected torch's OffloadPolicy or CPUOffloadPolicy")
    if not getattr(policy, "pin_memory", True):
        raise ConfigurationError("offload_policy=CPUOffloadPolicy(pin_memory=False): shards are pinned; leave it True")
    return kind == "CPUOffloadPolicy"


def device_for(
    now: torch.device,
    device: torch.device | str | None,
    group: dist.ProcessGroup,
) -> torch.device:
    """Return the device that a model which is on ``now`` is to be on, where the user asks for ``device``."""
    target = now if device is None else torch.device(device)
    if target.type in ("meta", "cpu"):
        # FSDP1 of torch 2.13 takes no number: "cpu:0" is a ValueError.
        target = torch.device("cpu")
    if target.type == "cpu" and takes_only_cuda(group):
        if device is not None:
            raise ConfigurationError("device='cpu' in a job over nccl, which moves CUDA tensors only; leave device out")
        # init() has put this rank on a GPU.
        target = torch.device("cuda")
    if target.type != "cuda":
        return target
    if not torch.cuda.is_available():
        raise ConfigurationError(
            f"device={str(device)!r}: expected a device of this machine, and torch finds no CUDA device here; leave "
            "device out, or pass device='cpu'"
        )
    # DDP and FSDP1 want the index.
    if target.index is None:
        target = torch.device("cuda", torch.cuda.current_device())
    return target


def strategy_name(strategy: object) -> str | None:
    """Return the name of torch's ``ShardingStrategy``, or of one that is given by name."""
    name = getattr(strategy, "name", strategy)
    if name is None:
        return None
    # transformers and accelerate write "full_shard".
    if isinstance(name, str) and name.upper() in STRATEGIES:
        return name.upper()
    raise ConfigurationError(
        f"sharding_strategy={strategy!r}: expected torch's ShardingStrategy or its name: {', '.join(STRATEGIES)}"
    )


def asks_for_offload(cpu_offload: object) -> bool:
    """Return whether ``cpu_offload``, a bool or torch's ``CPUOffload``, asks for it."""
    if cpu_offload is None:
        return False
    # It may be torch's CPUOffload.
    asks = getattr(cpu_offload, "offload_params", cpu_offload)
    if not isinstance(asks, bool):
        raise ConfigurationError(f"cpu_offload={cpu_offload!r}: expected a bool or torch's CPUOffload")
    return asks
