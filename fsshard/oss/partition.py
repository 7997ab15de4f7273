"""Decide which rank owns which parameter, build the optimizer over the own ones, and pack owners' parameters.

An owner's parameters are views of one flat buffer, which a step sends in one piece.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fsshard.errors import UnsupportedByBackend

GLOBAL_OPTIMIZERS = frozenset({"LBFGS"})
"""Known to use inner products over all parameters (under FairScale's OSS: NaN)."""

NOT_SYNCED = ("params", "param_names")  # what a group of one rank has for itself
ALIGNMENT = 64  # bytes, of torch's own allocations on the CPU


def assign_owners(parameters: Iterable[Tensor], owners: dict[Tensor, int], loads: list[int]) -> None:
    """Give each parameter without an owner, in an order that all ranks have, to the rank with the least bytes so far.

    This is FairScale's own rule. ``owners`` and ``loads``, in bytes, are added to.
    """
    for parameter in parameters:
        # An owner stays for good. FairScale 0.4.13 deals all of them out anew in add_param_group and leaves the state
        # where it was: what changes hands is updated by nobody.
        if parameter not in owners:
            owners[parameter] = rank = loads.index(min(loads))
            # Bytes: elements, which FairScale counts, would count a complex number as one.
            loads[rank] += parameter.element_size() * (parameter.numel() if parameter.requires_grad else 1)


def group_of_owner(group: Mapping[str, Any], owners: Mapping[Tensor, int], rank: int) -> dict[str, Any]:
    """Copy a group with the parameters, and their names, of one rank."""
    mine = [index for index, parameter in enumerate(group["params"]) if owners[parameter] == rank]
    part = {**group, "params": [group["params"][index] for index in mine]}
    if "param_names" in group:
        part["param_names"] = [group["param_names"][index] for index in mine]
    return part


def check_separable(optimizer_class: Any, world_size: int) -> None:
    """Raise for an algorithm that looks at all parameters at once, and would run on each rank's own ones.

    FairScale 0.4.13 runs LBFGS on each shard, with a line search each: NaN.
    """
    known = {base.__name__ for base in getattr(optimizer_class, "__mro__", ())} & GLOBAL_OPTIMIZERS
    # That of build_optimizer asks all ranks by itself.
    if known and world_size > 1 and not getattr(optimizer_class, "counts_all_ranks", False):
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


# ------------------------------------------------------------------------------------------------ flat buffers


class ParameterBucket:
    """The trainable parameters of one owner on one device.

    Attributes:
        buffers: one flat tensor per dtype.
        owner: the rank of the group that updates them.
        as_bytes: the same memory, as what is sent.
        parameters: the views of it.
    """

    def __init__(self, parameters: Sequence[Tensor], device: torch.device, owner: int) -> None:
        self.owner = owner
        self.buffers: dict[torch.dtype, Tensor] = {}
        self.parameters: list[Tensor] = []
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            group = sorted((p for p in parameters if p.dtype == dtype), key=Tensor.numel)
            self.buffers[dtype] = packed(group, dtype, device)
            self.parameters += group
        self.as_bytes = [as_bytes(buffer) for buffer in self.buffers.values()]


@torch.no_grad()
def packed(parameters: Iterable[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a buffer that has the parameters' values, and of which they are views from here on.

    Each begins where memory of its own would. Products with a vector are rounded by its address (MKL, torch 2.13); and
    behind a parameter of odd size a complex view fails: "Tensor must have a storage_offset divisible by 2".
    """
    parameters, step = list(parameters), ALIGNMENT // dtype.itemsize
    buffer = torch.zeros(sum(-(-p.numel() // step) * step for p in parameters), dtype=dtype, device=device)
    start = 0
    for parameter in parameters:
        view = torch.as_strided(buffer, parameter.shape, dense_strides(parameter), start)
        parameter.data = view.copy_(parameter.detach())
        start += -(-parameter.numel() // step) * step
    return buffer


def as_bytes(dense: Tensor) -> Tensor:
    """Return a dense tensor's memory as bytes, to be sent; gloo (torch 2.13) on 8-bit floats: "Invalid scalar type"."""
    return dense.detach().as_strided((dense.numel(),), (1,), dense.storage_offset()).view(torch.uint8)


def dense_strides(parameter: Tensor) -> tuple[int, ...]:
    """Return its own strides if it is dense in any order of dimensions (channels_last), else contiguous ones."""
    return torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format).stride()


def lay_out(
    parameters: Iterable[Tensor], owners: dict[Tensor, int], before: dict[torch.device, dict[int, ParameterBucket]]
) -> dict[torch.device, dict[int, ParameterBucket]]:
    """Put the trainable parameters into new buckets, by device and owner, in an order that all ranks have.

    What is frozen since leaves the buckets of before for memory of its own.
    """
    left = {parameter for buckets in before.values() for bucket in buckets.values() for parameter in bucket.parameters}
    lists: dict[torch.device, dict[int, list[Tensor]]] = {}
    for parameter in dict.fromkeys(parameters):
        if parameter.requires_grad and parameter.numel():
            lists.setdefault(parameter.device, {}).setdefault(owners[parameter], []).append(parameter)
        elif parameter in left:
            parameter.data = parameter.detach().clone()
    return {
        device: {rank: ParameterBucket(by_owner[rank], device, rank) for rank in sorted(by_owner)}
        for device, by_owner in lists.items()
    }
