"""Checkpoints that FairScale wrote, for models and optimizers of fsshard; and back.

FairScale's optimizer states number the parameters, fsshard's name them. Files are the caller's: read them with
``torch.load(path, map_location="cpu", weights_only=True)``, on every rank, and hand the dicts over::

    model = fsshard.wrap(net, backend="fsdp2")
    optimizer = fsshard.build_optimizer(model, torch.optim.AdamW, lr=1e-3)
    load_model_state(model, torch.load("model.pt", map_location="cpu", weights_only=True))
    load_optimizer_state(optimizer, torch.load("optimizer.pt", map_location="cpu", weights_only=True))

FairScale need not be installed.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsshard.checks import agree
from fsshard.complex_params import public_name
from fsshard.errors import ConfigurationError, StateDictError
from fsshard.optimizer import ShardedOptimizer, constructor_arguments, groups_by_name
from fsshard.sharded import ShardedModule

from .fairscale_shards import clean_path, join_model_shards, join_optimizer_shards, names_in_metadata, same_value

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

PREFIX = "module."
State = Mapping[str, Any]
Names = Sequence[Sequence[str]]


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
    raw = model.backend.raw_state_dict()

    def prepare() -> dict[str, Any]:
        plain = _plain_names(model, state)
        model._compare(plain, raw, strict)
        return plain

    model.load_state_dict(agree(model.backend.settings.group, prepare), strict=strict)


def sharded_ddp_state(model: ShardedModule) -> dict[str, Any]:
    """The state dict that FairScale's ``ShardedDataParallel(net, ...)`` loads. Collective.

    Its FullyShardedDataParallel takes ``model.state_dict()`` as it is.
    """
    return {PREFIX + key: value for key, value in model.state_dict().items()}


def _plain_names(model: ShardedModule, state: State) -> dict[str, Any]:
    if not isinstance(state, Mapping):
        raise StateDictError(f"a {type(state).__name__} (expected a model's state dict, on every rank)")
    cleaned = {clean_path(key): value for key, value in state.items()}
    flat = [key for key in cleaned if key.rpartition(".")[2].startswith("flat_param")]
    if flat:
        raise StateDictError("a rank's flat shards (put them together with join_model_shards first)", unexpected=flat)
    expected = set(model.backend.key_order)
    plain = max(_unprefixed(cleaned), key=lambda found: len(expected & set(found)))
    keys = model.backend.keys
    given = {keys[key]: value for key, value in plain.items() if key in keys}
    return {**plain, **{key: given[name] for key, name in keys.items() if key not in plain and name in given}}


def _unprefixed(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """As it is, and without the prefix of each wrapper (DDP of ShardedDDP has two)."""
    yield state
    while state and all(key.startswith(PREFIX) or key == "_metadata" for key in state):
        state = {key.removeprefix(PREFIX): value for key, value in state.items()}
        yield state


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
            False: they start anew.

    Raises:
        ConfigurationError: ``names`` does not go with the state, or is needed.
        StateDictError: parameters that do not match, by name.
    """

    def prepare() -> dict[str, Any]:
        states = [state] if isinstance(state, Mapping) else state
        read = _Read.of(optimizer, states, names)
        if strict:
            _check_complete(optimizer, read.state)
        found = _as_this_torch(optimizer, {"state": read.state, "param_groups": _regroup(optimizer, read.groups)})
        optimizer._validate(found)
        return found

    optimizer.load_state_dict(agree(optimizer._model.backend.settings.group, prepare))


class _Read(NamedTuple):
    """Numbered states, by name."""

    state: dict[str, dict[str, Any]]
    groups: list[tuple[dict[str, Any], list[str]]]  # hyper-parameters, names

    @classmethod
    def of(cls, optimizer: ShardedOptimizer, states: Sequence[State], names: Names | None) -> _Read:
        groups, owners = [], []
        for index, each in enumerate(states if isinstance(states, Sequence) else [states]):
            _check_form(each)
            groups += each["param_groups"]
            owners += [index] * len(each["param_groups"])
        if not groups:
            raise StateDictError("an optimizer state without groups")
        named = _names_of_groups(optimizer, states, groups, names)
        found: dict[str, dict[str, Any]] = {}
        for owner, group, members in zip(owners, groups, named, strict=True):
            _check_numbers(optimizer, states[owner], group, members)
            for number, name in zip(group["params"], members, strict=True):
                item = states[owner]["state"].get(number)
                if item:  # FairScale's load_state_dict leaves {} for what another rank owns
                    found[name] = {key: _one_value(name, key, value) for key, value in item.items()}
        dropped = ("params", "param_names")
        hyper = [{key: value for key, value in group.items() if key not in dropped} for group in groups]
        return cls(found, list(zip(hyper, named, strict=True)))


