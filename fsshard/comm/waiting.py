"""Waits for a collective, and finds out meanwhile whether the others will come.

A rank that is alive and takes another path than the others leaves them in a collective until the process group's time
limit, half an hour by default. Here the one that waits asks where all are. It gives up where ranks wait for each other
in a circle: each in a collective with one that waits in another, and none of them has moved for some seconds.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fsshard.comm.presence import lost_ranks, somebody_left, who_left
from fsshard.comm.stores import own_store, timeout_of
from fsshard.comm.whereabouts import Place, Watch, watch_of_job
from fsshard.errors import RankMismatch

__all__ = ["Absence", "meet", "stuck", "wait"]

log = logging.getLogger("fsshard")

FIRST_QUESTION, NEXT_QUESTION = 1.0, 4.0
"""Seconds of waiting before it asks, and from there on until it reads the answers and asks again."""
ALIKE = 3
"""So many answers in a row without a change mean that nobody will come: a slow transfer ends on its ranks within less
of each other."""
SLICE = 0.1
"""Seconds between two looks at a collective, and for which it waits meanwhile on the CPU."""
SHARE, SHORTEST, LONGEST = 0.1, 1e-4, 5e-3
"""On a device: how long it sleeps between two looks, as a share of the time it has waited; bounds, in seconds."""


LONGEST_PAUSE = 0.05
"""Seconds between two looks at who has come to a meeting, at most."""
GIVEN_UP = "given up"
ALL_RANKS = (
    "All ranks must call {what} equally often: is it under `if rank == 0`, or had a rank fewer batches "
    "(drop_last=True, DistributedSampler)?"
)


class Work(Protocol):
    """Of ``torch.distributed``."""

    def is_completed(self) -> bool: ...
    def wait(self, timeout: timedelta = ...) -> Any: ...


def wait(work: Work, group: dist.ProcessGroup, what: str, limit: float | None = None, *, on_cpu: bool = False) -> None:
    """Wait for a collective until it is done, or nobody will come.

    Args:
        work: of an asynchronous collective over ``group``.
        group: who takes part.
        what: was called, as users write it.
        limit: seconds to wait for ranks that do something else; None: as long as the group does.
        on_cpu: whether it is gloo's, of tensors on the CPU.

    Raises:
        RankMismatch: the time is up, or ranks wait for each other in other collectives.
        Exception: the collective's own.
    """
    watch = watch_of_job()
    # One process that plays a rank among ranks that are not there: its work is never completed.
    if dist.get_backend(group) == "fake" or (watch is None and limit is None):
        work.wait()
        return
    began, ranks = time.monotonic(), tuple(dist.get_process_group_ranks(group))
    questions = _Questions(watch, ranks, what)
    with nullcontext() if watch is None else watch.waiting(what, ranks):
        while not _done_soon(work, time.monotonic() - began, on_cpu=on_cpu):
            waited = time.monotonic() - began
            if limit is not None and waited > limit:
                raise RankMismatch(f"{what}: {questions.missing()} ({limit:g} s have passed)")
            if waited > questions.next:
                questions.look(waited)


def _done_soon(work: Work, waited: float, *, on_cpu: bool) -> bool:
    """Whether a collective is done; looks again in a moment. Raises what it raises.

    ``wait`` with a limit leaves gloo's work as it is, and costs nothing (``c10d::Work::wait`` of torch 2.13 to 2.15:
    "Operation timed out!"); NCCL's would be aborted.
    """
    if on_cpu:
        try:
            work.wait(timedelta(seconds=SLICE))
        except RuntimeError:
            if not work.is_completed():
                return False
            work.wait()  # its own error, or it was done at the last moment
        return True
    if not work.is_completed():
        time.sleep(min(max(SHORTEST, SHARE * waited), LONGEST))
        return False
    work.wait()
    return True


def stuck(places: Mapping[int, Place], before: Mapping[int, Place]) -> set[int]:
    """The ranks that wait for each other for good: each for one of them that waits in another call.

    A rank whose whole group is in its own call may go on, and so may those that wait for it.

    Args:
        places: where ranks are, as far as that is known.
        before: where they were a while ago.
    """
    found = {rank for rank, place in places.items() if rank in before and place.stands_since(before[rank])}
    while True:
        waits = {
            rank
            for rank in found
            if any(other in found and places[other].text != places[rank].text for other in places[rank].with_ranks)
        }
        if waits == found:
            return found
        found = waits


def meet(group: dist.ProcessGroup | None, what: str, note: str = "here") -> list[str]:
    """Wait in the group's store until all ranks have called this, and return their notes, by rank.

    Before a rare collective: a rank that is in another one must not get this one's data, at which gloo ends the process
    (torch 2.13: "Received data size doesn't match expected size", SIGABRT).

    Args:
        group: whose ranks meet; None is a rank alone.
        what: was called, as users write it.
        note: for the other ranks; not empty.

    Raises:
        RankMismatch: a rank has ended, or waits in another collective, or did not come within the group's time limit.
    """
    if group is None or group.size() == 1 or dist.get_backend(group) == "fake":
        return [note]
    meetings = _meetings.get(group)
    if meetings is None:
        meetings = _meetings[group] = _Meetings(group)
    return meetings.come(what, note)


class _Meetings:
    """The meetings of one group, counted alike on all ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._store = weakref.ref(group), own_store(group, "meetings")
        self._rank, self._number = group.rank(), 0

    def come(self, what: str, note: str) -> list[str]:
        group, number, self._number = self._group(), self._number, self._number + 1
        assert group is not None
        ranks, watch = tuple(dist.get_process_group_ranks(group)), watch_of_job()
        keys = [f"{number}/{rank}" for rank in range(len(ranks))]
        self._store.set(keys[self._rank], note)
        try:
            with nullcontext() if watch is None else watch.waiting(what, ranks):
                self._await(group, keys, _Questions(watch, ranks, what), what)
        except RankMismatch:
            self._store.set(keys[self._rank], GIVEN_UP)  # for those that come later
            raise
        notes = [text.decode() for text in self._store.get_all(keys).values()]
        if GIVEN_UP in notes:
            raise RankMismatch(f"{what}: rank {notes.index(GIVEN_UP)} has waited for this rank, and given up")
        if number:  # all have come here, and so are done with the one before
            self._store.delete_key(f"{number - 1}/{self._rank}")
        return notes

    def _await(self, group: dist.ProcessGroup, keys: list[str], questions: _Questions, what: str) -> None:
        began, pause, limit = time.monotonic(), SHORTEST, timeout_of(group)
        while len(self._store.get_all(keys)) < len(keys):
            waited = time.monotonic() - began
            if waited > limit:
                raise lost_ranks(group, RuntimeError(f"Timed out after {limit:g} s"), what)
            if pause >= LONGEST_PAUSE and somebody_left(group):
                raise lost_ranks(group, RuntimeError("it did not come to this call of all ranks"), what)
            if waited > questions.next:
                try:
                    questions.look(waited)
                except RankMismatch as error:
                    raise RankMismatch(f"{error}. {ALL_RANKS.format(what=what)}") from None
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


