"""The cost of a unit under an engine: bytes held, gathered and sent, computed from where elements lie.

Nothing is run and nothing is sent. A step is one forward, one backward and the optimizer's step, in which every unit is
called once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsshard.planning.entries import Entry
from fsshard.planning.plan import Unit

if TYPE_CHECKING:
    from fsshard.backends.base import Backend

CALLS = "_fsshard_calls"
"""Attribute of a tensor: for how many calls of a collective the one over it stands, in a simulation."""


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
    group = backend.settings.group
    for entry in backend.all:
        if entry.group is not None:
            group = entry.group
            break
    return 1 if group is None else group.size()


def unit_cost(backend: Backend, unit: Unit) -> UnitCost:
    """Return what ``unit`` costs on this rank, by arithmetic. Local."""
    entries = [backend.entries[name] for name in unit.parameters]
    if backend.facts.divides == "elements":
        return _cost_of_shards(backend, unit, entries) if entries else UnitCost(held=0)
    trained = _trained(entries)
    reduced = sum(_bytes_sent(entry, unit) for entry in trained)
    ranks = divided_among(backend)
    if backend.facts.divides == "nothing":
        return UnitCost(held=unit.nbytes, payloads=(Payload("all_reduce", reduced, reduced, ranks),))
    # Gradients go to the owner of each parameter, who sends the new values to all.
    updated = sum(entry.stored_shape.numel() * entry.parameter.element_size() for entry in trained)
    payloads = [Payload("all_to_all", reduced, reduced, ranks), Payload("broadcast", updated, updated, ranks)]
    replicas = backend.settings.world_size // ranks
    if replicas > 1:
        # Of what is a rank's own, on average.
        share = -(-reduced // ranks)
        payloads.append(Payload("all_reduce", share, share, replicas))
    return UnitCost(held=unit.nbytes, payloads=tuple(payloads))


def _cost_of_shards(backend: Backend, unit: Unit, entries: list[Entry]) -> UnitCost:
    ranks = divided_among(backend)
    replicas = backend.settings.world_size // ranks
    # A unit has one dtype.
    dtype = entries[0].parameter.dtype
    compute = (unit.compute or dtype).itemsize
    gather = (unit.send or unit.compute or dtype).itemsize
    send = (unit.reduce_dtype or dtype).itemsize
    padded, real = _numbers(entries)
    padded_gradients, real_gradients = _numbers(_trained(entries))
    gathers = backend._gathers(unit)
    gathered = padded * ranks * compute
    payloads = [Payload("all_gather", padded * ranks * gather, real * gather, count) for count in gathers]
    gathered_again = backend._gathered_again(unit)
    if gathered_again:
        padded_again, real_again = _numbers(gathered_again)
        payloads.append(Payload("all_gather", padded_again * ranks * gather, real_again * gather, ranks))
    payloads.append(Payload("reduce_scatter", padded_gradients * send * ranks, real_gradients * send, ranks))
    if replicas > 1:
        least = -(-real_gradients // ranks) * send
        payloads.append(Payload("all_reduce", padded_gradients * send, least, replicas))
    held = padded * dtype.itemsize
    return UnitCost(held=held, gathered=gathered, gathers=len(gathers), payloads=tuple(payloads))


def _trained(entries: list[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry.parameter.requires_grad]


def _bytes_sent(entry: Entry, unit: Unit) -> int:
    dtype = unit.reduce_dtype or entry.parameter.dtype
    return entry.stored_shape.numel() * dtype.itemsize


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
