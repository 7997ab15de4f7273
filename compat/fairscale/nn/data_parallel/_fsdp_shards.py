"""FairScale's format of sharded states: 1-D slices padded to one length, and which parameters are in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsshard.checkpoint.interop.foreign_names import path_below
from fsshard.errors import ConfigurationError, StateDictError
from fsshard.torch_private.fsdp1 import FLAT_NAME
from fsshard.torch_private.modules import IncompatibleKeys, metadata_of, non_persistent_buffers

from ._fsdp_exports import copied
from ._fsdp_names import INNER, clean, shard
from ._fsdp_wrapper import Wrapper

__all__ = [
    "check_local",
    "consolidate",
    "export",
    "flat_name",
    "load_local",
    "lower",
    "metadata",
    "padded_lengths",
    "shapes",
]

FLAT = "flat_param_0"
"""FairScale's name of a wrapper's flat parameter."""

_LEVELS = f"{INNER}.{INNER}."  # FairScale's wrapper, torch's wrapper, the user's module


def flat_name(name: str) -> str:
    """A name as FairScale's ``named_parameters`` gives it while parameters are flat."""
    return name.replace(f"{_LEVELS}{FLAT_NAME}", f"{INNER}.{FLAT}").replace(_LEVELS, f"{INNER}._fpw_module.")


