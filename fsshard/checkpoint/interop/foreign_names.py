"""Maps the names in other programs' state dicts, and the numbers in their optimizers', to names of the model."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsshard.errors import ConfigurationError, StateDictError
from fsshard.oss.partitioned import local_optimizer
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer, constructor_arguments, groups_by_name
from fsshard.sharded.state_dict import NEURALOP_ARGUMENTS
from fsshard.torch_private.fsdp1 import WRAPPED
from fsshard.torch_private.modules import CHECKPOINTED, COMPILED

PREFIX = "module."  # before every name of DistributedDataParallel, DataParallel and FairScale's ShardedDataParallel
WRAPPERS = frozenset({WRAPPED, "_fpw_module", COMPILED, CHECKPOINTED})
"""Parts of names that FSDP1, FairScale's FSDP, torch.compile and activation checkpointing put in."""

State = Mapping[str, Any]
Names = Sequence[Sequence[str]]


def clean_path(path: str) -> str:
    """Return a name without the parts that wrappers put into it."""
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)


def path_below(path: str, name: str) -> str:
    """Return the name in the whole model of what a module at ``path`` calls ``name``."""
    return f"{path}.{name}" if path else name


def plain_names(model: ShardedModule, state: State) -> dict[str, Any]:
    """Return a model's state dict without the prefixes of wrappers; a shared weight under all its names.

    Raises:
        StateDictError: it is none, or a rank's flat shards.
    """
    if not isinstance(state, Mapping):
        raise StateDictError(f"a {type(state).__name__} (expected a model's state dict, on every rank)")
    flat = [clean_path(key) for key in state if key.rpartition(".")[2].startswith("flat_param")]
    if flat:
        raise StateDictError("a rank's flat shards (put them together with join_model_shards first)", unexpected=flat)
    keys = model.backend.keys
    _, plain = best_names(model.backend.key_order, state)
    given = {keys[key]: value for key, value in plain.items() if key in keys}
    return {**plain, **{key: given[name] for key, name in keys.items() if key not in plain and name in given}}


def best_names(expected: Iterable[str], state: State) -> tuple[str, dict[str, Any]]:
    """Return a state dict with as much of what its names begin with alike taken off as fits a model best, and that.

    Where the model's names begin alike and the state dict's do not, that is put before them.
    """
    expected = set(expected)
    variants = list(unprefixed(state, ""))
    first = {key.partition(".")[0] for key in expected}
    if len(first) == 1:
        variants.append(("", {f"{min(first)}.{key}": value for key, value in variants[0][1].items()}))
    return max(variants, key=lambda each: len(expected & each[1].keys()))


