"""FairScale's format of sharded states: 1-D slices padded to one length, and which parameters are in them.

A whole optimizer state goes by original parameters, counted through the wrappers, outermost first, and within each in
the order in which it flattened them. ``param_id_map`` says which flat parameter each was in (None: that one had no
state), ``uncollected_local_ids`` which of those hold the first rank's part only.
"""

from __future__ import annotations

import copy
from collections import defaultdict
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


# Attribute of what is wrapped, in FairScale's wrapper and in torch's.
INNER = "_fsdp_wrapped_module"
# FairScale's name of a wrapper's flat parameter.
FLAT = "flat_param_0"

# FairScale's wrapper, torch's wrapper, the user's module.
_LEVELS = f"{INNER}.{INNER}."

Shapes = list[tuple[str, torch.Size]]
State = dict[str, Any]
Mismatches = dict[str, tuple[object, object]]

# The FullyShardedDataParallels of a model, the outermost first, with their clean paths.
Wrappers = Sequence[tuple[str, Any]]


def clean(path: str) -> str:
    """Return a name without the levels of wrappers."""
    levels = (INNER, "_fpw_module")
    parts = [part for part in path.split(".") if part not in levels]
    return ".".join(parts)


def flat_name(name: str) -> str:
    """Return a name as FairScale's ``named_parameters`` gives it while parameters are flat."""
    # Before the levels themselves, which its name has too.
    name = name.replace(f"{_LEVELS}{FLAT_NAME}", f"{INNER}.{FLAT}")
    return name.replace(_LEVELS, f"{INNER}._fpw_module.")


def _shard(whole: Tensor, rank: int, world_size: int) -> Tensor:
    """Copy a rank's part of a whole tensor, padded as FairScale and FSDP1 cut it."""
    chunks = whole.detach().reshape(-1).chunk(world_size)
    length = len(chunks[0])
    if rank >= len(chunks):
        return chunks[0].new_zeros(length)
    part = chunks[rank]
    padding = length - len(part)
    if padding:
        return nn.functional.pad(part, [0, padding])
    return part.clone()


def _backing(instance: Any) -> dict[str, Shapes]:
    """Map the tensors of a wrapper that FairScale cuts to the names and shapes of what is in each."""
    own = [(each.name, each.shape) for each in instance.module.own()]
    if own and instance.flatten_parameters:
        return {FLAT: own}
    return {name: [(name, shape)] for name, shape in own}


def _numel(within: Shapes) -> int:
    return sum(shape.numel() for _, shape in within)


