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
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
    trainable = [info.nbytes for info in plan.parameters.values() if info.requires_grad and not given.partly]
    if divides == "nothing" or given.shards <= 1:
        return _replicas(plan, given, trainable)
    if divides == "elements":
        return _shards(plan, given, sum(trainable))
    return _owners(plan, given, trainable)


def _replicas(plan: Plan, given: Circumstances, trainable: list[int]) -> Bounds:
    gradients = sum(trainable)
    payload = given.reduces * _scaled(gradients, plan.precision.reduce_dtype)
    payloads = {"all_reduce": payload} if given.shards > 1 else {}
    return _of_whole_parameters(plan, given, gradients, payloads)


def _owners(plan: Plan, given: Circumstances, trainable: list[int]) -> Bounds:
    total = sum(trainable)
    owned = max(-(-total // given.shards), *trainable, 0)
    reduced = given.reduces * _scaled(total, plan.precision.reduce_dtype)
    payloads = {"reduce": reduced, "broadcast": total}
    return _of_whole_parameters(plan, given, owned, payloads)


def _of_whole_parameters(
    plan: Plan,
    given: Circumstances,
    gradients: int,
    payloads: dict[str, int],
) -> Bounds:
    """Return the bounds where a rank has all parameters, and this many bytes of gradients with their states."""
    # States are of what this rank updates, as its gradients are.
    state = round(given.state_ratio * gradients)
    by_kind = {
        "parameters": plan.nbytes,
        "optimizer state": state,
        "gradients": gradients,
        "activations": given.activations,
    }
    peak = plan.nbytes + state + max(given.activations, gradients)
    return Bounds(peak=peak, by_kind=by_kind, **_traffic(given, payloads))


def _shards(plan: Plan, given: Circumstances, trainable: int) -> Bounds:
    parameters = 0
    gradients = 0
    state = 0
    if not given.offloaded:
        parameters = -(-plan.nbytes // given.shards)
        gradients = -(-trainable // given.shards)
        state = round(given.state_ratio * trainable / given.shards)
    units = [] if given.partly else _as_gathered(plan, given)
    sizes = [unit.computed for unit in units]
    gathered = sum(unit.sent for unit in units)
    alive = max(sizes, default=0)
    begins = given.activations
    if given.stays_gathered:
        alive = sum(sizes)
        begins += alive
    else:
        # Of what is frozen a backward may need nothing, and one unit can stay.
        again = [unit.sent for unit in units if unit.trainable]
        gathered += sum(again) - max(again, default=0)
    with_gradient = max((unit.computed + unit.gradient for unit in units), default=0)
    reduced = sum(_scaled(unit.trainable, plan.precision.reduce or unit.gather) for unit in units)
    payloads = {
        "all_gather": given.micro_batches * gathered,
        "reduce_scatter": given.reduces * reduced,
    }
    by_kind = {
        "parameters": parameters,
        "optimizer state": state,
        "gradients": gradients,
        "gathered units": alive,
        "activations": given.activations,
    }
    peak = parameters + state + max(begins, gradients, with_gradient)
    return Bounds(peak=peak, by_kind=by_kind, **_traffic(given, payloads))


def _traffic(given: Circumstances, payloads: dict[str, int]) -> dict[str, Any]:
    """Return payloads, with the reduction over replicas where there are several copies, and the bytes that are sent."""
    nbytes = sum(sent(kind, payload, given.shards) for kind, payload in payloads.items())
    if given.replicas > 1:
        reduced = payloads.get("reduce", 0) + payloads.get("reduce_scatter", 0)
        over = reduced // given.shards
        nbytes += sent("all_reduce", over, given.replicas)
        if over:
            payloads["all_reduce"] = over
    return {"payloads": payloads, "sent": round(nbytes)}


class _Gathered(NamedTuple):
    """Parameters that are gathered at once: bytes at rest, of those with gradients, and the dtype they compute in."""

    nbytes: int
    trainable: int
    compute: torch.dtype | None
    gather: torch.dtype | None  # the dtype in which they are sent

    @property
    def sent(self) -> int:
        return _scaled(self.nbytes, self.gather)

    @property
    def computed(self) -> int:
        return _scaled(self.nbytes, self.compute)

    @property
    def gradient(self) -> int:
        return _scaled(self.trainable, self.compute)


def _as_gathered(plan: Plan, given: Circumstances) -> list[_Gathered]:
    """Return the units; of several that are joined, which compute in one dtype, one."""
    units = []
    for unit in plan.units:
        names = unit.parameters
        if given.comm_groups is not None:
            names = given.comm_groups.get(unit.name, ())
        if not names:
            continue
        nbytes = 0
        trainable = 0
        for name in names:
            info = plan.parameters[name]
            nbytes += info.nbytes
            if info.requires_grad:
                trainable += info.nbytes
        units.append(_Gathered(nbytes, trainable, unit.compute, unit.send or unit.compute))
    return units


def _scaled(nbytes: int, dtype: torch.dtype | None) -> int:
    """Return the bytes in ``dtype`` of what is float32 at rest: under mixed precision all weights are."""
    if dtype is None:
        return nbytes
    return nbytes * dtype.itemsize // torch.float32.itemsize


def sent(kind: str, nbytes: int, ranks: int) -> float:
    """Return the bytes that a rank has to send at least for a payload of ``nbytes``, on average over the ranks."""
    if kind == "send":
        return float(nbytes)
    if kind == "receive" or not ranks:
        return 0.0
    share = (ranks - 1) / ranks
    # An all_reduce is at least a reduce_scatter and an all_gather: each rank sends its share of the payload twice.
    times = 2.0 if kind == "all_reduce" else 1.0
    return nbytes * share * times
