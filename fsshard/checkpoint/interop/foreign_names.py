"""Maps the names in other programs' state dicts, and the numbers in their optimizers', to names of the model."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsshard.checkpoint.format.index import Tree
from fsshard.errors import ConfigurationError, StateDictError
from fsshard.oss.partitioned import local_optimizer
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer, constructor_arguments, groups_by_name
from fsshard.sharded.state_dict import NEURALOP_ARGUMENTS
from fsshard.torch_private.fsdp1 import WRAPPED
from fsshard.torch_private.modules import CHECKPOINTED, COMPILED

# Names of DistributedDataParallel, DataParallel and FairScale's ShardedDataParallel begin with it.
PREFIX = "module."
# Parts of names that FSDP1, FairScale's FSDP, torch.compile and activation checkpointing put in.
WRAPPERS = frozenset({WRAPPED, "_fpw_module", COMPILED, CHECKPOINTED})

# Name -> what was expected, and what was got.
Mismatches = dict[str, tuple[object, object]]
State = Mapping[str, Any]
Names = Sequence[Sequence[str]]
# What was taken off the names of a state dict, and the rest.
Variant = tuple[str, Tree]


def clean_path(path: str) -> str:
    """Return a name without the parts that wrappers put into it."""
    parts = [part for part in path.split(".") if part not in WRAPPERS]
    return ".".join(parts)


def path_below(path: str, name: str) -> str:
    """Return the name in the whole model of what a module at ``path`` calls ``name``."""
    if path:
        return f"{path}.{name}"
    return name


def plain_names(model: ShardedModule, state: State) -> Tree:
    """Return a model's state dict without the prefixes of wrappers; a shared weight under all its names.

    Raises:
        StateDictError: it is none, or a rank's flat shards.
    """
    if not isinstance(state, Mapping):
        raise StateDictError(f"a {type(state).__name__} (expected a model's state dict, on every rank)")
    flat = []
    for key in state:
        _, _, attribute = key.rpartition(".")
        if attribute.startswith("flat_param"):
            flat.append(clean_path(key))
    if flat:
        raise StateDictError("a rank's flat shards (put them together with join_model_shards first)", unexpected=flat)
    _, plain = best_names(model.backend.key_order, state)
    keys = model.backend.keys
    weights = {}
    for key, value in plain.items():
        if key in keys:
            weights[keys[key]] = value
    for key, name in keys.items():
        if key not in plain and name in weights:
            plain[key] = weights[name]
    return plain


def best_names(expected: Iterable[str], state: State) -> Variant:
    """Return a state dict with as much of what its names begin with alike taken off as fits a model best, and that.

    Where the model's names begin alike and the state dict's do not, that is put before them.
    """
    expected = set(expected)
    variants = list(unprefixed(state, ""))
    beginnings = {key.partition(".")[0] for key in expected}
    if len(beginnings) == 1:
        (beginning,) = beginnings
        _, unchanged = variants[0]
        prefixed = {f"{beginning}.{key}": value for key, value in unchanged.items()}
        variants.append(("", prefixed))

    def fitting(variant: Variant) -> int:
        _, renamed = variant
        return len(expected & renamed.keys())

    return max(variants, key=fitting)


def unprefixed(state: State, prefix: str = PREFIX) -> Iterator[Variant]:
    """Yield what was taken off the names of a state dict, and the rest: ever more (DDP of ShardedDDP has two).

    Taken off is ``prefix``, or if that is empty whatever all names begin with.
    """
    state = {clean_path(key): value for key, value in state.items()}
    removed = ""
    yield removed, state
    while True:
        names = [key for key in state if key != NEURALOP_ARGUMENTS]
        beginnings = set()
        for name in names:
            beginning, dot, _ = name.partition(".")
            beginnings.add(beginning + dot)
        if len(beginnings) != 1:
            return
        (common,) = beginnings
        if not common.endswith(".") or prefix not in ("", common):
            return
        removed += common
        state = {key.removeprefix(common): value for key, value in state.items()}
        yield removed, state


def whole_state(
    optimizer: ShardedOptimizer,
    states: Any,
    names: Names | None,
    *,
    strict: bool,
) -> Tree:
    """Return states of optimizers that number their parameters as one by name, in this optimizer's groups.

    ``names`` are those of each group where the states do not say; ``strict`` raises where a part has no state.
    """
    if not isinstance(states, Sequence):
        states = [states]
    for state in states:
        _check_form(state)
    groups = []
    state_of_group = []
    for state in states:
        for group in state["param_groups"]:
            groups.append(group)
            state_of_group.append(state["state"])
    if not groups:
        raise StateDictError("an optimizer state without groups")
    named = _names_of_groups(optimizer, states, groups, names)
    by_name = {}
    for index, (group, members) in enumerate(zip(groups, named, strict=True)):
        numbers = group["params"]
        if len(members) != len(numbers):
            counts = {f"parameters of group {index}": (len(members), len(numbers))}
            raise StateDictError("optimizer state", mismatched=counts)
        for number, name in zip(numbers, members, strict=True):
            item = state_of_group[index].get(number)
            if not item:
                # FairScale's load_state_dict leaves {} for what another rank owns.
                continue
            by_name[name] = {key: _one_value(name, key, value) for key, value in item.items()}
    if not by_name:
        _check_nothing_is_lost(states)
    if strict:
        _check_complete(optimizer, by_name)
    old_groups = []
    for group, members in zip(groups, named, strict=True):
        hyper = {}
        for key, value in group.items():
            if key not in ("params", "param_names"):
                hyper[key] = value
        old_groups.append((hyper, members))
    whole = _as_this_torch(optimizer, by_name, _regroup(optimizer, old_groups))
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


def _check_nothing_is_lost(states: Sequence[State]) -> None:
    """Raise for states of which no parameter was found, where there are some."""
    lost = []
    for state in states:
        for number, item in state["state"].items():
            if item:
                lost.append(str(number))
    if lost:
        raise StateDictError("optimizer state of which no group has the parameters", unexpected=lost)


def _one_value(name: str, key: str, value: Any) -> Any:
    """Return the one number of a list in which FairScale's FSDP keeps it for each rank; all else as it is."""
    if not isinstance(value, list) or not value:
        return value
    if not all(isinstance(number, Tensor) and number.dim() == 0 for number in value):
        return value
    first = value[0]
    if not all(torch.equal(number, first) for number in value):
        raise StateDictError("the optimizer state", mismatched={f"{name}: {key}": ("one value", value)})
    return first


