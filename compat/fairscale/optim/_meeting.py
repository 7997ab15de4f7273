"""Ranks that wait for each other outside of the group's collectives, so that who does not come is found out.

A collective that only some ranks call hangs until the group's own time is up, half an hour by default. Here each rank
leaves a note in the group's store before such a call; the notes of all together decide whether it takes place. A rank
that is only late is waited for; one is given up for which there is evidence that it is elsewhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fsshard.comm.stores import PatientStore, own_store, timeout_of

from ._errors import NotTogether

__all__ = ["Meeting"]

log = logging.getLogger("fsshard")

LOOK_EVERY = timedelta(seconds=1)
SAY_EVERY = 15.0  # seconds
DECISION = 10.0  # seconds for the rank that decides to write down what it found
APART = "apart"
AFTERWARDS = "; since then the ranks are out of step: end the process group, and go on from a checkpoint"


class Meeting:
    """The meetings of one process group, counted alike on all ranks.

    Attributes:
        number: of the next meeting.
        waited: how many works this rank has waited for with :meth:`wait`.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.number = 0
        self.waited = 0
        self._apart = ""  # why the ranks can no longer go on together
        self._group_size, self._rank = group.size(), group.rank()
        self._store = own_store(group, "oss")
        self._patience = timeout_of(group)
        # NCCL's wait(timeout) would block the host until the device is done; its plain wait() does not block at all.
        self._looks = "gloo" in str(dist.get_backend(group))
        self._looked = time.monotonic()
        # Not atexit, which children of multiprocessing leave out.
        Finalize(self, _leave, (self._store, f"gone/{self._rank}"), exitpriority=0)

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Meeting:
        """That of a group; the same one for all optimizers on it."""
        meeting = _meetings.get(group)
        if meeting is None:
            meeting = _meetings[group] = cls(group)
        return meeting

    # ------------------------------------------------------------------------------------------------ meetings

    def meet(self, what: str, patience: float | None = None) -> None:
        """Return when all ranks have called this with the same ``what``. No collective of the group.

        Args:
            what: the call, as users write it.
            patience: seconds to wait for a rank of which nothing is known; None for the process group's timeout.

        Raises:
            NotTogether: a rank waits in another collective, or came for something else, or has ended, or did not come
                in ``patience`` seconds; on every rank that came, and on the others as soon as they come or look.
        """
        self.check()
        key = self._next()
        self._store.set(f"{key}/first", f"{self._rank} {self.waited} {what}")
        self._store.set(f"{key}/{self._rank}", what)
        notes = [f"{key}/{rank}" for rank in range(self._group_size)]
        self._await(notes, what, self._patience if patience is None else patience)
        if self._store.add(f"{key}/decided", 1) == 1:  # the first that sees all, or has waited long enough, decides
            self._store.set(f"{key}/outcome", self._decide(notes, what, patience))
        if not self._store.awaited([f"{key}/outcome"], DECISION):
            raise NotTogether(f"{what}: a rank was lost while the ranks came together")
        outcome = self._read(f"{key}/outcome")
        if outcome:
            self._apart = self._read(APART)
            raise NotTogether(outcome)

    def _next(self) -> int:
        number, self.number = self.number, self.number + 1
        if number > 1:  # all have left the one before the last
            with suppress(RuntimeError):
                self._store.delete_key(f"{number - 2}/{self._rank}")
        return number

    def _await(self, notes: list[str], what: str, patience: float) -> None:
        """Return when all have come, or time is up, or there is evidence that a rank will not come."""
        begun = said = time.monotonic()
        pause = 0.001
        # No wait of the store with a limit: that of TCP (torch 2.13) writes "waitForInput: socket ... timed out".
        while not self._store.check(notes) and (left := begun + patience - time.monotonic()) > 0:
            time.sleep(min(pause, left))
            pause = min(2 * pause, 0.25)
            missing = [rank for rank, note in enumerate(notes) if not self._store.check([note])]
            if self._gone(missing) or self._read(APART):
                return
            if missing and time.monotonic() - said >= SAY_EVERY:
                said = time.monotonic()
                log.warning("%s has waited %.0f s for %s to call it as well", what, said - begun, _ranks(missing))

    def _gone(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if self._store.check([f"gone/{rank}"])]

    def _decide(self, notes: list[str], what: str, patience: float | None) -> str:
        """What is wrong, for all ranks to raise; empty if nothing is."""
        by_note: dict[str, list[int]] = {}
        missing = []
        for rank, note in enumerate(notes):
            if called := self._read(note):
                by_note.setdefault(called, []).append(rank)
            else:
                missing.append(rank)
        if not missing and len(by_note) == 1:
            return ""
        if missing and (apart := self._read(APART)):
            return apart
        told = [f"{_ranks(ranks)} called {note}" for note, ranks in by_note.items()]
        gone = self._gone(missing)
        if gone:
            told.append(f"{_ranks(gone)} ended, or left the process group, without it")
        late = [rank for rank in missing if rank not in gone]
        if late and not gone:
            limit = f"{self._patience:g} s (the process group's timeout)"
            if patience is not None:
                limit = f"{patience:g} s (OSS.consolidate_timeout)"
            told.append(f"{_ranks(late)} did not come within {limit}")
        return f"{_name(what)} must be called alike on all ranks of the group: {'; '.join(told)}"

    # ------------------------------------------------------------------------------------------------ collectives

    def wait(self, work: Any, where: str) -> None:
        """Wait for a collective of the group, and leave it where another rank waits in a meeting instead.

        Args:
            work: what ``async_op=True`` returned; waited for in the same order on all ranks.
            where: what is going on, for the message.

        Raises:
            NotTogether: another rank went into a meeting without having taken part in this collective; or that has
                happened before, and collectives no longer belong together.
        """
        self.check()
        if self._looks:
            self._wait_looking(work, where)
        else:
            if time.monotonic() - self._looked >= LOOK_EVERY.total_seconds():
                self._look(where)
            work.wait()
        self.waited += 1

    def _wait_looking(self, work: Any, where: str) -> None:
        while True:
            try:
                work.wait(LOOK_EVERY)
                return
            except RuntimeError:
                # Gloo (torch 2.13): "Operation timed out!" of this wait alone; the operation goes on.
                if work.is_completed():  # it ended in between; raises if it failed
                    work.wait()
                    return
                self._look(where)

    def _look(self, where: str) -> None:
        """Raise if another rank waits in a meeting, or was refused one."""
        self._looked = time.monotonic()
        self._apart = self._read(APART)
        first = self._read(f"{self.number}/first")
        if not first:
            self.check()
            return
        rank, waited, what = first.split(" ", 2)
        if int(waited) > self.waited:  # it is done with this collective, and the rest is on its way
            return
        message = (
            f"{_name(what)} must be called alike on all ranks of the group: rank {rank} called {what}, and "
            f"rank {self._rank} waits for it in {where}"
        )
        # What this rank has begun will be taken for something else by the others if they go on. Before the note, so
        # that who reads that one finds this.
        self._apart = message
        self._store.set(APART, message)
        self._store.set(f"{self.number}/{self._rank}", where)
        self._next()
        raise NotTogether(message)

    def _read(self, key: str) -> str:
        return (self._store.get(key) or b"").decode()

    def check(self) -> None:
        """Raise where ranks are out of step; to be called before a collective is begun. Costs nothing.

        Gloo (torch 2.13) ends the process that gets another collective's data: "Received data size doesn't match".
        """
        if self._apart:
            raise NotTogether(self._apart + AFTERWARDS)


_meetings: WeakKeyDictionary[dist.ProcessGroup, Meeting] = WeakKeyDictionary()


def _leave(store: PatientStore, key: str) -> None:
    """Tell the other ranks that this one has ended; they may have ended before it, and the store with them."""
    with suppress(dist.DistError, RuntimeError):
        store.set(key, "1")


def _name(call: str) -> str:
    return call.partition("(")[0]


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
