"""Lower bounds of memory and traffic: what no implementation of an engine can go below, on the rank that needs most.

With P the parameters' bytes, T those of the trainable ones, s the optimizer's bytes per trainable byte (Adam: 2), N the
ranks that divide them, U the gathered units, L the largest trainable parameter and A what a forward leaves for its
backward, two moments count: when the backward begins (A is there, the gradients are not) and when the optimizer steps
(the other way round).

======================  ==========================================================================
replicas (ddp, none)    P + s T + max(A, T)
owners (fairscale)      P + s O + max(A, O), where O = max(T / N, L): whole parameters have owners
shards (fsdp, fsdp2)    (P + s T) / N + max(A, T / N, 2 U): the largest unit and its whole gradient
======================  ==========================================================================

Units are counted in the dtype in which they compute, and those that an engine gathers together as one. Shards that
stay gathered after the forward add up to the sum of the units at the first moment. Under CPU offload the terms that lie
in host memory are left out.

Bytes that a rank sends, c = (N - 1) / N: replicas 2 c T (an all_reduce is a reduce_scatter and an all_gather), owners
c T + c T on average over ranks, shards c T for the gradients and c times each unit for each gather: once per forward
and, where it is released after it and has something to train, once more per backward, but for one unit that can stay.
Where parameters may stay without gradient, nothing of this that is about gradients, their states or units is certain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from fsshard.planning.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Lower bounds, all in bytes."""

    peak: int
    by_kind: Mapping[str, int]  # of the highest of each kind; kinds without a bound are left out
    payloads: Mapping[str, int] = field(default_factory=dict)  # per step, of each kind of collective
    sent: int = 0  # by a rank per step, on average over the ranks


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """The circumstances besides the plan that the bounds depend on."""

    shards: int  # ranks that divide one copy
    replicas: int = 1  # copies, where there are several (HSDP)
    state_ratio: float = 0.0  # bytes of optimizer state per trainable byte
    activations: int = 0  # bytes that a forward leaves for its backward
    micro_batches: int = 1  # forwards per step
    reduces: int = 1  # reductions per step
    stays_gathered: bool = False  # units are not released after the forward
    offloaded: bool = False  # shards, gradients and optimizer state lie in host memory
    partly: bool = False  # parameters may stay without gradient, and units that hold them without a call
    # Unit -> the parameters that are gathered with it, where the engine joins units; None: as planned.
    comm_groups: Mapping[str, tuple[str, ...]] | None = None


def bounds_of(plan: Plan, divides: str, given: Circumstances) -> Bounds:
    """Return the lower bounds of ``plan`` where ranks divide ``"nothing"``, ``"elements"`` or ``"owners"``."""
    if given.partly:
        known = {name: replace(info, requires_grad=False) for name, info in plan.parameters.items()}
        plan = replace(plan, parameters=known)
    if divides == "elements" and given.shards > 1:
        return _shards(plan, given)
    return _owners(plan, given) if divides != "nothing" and given.shards > 1 else _replicas(plan, given)


def _replicas(plan: Plan, given: Circumstances) -> Bounds:
    trainable = sum(_trainable(plan).values())
    state = round(given.state_ratio * trainable)
    kinds = {"parameters": plan.nbytes, "optimizer state": state, "gradients": trainable}
    payload = given.reduces * _scaled(trainable, plan.precision.reduce_dtype)
    return Bounds(
        peak=plan.nbytes + state + max(given.activations, trainable),
        by_kind={**kinds, "activations": given.activations},
        payloads={"all_reduce": payload} if given.shards > 1 else {},
        sent=round(sent("all_reduce", payload, given.shards)),
    )


