"""Reads what collectives send, kind and payload of each, from the operator that torch.distributed calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.backends.cost import CALLS
from fsshard.nested import tensors
from fsshard.planning.bounds import sent
from fsshard.torch_private.c10d import group_named
from fsshard.torch_private.dispatch import schema_of

Ranks = tuple[int, ...]


@dataclass
class Collective:
    """One call."""

    kind: str  # "all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce" and so on
    nbytes: int  # of the whole tensor, once: of an all_gather what comes out, of a reduce_scatter what goes in
    members: Ranks  # the ranks of the job that take part; () where it is not known
    tensors: list[Tensor]  # what is sent; cleared once it has been looked at
    calls: int = 1  # how many calls it stands for, see fsshard.backends.cost.CALLS


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """All collectives of one kind in a step, of one rank."""

    kind: str  # "all_gather", ...
    count: int
    nbytes: int  # their payloads
    sent: int  # bytes that a rank has to send for them at least, on average over the ranks
    by_group: Mapping[Ranks, GroupTraffic]  # ranks that take part -> the share of it among them


class GroupTraffic(NamedTuple):
    """The share of :class:`Traffic` that one group of ranks has."""

    calls: int
    sent: float


# Beginning of an operator's name, without underscores: its kind, and which argument of c10d's operator is the payload.
KINDS: dict[str, tuple[str, int]] = {
    "allreduce": ("all_reduce", 0),
    "allgather": ("all_gather", 0),
    "alltoall": ("all_to_all", 1),
    "broadcast": ("broadcast", 0),
    "reducescatter": ("reduce_scatter", 1),
    # It comes after reducescatter, which begins with it.
    "reduce": ("reduce", 0),
    "gather": ("gather", 1),
    "scatter": ("scatter", 1),
    "send": ("send", 0),
    "recv": ("receive", 0),
}
SILENT = ("wraptensorautograd", "waittensor", "barrier", "monitoredbarrier")


def collective_of(func: Any, args: tuple[Any, ...], result: Any) -> Collective | None:
    """Return the collective that the call of an operator is, or None."""
    library, _, name = schema_of(func).name.partition("::")
    plain = name.replace("_", "")
    if library not in ("c10d", "_c10d_functional") or plain in SILENT:
        return None
    kind = name.strip("_")
    # An unknown collective counts with all that it was given.
    payload = args
    for beginning, (known_kind, place) in KINDS.items():
        if plain.startswith(beginning):
            kind = known_kind
            # Functional ones have their payload in front, and return what an all_gather gives.
            payload = args[place if library == "c10d" else 0]
            if library != "c10d" and kind == "all_gather":
                payload = result
            break
    nbytes = 0
    calls = 1
    for tensor in tensors(payload):
        nbytes += tensor.numel() * tensor.element_size()
        calls = max(calls, getattr(tensor, CALLS, 1))
    members = _members(args)
    if plain == "alltoallbase":
        nbytes += _kept(args, len(members))
    return Collective(
        kind=kind,
        nbytes=nbytes,
        members=members,
        tensors=list(tensors((args, result))),
        calls=calls,
    )


def _kept(args: tuple[Any, ...], ranks: int) -> int:
    """Return the bytes of an all_to_all's payload that this rank keeps where they are: its own part."""
    # Our OSS sends what others own, and receives from each of them as much as it owns itself.
    received, _, _, sizes, splits, *_ = args
    others = [size for size in sizes if size]
    if ranks < 2 or len(splits) != ranks or all(splits) or len(others) != ranks - 1:
        return 0
    return int(received.numel() * received.element_size() // (ranks - 1))


def _members(args: tuple[Any, ...]) -> Ranks:
    """Return the ranks of the group among the arguments: an object, or for functional collectives its name."""
    for argument in reversed(args):
        group = None
        if isinstance(argument, torch.ScriptObject):
            # It may be an operation to reduce by.
            with suppress(RuntimeError):
                group = group_named(dist.ProcessGroup.unbox(argument).group_name)
        elif isinstance(argument, str):
            # Another string is the operation to reduce by.
            group = group_named(argument)
        if group is not None:
            return tuple(dist.get_process_group_ranks(group))
    return ()


def traffic_of(collectives: Iterable[Collective]) -> tuple[Traffic, ...]:
    """Sum the collectives by kind, the largest payload first."""
    by_kind = defaultdict(list)
    for collective in collectives:
        by_kind[collective.kind].append(collective)
    summed = []
    for kind, calls in by_kind.items():
        by_group: dict[Ranks, GroupTraffic] = {}
        for call in calls:
            before = by_group.get(call.members, GroupTraffic(0, 0.0))
            nbytes = before.sent + sent(kind, call.nbytes, len(call.members))
            by_group[call.members] = GroupTraffic(before.calls + call.calls, nbytes)
        shares = by_group.values()
        traffic = Traffic(
            kind=kind,
            count=sum(share.calls for share in shares),
            nbytes=sum(call.nbytes for call in calls),
            sent=round(sum(share.sent for share in shares)),
            by_group=by_group,
        )
        summed.append(traffic)
    summed.sort(key=lambda traffic: (-traffic.nbytes, traffic.kind))
    return tuple(summed)
