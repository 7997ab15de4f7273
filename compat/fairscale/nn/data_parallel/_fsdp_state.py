"""FairScale's format of sharded states: 1-D slices padded to one length, and which parameters are in them.

A whole optimizer state goes by original parameters, counted through the wrappers, outermost first, and within each in
the order in which it flattened them. ``param_id_map`` says which flat parameter each was in (None: that one had no
state), ``uncollected_local_ids`` which of those hold the first rank's part only.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsshard.checkpoint.interop.foreign_names import path_below
from fsshard.comm.agreement import per_rank
from fsshard.errors import FsshardError, OptimizerError, StateDictError, UnsupportedByBackend
from fsshard.model.checks import agree
from fsshard.torch_private.fsdp1 import FLAT_NAME, shard_infos_of, sharded_size
from fsshard.torch_private.modules import IncompatibleKeys, metadata_of, non_persistent_buffers

from ....errors import MisuseError


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


def _shard(whole: Tensor, rank: int, world_size: int) -> Tensor:
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
            value = _shard(value, instance.rank, instance.world_size)
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
def load_local(root: nn.Module, wrappers: Wrappers, state_dict: Any) -> None:
    """Copy a rank's part of a state, which fits. Collective where a wrapper does not flatten."""
    for path, instance in wrappers:
        engine = instance.module
        engine.drop_whole()
        if engine.flat is not None and instance.flatten_parameters:
            if path_below(path, FLAT) in state_dict:
                engine.flat.copy_(state_dict[path_below(path, FLAT)])
        elif engine.flat is not None:
            with instance.summon_full_params(recurse=False):
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


# ------------------------------------------------------------------------------------------------ optimizer states


@dataclass(frozen=True, eq=False)
class _Unit:
    """One parameter as optimizers see it, flat or a flat part of one, and the original ones in it."""

    instance: Any  # its wrapper
    parameter: nn.Parameter
    index: int | None  # which of the wrapper's own it is, where those are not flattened
    numbers: range  # of the original parameters, counted through the model
    names: list[str]
    shapes: list[torch.Size]

    def gather(self, local: Tensor) -> list[Tensor]:
        """Return whole tensors, by original parameter, from the ranks' parts of one. Collective."""
        engine, single = self.instance.module, self.instance.world_size == 1
        if self.instance.no_broadcast_optim_state:  # this rank's, whole if it has all, else under the first
            return engine.split(local) if single and self.index is None else [local]
        if self.index is None:
            return engine.split(engine.gather(local))  # type: ignore[no-any-return]
        if single:
            return [local.reshape(self.shapes[0])]
        place = shard_infos_of(engine.flat)[self.index]
        flat = local.new_zeros(sharded_size(engine.flat))
        if place.in_shard:
            flat[place.offset_in_shard : place.offset_in_shard + place.numel_in_shard] = local
        return [engine.split(engine.gather(flat))[self.index]]

    def cut(self, pieces: list[Tensor], uncollected: bool) -> Tensor:
        """Return this rank's part of whole tensors."""
        whole = torch.cat([piece.reshape(-1) for piece in pieces])
        if uncollected or (self.index is not None and self.instance.world_size == 1):
            return whole.view(self.parameter.shape)
        if self.index is None:
            return _shard(whole, self.instance.rank, self.instance.world_size)
        place = shard_infos_of(self.instance.module.flat)[self.index]
        return whole[place.intra_param_start_idx : place.intra_param_end_idx + 1] if place.in_shard else whole[:0]


def _units(instances: Sequence[Any]) -> list[_Unit]:
    found: list[_Unit] = []
    first = 0
    for instance in instances:
        own, flat = instance.module.own(), instance.flatten_parameters
        for index, (parameter, block) in enumerate(
            zip(instance.params, [own] if flat else [[each] for each in own], strict=True)
        ):
            numbers = range(first, first := first + len(block))
            names, shapes = [each.name for each in block], [each.shape for each in block]
            found.append(_Unit(instance, parameter, None if flat else index, numbers, names, shapes))
    return found


def _is_tensor(value: Any) -> bool:
    """Tell a state that has the shape of its parameter from a number."""
    return isinstance(value, Tensor) and value.dim() > 0


def gather(root: Any, instances: Sequence[Any], optim: Any, group: Any) -> dict[str, Any] | None:
    """Put the optimizer's whole state together on the first rank of a group; None is this rank alone."""
    units = _units(instances)
    known, mine = agree(group, lambda: _local_states(root, units, optim))
    described = [_describe(unit, state) for unit, state in zip(units, mine, strict=True)]
    tables = [described] if group is None else per_rank(group, described)
    state: dict[int, dict[str, Any]] = {n: {} for unit in units for n in unit.numbers}
    for number, (unit, local) in enumerate(zip(units, mine, strict=True)):
        # a rank that has no part of a parameter has no state of it either
        alone = unit.instance.no_broadcast_optim_state
        of_ranks = [table[number] for table in ([described] if alone else tables)]
        for key in dict.fromkeys(key for table in of_ranks for key in table):
            each = [table[key] for table in of_ranks if key in table]
            value = each[0]
            if isinstance(value, Tensor) and not alone:  # FairScale 0.4.13 reads a list of one for each rank
                pieces: list[Any] = [each] * len(unit.numbers)
            elif isinstance(value, torch.dtype):
                part = local[key] if key in local else torch.zeros_like(unit.parameter, dtype=value)
                pieces = [p.cpu().clone() for p in unit.gather(part.detach().to(unit.instance.compute_device))]
            elif any(other != value for other in each[1:]):
                raise OptimizerError(f"state {key!r} of {unit.names[0]!r} differs between ranks: {each}")
            else:
                pieces = [copy.deepcopy(value)] * len(unit.numbers)
            for n, piece in zip(unit.numbers, pieces, strict=False):
                state[n][key] = piece
    if root.rank != 0:
        return None
    groups = copy.deepcopy(known["param_groups"])
    groups[0]["params"] = list(state)
    return {
        **known,
        "state": {n: found for n, found in state.items() if found},
        "param_groups": groups,
        "param_id_map": {n: number if state[n] else None for number, unit in enumerate(units) for n in unit.numbers},
        "uncollected_local_ids": [i for i, unit in enumerate(units) if unit.instance.no_broadcast_optim_state],
    }


