"""Ranks that wait for each other outside of the group's collectives, so that who does not come is found out.

A collective that only some ranks call hangs until the group's own time is up, half an hour by default. Here each rank
leaves a note in the group's store before such a call; the notes of all together decide whether it takes place.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from ._errors import NotTogether

__all__ = ["Meeting"]

LOOK_EVERY = timedelta(seconds=1)


class Meeting:
    """The meetings of one process group, counted alike on all ranks.

    Attributes:
        number: of the next meeting.
        waited: how many works this rank has waited for with :meth:`wait`.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.number = 0
        self.waited = 0
        self._group_size, self._rank = group.size(), group.rank()
        self._store: Store = PrefixStore("fsshard/oss", dist.distributed_c10d._get_process_group_store(group))
        # NCCL's wait(timeout) would block the host until the device is done; its plain wait() does not block at all.
        self._looks = "gloo" in str(dist.get_backend(group))

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Meeting:
        """That of a group; the same one for all optimizers on it."""
        meeting = _meetings.get(group)
        if meeting is None:
            meeting = _meetings[group] = cls(group)
        return meeting

    def meet(self, what: str, patience: float) -> None:
        """Return when all ranks have called this with the same ``what``. No collective of the group.

        Raises:
            NotTogether: a rank did not come in ``patience`` seconds, or came for something else, or waits in another
                collective meanwhile; on every rank that came, and on the others as soon as they come or look.
        """
        key = self._next()
        self._store.set(f"{key}/first", f"{self._rank} {self.waited} {what}")
        self._store.set(f"{key}/{self._rank}", what)
        notes = [f"{key}/{rank}" for rank in range(self._group_size)]
        with suppress(dist.DistError, RuntimeError):  # time is up: who is missing is told below
            self._store.wait(notes, timedelta(seconds=patience))
        if self._store.add(f"{key}/decided", 1) == 1:  # the first that sees all, or has waited long enough, decides
            self._store.set(f"{key}/outcome", self._decide(notes, what, patience))
        outcome = self._store.get(f"{key}/outcome").decode()
        if outcome:
            raise NotTogether(outcome)

    def _next(self) -> int:
        number, self.number = self.number, self.number + 1
        if number > 1:  # all have left the one before the last
            with suppress(RuntimeError):
                self._store.delete_key(f"{number - 2}/{self._rank}")
        return number

    def _decide(self, notes: list[str], what: str, patience: float) -> str:
        """What is wrong, for all ranks to raise; empty if nothing is."""
        by_note: dict[str, list[int]] = {}
        missing = []
        for rank, note in enumerate(notes):
            if self._store.check([note]):
                by_note.setdefault(self._store.get(note).decode(), []).append(rank)
            else:
                missing.append(rank)
        if not missing and len(by_note) == 1:
            return ""
        told = [f"{_ranks(ranks)} called {note}" for note, ranks in by_note.items()]
        if missing:
            told.append(f"{_ranks(missing)} did not come within {patience:g} s (OSS.consolidate_timeout)")
        return f"{_name(what)} must be called alike on all ranks of the group: {'; '.join(told)}"

    def wait(self, work: Any, where: str) -> None:
        """Wait for a collective of the group, and leave it where another rank waits in a meeting instead.

        Args:
            work: what ``async_op=True`` returned; waited for in the same order on all ranks.
            where: what is going on, for the message.

        Raises:
            NotTogether: another rank went into a meeting without having taken part in this collective.
        """
        while True:
            try:
                work.wait(LOOK_EVERY) if self._looks else work.wait()
                break
            except RuntimeError:
                # Gloo (torch 2.13): "Operation timed out!" of this wait alone; the operation goes on.
                if work.is_completed():  # it ended in between; raises if it failed
                    work.wait()
                    break
                self._look(where)
        self.waited += 1

    def _look(self, where: str) -> None:
        first = f"{self.number}/first"
        if not self._store.check([first]):
            return
        rank, waited, what = self._store.get(first).decode().split(" ", 2)
        if int(waited) > self.waited:  # it is done with this collective, and the rest is on its way
            return
        self._store.set(f"{self.number}/{self._rank}", where)
        self._next()
        raise NotTogether(
            f"{_name(what)} must be called alike on all ranks of the group: rank {rank} called {what}, and "
            f"rank {self._rank} waits for it in {where}"
        )


_meetings: WeakKeyDictionary[dist.ProcessGroup, Meeting] = WeakKeyDictionary()


def _name(call: str) -> str:
    return call.partition("(")[0]


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
