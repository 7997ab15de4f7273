"""A pool of ranks on this machine: spawned once, reused for one job after another.

Importing torch costs a spawned process seconds, so the processes stay. Each job gets a fresh process group of exactly
the world size it asked for, and the environment, seeds and warning filters it would find in a new process::

    with RankPool() as pool:
        losses = pool.run(train, 2, "fsdp2", timeout=60)  # train("fsdp2") on two ranks; results by rank

What runs on the ranks is a function at the top level of a module: they import it by name, from the ``sys.path`` and
the working folder that the caller has.
"""

from __future__ import annotations

import atexit
import itertools
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from fsshard.comm.stores import LOOPBACK, loopback_store
from fsshard.errors import LaunchError, RankFailed
from fsshard.launching.outcome import Failure, Outcome
from fsshard.launching.pool_worker import ENVIRONMENT, Job, Order, environment_of, worker_main
from fsshard.launching.supervisor import Heard, Supervisor, check_importable, check_not_importing

__all__ = ["RankPool"]

MOST_RANKS = 16
START_SECONDS = 300.0  # for a new process to import torch; a cold disk can take a minute
PATIENCE_SECONDS = 5.0  # after the first failure, for the other ranks to report theirs
STALLED_SECONDS = 60.0  # for a rank that cannot even say where it is
CLOSE_SECONDS = 5.0  # for idle ranks to leave
STACK_SECONDS = 2.0  # for a rank that does not answer to write down where it is