def _names_of_groups(
    optimizer: ShardedOptimizer,
    states: Sequence[State],
    groups: Sequence[State],
    names: Names | None,
) -> list[list[str]]:
    """Return for each old group the names of its parameters, in the order in which it numbers them."""
    unit_of = states[0].get("param_id_map")  # of FairScale's FSDP alone
    if names is not None:
        if unit_of is not None:
            _check_units(unit_of, names)
            names = [list(itertools.chain.from_iterable(names))]
        if len(names) != len(groups):
            raise ConfigurationError(f"names has {len(names)} lists, the optimizer state has {len(groups)} groups")
        return [known_names(optimizer, members) for members in names]
    own_names = [group.get("param_names", group["params"]) for group in groups]
    if _are_names(own_names):
        return [known_names(optimizer, members) for members in own_names]
    if unit_of is not None:
        units = set(unit_of.values()) - {None}
        if len(units) > 1:
            raise ConfigurationError(
                "this state is of an FSDP model with several wrapped modules, which number the parameters by module; "
                "pass names=fsdp_names(model, units) with the wrapped modules' names, or names_in_metadata(metadata)"
            )
        # The one flat parameter has the model's order.
        return [list(optimizer.model.backend.entries)]
    if len(states) > 1:
        raise ConfigurationError("several optimizer states need names=: which parameters each group of each one had")
    expected = [group["params"] for group in groups_by_name(optimizer)]
    if len(expected) != len(groups):
        counts = {"number of param_groups": (len(expected), len(groups))}
        raise StateDictError("optimizer state", mismatched=counts)
    return expected


def _are_names(groups: Iterable[Iterable[object]]) -> bool:
    return all(isinstance(member, str) for member in itertools.chain.from_iterable(groups))


def known_names(optimizer: ShardedOptimizer, names: Iterable[str]) -> list[str]:
    """Return names as the model has them: without wrappers' prefixes, and the first one of a shared weight."""
    first_names = {}
    for entry in optimizer.model.backend.entries.values():
        for slot in entry.slots:
            first_names[slot.name] = entry.name

    def known(name: str) -> str:
        candidate = clean_path(name)
        while candidate not in first_names and candidate.startswith(PREFIX):
            candidate = candidate.removeprefix(PREFIX)
        return first_names.get(candidate, name)

    return list(map(known, names))


def _check_units(unit_of: Mapping[int, int | None], names: Names) -> None:
    """Check that each wrapped module holds as many parameters as when the state was written."""
    expected = []
    for index, unit in enumerate(names):
        expected += [index] * len(unit)
    saved = list(map(unit_of.get, range(len(unit_of))))
    # None: the parameter had no state.
    agrees = all(number in (None, index) for index, number in zip(expected, saved, strict=False))
    if agrees and len(expected) == len(saved):
        return
    units = sorted({unit for unit in saved if unit is not None})
    counts = list(map(saved.count, units))
    sizes = {"parameters of each wrapped module": (list(map(len, names)), counts)}
    raise StateDictError("optimizer state", mismatched=sizes)