_meetings: WeakKeyDictionary[dist.ProcessGroup, _Meetings] = WeakKeyDictionary()


class Absence:
    """Finds out, for a rank that waits for others in a rare call, which of them will not come, and why.

    Attributes:
        reasons: rank of the group -> why it will not come.
    """

    def __init__(self, group: dist.ProcessGroup, what: str) -> None:
        self._group, self._members = group, dist.get_process_group_ranks(group)
        # Where a rank is, is where its main thread is: one that saves in the background trains on meanwhile.
        self._watch = watch_of_job() if threading.current_thread() is threading.main_thread() else None
        self._questions = _Questions(self._watch, tuple(self._members), what)
        self._what, self._began, self._next = what, time.monotonic(), FIRST_QUESTION
        self.reasons: dict[int, str] = {}

    def waiting(self) -> AbstractContextManager[None]:
        """Tell the others meanwhile that this rank's main thread waits for them."""
        return nullcontext() if self._watch is None else self._watch.waiting(self._what, tuple(self._members))

    def is_final(self, missing: Sequence[int]) -> bool:
        """Whether one of the missing ranks has ended, or waits for this one in another collective."""
        waited = time.monotonic() - self._began
        if waited > self._next:
            self._next = waited + FIRST_QUESTION
            self.reasons = {rank: text for rank, text in who_left(self._group).items() if rank in missing}
        if not self.reasons and waited > self._questions.next:
            try:
                self._questions.look(waited)
            except RankMismatch:
                places = self._questions.places
                at = {rank: self._members[rank] for rank in missing if self._members[rank] in places}
                self.reasons = {rank: places[known].text for rank, known in at.items()}
        return bool(self.reasons)


class _Questions:
    """What one waiting rank asks the others, and makes of their answers."""

    def __init__(self, watch: Watch | None, ranks: tuple[int, ...], what: str) -> None:
        self._watch, self._what = watch, what
        self._peers = [rank for rank in ranks if rank != dist.get_rank()]
        self._number: int | None = None
        self.places: Mapping[int, Place] = {}
        self._alike, self._told = 1, False
        self.next = FIRST_QUESTION if watch is not None else float("inf")

    def look(self, waited: float) -> None:
        """Read the answers to the last question, and ask again.

        Raises:
            RankMismatch: this rank waits for ranks that wait for it.
        """
        assert self._watch is not None
        self.next = waited + NEXT_QUESTION
        try:
            places = {} if self._number is None else self._watch.answers(self._number)
            self._number = self._watch.ask()
        except RuntimeError:  # dist.DistError among them: the store is gone, and so will be the collective
            self.next = float("inf")
            return
        found = stuck(places, self.places)
        self.places, self._alike = places, self._alike + 1 if self._watch.rank in found else 1
        if self._alike >= ALIKE:
            raise RankMismatch(f"{self._what}: {self.missing()}; they wait for each other, and will not go on")
        if places and not self._told:
            self._told = True
            log.warning("%s has waited for %.0f s: %s", self._what, waited, self.missing())

    def missing(self) -> str:
        """Who is not here, and where instead, as far as it has answered."""
        own, there = f"waits in {self._what}", self.places
        elsewhere = [
            f"rank {rank} {there[rank].text}" for rank in self._peers if rank in there and there[rank].text != own
        ]
        silent = [f"rank {rank} computes, or does not answer" for rank in self._peers if rank not in there]
        return "; ".join(elsewhere + silent) or "a rank did not take part"
