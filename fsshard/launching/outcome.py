"""The outcome of a job, of the pool or of launch(), rank by rank, and the error that tells most of it."""

from __future__ import annotations

import pickle
import signal
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fsshard.comm.stacks import (
    StackLocation,
    location_in_dump,
    location_in_traceback,
    may_compute,
    timed_out,
)
from fsshard.comm.watchdog import UNEQUAL_CALLS, speaks_of_a_lost_rank
from fsshard.errors import LaunchError, RankFailed, RankHung, RankMismatch

__all__ = ["FINISHED", "Failure", "Outcome", "is_consequence", "packed"]

FINISHED = ("return", "sys.exit(0)")
"""How a rank's function can have finished."""

HINTS = {
    "SIGKILL": "; out of memory, perhaps",
    # Gloo ends the process (torch 2.13): "gloo::EnforceNotMet ... Received data size doesn't match expected size".
    "SIGABRT": (
        f"; over gloo: perhaps ranks called different collectives. {UNEQUAL_CALLS}. Or FSDP2 "
        "has units that only some ranks run (experts): give wrap an auto_wrap_policy without them, and "
        "find_unused_parameters=True"
    ),
}


def is_consequence(error: BaseException) -> bool:
    """Tell whether the error, or the one it was raised from, speaks of a neighbour that went away."""
    links: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and not any(link is known for known in links):
        links.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return any(isinstance(link, RankMismatch) or speaks_of_a_lost_rank(link) for link in links)


@dataclass(frozen=True)
class Failure:
    """An error of a rank, in a form that any process can read."""

    rank: int
    time: float
    type_name: str
    message: str
    traceback: str = ""
    consequence: bool = False  # most likely only an echo of another rank's failure
    pickled: bytes | None = None
    died: bool = False

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """Describe an exception that a rank has raised."""
        text = "".join(traceback.format_exception(error))
        consequence = is_consequence(error)
        return cls(rank, time.time(), type(error).__name__, str(error), text, consequence, _pickled(error))

    @classmethod
    def death(cls, rank: int, code: int | None) -> Failure:
        """Describe the end of a rank's process, by its exit code."""
        name = f"exit code {code}"
        message = (
            "the process exited without finishing: os._exit(), or an error on standard error before fn was reached"
        )
        if code is not None and code < 0:
            name = {number.value: number.name for number in signal.Signals}.get(-code, f"signal {-code}")
            message = f"the process was killed by a signal{HINTS.get(name, '')}"
        return cls(rank, time.time(), name, message, died=True)

    def error(self) -> BaseException | None:
        """Return the exception that the rank raised, where it can be pickled."""
        return _unpickled(self.pickled)

    @property
    def is_echo(self) -> bool:
        """Return whether the rank raised nothing but what a collective raises when another rank is gone or late."""
        return self.consequence and ("gloo" in self.traceback or self.is_late)

    @property
    def is_late(self) -> bool:
        """Return whether a collective, or the store, waited too long."""
        return self.consequence and timed_out(self.traceback)


def _pickled(error: BaseException) -> bytes | None:
    """Return the exception as bytes that are known to load, or None."""
    # The default pickle calls the class with error.args, which fails for an __init__ of another signature.
    for state in (error, (type(error), error.args, error.__dict__)):
        with suppress(Exception):
            data = pickle.dumps(state)
            copy = _unpickled(data)
            if type(copy) is type(error) and str(copy) == str(error):
                return data
    return None


def _unpickled(data: bytes | None) -> BaseException | None:
    with suppress(Exception):
        state = pickle.loads(data) if data is not None else None
        if isinstance(state, tuple):
            kind, args, attributes = state
            state = kind.__new__(kind, *args)
            state.args = args
            state.__dict__.update(attributes)
        if isinstance(state, BaseException):
            return state
    return None


def packed(rank: int, result: Any) -> bytes:
    """Pickle what a rank returned."""
    try:
        return pickle.dumps(result)
    except Exception as error:
        kind = type(result).__name__
        raise LaunchError(
            f"rank {rank} returned a {kind} that cannot be pickled ({error}); return plain data"
        ) from error


