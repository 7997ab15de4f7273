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

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fsshard.backends.whole import raw_state_dict
from fsshard.checkpoint.interop.foreign_names import PREFIX, Names, State, known_names, plain_names, whole_state
from fsshard.complex_params.slots import public_name
from fsshard.errors import ConfigurationError, StateDictError
from fsshard.model.checks import agree
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer
from fsshard.sharded.state_dict import check_keys

from .fairscale_shards import join_model_shards, join_optimizer_shards, names_in_metadata
from .trainers import by_number

__all__ = [
    "fsdp_names",
    "fsdp_optimizer_state",
    "join_model_shards",
    "join_optimizer_shards",
    "load_model_state",
    "load_optimizer_state",
    "names_in_metadata",
    "oss_state",
    "sharded_ddp_state",
]


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

    def prepare() -> dict[str, Any]:
        plain = plain_names(model, state)
        check_keys(model.backend, plain, raw, strict)
        return plain

    model.load_state_dict(agree(model.backend.settings.group, prepare), strict=strict)


def sharded_ddp_state(model: ShardedModule) -> dict[str, Any]:
    """Return the state dict that FairScale's ``ShardedDataParallel(net, ...)`` loads. Collective.

    Its FullyShardedDataParallel takes ``model.state_dict()`` as it is.
    """
    return {PREFIX + key: value for key, value in model.state_dict().items()}


# ------------------------------------------------------------------------------------------------ optimizers, read


def load_optimizer_state(
    optimizer: ShardedOptimizer,
    state: State | Sequence[State],
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

    prepared = agree(
        optimizer.model.backend.settings.group, lambda: whole_state(optimizer, state, names, strict=strict)
    )
    optimizer.load_state_dict(prepared)


# ------------------------------------------------------------------------------------------------ optimizers, written


def oss_state(optimizer: ShardedOptimizer) -> dict[str, Any]:
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
    found: dict[str, list[str]] = {name: [] for name in order if name == "" or name in units}
    for entry in model.backend.entries.values():
        homes = {_unit_of(slot.name, found) for slot in entry.slots}
        if len(homes) > 1:
            raise ConfigurationError(
                f"{entry.name!r} is shared by modules of different units ({', '.join(sorted(map(repr, homes)))}), "
                "which FairScale's FSDP cannot hold; leave one of them out of units"
            )
        found[homes.pop()].append(entry.name)
    return [names for names in found.values() if names]


def _unit_of(name: str, units: Mapping[str, Any]) -> str:
    while name:
        name = name.rpartition(".")[0]
        if name in units:
            return name
    return ""


def fsdp_optimizer_state(optimizer: ShardedOptimizer, names: Names | None = None) -> dict[str, Any]:
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
    units = [list(unit) for unit in names] if names is not None else fsdp_names(optimizer.model)
    if len(whole["param_groups"]) != 1:
        raise ConfigurationError(f"{len(whole['param_groups'])} param_groups: FairScale's FSDP form has one")
    order = known_names(optimizer, [name for unit in units for name in unit])
    held = whole["param_groups"][0]["params"]
    if sorted(order) != sorted(held):
        raise StateDictError("names", sorted(set(held) - set(order)), sorted(set(order) - set(held)))
    _check_flattenable(units, order, whole["state"])
    unit_of = [index for index, unit in enumerate(units) for _ in unit]
    stateful = [name in whole["state"] for name in order]
    return {
        "state": {n: _as_fsdp(whole["state"][name]) for n, name in enumerate(order) if stateful[n]},
        "param_groups": [{**whole["param_groups"][0], "params": list(range(len(order)))}],
        "param_id_map": {n: unit if stateful[n] else None for n, unit in enumerate(unit_of)},
        "uncollected_local_ids": [],
    }


def _check_flattenable(units: Names, order: Sequence[str], state: Mapping[str, Any]) -> None:
    known = iter(order)
    for unit in units:
        members = [next(known) for _ in unit]
        without = [name for name in members if name not in state]
        if without and len(without) < len(members):
            raise ConfigurationError(
                f"{', '.join(without)}: no state, while others in the same wrapped module have one; FSDP keeps "
                "one flat state for them all"
            )
    # flatten_optim_state_dict of FairScale 0.4.13 gives all parameters the numbers of the last one.
    steps = {float(item["step"]) for item in state.values() if "step" in item}
    if len(steps) > 1:
        raise ConfigurationError(f"parameters took different counts of steps ({sorted(steps)}); FSDP keeps one for all")


def _as_fsdp(item: State) -> dict[str, Any]:
    """Write numbers as FairScale 0.4.13 does: ``step`` plain, others in a list with one per rank (one serves all)."""
    found = {}
    for key, value in item.items():
        is_number = isinstance(value, Tensor) and not value.dim()
        found[key] = value if not is_number else value.item() if key == "step" else [value.clone()]
    return found
