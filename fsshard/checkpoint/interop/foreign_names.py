"""Maps other programs' state dicts, whose parameters are numbered or nested, to the names of our models.

Wrappers put prefixes into names; torch's optimizers, and FairScale's, number the parameters. Both are undone here with
the model at hand.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsshard.errors import ConfigurationError, StateDictError
from fsshard.oss.partitioned import local_optimizer
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer, constructor_arguments, groups_by_name
from fsshard.sharded.state_dict import NEURALOP_ARGUMENTS
from fsshard.torch_private.fsdp1 import WRAPPED
from fsshard.torch_private.modules import CHECKPOINTED, COMPILED

__all__ = [
    "Names",
    "NumberedState",
    "State",
    "as_this_torch",
    "check_complete",
    "clean_path",
    "known_name",
    "path_below",
    "plain_names",
    "regroup",
    "same_value",
    "unprefixed",
]

PREFIX = "module."  # before every name of DistributedDataParallel, DataParallel and FairScale's ShardedDataParallel

WRAPPERS = frozenset({WRAPPED, "_fpw_module", COMPILED, CHECKPOINTED})
"""Parts of names that FSDP1, FairScale's FSDP, torch.compile and activation checkpointing put in."""

State = Mapping[str, Any]
Names = Sequence[Sequence[str]]


# ------------------------------------------------------------------------------------------------ names


def clean_path(path: str) -> str:
    """Return a name without what FairScale's wrappers put into it."""
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
    cleaned = {clean_path(key): value for key, value in state.items()}
    flat = [key for key in cleaned if key.rpartition(".")[2].startswith("flat_param")]
    if flat:
        raise StateDictError("a rank's flat shards (put them together with join_model_shards first)", unexpected=flat)
    expected = set(model.backend.key_order)
    plain = max(unprefixed(cleaned), key=lambda each: len(expected & set(each)))
    keys = model.backend.keys
    given = {keys[key]: value for key, value in plain.items() if key in keys}
    return {**plain, **{key: given[name] for key, name in keys.items() if key not in plain and name in given}}


