"""Checks the arguments that save, load and export have in common, and says the call as ranks compare it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from fsshard.errors import ConfigurationError
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer

__all__ = ["TIMEOUT", "as_called", "as_one", "check_call", "check_model", "name_optimizers", "named_objects"]

TIMEOUT = 300.0  # seconds to wait for ranks, where the caller does not say


def check_call(name: str, path: object, timeout: object, **flags: object) -> tuple[str, str]:
    """Check a path, a timeout and flags; return the path from the home directory, and the call as messages show it."""
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigurationError(
            f"{name}: expected a path first and the model second, got {type(path).__name__} as the path"
        )
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ConfigurationError(f"{name}: timeout={timeout!r}: expected seconds, more than 0")
    for flag, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigurationError(
                f"{name}: {flag}= is an option and takes True or False, got {type(value).__name__}; state of that name "
                "has to be renamed"
            )
    path = os.path.expanduser(os.fspath(path))
    return path, f"{name}({path!r})"


def check_model(model: object, call: str) -> ShardedModule:
    """Return the model itself; raise if it is not wrapped."""
    if not isinstance(model, ShardedModule):
        raise ConfigurationError(
            f"{call}: expected what fsshard.wrap returned as the model, got {type(model).__name__}; a model on one "
            "process takes fsshard.wrap(model, backend='none')"
        )
    return model


def name_optimizers(model: ShardedModule, optimizer: object, call: str) -> dict[str, ShardedOptimizer]:
    """Name one optimizer ("optimizer"), a sequence of them ("0", "1", ...), or a mapping (by its keys)."""
    if optimizer is None:
        return {}
    if isinstance(optimizer, Mapping):
        named = {str(name): value for name, value in optimizer.items()}
    elif isinstance(optimizer, Sequence):
        named = {str(index): value for index, value in enumerate(optimizer)}
    else:
        named = {"optimizer": optimizer}
    for name, value in named.items():
        if not name or "/" in name:
            raise ConfigurationError(f"{call}: an optimizer cannot be named {name!r}; use a word without '/'")
        if not isinstance(value, ShardedOptimizer):
            raise ConfigurationError(
                f"{call}: optimizer {name!r} is a {type(value).__name__}; build it with fsshard.build_optimizer, or "
                "hand a live one to fsshard.wrap"
            )
        if value.model is not model:
            raise ConfigurationError(f"{call}: optimizer {name!r} was built over another model")
    return named


def as_called(call: str, optimizer: Any, objects: Mapping[str, Any], **options: Any) -> str:
    """Return the call with all that ranks have to agree on, so that they find out where they do not."""
    if isinstance(optimizer, Mapping):
        handed = [f"optimizer={{{', '.join(map(repr, sorted(map(str, optimizer))))}}}"]
    elif isinstance(optimizer, Sequence):
        handed = [f"optimizer=[{len(optimizer)}]"]
    else:
        handed = [] if optimizer is None else ["optimizer"]
    handed += [f"{name}=" for name in sorted(objects)] + [f"{key}={value!r}" for key, value in options.items()]
    return f"{call[:-1]}, {', '.join(handed)})"


def named_objects(scheduler: Any, scaler: Any, others: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is saved beside the model and its optimizers, by name; several with state as one object each."""
    given = {key: value for key, value in (("scheduler", scheduler), ("scaler", scaler)) if value is not None}
    return {name: as_one(value) for name, value in (given | dict(others)).items()}


def as_one(value: Any) -> Any:
    """Return a list or mapping in which all have state, ``scheduler=[warmup, decay]``, as one; all else as it is."""
    if hasattr(value, "state_dict") or not isinstance(value, (Mapping, list, tuple)):
        return value
    members = dict(value) if isinstance(value, Mapping) else dict(enumerate(value))
    for member in members.values():
        ours = isinstance(member, (ShardedModule, ShardedOptimizer))  # they are no state, and are refused
        if ours or not (hasattr(member, "state_dict") and hasattr(member, "load_state_dict")):
            return value
    return _Several(members, named=isinstance(value, Mapping)) if members else value


class _Several:
    """Several objects with state, as one with the state of all: in a list, or by name."""

    def __init__(self, members: Mapping[Any, Any], *, named: bool) -> None:
        self._members, self._named = members, named

    def state_dict(self) -> Any:
        states = {key: member.state_dict() for key, member in self._members.items()}
        return states if self._named else list(states.values())

    def load_state_dict(self, state: Any) -> None:
        kind = Mapping if self._named else (list, tuple)
        saved = dict(state if self._named else enumerate(state)) if isinstance(state, kind) else None
        if saved is None or saved.keys() != self._members.keys():
            theirs = list(state) if isinstance(state, Mapping) else f"a {type(state).__name__}"
            theirs = f"{theirs} of {len(state)}" if isinstance(state, (list, tuple)) else theirs
            mine = list(self._members) if self._named else f"a list of {len(self._members)}"
            raise ConfigurationError(f"{mine} was handed over, {theirs} was saved")
        for key, member in self._members.items():
            member.load_state_dict(saved[key])
