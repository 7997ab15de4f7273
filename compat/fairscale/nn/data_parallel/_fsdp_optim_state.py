"""FairScale's format of a whole optimizer state: by original parameters, wrapper by wrapper.

``state`` and ``param_groups`` are as torch's; parameters are counted through the wrappers, outermost first, and within
each in the order in which it flattened them. ``param_id_map`` says which flat parameter each was in (None: that one had
no state), ``uncollected_local_ids`` which of those hold the first rank's part only.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsshard.comm.agreement import per_rank
from fsshard.errors import OptimizerError, StateDictError
from fsshard.model.checks import agree
from fsshard.torch_private.fsdp1 import shard_infos_of, sharded_size

from ....errors import MisuseError
from ._fsdp_shards import shard

__all__ = ["cut", "gather"]


@dataclass(frozen=True, eq=False)
class _Unit:
    """One parameter as optimizers see it, flat or a flat part of one, and the original ones in it."""

    instance: Any  # its wrapper
    parameter: nn.Parameter
    index: int | None  # which of the wrapper's own it is, where those are not flattened
    first: int  # number of the first original parameter in it
    names: list[str]
    shapes: list[torch.Size]

    @property
    def numbers(self) -> range:
        """Number the original parameters, counted through the model."""
        return range(self.first, self.first + len(self.names))

    def gather(self, local: Tensor) -> list[Tensor]:
        """Whole tensors, by original parameter, from the ranks' parts of one. Collective."""
        engine = self.instance.module
        if self.index is None:
            return [piece.cpu().clone() for piece in engine.split(engine.gather(local))]
        if self.instance.world_size == 1:
            return [local.detach().reshape(self.shapes[0]).cpu().clone()]
        place = shard_infos_of(engine.flat)[self.index]
        flat = local.new_zeros(sharded_size(engine.flat))
        if place.in_shard:
            flat[place.offset_in_shard : place.offset_in_shard + place.numel_in_shard] = local
        return [engine.split(engine.gather(flat))[self.index].cpu().clone()]

    def cut(self, pieces: list[Tensor]) -> Tensor:
        """This rank's part of whole tensors."""
        whole = torch.cat([piece.reshape(-1) for piece in pieces])
        if self.index is None:
            return shard(whole, self.instance.rank, self.instance.world_size)
        if self.instance.world_size == 1:
            return whole.view(self.parameter.shape)
        place = shard_infos_of(self.instance.module.flat)[self.index]
        return whole[place.intra_param_start_idx : place.intra_param_end_idx + 1] if place.in_shard else whole[:0]


def _units(instances: Sequence[Any]) -> list[_Unit]:
    found: list[_Unit] = []
    first = 0
    for instance in instances:
        own, flat = instance.module.own(), instance.flatten_parameters
        blocks = [list(own)] if flat else [[each] for each in own]
        for index, (parameter, block) in enumerate(zip(instance.params, blocks, strict=True)):
            names, shapes = [each.name for each in block], [each.shape for each in block]
            found.append(_Unit(instance, parameter, None if flat else index, first, names, shapes))
            first += len(block)
    return found


def _is_tensor(value: Any) -> bool:
    """Tell a state that has the shape of its parameter from a number."""
    return isinstance(value, Tensor) and value.dim() > 0


# ------------------------------------------------------------------------------------------------ to a file


def gather(root: Any, instances: Sequence[Any], optim: Any, group: Any) -> dict[str, Any] | None:
    """Put the optimizer's whole state together on the first rank of a group; None is this rank alone."""
    units = _units(instances)
    known, mine = agree(group, lambda: _local_states(root, units, optim))
    described = [_describe(unit, state) for unit, state in zip(units, mine, strict=True)]
    tables = [described] if group is None else per_rank(group, described)
    state: dict[int, dict[str, Any]] = {}
    uncollected: list[int] = []
    for number, (unit, local) in enumerate(zip(units, mine, strict=True)):
        if unit.instance.no_broadcast_optim_state:
            uncollected.append(number)
            pieces = _first_only(unit, local)
        else:
            pieces = _whole(unit, local, [table[number] for table in tables])
        state.update({n: piece for n, piece in zip(unit.numbers, pieces, strict=True) if piece})
    if root.rank != 0:
        return None
    numbers = {n: number for number, unit in enumerate(units) for n in unit.numbers}
    groups = copy.deepcopy(known["param_groups"])
    groups[0]["params"] = list(numbers)
    return {
        **known,
        "state": state,
        "param_groups": groups,
        "param_id_map": {n: number if n in state else None for n, number in numbers.items()},
        "uncollected_local_ids": uncollected,
    }


