"""Converts FairScale's checkpoints to models and optimizers of fsshard, and back.

FairScale's optimizer states number the parameters, fsshard's name them. Files are the caller's: read them with
``torch.load(path, map_location="cpu", weights_only=True)``, on every rank, and hand the dicts over:

    model = fsshard.wrap(net, backend="fsdp2")
    optimizer = fsshard.build_optimizer(model, torch.optim.AdamW, lr=1e-3)
    load_model_state(model, torch.load("model.pt", map_location="cpu", weights_only=True))
    load_optimizer_state(optimizer, torch.load("optimizer.pt", map_location="cpu", weights_only=True))

FairScale need not be installed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsshard.backends.whole import raw_state_dict
from fsshard.checkpoint.interop.foreign_names import (
    PREFIX,
    Names,
    State,
    clean_path,
    known_names,
    path_below,
    plain_names,
    same_value,
    whole_state,
)
from fsshard.complex_params.slots import public_name
from fsshard.errors import ConfigurationError, StateDictError
from fsshard.model.checks import agree
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer
from fsshard.sharded.state_dict import check_keys

from .trainers import by_number

# Of all ranks, or of several optimizers.
States = Sequence[State]

# What FairScale, or torch, loads.
StateDict = dict[str, Any]

# ------------------------------------------------------------------------------------------------ models


def load_model_state(model: ShardedModule, state: State, *, strict: bool = True) -> None:
    """Load ``state_dict()`` of a FairScale model: of ShardedDataParallel, or the whole one of FSDP. Collective.

    Names may have the wrappers' prefixes. Shared weights may be there under one of their names only. Nothing changes
    on any rank if the state does not fit on every one.

    Args:
        model: what :func:`fsshard.wrap` returned.
        state: the same on every rank. From ``local_state_dict()`` make it with :func:`join_model_shards`.
        strict: raise on missing and unexpected names. Another shape raises in any case.

    Raises:
        StateDictError: names every missing, unexpected or wrongly shaped tensor; on every rank.
    """
    raw = raw_state_dict(model.backend)

    def prepare() -> StateDict:
        plain = plain_names(model, state)
        check_keys(model.backend, plain, raw, strict)
        return plain

    model.load_state_dict(agree(model.backend.settings.group, prepare), strict=strict)


def sharded_ddp_state(model: ShardedModule) -> StateDict:
    """Return the state dict that FairScale's ``ShardedDataParallel(net, ...)`` loads. Collective.

    Its FullyShardedDataParallel takes ``model.state_dict()`` as it is.
    """
    return {PREFIX + key: value for key, value in model.state_dict().items()}


# ------------------------------------------------------------------------------------------------ optimizers, read


def load_optimizer_state(
    optimizer: ShardedOptimizer,
    state: State | States,
    *,
    names: Names | None = None,
    strict: bool = True,
) -> None:
    """Load a FairScale optimizer state. Collective; nothing changes on any rank if it does not fit on every one.

    It may be ``OSS.state_dict()`` (after ``consolidate_state_dict``), that of the torch optimizer in it or under DDP,
    or what FSDP's ``gather_full_optim_state_dict`` gave. Groups may be split otherwise than in ``optimizer`` where
    their hyper-parameters agree.

    Args:
        optimizer: what :func:`fsshard.build_optimizer` returned.
        state: the same on every rank; several (one OSS per dtype, say) in a list.
        names: which parameters the numbers mean: for an OSS one list of names per group (of all states in turn), for
            FSDP's one per wrapped module (:func:`fsdp_names`, :func:`names_in_metadata`). None: the state says so
            itself (``named_parameters()`` was handed over), or the order is that of this optimizer's groups.
        strict: raise where trainable parameters have no state while others do, as after an incomplete consolidation.
            False: they start again.

    Raises:
        ConfigurationError: ``names`` does not go with the state, or is needed.
        StateDictError: parameters that do not match, by name.
    """
    group = optimizer.model.backend.settings.group
    prepared = agree(group, lambda: whole_state(optimizer, state, names, strict=strict))
    optimizer.load_state_dict(prepared)


# ------------------------------------------------------------------------------------------------ optimizers, written


def oss_state(optimizer: ShardedOptimizer) -> StateDict:
    """Return the state that FairScale's OSS, or a torch optimizer, with the same groups loads. Collective.

    Returns:
        Parameters are numbered in the order of the groups, tensors are whole, in host memory; the same on every rank.
    """
    return by_number(optimizer)


def fsdp_names(model: ShardedModule, units: Sequence[str] = ()) -> list[list[str]]:
    """Return the parameters in the order in which FairScale's FSDP numbers them. Local.

    Args:
        model: what :func:`fsshard.wrap` returned.
        units: names of the modules that FullyShardedDataParallel wrapped, besides the whole model.

    Returns:
        Per wrapped module that holds parameters of its own their names; the whole model's come first.

    Raises:
        ConfigurationError: no such module, or a weight that modules in different units share, which FairScale flattens
            twice (FairScale 0.4.13).
    """
    with model.backend.bare() as module:
        order = [public_name(name) for name, _ in module.named_modules()]
    unknown = sorted(set(units) - set(order))
    if unknown:
        raise ConfigurationError(f"units: the model has no module {', '.join(map(repr, unknown))}")
    of_units: dict[str, list[str]] = {}
    for name in order:
        if name == "" or name in units:
            of_units[name] = []
    for entry in model.backend.entries.values():
        # The innermost unit around each place that holds the weight.
        homes = set()
        for slot in entry.slots:
            around = [unit for unit in of_units if not unit or slot.name.startswith(f"{unit}.")]
            homes.add(max(around, key=len))
        if len(homes) > 1:
            raise ConfigurationError(
                f"{entry.name!r} is shared by modules of different units ({', '.join(sorted(map(repr, homes)))}), "
                "which FairScale's FSDP cannot hold; leave one of them out of units"
            )
        of_units[homes.pop()].append(entry.name)
    return [names for names in of_units.values() if names]


def fsdp_optimizer_state(optimizer: ShardedOptimizer, names: Names | None = None) -> StateDict:
    """Return the state that ``get_shard_from_optim_state_dict`` of FairScale's FSDP takes. Collective.

    Args:
        optimizer: what :func:`fsshard.build_optimizer` returned, over one group with all parameters.
        names: per wrapped module of the FSDP model, from :func:`fsdp_names` or :func:`names_in_metadata`. None: only
            the whole model is wrapped.

    Raises:
        ConfigurationError: what this form cannot hold: several groups, a wrapped module of which some parameters have
            a state and some have none, or parameters with different counts of steps.
    """
    whole = optimizer.state_dict()
    units = fsdp_names(optimizer.model) if names is None else list(map(list, names))
    if len(whole["param_groups"]) != 1:
        raise ConfigurationError(f"{len(whole['param_groups'])} param_groups: FairScale's FSDP form has one")
    group = whole["param_groups"][0]
    state = whole["state"]
    units = [known_names(optimizer, unit) for unit in units]
    order = list(itertools.chain.from_iterable(units))
    expected = group["params"]
    if sorted(order) != sorted(expected):
        raise StateDictError("names", sorted(set(expected) - set(order)), sorted(set(order) - set(expected)))
    for unit in units:
        without = [name for name in unit if name not in state]
        if 0 < len(without) < len(unit):
            raise ConfigurationError(
                f"{', '.join(without)}: no state, while others in the same wrapped module have one; FSDP keeps "
                "one flat state for them all"
            )
    # flatten_optim_state_dict of FairScale 0.4.13 gives all parameters the numbers of the last one.
    steps = {float(item["step"]) for item in state.values() if "step" in item}
    if len(steps) > 1:
        raise ConfigurationError(f"parameters took different counts of steps ({sorted(steps)}); FSDP keeps one for all")
    numbered = {}
    unit_of: dict[int, int | None] = {}
    for index, unit in enumerate(units):
        for name in unit:
            number = len(unit_of)
            unit_of[number] = None
            if name in state:
                unit_of[number] = index
                numbered[number] = _as_fsdp(state[name])
    return {
        "state": numbered,
        "param_groups": [{**group, "params": list(unit_of)}],
        "param_id_map": unit_of,
        "uncollected_local_ids": [],
    }


def _as_fsdp(item: State) -> StateDict:
    """Write numbers as FairScale 0.4.13 does: ``step`` plain, others in a list with one per rank (one serves all)."""
    written = {}
    for key, value in item.items():
        if isinstance(value, Tensor) and value.dim() == 0:
            value = value.item() if key == "step" else [value.clone()]
        written[key] = value
    return written


# ------------------------------------------------------------------------------------------------ FSDP's shards
#
# ``local_state_dict()`` and ``optimizer.state_dict()`` of a rank hold flat shards; ``local_metadata_dict()``, which
# FairScale asks its users to save with them, says which parameters lie in each, in which order, and how much of the
# shard is padding.


class _Backing(NamedTuple):
    """One parameter of the engine: flat, made of several of the model's, or one as it is."""

    key: str
    names: list[str]
    shapes: list[torch.Size]
    numels: list[int]
    paddings: list[int]  # by rank