def _check_form(state: object) -> None:
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= set(state):
        what = f"a {type(state).__name__} (expected an optimizer state, on every rank)"
        raise StateDictError(what, missing=["state", "param_groups"])
    lost = state.get("uncollected_local_ids")
    if lost:
        # no_broadcast_optim_state=True: gather_full_optim_state_dict kept rank 0's own part only (FairScale 0.4.13).
        raise StateDictError("an optimizer state of which FSDP saved rank 0's part only", missing=[f"flat {lost}"])


def _one_value(name: str, key: str, value: Any) -> Any:
    """FSDP keeps numbers that are tensors in a list, one per rank."""
    if not isinstance(value, list) or not value or not all(isinstance(v, Tensor) and not v.dim() for v in value):
        return value
    if any(not torch.equal(v, value[0]) for v in value):
        raise StateDictError("the optimizer state", mismatched={f"{name}: {key}": ("one value", value)})
    return value[0]


def _names_of_groups(
    optimizer: ShardedOptimizer, states: Sequence[State], groups: Sequence[State], names: Names | None
) -> list[list[str]]:
    """For each old group the names of its parameters, in the order in which it numbers them."""
    of_fsdp = "param_id_map" in states[0]
    if names is not None:
        if of_fsdp:
            _check_units(states[0]["param_id_map"], names)
            names = [list(itertools.chain.from_iterable(names))]
        if len(names) != len(groups):
            raise ConfigurationError(f"names has {len(names)} lists, the optimizer state has {len(groups)} groups")
        return [[_known(optimizer, name) for name in members] for members in names]
    if all("param_names" in group for group in groups):
        return [[_known(optimizer, name) for name in group["param_names"]] for group in groups]
    if of_fsdp:
        if len({unit for unit in states[0]["param_id_map"].values() if unit is not None}) > 1:
            raise ConfigurationError(
                "this state is of an FSDP model with several wrapped modules, which number the parameters by module; "
                "pass names=fsdp_names(model, units) with the wrapped modules' names, or names_in_metadata(metadata)"
            )
        return [list(optimizer._model.backend.entries)]  # one flat parameter is in the model's order
    if len(states) > 1:
        raise ConfigurationError("several optimizer states need names=: which parameters each group of each one had")
    mine = [group["params"] for group in groups_by_name(optimizer)]
    if len(mine) != len(groups):
        raise StateDictError("optimizer state", mismatched={"number of param_groups": (len(mine), len(groups))})
    return mine


def _known(optimizer: ShardedOptimizer, name: str) -> str:
    """``name`` as the model has it: without wrappers' prefixes, and the first one of a shared weight."""
    backend = optimizer._model.backend
    first = {slot.name: entry.name for entry in backend.entries.values() for slot in entry.slots}
    candidate = clean_path(name)
    while candidate not in first and candidate.startswith(PREFIX):
        candidate = candidate.removeprefix(PREFIX)
    return first.get(candidate, name)


def _check_units(unit_of: Mapping[int, int | None], names: Names) -> None:
    """Each wrapped module holds as many parameters as when the state was written."""
    unit_at = [index for index, unit in enumerate(names) for _ in unit]
    saved = [unit_of.get(number) for number in range(len(unit_of))]  # None: it had no state
    if len(unit_at) != len(saved) or any(got not in (None, want) for want, got in zip(unit_at, saved, strict=True)):
        counts = [saved.count(unit) for unit in sorted({unit for unit in saved if unit is not None})]
        sizes = {"parameters of each wrapped module": ([len(unit) for unit in names], counts)}
        raise StateDictError("optimizer state", mismatched=sizes)


def _check_numbers(optimizer: ShardedOptimizer, state: State, group: State, names: Sequence[str]) -> None:
    """As many numbers as names; if not, say which, as far as the shapes tell."""
    numbers = group["params"]
    if len(numbers) == len(names):
        return
    entries = optimizer._model.backend.entries
    mine = [tuple(entries[name].shape) if name in entries else None for name in names]
    saved = [_shape_of(state["state"].get(number)) for number in numbers]
    if None in saved:  # no state, no shape: what is over, counted from the end
        missing = [f"{name} {shape}" for name, shape in list(zip(names, mine, strict=True))[len(numbers) :]]
        unexpected = [f"parameter {number} of {saved[at]}" for at, number in enumerate(numbers) if at >= len(names)]
        raise StateDictError("optimizer state", missing, unexpected)
    missing, unexpected = [], []
    for kind, at, end, start, stop in difflib.SequenceMatcher(None, mine, saved, autojunk=False).get_opcodes():
        if kind != "equal":
            missing += [f"{names[i]} {mine[i]}" for i in range(at, end)]
            unexpected += [f"parameter {numbers[i]} of shape {saved[i]}" for i in range(start, stop)]
    raise StateDictError("optimizer state", missing, unexpected)


def _shape_of(item: Any) -> tuple[int, ...] | None:
    shapes = [tuple(v.shape) for v in (item or {}).values() if isinstance(v, Tensor) and v.dim()]
    return shapes[0] if shapes else None


