"""Checks that all ranks take the same steps at the same learning rates, since each updates its part of the model.

A step is local under FSDP1 and FSDP2, so one that a rank leaves out (``if rank == 0: optimizer.step()``, or ``if
loss.isfinite()`` of a local loss) shows nowhere: the next forward gathers weights of two steps. Ranks compare what they
have taken so far in some of the forwards, which are collective there. A count that is behind stays behind, so that
nothing is missed by not looking each time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.backends.forward_guards import LooksAtForwards
from fsshard.comm.agreement import per_rank
from fsshard.errors import RankMismatch
from fsshard.torch_private.dispatch import disable_current_modes

__all__ = ["StepCounts"]


class StepCounts:
    """The steps that the optimizers of one model have taken on this rank, and the learning rates of the last of them.

    They are kept here and not with the optimizers, which one rank's garbage collector may take earlier than another's.

    Args:
        group: the ranks that share the work; None: there is nobody to compare with.
        device: of the tensors that ranks exchange.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = None if group is None or group.size() == 1 else group
        self._device = device
        self._taken: list[tuple[int, list[Any]]] = []  # per optimizer: its steps, its groups' learning rates
        self._looks = LooksAtForwards()

    def new_optimizer(self) -> int:
        """Return a number for another optimizer, under which it reports its steps."""
        self._taken.append((0, []))
        return len(self._taken) - 1

    def took_step(self, number: int, groups: Iterable[dict[str, Any]]) -> None:
        """Count a step of an optimizer. Local."""
        if self._group is None:
            return
        self._taken[number] = (self._taken[number][0] + 1, [group.get("lr") for group in groups])

    def forward_begins(self) -> None:
        """Compare, if this forward is looked at. Collective; every rank has run as many forwards.

        Raises:
            RankMismatch: on every rank, naming those that left out steps.
        """
        if self._group is not None and self._looks.begin():
            self.compare()

    def compare(self) -> None:
        """Compare now. Collective.

        Raises:
            RankMismatch: on every rank, naming those that left out steps.
        """
        if self._group is None:
            return
        if type(torch.empty(0)) is not Tensor:
            return  # an estimate: there are no numbers, and no other ranks
        mine = tuple((count, tuple(map(_number, rates))) for count, rates in self._taken)
        if _differ(hash(mine) & (2**62 - 1), self._group, self._device):  # of numbers: the same in every process
            _raise(per_rank(self._group, mine))


def _differ(number: int, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether the ranks' numbers are not the same. Collective, and no part of the step that trackers look at."""
    # What runs is counted by modes (MemoryTracker); without them 16 bytes would come and go in some steps. Private: in
    # torch/utils/_python_dispatch.py (2.13).
    with disable_current_modes():
        both = torch.tensor([number, -number], dtype=torch.int64, device=device)
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
        largest, smallest = both.tolist()
    return bool(largest != -smallest)


def _number(rate: Any) -> float | None:
    """Return a learning rate as a number; None where that would wait for a GPU."""
    if isinstance(rate, Tensor):
        return float(rate) if rate.numel() == 1 and rate.device.type == "cpu" else None
    return float(rate) if isinstance(rate, (int, float)) else None


def _raise(taken: list[tuple[Any, ...]]) -> None:
    """Say what differs; ``taken`` is every rank's."""
    steps = [[count for count, _ in rank] for rank in taken]
    for index, counts in enumerate(zip(*steps, strict=True)):
        behind = [rank for rank, count in enumerate(counts) if count < max(counts)]
        if behind:
            which = f"optimizer {index}: " if len(steps[0]) > 1 else ""
            named = ", ".join(f"rank {rank} has taken {counts[rank]}" for rank in behind[:8])
            raise RankMismatch(
                f"{which}optimizer.step() ran {max(counts)} times, but {named}: every rank has to call it, since each "
                "updates a part of the weights; now the parts belong to different steps, so load a checkpoint"
            )
    rates = [[rate for _, groups in rank for rate in groups] for rank in taken]
    for rank, other in enumerate(rates):
        for group, (here, there) in enumerate(zip(rates[0], other, strict=False)):
            if here != there:
                raise RankMismatch(
                    f"ranks 0 and {rank} train at different rates: lr of param_groups[{group}] is {here} and {there}; "
                    "give schedulers the same values on every rank (ReduceLROnPlateau the mean of all ranks' losses)"
                )
    raise RankMismatch("the ranks' optimizers differ in their groups; build and change them alike on every rank")