def join_model_shards(states: States, metadata: States) -> StateDict:
    """Join the model's whole state dict from ``local_state_dict()`` of all ranks. Local.

    As FairScale's ``consolidate_shard_weights``; shared weights are tied by :func:`load_model_state`.

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
    cleaned = []
    for state in states:
        cleaned.append({clean_path(key): value for key, value in state.items()})
    whole = _joined(backings, cleaned)
    flat = {backing.key for backing in backings}
    for key, value in cleaned[0].items():
        if key not in flat:
            whole[key] = value
    return whole


def consolidate(
    states: States,
    metadata: States,
    with_buffers: bool,
    strict: bool,
) -> StateDict:
    """Do as ``FullyShardedDataParallel.consolidate_shard_weights``, and tie shared weights again in every module.

    ``strict`` raises for what the metadata names and no rank has; ``with_buffers`` takes rank 0's.
    """
    backings = _backings(states, metadata, alone=True)
    if not strict:
        backings = [backing for backing in backings if backing.key in states[0]]
    whole = _joined(backings, states)
    for module in metadata[0]["param_metadata"]:
        # FairScale 0.4.13 ties those of the last wrapper only, without its path.
        path = module["fsdp_path"]
        for kept, alias in module["shared_param_info"]:
            kept = path_below(path, kept)
            if kept in whole:
                whole[path_below(path, alias)] = whole[kept]
    if not with_buffers:
        return whole
    missing = []
    for name in metadata[0]["buffer_names"]:
        if name in states[0]:
            whole[name] = states[0][name]
        elif strict:
            missing.append(name)
    if missing:
        raise StateDictError("the shards of the model", missing=missing)
    return whole


def join_optimizer_shards(states: States, metadata: States) -> StateDict:
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
    whole: dict[int, StateDict] = {}
    names: list[str] = []
    for number, backing in zip(numbers, backings, strict=True):
        of_ranks = [state["state"].get(number, {}) for state in states]
        for key in of_ranks[0]:
            values = [state.get(key) for state in of_ranks]
            for new_number, part in enumerate(_state_parts(backing, values, key), start=len(names)):
                whole.setdefault(new_number, {})[key] = part
        names += backing.names
    group = {**groups[0], "params": list(range(len(names))), "param_names": names}
    return {"state": whole, "param_groups": [group]}


def names_in_metadata(metadata: State) -> list[list[str]]:
    """Return the parameters of each wrapped module of an old model, in FairScale's order, from any rank's metadata."""
    units = []
    for index, module in enumerate(metadata["param_metadata"]):
        names = []
        for backing in _of_module(module, [metadata], index):
            names += backing.names
        # FairScale numbers no module without parameters of its own.
        if names:
            units.append(names)
    return units


def _joined(backings: Sequence[_Backing], states: States) -> StateDict:
    """Join the parameters in flat ones, which all ranks must have."""
    missing = []
    for backing in backings:
        for rank in range(len(backing.paddings)):
            if backing.key not in states[rank]:
                missing.append(f"{backing.key} of rank {rank}")
    if missing:
        raise StateDictError("the shards of the model", missing=missing)
    joined = {}
    for backing in backings:
        shards = [state[backing.key] for state in states[: len(backing.paddings)]]
        joined.update(_parts(backing, shards, backing.key))
    return joined


def _backings(
    states: States,
    metadata: States,
    alone: bool = False,
) -> list[_Backing]:
    if not states or len(states) != len(metadata):
        raise ConfigurationError(
            f"{len(states)} shards with {len(metadata)} metadata; give both of every rank, in rank order"
        )
    backings: list[_Backing] = []
    for index, module in enumerate(metadata[0]["param_metadata"]):
        backings += _of_module(module, metadata, index, alone)
    return backings


def _of_module(
    module: State,
    metadata: States,
    index: int,
    alone: bool = False,
) -> Iterator[_Backing]:
    path = module["fsdp_path"]
    if module["no_broadcast_optim_state"]:
        if not alone:
            raise ConfigurationError(
                f"the ranks of {path or 'the model'!r} held different weights (no_broadcast_optim_state=True); so they "
                "are not shards of one tensor; load each rank's file into that rank's experts"
            )
        # Each rank has another module there.
        metadata = metadata[:1]
    for key, item in module["params"].items():
        paddings = [each["param_metadata"][index]["params"][key]["padding"] for each in metadata]
        names = [path_below(path, name) for name in item["names"]]
        yield _Backing(path_below(path, key), names, list(item["shapes"]), list(item["numels"]), paddings)


def _state_parts(backing: _Backing, values: Sequence[Any], key: str) -> list[Any]:
    """Split a flat parameter's state into that of each parameter in it."""
    what = f"{backing.key}: {key}"
    if all(isinstance(value, Tensor) and value.dim() for value in values):
        return list(_parts(backing, values, what).values())
    first = values[0]
    if any(not same_value(value, first) for value in values):
        raise StateDictError("the shards of the optimizer", mismatched={what: (first, values)})
    return [first] * len(backing.names)


def _parts(backing: _Backing, tensors: Sequence[Tensor], what: str) -> dict[str, Tensor]:
    shards = []
    for tensor, padding in zip(tensors, backing.paddings, strict=True):
        flat = tensor.reshape(-1)
        shards.append(flat[: len(flat) - padding])
    whole = torch.cat(shards)
    numel = sum(backing.numels)
    if len(whole) != numel:
        raise StateDictError("the shards", mismatched={what: (numel, len(whole))})
    parts = {}
    for name, part, shape in zip(backing.names, whole.split(backing.numels), backing.shapes, strict=True):
        parts[name] = part.view(shape)
    return parts
