"""The cost of a unit under an engine: bytes held, gathered and sent, computed from where elements lie.

Nothing is run and nothing is sent. A step is one forward, one backward and the optimizer's step, in which every unit is
called once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fsshard.planning.entries import Entry
from fsshard.planning.plan import Unit

if TYPE_CHECKING:
    from fsshard.backends.base import Backend

# Attribute of a tensor: for how many calls of a collective the one over it stands, in a simulation.
CALLS = "_fsshard_calls"


@dataclass(frozen=True)
class Payload:
    """The bytes that are sent in one kind of collective for a unit in a step.

    Attributes:
        kind: ``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"``, ``"all_to_all"`` or ``"broadcast"``.
        nbytes: of the whole tensors, padding too.
        least: without padding.
        ranks: how many take part.
    """

    kind: str
    nbytes: int
    least: int
    ranks: int


@dataclass(frozen=True, kw_only=True)
class UnitCost:
    """One unit on one rank.

    Attributes:
        held: bytes of its parameters that the rank keeps between steps, padding too.
        gathered: bytes of the whole unit while it is gathered; 0 where it never is.
        gathers: how often that is in a step.
        payloads: what is sent.
    """

    held: int
    gathered: int = 0
    gathers: int = 0
    payloads: tuple[Payload, ...] = ()


def divided_among(backend: Backend) -> int:
    """Return how many ranks share one copy of what the engine divides; all ranks, where it divides nothing."""
    groups = [entry.group for entry in backend.all]
    for group in (*groups, backend.settings.group):
        if group is not None:
            return group.size()
    return 1


def unit_cost(backend: Backend, unit: Unit) -> UnitCost:
    """Return what ``unit`` costs on this rank, by arithmetic. Local."""
    entries = [backend.entries[name] for name in unit.parameters]
    if backend.facts.divides == "elements":
        if not entries:
            return UnitCost(held=0)
        return _cost_of_shards(backend, unit, entries)
    reduced = 0
    updated = 0
    for entry in _trained(entries):
        numbers = entry.stored_shape.numel()
        dtype = entry.parameter.dtype
        reduced += numbers * (unit.reduce_dtype or dtype).itemsize
        updated += numbers * dtype.itemsize
    ranks = divided_among(backend)
    if backend.facts.divides == "nothing":
        payloads = [Payload("all_reduce", reduced, reduced, ranks)]
        return UnitCost(held=unit.nbytes, payloads=tuple(payloads))
    # Gradients go to the owner of each parameter, who sends the new values to all.
    payloads = [
        Payload("all_to_all", reduced, reduced, ranks),
        Payload("broadcast", updated, updated, ranks),
    ]
    replicas = backend.settings.world_size // ranks
    if replicas > 1:
        # Of what is a rank's own, on average.
        share = -(-reduced // ranks)
        payloads.append(Payload("all_reduce", share, share, replicas))
    return UnitCost(held=unit.nbytes, payloads=tuple(payloads))


def _cost_of_shards(backend: Backend, unit: Unit, entries: list[Entry]) -> UnitCost:
    ranks = divided_among(backend)
    # A unit has one dtype.
    dtype = entries[0].parameter.dtype
    compute = unit.compute or dtype
    gather = unit.send or compute
    gathers = backend._gathers(unit)
    padded, real = _numbers(entries)
    payloads = []
    for count in gathers:
        # FSDP2 can gather again among fewer ranks than share a copy.
        payloads.append(Payload("all_gather", padded * ranks * gather.itemsize, real * gather.itemsize, count))
    gathered_again = backend._gathered_again(unit)
    if gathered_again:
        payloads.append(_payload("all_gather", gathered_again, gather, ranks))
    send = unit.reduce_dtype or dtype
    reduced = _payload("reduce_scatter", _trained(entries), send, ranks)
    payloads.append(reduced)
    replicas = backend.settings.world_size // ranks
    if replicas > 1:
        # Each rank has its part of the gradients by then.
        numbers = reduced.least // send.itemsize
        least = -(-numbers // ranks) * send.itemsize
        payloads.append(Payload("all_reduce", reduced.nbytes // ranks, least, replicas))
    return UnitCost(
        held=padded * dtype.itemsize,
        gathered=padded * ranks * compute.itemsize,
        gathers=len(gathers),
        payloads=tuple(payloads),
    )


def _payload(kind: str, entries: list[Entry], dtype: torch.dtype, ranks: int) -> Payload:
    """Return what is sent of all shards of some parameters, by the ranks that share a copy."""
    padded, real = _numbers(entries)
    return Payload(kind, padded * ranks * dtype.itemsize, real * dtype.itemsize, ranks)


def _trained(entries: list[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry.parameter.requires_grad]


def _numbers(entries: list[Entry]) -> tuple[int, int]:
    """Return how many there are on each rank with padding, and of all ranks together without.

    A flat parameter is reduced whole, what is frozen in it too.
    """
    real = sum(entry.stored_shape.numel() for entry in entries)
    strides = {}
    for entry in entries:
        if entry.cut is not None:
            strides[entry.cut.buffer or entry.name] = entry.cut.stride
    padded = sum(strides.values()) if strides else real
    return padded, real