def _local_states(root: Any, units: list[_Unit], optim: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The optimizer's state dict, and of each unit what it holds for it on this rank."""
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
    """Per key the value, or the dtype of a tensor that must be sent."""
    if not unit.parameter.numel():
        return {}  # what is counted for no elements means nothing
    return {key: value.dtype if _is_tensor(value) else _number(key, value) for key, value in state.items()}


def _number(key: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    # torch 1.12 made Adam's step a tensor; FairScale 0.4.13 writes a number
    return value.item() if key == "step" else value.detach().cpu()


def _whole(unit: _Unit, local: dict[str, Any], tables: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By original parameter its state, from the ranks' tables and parts. Collective."""
    found: list[dict[str, Any]] = [{} for _ in unit.names]
    known: dict[str, Any] = {}
    for table in tables:
        known = {**table, **known}
    for key, value in known.items():
        if isinstance(value, torch.dtype):
            part = local.get(key)
            if part is None:
                part = torch.zeros_like(unit.parameter, dtype=value)
            pieces: list[Any] = unit.gather(part.to(unit.instance.compute_device))
        else:
            each = [table[key] for table in tables if key in table]
            if not isinstance(value, Tensor) and any(other != value for other in each):
                raise OptimizerError(f"state {key!r} of {unit.names[0]!r} differs between ranks: {each}")
            pieces = [each if isinstance(value, Tensor) else copy.deepcopy(value)] * len(unit.names)
        for state, piece in zip(found, pieces, strict=True):
            state[key] = piece
    return found


def _first_only(unit: _Unit, local: dict[str, Any]) -> list[dict[str, Any]]:
    """By original parameter this rank's state, where the rank has them whole; else its part, under the first."""
    found: list[dict[str, Any]] = [{} for _ in unit.names]
    for key, value in local.items():
        if _is_tensor(value):
            value = value.detach().cpu().clone()
            whole = unit.index is None and unit.instance.world_size == 1
            pieces: list[Any] = unit.instance.module.split(value) if whole else [value]
        else:
            pieces = [_number(key, value)] * len(unit.names)
        for state, piece in zip(found, pieces, strict=False):
            state[key] = piece
    return found


# ------------------------------------------------------------------------------------------------ from a file


def cut(root: Any, instances: Sequence[Any], full: dict[str, Any]) -> dict[str, Any]:
    """This rank's part of a whole state, for ``load_state_dict`` of an optimizer over ``root.parameters()``."""
    units = _units(instances)
    _check_units(units, full)
    uncollected = set(full["uncollected_local_ids"])
    places = {id(parameter): index for index, parameter in enumerate(root.parameters())}
    state: dict[int, dict[str, Any]] = {}
    for number, unit in enumerate(units):
        found = [full["state"][n] for n in unit.numbers if n in full["state"]]
        if found:
            state[places[id(unit.parameter)]] = _part(unit, found, number in uncollected)
    groups = copy.deepcopy(full["param_groups"])
    groups[0]["params"] = list(range(len(places)))
    full.update(state=state, param_groups=groups)
    del full["param_id_map"], full["uncollected_local_ids"]
    return full


def _part(unit: _Unit, found: list[dict[str, Any]], uncollected: bool) -> dict[str, Any]:
    part: dict[str, Any] = {}
    for key, value in found[0].items():
        if _is_tensor(value):
            pieces = [state[key] for state in found if key in state]
            whole = torch.cat([piece.reshape(-1) for piece in pieces])
            part[key] = whole.view(unit.parameter.shape) if uncollected else unit.cut(pieces)
        elif isinstance(value, list) and value and isinstance(value[0], Tensor):  # one for each rank
            part[key] = value[min(unit.instance.rank, len(value) - 1)]
        elif key == "step" and isinstance(value, float):
            part[key] = torch.tensor(value)  # the tensor that it was
        else:
            part[key] = value
    return part


def _check_units(units: list[_Unit], full: Any) -> None:
    """Raise unless a state was saved from the same wrappers, and fits."""
    if not isinstance(full, dict):
        raise MisuseError(
            f"get_shard_from_optim_state_dict: expected a dict, got {type(full).__name__}; "
            "gather_full_optim_state_dict returns the state on the first rank and None on others, so send it to them "
            "before, with torch.distributed.broadcast_object_list, or load it from a file on every rank"
        )
    lacking = {"state", "param_groups", "param_id_map", "uncollected_local_ids"} - full.keys()
    if lacking:
        raise MisuseError(
            f"get_shard_from_optim_state_dict: no {', '.join(sorted(lacking))} in it; expected what "
            "gather_full_optim_state_dict returned on the first rank"
        )
    if not full["state"]:
        return
    known = full["param_id_map"]
    blocks = [{known.get(n, "missing") for n in unit.numbers} for unit in units]
    local = [block for block in blocks if block != {None}]
    same = all(len(block) == 1 and "missing" not in block for block in blocks)
    if not same or len(set.union(set(), *local)) != len(local) or len(known) != sum(len(u.names) for u in units):
        raise MisuseError(
            f"Including itself, this model has {len(units)} nested instances with {sum(len(u.names) for u in units)} "
            f"parameters; the optimizer state was saved of {len(set(known.values()))} with {len(known)}: wrap it as "
            "it was wrapped then"
        )
    wrong = {}
    for number, unit in enumerate(units):
        for n, name, shape in zip(unit.numbers, unit.names, unit.shapes, strict=True):
            for key, value in full["state"].get(n, {}).items():
                flat = number in full["uncollected_local_ids"] or unit.index is not None
                if _is_tensor(value) and not flat and value.shape != shape:
                    wrong[f"{name}.{key}"] = (tuple(shape), tuple(value.shape))
    if wrong:
        raise StateDictError("the optimizer state", mismatched=wrong)
