"""Says where the others are, to a rank that waits for them: in user code, or in another collective for good.

A rank that is alive and takes another path than the others leaves them in a collective until the process group's time
limit, half an hour by default. Here the one that waits asks, and a thread of every rank answers with its stack. If all
ranks stand in collectives, compute nothing, and still do so some seconds later, none of them will ever come.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fsshard.comm.stores import PatientStore, own_store
from fsshard.errors import RankMismatch

__all__ = ["answer", "read_stacks", "wait"]

log = logging.getLogger("fsshard")

INTERVAL = 0.5
"""Seconds between two looks of the thread that answers."""
FIRST_QUESTION, NEXT_QUESTION = 3.0, 4.0
"""Seconds of waiting before it asks, and between two questions."""
ALIKE = 3
"""So many answers in a row without a change mean that nobody will come: a slow transfer ends everywhere within less."""
BUSY = 0.1
"""A rank that uses more of a core than this computes."""
SLICE = 0.1
"""Seconds between two looks at a collective, and for which it waits meanwhile on the CPU."""
SHARE, SHORTEST, LONGEST = 0.1, 1e-4, 5e-3
"""On a device: how long it sleeps between two looks, as a share of the time it has waited; bounds, in seconds."""


class Work(Protocol):
    """Of ``torch.distributed``."""

    def is_completed(self) -> bool: ...
    def wait(self, timeout: timedelta = ...) -> Any: ...


class _Place(NamedTuple):
    """Where a rank is.

    Attributes:
        text: in words.
        waits: whether it is in a collective for certain.
        busy: seconds that its main thread has computed so far; negative where that cannot be known.
        clock: its time, in seconds.
    """

    text: str
    waits: bool
    busy: float
    clock: float

    def stands_since(self, before: _Place) -> bool:
        """Whether it has waited in the same place since then."""
        computed, passed = self.busy - before.busy, self.clock - before.clock
        known = before.busy >= 0 and self.busy >= 0
        return known and self.waits and self.text == before.text and computed < BUSY * passed


_reader: Callable[[str], tuple[bool, str]] = lambda _: (False, "is at an unknown place")  # noqa: E731


def read_stacks(reader: Callable[[str], tuple[bool, str]]) -> None:
    """Let ``reader`` say of a stack, as ``faulthandler`` writes it, whether it is in a collective, and where it is."""
    global _reader
    _reader = reader


def answer() -> None:
    """Let this rank's whereabouts be known to the others of its job from now on; on every rank alike. No collective."""
    world = dist.group.WORLD
    if world is None or world.size() == 1 or world in _watches or _is_fake(world):
        return
    with suppress(RuntimeError, ValueError, NotImplementedError):  # a group without a store tells nothing
        _watches[world] = _Watch(world)


def wait(work: Work, group: dist.ProcessGroup, what: str, limit: float | None = None, *, on_cpu: bool = False) -> None:
    """Wait for a collective until it is done, or nobody will come.

    Args:
        work: of an asynchronous collective over ``group``.
        group: who takes part.
        what: was called, as users write it.
        limit: seconds to wait for ranks that do something else; None: as long as the group does.
        on_cpu: whether it is gloo's, of tensors on the CPU.

    Raises:
        RankMismatch: the time is up, or every rank of the job waits in a collective, and not all in this one.
        Exception: the collective's own.
    """
    watch = _watches.get(dist.group.WORLD) if dist.group.WORLD is not None else None
    if _is_fake(group) or (watch is None and limit is None):
        work.wait()
        return
    began = time.monotonic()
    questions = _Questions(watch, group, what)
    with questions:
        while not _done_soon(work, time.monotonic() - began, on_cpu=on_cpu):
            waited = time.monotonic() - began
            if limit is not None and waited > limit:
                raise RankMismatch(f"{what}: {questions.missing()} ({limit:g} s have passed)")
            if waited > questions.next:
                questions.ask(waited)


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


def _is_fake(group: dist.ProcessGroup) -> bool:
    """Whether it has one process, which plays a rank among ranks that are not there; its work is never completed."""
    return dist.get_backend(group) == "fake"


