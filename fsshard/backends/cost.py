"""What a unit costs under an engine: bytes held, gathered and sent, computed from the engine's layout.

Nothing is run and nothing is sent. A step is one forward, one backward and the optimizer's step, in which every unit is
called once.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CALLS", "Numbers", "Payload", "UnitCost", "divided", "owned", "replicated"]


CALLS = "_fsshard_calls"
"""Attribute of a tensor: for how many calls of a collective the one over it stands, in a simulation."""


@dataclass(frozen=True, kw_only=True)
class Payload:
    """What is sent in one kind of collective for a unit in a step.

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


def replicated(held: int, reduced: int, ranks: int) -> UnitCost:
    """Whole on every rank, gradients averaged.

    Args:
        held: bytes of the unit.
        reduced: bytes of its gradients as they are sent.
        ranks: how many hold it.
    """
    return UnitCost(held=held, payloads=(Payload(kind="all_reduce", nbytes=reduced, least=reduced, ranks=ranks),))


def owned(held: int, reduced: int, updated: int, ranks: int, replicas: int = 1) -> UnitCost:
    """Whole on every rank; gradients go to the owner of each parameter, who sends the new values to all.

    Args:
        held: bytes of the unit.
        reduced: bytes of its gradients as they are sent.
        updated: bytes of what is trained.
        ranks: how many hold it.
        replicas: how many such groups average what their owners have.
    """
    payloads = [
        Payload(kind="all_to_all", nbytes=reduced, least=reduced, ranks=ranks),
        Payload(kind="broadcast", nbytes=updated, least=updated, ranks=ranks),
    ]
    if replicas > 1:  # of what is a rank's own, on average
        share = -(-reduced // ranks)
        payloads.append(Payload(kind="all_reduce", nbytes=share, least=share, ranks=replicas))
    return UnitCost(held=held, payloads=tuple(payloads))


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """How many numbers: ``padded`` on each rank, ``real`` of all ranks together without padding."""

    padded: int
    real: int


def divided(
    everything: Numbers,
    trainable: Numbers,
    itemsizes: tuple[int, int, int],
    gathers: tuple[int, ...],
    ranks: int,
    replicas: int,
) -> UnitCost:
    """Each rank keeps a part.

    Args:
        everything: the unit's numbers.
        trainable: those among them whose gradients are reduced.
        itemsizes: bytes of a number at rest, where it is computed with, and of a gradient that is sent.
        gathers: for each gather of a step, how many ranks take part.
        ranks: how many divide a copy.
        replicas: how many copies there are.
    """
    rest, compute, reduced = itemsizes
    whole = everything.padded * ranks * compute
    payloads = [
        Payload(kind="all_gather", nbytes=whole, least=everything.real * compute, ranks=count) for count in gathers
    ]
    summed = trainable.padded * reduced
    payloads.append(Payload(kind="reduce_scatter", nbytes=summed * ranks, least=trainable.real * reduced, ranks=ranks))
    if replicas > 1:
        least = -(-trainable.real // ranks) * reduced
        payloads.append(Payload(kind="all_reduce", nbytes=summed, least=least, ranks=replicas))
    held = everything.padded * rest
    return UnitCost(held=held, gathered=whole, gathers=len(gathers), payloads=tuple(payloads))
