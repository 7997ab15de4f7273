"""Checks that all ranks take the same steps at the same learning rates, since each updates its part of the model.

A step is local under FSDP1 and FSDP2, so one that a rank leaves out (``if rank == 0: optimizer.step()``, or ``if
loss.isfinite()`` of a local loss) shows nowhere: the next forward gathers weights of two steps. Ranks compare what they
have taken so far in forwards, which are collective there: the first few, then every :data:`EVERY`-th. A count that
is behind stays behind, so that nothing is missed by not looking each time, and it costs 16 times less.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.comm.agreement import per_rank
from fsshard.errors import RankMismatch
from fsshard.torch_private.dispatch import disable_current_modes

__all__ = ["StepCounts"]

FIRST, EVERY = 4, 16
COMPARED = ("lr", "weight_decay", "momentum", "betas")
"""What schedulers change; a ReduceLROnPlateau that was told this rank's loss changes it on this rank."""


class StepCounts:
    """How many steps the optimizers of one model have taken on this rank, and at which rates the last of them.

    They are kept here and not with the optimizers, which one rank's garbage collector may take earlier than another's.

    Args:
        group: the ranks that share the work; None: there is nobody to compare with.
        device: of the tensors that ranks exchange.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = None if group is None or group.size() == 1 else group
        self._device = device
        self._taken: list[tuple[int, list[list[Any]]]] = []  # per optimizer: its steps, its groups' COMPARED
        self._forwards = 0

    def new_optimizer(self) -> int:
        """A number for another optimizer, under which it reports its steps."""
        self._taken.append((0, []))
        return len(self._taken) - 1

    def took_step(self, number: int, groups: Iterable[dict[str, Any]]) -> None:
        """An optimizer takes a step. Local."""
        if self._group is None:
            return
        # What they are is looked at when it is compared: most steps never are.
        self._taken[number] = (self._taken[number][0] + 1, [[*map(group.get, COMPARED)] for group in groups])

    def forward_begins(self) -> None:
        """Compare, if it is time to. Collective; every rank has run as many forwards.

        Raises:
            RankMismatch: on every rank, naming those that left out steps.
        """
        if self._group is None:
            return
        self._forwards += 1
        if 1 < self._forwards <= FIRST or self._forwards % EVERY == 0:
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
        mine = tuple((count, tuple(map(_numbers, groups))) for count, groups in self._taken)
        if _differ(hash(mine) & (2**62 - 1), self._group, self._device):  # of numbers: the same in every process
            _raise(per_rank(self._group, mine))


def _differ(number: int, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the ranks' numbers are not the same. Collective, and no part of the step that trackers look at."""
    # What runs is counted by modes (MemoryTracker); without them 16 bytes would come and go in some steps. Private: in
    # torch/utils/_python_dispatch.py (2.13).
    with disable_current_modes():
        both = torch.tensor([number, -number], dtype=torch.int64, device=device)
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
        largest, smallest = both.tolist()
    return bool(largest != -smallest)


def _numbers(settings: list[Any]) -> tuple[Any, ...]:
    """Those of a group's settings that can be read without waiting for a GPU."""
    found = []
    for key, value in zip(COMPARED, settings, strict=True):
        if isinstance(value, Tensor):
            value = float(value) if value.numel() == 1 and value.device.type == "cpu" else None
        if isinstance(value, (int, float)) or (isinstance(value, tuple) and all(isinstance(v, float) for v in value)):
            found.append((COMPARED.index(key), value))
    return tuple(found)


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
    for rank, other in enumerate(taken):
        for group, (here, there) in enumerate(zip(_groups(taken[0]), _groups(other), strict=False)):
            for (key, value), (_, found) in zip(here, there, strict=False):
                if value != found:
                    raise RankMismatch(
                        f"ranks 0 and {rank} train with different settings: {COMPARED[key]} of param_groups[{group}] "
                        f"is {value} and {found}; give schedulers the same values on every rank (ReduceLROnPlateau "
                        "the mean of all ranks' losses)"
                    )
    raise RankMismatch("the ranks' optimizers differ in their groups; build and change them alike on every rank")


def _groups(taken: tuple[Any, ...]) -> list[Any]:
    return [group for _, groups in taken for group in groups]
