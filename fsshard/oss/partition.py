"""Decide which rank owns which parameter, and build the optimizer over the own ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from fsshard.errors import ConfigurationError, OptimizerError, UnsupportedByBackend

__all__ = ["GLOBAL_OPTIMIZERS", "assign_owners", "build_inner", "check_distinct", "check_separable", "group_of_owner"]

GLOBAL_OPTIMIZERS = frozenset({"LBFGS"})
"""Known to use inner products over all parameters (under FairScale's OSS: NaN)."""

NOT_SYNCED = ("params", "param_names")  # what a group of one rank has for itself


def assign_owners(parameters: Iterable[Tensor], owners: dict[Tensor, int], loads: list[int]) -> None:
    """Give each parameter that has no owner yet to the rank with the least bytes so far; FairScale's own rule.

    Args:
        parameters: in the order of the groups, so that all ranks decide the same.
        owners: is added to.
        loads: bytes of each rank, added to.
    """
    for parameter in parameters:
        # An owner stays for good. FairScale 0.4.13 deals all of them out anew in add_param_group and leaves the state
        # where it was: what changes hands is updated by nobody.
        if parameter not in owners:
            owners[parameter] = rank = loads.index(min(loads))
            # Bytes: elements, which FairScale counts, would count a complex number as one.
            loads[rank] += parameter.element_size() * (parameter.numel() if parameter.requires_grad else 1)


def check_distinct(parameters: Iterable[Tensor]) -> None:
    """Raise for two parameters over the same memory: in flat buffers they would part, silently.

    Raises:
        OptimizerError: names their places.
    """
    seen: dict[tuple[Any, int], tuple[int, Tensor]] = {}
    for place, parameter in enumerate(parameters):
        if parameter.requires_grad and parameter.numel() and not parameter.is_meta:
            first, other = seen.setdefault((parameter.device, parameter.data_ptr()), (place, parameter))
            if other is not parameter:
                raise OptimizerError(
                    f"parameters {first} and {place} are different objects over the same memory; share one "
                    "nn.Parameter (b.weight = a.weight), or give each its own memory"
                )


def group_of_owner(group: Mapping[str, Any], owners: Mapping[Tensor, int], rank: int) -> dict[str, Any]:
    """Copy a group with the parameters, and their names, of one rank."""
    mine = [index for index, parameter in enumerate(group["params"]) if owners[parameter] == rank]
    part = {**group, "params": [group["params"][index] for index in mine]}
    if "param_names" in group:
        part["param_names"] = [group["param_names"][index] for index in mine]
    return part


def check_separable(optimizer_class: Any, world_size: int) -> None:
    """Raise for an algorithm that looks at all parameters at once, and would run on each rank's own ones.

    Raises:
        ConfigurationError: this is nothing that makes an optimizer.
        UnsupportedByBackend: FairScale 0.4.13 runs LBFGS on each shard, with a line search each: NaN.
    """
    if not callable(optimizer_class):
        raise ConfigurationError(f"optim= must be a torch.optim.Optimizer class, got {optimizer_class!r}")
    known = {base.__name__ for base in getattr(optimizer_class, "__mro__", ())} & GLOBAL_OPTIMIZERS
    if known and world_size > 1:
        raise UnsupportedByBackend(
            f"optim={optimizer_class.__name__} on {world_size} ranks (it needs all parameters on every rank)",
            "OSS",
            f"use torch.optim.{known.pop()} itself, with DistributedDataParallel",
        )


def build_inner(
    optimizer_class: Callable[..., Optimizer], groups: Sequence[dict[str, Any]], defaults: Mapping[str, Any]
) -> Optimizer:
    """Build the user's optimizer over one rank's groups."""
    try:
        return optimizer_class(groups, **defaults)
    except TypeError:
        # OSS(opt.param_groups, optim=type(opt), **opt.defaults), as Lightning writes it, hands over what the
        # constructor does not take (torch 2.13: AdamW subclasses Adam and keeps decoupled_weight_decay: "unexpected
        # keyword argument"). Such a key is left out if the class sets it by itself, to the same value.
        taken = inspect.signature(optimizer_class).parameters
        inner = optimizer_class([dict(group) for group in groups], **{k: v for k, v in defaults.items() if k in taken})
        foreign = [key for key in defaults if key not in taken]
        if not foreign or any(key not in inner.defaults or inner.defaults[key] != defaults[key] for key in foreign):
            raise
        return inner