def _check_complete(optimizer: ShardedOptimizer, state: Mapping[str, Any]) -> None:
    """A consolidation that lost ranks leaves parameters without state; so does one that never had a gradient."""
    left = [e.name for e in optimizer._entries if e.parameter.requires_grad and not state.get(e.name)]
    if state and left:
        raise StateDictError(
            "an optimizer state that some trainable parameters have no part in (consolidated on all ranks? for "
            "parameters that had never had a gradient pass strict=False)",
            missing=[f"state of {name}" for name in left],
        )


def _regroup(optimizer: ShardedOptimizer, old: Sequence[tuple[State, list[str]]]) -> list[dict[str, Any]]:
    """The old hyper-parameters, in this optimizer's groups."""
    owner = {name: hyper for hyper, names in old for name in names}
    missing, wrong, found = [], {}, []
    for index, group in enumerate(groups_by_name(optimizer)):
        missing += [name for name in group["params"] if name not in owner]
        theirs = [owner.pop(name) for name in group["params"] if name in owner]
        hyper = theirs[0] if theirs else {}
        for other in theirs[1:]:
            keys = sorted(hyper.keys() | other.keys()) if other is not hyper else []
            for key in keys:
                if not same_value(hyper.get(key), other.get(key)):
                    wrong[f"{key} of group {index}"] = ("one value", (hyper.get(key), other.get(key)))
        found.append({**hyper, "params": group["params"]})
    if missing or owner or wrong:
        raise StateDictError("optimizer state", missing, owner, wrong)
    return found


def _as_this_torch(optimizer: ShardedOptimizer, found: dict[str, Any]) -> dict[str, Any]:
    """Let the optimizer class itself bring a state of older releases to what it works with now.

    FSDP's ``gather_full_optim_state_dict`` and torch before 1.12 hold Adam's ``step`` as a number, where torch 2.13
    asserts a tensor; groups of older releases lack newer hyper-parameters. Both are mended in ``load_state_dict`` of a
    torch optimizer: here over empty parameters, so that nothing is copied.
    """
    entries, names = optimizer._model.backend.entries, [n for g in found["param_groups"] for n in g["params"]]
    stands = {name: nn.Parameter(torch.empty(0, dtype=entries[name].dtype)) for name in names}
    inner = getattr(optimizer.inner, "optim", optimizer.inner)
    arguments = {k: v for k, v in constructor_arguments(inner).items() if k not in ("fused", "capturable")}
    groups = [{"params": [stands[name] for name in group["params"]]} for group in found["param_groups"]]
    plain = optimizer.optimizer_class(groups, **arguments)
    number = {name: index for index, name in enumerate(names)}
    numbered = [{**group, "params": [number[name] for name in group["params"]]} for group in found["param_groups"]]
    plain.load_state_dict({"state": {number[n]: s for n, s in found["state"].items()}, "param_groups": numbered})
    state = {name: dict(plain.state[stand]) for name, stand in stands.items() if plain.state.get(stand)}
    groups = [
        {**new, "params": old["params"]} for new, old in zip(plain.param_groups, found["param_groups"], strict=True)
    ]
    return {"state": state, "param_groups": groups}


# ------------------------------------------------------------------------------------------------ optimizers, written


def oss_state(optimizer: ShardedOptimizer) -> dict[str, Any]:
    """The state that FairScale's OSS, or a plain torch optimizer, with the same groups loads. Collective.

    Returns:
        Parameters are numbered in the order of the groups, tensors are whole; the same on every rank.
    """
    whole = optimizer.state_dict()
    count = itertools.count()
    numbers = {name: next(count) for group in whole["param_groups"] for name in group["params"]}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in whole["param_groups"]]
    state = {numbers[name]: item for name, item in whole["state"].items()}
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def fsdp_names(model: ShardedModule, units: Sequence[str] = ()) -> list[list[str]]:
    """The parameters in the order in which FairScale's FSDP numbers them. Collective nowhere.

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
    """The state that ``get_shard_from_optim_state_dict`` of FairScale's FSDP takes. Collective.

    Args:
        optimizer: what :func:`fsshard.build_optimizer` returned, over one group with all parameters.
        names: per wrapped module of the FSDP model, from :func:`fsdp_names` or :func:`names_in_metadata`. None: only
            the whole model is wrapped.

    Raises:
        ConfigurationError: what this form cannot hold: several groups, a wrapped module of which some parameters have
            a state and some have none, or parameters with different counts of steps.
    """
    whole = optimizer.state_dict()
    units = [list(unit) for unit in names] if names is not None else fsdp_names(optimizer._model)
    if len(whole["param_groups"]) != 1:
        raise ConfigurationError(f"{len(whole['param_groups'])} param_groups: FairScale's FSDP form has one")
    order = [_known(optimizer, name) for unit in units for name in unit]
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
    """Numbers as FairScale 0.4.13 writes them: ``step`` plain, others in a list with one per rank (one serves all)."""
    found = {}
    for key, value in item.items():
        is_number = isinstance(value, Tensor) and not value.dim()
        found[key] = value if not is_number else value.item() if key == "step" else [value.clone()]
    return found