def unprefixed(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a state dict as it is, and without the prefix of each wrapper (DDP of ShardedDDP has two)."""
    yield state
    while state and all(key.startswith(PREFIX) or key == NEURALOP_ARGUMENTS for key in state):
        state = {key.removeprefix(PREFIX): value for key, value in state.items()}
        yield state


# ------------------------------------------------------------------------------------------------ optimizers


class NumberedState(NamedTuple):
    """Numbered states, by name."""

    state: dict[str, dict[str, Any]]
    groups: list[tuple[dict[str, Any], list[str]]]  # hyper-parameters, names

    @classmethod
    def of(cls, optimizer: ShardedOptimizer, states: Sequence[State], names: Names | None) -> NumberedState:
        groups, owners = [], []
        for index, each in enumerate(states if isinstance(states, Sequence) else [states]):
            _check_form(each)
            groups += each["param_groups"]
            owners += [index] * len(each["param_groups"])
        if not groups:
            raise StateDictError("an optimizer state without groups")
        named = _names_of_groups(optimizer, states, groups, names)
        by_name: dict[str, dict[str, Any]] = {}
        for owner, group, members in zip(owners, groups, named, strict=True):
            _check_numbers(optimizer, states[owner], group, members)
            for number, name in zip(group["params"], members, strict=True):
                item = states[owner]["state"].get(number)
                if item:  # FairScale's load_state_dict leaves {} for what another rank owns
                    by_name[name] = {key: _one_value(name, key, value) for key, value in item.items()}
        dropped = ("params", "param_names")
        hyper = [{key: value for key, value in group.items() if key not in dropped} for group in groups]
        return cls(by_name, list(zip(hyper, named, strict=True)))


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
        return [[known_name(optimizer, name) for name in members] for members in names]
    told = [group.get("param_names", group["params"]) for group in groups]
    if all(isinstance(name, str) for members in told for name in members):
        return [[known_name(optimizer, name) for name in members] for members in told]
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


def known_name(optimizer: ShardedOptimizer, name: str) -> str:
    """Return ``name`` as the model has it: without wrappers' prefixes, and the first one of a shared weight."""
    backend = optimizer.model.backend
    first = {slot.name: entry.name for entry in backend.entries.values() for slot in entry.slots}
    candidate = clean_path(name)
    while candidate not in first and candidate.startswith(PREFIX):
        candidate = candidate.removeprefix(PREFIX)
    return first.get(candidate, name)


def _check_units(unit_of: Mapping[int, int | None], names: Names) -> None:
    """Check that each wrapped module holds as many parameters as when the state was written."""
    unit_at = [index for index, unit in enumerate(names) for _ in unit]
    saved = [unit_of.get(number) for number in range(len(unit_of))]  # None: it had no state
    if len(unit_at) != len(saved) or any(got not in (None, want) for want, got in zip(unit_at, saved, strict=True)):
        counts = [saved.count(unit) for unit in sorted({unit for unit in saved if unit is not None})]
        sizes = {"parameters of each wrapped module": ([len(unit) for unit in names], counts)}
        raise StateDictError("optimizer state", mismatched=sizes)


def _check_numbers(optimizer: ShardedOptimizer, state: State, group: State, names: Sequence[str]) -> None:
    """Check for as many numbers as names; if not, say which, as far as the shapes tell."""
    numbers = group["params"]
    over = len(names) - len(numbers)
    if over == 0:
        return
    entries = optimizer.model.backend.entries
    mine = [tuple(entries[name].shape) if name in entries else None for name in names]
    saved = [_shape_of(state["state"].get(number)) for number in numbers]
    unlike = (at for at, shapes in enumerate(zip(mine, saved, strict=False)) if shapes[0] != shapes[1])
    # Without state there is no shape: then what is over is counted from the end.
    start = min(len(mine), len(saved)) if None in saved else next(unlike, min(len(mine), len(saved)))
    missing = [f"{names[i]} {mine[i]}" for i in range(start, start + over)]
    unexpected = [f"parameter {numbers[i]} of shape {saved[i]}" for i in range(start, start - over)]
    raise StateDictError("optimizer state", missing, unexpected)


def _shape_of(item: Any) -> tuple[int, ...] | None:
    shapes = [tuple(v.shape) for v in (item or {}).values() if isinstance(v, Tensor) and v.dim()]
    return shapes[0] if shapes else None


def check_complete(optimizer: ShardedOptimizer, state: Mapping[str, Any]) -> None:
    """Raise where trainable parameters have no state: a consolidation lost ranks, or they never had a gradient."""
    left = [e.name for e in optimizer.entries if e.parameter.requires_grad and not state.get(e.name)]
    if state and left:
        raise StateDictError(
            "an optimizer state that some trainable parameters have no part in (consolidated on all ranks? for "
            "parameters that had never had a gradient pass strict=False)",
            missing=[f"state of {name}" for name in left],
        )


def regroup(optimizer: ShardedOptimizer, old: Sequence[tuple[State, list[str]]]) -> list[dict[str, Any]]:
    """Put the old hyper-parameters into this optimizer's groups."""
    owner = {name: hyper for hyper, names in old for name in names}
    missing, wrong, regrouped = [], {}, []
    for index, group in enumerate(groups_by_name(optimizer)):
        missing += [name for name in group["params"] if name not in owner]
        theirs = [owner.pop(name) for name in group["params"] if name in owner]
        hyper = theirs[0] if theirs else {}
        for other in theirs[1:]:
            keys = sorted(hyper.keys() | other.keys()) if other is not hyper else []
            for key in keys:
                if not same_value(hyper.get(key), other.get(key)):
                    wrong[f"{key} of group {index}"] = ("one value", (hyper.get(key), other.get(key)))
        regrouped.append({**hyper, "params": group["params"]})
    if missing or owner or wrong:
        raise StateDictError("optimizer state", missing, owner, wrong)
    return regrouped


def as_this_torch(optimizer: ShardedOptimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Let the optimizer class itself bring a state of older releases to what it works with now."""
    # FSDP's gather_full_optim_state_dict and torch before 1.12 hold Adam's step as a number, where torch 2.13 asserts a
    # tensor; groups of older releases lack newer hyper-parameters. load_state_dict of a torch optimizer puts both
    # right: here over empty parameters, so that nothing is copied. What is on the meta device stands for a tensor that
    # is still to be read, and stays as it is.
    entries, names = optimizer.model.backend.entries, [n for g in saved["param_groups"] for n in g["params"]]
    stands = {name: nn.Parameter(torch.empty(0, dtype=entries[name].dtype)) for name in names}
    inner = local_optimizer(optimizer.inner)
    arguments = {k: v for k, v in constructor_arguments(inner).items() if k not in ("fused", "capturable")}
    groups = [{"params": [stands[name] for name in group["params"]]} for group in saved["param_groups"]]
    plain = optimizer.optimizer_class(groups, **arguments)
    number = {name: index for index, name in enumerate(names)}
    numbered = [{**group, "params": [number[name] for name in group["params"]]} for group in saved["param_groups"]]
    awaited = {
        n: {k: v for k, v in s.items() if isinstance(v, Tensor) and v.is_meta} for n, s in saved["state"].items()
    }
    here = {number[n]: {k: v for k, v in s.items() if k not in awaited[n]} for n, s in saved["state"].items()}
    plain.load_state_dict({"state": here, "param_groups": numbered})
    state = {n: {**plain.state.get(stand, {}), **awaited.get(n, {})} for n, stand in stands.items()}
    state = {name: item for name, item in state.items() if item}
    groups = [
        {**new, "params": old["params"]} for new, old in zip(plain.param_groups, saved["param_groups"], strict=True)
    ]
    return {"state": state, "param_groups": groups}


def same_value(one: Any, other: Any) -> bool:
    """Equal, to the last bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
