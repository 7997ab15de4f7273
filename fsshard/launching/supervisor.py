"""The parent of ranks: starts them, listens to them, notices which has died, ends them, and tells what went wrong."""

from __future__ import annotations

import functools
import math
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple

from fsshard.comm.stacks import StackLocation, location_in_dump, location_in_traceback, timed_out
from fsshard.comm.watchdog import UNEQUAL_CALLS, speaks_of_a_lost_rank
from fsshard.errors import LaunchError, RankFailed, RankHung, RankMismatch

FINISHED = ("return", "sys.exit(0)")
"""The ways in which a rank's function can have finished."""

Handed = tuple[tuple[Callable[[Any], None], Any], ...]
Job = Callable[..., Any]
Arguments = tuple[Any, ...]  # of a job
# What is called with a rank and what it tells.
OnMessage = Callable[[int, Any], None] | None
handed: dict[str, tuple[Callable[[Any], None], Any]] = {}
"""By subject, the calls ``take(value)`` that each process makes which this one starts, or gives work to, before its
work: its imports may not repeat them. ``take`` is at the top level of a module and cheap; the value is picklable."""

RANK = "fsshard rank "
"""Beginning of the name of a rank's process."""
UNGUARDED = 78
"""Exit code of a rank whose main script starts ranks while it is imported."""