def _padding(numel: int, rank: int, world_size: int) -> int:
    width = -(-numel // world_size)
    return width - min(max(numel - width * rank, 0), width)


def _backing(instance: Wrapper) -> dict[str, list[tuple[str, torch.Size]]]:
    """The tensors of a wrapper that FairScale cuts, each with the names and shapes of what is in it."""
    own = [(each.name, each.shape) for each in instance.module.own()]
    if not own:
        return {}
    return {FLAT: own} if instance.flatten_parameters else {name: [(name, shape)] for name, shape in own}


def padded_lengths(instance: Wrapper) -> list[int]:
    """Return how many elements of each of a wrapper's tensors on this rank are padding."""
    wholes = [sum(shape.numel() for _, shape in within) for within in _backing(instance).values()]
    return [_padding(numel, instance.rank, instance.world_size) for numel in wholes]


def _instances(root: nn.Module) -> Iterator[tuple[str, Wrapper]]:
    for path, module in root.named_modules():
        if isinstance(module, Wrapper):
            yield clean(path), module


# ------------------------------------------------------------------------------------------------ state dicts


def export(instance: Wrapper, found: dict[str, Any], prefix: str) -> None:
    """Take the levels of a wrapper out of the keys below ``prefix``, and give copies; parts where that is asked."""
    start = prefix + _LEVELS
    local = not instance._return_full_state_dict
    own = {each.name for each in instance.module.own()} | {alias for _, alias in instance.module.ties()}
    for key in [key for key in found if key.startswith(start)]:
        value, name = found.pop(key), key[len(start) :]
        if local and name == FLAT_NAME:
            name = FLAT
        elif local and not instance.flatten_parameters and name in own and instance.world_size > 1:
            value, _ = shard(value, instance.rank, instance.world_size)
        found[prefix + name] = _copy(instance, value)
    versions = metadata_of(found)
    inner = f"{prefix}{INNER}"
    for key in [key for key in versions if key == inner or key.startswith(f"{inner}.")]:
        versions[path_below(prefix.rstrip("."), clean(key[len(prefix) :])).rstrip(".")] = versions.pop(key)


def _copy(instance: Wrapper, value: Any) -> Any:
    copies = copied.get()
    assert copies is not None
    if not isinstance(value, Tensor) or id(value) in copies:
        return value
    copy = value.detach()
    if instance.mixed_precision and copy.is_floating_point() and copy.dtype is instance.buffer_dtype:
        copy = copy.float()  # buffers; parameters are shown in full precision
    elsewhere = copy.device.type != instance.state_dict_device.type
    copy = copy.to(instance.state_dict_device) if elsewhere else copy.clone()
    copies.add(id(copy))
    return copy


def lower(state_dict: dict[str, Any], prefix: str) -> None:
    """Put the levels of a wrapper into the keys below ``prefix``; those that have levels already may."""
    for key in [key for key in state_dict if key.startswith(prefix)]:
        value = state_dict.pop(key)
        state_dict[prefix + _LEVELS + clean(key[len(prefix) :])] = value


def shapes(root: nn.Module) -> dict[str, torch.Size]:
    """Clean names and shapes of parameters, as they are now, and of buffers that are saved."""
    found = {clean(name): p.shape for name, p in nn.Module.named_parameters(root, remove_duplicate=False)}
    found.update({name: buffer.shape for name, buffer in _buffers(root).items()})
    return found


def _buffers(root: nn.Module) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in non_persistent_buffers(module):
                found[clean(path_below(path, name))] = buffer
    return found


# ------------------------------------------------------------------------------------------------ parts


def metadata(root: Wrapper) -> dict[str, Any]:
    """Return what the parts of a rank mean."""
    described = []
    for path, instance in _instances(root):
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


def check_local(root: Wrapper, state_dict: Any, strict: bool) -> Any:
    """See that a rank's part of a state fits.

    Returns:
        torch's named tuple of missing and unexpected keys.

    Raises:
        StateDictError: it does not.
    """
    expected: dict[str, tuple[int, ...]] = {name: tuple(buffer.shape) for name, buffer in _buffers(root).items()}
    aliases: set[str] = set()
    for path, instance in _instances(root):
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
    wrong = {
        key: (shape, tuple(state_dict[key].shape))
        for key, shape in expected.items()
        if key in state_dict and tuple(state_dict[key].shape) != shape
    }
    if wrong or (strict and (missing or unexpected)):
        raise StateDictError("the local state dict", missing, unexpected, wrong)
    return IncompatibleKeys(missing, unexpected)


@torch.no_grad()
def load_local(root: Wrapper, state_dict: Any) -> None:
    """Copy a rank's part of a state; it fits."""
    for path, instance in _instances(root):
        engine = instance.module
        engine.drop_whole()
        if instance.flatten_parameters and instance._has_params:
            if path_below(path, FLAT) in state_dict:
                engine.flat.copy_(state_dict[path_below(path, FLAT)])
        elif instance._has_params:
            with instance.summon_full_params(recurse=False):
                for each in engine.own():
                    if path_below(path, each.name) in state_dict:
                        module, name = each.places[0]
                        value = getattr(module, name)
                        value.copy_(_gathered(instance, state_dict[path_below(path, each.name)], value))
    for name, buffer in _buffers(root).items():
        if name in state_dict:
            buffer.copy_(state_dict[name])


def _gathered(instance: Wrapper, part: Tensor, like: Tensor) -> Tensor:
    part = part.to(like).reshape(-1)
    if instance.world_size > 1:
        parts = part.new_empty(instance.world_size * part.numel())
        dist.all_gather_single(parts, part, group=instance.process_group)
        part = parts
    return part[: like.numel()].view(like.shape)


def consolidate(
    shard_weights: list[dict[str, Tensor]], shard_metadata: list[dict[str, Any]], with_buffers: bool, strict: bool
) -> dict[str, Tensor]:
    """Put a whole state together from the parts of all ranks."""
    if not shard_weights or len(shard_weights) != len(shard_metadata):
        raise ConfigurationError("consolidate_shard_weights: give the weights and the metadata of each rank")
    whole: dict[str, Tensor] = {}
    aliases: list[tuple[str, str]] = []
    for index, unit in enumerate(shard_metadata[0]["param_metadata"]):
        path = unit["fsdp_path"]
        alone = unit["no_broadcast_optim_state"]  # each rank has another module there; the first's is taken
        ranks = range(1 if alone else len(shard_weights))
        for name, within in unit["params"].items():
            key = path_below(path, name)
            if key not in shard_weights[0] and not strict:
                continue
            paddings = [shard_metadata[r]["param_metadata"][index]["params"][name]["padding"] for r in ranks]
            parts = [part.reshape(-1) for part in _parts(key, shard_weights, paddings)]
            full = torch.cat([part[: part.numel() - pad] for part, pad in zip(parts, paddings, strict=True)])
            if full.numel() != sum(within["numels"]):
                wrong = {key: (f"{sum(within['numels'])} elements in all", full.numel())}
                raise StateDictError("a set of shards", mismatched=wrong)
            for each, piece, shape in zip(within["names"], full.split(within["numels"]), within["shapes"], strict=True):
                whole[path_below(path, each)] = piece.view(shape)
        # FairScale 0.4.13 copies those of the last wrapper only, without its path
        aliases += [(path_below(path, kept), path_below(path, alias)) for kept, alias in unit["shared_param_info"]]
    whole.update({alias: whole[kept] for kept, alias in aliases if kept in whole})
    if with_buffers:
        names = [name for name in shard_metadata[0]["buffer_names"] if name in shard_weights[0] or strict]
        whole.update({name: _parts(name, shard_weights, [0])[0] for name in names})
    return whole


def _parts(key: str, shard_weights: list[dict[str, Tensor]], paddings: list[int]) -> list[Tensor]:
    without = [rank for rank in range(len(paddings)) if key not in shard_weights[rank]]
    if without:
        raise StateDictError(f"the part of rank {without[0]}", missing=[key])
    return [weights[key] for weights, _ in zip(shard_weights, paddings, strict=False)]