def padded_lengths(instance: Any) -> list[int]:
    """Return how many elements of each of a wrapper's tensors on this rank are padding."""
    lengths = []
    for within in _backing(instance).values():
        numel = _numel(within)
        width = -(-numel // instance.world_size)
        left = numel - width * instance.rank
        lengths.append(width - min(max(left, 0), width))
    return lengths


# ------------------------------------------------------------------------------------------------ state dicts


def export(
    instance: Any,
    wrappers: Wrappers,
    found: State,
    prefix: str,
    local: bool,
) -> None:
    """Take the levels of a wrapper out of a state dict's keys below ``prefix``, and copy values, or this rank's parts.

    ``wrappers`` are it and those inside.
    """
    start = prefix + _LEVELS
    # Wrappers inside have copied theirs: before that of a whole parameter was freed again.
    copied = tuple(f"{path}." for path, _ in wrappers if path)
    engine = instance.module
    own = {each.name for each in engine.own()}
    for _, alias in engine.ties():
        own.add(alias)
    shards = local and not instance.flatten_parameters and instance.world_size > 1
    for key in list(found):
        if not key.startswith(start):
            continue
        value = found.pop(key)
        name = key.removeprefix(start)
        if local and name == FLAT_NAME:
            name = FLAT
        elif shards and name in own:
            value = _shard(value, instance.rank, instance.world_size)
        if isinstance(value, Tensor) and not name.startswith(copied):
            value = _copy(instance, value)
        found[prefix + name] = value
    versions = metadata_of(found)
    inner = f"{prefix}{INNER}"
    outer = prefix.rstrip(".")
    for key in list(versions):
        if key == inner or key.startswith(f"{inner}."):
            path = path_below(outer, clean(key.removeprefix(prefix)))
            versions[path.rstrip(".")] = versions.pop(key)


def _copy(instance: Any, value: Tensor) -> Tensor:
    copy = value.detach()
    # Buffers; parameters are shown in full precision.
    if instance.mixed_precision and copy.is_floating_point() and copy.dtype is instance.buffer_dtype:
        copy = copy.float()
    if copy.device.type != instance.state_dict_device.type:
        return copy.to(instance.state_dict_device)
    return copy.clone()


def lower(state_dict: State, prefix: str) -> None:
    """Put the levels of a wrapper into the keys below ``prefix``; those that have levels already may."""
    for key in list(state_dict):
        if key.startswith(prefix):
            value = state_dict.pop(key)
            name = clean(key.removeprefix(prefix))
            state_dict[prefix + _LEVELS + name] = value


def saved_buffers(root: nn.Module) -> dict[str, Tensor]:
    """Map the clean names of a model's persistent buffers to them."""
    buffers = {}
    for path, module in root.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in non_persistent_buffers(module):
                buffers[clean(path_below(path, name))] = buffer
    return buffers


# ------------------------------------------------------------------------------------------------ parts


def metadata(root: nn.Module, wrappers: Wrappers) -> State:
    """Describe the parts of a rank, as FairScale's ``local_metadata_dict`` does."""
    described = []
    for path, instance in wrappers:
        params = {}
        lengths = iter(padded_lengths(instance))
        for name, within in _backing(instance).items():
            params[name] = {
                "names": [each for each, _ in within],
                "shapes": [shape for _, shape in within],
                "numels": [shape.numel() for _, shape in within],
                "padding": next(lengths),
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


def check_local(
    root: nn.Module,
    wrappers: Wrappers,
    state_dict: Any,
    strict: bool,
) -> Any:
    """Return torch's named tuple of missing and unexpected keys of a rank's part of a state; raise if it cannot fit."""
    shapes = {key: tuple(value.shape) for key, value in state_dict.items()}
    expected = {name: tuple(buffer.shape) for name, buffer in saved_buffers(root).items()}
    aliases = set()
    for path, instance in wrappers:
        for name, within in _backing(instance).items():
            key = path_below(path, name)
            width = -(-_numel(within) // instance.world_size)
            expected[key] = (width,)
            # FairScale leaves these in their shape; a flat one is what fsshard 0.1.0 wrote.
            is_alone = instance.world_size == 1 and not instance.flatten_parameters
            if is_alone and shapes.get(key) != expected[key]:
                _, full_shape = within[0]
                expected[key] = tuple(full_shape)
        if not instance.flatten_parameters:
            for _, alias in instance.module.ties():
                aliases.add(path_below(path, alias))
    missing = [key for key in expected if key not in shapes]
    unexpected = []
    for key in shapes:
        if key not in expected and key not in aliases:
            unexpected.append(key)
    wrong = {}
    for key, shape in expected.items():
        got = shapes.get(key, shape)
        if got != shape:
            wrong[key] = (shape, got)
    if wrong or (strict and (missing or unexpected)):
        raise StateDictError("the local state dict", missing, unexpected, wrong)
    return IncompatibleKeys(missing, unexpected)


@torch.no_grad()
def load_local(root: nn.Module, wrappers: Wrappers, state_dict: Any) -> None:
    """Copy a rank's part of a state, which fits. Collective where a wrapper does not flatten."""
    for path, instance in wrappers:
        engine = instance.module
        engine.drop_whole()
        if engine.flat is None:
            continue
        if instance.flatten_parameters:
            key = path_below(path, FLAT)
            if key in state_dict:
                engine.flat.copy_(state_dict[key])
            continue
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
        engine: Any = self.instance.module
        single = self.instance.world_size == 1
        keeps_parts = self.instance.no_broadcast_optim_state
        whole: list[Tensor]
        # This rank's, whole if it has all, else under the first.
        if keeps_parts and not (single and self.index is None):
            return [local]
        if self.index is None:
            if not keeps_parts:
                local = engine.gather(local)
            whole = engine.split(local)
            return whole
        if single:
            return [local.reshape(self.shapes[0])]
        place = shard_infos_of(engine.flat)[self.index]
        flat = local.new_zeros(sharded_size(engine.flat))
        if place.in_shard:
            start = place.offset_in_shard
            flat[start : start + place.numel_in_shard] = local
        whole = engine.split(engine.gather(flat))
        return [whole[self.index]]

    def cut(self, pieces: list[Tensor], uncollected: bool) -> Tensor:
        """Return this rank's part of whole tensors."""
        instance = self.instance
        flat = [piece.reshape(-1) for piece in pieces]
        whole = torch.cat(flat)
        if uncollected or (self.index is not None and instance.world_size == 1):
            return whole.view(self.parameter.shape)
        if self.index is None:
            return _shard(whole, instance.rank, instance.world_size)
        place = shard_infos_of(instance.module.flat)[self.index]
        if place.in_shard:
            return whole[place.intra_param_start_idx : place.intra_param_end_idx + 1]
        return whole[:0]


def _units(instances: Sequence[Any]) -> list[_Unit]:
    units = []
    first = 0
    for instance in instances:
        flat = instance.flatten_parameters
        own = instance.module.own()
        blocks = [own] if flat else [[each] for each in own]
        pairs = zip(instance.params, blocks, strict=True)
        for index, (parameter, block) in enumerate(pairs):
            unit = _Unit(
                instance,
                parameter,
                None if flat else index,
                range(first, first + len(block)),
                [each.name for each in block],
                [each.shape for each in block],
            )
            units.append(unit)
            first += len(block)
    return units


def _is_tensor(value: Any) -> bool:
    """Tell a state that has the shape of its parameter from a number."""
    return isinstance(value, Tensor) and value.dim() > 0


def gather(
    root: Any,
    instances: Sequence[Any],
    optim: Any,
    group: Any,
) -> State | None:
    """Put the optimizer's whole state together on the first rank of a group; None is this rank alone."""
    units = _units(instances)
    states = agree(group, lambda: _local_states(root, units, optim))
    state_dict, local_states = states
    described = [_describe(unit, local) for unit, local in zip(units, local_states, strict=True)]
    tables = [described] if group is None else per_rank(group, described)
    state: dict[int, State] = {}
    unit_of = {}
    uncollected = []
    for number, (unit, local) in enumerate(zip(units, local_states, strict=True)):
        if unit.instance.no_broadcast_optim_state:
            uncollected.append(number)
            of_ranks = [described[number]]
        else:
            of_ranks = [table[number] for table in tables]
        for n in unit.numbers:
            state[n] = {}
        for key, values in _values_by_key(of_ranks).items():
            pieces = _pieces(unit, key, values, local.get(key))
            for n, piece in zip(unit.numbers, pieces, strict=False):
                state[n][key] = piece
        for n in unit.numbers:
            unit_of[n] = number if state[n] else None
    if root.rank != 0:
        return None
    groups = copy.deepcopy(state_dict["param_groups"])
    groups[0]["params"] = list(state)
    return {
        **state_dict,
        "state": {n: item for n, item in state.items() if item},
        "param_groups": groups,
        "param_id_map": unit_of,
        "uncollected_local_ids": uncollected,
    }


def _values_by_key(states: Sequence[State]) -> dict[str, list[Any]]:
    """Return what ranks have under each key; a rank that has no part of a parameter has no state of it either."""
    values = defaultdict(list)
    for state in states:
        for key, value in state.items():
            values[key].append(value)
    return values


def _pieces(
    unit: _Unit,
    key: str,
    values: list[Any],
    local: Tensor | None,
) -> Sequence[Any]:
    """Return one key's whole values, by original parameter. Collective for tensors."""
    first = values[0]
    if isinstance(first, Tensor) and not unit.instance.no_broadcast_optim_state:
        # FairScale 0.4.13 reads a list of one for each rank.
        return [values] * len(unit.numbers)
    if isinstance(first, torch.dtype):
        if local is None:
            local = torch.zeros_like(unit.parameter, dtype=first)
        local = local.detach().to(unit.instance.compute_device)
        whole = unit.gather(local)
        return [piece.cpu().clone() for piece in whole]
    if any(other != first for other in values[1:]):
        name = unit.names[0]
        raise OptimizerError(f"state {key!r} of {name!r} differs between ranks: {values}")
    return [copy.deepcopy(first)] * len(unit.numbers)


def _local_states(root: Any, units: list[_Unit], optim: Any) -> tuple[State, list[State]]:
    """Return the optimizer's state dict, and of each unit what it holds for it on this rank."""
    state_dict = optim.state_dict()
    if len(state_dict["param_groups"]) != 1:
        raise MisuseError(f"Param groups are not supported: expected 1, got {len(state_dict['param_groups'])}")
    parameters = []
    for group in getattr(optim, "param_groups", None) or [{"params": root.parameters()}]:
        parameters += group["params"]
    (saved_group,) = state_dict["param_groups"]
    own = {id(unit.parameter) for unit in units}
    places = {id(parameter): index for index, parameter in enumerate(parameters)}
    strangers = []
    for index, parameter in enumerate(parameters):
        if id(parameter) not in own:
            strangers.append(index)
    wrong = ""
    if strangers:
        wrong = f"parameter {strangers[0]} of the optimizer"
    elif len(parameters) != len(saved_group["params"]):
        wrong = "one of the optimizer's parameters"
    if wrong:
        raise OptimizerError(
            f"gather_full_optim_state_dict: {wrong} is not a parameter of this model; build the optimizer over "
            "model.parameters() after wrapping"
        )
    states = []
    for unit in units:
        place = places.get(id(unit.parameter))
        state = dict(state_dict["state"].get(place, {}))
        states.append(state)
        shape = unit.parameter.shape
        for key, value in state.items():
            if _is_tensor(value) and value.shape != shape:
                raise OptimizerError(
                    f"state {key!r} of {unit.names[0]!r} has shape {tuple(value.shape)}, its part of the parameter "
                    f"{tuple(shape)}: it cannot be put together from the ranks' parts"
                )
    return state_dict, states


def _describe(unit: _Unit, state: State) -> State:
    """Map each key to its value, or to the dtype of a tensor that must be sent."""
    description: State = {}
    # Counted for no elements it means nothing.
    if not unit.parameter.numel():
        return description
    for key, value in state.items():
        if _is_tensor(value):
            value = value.dtype
        elif isinstance(value, Tensor):
            # torch 1.12 made Adam's step a tensor; FairScale 0.4.13 writes a number.
            value = value.item() if key == "step" else value.detach().cpu()
        description[key] = value
    return description


def cut(
    root: Any,
    instances: Sequence[Any],
    full: State,
) -> State:
    """Return this rank's part of a whole state, for ``load_state_dict`` of an optimizer over ``root.parameters()``."""
    units = _units(instances)
    _check_units(units, full)
    places = {}
    for index, parameter in enumerate(root.parameters()):
        places[id(parameter)] = index
    state = {}
    for number, unit in enumerate(units):
        items = [full["state"][n] for n in unit.numbers if n in full["state"]]
        if not items:
            continue
        part = {}
        for key, value in items[0].items():
            if _is_tensor(value):
                pieces = [item[key] for item in items if key in item]
                value = unit.cut(pieces, number in full["uncollected_local_ids"])
            elif isinstance(value, list) and value and isinstance(value[0], Tensor):
                # One for each rank.
                last = len(value) - 1
                rank = min(unit.instance.rank, last)
                value = value[rank]
            elif key == "step" and isinstance(value, float):
                # The step is a tensor again.
                value = torch.tensor(value)
            part[key] = value
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
        got = type(full).__name__
        if isinstance(full, dict):
            got = ", ".join(map(repr, full))
        raise MisuseError(
            f"get_shard_from_optim_state_dict: expected a dict with {', '.join(sorted(expected))}, got {got}; "
            "gather_full_optim_state_dict returns it on the first rank and None on others, so send it to them before, "
            "with torch.distributed.broadcast_object_list, or load it from a file on every rank"
        )
    if not full["state"]:
        return
    unit_of = full["param_id_map"]
    if not _same_units(units, unit_of):
        count = sum(len(unit.names) for unit in units)
        raise MisuseError(
            f"Including itself, this model has {len(units)} nested instances with {count} parameters; the optimizer "
            f"state was saved of {len(set(unit_of.values()))} with {len(unit_of)}: wrap it as it was wrapped then"
        )
    wrong = {}
    for number, unit in enumerate(units):
        if unit.index is not None or number in full["uncollected_local_ids"]:
            continue
        for index, n in enumerate(unit.numbers):
            shape = unit.shapes[index]
            for key, value in full["state"].get(n, {}).items():
                if _is_tensor(value) and value.shape != shape:
                    name = f"{unit.names[index]}.{key}"
                    wrong[name] = (tuple(shape), tuple(value.shape))
    if wrong:
        raise StateDictError("the optimizer state", mismatched=wrong)


def _same_units(units: Sequence[_Unit], unit_of: dict[int, int | None]) -> bool:
    """Return whether each unit has the parameters of one old unit, or of none, and no two those of the same."""
    count = 0
    saved: list[int | None] = []
    for unit in units:
        count += len(unit.names)
        if any(n not in unit_of for n in unit.numbers):
            return False
        olds = {unit_of[n] for n in unit.numbers}
        if len(olds) > 1:
            return False
        saved += olds - {None}
    if len(set(saved)) < len(saved):
        return False
    return len(unit_of) == count