POLL_SECONDS = 0.5  # a dead rank's forked children can hold its sentinel open, so exit codes are looked at too
EXIT_SECONDS = 2.0  # from a rank's last message to its exit code
STACK_SECONDS = 2.0  # for a rank that does not answer to write down where it is

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
    seen = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        if isinstance(link, RankMismatch) or speaks_of_a_lost_rank(link):
            return True
        seen.add(id(link))
        context = None if link.__suppress_context__ else link.__context__
        link = link.__cause__ or context
    return False


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
        """Describe an exception that a rank has raised, from the first frame on that is not of launching."""
        start = error.__traceback__
        while start and start.tb_frame.f_globals.get("__name__", "").startswith("fsshard.launching."):
            start = start.tb_next
        frames = start or error.__traceback__
        return cls(
            rank=rank,
            time=time.time(),
            type_name=type(error).__name__,
            message=str(error),
            traceback="".join(traceback.format_exception(type(error), error, frames)),
            consequence=is_consequence(error),
            pickled=_pickled(error),
        )

    @classmethod
    def death(cls, rank: int, code: int | None) -> Failure:
        """Describe the end of a rank's process, by its exit code."""
        name = f"exit code {code}"
        message = (
            "the process exited without finishing: os._exit(), or an error on standard error before fn was reached"
        )
        if code is not None and code < 0:
            names = {number.value: number.name for number in signal.Signals}
            name = names.get(-code, f"signal {-code}")
            message = f"the process was killed by a signal{HINTS.get(name, '')}"
        return cls(rank, time.time(), name, message, died=True)

    def error(self) -> BaseException | None:
        """Return the exception that the rank raised, where it can be pickled."""
        return _unpickled(self.pickled)

    @property
    def is_late(self) -> bool:
        """Return whether a collective, or the store, waited too long."""
        return self.consequence and timed_out(self.traceback)

    @property
    def is_echo(self) -> bool:
        """Return whether the rank raised nothing but what a collective raises when another rank is gone or late."""
        return self.is_late or (self.consequence and "gloo" in self.traceback)


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
    if data is None:
        return None
    with suppress(Exception):
        state = pickle.loads(data)
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
        kind = f"{type(result).__name__} that cannot be pickled ({error})"
        raise LaunchError(f"rank {rank} returned a {kind}; return plain data") from error


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
        if failure.died and stack.exists():
            text = stack.read_text()
        if text:
            message = f"{failure.message}; it {location_in_dump(text).told('waited')}"
            failure = replace(failure, message=message, traceback=text)
        self.failures.setdefault(failure.rank, failure)

    def error(self) -> RankFailed | None:
        """Return the first real failure; else the rank that waited in vain; else who left early, or the first echo.

        Its ``cause`` is the exception of that rank, or the echo of its leaving, where it can be pickled.
        """
        failures = self.failures.values()
        late = [failure for failure in failures if failure.is_late]
        if (late or self.stacks) and all(failure.consequence for failure in failures):
            return self._hang(late)
        if not failures:
            return None
        # An echo of another rank's failure tells less, even if it came sooner.
        first = min(failures, key=lambda failure: (failure.consequence, failure.time))
        if first.consequence and self.finished:
            return self._left_early(first)
        error = RankFailed(first.rank, first.type_name, first.message, first.traceback, self._others(first.rank))
        error.cause = first.error()
        return error

    def error_of(self, rank: int) -> RankFailed | None:
        """Return the failure of one rank, whatever happened on the others."""
        alone = Outcome(self.world_size, self.timeout)
        if rank in self.failures:
            alone.failures[rank] = self.failures[rank]
        if rank in self.stacks:
            alone.stacks[rank] = self.stacks[rank]
        return alone.error()

    def cause(self, rank: int) -> BaseException | None:
        """Return the exception that the rank raised, where it can be pickled."""
        failure = self.failures.get(rank)
        return failure.error() if failure else None

    def _left_early(self, failure: Failure) -> RankFailed:
        """Return the failure of the first rank that had finished, of which ``failure`` is the echo on another one."""
        left, *others = self.finished
        how = "SystemExit"
        event = "sys.exit(0) was called there"
        if self.finished[left] == "return":
            how = "an early return"
            event = "its function had returned"
        if others:
            event += f" (so had rank {', '.join(map(str, others))})"
        message = (
            f"{event} while rank {failure.rank} still needed it: did it skip a collective, or have fewer batches "
            f"(drop_last=True, DistributedSampler)? {failure.type_name} on rank {failure.rank}: {failure.message}"
        )
        waited = location_in_traceback(failure.traceback).told("waited")
        error = RankFailed(left, how, message, failure.traceback, {failure.rank: waited})
        error.cause = failure.error()
        return error

    def _hang(self, late: list[Failure]) -> RankHung:
        places = {}
        for failure in sorted(late, key=lambda failure: failure.time):
            places[failure.rank] = location_in_traceback(failure.traceback)
        for rank, text in sorted(self.stacks.items()):
            places.setdefault(rank, location_in_dump(text))
        in_collectives = [rank for rank, place in places.items() if place.collective]
        rank = in_collectives[0] if in_collectives else next(iter(places))
        place = places[rank]
        if rank in self.failures:
            message = f"rank {rank} {place.told('waited')}, and timed out"
            stack = self.failures[rank].traceback
        else:
            computing = ", unless it is still computing" if place.may_compute else ""
            message = f"rank {rank} {place.told()} (no answer within {self.timeout:g} s{computing})"
            stack = self.stacks[rank]
        missing = self._missing(rank, place) if place.collective else ""
        if missing:
            message = f"{missing}; {message}. {UNEQUAL_CALLS}"
        error = RankHung(rank, place.collective, message, stack, self._others(rank))
        error.cause = self.cause(rank)
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
        where = place.collective
        if more:
            where += f" (nor did rank {', '.join(map(str, more))})"
        return f"rank {first} never came to {where}: it {others[first]}"

    def _place(self, rank: int) -> StackLocation:
        """Return where a rank waits or waited, as far as its stack tells."""
        if rank in self.stacks:
            return location_in_dump(self.stacks[rank])
        failure = self.failures.get(rank)
        if failure is not None and failure.is_echo:
            return location_in_traceback(failure.traceback)
        return StackLocation()

    def _others(self, rank: int) -> dict[int, str]:
        texts = {}
        for other in range(self.world_size):
            text = "" if other == rank else self._fate(other)
            if text:
                texts[other] = text
        return texts

    def _fate(self, rank: int) -> str:
        """Say what became of a rank, in one line."""
        place = self._place(rank)
        if rank in self.stacks:
            return "did not answer" if place == StackLocation() else place.told("waited")
        failure = self.failures.get(rank)
        if failure is None:
            return "had finished" if rank in self.finished else ""
        if failure.is_echo:
            where = place.told("waited") if place.collective or place.line else ""
            if failure.is_late:
                return f"{where or 'waited'}, and timed out"
            lost = "lost its connection to another rank"
            return f"{lost} while it {where}" if where else lost
        if failure.died:
            return f"died: {failure.type_name}"
        line = failure.message.strip().partition("\n")[0]
        return f"raised {failure.type_name}: {line}"


def take_over(handed: Handed) -> None:
    """Make the calls that another process hands on."""
    for take, value in handed:
        take(value)


