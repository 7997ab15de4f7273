"""The watchdog of a job: who is missing, where does each rank wait, and why has one left?

A collective cannot tell: gloo names an address at best ("Connection closed by peer [127.0.0.1]:41234", torch 2.13). So
ranks tell each other over the store of the default process group. Start at :func:`taking_part` (a collective has
failed), :func:`wait` (one takes long) and :func:`meet` (a rare call, which not all ranks may make). Keys, all JSON::

    process/<rank>  its process, written once                         waits/<rank>  the call in which it lost another
    left/<rank>     why it takes part no longer                       asked         how often a rank asked for places
    at/<rank>       where it stands, and which question it answers    meet/...      see Watchdog.meet
    runs/<group>/<number>  the rank that first stood still in a group's collective of that number, and in which one
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
import threading
import time
import weakref
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fsshard.comm.stacks import location_of_this_rank
from fsshard.comm.stores import check_not_destroyed, check_not_inherited, own_store, timeout_of
from fsshard.errors import FsshardError, RankMismatch
from fsshard.torch_private.c10d import all_groups, collectives

log = logging.getLogger("fsshard")

# Seconds, all of them.
# For the ranks that are left to say so: connections close one after another, and time runs out alike.
LAST_WORDS = 2.5
# Of waiting until a rank asks where the others are; then until it asks again.
FIRST_QUESTION = 1.0
NEXT_QUESTION = 4.0
# Between two looks of the thread that answers.
INTERVAL = 0.5
# For which a rank stands still elsewhere than in a collective before it answers. A script that ends does not stand so
# long: its store may have gone with rank 0 (torch prints a C++ stack then: "recvValue failed", 2.13). Also for which it
# waits in a collective until it is compared with the others'.
QUIET = 5.0
# Between two looks at a collective on the CPU.
SLICE = 0.1
# The same on a device, where it is a share of the time waited.
SHORTEST = 1e-4
LONGEST = 5e-3
SHARE = 0.1
# Between two looks at the store.
LONGEST_PAUSE = 0.05
# For the rank that decides on a meeting to write down what it found.
DECISION = 10.0

# Share of a core: a rank that uses more computes.
BUSY = 0.1
# Times NEXT_QUESTION without a round of the rank that asks, until another one does.
SILENT = 3
# Answers in a row without a change: nobody will come. A slow transfer ends on its ranks within less.
ALIKE = 3

LOST_NEIGHBOUR = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "Timed out waiting",
    "Application timeout caused pair closure",  # in the second operation that waits, when the first has timed out
)
"""Messages that a rank reads when another one goes away in the middle of a collective."""
UNEQUAL_CALLS = (
    "Look for a collective that ranks do not call equally often: under `if rank == 0`, or in a loop over unequal "
    "numbers of batches (drop_last=True, DistributedSampler)"
)
ALL_RANKS = (
    "All ranks must call {what} equally often: is it under `if rank == 0`, or had a rank fewer batches "
    "(drop_last=True, DistributedSampler)?"
)


Texts = dict[int, str]
"""Rank -> where it is, or what became of it, in words."""

# ------------------------------------------------------------------------------------------- a collective has failed


def speaks_of_a_lost_rank(error: BaseException) -> bool:
    """Tell whether the error is what a collective raises when another rank is gone or late."""
    if isinstance(error, FsshardError) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or any(part in str(error) for part in LOST_NEIGHBOUR)


# A class takes half the calls of a generator's context, which each step makes.
class taking_part:
    """Context around collectives of ours: they raise at once where they would hang, and name the rank that they lose.

    ``what`` was called, as users write it. A forked process, and one whose process group is destroyed, raises
    LaunchError; RankMismatch names who is lost.
    """

    __slots__ = ("_group", "_what")

    def __init__(self, group: dist.ProcessGroup | None, what: str) -> None:
        self._group = group
        self._what = what

    def __enter__(self) -> None:
        if self._group is None:
            return
        check_not_inherited(self._group, self._what)
        world = dist.group.WORLD
        if world is None:
            check_not_destroyed(self._group, self._what)
            return
        watchdog = _watchdogs.get(world)
        if watchdog is not None:
            watchdog.go_on()

    def __exit__(self, _: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, RuntimeError) and self._group is not None and speaks_of_a_lost_rank(error):
            raise lost_ranks(self._group, error, self._what) from error


def lost_ranks(group: dist.ProcessGroup, error: BaseException, what: str) -> RankMismatch:
    """Return the error that names who is missing in ``what``, where ``error`` does not. Waits for the others' word."""
    # gloo guesses at reasons at length.
    why = str(error).partition(". This is")[0].strip()
    who = "another rank was lost"
    watchdog = Watchdog.of_job()
    if watchdog is not None:
        limit = timeout_of(group) if "time" in why.lower() else None
        who = watchdog.missing(what, _ranks_of(group), limit)
    return RankMismatch(f"{what}: {who} ({why})")


