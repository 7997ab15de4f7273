"""State of a torch optimizer, as other people's trainers save and read it, from ours and for ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fsshard.errors import StateDictError
from fsshard.sharded.optimizer import ShardedOptimizer, groups_by_name

__all__ = ["by_name", "by_number"]


def by_name(state: Mapping[str, Any], optimizer: ShardedOptimizer) -> dict[str, Any]:
    """Name the numbered parameters in a torch optimizer's state dict as ours are, group by group.

    One that has names is given back as it is.

    Raises:
        StateDictError: groups of other sizes.
    """
    own, saved = groups_by_name(optimizer), state["param_groups"]
    if all(isinstance(each, str) for group in saved for each in group["params"]):
        return dict(state)
    sizes = [[len(group["params"]) for group in groups] for groups in (own, saved)]
    if sizes[0] != sizes[1]:
        raise StateDictError(f"the optimizer has groups of {sizes[0]} parameters, and the checkpoint of {sizes[1]}")
    names = {
        number: name
        for mine, theirs in zip(own, saved, strict=True)
        for name, number in zip(mine["params"], theirs["params"], strict=True)
    }
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in saved]
    return {"state": {names[number]: found for number, found in state["state"].items()}, "param_groups": groups}


def by_number(optimizer: ShardedOptimizer, *, keep: bool = True) -> dict[str, Any]:
    """Return the state dict that a torch optimizer over the whole model would give. Collective.

    Args:
        optimizer: its state is assembled one parameter at a time, in host memory.
        keep: a rank that passes False takes part and gets ``{}``.
    """
    groups = groups_by_name(optimizer)
    numbers = {name: number for number, name in enumerate(name for group in groups for name in group["params"])}
    state: dict[int, dict[str, Any]] = {}
    for name, whole in optimizer.iterate_state():
        if keep and whole:
            state[numbers[name]] = {key: _on_host(value) for key, value in whole.items()}
    if not keep:
        return {}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups]
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value