def say(pipe: connection.Connection, kind: str, value: bytes = pickle.dumps(None)) -> None:
    """Send a rank's message to its parent.

    ``kind``: ``"ready"`` for work; ``"told"`` something while it works; how it has finished, one of ``FINISHED``, with
    its result; ``"raised"``, with a ``Failure``. Its process's end is heard as ``"died"``.
    """
    # Values by plain pickle, not multiprocessing's: a tensor travels as bytes, not as shared memory that dies with it.
    pipe.send_bytes(pickle.dumps((kind, value)))


class _Rank(NamedTuple):
    process: SpawnProcess
    pipe: connection.Connection


class Supervisor:
    """Spawned ranks, as their parent sees them: one process and one pipe each."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # of their stacks
        self.until: float | None = None  # in the time of time.monotonic; set once the ranks were told to leave

    @property
    def ranks(self) -> list[int]:
        """Return those that were started and not ended."""
        return list(self._ranks)

    def start(self, rank: int, target: Callable[..., None], args: Arguments) -> None:
        """Spawn a process that calls ``target(*args, stack, pipe)``; ``stack`` is where ``faulthandler`` shall write.

        Raises:
            LaunchError: the arguments cannot be pickled. Nothing was started.
        """
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="fsshard-ranks-")
        spawn = multiprocessing.get_context("spawn")
        here, there = spawn.Pipe()
        # Not daemonic: a daemon may not have children, and a DataLoader wants workers.
        arguments = (*args, self._stack(rank), there)
        process = spawn.Process(target=target, args=arguments, name=f"{RANK}{rank}", daemon=False)
        try:
            # This pickles everything before it starts anything.
            process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            here.close()
            raise LaunchError(
                f"fn or args cannot be pickled ({error}); spawned ranks need a module-level function and plain data"
            ) from error
        finally:
            there.close()
        self._ranks[rank] = _Rank(process, here)

    def send(self, rank: int, message: Any) -> None:
        """Send a message to a rank, unless it has just died: that is found out by :meth:`watch`."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._ranks[rank].pipe.send(message)

    def watch(
        self,
        ranks: Iterable[int],
        outcome: Outcome,
        last: Collection[str] = (*FINISHED, "raised"),
        *,
        deadline: float = math.inf,
        patience: float = math.inf,
        on_message: OnMessage = None,
    ) -> set[int]:
        """Take down what ranks say until each has said its last, or died, or time is over.

        Args:
            ranks: whom to listen to.
            outcome: where results and failures are taken down.
            last: kinds of messages after which nothing more is awaited from a rank.
            deadline: in the time of ``time.monotonic``.
            patience: seconds after the first failure, for the other ranks to say what happened to them.
            on_message: called with a rank and the value that it tells.

        Returns:
            The ranks that have not said their last.
        """
        waiting = set(ranks)
        while waiting and time.monotonic() < (self.until or deadline):
            for rank in self._readable(waiting, self.until or deadline):
                kind, value = self._message(rank)
                if kind == "told" and on_message is not None:
                    on_message(rank, value)
                elif kind in FINISHED:
                    outcome.finished[rank] = kind
                    outcome.results[rank] = value
                elif kind in ("raised", "died"):
                    outcome.fail(value, self._stack(rank))
                    deadline = min(deadline, time.monotonic() + patience)
                if kind == "died" or kind in last:
                    waiting.discard(rank)
        return waiting

    def _readable(self, waiting: set[int], deadline: float) -> list[int]:
        """Wait for ranks that have something to say, or have died; none if nothing happens for a while."""
        limit = max(0.0, min(POLL_SECONDS, deadline - time.monotonic()))
        watched: list[Any] = []
        for rank in waiting:
            process, pipe = self._ranks[rank]
            watched += [pipe, process.sentinel]
        connection.wait(watched, limit)
        # Its end is looked at before its pipe: what it sent before it died is there by then.
        ended = self.dead()
        ready = []
        for rank in sorted(waiting):
            if rank in ended or self._ranks[rank].pipe.poll():
                ready.append(rank)
        return ready

    def _message(self, rank: int) -> tuple[str, Any]:
        process, pipe = self._ranks[rank]
        try:
            # A dead rank's forked children may hold the pipe open, so that reading could wait forever.
            if pipe.poll():
                kind, data = pickle.loads(pipe.recv_bytes())
                try:
                    return kind, pickle.loads(data)
                except Exception as error:
                    unread = LaunchError(f"what the rank sent cannot be unpickled here: {error}; return plain data")
                    return "raised", Failure.of(rank, unread)
        except (EOFError, OSError):
            process.join(EXIT_SECONDS)
            # It closed its pipe and stayed.
            if process.exitcode is None:
                process.kill()
                process.join()
        if process.exitcode == UNGUARDED:
            raise LaunchError(
                "ranks import the main script, and it starts ranks at its top level; put that call under "
                '`if __name__ == "__main__":`'
            )
        return "died", Failure.death(rank, process.exitcode)

    def _stack(self, rank: int) -> Path:
        assert self._folder is not None
        return Path(self._folder.name, f"rank{rank}")

    def stack(self, rank: int) -> str:
        """Return the stack that a rank which does not answer is stuck in."""
        text = ""
        process = self._ranks[rank].process
        with suppress(ProcessLookupError, FileNotFoundError):
            os.kill(process.pid or 0, signal.SIGUSR1)
            deadline = time.monotonic() + STACK_SECONDS
            while time.monotonic() < deadline:
                before = text
                process.join(0.05)
                text = self._stack(rank).read_text()
                # Two equal readings mean that the whole stack has been written.
                if text and text == before:
                    break
        return text

    def dead(self) -> list[int]:
        """Return the ranks whose processes have ended by themselves."""
        return [rank for rank, each in self._ranks.items() if each.process.exitcode is not None]

    def end(self, ranks: Iterable[int], patience: float | None = 0.0) -> dict[int, int]:
        """End processes and forget them.

        Their pipes are closed first, at which one that waits for work leaves. After ``patience`` seconds (None: as long
        as it takes) they are killed. Return the exit codes of those that left by themselves.
        """
        ended = {rank: self._ranks.pop(rank) for rank in sorted(set(ranks)) if rank in self._ranks}
        for each in ended.values():
            each.pipe.close()
        deadline = math.inf if patience is None else time.monotonic() + patience
        codes = {}
        for rank, (process, _) in ended.items():
            left = deadline - time.monotonic()
            if left > 0:
                process.join(None if left == math.inf else left)
            if process.exitcode is not None:
                codes[rank] = process.exitcode
            else:
                process.kill()
        for process, _ in ended.values():
            process.join()
        if self._folder is not None and not self._ranks:
            self._folder.cleanup()
            self._folder = None
        return codes

    def leave_within(self, seconds: float) -> None:
        """Ask all processes to end (SIGTERM); :meth:`watch` listens for so long to what they say, and no longer."""
        self.until = self.until or time.monotonic() + seconds
        self.terminate(self._ranks)

    def terminate(self, ranks: Iterable[int]) -> None:
        """Ask processes to end (SIGTERM)."""
        for rank in ranks:
            self._ranks[rank].process.terminate()


