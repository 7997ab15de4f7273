"""Convert optimizer state between its owners and one state dict of torch's form."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from fsshard.errors import OptimizerStateMismatch
from fsshard.nested import map_leaves
from fsshard.oss.partition import NOT_SYNCED

__all__ = ["check_fits", "load_inner", "own_state", "send_objects"]

# State that the optimizers of torch 2.13 keep in the shape of the parameter. Others (Adafactor's) have shapes of their
# own, about which nothing can be said here.
SHAPED = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg"}
    | {"acc_delta", "sum", "prev", "ax"}
)


def _on_cpu(value: Any) -> Any:
    """Copy a value, a tensor to the memory of the CPU."""
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)


def own_state(inner: Optimizer, index: Mapping[Tensor, int]) -> dict[Hashable, Any]:
    """Copy what a rank's optimizer keeps, by the parameter's place in all groups."""
    return {
        index[key] if isinstance(key, Tensor) else key: map_leaves(_on_cpu, state)
        for key, state in inner.state.items()
        if not isinstance(key, Tensor) or key in index
    }


def send_objects(payload: Any, recipient: int, group: dist.ProcessGroup) -> list[Any] | None:
    """Return every rank's object on one rank, or on all (-1), and None elsewhere. Collective; one after the other."""
    found: list[Any] = []
    for source in range(group.size()):
        box = [payload]
        if recipient == -1:
            dist.broadcast_object_list(box, group=group, group_src=source)
        elif source != recipient and source == group.rank():
            dist.send_object_list(box, group=group, group_dst=recipient)
        elif source != recipient and recipient == group.rank():
            dist.recv_object_list(box, group=group, group_src=source)
        found += box
    return found if recipient in (-1, group.rank()) else None


def check_fits(state_dict: Any, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise unless a state dict is of these groups, and its tensors of their parameters' shapes."""
    what = "optimizer state"
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise OptimizerStateMismatch(what, missing=["state", "param_groups"])
    saved = state_dict["param_groups"]
    if len(saved) != len(groups):
        raise OptimizerStateMismatch(what, mismatched={"number of param_groups": (len(groups), len(saved))})
    sizes = {
        f"parameters in group {i}": (len(own["params"]), len(other["params"]))
        for i, (own, other) in enumerate(zip(groups, saved, strict=True))
        if len(own["params"]) != len(other["params"])
    }
    if sizes:
        raise OptimizerStateMismatch(what, mismatched=sizes)
    known = {number for group in saved for number in group["params"]}
    unexpected = [
        f"state of parameter {key}" for key in state_dict["state"] if isinstance(key, int) and key not in known
    ]
    wrong: dict[str, tuple[object, object]] = {}
    for i, (own, other) in enumerate(zip(groups, saved, strict=True)):
        names = own.get("param_names") or [f"parameter {number} (in group {i})" for number in other["params"]]
        for parameter, number, name in zip(own["params"], other["params"], names, strict=True):
            for key, value in (state_dict["state"].get(number) or {}).items():
                if key in SHAPED and isinstance(value, Tensor) and value.shape != parameter.shape:
                    wrong[f"{name}: {key}"] = (tuple(parameter.shape), tuple(value.shape))
    if unexpected or wrong:
        raise OptimizerStateMismatch(what, (), unexpected, wrong)


def load_inner(inner: Optimizer, groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]) -> None:
    """Load a rank's part of a state dict, which fits all ranks' groups, by its optimizer's own method, from copies."""
    here = {parameter: number for number, parameter in enumerate(p for g in inner.param_groups for p in g["params"])}
    part: dict[str, Any] = {"state": {}, "param_groups": []}
    known: set[Any] = set()
    for own, group, saved in zip(inner.param_groups, groups, state_dict["param_groups"], strict=True):
        for parameter, number in zip(group["params"], saved["params"], strict=True):
            known.add(number)
            if parameter in here and number in state_dict["state"]:
                part["state"][here[parameter]] = copy.deepcopy(state_dict["state"][number])
        settings = {key: value for key, value in saved.items() if key not in NOT_SYNCED}
        part["param_groups"].append({**settings, "params": [here[p] for p in own["params"]]})
    for key, value in state_dict["state"].items():
        if key not in known:  # what an optimizer keeps beside the state of parameters
            part["state"][key] = copy.deepcopy(value)
    inner.load_state_dict(part)
