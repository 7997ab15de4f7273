"""Starts ranks as processes of this one, listens to them, notices which has died, and ends them."""

from __future__ import annotations

import enum
import functools
import math
import multiprocessing
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterable
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple

from fsshard.errors import LaunchError
from fsshard.launching.outcome import Failure

__all__ = ["Heard", "Supervisor", "check_importable", "check_not_importing"]

POLL_SECONDS = 0.5  # a dead rank's forked children can hold its sentinel open, so exit codes are looked at too
EXIT_SECONDS = 2.0  # from a rank's last message to its exit code


class Heard(enum.Flag):
    """The meaning of a rank's message to who waits for it."""

    NEWS = 0
    LAST = enum.auto()  # nothing more is awaited from this rank
    FAILURE = enum.auto()  # the other ranks have a little time left to report


class _Rank(NamedTuple):
    process: SpawnProcess
    pipe: connection.Connection


class Supervisor:
    """Spawned ranks, as their parent sees them: one process and one pipe each."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self.until: float | None = None  # in the time of time.monotonic; set once the ranks were told to leave

    def __contains__(self, rank: int) -> bool:
        return rank in self._ranks

    @property
    def ranks(self) -> list[int]:
        """Return those that were started and not ended."""
        return list(self._ranks)

    def start(self, rank: int, target: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Spawn a process that calls ``target(*args, pipe)``.

        Raises:
            LaunchError: the arguments cannot be pickled. Nothing was started.
        """
        spawn = multiprocessing.get_context("spawn")
        here, there = spawn.Pipe()
        # Not daemonic: a daemon may not have children, and a DataLoader wants workers.
        process = spawn.Process(target=target, args=(*args, there), name=f"rank {rank}", daemon=False)
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
        """Send a message.

        Raises:
            OSError: the rank has closed its pipe: it has died.
        """
        self._ranks[rank].pipe.send(message)

    def watch(
        self,
        ranks: Iterable[int],
        heard: Callable[[int, bytes | Failure], Heard],
        *,
        deadline: float = math.inf,
        patience: float = math.inf,
    ) -> set[int]:
        """Listen until each rank has said its last, or the deadline, or ``patience`` seconds after the first failure.

        Args:
            ranks: whom to listen to.
            heard: called with a rank and its message, or how it died, which is the last that there is of it.
            deadline: in the time of ``time.monotonic``.
            patience: for the other ranks to say what happened to them.

        Returns:
            The ranks that have not said their last.
        """
        waiting = set(ranks)
        while waiting and time.monotonic() < (self.until or deadline):
            for rank, message in self._messages(waiting, self.until or deadline):
                meaning = heard(rank, message)
                if Heard.FAILURE in meaning:
                    deadline = min(deadline, time.monotonic() + patience)
                if Heard.LAST in meaning or isinstance(message, Failure):
                    waiting.discard(rank)
        return waiting

    def _messages(self, waiting: set[int], deadline: float) -> list[tuple[int, bytes | Failure]]:
        """Return what the ranks say next, one message each; [] if they say nothing for a while."""
        watched = [self._ranks[rank] for rank in sorted(waiting)]
        limit = max(0.0, min(POLL_SECONDS, deadline - time.monotonic()))
        connection.wait([*(each.pipe for each in watched), *(each.process.sentinel for each in watched)], limit)
        found = ((rank, self._message(rank)) for rank in sorted(waiting))
        return [(rank, message) for rank, message in found if message is not None]

    def _message(self, rank: int) -> bytes | Failure | None:
        process, pipe = self._ranks[rank]
        dead = process.exitcode is not None  # before the pipe: what it sent before it died is there by then
        readable = pipe.poll()
        if not readable and not dead:
            return None
        try:
            if readable:  # a dead rank's forked children may hold the pipe open: reading could wait forever
                return pipe.recv_bytes()
        except (EOFError, OSError):
            process.join(EXIT_SECONDS)
            if process.exitcode is None:  # closed its pipe and stayed
                process.kill()
                process.join()
        return Failure.death(rank, process.exitcode)

    def pid(self, rank: int) -> int:
        """Return the number of a rank's process; 0 where it has none."""
        return self._ranks[rank].process.pid or 0

    def join(self, rank: int, seconds: float) -> None:
        """Return when a rank's process has ended, or after so many seconds."""
        self._ranks[rank].process.join(seconds)

    def dead(self) -> list[int]:
        """Return the ranks whose processes have ended by themselves."""
        return [rank for rank, each in self._ranks.items() if each.process.exitcode is not None]

    def end(self, ranks: Iterable[int], patience: float | None = 0.0) -> dict[int, int]:
        """End processes and forget them.

        Args:
            ranks: whom; their pipes are closed first, at which one that waits for work leaves.
            patience: seconds for all of them to leave by themselves, before they are killed; None: as long as it takes.

        Returns:
            The exit codes of those that left by themselves.
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


def check_importable(fn: Callable[..., Any]) -> None:
    """Raise unless a spawned process can import ``fn`` by its name."""
    __tracebackhide__ = True  # pytest shows the caller's line above the message
    target = fn
    while isinstance(target, functools.partial):
        target = target.func
    name = getattr(target, "__qualname__", repr(target))
    remedy = "spawned ranks import it by name: use a function at the top level of a module"
    main = sys.modules.get("__main__")
    if getattr(target, "__module__", None) == "__main__" and not os.path.exists(getattr(main, "__file__", None) or ""):
        raise LaunchError(
            f"{name} lives in an interactive session; {remedy} (in a notebook, of one that %%writefile makes), or call "
            "fsshard.init() for one rank here"
        )
    if "<lambda>" in name or "<locals>" in name:
        raise LaunchError(f"{name} cannot be pickled; {remedy}, and hand over data through args")