# -------------------------------------------------------------------------------------------- a collective takes long


def wait(
    work: Any,
    group: dist.ProcessGroup,
    what: str,
    limit: float | None = None,
    *,
    on_cpu: bool = False,
) -> None:
    """Wait for a collective until it is done, or nobody will come: the rank that waits asks where all are.

    Args:
        work: ``dist.Work`` of an asynchronous collective over ``group``.
        group: who takes part.
        what: was called, as users write it.
        limit: seconds, after which it raises RankMismatch, as it does where ranks wait for each other over gloo, in
            other collectives; None: as long as the group waits.
        on_cpu: whether it is gloo's, of tensors on the CPU.
    """
    watchdog = Watchdog.of_job()
    if watchdog is None:
        # One process that plays a rank: its work is never completed.
        work.wait()
        return
    began = time.monotonic()
    questions = _Questions(watchdog, _ranks_of(group), what)
    try:
        with seen_waiting(group, what):
            while not done_soon(work, time.monotonic() - began, on_cpu=on_cpu):
                waited = time.monotonic() - began
                if limit is not None and waited > limit:
                    raise RankMismatch(f"{what}: {questions.missing()} ({limit:g} s have passed)")
                if waited > questions.next:
                    questions.look(waited)
    except RankMismatch:
        hold_until_done(work, group)
        raise
    finally:
        questions.end()


def hold_until_done(work: Any, group: Any) -> None:
    """Hold a collective that this rank does not wait for any longer, and its group, until it has ended.

    A group that is freed before waits for its thread, which may wait for the lock of Python that who frees it holds
    (pytorch issue #56297, torch 2.13).
    """

    def hold(work: Any, group: Any) -> None:
        with suppress(Exception):
            work.wait()
        del work
        # For gloo's thread to let go of its tensors, which takes that lock.
        time.sleep(INTERVAL)

    threading.Thread(target=hold, args=(work, group), name="fsshard-pending", daemon=True).start()


def done_soon(work: Any, waited: float, *, on_cpu: bool) -> bool:
    """Tell whether a collective is done, and raise what it raises; return in a moment if it is not."""
    if on_cpu:
        # A limit leaves gloo's work as it is, and costs nothing (c10d::Work::wait of torch 2.13 to 2.15: "Operation
        # timed out!"); NCCL's would be aborted.
        try:
            work.wait(timedelta(seconds=SLICE))
        except RuntimeError:
            if not work.is_completed():
                return False
            # It raises its own error, or was done at the last moment.
            work.wait()
        return True
    if not work.is_completed():
        time.sleep(min(max(SHORTEST, SHARE * waited), LONGEST))
        return False
    work.wait()
    return True


@contextmanager
def seen_waiting(group: dist.ProcessGroup, what: str, *, meets: bool = False) -> Iterator[None]:
    """Context in which this rank waits in ``what``: a stack shows nothing of ``Work.wait``, nor of a meeting."""
    watchdog = Watchdog.of_job()
    if watchdog is None:
        yield
        return
    watchdog.go_on()
    before = watchdog.waits
    watchdog.waits = (f"waits in {what}", _ranks_of(group), meets)
    try:
        yield
    finally:
        watchdog.waits = before


