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
import pickle
import sys
import time
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore

from fsshard.comm.stores import LOOPBACK, loopback_store
from fsshard.errors import LaunchError, RankFailed
from fsshard.launching.context import check_count, cuda_devices
from fsshard.launching.pool_worker import ENVIRONMENT, Order, environment_of, folder, worker_main
from fsshard.launching.supervisor import (
    Arguments,
    Job,
    OnMessage,
    Outcome,
    Supervisor,
    check_importable,
    check_not_importing,
    handed,
)

MOST_RANKS = 16
START_SECONDS = 300.0  # for a new process to import torch; a cold disk can take a minute
PATIENCE_SECONDS = 5.0  # after the first failure, for the other ranks to report theirs
STALLED_SECONDS = 60.0  # for a rank that cannot even say where it is
CLOSE_SECONDS = 5.0  # for idle ranks to leave


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
            raise LaunchError(f"device: expected 'cpu' or 'cuda', got {device!r}")
        check_count("most_ranks", most_ranks)
        self.most_ranks = most_ranks or MOST_RANKS
        self.device = device
        self._supervisor = Supervisor()
        self._jobs = itertools.count()
        self._store: TCPStore | None = None

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
        on_message: OnMessage = None,
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
            RankFailed: a rank raised or died: the earliest failure that no other one caused. Its ``cause`` is
                that rank's exception, where it can be pickled; the others are ended.
        """
        # pytest shows the caller's line, and no source of ours, above the message.
        __tracebackhide__ = True
        outcome = self._run(fn, world_size, args, kwargs, timeout, on_message)
        if (error := outcome.error()) is not None:
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
        # An idle worker leaves when its pipe is closed.
        self._supervisor.end(self._supervisor.ranks, CLOSE_SECONDS)
        self._store = None
        atexit.unregister(self.close)

    def _run(
        self,
        fn: Job,
        world_size: int,
        args: Arguments,
        kwargs: dict[str, Any],
        timeout: float,
        on_message: OnMessage,
    ) -> Outcome:
        __tracebackhide__ = True
        self._check_size(world_size)
        outcome = Outcome(world_size, timeout)
        call = _pickled_call(fn, args, kwargs)
        try:
            self._start(world_size)
            found_here = tuple(sys.path), folder(), pickle.dumps(tuple(handed.values()))
            order = Order(next(self._jobs), world_size, call, timeout, *found_here)
            for rank in range(world_size):
                self._supervisor.send(rank, order)
            self._collect(outcome, on_message)
        except BaseException:
            # After Ctrl-C, say, it is unknown who is still busy with what.
            # Those that a later job needs are started anew.
            self._supervisor.end(self._supervisor.ranks)
            raise
        return outcome

    def _check_size(self, world_size: int) -> None:
        __tracebackhide__ = True
        if not 1 <= world_size <= self.most_ranks:
            raise LaunchError(f"world_size: expected 1..{self.most_ranks} (RankPool(most_ranks=...)), got {world_size}")
        if self.device == "cuda" and world_size > cuda_devices():
            raise LaunchError(
                f"world_size={world_size} with device='cuda' needs as many CUDA devices, and this machine shows "
                f"{cuda_devices()}; ask for fewer ranks, or use device='cpu'"
            )

    def _start(self, count: int) -> None:
        __tracebackhide__ = True
        # Some may have died between two jobs.
        self._supervisor.end(self._supervisor.dead())
        missing = [rank for rank in range(count) if rank not in self._supervisor.ranks]
        if not missing:
            return
        check_not_importing("a RankPool was used")
        if self._store is None:
            self._store = loopback_store(LOOPBACK, 0, None, serves=True, timeout=dist.default_pg_timeout)
            # It runs before multiprocessing joins its children, who would wait forever.
            atexit.register(self.close)
        with environment_of(ENVIRONMENT[self.device]):
            for rank in missing:
                self._supervisor.start(rank, worker_main, (rank, self.device, self._store.port))
        # No job's time passes while its ranks still import torch.
        outcome, deadline = Outcome(count), time.monotonic() + START_SECONDS
        if late := self._supervisor.watch(missing, outcome, ("ready",), deadline=deadline):
            raise LaunchError(f"rank {min(late)} did not start within {START_SECONDS:g} s; is the machine overloaded?")
        for rank, failure in outcome.failures.items():
            raise RankFailed(rank, failure.type_name, f"while it started: {failure.message}")

    def _collect(self, outcome: Outcome, on_message: OnMessage) -> None:
        """Wait for one outcome and one "ready" from each rank; end a rank that keeps us waiting."""
        supervisor, began = self._supervisor, time.monotonic()
        busy, deadline, patience = set(range(outcome.world_size)), began + outcome.timeout, PATIENCE_SECONDS
        busy = supervisor.watch(busy, outcome, ("ready",), deadline=deadline, patience=patience, on_message=on_message)
        until = min(deadline, time.monotonic() + STALLED_SECONDS)
        while silent := busy - set(outcome.finished) - set(outcome.failures):
            outcome.stacks = {rank: supervisor.stack(rank) for rank in silent}
            # A process that does not even run its signal handler hangs nowhere: the machine gives it no time.
            if all(outcome.stacks.values()) or time.monotonic() >= until:
                break
            limit = min(until, time.monotonic() + patience)
            busy = supervisor.watch(busy, outcome, ("ready",), deadline=limit, on_message=on_message)
        outcome.stacks = {rank: text for rank, text in outcome.stacks.items() if rank in silent}
        outcome.timeout = min(outcome.timeout, round(time.monotonic() - began, 1))
        supervisor.end([*busy, *supervisor.dead()])


def _pickled_call(fn: Job, args: Arguments, kwargs: dict[str, Any]) -> bytes:
    __tracebackhide__ = True
    check_importable(fn)
    try:
        return pickle.dumps((fn, args, kwargs))
    except Exception as error:
        raise LaunchError(
            f"the job cannot be sent to the ranks: {error}; they need a module-level function and plain data"
        ) from error