def _check_complete(optimizer: ShardedOptimizer, state: State) -> None:
    """Raise where trainable parameters have no state: a consolidation lost ranks, or they never had a gradient."""
    missing = []
    for entry in optimizer.entries:
        if entry.parameter.requires_grad and not state.get(entry.name):
            missing.append(f"state of {entry.name}")
    if state and missing:
        raise StateDictError(
            "an optimizer state that some trainable parameters have no part in (consolidated on all ranks? for "
            "parameters that had never had a gradient pass strict=False)",
            missing=missing,
        )


def _regroup(optimizer: ShardedOptimizer, old: Sequence[tuple[State, list[str]]]) -> list[Tree]:
    """Put the old hyper-parameters into this optimizer's groups."""
    hyper_of = {}
    for hyper, names in old:
        hyper_of.update(dict.fromkeys(names, hyper))
    missing = []
    wrong = {}
    regrouped = []
    for index, group in enumerate(groups_by_name(optimizer)):
        theirs = []
        for name in group["params"]:
            if name in hyper_of:
                theirs.append(hyper_of.pop(name))
            else:
                missing.append(name)
        first = theirs[0] if theirs else {}
        for other in theirs[1:]:
            wrong.update(_other_settings(first, other, index))
        regrouped.append({**first, "params": group["params"]})
    if missing or hyper_of or wrong:
        raise StateDictError("optimizer state", missing, hyper_of, wrong)
    return regrouped


def _other_settings(first: State, other: State, index: int) -> Mismatches:
    """Return the hyper-parameters in which two parameters of one group differ."""
    wrong: Mismatches = {}
    if other is first:
        return wrong
    for key in sorted(first.keys() | other.keys()):
        values = first.get(key), other.get(key)
        if not same_value(*values):
            wrong[f"{key} of group {index}"] = ("one value", values)
    return wrong


def _as_this_torch(
    optimizer: ShardedOptimizer,
    state: Mapping[str, Tree],
    groups: list[Tree],
) -> Tree:
    """Let the optimizer class itself bring a state of older releases to what it works with now."""
    # FSDP's gather_full_optim_state_dict and torch before 1.12 hold Adam's step as a number, where torch 2.13 asserts a
    # tensor; groups of older releases lack newer hyper-parameters. load_state_dict of a torch optimizer puts both
    # right: here over empty parameters, so that nothing is copied.
    entries = optimizer.model.backend.entries
    empty = {}
    for group in groups:
        for name in group["params"]:
            empty[name] = nn.Parameter(torch.empty(0, dtype=entries[name].dtype))
    number = {name: index for index, name in enumerate(empty)}
    members = []
    for group in groups:
        members.append([empty[name] for name in group["params"]])
    plain = _plain_optimizer(optimizer, members)
    numbered_state = {}
    awaited: dict[str, Tree] = {}
    for name, item in state.items():
        awaited[name] = {}
        present: Tree = {}
        for key, value in item.items():
            # What is on the meta device stands for a tensor that is still to be read, and stays as it is.
            is_awaited = isinstance(value, Tensor) and value.is_meta
            table = awaited[name] if is_awaited else present
            table[key] = value
        numbered_state[number[name]] = present
    numbered_groups = []
    for group in groups:
        numbers = [number[name] for name in group["params"]]
        numbered_groups.append({**group, "params": numbers})
    plain.load_state_dict({"state": numbered_state, "param_groups": numbered_groups})
    new_state = {}
    for name, parameter in empty.items():
        item = {**plain.state.get(parameter, {}), **awaited.get(name, {})}
        if item:
            new_state[name] = item
    new_groups = []
    for group, plain_group in zip(groups, plain.param_groups, strict=True):
        new_groups.append({**plain_group, "params": group["params"]})
    return {"state": new_state, "param_groups": new_groups}


def _plain_optimizer(optimizer: ShardedOptimizer, groups: Sequence[Sequence[nn.Parameter]]) -> Optimizer:
    """Return an optimizer of the same class and arguments over other parameters."""
    arguments = constructor_arguments(local_optimizer(optimizer.inner))
    for name in ("fused", "capturable"):
        arguments.pop(name, None)
    return optimizer.optimizer_class([{"params": list(members)} for members in groups], **arguments)


def same_value(one: Any, other: Any) -> bool:
    """Return whether two values are equal to the last bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