class Place(NamedTuple):
    """The place where a rank is."""

    # In words.
    text: str
    # The global ranks with which it is in a collective; none where it is in no collective for certain, or it cannot be
    # seen with whom.
    with_ranks: tuple[int, ...]
    # Seconds that its main thread has computed so far; negative where that cannot be known.
    busy: float
    # Its time, in seconds.
    clock: float
    # What it has begun and not ended: a group and the number there; None in a meeting, which goes through the store.
    pending: Sequence[tuple[str, int]] | None = ()
    # A group -> the last collective that it has begun there, if known.
    last: Mapping[str, int] = MappingProxyType({})

    def stands_since(self, before: Place) -> bool:
        """Tell whether it has waited in the same place since then."""
        computed = self.busy - before.busy
        passed = self.clock - before.clock
        if not self.with_ranks or self._replace(busy=before.busy, clock=before.clock) != before:
            return False
        return before.busy >= 0 and 0 <= computed < BUSY * passed

    def waits_for(self, others: Places) -> bool:
        """Tell whether it cannot go on before one of these does: one that has not begun what it waits in.

        All else may be slow and no more: a broadcast that other ranks relay, or a rank that they wait for.
        """
        if self.pending is None:
            elsewhere = {rank for rank, place in others.items() if place.text != self.text}
            return not elsewhere.isdisjoint(self.with_ranks)
        for group, number in self.pending:
            if all(place.last.get(group, number) >= number for place in others.values()):
                return False
        return bool(self.pending)


Places = Mapping[int, Place]


def stuck(places: Places, before: Places) -> set[int]:
    """Return the ranks that wait for each other for good: each for one of them that has not begun what it waits in.

    Each rank begins its collectives in the order of the program: were that the same on all ranks, the one that is
    behind would wait for none that is ahead. ``before``: their places a while ago.
    """
    ranks = set()
    for rank, place in places.items():
        if rank in before and place.stands_since(before[rank]):
            ranks.add(rank)
    while True:
        # A rank does not wait for itself.
        standing = {rank: places[rank] for rank in ranks}
        waiting = {rank for rank, place in standing.items() if place.waits_for(standing)}
        if waiting == ranks:
            return ranks
        ranks = waiting


