"""Lets ranks meet to save or load: absent ranks are named, and the failure of one is raised on all.

A save must neither hang because one rank does not take part, nor mix its messages with those of training, which may
go on meanwhile in another thread. So ranks first meet in the store of their process group, and then talk over a gloo
group that is theirs alone. What they say is JSON: nothing is ever unpickled.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard import errors
from fsshard.comm.forks import check_not_inherited
from fsshard.comm.stores import PatientStore, own_store, timeout_of
from fsshard.comm.waiting import Absence
from fsshard.errors import CheckpointError, FsshardError
from fsshard.torch_private.c10d import AllgatherOptions, ProcessGroupGloo, allgather_base

__all__ = ["Rendezvous"]

DECISION = 10.0  # seconds for the rank that decides on an arrival to write down what it found
LOOK_EVERY = timedelta(seconds=1)  # while a rank waits for another, whether a third has lost one
SHORTEST_PAUSE, LONGEST_PAUSE = 0.001, 0.25  # seconds between two looks at who has not come
NOTES_KEPT = 16  # arrivals whose notes stay in the store until they are removed together
AT_ONCE = 4088  # bytes of a text that travel with its length; what is longer goes in a second message
LAST_WORDS = (
    2.5  # seconds, more than LOOK_EVERY, for the ranks that are left, once one is lost, to say that they are left
)


class _Arrivals:
    """Lets the ranks of a group meet in its store: each leaves a note, and one rank decides for all.

    The same calls in the same order on all ranks, one thread at a time.

    Attributes:
        number: of the next arrival.
        store: what the ranks write in; an arrival's keys begin with its number and ``/``.
        size: how many ranks there are.
    """

    def __init__(self, store: PatientStore, rank: int, size: int) -> None:
        """
        Args:
            store: of these arrivals alone.
            rank: of this process in the group.
            size: how many ranks the group has.
        """
        self.number = 0
        self.store = store
        self.size, self._rank = size, rank
        self._cleaned = 0  # the first arrival whose notes are still in the store

    def come(
        self,
        note: str,
        timeout: float,
        decide: Callable[[Mapping[int, str]], str],
        is_over: Callable[[Sequence[int]], bool],
    ) -> str | None:
        """Leave a note, wait for the others' and return what was decided on all of them.

        Args:
            note: for the rank that decides.
            timeout: seconds to wait for the others.
            decide: from the notes by rank, of those that have come. The first rank that sees all, or has waited long
                enough, runs it.
            is_over: from the ranks that have not come, whether to wait no longer; asked again and again.

        Returns:
            None where the rank that decides has died before it could write.
        """
        number, outcome = self.number, f"{self.number}/outcome"
        self.number += 1
        self.store.set(f"{number}/{self._rank}", note)
        keys = self._notes(number)
        all_here = self.store.add(f"{number}/came", 1) >= self.size and self.store.check(keys)
        if all_here or not self._is_decided(number, timeout, is_over):
            if self.store.add(f"{number}/decided", 1) == 1:
                texts = self.store.get_all(keys)
                decided = decide({int(key.rpartition("/")[2]): text.decode() for key, text in texts.items()})
                self.store.set(outcome, decided)
                return decided
            if not self.store.awaited([outcome], DECISION):
                return None
        return (self.store.get(outcome) or b"").decode()

    def _notes(self, number: int) -> list[str]:
        return [f"{number}/{rank}" for rank in range(self.size)]

    def _is_decided(self, number: int, timeout: float, is_over: Callable[[Sequence[int]], bool]) -> bool:
        """Whether a rank has decided in time, with no reason to decide here before."""
        outcome = f"{number}/outcome"
        deadline, pause = time.monotonic() + timeout, SHORTEST_PAUSE
        while self.store.get(outcome) is None:
            missing = [rank for rank, note in enumerate(self._notes(number)) if not self.store.check([note])]
            left = deadline - time.monotonic()
            if left <= 0 or not missing or is_over(missing):
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE)
        return True

    def clean(self) -> None:
        """Forget the arrivals before the last one, which all ranks have left if they have come to that."""
        last = self.number - 1
        if last - self._cleaned < NOTES_KEPT:
            return
        for old in range(self._cleaned, last):
            shared = ("came", "decided", "outcome", "lost/first") if self._rank == 0 else ()
            for key in (str(self._rank), f"lost/{self._rank}", *shared):
                with suppress(NotImplementedError):
                    self.store.delete_key(f"{old}/{key}")
        self._cleaned = last


class Rendezvous:
    """What the ranks of one group tell each other. The same calls in the same order on all, one thread at a time.

    Attributes:
        rank: of this process in the group.
        size: how many ranks the group has.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Use :meth:`of`, so that a group has one gloo group and no more.

        Args:
            group: of any backend; None for a process that is alone. It is not kept alive.

        Raises:
            CheckpointError: the group's store is gone.
        """
        self.rank, self.size = (group.rank(), group.size()) if group is not None else (0, 1)
        self._what = "the checkpoint"
        self._gloo: ProcessGroupGloo | None = None
        self._sent: Sequence[Tensor] = ()
        self._arrivals: _Arrivals
        self._hurries = False
        if group is None or self.size == 1:
            return
        self._limit, self._group = timeout_of(group), weakref.ref(group)
        members = dist.get_process_group_ranks(group)
        self._among = "" if members == list(range(self.size)) else f" (of the group of global ranks {_listed(members)})"
        with self._store_errors():
            store = own_store(group, "checkpoint")
        self._arrivals = _Arrivals(store, self.rank, self.size)

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Rendezvous:
        """That of a group, made when first asked for; it goes with the group."""
        if group is None:
            return cls(None)
        check_not_inherited(group, "saving, loading or exporting a wrapped model")
        found = _rendezvous.get(group)
        if found is None:
            found = _rendezvous[group] = cls(group)
        return found

    def hurry(self) -> None:
        """This rank ends, since training has lost another: wait no longer than the group's own timeout from now on."""
        self._hurries = True

    @property
    def patience(self) -> float:
        """Seconds that it takes at most, beyond the timeout of what ranks wait for, to say that one is lost."""
        return 0.0 if self.size == 1 else LOOK_EVERY.total_seconds() + 2 * self._arrivals.store.limit + LAST_WORDS

    # ------------------------------------------------------------------------------------------------ arriving

    def arrive(self, what: str, timeout: float, name: str = "") -> None:
        """Return when all ranks have called this with the same ``what``; then they can talk to each other.

        Args:
            what: the call, as users write it: ``save('ckpt/last')``.
            timeout: seconds to wait for the others.
            name: the call in messages from here on; ``what`` itself if empty.

        Raises:
            CheckpointError: a rank did not come, or came for something else (``failures`` names it), on every rank
                that came, and on one that comes later as soon as it does. All can arrive for the next call.
        """
        self._what = what
        if self.size == 1:
            self._what = name or what
            return
        number = self._arrivals.number
        with self._store_errors():
            outcome = self._outcome(timeout)
        if outcome["failures"]:
            raise CheckpointError(
                f"{outcome['must']}{self._among}; nothing was done",
                {int(rank): text for rank, text in outcome["failures"].items()},
            )
        with self._store_errors():
            self._arrivals.clean()
        self._what = name or what
        if outcome["anew"]:
            self._connect(number, timeout)

    def _outcome(self, timeout: float) -> dict[str, Any]:
        """What the first rank that sees all, or has waited long enough, has written down for all."""
        note = json.dumps({"what": self._what, "connected": self._gloo is not None})
        group = self._group()
        assert group is not None
        absence = Absence(group, self._what)
        with absence.waiting():
            outcome = self._arrivals.come(
                note, timeout, lambda notes: json.dumps(self._decide(notes, timeout, absence.reasons)), absence.is_final
            )
        if outcome is None:
            raise CheckpointError(f"{self._what}: a rank was lost while the ranks waited for each other")
        return cast("dict[str, Any]", json.loads(outcome or "{}"))

    def _decide(self, texts: Mapping[int, str], timeout: float, reasons: Mapping[int, str]) -> dict[str, Any]:
        notes = {rank: json.loads(text) for rank, text in texts.items()}
        late = "has not come yet" if reasons else f"did not come within {timeout:g} s"
        failures = {rank: reasons.get(rank, late) for rank in range(self.size) if rank not in notes}
        must = f"all {self.size} ranks must call {self._what}"
        if len({note["what"] for note in notes.values()}) > 1:
            failures |= {rank: f"called {note['what']}" for rank, note in notes.items()}
            must = f"all {self.size} ranks must make the same call"
        return {"must": must, "failures": failures, "anew": not all(note["connected"] for note in notes.values())}

    def _connect(self, number: int, timeout: float) -> None:
        self._drop()
        limit = max(timeout, 1.0)
        # Not dist.new_group: with use_local_synchronization torch (2.13) puts into the name of a group how many groups
        # the process knows, which differs between ranks that are in different ones, and these wait for each other in
        # vain; without it all ranks of the world must call. And such a group outlives the one that it serves.
        store, rank, size = self._arrivals.store.under(f"{number}/gloo"), self.rank, self.size
        try:
            self._gloo = self._arrivals.store.ask(
                lambda: ProcessGroupGloo(store, rank, size, timedelta(seconds=limit)),
                limit + self._arrivals.store.limit,
            )
        except (RuntimeError, ValueError) as error:  # dist.DistError among them
            self._lost(RuntimeError(f"cannot connect over gloo: {error}"))

    # ------------------------------------------------------------------------------------------------ talking

    def gather(self, value: Any, timeout: float | None = None) -> list[Any]:
        """``value`` of every rank, by rank, as JSON gives it back: lists for tuples, strings for all keys.

        Args:
            value: what JSON can say.
            timeout: seconds; None for the process group's own. A rank that dies is noticed at once.

        Raises:
            CheckpointError: a rank was lost, or its value is none that JSON knows; on every rank.
        """
        texts = [_encoded(value)]
        if self.size > 1:
            texts = self._exchange(texts[0], timeout)
        answers = [json.loads(text) for text in texts]
        unsaid = {rank: answer["unsaid"] for rank, answer in enumerate(answers) if "unsaid" in answer}
        if unsaid:
            raise CheckpointError(f"{self._what}: values that cannot be told to the other ranks", unsaid)
        return [answer["value"] for answer in answers]

    def run_on_all_ranks(self, work: Callable[[], Any], timeout: float | None = None) -> list[Any]:
        """Run ``work`` on every rank, and return all results, by rank; if it raises anywhere, raise everywhere.

        Args:
            work: local, that is without collectives. What it returns JSON must be able to say.
            timeout: as in :meth:`gather`; a rank's work may take that much longer than another's.

        Raises:
            FsshardError: of the kind that the failing ranks raised, if that is one; the error itself if all ranks
                raised the same.
            CheckpointError: otherwise. ``failures`` says what went wrong on which rank.
        """
        result, error = None, None
        try:
            result = work()
        except Exception as raised:
            error = raised
        except BaseException:  # Ctrl-C, say: the others must not wait for this rank
            self._drop()
            raise
        if self.size == 1:
            if error is not None:
                raise error
            return self.gather(result)
        report = {"result": result} if error is None else {"error": _described(error)}
        try:
            reports = self.gather(report, timeout)
        except CheckpointError as lost:
            raise lost from error
        failures = {rank: report["error"] for rank, report in enumerate(reports) if "error" in report}
        if failures:
            self._raise(failures, error)
        return [report["result"] for report in reports]

    def _raise(self, failures: Mapping[int, dict[str, Any]], error: Exception | None) -> NoReturn:
        kinds = {failure["kind"] for failure in failures.values()}
        kind = getattr(errors, kinds.pop(), CheckpointError) if len(kinds) == 1 else CheckpointError
        texts = {rank: failure["text"] for rank, failure in failures.items()}
        if error is not None and isinstance(error, kind) and len(texts) == self.size and len(set(texts.values())) == 1:
            raise error
        combined = CheckpointError(f"{self._what} failed{self._among}", texts)
        if kind is not CheckpointError:
            attributes = next(iter(failures.values()))["attributes"] if error is None else vars(error)
            combined = _as_kind(kind, combined, attributes)
        raise combined from error

    def _exchange(self, text: bytes, timeout: float | None) -> list[bytes]:
        gloo = self._gloo
        if gloo is None:
            raise CheckpointError(f"{self._what}: the ranks have lost their connection, or have not met yet")
        limit = self._limit if timeout is None else timeout
        mine = torch.frombuffer(
            bytearray(len(text).to_bytes(8, "little") + text[:AT_ONCE].ljust(AT_ONCE)), dtype=torch.uint8
        )
        whole = torch.empty(self.size * mine.numel(), dtype=torch.uint8, device="cpu")
        sent = [mine, whole]
        try:
            self._all_gather(gloo, whole, mine, limit)
            lengths = [int.from_bytes(row[:8], "little") for row in whole.numpy().reshape(self.size, -1)]
            longest = max(lengths)
            if longest > AT_ONCE:
                mine = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8)
                whole = torch.empty(self.size * longest, dtype=torch.uint8, device="cpu")
                sent += [mine, whole]
                self._all_gather(gloo, whole, mine, limit)
        except RuntimeError as error:
            # "Connection closed by peer", "Timed out waiting", "Broken pipe" and so on (gloo of torch 2.13). No frame
            # may hold the group any longer: its connections close with it.
            del gloo
            self._lost(error.with_traceback(None))
        # Tensors that a thread of gloo were the last to let go of would make it wait for the interpreter's lock,
        # which who frees the group may hold: a deadlock (pytorch issue #56297). So they live until the next exchange.
        self._sent = sent
        rows = whole.numpy().reshape(self.size, -1)[:, 0 if longest > AT_ONCE else 8 :]
        return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]

    def _all_gather(self, gloo: ProcessGroupGloo, whole: Tensor, mine: Tensor, timeout: float) -> None:
        """One operation of gloo, left if another rank has lost one: this rank may wait for a third, which works on."""
        options = AllgatherOptions()
        options.timeout = timedelta(seconds=timeout)
        work = allgather_base(gloo, whole, mine, options)
        begun = time.monotonic()
        while True:
            try:
                work.wait(LOOK_EVERY)
                return
            except RuntimeError:
                # "Operation timed out!" (torch 2.13) of this wait alone; the operation goes on.
                if work.is_completed():  # it ended in between, or failed, and raises
                    work.wait()
                    return
                first = f"{self._arrivals.number - 1}/lost/first"
                try:
                    if (why := self._arrivals.store.get(first)) is not None:
                        raise RuntimeError(why.decode()) from None
                    if self._hurries and time.monotonic() - begun > self._limit:
                        raise RuntimeError(
                            f"this rank is leaving the job after it waited {self._limit:g} s for the others"
                        )
                except RuntimeError:  # or the store gives no answer
                    threading.Thread(target=_await_end, args=(gloo, work), daemon=True).start()
                    raise

    # ------------------------------------------------------------------------------------------------ losses

    def _drop(self) -> None:
        """Close the connections; ranks that wait for this one notice it."""
        self._gloo = None

    def _lost(self, error: RuntimeError) -> NoReturn:
        """Let the others know, find out who is left, and raise."""
        self._drop()
        place = f"{self._arrivals.number - 1}/lost"
        missing: dict[int, str] = {}
        why = str(error).partition(". This is")[0]  # gloo guesses at reasons at length
        try:
            self._arrivals.store.set(f"{place}/first", why)
            self._arrivals.store.set(f"{place}/{self.rank}", "lost one")
            if not self._arrivals.store.awaited([f"{place}/{rank}" for rank in range(self.size)], LAST_WORDS):
                silent = [rank for rank in range(self.size) if self._arrivals.store.get(f"{place}/{rank}") is None]
                missing = dict.fromkeys(silent, "no word from it: it has ended, hangs, or cannot be reached")
            told = "lost a rank"
        except RuntimeError:  # dist.DistError among them
            told = "lost a rank, and the store of the process group with it (rank 0 or the launcher hosts it)"
        raise CheckpointError(f"{self._what} {told}{self._among}: {why}", missing) from error

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if isinstance(error, FsshardError):
                raise
            raise CheckpointError(
                f"{self._what}: the store of the process group cannot be reached: {error}; rank 0 or the launcher "
                "hosts it, and may have ended"
            ) from error


