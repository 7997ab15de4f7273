"""Joins what each rank of FairScale's FullyShardedDataParallel saved, without FairScale.

``local_state_dict()`` and ``optimizer.state_dict()`` of a rank hold flat shards; ``local_metadata_dict()``, which
FairScale asks its users to save beside them, says which parameters lie in each, in which order, and how much of the
shard is padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsshard.checkpoint.interop.foreign_names import clean_path, path_below, same_value
from fsshard.errors import ConfigurationError, StateDictError

__all__ = ["consolidate", "join_model_shards", "join_optimizer_shards", "names_in_metadata"]

State = Mapping[str, Any]


class _Backing(NamedTuple):
    """One parameter of the engine: flat, made of several of the model's, or one as it is."""

    key: str
    names: list[str]
    shapes: list[torch.Size]
    numels: list[int]
    paddings: list[int]  # by rank


def join_model_shards(states: Sequence[State], metadata: Sequence[State]) -> dict[str, Any]:
    """Join the model's whole state dict from ``local_state_dict()`` of all ranks. Local.

    As FairScale's ``consolidate_shard_weights``, which ties shared weights again in the last wrapped module only
    (FairScale 0.4.13); here :func:`~fsshard.compat.fairscale_checkpoints.load_model_state` ties them as the model does.

    Args:
        states: ``local_state_dict()`` of every rank, in rank order. They are left as they are.
        metadata: ``local_metadata_dict()`` of every rank, in rank order.

    Returns:
        Whole tensors by the original names; buffers are rank 0's.

    Raises:
        ConfigurationError: not one metadata per state, or a module whose ranks hold different weights (MoE).
        StateDictError: a flat parameter is missing, or the shards do not add up to it.
    """
    backings = _backings(states, metadata)
    cleaned = [{clean_path(key): value for key, value in state.items()} for state in states]
    joined = _joined(backings, cleaned)
    flat = {backing.key for backing in backings}
    return {**joined, **{key: value for key, value in cleaned[0].items() if key not in flat}}


def consolidate(states: Sequence[State], metadata: Sequence[State], with_buffers: bool, strict: bool) -> dict[str, Any]:
    """Do as ``FullyShardedDataParallel.consolidate_shard_weights``: shared weights are tied again in every module.

    Args:
        states: ``local_state_dict()`` of every rank, in rank order.
        metadata: ``local_metadata_dict()`` of every rank, in rank order.
        with_buffers: take rank 0's.
        strict: raise for what the metadata names and no rank has.
    """
    backings = _backings(states, metadata, alone=True)
    whole = _joined([each for each in backings if strict or each.key in states[0]], states)
    for module in metadata[0]["param_metadata"]:
        # FairScale 0.4.13 ties those of the last wrapper only, without its path
        for kept, alias in module["shared_param_info"]:
            kept, alias = (path_below(module["fsdp_path"], name) for name in (kept, alias))
            whole.update({alias: whole[kept]} if kept in whole else {})
    if with_buffers:
        buffers = [name for name in metadata[0]["buffer_names"] if strict or name in states[0]]
        if missing := [name for name in buffers if name not in states[0]]:
            raise StateDictError("the shards of the model", missing=missing)
        whole.update((name, states[0][name]) for name in buffers)
    return whole


def join_optimizer_shards(states: Sequence[State], metadata: Sequence[State]) -> dict[str, Any]:
    """Join the whole optimizer state from ``optimizer.state_dict()`` of all ranks. Local.

    Args:
        states: the state of the torch optimizer over the sharded model's parameters, of every rank, in rank order.
        metadata: ``local_metadata_dict()`` of every rank, in rank order.

    Returns:
        A torch optimizer's state dict over whole parameters, whose one group has their names (``"param_names"``).

    Raises:
        ConfigurationError: several groups (which parameters were in which is not in the metadata), not one metadata
            per state, or a module whose ranks hold different weights (MoE).
        StateDictError: the shards do not add up.
    """
    backings = _backings(states, metadata)
    groups = states[0]["param_groups"]
    if len(groups) != 1:
        raise ConfigurationError(
            f"{len(groups)} param_groups: FairScale's FSDP saves which parameters a module holds, not which group they "
            "are in; one group is what gather_full_optim_state_dict takes as well"
        )
    numbers = groups[0]["params"]
    if len(numbers) != len(backings):
        sizes = {"number of flat parameters": (len(backings), len(numbers))}
        raise StateDictError("the shards of the optimizer", mismatched=sizes)
    whole: dict[int, dict[str, Any]] = {}
    first = 0
    for number, backing in zip(numbers, backings, strict=True):
        for key in states[0]["state"].get(number, {}):
            values = [state["state"].get(number, {}).get(key) for state in states]
            for offset, part in enumerate(_state_parts(backing, values, key)):
                whole.setdefault(first + offset, {})[key] = part
        first += len(backing.names)
    names = [name for backing in backings for name in backing.names]
    return {"state": whole, "param_groups": [{**groups[0], "params": list(range(first)), "param_names": names}]}


