"""Decide which rank owns which parameter, build the optimizer over the own ones, and pack owners' parameters.

An owner's parameters are views of one flat buffer, which a step sends in one piece.
"""

from __future__ import annotations

import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fsshard.errors import UnsupportedByBackend

GLOBAL_OPTIMIZERS = frozenset({"LBFGS"})
"""Known to use inner products over all parameters (under FairScale's OSS: NaN)."""

# What a group of one rank has for itself.
NOT_SYNCED = ("params", "param_names")
# Bytes, of torch's own allocations on the CPU.
ALIGNMENT = 64


def assign_owners(
    parameters: Iterable[Tensor],
    owners: dict[Tensor, int],
    loads: list[int],
) -> None:
    """Give each parameter without an owner, in an order that all ranks have, to the rank with the least bytes so far.

    This is FairScale's own rule. ``owners`` and ``loads``, in bytes, are added to.
    """
    for parameter in parameters:
        # An owner stays for good. FairScale 0.4.13 deals all of them out anew in add_param_group and leaves the state
        # where it was: what changes hands is updated by nobody.
        if parameter in owners:
            continue
        rank = loads.index(min(loads))
        owners[parameter] = rank
        # Bytes: elements, which FairScale counts, would count a complex number as one. What is frozen counts as one.
        loads[rank] += parameter.nbytes if parameter.requires_grad else parameter.element_size()


def group_of_owner(
    group: Mapping[str, Any],
    owners: Mapping[Tensor, int],
    rank: int,
) -> dict[str, Any]:
    """Copy a group with the parameters, and their names, of one rank."""
    part = dict(group)
    is_own = [owners[parameter] == rank for parameter in group["params"]]
    for key in NOT_SYNCED:
        if key in group:
            part[key] = list(itertools.compress(group[key], is_own))
    return part


def check_separable(optimizer_class: Any, world_size: int) -> None:
    """Raise for an algorithm that looks at all parameters at once, and would run on each rank's own ones.

    FairScale 0.4.13 runs LBFGS on each shard, with a line search each: NaN.
    """
    # That of build_optimizer asks all ranks by itself.
    if world_size == 1 or getattr(optimizer_class, "counts_all_ranks", False):
        return
    for base in getattr(optimizer_class, "__mro__", ()):
        if base.__name__ in GLOBAL_OPTIMIZERS:
            raise UnsupportedByBackend(
                f"optim={optimizer_class.__name__} on {world_size} ranks (it needs all parameters on every rank)",
                "OSS",
                f"use torch.optim.{base.__name__} itself, with DistributedDataParallel",
            )


def build_inner(
    optimizer_class: Callable[..., Optimizer],
    groups: Sequence[dict[str, Any]],
    defaults: Mapping[str, Any],
) -> Optimizer:
    """Build the user's optimizer over one rank's groups."""
    try:
        return optimizer_class(groups, **defaults)
    except TypeError:
        # OSS(opt.param_groups, optim=type(opt), **opt.defaults), as Lightning writes it, hands over what the
        # constructor does not take (torch 2.13: AdamW subclasses Adam and keeps decoupled_weight_decay: "unexpected
        # keyword argument"). Such a key is left out if the class sets it by itself, to the same value.
        names = inspect.signature(optimizer_class).parameters
        accepted = {key: value for key, value in defaults.items() if key in names}
        if len(accepted) == len(defaults):
            raise
        inner = optimizer_class(list(map(dict, groups)), **accepted)
        for key, value in defaults.items():
            if key not in names and (key not in inner.defaults or inner.defaults[key] != value):
                raise
        return inner


# ------------------------------------------------------------------------------------------------ flat buffers


class ParameterBucket:
    """The trainable parameters of one owner on one device.

    Attributes:
        buffers: one flat tensor per dtype.
        owner: the rank of the group that updates them.
        as_bytes: the same memory, as what is sent.
        parameters: the views of it.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        device: torch.device,
        owner: int,
    ) -> None:
        self.owner = owner
        self.buffers: dict[torch.dtype, Tensor] = {}
        self.parameters: list[Tensor] = []
        by_dtype = defaultdict(list)
        for parameter in parameters:
            by_dtype[parameter.dtype].append(parameter)
        for dtype, same_dtype in by_dtype.items():
            same_dtype.sort(key=Tensor.numel)
            self.buffers[dtype] = packed(same_dtype, dtype, device)
            self.parameters += same_dtype
        self.as_bytes = list(map(as_bytes, self.buffers.values()))


Buckets = dict[torch.device, dict[int, ParameterBucket]]
"""By device and owner."""


@torch.no_grad()
def packed(
    parameters: Iterable[Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return a buffer that has the parameters' values, and of which they are views from here on.

    Each begins where memory of its own would. Products with a vector are rounded by its address (MKL, torch 2.13); and
    behind a parameter of odd size a complex view fails: "Tensor must have a storage_offset divisible by 2".
    """
    parameters = list(parameters)
    step = ALIGNMENT // dtype.itemsize
    places = []
    size = 0
    for parameter in parameters:
        places.append(size)
        size += -(-parameter.numel() // step) * step
    buffer = torch.zeros(size, dtype=dtype, device=device)
    for parameter, start in zip(parameters, places, strict=True):
        view = torch.as_strided(buffer, parameter.shape, dense_strides(parameter), start)
        parameter.data = view.copy_(parameter.detach())
    return buffer


def as_bytes(dense: Tensor) -> Tensor:
    """Return a dense tensor's memory as bytes, to be sent."""
    # gloo (torch 2.13) refuses 8-bit floats: "Invalid scalar type".
    flat = dense.detach().as_strided((dense.numel(),), (1,), dense.storage_offset())
    return flat.view(torch.uint8)


def dense_strides(parameter: Tensor) -> tuple[int, ...]:
    """Return its own strides if it is dense in any order of dimensions (channels_last), else contiguous ones."""
    return torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format).stride()


def lay_out(
    parameters: Iterable[Tensor],
    owners: dict[Tensor, int],
    before: Buckets,
) -> Buckets:
    """Put the trainable parameters into new buckets, by device and owner, in an order that all ranks have.

    What is frozen since leaves the buckets of before for memory of its own.
    """
    lists = defaultdict(list)
    frozen = []
    for parameter in dict.fromkeys(parameters):
        if parameter.requires_grad and parameter.numel():
            lists[parameter.device, owners[parameter]].append(parameter)
        else:
            frozen.append(parameter)
    _leave(frozen, before)
    # Devices in the order of their first parameter, and the owners of each by rank.
    buckets: Buckets = {device: {} for device, _ in lists}
    for device, rank in sorted(lists, key=lambda place: place[1]):
        buckets[device][rank] = ParameterBucket(lists[device, rank], device, rank)
    return buckets


def _leave(frozen: Iterable[Tensor], buckets: Buckets) -> None:
    """Give those parameters memory of their own that are views of buckets."""
    views = set()
    for by_owner in buckets.values():
        for bucket in by_owner.values():
            views.update(bucket.parameters)
    # Not those that are frozen from the start, which lie in memory of their own.
    for parameter in views.intersection(frozen):
        parameter.data = parameter.detach().clone()
