"""Says where a rank is, to ranks that wait for it: a thread of every rank answers with the main thread's stack.

It asks the store for questions only while the main thread stands still, and ends with the process group: a rank that
computes answers nothing.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fsshard.comm.stores import own_store

__all__ = ["Place", "Watch", "answer", "read_stacks", "watch_of_job"]

INTERVAL = 0.5
"""Seconds between two looks of the thread that answers."""
QUIET = 5.0
"""Seconds for which a rank stands still elsewhere than in a collective before it answers: a script that ends does not,
whose store may have gone with rank 0 (torch prints a C++ stack then: "recvValue failed", 2.13)."""
BUSY = 0.1
"""A rank that uses more of a core than this computes."""


class Place(NamedTuple):
    """Where a rank is.

    Attributes:
        text: in words.
        with_ranks: the global ranks with which it is in a collective; none where it is in no collective for certain,
            or it cannot be seen with whom.
        busy: seconds that its main thread has computed so far; negative where that cannot be known.
        clock: its time, in seconds.
    """

    text: str
    with_ranks: tuple[int, ...]
    busy: float
    clock: float

    def stands_since(self, before: Place) -> bool:
        """Whether it has waited in the same place since then."""
        computed, passed = self.busy - before.busy, self.clock - before.clock
        same = bool(self.with_ranks) and (self.text, self.with_ranks) == (before.text, before.with_ranks)
        return same and before.busy >= 0 and 0 <= computed < BUSY * passed


_reader: Callable[[str], tuple[bool, str]] = lambda _: (False, "is at an unknown place")  # noqa: E731


def read_stacks(reader: Callable[[str], tuple[bool, str]]) -> None:
    """Let ``reader`` say of a stack, as ``faulthandler`` writes it, whether it is in a collective, and where it is."""
    global _reader
    _reader = reader


def answer() -> None:
    """Let this rank's whereabouts be known to the others of its job from now on; on every rank alike. No collective."""
    world = dist.group.WORLD
    if world is None or world.size() == 1 or world in _watches or dist.get_backend(world) == "fake":
        return
    with suppress(RuntimeError, ValueError, NotImplementedError):  # a group without a store tells nothing
        _watches[world] = Watch(world)


def watch_of_job() -> Watch | None:
    """This rank's, of the default process group; None where there is none."""
    world = dist.group.WORLD
    return None if world is None else _watches.get(world)


class Watch:
    """A thread that answers for this rank, and the questions of this rank."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.group = weakref.ref(group)
        self.store = own_store(group, "whereabouts")
        self._waits: tuple[str, tuple[int, ...]] | None = None
        self._ended = threading.Event()
        arguments = (weakref.ref(self), self._ended)
        self._thread = threading.Thread(target=_serve, args=arguments, name="fsshard-whereabouts", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Answer no longer: the process group is about to be destroyed."""
        self._ended.set()
        self._thread.join(INTERVAL)

    @contextmanager
    def waiting(self, what: str, ranks: tuple[int, ...]) -> Iterator[None]:
        """While this rank waits in ``what`` with these global ranks."""
        self._waits = f"waits in {what}", ranks
        try:
            yield
        finally:
            self._waits = None

    def ask(self) -> int:
        """Ask all ranks where they are; the question's number. No answer is waited for."""
        return self.store.add("asked", 1)

    def answers(self, number: int) -> Mapping[int, Place]:
        """By rank, what those have said that have answered."""
        told = self.store.get_all([f"{number}/{rank}" for rank in range(self.size)])
        found = {int(key.rpartition("/")[2]): json.loads(text) for key, text in told.items()}
        return {rank: Place(text, tuple(ranks), busy, clock) for rank, (text, ranks, busy, clock) in found.items()}

    def here(self) -> Place:
        """Where this rank's main thread is."""
        if self._waits is not None:
            return Place(*self._waits, _computed(), time.monotonic())
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        waits, text = _reader(_stacks())
        ranks = _group_of_call(frame) or tuple(range(self.size))  # an engine's wait for what it began names no group
        return Place(text, ranks if waits else (), _computed(), time.monotonic())

    def is_over(self) -> bool:
        """Whether its process group was destroyed."""
        return self.group() is None or dist.group.WORLD is not self.group()


_watches: WeakKeyDictionary[dist.ProcessGroup, Watch] = WeakKeyDictionary()


def _serve(reference: Callable[[], Watch | None], ended: threading.Event) -> None:
    answered, before, idle = 0, _computed(), 0
    while not ended.wait(INTERVAL):
        watch, now = reference(), _computed()
        if watch is None or watch.is_over():
            return
        idle = idle + 1 if now - before < BUSY * INTERVAL else 0
        if idle * INTERVAL > QUIET or (idle and watch.here().with_ranks):
            try:
                answered = _answered(watch, answered)
            except RuntimeError:  # the store is gone, or does not answer: nobody can ask
                return
        before = now
        del watch  # it lives as long as its process group


def _answered(watch: Watch, before: int) -> int:
    asked = watch.store.add("asked", 0)
    if asked != before:
        watch.store.set(f"{asked}/{watch.rank}", json.dumps(watch.here()))
    return asked


def _computed() -> float:
    """Seconds of CPU time of the main thread; -1 where the system does not tell (macOS, Windows)."""
    clock = getattr(time, "pthread_getcpuclockid", None)
    ident = threading.main_thread().ident
    return -1.0 if clock is None or ident is None else time.clock_gettime(clock(ident))


def _group_of_call(frame: FrameType | None) -> tuple[int, ...]:
    """The global ranks of the innermost call of ``torch.distributed`` that names its group; none where none does."""
    while frame is not None:
        if frame.f_code.co_filename.endswith("distributed_c10d.py") and "group" in frame.f_locals:
            group = frame.f_locals["group"]
            group = dist.group.WORLD if group is None else group
            return tuple(dist.get_process_group_ranks(group)) if isinstance(group, dist.ProcessGroup) else ()
        frame = frame.f_back
    return ()


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