def _owners(plan: Plan, given: Circumstances) -> Bounds:
    sizes = _trainable(plan)
    trainable = sum(sizes.values())
    owned = max(-(-trainable // given.shards), *sizes.values())
    state = round(given.state_ratio * owned)
    kinds = {"parameters": plan.nbytes, "optimizer state": state, "gradients": owned}
    reduced = given.reduces * _scaled(trainable, plan.precision.reduce_dtype)
    over = reduced // given.shards if given.replicas > 1 else 0
    return Bounds(
        peak=plan.nbytes + state + max(given.activations, owned),
        by_kind={**kinds, "activations": given.activations},
        payloads={"reduce": reduced, "broadcast": trainable, **({"all_reduce": over} if over else {})},
        sent=round(
            sent("reduce", reduced, given.shards)
            + sent("broadcast", trainable, given.shards)
            + sent("all_reduce", over, given.replicas)
        ),
    )


def _shards(plan: Plan, given: Circumstances) -> Bounds:
    count, trainable = given.shards, sum(_trainable(plan).values())
    held = 0 if given.offloaded else -(-plan.nbytes // count)
    gradients = 0 if given.offloaded else -(-trainable // count)
    state = 0 if given.offloaded else round(given.state_ratio * trainable / count)
    units = [] if given.partly else _as_gathered(plan, given)
    sizes = [unit.computed for unit in units]
    again = [unit.computed for unit in units if unit.trainable]  # of what is frozen a backward may need nothing
    largest, everything = max(sizes, default=0), sum(sizes)
    with_gradient = max((unit.computed + unit.gradient for unit in units), default=0)
    begins = given.activations + (everything if given.stays_gathered else 0)
    gathered = given.micro_batches * (everything + (0 if given.stays_gathered else sum(again) - max(again, default=0)))
    reduce_dtype = plan.precision.reduce
    reduced = given.reduces * sum(_scaled(unit.trainable, reduce_dtype or unit.compute) for unit in units)
    payloads = {"all_gather": gathered, "reduce_scatter": reduced}
    over = reduced // count if given.replicas > 1 else 0
    return Bounds(
        peak=held + state + max(begins, gradients, with_gradient),
        by_kind={
            "parameters": held,
            "optimizer state": state,
            "gradients": gradients,
            "gathered units": everything if given.stays_gathered else largest,
            "activations": given.activations,
        },
        payloads={**payloads, **({"all_reduce": over} if over else {})},
        sent=round(
            sum(sent(kind, nbytes, count) for kind, nbytes in payloads.items())
            + sent("all_reduce", over, given.replicas)
        ),
    )


def _trainable(plan: Plan) -> dict[str, int]:
    return {name: info.nbytes for name, info in plan.parameters.items() if info.requires_grad} or {"": 0}


class _Gathered(NamedTuple):
    """Parameters that are gathered at once: bytes at rest, of those with gradients, and the dtype they compute in."""

    nbytes: int
    trainable: int
    compute: torch.dtype | None

    @property
    def computed(self) -> int:
        return _scaled(self.nbytes, self.compute)

    @property
    def gradient(self) -> int:
        return _scaled(self.trainable, self.compute)


def _as_gathered(plan: Plan, given: Circumstances) -> list[_Gathered]:
    """Return the units; of several that are joined, which compute in one dtype, one."""
    found = []
    for unit in plan.units:
        names = unit.parameters if given.comm_groups is None else given.comm_groups.get(unit.name, ())
        own = [plan.parameters[name] for name in names]
        if own:
            trainable = sum(info.nbytes for info in own if info.requires_grad)
            found.append(_Gathered(sum(info.nbytes for info in own), trainable, unit.compute))
    return found


def _scaled(nbytes: int, dtype: torch.dtype | None) -> int:
    """Return the bytes in ``dtype`` of what is float32 at rest: under mixed precision all weights are."""
    return nbytes if dtype is None else nbytes * dtype.itemsize // torch.float32.itemsize


def sent(kind: str, nbytes: int, ranks: int) -> float:
    """Return the bytes that a rank has to send at least for a payload of ``nbytes``, on average over the ranks."""
    share = (ranks - 1) / ranks if ranks else 0.0
    if kind in ("send", "receive"):
        return float(nbytes) if kind == "send" else 0.0
    # An all_reduce is at least a reduce_scatter and an all_gather: each rank sends its share of the payload twice.
    return nbytes * share * (2.0 if kind == "all_reduce" else 1.0)