def _runs(ranks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return ascending ranks as ranges: a group of a thousand is one, or a few."""
    runs: list[tuple[int, int, int]] = []
    for rank in ranks:
        if runs:
            start, stop, step = runs[-1]
            last = stop - step
            if last == start:
                # A range of one has no step yet.
                step = rank - start
            if rank == last + step:
                runs[-1] = (start, rank + step, step)
                continue
        runs.append((rank, rank + 1, 1))
    return runs


def _ranks_in(runs: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(itertools.chain.from_iterable(range(*run) for run in runs))


NOTHING_FOUND = b"[0, [], [], false]"
"""What a rank reads that asks before another has written anything."""


class _Questions:
    """The questions of waiting ranks to all others, and the answers.

    One of the ranks that wait asks for all of them, reads the answers, and writes down what they say: so what the
    others read does not grow with the number of ranks. Keys::

        term            how often another rank has begun to ask
        asks/<term>     how many ranks would; the first does
        found/<term>    JSON of its last round: the round's number, which ranks are where, who waits for good, and
                        whether it leaves with that
        over/<term>     how many ranks have found that no more will come; the first begins another term
    """

    def __init__(self, watchdog: Watchdog, ranks: tuple[int, ...], what: str) -> None:
        # Where a rank is, is where its main thread is: one that saves in the background trains on meanwhile.
        asks = threading.current_thread() is threading.main_thread()
        self._watchdog = watchdog
        self._what = what
        self.ranks = ranks
        self.next = FIRST_QUESTION if asks else float("inf")
        # By global rank.
        self.texts: Mapping[int, str] = {}
        self._alike = 1
        self._warned = False
        self._term = -1
        # Whether it asks for all, in this term.
        self._asks = False
        # Of its last question.
        self._number: int | None = None
        # The last round that it has written, or read.
        self._round = 0
        self._places: Places = {}
        # When another rank was seen to ask.
        self._moved = 0.0

    def look(self, waited: float) -> None:
        """Ask, or read what another rank found; raise if this rank waits for ranks that wait for it."""
        try:
            self._join_term(waited)
            if self._asks:
                self.next = waited + NEXT_QUESTION
                news = self._ask()
            else:
                self.next = waited + FIRST_QUESTION
                news = self._read(waited)
        except RuntimeError:
            # dist.DistError among them: the store is gone, and so will be the collective.
            self.next = float("inf")
            return
        if news is None:
            return
        self.texts, waits_for_good = news
        self._alike = self._alike + 1 if waits_for_good else 1
        if self._alike >= ALIKE:
            # What it has written stays for the others to read.
            self._asks = False
            raise RankMismatch(f"{self._what}: {self.missing()}; they wait for each other forever")
        if not self._warned:
            self._warned = True
            log.warning("%s has waited for %.0f s: %s", self._what, waited, self.missing())

    def _join_term(self, waited: float) -> None:
        """Become the rank that asks where there is none."""
        store = self._watchdog.store
        term = store.add("term", 0)
        if term == self._term:
            return
        self._term = term
        self._asks = store.add(f"asks/{term}", 1) == 1
        self._round = 0
        self._moved = waited
        written = store.get(f"found/{term}")
        if written is not None:
            number, *_, is_last = json.loads(written)
            if is_last:
                self._end_term()
                self._join_term(waited)
                return
            # What was found up to now is of before this rank waited, and what is being asked may be.
            self._round = number + 1

    def _ask(self) -> tuple[Texts, bool] | None:
        """Read the answers to the last question, write them down for all, and ask again."""
        watchdog = self._watchdog
        places: Places = {}
        if self._number is not None:
            places = watchdog.places(self._number)
        self._number = watchdog.store.add("asked", 1)
        for_good = stuck(places, self._places)
        self._places = places
        self._round += 1
        texts = {}
        ranks_at = defaultdict(list)
        for rank, place in places.items():
            texts[rank] = place.text
            ranks_at[place.text].append(rank)
        where = [[text, _runs(ranks)] for text, ranks in ranks_at.items()]
        waits_for_good = watchdog.rank in for_good
        is_last = waits_for_good and self._alike + 1 >= ALIKE
        news = [self._round, where, _runs(sorted(for_good)), is_last]
        watchdog.store.set(f"found/{self._term}", json.dumps(news))
        if not places:
            return None
        return texts, waits_for_good

    def _read(self, waited: float) -> tuple[Texts, bool] | None:
        """Return what is new of what the rank that asks has found."""
        store = self._watchdog.store
        written = store.get(f"found/{self._term}") or NOTHING_FOUND
        number, where, for_good, is_last = json.loads(written)
        if number <= self._round:
            # The rank that asks may have gone without a word.
            if is_last or waited - self._moved > SILENT * NEXT_QUESTION:
                self._end_term()
            return None
        self._round = number
        self._moved = waited
        texts = {}
        for text, runs in where:
            for rank in _ranks_in(runs):
                texts[rank] = text
        if not texts:
            return None
        waits_for_good = self._watchdog.rank in _ranks_in(for_good)
        return texts, waits_for_good

    def _end_term(self) -> None:
        store = self._watchdog.store
        if store.add(f"over/{self._term}", 1) == 1:
            store.add("term", 1)

    def end(self) -> None:
        """Leave it to another rank to ask: this one waits no longer."""
        if self._asks:
            self._asks = False
            # The store may be gone.
            with suppress(RuntimeError):
                self._end_term()

    def missing(self) -> str:
        """Say who is not here, and where instead, as far as it has answered."""
        own = f"waits in {self._what}"
        elsewhere = []
        silent = []
        for rank in self.ranks:
            if rank == self._watchdog.rank:
                continue
            text = self.texts.get(rank)
            if text is None:
                silent.append(f"rank {rank} computes, or does not answer")
            elif text != own:
                elsewhere.append(f"rank {rank} {text}")
        return "; ".join(elsewhere + silent) or "a rank did not take part"


# ---------------------------------------------------------------------------------------------------------- rare calls


@dataclass(frozen=True)
class Meeting:
    """The result of a meeting, the same on all ranks that have come."""

    # The prefix of its keys in the store, for what these ranks tell each other until they meet again.
    place: str
    # By rank of the group, of those that have come.
    notes: Texts
    # By rank of the group: why it did not come.
    missing: Texts
    # Whether time ran out, so that nothing is known of those that are missing.
    late: bool


def meet(group: dist.ProcessGroup | None, what: str, note: str = "here") -> list[str]:
    """Wait in the store until all ranks of the group have called this, and return their notes, by rank.

    Before a rare collective: a rank that is in another one must not get this one's data, at which gloo ends the process
    (torch 2.13: "Received data size doesn't match expected size", SIGABRT).

    ``what`` was called, as users write it. RankMismatch names a rank that has ended, or waits in another collective, or
    did not come within the group's time limit.
    """
    check_not_destroyed(group, what)
    if group is None or group.size() == 1 or dist.get_backend(group) == "fake":
        return [note]
    limit = timeout_of(group)
    ranks = _ranks_of(group)
    meeting = Watchdog.made().meet(group, what, note, limit)
    if group.rank() in meeting.missing:
        first = ranks[min(meeting.notes)]
        raise RankMismatch(f"{what}: rank {first} timed out waiting for this rank")
    if meeting.late:
        raise lost_ranks(group, RuntimeError(f"Timed out after {limit:g} s"), what)
    if meeting.missing:
        reasons = [f"rank {ranks[rank]} {text}" for rank, text in meeting.missing.items()]
        raise RankMismatch(f"{what}: {'; '.join(reasons)}. {ALL_RANKS.format(what=what)}")
    return list(meeting.notes.values())


# ------------------------------------------------------------------------------------------------------------ the dog


def join() -> None:
    """Let the other ranks of the job find this one from now on; on every rank alike. No collective."""
    world = dist.group.WORLD
    if world is not None and world.size() > 1 and dist.get_backend(world) != "fake":
        # A group without a store names nobody.
        with suppress(RuntimeError, ValueError, NotImplementedError):
            Watchdog.made()


def leave(why: str) -> None:
    """Tell the other ranks why this one takes no part any longer."""
    # Also of a group that a script has destroyed by itself.
    for watchdog in list(_watchdogs.values()):
        # The others may have ended before it, and the store with them.
        with suppress(RuntimeError):
            watchdog.leave(why)


class Watchdog:
    """Tells the other ranks of the job about this one over ``store``, and asks them."""

    def __init__(self, world: dist.ProcessGroup) -> None:
        self.rank = world.rank()
        self._size = world.size()
        self._world = weakref.ref(world)
        # The call in which this rank's main thread waits, in words, with which global ranks, and whether it meets them.
        self.waits: tuple[str, tuple[int, ...], bool] | None = None
        self._began = time.time_ns()
        # When it said that it waits in vain.
        self._lost_at: float | None = None
        self.store = own_store(world)
        self.store.set(f"process/{self.rank}", json.dumps(_process()))
        self._meetings: WeakKeyDictionary[object, tuple[str, Iterator[int]]] = WeakKeyDictionary()
        self._names: Counter[str] = Counter()
        self._ended = threading.Event()
        arguments = (weakref.ref(self), self._ended)
        self._thread = threading.Thread(target=_answer_others, args=arguments, name="fsshard-watchdog", daemon=True)
        self._thread.start()

    @classmethod
    def of_job(cls) -> Watchdog | None:
        """Return the one of the default process group; None where this rank has not joined."""
        world = dist.group.WORLD
        if world is None:
            return None
        return _watchdogs.get(world)

    @classmethod
    def made(cls) -> Watchdog:
        """Return the one of the default process group, made if there is none; raise if it has no store that answers."""
        world = dist.group.WORLD
        assert world is not None
        if world not in _watchdogs:
            _watchdogs[world] = cls(world)
        return _watchdogs[world]

    # ------------------------------------------------------------------------------------------ who is missing

    def leave(self, why: str) -> None:
        """Tell why this rank takes no part any longer."""
        # That it leaves because it lost another is no news.
        if self._lost_at is None:
            self.store.set(f"left/{self.rank}", why)

    def go_on(self) -> None:
        """Take back that this rank waits in vain: it is in another call. Later ranks must not be told the old one."""
        if self._lost_at is not None and time.monotonic() - self._lost_at > LAST_WORDS:
            self._lost_at = None
            with suppress(RuntimeError):
                self.store.set(f"waits/{self.rank}", "")

    def missing(self, what: str, ranks: Sequence[int], limit: float | None) -> str:
        """Say in one line what became of the other global ``ranks`` in the call ``what``.

        ``limit``: seconds that this rank has waited in vain; None where its connections broke.
        """
        self._lost_at = time.monotonic()
        try:
            self.store.set(f"waits/{self.rank}", what)
            left, waits, unknown = self._last_words([rank for rank in ranks if rank != self.rank])
        except RuntimeError:
            # dist.DistError among them.
            return "another rank was lost, and the store of the process group with it (rank 0's, or the launcher's)"
        if left:
            return "; ".join(f"rank {rank} {text}" for rank, text in left.items())
        if unknown:
            advice = ""
            if limit:
                advice = (
                    f"; if it needs more than {limit:g} s, pass a longer timeout= to fsshard.launch or fsshard.init"
                )
            return (
                f"rank {', '.join(map(str, unknown))} did not take part and does not answer: it hangs, is busy with "
                f"something else, or cannot be reached{advice}"
            )
        elsewhere = [f"rank {rank} waits in {text} instead" for rank, text in waits.items() if text != what]
        if elsewhere:
            return f"{'; '.join(elsewhere)}. {UNEQUAL_CALLS}"
        alive = "all ranks are alive and wait in it, but in different collectives: they took different paths. "
        if limit:
            return alive + UNEQUAL_CALLS
        return "all ranks are alive, but have lost their connections"

    def _last_words(self, others: Sequence[int]) -> tuple[Texts, Texts, list[int]]:
        """Return who has left and why, who waits and where, and of whom nothing is known."""
        deadline = time.monotonic() + LAST_WORDS
        while True:
            waits = self._said("waits", others)
            left = self.left([rank for rank in others if rank not in waits])
            unknown = [rank for rank in others if rank not in waits and rank not in left]
            if left or not unknown or time.monotonic() > deadline:
                return left, waits, unknown
            time.sleep(LONGEST_PAUSE)

    def left(self, ranks: Sequence[int]) -> Texts:
        """Return those of ``ranks`` that are known to take part no longer, with the reason."""
        left = self._said("left", ranks)
        others = [rank for rank in ranks if rank not in left]
        for rank, text in self._said("process", others).items():
            if _is_gone(text):
                left[rank] = "has ended: its process is gone"
        return dict(sorted(left.items()))

    def _said(self, kind: str, ranks: Sequence[int]) -> Texts:
        keys = {f"{kind}/{rank}": rank for rank in ranks}
        said = {}
        for key, text in self.store.get_all(list(keys)).items():
            # Empty where it was taken back.
            if text:
                said[keys[key]] = text.decode()
        return said

    # ------------------------------------------------------------------------------------------ where do they wait

    def end(self) -> None:
        """Answer no longer: the process group is about to be destroyed."""
        self._ended.set()
        self._thread.join(INTERVAL)

    def places(self, number: int) -> Places:
        """Return where ranks are, of those that have answered this question or a later one."""
        places = {}
        for rank, answer in self._said("at", range(self._size)).items():
            asked, text, ranks, *rest = json.loads(answer)
            if asked >= number:
                places[rank] = Place(text, _ranks_in(ranks), *rest)
        return places

    def here(self) -> Place:
        """Return where this rank's main thread is, without what it has begun."""
        if self.waits is not None:
            text, ranks, meets = self.waits
            pending = None if meets else ()
            return Place(text, ranks, _computed(), time.monotonic(), pending)
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        location = location_of_this_rank()
        # An engine's wait for what it began names no group.
        ranks = _group_of_call(frame) or tuple(range(self._size))
        # On the CPU a main thread that computes in a backward does not stand still.
        if not location.collective or (location.may_compute and torch.cuda.is_initialized()):
            ranks = ()
        return Place(location.told(), ranks, _computed(), time.monotonic())

    def answer(self, question: int) -> None:
        """Tell where this rank is, and what it has begun."""
        here = self.here()
        begun = collectives(self._began)
        groups = self._groups()
        pending = None
        if here.pending is not None:
            pending = [(groups.get(name, ""), number) for name, number in begun.pending]
        last = {}
        for name, key in groups.items():
            if name in begun.last:
                last[key] = begun.last[name]
            elif begun.complete:
                last[key] = -1
        answer = [question, here.text, _runs(here.with_ranks), here.busy, here.clock, pending, last]
        self.store.set(f"at/{self.rank}", json.dumps(answer))

    def _groups(self) -> dict[str, str]:
        """Return the groups of this process: name -> what no other one is called on any rank."""
        groups = {}
        for group in all_groups():
            name = str(group.group_name)
            # Ranks may have other groups of the same name.
            digest = zlib.crc32(repr(_ranks_of(group)).encode())
            groups[name] = f"{name}:{digest:x}"
        return groups

    # ------------------------------------------------------------------------------------------ meetings

    def meet(
        self,
        group: dist.ProcessGroup,
        what: str,
        note: str,
        timeout: float,
        row: object = None,
    ) -> Meeting:
        """Leave a note, wait for those of the other ranks of the group, and return what came of it.

        The same calls in the same order on all ranks of the group, one thread at a time. Under
        ``meet/<row>/<group>/<number>/`` each rank writes its note and counts itself; the last one, or the first that
        finds that a rank will not come, writes down ``outcome`` for all. So a rank that comes at the last moment finds
        the same as the others, and what a rank asks of the store does not depend on how many there are.

        ``row`` has a count of meetings of its own, whose calls another thread may make; None: the group's.
        """
        row = row or group
        if row not in self._meetings:
            # torch numbers groups anew after some were destroyed, so that a name can come twice.
            kind = f"{type(row).__name__}/{group.group_name}"
            self._names[kind] += 1
            self._meetings[row] = f"meet/{kind}.{self._names[kind]}", itertools.count()
        prefix, numbers = self._meetings[row]
        number = next(numbers)
        place = f"{prefix}/{number}"
        keys = [f"{place}/{rank}" for rank in range(group.size())]
        self.store.set(keys[group.rank()], note)
        is_last = self.store.add(f"{place}/count", 1) == len(keys)
        is_main = threading.current_thread() is threading.main_thread()
        waiting = seen_waiting(group, what, meets=True) if is_main else nullcontext()
        absent: Texts = {}
        is_late = False
        with waiting:
            if not is_last:
                questions = _Questions(self, _ranks_of(group), what)
                try:
                    absent, is_late = self._await_outcome(place, keys, questions, timeout)
                finally:
                    questions.end()
        self._decide(place, keys, absent, is_late)
        # The rank that decides may have died before it could write.
        if not self.store.awaited([f"{place}/outcome"], DECISION):
            raise RankMismatch(f"{what}: a rank was lost while the ranks waited for each other")
        notes, missing, late = json.loads(self.store.get(f"{place}/outcome") or b"")
        if not missing:
            # All have come here, and so are done with the one before.
            self._forget(f"{prefix}/{number - 1}", group.rank())
        return Meeting(place, _by_rank(notes), _by_rank(missing), late)

    def _decide(self, place: str, keys: Sequence[str], absent: Mapping[int, str], is_late: bool) -> None:
        """Write down for all what came of a meeting, if no other rank does."""
        outcome = f"{place}/outcome"
        if self.store.get(outcome) is not None or self.store.add(f"{place}/decided", 1) != 1:
            return
        texts = self.store.get_all(keys)
        notes = {}
        missing = {}
        for rank, key in enumerate(keys):
            if key in texts:
                notes[rank] = texts[key].decode()
            else:
                missing[rank] = absent.get(rank, "has not come yet")
        self.store.set(outcome, json.dumps([notes, missing, is_late and bool(missing)]))

    def _forget(self, place: str, rank: int) -> None:
        """Delete this rank's keys of a meeting that has ended; the first rank's are those of all, too."""
        keys = [str(rank)]
        if rank == 0:
            keys += ["count", "decided", "outcome"]
        for key in keys:
            # A store of files deletes nothing.
            with suppress(NotImplementedError):
                self.store.delete_key(f"{place}/{key}")

    def _await_outcome(
        self,
        place: str,
        keys: Sequence[str],
        questions: _Questions,
        timeout: float,
    ) -> tuple[Texts, bool]:
        """Return why ranks will not come, and whether time ran out; nothing if all are there, or one has decided."""
        began = time.monotonic()
        pause = SHORTEST
        next_look = FIRST_QUESTION
        ranks = questions.ranks
        while True:
            if self.store.get(f"{place}/outcome") is not None:
                return {}, False
            waited = time.monotonic() - began
            if waited > timeout:
                return dict.fromkeys(range(len(keys)), f"did not come within {timeout:g} s"), True
            # By global rank.
            reasons: Mapping[int, str] = {}
            if waited > next_look:
                next_look = waited + FIRST_QUESTION
                # Who came last may have died before it could write.
                if self.store.add(f"{place}/count", 0) == len(keys):
                    return {}, False
                # Each looks after its neighbour: all after all would be too much for the store.
                neighbour = (ranks.index(self.rank) + 1) % len(ranks)
                if self.store.get(keys[neighbour]) is None and self.left([ranks[neighbour]]):
                    reasons = self._reasons_of_missing(ranks, keys)
            elif waited > questions.next:
                try:
                    questions.look(waited)
                except RankMismatch:
                    reasons = questions.texts
            if reasons:
                absent = {}
                for number, rank in enumerate(ranks):
                    if rank in reasons:
                        absent[number] = reasons[rank]
                return absent, False
            time.sleep(min(pause, max(0.0, timeout - waited)))
            pause = min(2 * pause, LONGEST_PAUSE)

    def _reasons_of_missing(self, ranks: Sequence[int], keys: Sequence[str]) -> Texts:
        """Return why ranks, whose notes would be at the keys, have left without one."""
        there = self.store.get_all(keys)
        missing = []
        for rank, key in zip(ranks, keys, strict=True):
            if key not in there:
                missing.append(rank)
        return self.left(missing)


_watchdogs: WeakKeyDictionary[dist.ProcessGroup, Watchdog] = WeakKeyDictionary()


def _ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _by_rank(texts: Mapping[str, str]) -> Texts:
    """Return texts by rank, which JSON has made a string."""
    return {int(rank): text for rank, text in texts.items()}


def _answer_others(reference: Callable[[], Watchdog | None], ended: threading.Event) -> None:
    """Say where this rank is, as long as there is its process group."""
    answered = 0
    before = _computed()
    idle = 0
    while not ended.wait(INTERVAL):
        watchdog = reference()
        now = _computed()
        if watchdog is None or dist.group.WORLD is None or dist.group.WORLD is not watchdog._world():
            return
        # It looks for questions only while the main thread stands still: a rank that computes answers nothing.
        idle = idle + 1 if now - before < BUSY * INTERVAL else 0
        try:
            if idle * INTERVAL > QUIET or (idle and watchdog.here().with_ranks):
                asked = watchdog.store.add("asked", 0)
                if asked != answered:
                    watchdog.answer(asked)
                    answered = asked
        except Exception as error:
            # Stacks, groups and records change while it reads them ("'code' object has no attribute 'f_lineno'", Python
            # 3.11): it looks again. But where the store is gone, or does not answer, nobody can ask.
            log.debug("the watchdog could not see where this rank is: %r", error)
            try:
                watchdog.store.add("asked", 0)
            except RuntimeError:
                return
        before = now
        # It lives as long as its process group, and not as long as this thread.
        del watchdog


def _computed() -> float:
    """Return the seconds of CPU time of the main thread; -1 where the system does not tell (macOS, Windows)."""
    clock = getattr(time, "pthread_getcpuclockid", None)
    ident = threading.main_thread().ident
    if clock is None or ident is None:
        return -1.0
    return time.clock_gettime(clock(ident))


def _group_of_call(frame: FrameType | None) -> tuple[int, ...]:
    """Return the global ranks of the innermost call of ``torch.distributed`` that names its group, or none."""
    while frame is not None:
        if frame.f_code.co_filename.endswith("distributed_c10d.py") and "group" in frame.f_locals:
            group = frame.f_locals["group"]
            if group is None:
                group = dist.group.WORLD
            if isinstance(group, dist.ProcessGroup):
                return _ranks_of(group)
            break
        frame = frame.f_back
    return ()


def _process() -> list[str]:
    """Return where this process is seen, its number and its start; nothing where the system has no ``/proc``."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return [f"{boot} {os.readlink('/proc/self/ns/pid')}", str(os.getpid()), _began("self")]
    return []


def _began(pid: str) -> str:
    """Return when a process has begun, in ticks; "" for one that has ended and is not waited for yet."""
    # proc(5): behind the name in parentheses come the state (3rd field) and, as the 22nd, the start.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    if fields[0] in "ZX":
        return ""
    return fields[19]


def _is_gone(text: str) -> bool:
    """Tell whether a rank's process has ended, as far as that can be seen from here."""
    theirs: list[str] = json.loads(text)
    if not theirs or theirs[:1] != _process()[:1]:
        return False
    try:
        # Numbers of processes are used again: it is another one if it has begun later.
        return _began(theirs[1]) != theirs[2]
    except OSError:
        return True
