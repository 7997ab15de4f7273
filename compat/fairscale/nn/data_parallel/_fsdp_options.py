"""Checks the options of FullyShardedDataParallel before anything changes."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsshard.errors import ConfigurationError, FsshardError, UnsupportedByBackend

from ....errors import MisuseError

__all__ = [
    "NotAllowed",
    "ProcessGroupName",
    "UnsupportedHere",
    "check_module",
    "check_offload",
    "compute_device",
    "default_group",
    "mark_sharded",
]

_ENGINE = "fsdp"


class ProcessGroupName(str, Enum):
    """The names of the groups in which FairScale reduces gradients."""

    default = "default"
    reduce_scatter = "reduce_scatter"


class NotAllowed(FsshardError, RuntimeError):
    """A call at the wrong time, which FairScale 0.4.13 answers with a RuntimeError."""


class UnsupportedHere(UnsupportedByBackend, NotImplementedError):
    """A call that FairScale 0.4.13 answers with a NotImplementedError, or that FSDP1 cannot do."""

    def __init__(self, setting: str, alternative: str) -> None:
        super().__init__(setting, _ENGINE, alternative)


def default_group() -> Any:
    """The group of all ranks.

    Raises:
        NotAllowed: there is none yet.
    """
    if not dist.is_initialized():
        raise NotAllowed(
            "FullyShardedDataParallel: torch.distributed is not yet initialized; call "
            "torch.distributed.init_process_group first, or give process_group="
        )
    return dist.group.WORLD


def compute_device(asked: Any, module: nn.Module, group: Any) -> torch.device:
    """Return where to compute: as asked, else where the parameters are, else on the device that the group is for."""
    if asked is not None:
        return _indexed(torch.device(asked))
    found = next((p.device for p in module.parameters() if p.device.type not in ("cpu", "meta")), None)
    if found is not None:
        return found
    nccl = isinstance(group, dist.ProcessGroup) and "nccl" in str(dist.get_backend(group))
    return _indexed(torch.device("cuda" if nccl else "cpu"))


def _indexed(device: torch.device) -> torch.device:
    # FSDP1 compares with the devices of tensors, which have an index (torch 2.13)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def check_offload(params: bool, gradients: bool | None, device: torch.device) -> None:
    """Raise where gradients are to be elsewhere than parameters; on the CPU both are in host memory, whatever is asked.

    Raises:
        UnsupportedHere: one of them is to be in host memory, the other on another device.
    """
    if gradients is not None and gradients != params and device.type != "cpu":
        raise UnsupportedHere(
            f"move_grads_to_cpu={gradients} with move_params_to_cpu={params}",
            "FSDP1 keeps shards of parameters and of gradients in one place; leave move_grads_to_cpu=None",
        )


def check_module(module: nn.Module, wrapper: type[nn.Module], dtype: torch.dtype, flatten: bool) -> None:
    """See that the parameters that no inner wrapper has can be sharded in one unit.

    Args:
        module: what is wrapped.
        wrapper: the class of inner wrappers.
        dtype: that the parameters must have.
        flatten: they become one flat parameter.

    Raises:
        MisuseError: not a module; complex or integer parameters; one that an inner wrapper has sharded already;
            some frozen and some not, in one flat parameter.
        ConfigurationError: parameters of another dtype.
    """
    if not isinstance(module, nn.Module):
        raise MisuseError(f"FullyShardedDataParallel: expected a torch.nn.Module, got {type(module).__name__}")
    own = list(_own(module, wrapper))
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


def mark_sharded(module: nn.Module, wrapper: type[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Remember the parameters that a wrapper is about to shard, for :func:`check_module` of one around it."""
    own = list(_own(module, wrapper))
    for _, parameter in own:
        parameter._fsshard_in_unit = True  # type: ignore[attr-defined]
    return own


def _own(module: nn.Module, wrapper: type[nn.Module], prefix: str = "") -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters outside of inner wrappers."""
    if isinstance(module, wrapper):
        return
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield prefix + name, parameter
    for name, child in module._modules.items():
        if child is not None:
            yield from _own(child, wrapper, f"{prefix}{name}.")
