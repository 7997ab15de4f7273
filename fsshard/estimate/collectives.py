"""What collectives send: kind and payload of each, read off the operator that torch.distributed calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

__all__ = ["CALLS", "Collective", "Traffic", "collective_of", "sent", "traffic_of"]

SENDS_AND_RECEIVES_WHOLE = 2.0
"""An all_reduce is at least a reduce_scatter and an all_gather: each rank sends (N - 1) / N of the payload twice."""


@dataclass
class Collective:
    """One call.

    Attributes:
        kind: ``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"``, ``"broadcast"``, ``"reduce"`` and so on.
        nbytes: the payload: of the whole tensor, once; of an all_gather what comes out, of a reduce_scatter what goes
            in.
        ranks: how many take part.
        tensors: what travels; cleared once it has been looked at.
        calls: how many calls it stands for, see :data:`CALLS`.
    """

    kind: str
    nbytes: int
    ranks: int
    tensors: list[Tensor] = field(default_factory=list, repr=False)
    calls: int = 1


CALLS = "_fsshard_calls"
"""Attribute of a tensor that a simulation sends at once: how many calls send its parts in a real run."""


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
SILENT = ("wait_tensor", "barrier", "monitored_barrier")


def collective_of(func: Any, args: tuple[Any, ...], result: Any) -> Collective | None:
    """The collective that the call of an operator is, or None."""
    name: str = func._schema.name
    if not name.startswith(("c10d::", "_c10d_functional::")) or name.rstrip("_").endswith(SILENT):
        return None
    # What is not in the table counts with all that it was given, under its own name.
    kind, place = OPERATORS.get(name, (name.partition("::")[2].strip("_"), "all"))
    payload = result if place == "result" else args if place == "all" else args[int(place)]
    tensors = [leaf for leaf in tree_leaves(payload) if isinstance(leaf, Tensor)]
    travelling = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor)]
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    calls = max((getattr(tensor, CALLS, 1) for tensor in tensors), default=1)
    return Collective(kind, nbytes, _ranks(args), travelling, calls)


def _ranks(args: tuple[Any, ...]) -> int:
    """The size of the group among the arguments: an object, or for functional collectives its name."""
    from torch._C._distributed_c10d import ProcessGroup, _resolve_process_group

    for argument in reversed(args):
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return int(ProcessGroup.unbox(argument).size())
        if isinstance(argument, str):
            try:
                resolved: Any = _resolve_process_group(cast(Any, argument))
                return int(resolved.size())
            except (RuntimeError, ValueError):  # another string: the operation to reduce by
                continue
    return 1


def sent(kind: str, nbytes: int, ranks: int) -> float:
    """Bytes that a rank has to send at least for a payload of ``nbytes``, on average over ``ranks`` ranks."""
    share = (ranks - 1) / ranks if ranks else 0.0
    if kind == "receive":
        return 0.0
    return nbytes * (1.0 if kind == "send" else share * (SENDS_AND_RECEIVES_WHOLE if kind == "all_reduce" else 1.0))


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
