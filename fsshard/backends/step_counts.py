"""Checks that all ranks take the same steps at the same learning rates, since each updates its part of the model.

A step is local under FSDP1 and FSDP2, so one that a rank leaves out (``if rank == 0: optimizer.step()``, or ``if
loss.isfinite()`` of a local loss) shows nowhere: the next forward gathers weights of two steps.
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


class StepCounts:
    """The steps that the optimizers of one model have taken on this rank, and the latest learning rates."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        if group is not None and group.size() == 1:
            self._group = None
        self._device = device
        # Per optimizer its steps and its groups' learning rates. Kept here and not with the optimizers, which one
        # rank's garbage collector may take earlier than another's.
        self._taken: list[tuple[int, list[float]]] = []
        # On a GPU the host would wait for all that was begun: there an answer is read at the next comparison.
        self._reads_later = device.type == "cuda"
        self._unread: Tensor | None = None

    def new_optimizer(self) -> int:
        """Return a number for another optimizer, under which it reports its steps."""
        self._taken.append((0, []))
        return len(self._taken) - 1

    def took_step(self, number: int, groups: Iterable[dict[str, Any]]) -> None:
        """Count a step of an optimizer. Local."""
        if self._group is None:
            return
        count, _ = self._taken[number]
        rates = []
        for group in groups:
            rates.append(_number(group.get("lr")))
        self._taken[number] = (count + 1, rates)

    def compare(self) -> None:
        """Compare with the other ranks. Collective.

        Raises:
            RankMismatch: on every rank, with what two of them have done.
        """
        if self._group is None or type(torch.empty(0)) is not Tensor:
            return  # in an estimate there are no numbers, and no other ranks
        numbers = []
        for count, rates in self._taken:
            numbers += [count, len(rates), *rates]
        # Numbers have the same hash in every process.
        digest = hash(tuple(numbers)) & (2**62 - 1)
        # A mode that counts what runs (MemoryTracker) would see 16 bytes come and go in some steps. Private: in
        # torch/utils/_python_dispatch.py (2.13).
        with disable_current_modes():
            both = torch.tensor([digest, -digest], dtype=torch.int64, device=self._device)
            dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self._group)
            answer: Tensor | None = both
            if self._reads_later:
                answer = self._unread
                self._unread = both
            if answer is None:
                return
            largest, smallest = answer.tolist()
        if largest != -smallest:
            steps_of_ranks = per_rank(self._group, self._taken)
            first = steps_of_ranks[0]
            rank = 1
            while rank < len(steps_of_ranks) - 1 and steps_of_ranks[rank] == first:
                rank += 1
            raise RankMismatch(
                "expected optimizer.step() on every rank, and at the same rates, since each updates a part of the "
                f"weights; got {_told(first)} on rank 0 and {_told(steps_of_ranks[rank])} on rank {rank}. "
                "The parts belong to different steps now, so load a checkpoint; give schedulers the same values on "
                "every rank (ReduceLROnPlateau the mean of all ranks' losses)"
            )


def _number(rate: Any) -> float:
    """Return a learning rate as a number; -1 where there is none, or to read it would wait for a GPU."""
    is_number = isinstance(rate, (int, float))
    if isinstance(rate, Tensor):
        is_number = rate.numel() == 1 and rate.device.type == "cpu"
    return float(rate) if is_number else -1.0


def _told(taken: list[tuple[int, list[float]]]) -> str:
    texts = [f"{count} steps of optimizer {number} at lr {rates}" for number, (count, rates) in enumerate(taken)]
    return ", ".join(texts)