def _local_states(root: Any, units: list[_Unit], optim: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the optimizer's state dict, and of each unit what it holds for it on this rank."""
    state_dict = optim.state_dict()
    if len(state_dict["param_groups"]) != 1:
        raise MisuseError(f"Param groups are not supported: expected 1, got {len(state_dict['param_groups'])}")
    groups = getattr(optim, "param_groups", None)
    held = [p for g in groups for p in g["params"]] if groups else list(root.parameters())
    ours = {id(unit.parameter) for unit in units}
    strangers = [index for index, parameter in enumerate(held) if id(parameter) not in ours]
    if strangers or len(held) != len(state_dict["param_groups"][0]["params"]):
        wrong = f"parameter {strangers[0]} of the optimizer" if strangers else "one of the optimizer's parameters"
        raise OptimizerError(
            f"gather_full_optim_state_dict: {wrong} is not a parameter of this model; build the optimizer over "
            "model.parameters() after wrapping"
        )
    places = {id(parameter): index for index, parameter in enumerate(held)}
    states = [dict(state_dict["state"].get(places.get(id(unit.parameter)), {})) for unit in units]
    for unit, state in zip(units, states, strict=True):
        for key, value in state.items():
            if _is_tensor(value) and value.shape != unit.parameter.shape:
                raise OptimizerError(
                    f"state {key!r} of {unit.names[0]!r} has shape {tuple(value.shape)}, its part of the parameter "
                    f"{tuple(unit.parameter.shape)}: it cannot be put together from the ranks' parts"
                )
    return state_dict, states


def _describe(unit: _Unit, state: dict[str, Any]) -> dict[str, Any]:
    """Map each key to its value, or to the dtype of a tensor that must be sent."""
    found = {}
    for key, value in state.items() if unit.parameter.numel() else ():  # counted for no elements it means nothing
        if _is_tensor(value):
            found[key] = value.dtype
        elif isinstance(value, Tensor):  # torch 1.12 made Adam's step a tensor; FairScale 0.4.13 writes a number
            found[key] = value.item() if key == "step" else value.detach().cpu()
        else:
            found[key] = value
    return found


def cut(root: Any, instances: Sequence[Any], full: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's part of a whole state, for ``load_state_dict`` of an optimizer over ``root.parameters()``."""
    units = _units(instances)
    _check_units(units, full)
    places = {id(parameter): index for index, parameter in enumerate(root.parameters())}
    state: dict[int, dict[str, Any]] = {}
    for number, unit in enumerate(units):
        found = [full["state"][n] for n in unit.numbers if n in full["state"]]
        part: dict[str, Any] = {}
        for key, value in found[0].items() if found else ():
            if _is_tensor(value):
                pieces = [each[key] for each in found if key in each]
                part[key] = unit.cut(pieces, number in full["uncollected_local_ids"])
            elif isinstance(value, list) and value and isinstance(value[0], Tensor):  # one for each rank
                part[key] = value[min(unit.instance.rank, len(value) - 1)]
            else:  # the step is a tensor again
                part[key] = torch.tensor(value) if key == "step" and isinstance(value, float) else value
        if found:
            state[places[id(unit.parameter)]] = part
    groups = copy.deepcopy(full["param_groups"])
    groups[0]["params"] = list(range(len(places)))
    full.update(state=state, param_groups=groups)
    del full["param_id_map"], full["uncollected_local_ids"]
    return full


def _check_units(units: list[_Unit], full: Any) -> None:
    """Raise unless a state was saved from the same wrappers, and fits."""
    expected = {"state", "param_groups", "param_id_map", "uncollected_local_ids"}
    if not isinstance(full, dict) or not expected <= full.keys():
        raise MisuseError(
            f"get_shard_from_optim_state_dict: expected a dict with {', '.join(sorted(expected))}, got "
            f"{', '.join(map(repr, full)) if isinstance(full, dict) else type(full).__name__}; "
            "gather_full_optim_state_dict returns it on the first rank and None on others, so send it to them before, "
            "with torch.distributed.broadcast_object_list, or load it from a file on every rank"
        )
    if not full["state"]:
        return
    known, count = full["param_id_map"], sum(len(unit.names) for unit in units)
    blocks = [{known.get(n, "missing") for n in unit.numbers} for unit in units]
    local = [block for block in blocks if block != {None}]
    same = all(len(block) == 1 and "missing" not in block for block in blocks)
    if not same or len(set.union(set(), *local)) != len(local) or len(known) != count:
        raise MisuseError(
            f"Including itself, this model has {len(units)} nested instances with {count} parameters; the optimizer "
            f"state was saved of {len(set(known.values()))} with {len(known)}: wrap it as it was wrapped then"
        )
    wrong = {
        f"{name}.{key}": (tuple(shape), tuple(value.shape))
        for number, unit in enumerate(units)
        if unit.index is None and number not in full["uncollected_local_ids"]
        for n, name, shape in zip(unit.numbers, unit.names, unit.shapes, strict=True)
        for key, value in full["state"].get(n, {}).items()
        if _is_tensor(value) and value.shape != shape
    }
    if wrong:
        raise StateDictError("the optimizer state", mismatched=wrong)