_rendezvous: WeakKeyDictionary[dist.ProcessGroup, Rendezvous] = WeakKeyDictionary()


def _await_end(gloo: ProcessGroupGloo, work: Any) -> None:
    """Hold a group until its last operation has ended: freeing it before would wait for that (torch 2.13)."""
    with suppress(RuntimeError):
        work.wait()


def _encoded(value: Any) -> bytes:
    """The value as JSON, or why it cannot be: a rank that raised here would leave the others waiting."""
    try:
        return json.dumps({"value": value}).encode()
    except (TypeError, ValueError, RecursionError) as error:
        return json.dumps({"unsaid": f"{type(error).__name__}: {error}"}).encode()


def _described(error: Exception) -> dict[str, Any]:
    """An error as JSON; only errors of ours keep their kind."""
    if type(error) is getattr(errors, type(error).__name__, None) and isinstance(error, FsshardError):
        attributes = json.loads(json.dumps(vars(error), default=str, skipkeys=True))
        return {"kind": type(error).__name__, "text": str(error), "attributes": attributes}
    return {"kind": "CheckpointError", "text": f"{type(error).__name__}: {error}", "attributes": {}}


def _as_kind(kind: type[FsshardError], combined: CheckpointError, attributes: Mapping[str, Any]) -> Any:
    error = kind.__new__(kind)
    error.args = combined.args
    error.__dict__.update({**attributes, "failures": combined.failures})
    return error


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
