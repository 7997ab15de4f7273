"""FairScale's format of sharded states: 1-D slices padded to one length, and which parameters are in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsshard.checkpoint.interop.foreign_names import path_below
from fsshard.errors import StateDictError
from fsshard.torch_private.fsdp1 import FLAT_NAME
from fsshard.torch_private.modules import IncompatibleKeys, metadata_of, non_persistent_buffers

__all__ = [
    "INNER",
    "check_local",
    "clean",
    "export",
    "flat_name",
    "load_local",
    "lower",
    "metadata",
    "padded_lengths",
    "saved_buffers",
    "shard",
]

INNER = "_fsdp_wrapped_module"
"""Attribute of what is wrapped, in FairScale's wrapper and in torch's."""
FLAT = "flat_param_0"
"""FairScale's name of a wrapper's flat parameter."""

_LEVELS = f"{INNER}.{INNER}."  # FairScale's wrapper, torch's wrapper, the user's module

Wrappers = Sequence[tuple[str, Any]]
"""The FullyShardedDataParallels of a model, the outermost first, with their clean paths."""


def clean(path: str) -> str:
    """Return a name without the levels of wrappers."""
    return ".".join(part for part in path.split(".") if part not in (INNER, "_fpw_module"))


def flat_name(name: str) -> str:
    """Return a name as FairScale's ``named_parameters`` gives it while parameters are flat."""
    return name.replace(f"{_LEVELS}{FLAT_NAME}", f"{INNER}.{FLAT}").replace(_LEVELS, f"{INNER}._fpw_module.")


def shard(whole: Tensor, rank: int, world_size: int) -> Tensor:
    """Copy a rank's part of a whole tensor, padded as FairScale and FSDP1 cut it."""
    chunks = list(whole.detach().reshape(-1).chunk(world_size))
    part = chunks[rank] if rank < len(chunks) else chunks[0].new_empty(0)
    padding = chunks[0].numel() - part.numel()
    return nn.functional.pad(part, [0, padding]) if padding else part.clone()


def _backing(instance: Any) -> dict[str, list[tuple[str, torch.Size]]]:
    """Map the tensors of a wrapper that FairScale cuts to the names and shapes of what is in each."""
    own = [(each.name, each.shape) for each in instance.module.own()]
    if not own:
        return {}
    return {FLAT: own} if instance.flatten_parameters else {name: [(name, shape)] for name, shape in own}