class RankPool:
    """Spawned ranks, started when first needed, at most ``most_ranks`` of them.

    Args:
        most_ranks: the largest world size that a job may ask for; 16 by default.
        device: ``"cpu"``: gloo, one thread per rank, and CUDA hidden from the ranks; ``"cuda"``: nccl, one device per
            rank, which is the current device of the job.

    Raises:
        LaunchError: an argument has no meaning.
    """

    def __init__(self, most_ranks: int | None = None, device: str = "cpu") -> None:
        if device not in ENVIRONMENT:
            raise LaunchError(f"device must be 'cpu' or 'cuda', got {device!r}")
        if most_ranks is not None and (not isinstance(most_ranks, int) or most_ranks < 1):
            raise LaunchError(f"most_ranks must be a positive integer or None, got {most_ranks!r}")
        self.most_ranks = most_ranks or MOST_RANKS
        self.device = device
        self._supervisor = Supervisor()
        self._stacks: dict[int, Path] = {}  # where a rank's stack goes when it is asked for it
        self._jobs = itertools.count()
        self._store: TCPStore | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
        self,
        fn: Job,
        world_size: int,
        *args: Any,
        timeout: float = 60,
        on_message: Callable[[int, Any], None] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank and return the results by rank; tensors come back on the CPU.

        Args:
            fn: a module-level function.
            world_size: how many ranks.
            timeout: seconds for the job, after which ranks that have not answered are ended. A collective gives up
                after half of it.
            on_message: called with ``(rank, value)`` for each :func:`tell` of a rank.

        Raises:
            LaunchError: the job cannot be sent, or the pool does not have that many ranks. Nothing was run.
            RankHung: no rank raised anything of its own, but one waited too long; it names the collective.
            RankFailed: a rank raised or died: the earliest failure that no other one caused. Its ``__cause__`` is
                that rank's exception, where it can be pickled; the others are ended.
        """
        __tracebackhide__ = True  # pytest shows the caller's line, and no source of ours, above the message
        outcome = self._run(fn, world_size, args, kwargs, timeout, on_message)
        error = outcome.error()
        if error is not None:
            raise error
        return [outcome.results[rank] for rank in range(world_size)]

    def run_expecting_errors(
        self, fn: Job, world_size: int, *args: Any, timeout: float = 60, **kwargs: Any
    ) -> list[BaseException | None]:
        """Run a job as :meth:`run` does, but return what each rank raised: None where it raised nothing.

        A rank that died, did not answer, or raised what cannot be pickled is represented by a RankFailed.
        """
        __tracebackhide__ = True
        outcome = self._run(fn, world_size, args, kwargs, timeout, None)
        return [outcome.cause(rank) or outcome.error_of(rank) for rank in range(world_size)]

    def close(self) -> None:
        """End all workers. A later job starts new ones."""
        self._supervisor.end(self._supervisor.ranks, CLOSE_SECONDS)  # an idle worker leaves when its pipe is closed
        self._store = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
        atexit.unregister(self.close)

    def _run(
        self,
        fn: Job,
        world_size: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
        on_message: Callable[[int, Any], None] | None,
    ) -> Outcome:
        __tracebackhide__ = True
        self._check_size(world_size)
        outcome = Outcome(world_size, timeout)
        call = _pickled_call(fn, args, kwargs)
        try:
            self._start(world_size)
            number = next(self._jobs)
            order = Order.here(number, world_size, call, timeout)
            for rank in range(world_size):
                with suppress(BrokenPipeError, ConnectionResetError):  # died just now: found out below
                    self._supervisor.send(rank, order)
            self._collect(number, outcome, on_message)
        except BaseException:  # Ctrl-C, say: who is still busy with what is unknown now
            self._supervisor.end(self._supervisor.ranks)  # those that a later job needs are started anew
            raise
        return outcome

    def _check_size(self, world_size: int) -> None:
        __tracebackhide__ = True
        if not 1 <= world_size <= self.most_ranks:
            raise LaunchError(
                f"world_size must lie in 1..{self.most_ranks}, got {world_size}; "
                "RankPool(most_ranks=...) sets the limit"
            )
        if self.device == "cuda":
            devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
            if world_size > devices:
                raise LaunchError(
                    f"world_size={world_size} with device='cuda' needs as many CUDA devices, and this machine shows "
                    f"{devices}; ask for fewer ranks, or use device='cpu'"
                )

    def _start(self, count: int) -> None:
        __tracebackhide__ = True
        self._supervisor.end(self._supervisor.dead())  # between two jobs
        missing = [rank for rank in range(count) if rank not in self._supervisor]
        if not missing:
            return
        check_not_importing("a RankPool was used")
        if self._store is None:
            self._store = loopback_store(LOOPBACK, 0, None, serves=True, timeout=dist.default_pg_timeout)
            self._folder = tempfile.TemporaryDirectory(prefix="fsshard-ranks-")
            atexit.register(self.close)  # runs before multiprocessing joins its children, who would wait forever
        with environment_of(ENVIRONMENT[self.device]):
            for rank in missing:
                self._spawn(rank)
        self._await_started(missing)

    def _spawn(self, rank: int) -> None:
        assert self._folder is not None
        assert self._store is not None
        self._stacks[rank] = Path(self._folder.name, f"rank{rank}")
        self._supervisor.start(rank, worker_main, (rank, self.device, self._store.port, self._stacks[rank]))

    def _await_started(self, ranks: list[int]) -> None:
        """Let no job's time pass while its ranks still import torch."""
        __tracebackhide__ = True
        deadline = time.monotonic() + START_SECONDS
        for rank in ranks:
            if self._supervisor.watch([rank], _started, deadline=deadline):
                raise LaunchError(f"rank {rank} did not start within {START_SECONDS:g} s; is the machine overloaded?")

    def _collect(self, number: int, outcome: Outcome, on_message: Callable[[int, Any], None] | None) -> None:
        """Wait for one outcome and one "ready" from each rank; end a rank that keeps us waiting."""

        def heard(rank: int, message: bytes | Failure) -> Heard:
            kind, value = _unpacked(rank, message)
            if kind == "told" and on_message is not None and value[0] == number:
                on_message(rank, value[1])
            elif kind == "returned":
                outcome.results[rank], outcome.finished[rank] = value, "return"
            elif kind in ("raised", "died"):
                outcome.fail(value, self._stacks[rank])
                return Heard.FAILURE
            return Heard.LAST if kind == "ready" else Heard.NEWS

        began = time.monotonic()
        deadline = began + outcome.timeout
        everyone = range(outcome.world_size)
        busy = self._supervisor.watch(everyone, heard, deadline=deadline, patience=PATIENCE_SECONDS)
        until = min(deadline, time.monotonic() + STALLED_SECONDS)
        while silent := busy - set(outcome.results) - set(outcome.failures):
            outcome.stacks = {rank: self._stack(rank) for rank in silent}
            # A process that does not even run its signal handler hangs nowhere: the machine gives it no time.
            if all(outcome.stacks.values()) or time.monotonic() >= until:
                break
            busy = self._supervisor.watch(busy, heard, deadline=min(until, time.monotonic() + PATIENCE_SECONDS))
        outcome.stacks = {rank: text for rank, text in outcome.stacks.items() if rank in silent}
        outcome.timeout = min(outcome.timeout, round(time.monotonic() - began, 1))
        self._supervisor.end([*busy, *self._supervisor.dead()])

    def _stack(self, rank: int) -> str:
        """Return the stack that a rank which does not answer is stuck in."""
        text = ""
        with suppress(ProcessLookupError, FileNotFoundError):
            os.kill(self._supervisor.pid(rank), signal.SIGUSR1)
            deadline = time.monotonic() + STACK_SECONDS
            while time.monotonic() < deadline:
                before = text
                self._supervisor.join(rank, 0.05)
                text = self._stacks[rank].read_text()
                if text and text == before:
                    break
        return text


def _started(rank: int, message: bytes | Failure) -> Heard:
    kind, value = _unpacked(rank, message)
    if kind == "died":
        raise RankFailed(rank, value.type_name, f"while it started: {value.message}")
    return Heard.LAST


def _unpacked(rank: int, message: bytes | Failure) -> tuple[str, Any]:
    """Return kind and value of a worker's message; ``"died"`` if there will be none."""
    if isinstance(message, Failure):
        return "died", message
    kind, data = pickle.loads(message)
    try:
        return kind, pickle.loads(data)
    except Exception as error:
        return "raised", Failure.of(rank, LaunchError(f"what the rank sent cannot be unpickled here: {error}"))


def _pickled_call(fn: Job, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    __tracebackhide__ = True
    if not callable(fn):
        raise LaunchError(f"a job must be a module-level function, got {fn!r}")
    check_importable(fn)
    try:
        return pickle.dumps((fn, args, kwargs))
    except Exception as error:
        raise LaunchError(
            f"the job cannot be sent to the ranks: {error}; they need a module-level function and plain data"
        ) from error