def check_not_importing(call: str) -> None:
    """Refuse to start ranks where this process is one that still imports the main script, which starts them once more.

    A rank of ours ends without a word, since its parent says what is wrong, once.
    """
    process = multiprocessing.current_process()
    if not getattr(process, "_inheriting", False):
        return
    if process.name.startswith(RANK):
        raise SystemExit(UNGUARDED)
    raise LaunchError(
        f'{call} while a spawned process was importing the main script; put the call under `if __name__ == "__main__":`'
    )


def check_importable(fn: Any) -> None:
    """Raise unless a spawned process can import ``fn`` by its name."""
    # pytest shows the caller's line above the message.
    __tracebackhide__ = True
    if not callable(fn):
        raise LaunchError(f"expected a module-level function, got {fn!r}")
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__qualname__", repr(fn))
    remedy = "spawned ranks import it by name: use a function at the top level of a module"
    main_file = getattr(sys.modules.get("__main__"), "__file__", None)
    if getattr(fn, "__module__", None) == "__main__" and not os.path.exists(main_file or ""):
        raise LaunchError(
            f"{name} is defined in an interactive session; {remedy} (in a notebook, of a file that %%writefile "
            "writes), or call fsshard.init() for one rank here"
        )
    if "<lambda>" in name or "<locals>" in name:
        raise LaunchError(f"{name} cannot be pickled; {remedy}, and hand over data through args")