def padded_lengths(instance: Any) -> list[int]:
    """Return how many elements of each of a wrapper's tensors on this rank are padding."""
    lengths = []
    for within in _backing(instance).values():
        numel = sum(shape.numel() for _, shape in within)
        width = -(-numel // instance.world_size)
        lengths.append(width - min(max(numel - width * instance.rank, 0), width))
    return lengths


# ------------------------------------------------------------------------------------------------ state dicts


def export(instance: Any, wrappers: Wrappers, found: dict[str, Any], prefix: str, local: bool) -> None:
    """Take the levels of a wrapper out of a state dict's keys below ``prefix``, and copy values, or this rank's parts.

    ``wrappers`` are it and those inside.
    """
    start = prefix + _LEVELS
    # Wrappers inside have copied theirs: before that of a whole parameter was freed again.
    copied = tuple(f"{path}." for path, _ in wrappers if path)
    own = {each.name for each in instance.module.own()} | {alias for _, alias in instance.module.ties()}
    for key in [key for key in found if key.startswith(start)]:
        value, name = found.pop(key), key[len(start) :]
        if local and name == FLAT_NAME:
            name = FLAT
        elif local and not instance.flatten_parameters and name in own and instance.world_size > 1:
            value = shard(value, instance.rank, instance.world_size)
        inside = name.startswith(copied) or not isinstance(value, Tensor)
        found[prefix + name] = value if inside else _copy(instance, value)
    versions = metadata_of(found)
    inner = f"{prefix}{INNER}"
    for key in [key for key in versions if key == inner or key.startswith(f"{inner}.")]:
        versions[path_below(prefix.rstrip("."), clean(key[len(prefix) :])).rstrip(".")] = versions.pop(key)


def _copy(instance: Any, value: Tensor) -> Tensor:
    copy = value.detach()
    if instance.mixed_precision and copy.is_floating_point() and copy.dtype is instance.buffer_dtype:
        copy = copy.float()  # buffers; parameters are shown in full precision
    elsewhere = copy.device.type != instance.state_dict_device.type
    return copy.to(instance.state_dict_device) if elsewhere else copy.clone()


def lower(state_dict: dict[str, Any], prefix: str) -> None:
    """Put the levels of a wrapper into the keys below ``prefix``; those that have levels already may."""
    for key in [key for key in state_dict if key.startswith(prefix)]:
        value = state_dict.pop(key)
        state_dict[prefix + _LEVELS + clean(key[len(prefix) :])] = value


def saved_buffers(root: nn.Module) -> dict[str, Tensor]:
    """Map the clean names of a model's persistent buffers to them."""
    found: dict[str, Tensor] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in non_persistent_buffers(module):
                found[clean(path_below(path, name))] = buffer
    return found


# ------------------------------------------------------------------------------------------------ parts


def metadata(root: nn.Module, wrappers: Wrappers) -> dict[str, Any]:
    """Describe the parts of a rank, as FairScale's ``local_metadata_dict`` does."""
    described = []
    for path, instance in wrappers:
        params = {
            name: {
                "names": [each for each, _ in within],
                "shapes": [shape for _, shape in within],
                "numels": [shape.numel() for _, shape in within],
                "padding": padded,
            }
            for (name, within), padded in zip(_backing(instance).items(), padded_lengths(instance), strict=True)
        }
        described.append(
            {
                "fsdp_path": path,
                "params": params,
                "no_broadcast_optim_state": instance.no_broadcast_optim_state,
                "shared_param_info": instance.module.ties(),
            }
        )
    buffers = [clean(name) for name, _ in nn.Module.named_buffers(root)]
    return {"param_metadata": described, "buffer_names": buffers}


def check_local(root: nn.Module, wrappers: Wrappers, state_dict: Any, strict: bool) -> Any:
    """Return torch's named tuple of missing and unexpected keys of a rank's part of a state; raise if it cannot fit."""
    expected: dict[str, tuple[int, ...]] = {name: tuple(buffer.shape) for name, buffer in saved_buffers(root).items()}
    aliases: set[str] = set()
    for path, instance in wrappers:
        for name, within in _backing(instance).items():
            whole = sum(shape.numel() for _, shape in within)
            key = path_below(path, name)
            expected[key] = (-(-whole // instance.world_size),)
            if instance.world_size == 1 and not instance.flatten_parameters:
                # FairScale leaves these in their shape; a flat one is what fsshard 0.1.0 wrote
                given = getattr(state_dict.get(key), "shape", None)
                expected[key] = expected[key] if given == expected[key] else tuple(within[0][1])
        if not instance.flatten_parameters:
            aliases |= {path_below(path, alias) for _, alias in instance.module.ties()}
    missing = [key for key in expected if key not in state_dict]
    unexpected = [key for key in state_dict if key not in expected and key not in aliases]
    given = {key: tuple(state_dict[key].shape) for key in expected if key in state_dict}
    wrong = {key: (expected[key], shape) for key, shape in given.items() if shape != expected[key]}
    if wrong or (strict and (missing or unexpected)):
        raise StateDictError("the local state dict", missing, unexpected, wrong)
    return IncompatibleKeys(missing, unexpected)


@torch.no_grad()
def load_local(root: nn.Module, wrappers: Wrappers, state_dict: Any, whole: Callable[[Any], Any]) -> None:
    """Copy a rank's part of a state, which fits. Collective where a wrapper does not flatten.

    ``whole`` makes a context that shows a wrapper's own parameters whole.
    """
    for path, instance in wrappers:
        engine = instance.module
        engine.drop_whole()
        if engine.flat is not None and instance.flatten_parameters:
            if path_below(path, FLAT) in state_dict:
                engine.flat.copy_(state_dict[path_below(path, FLAT)])
        elif engine.flat is not None:
            with whole(instance):
                for each in engine.own():
                    part = state_dict.get(path_below(path, each.name))
                    if part is not None:
                        module, name = each.places[0]
                        value = getattr(module, name)
                        value.copy_(_gathered(instance, part, value))
    for name, buffer in saved_buffers(root).items():
        if name in state_dict:
            buffer.copy_(state_dict[name])


def _gathered(instance: Any, part: Tensor, like: Tensor) -> Tensor:
    part = part.to(like).reshape(-1)
    if instance.world_size > 1:
        parts = part.new_empty(instance.world_size * part.numel())
        dist.all_gather_single(parts, part, group=instance.process_group)
        part = parts
    return part[: like.numel()].view(like.shape)
