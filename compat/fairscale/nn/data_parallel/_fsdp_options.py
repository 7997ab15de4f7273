"""Checks options and parameters of FullyShardedDataParallel before anything changes, and marks what it replaces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsshard.errors import ConfigurationError, FsshardError, UnsupportedByBackend
from fsshard.oss.gradient_norm import count_owners
from fsshard.sharded.optimizer import refuse_foreign_optimizers

from ....errors import MisuseError

__all__ = [
    "NotAllowed",
    "ProcessGroupName",
    "UnsupportedHere",
    "check_offload",
    "check_parameters",
    "compute_device",
    "default_group",
    "mark",
    "own_parameters",
]


class ProcessGroupName(str, Enum):
    """The names of the groups in which FairScale reduces gradients."""

    default = "default"
    reduce_scatter = "reduce_scatter"


class NotAllowed(FsshardError, RuntimeError):
    """A call at the wrong time, which FairScale 0.4.13 answers with a RuntimeError."""


class UnsupportedHere(UnsupportedByBackend, NotImplementedError):
    """A call that FairScale 0.4.13 answers with a NotImplementedError, or that FSDP1 cannot do."""

    def __init__(self, setting: str, alternative: str) -> None:
        super().__init__(setting, "fsdp", alternative)


def default_group() -> Any:
    """Return the group of all ranks."""
    if not dist.is_initialized():
        raise NotAllowed(
            "FullyShardedDataParallel: torch.distributed is not yet initialized; call "
            "torch.distributed.init_process_group first, or give process_group="
        )
    return dist.group.WORLD


def compute_device(asked: Any, module: nn.Module, group: Any) -> torch.device:
    """Return where to compute: as asked, else where the parameters are, else on the device that the group is for."""
    found = next((p.device for p in module.parameters() if p.device.type not in ("cpu", "meta")), None)
    nccl = isinstance(group, dist.ProcessGroup) and "nccl" in str(dist.get_backend(group))
    device = torch.device(asked or found or ("cuda" if nccl else "cpu"))
    # FSDP1 compares with the devices of tensors, which have an index (torch 2.13)
    without = device.type == "cuda" and device.index is None
    return torch.device("cuda", torch.cuda.current_device()) if without else device


def check_offload(params: bool, gradients: bool | None, device: torch.device) -> None:
    """Raise where gradients are to be elsewhere than parameters; on the CPU both are in host memory anyway."""
    if gradients is not None and gradients != params and device.type != "cpu":
        raise UnsupportedHere(
            f"move_grads_to_cpu={gradients} with move_params_to_cpu={params}",
            "FSDP1 keeps shards of parameters and of gradients in one place; leave move_grads_to_cpu=None",
        )


def own_parameters(module: nn.Module, wrapper: type[nn.Module], prefix: str = "") -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the names and parameters that no inner wrapper has."""
    if isinstance(module, wrapper):
        return
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield prefix + name, parameter
    for name, child in module._modules.items():
        if child is not None:
            yield from own_parameters(child, wrapper, f"{prefix}{name}.")


def check_parameters(own: Sequence[tuple[str, nn.Parameter]], dtype: torch.dtype, flatten: bool) -> None:
    """Raise unless parameters that no inner wrapper has can be sharded in one unit, or in one flat parameter."""
    for name, parameter in own:
        if getattr(parameter, "_fsshard_in_unit", False):
            raise MisuseError(
                f"{name!r} is tied to a parameter that an inner FullyShardedDataParallel has sharded, and would not be "
                "tied any more; wrap the modules that share it in one wrapper"
            )
        if parameter.is_complex():
            raise MisuseError(
                f"{name!r} is {parameter.dtype}: FairScale shards real parameters only; use "
                'fsshard.wrap(model, backend="fsdp2"), which takes complex ones'
            )
        if not parameter.is_floating_point():
            raise MisuseError(f"{name!r} is {parameter.dtype}; make what is not trained a buffer")
        if parameter.dtype is not dtype:
            raise ConfigurationError(
                f"{name!r} is {parameter.dtype}, expected {dtype}: without mixed_precision=True parameters have the "
                "compute_dtype (float32 unless given), with it they are float32"
            )
    frozen = [name for name, parameter in own if not parameter.requires_grad]
    if flatten and frozen and len(frozen) < len(own):
        raise MisuseError(
            f"parameters of one flat parameter must have the same requires_grad; {frozen[0]!r} does not. Wrap the "
            "frozen modules in their own FullyShardedDataParallel, or use flatten_parameters=False"
        )


def mark(wrapper: Any, before: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Let functions of torch raise that would silently be wrong with a wrapper's parameters, or with those before."""
    refuse_foreign_optimizers(wrapper)
    kept = {id(parameter) for parameter in wrapper.params}
    for name, parameter in before:
        # An optimizer over these would go on over tensors that nobody computes with, and train nothing.
        if id(parameter) not in kept:
            parameter._fsshard_stale = (  # type: ignore[attr-defined]
                f"parameter {name!r} was replaced by a flat one when FullyShardedDataParallel wrapped its module, so "
                "that this optimizer would train nothing; build the optimizer after wrapping, over model.parameters(), "
                "or wrap with flatten_parameters=False"
            )
    if wrapper.world_size > 1:  # torch's clip_grad_norm_ would take another norm on each rank
        count_owners(wrapper)
        for parameter in wrapper.params:
            parameter._fsshard_clip_with = (
                "call fsdp.clip_grad_norm_(max_norm): the FullyShardedDataParallel's own method, on the outermost "
                "wrapper, adds up the norms of all ranks"
            )
