"""Notices, outside of the group's collectives, that some ranks are in a collective call and others elsewhere.

A collective that only some ranks call hangs until the group's own time is up, half an hour by default. Here each rank
leaves a note in the group's store before such a call; the notes of all together decide whether it takes place. A rank
that is only late is waited for; one is given up for which there is evidence that it is elsewhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fsshard.comm.rendezvous import Arrivals
from fsshard.comm.stores import PatientStore, own_store, timeout_of
from fsshard.errors import NotTogether

__all__ = ["CollectiveWatch"]

log = logging.getLogger("fsshard")

LOOK_EVERY = timedelta(seconds=1)
SAY_EVERY = 15.0  # seconds
APART = "apart"
AFTERWARDS = "; since then the ranks are out of step: end the process group, and go on from a checkpoint"


class CollectiveWatch:
    """Of one process group: its ranks come together for rare calls, and look for each other in frequent ones.

    Attributes:
        waited: how many works this rank has waited for with :meth:`wait`.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.waited = 0
        self._apart = ""  # why the ranks can no longer go on together
        self._rank = group.rank()
        self._store = own_store(group, "oss")
        self._arrivals = Arrivals(self._store, self._rank, group.size(), shared=("first",))
        self._patience = timeout_of(group)
        # NCCL's wait(timeout) would block the host until the device is done; its plain wait() does not block at all.
        self._looks = "gloo" in str(dist.get_backend(group))
        self._looked = time.monotonic()
        # Not atexit, which children of multiprocessing leave out.
        Finalize(self, _leave, (self._store, f"gone/{self._rank}"), exitpriority=0)

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> CollectiveWatch:
        """That of a group; the same one for all optimizers on it."""
        found = _watches.get(group)
        if found is None:
            found = _watches[group] = cls(group)
        return found

    # ------------------------------------------------------------------------------------------------ rare calls

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
        self._store.set(f"{self._arrivals.number}/first", f"{self._rank} {self.waited} {what}")
        seconds = self._patience if patience is None else patience
        outcome = self._arrivals.come(
            what, seconds, lambda notes: self._decide(notes, what, patience), self._evidence(what)
        )
        if outcome is None:
            raise NotTogether(f"{what}: a rank was lost while the ranks waited for each other")
        if outcome:
            self._apart = self._read(APART)
            raise NotTogether(outcome)
        self._arrivals.clean()

    def _evidence(self, what: str) -> Callable[[Sequence[int]], bool]:
        """Whether one of the ranks that have not come will not; says from time to time who is waited for."""
        begun = said = time.monotonic()

        def elsewhere(missing: Sequence[int]) -> bool:
            nonlocal said
            if self._gone(missing) or self._read(APART):
                return True
            if time.monotonic() - said >= SAY_EVERY:
                said = time.monotonic()
                log.warning("%s has waited %.0f s for %s to call it as well", what, said - begun, _ranks(missing))
            return False

        return elsewhere

    def _gone(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if self._store.check([f"gone/{rank}"])]

    def _decide(self, notes: Mapping[int, str], what: str, patience: float | None) -> str:
        """What is wrong, for all ranks to raise; empty if nothing is."""
        by_note: dict[str, list[int]] = {}
        for rank, called in sorted(notes.items()):
            by_note.setdefault(called, []).append(rank)
        missing = [rank for rank in range(self._arrivals.size) if rank not in notes]
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
        """Wait for a collective of the group, and leave it where another rank waits in a rare call instead.

        Args:
            work: what ``async_op=True`` returned; waited for in the same order on all ranks.
            where: what is going on, for the message.

        Raises:
            NotTogether: another rank went into a rare call without having taken part in this collective; or that has
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
        """Raise if another rank waits in a rare call, or was refused it."""
        self._looked = time.monotonic()
        self._apart = self._read(APART)
        first = self._read(f"{self._arrivals.number}/first")
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
        self._arrivals.leave_note(where)
        raise NotTogether(message)

    def _read(self, key: str) -> str:
        return (self._store.get(key) or b"").decode()

    def check(self) -> None:
        """Raise where ranks are out of step; to be called before a collective is begun. Costs nothing.

        Gloo (torch 2.13) ends the process that gets another collective's data: "Received data size doesn't match".
        """
        if self._apart:
            raise NotTogether(self._apart + AFTERWARDS)


_watches: WeakKeyDictionary[dist.ProcessGroup, CollectiveWatch] = WeakKeyDictionary()


def _leave(store: PatientStore, key: str) -> None:
    """Tell the other ranks that this one has ended; they may have ended before it, and the store with them."""
    with suppress(dist.DistError, RuntimeError):
        store.set(key, "1")


def _name(call: str) -> str:
    return call.partition("(")[0]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