def unprefixed(state: State, prefix: str = PREFIX) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what was taken off the names of a state dict, and the rest: ever more (DDP of ShardedDDP has two).

    Taken off is ``prefix``, or if that is empty whatever all names begin with.
    """
    state = {clean_path(key): value for key, value in state.items()}
    taken = ""
    yield taken, state
    while True:
        names = [key for key in state if key != NEURALOP_ARGUMENTS]
        common = {key.partition(".")[0] + "." for key in names}
        if len(common) != 1 or (prefix or min(common)) != min(common) or not all("." in key for key in names):
            return
        taken += min(common)
        state = {key.removeprefix(min(common)): value for key, value in state.items()}
        yield taken, state


def whole_state(optimizer: ShardedOptimizer, states: Any, names: Names | None, *, strict: bool) -> dict[str, Any]:
    """Return states of optimizers that number their parameters as one by name, in this optimizer's groups.

    ``names`` are those of each group where the states do not say; ``strict`` raises where a part has no state.
    """
    states = states if isinstance(states, Sequence) else [states]
    for each in states:
        _check_form(each)
    groups = [(each["state"], group) for each in states for group in each["param_groups"]]
    if not groups:
        raise StateDictError("an optimizer state without groups")
    named = _names_of_groups(optimizer, states, [group for _, group in groups], names)
    by_name: dict[str, dict[str, Any]] = {}
    for index, ((state, group), members) in enumerate(zip(groups, named, strict=True)):
        if len(members) != len(group["params"]):
            counts = {f"parameters of group {index}": (len(members), len(group["params"]))}
            raise StateDictError("optimizer state", mismatched=counts)
        for number, name in zip(group["params"], members, strict=True):
            item = state.get(number)
            if item:  # FairScale's load_state_dict leaves {} for what another rank owns
                by_name[name] = {key: _one_value(name, key, value) for key, value in item.items()}
    lost = [number for each in states for number, item in each["state"].items() if item]
    if lost and not by_name:
        raise StateDictError("optimizer state of which no group has the parameters", unexpected=map(str, lost))
    if strict:
        _check_complete(optimizer, by_name)
    hyper = [{k: v for k, v in group.items() if k not in ("params", "param_names")} for _, group in groups]
    regrouped = _regroup(optimizer, list(zip(hyper, named, strict=True)))
    whole = _as_this_torch(optimizer, {"state": by_name, "param_groups": regrouped})
    optimizer.check_state_dict(whole)
    return whole


def _check_form(state: object) -> None:
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= set(state):
        what = f"a {type(state).__name__} (expected an optimizer state, on every rank)"
        raise StateDictError(what, missing=["state", "param_groups"])
    lost = state.get("uncollected_local_ids")
    if lost:
        # no_broadcast_optim_state=True: gather_full_optim_state_dict kept rank 0's own part only (FairScale 0.4.13).
        raise StateDictError("an optimizer state of which FSDP saved rank 0's part only", missing=[f"flat {lost}"])


def _one_value(name: str, key: str, value: Any) -> Any:
    """Return the one number of a list in which FairScale's FSDP keeps it for each rank; all else as it is."""
    if not isinstance(value, list) or not value or not all(isinstance(v, Tensor) and not v.dim() for v in value):
        return value
    if any(not torch.equal(v, value[0]) for v in value):
        raise StateDictError("the optimizer state", mismatched={f"{name}: {key}": ("one value", value)})
    return value[0]


def _names_of_groups(
    optimizer: ShardedOptimizer, states: Sequence[State], groups: Sequence[State], names: Names | None
) -> list[list[str]]:
    """Return for each old group the names of its parameters, in the order in which it numbers them."""
    of_fsdp = "param_id_map" in states[0]
    if names is not None:
        if of_fsdp:
            _check_units(states[0]["param_id_map"], names)
            names = [list(itertools.chain.from_iterable(names))]
        if len(names) != len(groups):
            raise ConfigurationError(f"names has {len(names)} lists, the optimizer state has {len(groups)} groups")
        return [known_names(optimizer, members) for members in names]
    told = [group.get("param_names", group["params"]) for group in groups]
    if all(isinstance(name, str) for members in told for name in members):
        return [known_names(optimizer, members) for members in told]
    if of_fsdp:
        if len({unit for unit in states[0]["param_id_map"].values() if unit is not None}) > 1:
            raise ConfigurationError(
                "this state is of an FSDP model with several wrapped modules, which number the parameters by module; "
                "pass names=fsdp_names(model, units) with the wrapped modules' names, or names_in_metadata(metadata)"
            )
        return [list(optimizer.model.backend.entries)]  # one flat parameter is in the model's order
    if len(states) > 1:
        raise ConfigurationError("several optimizer states need names=: which parameters each group of each one had")
    mine = [group["params"] for group in groups_by_name(optimizer)]
    if len(mine) != len(groups):
        raise StateDictError("optimizer state", mismatched={"number of param_groups": (len(mine), len(groups))})
    return mine


def known_names(optimizer: ShardedOptimizer, names: Iterable[str]) -> list[str]:
    """Return names as the model has them: without wrappers' prefixes, and the first one of a shared weight."""
    first = {slot.name: entry.name for entry in optimizer.model.backend.entries.values() for slot in entry.slots}

    def known(name: str) -> str:
        candidate = clean_path(name)
        while candidate not in first and candidate.startswith(PREFIX):
            candidate = candidate.removeprefix(PREFIX)
        return first.get(candidate, name)

    return [known(name) for name in names]


