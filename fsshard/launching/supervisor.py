"""Starts ranks as processes of this one, listens to them, notices which has died, and ends them."""

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
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple

from fsshard.errors import LaunchError
from fsshard.launching.outcome import FINISHED, Failure, Outcome

__all__ = ["Supervisor", "check_importable", "check_not_importing", "say"]

POLL_SECONDS = 0.5  # a dead rank's forked children can hold its sentinel open, so exit codes are looked at too
EXIT_SECONDS = 2.0  # from a rank's last message to its exit code
STACK_SECONDS = 2.0  # for a rank that does not answer to write down where it is


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

    def start(self, rank: int, target: Callable[..., None], args: tuple[Any, ...]) -> None:
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
        process = spawn.Process(target=target, args=arguments, name=f"rank {rank}", daemon=False)
        try:
            process.start()  # pickles everything before it starts anything
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
        on_message: Callable[[int, Any], None] | None = None,
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
                    outcome.finished[rank], outcome.results[rank] = kind, value
                elif kind in ("raised", "died"):
                    outcome.fail(value, self._stack(rank))
                    deadline = min(deadline, time.monotonic() + patience)
                if kind == "died" or kind in last:
                    waiting.discard(rank)
        return waiting

    def _readable(self, waiting: set[int], deadline: float) -> list[int]:
        """Wait for ranks that have something to say, or have died; none if nothing happens for a while."""
        watched = [self._ranks[rank] for rank in sorted(waiting)]
        limit = max(0.0, min(POLL_SECONDS, deadline - time.monotonic()))
        connection.wait([*(each.pipe for each in watched), *(each.process.sentinel for each in watched)], limit)
        # Its end is looked at before its pipe: what it sent before it died is there by then.
        ended = self.dead()
        return [rank for rank in sorted(waiting) if rank in ended or self._ranks[rank].pipe.poll()]

    def _message(self, rank: int) -> tuple[str, Any]:
        process, pipe = self._ranks[rank]
        try:
            if pipe.poll():  # a dead rank's forked children may hold the pipe open: reading could wait forever
                kind, data = pickle.loads(pipe.recv_bytes())
                try:
                    return kind, pickle.loads(data)
                except Exception as error:
                    unread = LaunchError(f"what the rank sent cannot be unpickled here: {error}; return plain data")
                    return "raised", Failure.of(rank, unread)
        except (EOFError, OSError):
            process.join(EXIT_SECONDS)
            if process.exitcode is None:  # closed its pipe and stayed
                process.kill()
                process.join()
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
                if text and text == before:
                    break
        return text

    def pid(self, rank: int) -> int:
        """Return the number of a rank's process."""
        return self._ranks[rank].process.pid or 0

    def dead(self) -> list[int]:
        """Return the ranks whose processes have ended by themselves."""
        return [rank for rank, each in self._ranks.items() if each.process.exitcode is not None]

    def end(self, ranks: Iterable[int], patience: float | None = 0.0) -> dict[int, int]:
        """End processes and forget them.

        Their pipes are closed first, at which one that waits for work leaves. After ``patience`` seconds (None: as long
        as it takes) they are killed. Return the exit codes of those that left by themselves.
        """
        ended = {rank: self._ranks.pop(rank) for rank in set(ranks) if rank in self._ranks}
        for each in ended.values():
            each.pipe.close()
        deadline = None if patience is None else time.monotonic() + patience
        codes: dict[int, int] = {}
        for rank, (process, _) in sorted(ended.items()):
            if deadline is None or deadline > time.monotonic():
                process.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
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
    """Raise where this process is a rank that imports the main script, which starts ranks once more."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise LaunchError(
            f'{call} while a spawned rank was importing the main script; put the call under: if __name__ == "__main__":'
        )


def check_importable(fn: Any) -> None:
    """Raise unless a spawned process can import ``fn`` by its name."""
    __tracebackhide__ = True  # pytest shows the caller's line above the message
    if not callable(fn):
        raise LaunchError(f"expected a module-level function, got {fn!r}")
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__qualname__", repr(fn))
    remedy = "spawned ranks import it by name: use a function at the top level of a module"
    main = sys.modules.get("__main__")
    if getattr(fn, "__module__", None) == "__main__" and not os.path.exists(getattr(main, "__file__", None) or ""):
        raise LaunchError(
            f"{name} lives in an interactive session; {remedy} (in a notebook, of one that %%writefile makes), or call "
            "fsshard.init() for one rank here"
        )
    if "<lambda>" in name or "<locals>" in name:
        raise LaunchError(f"{name} cannot be pickled; {remedy}, and hand over data through args")
