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
    group = next((entry.group for entry in backend.all if entry.group is not None), backend.settings.group)
    return 1 if group is None else group.size()


def unit_cost(backend: Backend, unit: Unit) -> UnitCost:
    """Return what ``unit`` costs on this rank, by arithmetic. Local."""
    entries = [backend.entries[name] for name in unit.parameters]
    trained = [entry for entry in entries if entry.parameter.requires_grad]
    reduced = sum(e.stored_shape.numel() * (unit.reduce_dtype or e.parameter.dtype).itemsize for e in trained)
    ranks = divided_among(backend)
    replicas = backend.settings.world_size // ranks
    if backend.facts.divides == "nothing":
        return UnitCost(held=unit.nbytes, payloads=(Payload("all_reduce", reduced, reduced, ranks),))
    if backend.facts.divides == "owners":
        # Gradients go to the owner of each parameter, who sends the new values to all.
        updated = sum(e.stored_shape.numel() * e.parameter.element_size() for e in trained)
        payloads = [Payload("all_to_all", reduced, reduced, ranks), Payload("broadcast", updated, updated, ranks)]
        share = -(-reduced // ranks)  # of what is a rank's own, on average
        payloads += [Payload("all_reduce", share, share, replicas)] if replicas > 1 else []
        return UnitCost(held=unit.nbytes, payloads=tuple(payloads))
    if not entries:
        return UnitCost(held=0)
    rest = entries[0].parameter.dtype  # one per unit
    compute, send = (unit.compute or rest).itemsize, (unit.reduce_dtype or rest).itemsize
    (padded, real), (padded_grads, real_grads) = _numbers(entries), _numbers(trained)
    gathers, whole = backend._gathers(unit), padded * ranks * compute
    payloads = [Payload("all_gather", whole, real * compute, count) for count in gathers]
    if again := backend._gathered_again(unit):
        count, own = _numbers(again)
        payloads.append(Payload("all_gather", count * ranks * compute, own * compute, ranks))
    payloads.append(Payload("reduce_scatter", padded_grads * send * ranks, real_grads * send, ranks))
    if replicas > 1:
        payloads.append(Payload("all_reduce", padded_grads * send, -(-real_grads // ranks) * send, replicas))
    held = padded * rest.itemsize
    return UnitCost(held=held, gathered=whole, gathers=len(gathers), payloads=tuple(payloads))


def _numbers(entries: list[Entry]) -> tuple[int, int]:
    """Return how many there are on each rank with padding, and of all ranks together without.

    A flat parameter is reduced whole, what is frozen in it too.
    """
    real = sum(entry.stored_shape.numel() for entry in entries)
    places = {e.cut.buffer or e.name: e.cut.stride for e in entries if e.cut is not None}
    return (sum(places.values()) if places else real), real
