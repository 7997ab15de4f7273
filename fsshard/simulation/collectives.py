"""Reads what collectives send, kind and payload of each, from the operator that torch.distributed calls."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.backends.cost import CALLS
from fsshard.nested import leaves as tree_leaves
from fsshard.planning.traffic import sent
from fsshard.torch_private.c10d import group_named
from fsshard.torch_private.dispatch import schema_of

__all__ = ["Collective", "Traffic", "collective_of", "traffic_of"]


@dataclass
class Collective:
    """One call.

    Attributes:
        kind: ``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"``, ``"broadcast"``, ``"reduce"`` and so on.
        nbytes: the payload: of the whole tensor, once; of an all_gather what comes out, of a reduce_scatter what goes
            in.
        ranks: how many take part.
        tensors: what is sent; cleared once it has been looked at.
        calls: how many calls it stands for, see :data:`fsshard.backends.cost.CALLS`.
    """

    kind: str
    nbytes: int
    ranks: int
    tensors: list[Tensor] = field(default_factory=list, repr=False)
    calls: int = 1


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """All collectives of one kind in a step, of one rank.

    Attributes:
        kind: as of :class:`Collective`.
        count: how many.
        nbytes: their payloads.
        sent: bytes that a rank has to send for them at least, on average over the ranks.
    """

    kind: str
    count: int
    nbytes: int
    sent: int


# Operator -> (kind, where its payload is: the number of an argument, or "result").
OPERATORS: dict[str, tuple[str, int | str]] = {
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::allreduce_coalesced_": ("all_reduce", 0),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::reduce_": ("reduce", 0),
    "c10d::allgather_": ("all_gather", 0),
    "c10d::allgather_coalesced_": ("all_gather", 0),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", 0),
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::reduce_scatter_": ("reduce_scatter", 1),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "c10d::gather_": ("gather", 1),
    "c10d::scatter_": ("scatter", 1),
    "c10d::alltoall_": ("all_to_all", 1),
    "c10d::alltoall_base_": ("all_to_all", 1),
    "c10d::send": ("send", 0),
    "c10d::recv_": ("receive", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_reduce_": ("all_reduce", 0),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", 0),
    "_c10d_functional::broadcast": ("broadcast", 0),
    "_c10d_functional::broadcast_": ("broadcast", 0),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", "result"),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", "result"),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", "result"),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce_scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0),
}
SILENT = ("wrap_tensor_autograd", "wait_tensor", "barrier", "monitored_barrier")


def collective_of(func: Any, args: tuple[Any, ...], result: Any) -> Collective | None:
    """The collective that the call of an operator is, or None."""
    name: str = schema_of(func).name
    if not name.startswith(("c10d::", "_c10d_functional::")) or name.rstrip("_").endswith(SILENT):
        return None
    # What is not in the table counts with all that it was given, under its own name.
    kind, place = OPERATORS.get(name, (name.partition("::")[2].strip("_"), "all"))
    payload = result if place == "result" else args if place == "all" else args[int(place)]
    tensors = [leaf for leaf in tree_leaves(payload) if isinstance(leaf, Tensor)]
    travelling = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor)]
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if name.startswith("c10d::alltoall_base"):
        nbytes += _kept(args)
    calls = max((getattr(tensor, CALLS, 1) for tensor in tensors), default=1)
    return Collective(kind, nbytes, _ranks(args), travelling, calls)


def _kept(args: tuple[Any, ...]) -> int:
    """Bytes that belong to the payload of an all_to_all and that this rank keeps where they are: its own part.

    Our OSS sends what others own, and receives from each of them as much as it owns itself.
    """
    received, _, _, sizes, splits, *_ = args
    ranks = _ranks(args)
    others = [size for size in sizes if size]
    if ranks < 2 or len(splits) != ranks or all(splits) or len(others) != ranks - 1:
        return 0
    return int(received.numel() * received.element_size() // (ranks - 1))


def _ranks(args: tuple[Any, ...]) -> int:
    """The size of the group among the arguments: an object, or for functional collectives its name."""
    for argument in reversed(args):
        if isinstance(argument, torch.ScriptObject):
            with suppress(RuntimeError):  # it is an operation to reduce by
                return int(dist.ProcessGroup.unbox(argument).size())
        named = group_named(argument) if isinstance(argument, str) else None
        if named is not None:  # else another string: the operation to reduce by
            return int(named.size())
    return 1


def traffic_of(collectives: Iterable[Collective]) -> tuple[Traffic, ...]:
    """The collectives by kind, the largest payload first."""
    found: dict[str, list[Collective]] = {}
    for collective in collectives:
        found.setdefault(collective.kind, []).append(collective)
    summed = (
        Traffic(
            kind=kind,
            count=sum(call.calls for call in calls),
            nbytes=sum(call.nbytes for call in calls),
            sent=round(sum(sent(kind, call.nbytes, call.ranks) for call in calls)),
        )
        for kind, calls in found.items()
    )
    return tuple(sorted(summed, key=lambda traffic: (-traffic.nbytes, traffic.kind)))