@dataclass
class Outcome:
    """The result of a job, rank by rank."""

    world_size: int
    timeout: float = 0.0  # seconds that the job may take; once it is over, those for which its ranks were waited for
    finished: dict[int, str] = field(default_factory=dict)  # how, one of FINISHED; the first to finish first
    results: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)  # of those that did not answer

    def fail(self, failure: Failure, stack: Path) -> None:
        """Take down a rank's failure; of a death also where it was, which ``faulthandler`` may have written down."""
        text = ""
        if failure.died:
            with suppress(OSError):
                text = stack.read_text()
        if text:
            message = f"{failure.message}; it {location_in_dump(text).told('waited')}"
            failure = replace(failure, message=message, traceback=text)
        self.failures.setdefault(failure.rank, failure)

    def error(self) -> RankFailed | None:
        """Return the first real failure; else the rank that waited in vain; else who left early, or the first echo.

        Its ``__cause__`` is the exception of that rank, or the echo of its leaving, where it can be pickled.
        """
        late = [failure for failure in self.failures.values() if failure.is_late]
        if all(failure.consequence for failure in self.failures.values()) and (late or self.stacks):
            return self._hang(late)
        if not self.failures:
            return None
        first = min(self.failures.values(), key=lambda failure: (failure.consequence, failure.time))
        if first.consequence and self.finished:
            return self._left_early(first)
        error = RankFailed(first.rank, first.type_name, first.message, first.traceback, self._others(first.rank))
        error.__cause__ = first.error()
        return error

    def error_of(self, rank: int) -> RankFailed | None:
        """Return the failure of one rank, whatever happened on the others."""
        failures = {rank: self.failures[rank]} if rank in self.failures else {}
        stacks = {rank: self.stacks[rank]} if rank in self.stacks else {}
        return Outcome(self.world_size, self.timeout, failures=failures, stacks=stacks).error()

    def cause(self, rank: int) -> BaseException | None:
        """Return the exception that the rank raised, where it can be pickled."""
        return self.failures[rank].error() if rank in self.failures else None

    def _left_early(self, failure: Failure) -> RankFailed:
        """Return the failure of the first rank that had finished, of which ``failure`` is the echo on another one."""
        left, *others = self.finished
        how, said = "SystemExit", "sys.exit(0) was called there"
        if self.finished[left] == "return":
            how, said = "an early return", "its function had returned"
        also = f" (so had rank {', '.join(map(str, others))})" if others else ""
        message = (
            f"{said}{also} while rank {failure.rank} still needed it: did it skip a collective, or have fewer batches "
            f"(drop_last=True, DistributedSampler)? {failure.type_name} on rank {failure.rank}: {failure.message}"
        )
        waited = location_in_traceback(failure.traceback).told("waited")
        error = RankFailed(left, how, message, failure.traceback, {failure.rank: waited})
        error.__cause__ = failure.error()
        return error

    def _hang(self, late: list[Failure]) -> RankHung:
        found = [(location_in_traceback(f.traceback), f.rank) for f in sorted(late, key=lambda f: f.time)]
        found += [(location_in_dump(text), rank) for rank, text in sorted(self.stacks.items())]
        place, rank = next((entry for entry in found if entry[0].collective), found[0])
        if rank in self.failures:
            message, trace = f"rank {rank} {place.told('waited')}, and gave up", self.failures[rank].traceback
        else:
            computing = ", unless it is still computing" if may_compute(place) else ""
            message = f"rank {rank} {place.told()} (no answer within {self.timeout:g} s{computing})"
            trace = self.stacks[rank]
        missing = self._missing(rank, place) if place.collective else ""
        told = f"{missing}; {message}. {UNEQUAL_CALLS}" if missing else message
        error = RankHung(rank, place.collective, told, trace, self._others(rank))
        error.__cause__ = self.cause(rank)
        return error

    def _missing(self, waiting: int, place: StackLocation) -> str:
        """Name the ranks that never came to the collective that a rank waits in, and where the first of them is."""
        others = self._others(waiting)
        places = {rank: self._place(rank) for rank in others}
        absent = [rank for rank in others if places[rank].collective != place.collective]
        if not absent:
            return ""
        # One that is in no collective at all tells more than one that waits in another.
        first, *more = sorted(absent, key=lambda rank: bool(places[rank].collective))
        nor = f" (nor did rank {', '.join(map(str, more))})" if more else ""
        return f"rank {first} never came to {place.collective}{nor}: it {others[first]}"

    def _place(self, rank: int) -> StackLocation:
        """Return where a rank waits or waited, as far as its stack tells."""
        if rank in self.stacks:
            return location_in_dump(self.stacks[rank])
        failure = self.failures.get(rank)
        return location_in_traceback(failure.traceback) if failure and failure.is_echo else StackLocation()

    def _others(self, rank: int) -> dict[int, str]:
        told = {other: self._told(other) for other in range(self.world_size) if other != rank}
        return {other: text for other, text in told.items() if text}

    def _told(self, rank: int) -> str:
        """Say what became of a rank, in one line."""
        place, failure = self._place(rank), self.failures.get(rank)
        if rank in self.stacks:
            return place.told("waited") if place != StackLocation() else "did not answer"
        if failure is None:
            return "had finished" if rank in self.finished else ""
        if failure.is_echo:
            where = place.told("waited") if place.collective or place.line else ""
            if failure.is_late:
                return f"{where or 'waited'}, and gave up"
            return f"lost its neighbour{' while it ' if where else ''}{where}"
        first = failure.message.strip().partition("\n")[0]
        return f"died: {failure.type_name}" if failure.died else f"raised {failure.type_name}: {first}"