def names_in_metadata(metadata: State) -> list[list[str]]:
    """Return the parameters of each wrapped module of an old model, in the order of FairScale's numbers.

    Args:
        metadata: ``local_metadata_dict()`` of any rank.
    """
    units = [[name for b in _of_module(module, [metadata], i) for name in b.names] for i, module in _modules(metadata)]
    return [names for names in units if names]  # FairScale numbers no module without parameters of its own


# ------------------------------------------------------------------------------------------------ the pieces


def _modules(metadata: State) -> Iterator[tuple[int, State]]:
    if not isinstance(metadata, Mapping) or "param_metadata" not in metadata:
        raise ConfigurationError("metadata must be what FairScale's local_metadata_dict() gave")
    return enumerate(metadata["param_metadata"])


def _joined(backings: Sequence[_Backing], states: Sequence[State]) -> dict[str, Any]:
    """Join the parameters in flat ones, which all ranks must have."""
    ranks = {backing.key: range(len(backing.paddings)) for backing in backings}
    missing = [f"{key} of rank {r}" for key, every in ranks.items() for r in every if key not in states[r]]
    if missing:
        raise StateDictError("the shards of the model", missing=missing)
    joined: dict[str, Any] = {}
    for each in backings:
        joined.update(_parts(each, [states[rank][each.key] for rank in ranks[each.key]], each.key))
    return joined


def _backings(states: Sequence[State], metadata: Sequence[State], alone: bool = False) -> list[_Backing]:
    if not states or len(states) != len(metadata):
        raise ConfigurationError(
            f"{len(states)} shards with {len(metadata)} metadata; give both of every rank, in rank order"
        )
    return [backing for i, module in _modules(metadata[0]) for backing in _of_module(module, metadata, i, alone)]


def _of_module(module: State, metadata: Sequence[State], index: int, alone: bool = False) -> Iterator[_Backing]:
    path = module["fsdp_path"]
    if module["no_broadcast_optim_state"]:
        metadata = metadata[:1]  # each rank has another module there
    if module["no_broadcast_optim_state"] and not alone:
        raise ConfigurationError(
            f"the ranks of {path or 'the model'!r} held different weights (no_broadcast_optim_state=True); so they "
            "are not shards of one tensor; load each rank's file into that rank's experts"
        )
    for key, item in module["params"].items():
        paddings = [each["param_metadata"][index]["params"][key]["padding"] for each in metadata]
        names = [path_below(path, name) for name in item["names"]]
        yield _Backing(path_below(path, key), names, list(item["shapes"]), list(item["numels"]), paddings)


def _state_parts(backing: _Backing, values: Sequence[Any], key: str) -> list[Any]:
    """Split a flat parameter's state into that of each parameter in it."""
    if all(isinstance(value, Tensor) and value.dim() for value in values):
        return list(_parts(backing, values, f"{backing.key}: {key}").values())
    if any(not same_value(value, values[0]) for value in values):
        raise StateDictError("the shards of the optimizer", mismatched={f"{backing.key}: {key}": (values[0], values)})
    return [values[0] for _ in backing.names]


def _parts(backing: _Backing, shards: Sequence[Tensor], what: str) -> dict[str, Tensor]:
    kept = [shard.reshape(-1) for shard in shards]
    flat = torch.cat([shard[: shard.numel() - pad] for shard, pad in zip(kept, backing.paddings, strict=True)])
    if flat.numel() != sum(backing.numels):
        raise StateDictError("the shards", mismatched={what: (sum(backing.numels), flat.numel())})
    parts = zip(flat.split(backing.numels), backing.shapes, strict=True)
    return {name: part.view(shape) for name, (part, shape) in zip(backing.names, parts, strict=True)}
