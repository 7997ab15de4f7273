"""Several stateful objects under one name, as in ``scheduler=[warmup, decay]``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsshard.errors import ConfigurationError
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer

__all__ = ["Several", "as_one"]


class Several:
    """A list, tuple or mapping of objects, as one with the state of all."""

    def __init__(self, members: Mapping[Any, Any], *, named: bool) -> None:
        self._members, self._named = members, named

    def state_dict(self) -> Any:
        """The members' states, in a list or by name."""
        states = {key: member.state_dict() for key, member in self._members.items()}
        return states if self._named else list(states.values())

    def load_state_dict(self, state: Any) -> None:
        """Give each member its own state.

        Raises:
            ConfigurationError: another number of members, or others, were saved.
        """
        saved = dict(state) if isinstance(state, Mapping) else dict(enumerate(state)) if _is_list(state) else None
        if isinstance(state, Mapping) != self._named or saved is None or saved.keys() != self._members.keys():
            mine = f"{sorted(map(str, self._members))}" if self._named else f"a list of {len(self._members)}"
            theirs = f"{sorted(map(str, state))}" if isinstance(state, Mapping) else f"{type(state).__name__}"
            theirs += f" of {len(state)}" if _is_list(state) else ""
            raise ConfigurationError(f"{mine} was handed over, {theirs} was saved")
        for key, member in self._members.items():
            member.load_state_dict(saved[key])


def as_one(objects: Mapping[str, Any]) -> dict[str, Any]:
    """``objects`` with every list, tuple or mapping in which all have state as one object each."""
    return {name: _as_one(value) for name, value in objects.items()}


def _as_one(value: Any) -> Any:
    if hasattr(value, "state_dict") or not (isinstance(value, Mapping) or _is_list(value)):
        return value
    members = dict(value) if isinstance(value, Mapping) else dict(enumerate(value))
    if not members or not all(_has_state(member) for member in members.values()):
        return value
    return Several(members, named=isinstance(value, Mapping))


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _has_state(member: Any) -> bool:
    ours = isinstance(member, (ShardedModule, ShardedOptimizer))  # they are no state, and are refused
    return hasattr(member, "state_dict") and hasattr(member, "load_state_dict") and not ours