def _check_units(unit_of: Mapping[int, int | None], names: Names) -> None:
    """Check that each wrapped module holds as many parameters as when the state was written."""
    unit_at = [index for index, unit in enumerate(names) for _ in unit]
    saved = [unit_of.get(number) for number in range(len(unit_of))]  # None: it had no state
    if len(unit_at) != len(saved) or any(got not in (None, want) for want, got in zip(unit_at, saved, strict=True)):
        counts = [saved.count(unit) for unit in sorted({unit for unit in saved if unit is not None})]
        sizes = {"parameters of each wrapped module": ([len(unit) for unit in names], counts)}
        raise StateDictError("optimizer state", mismatched=sizes)


def _check_complete(optimizer: ShardedOptimizer, state: Mapping[str, Any]) -> None:
    """Raise where trainable parameters have no state: a consolidation lost ranks, or they never had a gradient."""
    left = [e.name for e in optimizer.entries if e.parameter.requires_grad and not state.get(e.name)]
    if state and left:
        raise StateDictError(
            "an optimizer state that some trainable parameters have no part in (consolidated on all ranks? for "
            "parameters that had never had a gradient pass strict=False)",
            missing=[f"state of {name}" for name in left],
        )


def _regroup(optimizer: ShardedOptimizer, old: Sequence[tuple[State, list[str]]]) -> list[dict[str, Any]]:
    """Put the old hyper-parameters into this optimizer's groups."""
    owner = {name: hyper for hyper, names in old for name in names}
    missing, wrong, regrouped = [], {}, []
    for index, group in enumerate(groups_by_name(optimizer)):
        missing += [name for name in group["params"] if name not in owner]
        theirs = [owner.pop(name) for name in group["params"] if name in owner]
        hyper = theirs[0] if theirs else {}
        for other in theirs[1:]:
            for key in sorted(hyper.keys() | other.keys()) if other is not hyper else []:
                if not same_value(hyper.get(key), other.get(key)):
                    wrong[f"{key} of group {index}"] = ("one value", (hyper.get(key), other.get(key)))
        regrouped.append({**hyper, "params": group["params"]})
    if missing or owner or wrong:
        raise StateDictError("optimizer state", missing, owner, wrong)
    return regrouped


def _as_this_torch(optimizer: ShardedOptimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Let the optimizer class itself bring a state of older releases to what it works with now."""
    # FSDP's gather_full_optim_state_dict and torch before 1.12 hold Adam's step as a number, where torch 2.13 asserts a
    # tensor; groups of older releases lack newer hyper-parameters. load_state_dict of a torch optimizer puts both
    # right: here over empty parameters, so that nothing is copied. What is on the meta device stands for a tensor that
    # is still to be read, and stays as it is.
    entries, groups = optimizer.model.backend.entries, saved["param_groups"]
    stands = {n: nn.Parameter(torch.empty(0, dtype=entries[n].dtype)) for group in groups for n in group["params"]}
    number = {name: index for index, name in enumerate(stands)}
    arguments = constructor_arguments(local_optimizer(optimizer.inner))
    plain = optimizer.optimizer_class(
        [{"params": [stands[name] for name in group["params"]]} for group in groups],
        **{key: value for key, value in arguments.items() if key not in ("fused", "capturable")},
    )
    here: dict[int, dict[str, Any]] = {}
    awaited: dict[str, dict[str, Any]] = {}
    for name, item in saved["state"].items():
        awaited[name] = {key: v for key, v in item.items() if isinstance(v, Tensor) and v.is_meta}
        here[number[name]] = {key: v for key, v in item.items() if key not in awaited[name]}
    numbered = [{**group, "params": [number[name] for name in group["params"]]} for group in groups]
    plain.load_state_dict({"state": here, "param_groups": numbered})
    state = {name: {**plain.state.get(stand, {}), **awaited.get(name, {})} for name, stand in stands.items()}
    return {
        "state": {name: item for name, item in state.items() if item},
        "param_groups": [{**new, "params": old["params"]} for new, old in zip(plain.param_groups, groups, strict=True)],
    }


def same_value(one: Any, other: Any) -> bool:
    """Return whether two values are equal to the last bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