class _Questions:
    """What one waiting rank asks the others, and makes of their answers."""

    def __init__(self, watch: _Watch | None, group: dist.ProcessGroup, what: str) -> None:
        self._watch, self._what = watch, what
        self._peers = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
        self._before: Mapping[int, _Place] = {}
        self._alike, self._told = 1, False
        self.next = FIRST_QUESTION if watch is not None else float("inf")

    def __enter__(self) -> None:
        if self._watch is not None:
            self._watch.waits = self._what

    def __exit__(self, *error: object) -> None:
        if self._watch is not None:
            self._watch.waits = ""

    def ask(self, waited: float) -> None:
        """Compare where all are with where they were. Raises a RankMismatch where nobody can come any longer."""
        assert self._watch is not None
        self.next = waited + NEXT_QUESTION
        places = self._watch.places()
        stand = len(places) == self._watch.size and all(
            rank in self._before and place.stands_since(self._before[rank]) for rank, place in places.items()
        )
        self._before, self._alike = places, self._alike + 1 if stand else 1
        if self._alike >= ALIKE and any(places[rank].text != self._own_text() for rank in self._peers):
            raise RankMismatch(f"{self._what}: {self.missing()}; all ranks wait, none for the same")
        if not self._told and len(self._before) > 1 and waited > FIRST_QUESTION + NEXT_QUESTION:
            self._told = True
            log.warning("%s has waited for %.0f s: %s", self._what, waited, self.missing())

    def _own_text(self) -> str:
        return f"waits in {self._what}"

    def missing(self) -> str:
        """Who is not here, and where instead."""
        own = self._own_text()
        found = self._before or (self._watch.places() if self._watch is not None else {})
        elsewhere = [
            f"rank {rank} {found[rank].text}" for rank in self._peers if rank in found and found[rank].text != own
        ]
        silent = [f"rank {rank} does not answer" for rank in self._peers if rank not in found]
        return "; ".join(elsewhere + silent) or "a rank did not take part"


class _Watch:
    """A thread that answers for this rank, and the questions of this rank."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.waits = ""
        self.store = own_store(group, "whereabouts")
        threading.Thread(target=_serve, args=(weakref.ref(self),), name="fsshard-whereabouts", daemon=True).start()

    def places(self) -> dict[int, _Place]:
        """Where ranks are, as far as they answer."""
        try:
            number = self.store.add("asked", 1)
            self.store.awaited(keys := [f"{number}/{rank}" for rank in range(self.size)], 4 * INTERVAL)
            told = self.store.get_all(keys)
        except RuntimeError:  # dist.DistError among them: the store is gone, and so will be the collective
            return {}
        return {int(key.rpartition("/")[2]): _Place(*json.loads(text)) for key, text in told.items()}

    def here(self) -> _Place:
        """Where this rank's main thread is."""
        waits, text = (True, f"waits in {self.waits}") if self.waits else _reader(_stacks())
        return _Place(text, waits, _computed(), time.monotonic())


_watches: WeakKeyDictionary[dist.ProcessGroup, _Watch] = WeakKeyDictionary()


def _serve(reference: Callable[[], _Watch | None]) -> None:
    answered, pause = 0, threading.Event()
    while not pause.wait(INTERVAL):
        watch = reference()
        if watch is None:
            return
        try:
            answered = _answered(watch.store, watch, answered)
        except RuntimeError:  # the store is gone, or does not answer: nobody can ask
            return
        del watch  # it lives as long as its process group


def _answered(store: PatientStore, watch: _Watch, before: int) -> int:
    asked = store.add("asked", 0)
    if asked != before:
        store.set(f"{asked}/{watch.rank}", json.dumps(watch.here()))
    return asked


def _computed() -> float:
    """Seconds of CPU time of the main thread; -1 where the system does not tell (macOS, Windows)."""
    clock = getattr(time, "pthread_getcpuclockid", None)
    ident = threading.main_thread().ident
    return -1.0 if clock is None or ident is None else time.clock_gettime(clock(ident))


def _stacks() -> str:
    """All threads but those of fsshard, as ``faulthandler`` writes them, the main one as the current."""
    main, frames = threading.main_thread().ident, sys._current_frames()
    ours = {thread.ident for thread in threading.enumerate() if thread.name.startswith("fsshard-")}
    parts = []
    for ident, frame in frames.items():
        if ident not in ours:
            kind = "Current thread" if ident == main else "Thread"
            parts.append(f"{kind} {ident:#x} (most recent call first):\n{_lines(frame)}")
    return "\n".join(parts)


def _lines(frame: FrameType | None) -> str:
    lines = []
    while frame is not None:
        lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}\n')
        frame = frame.f_back
    return "".join(lines)
