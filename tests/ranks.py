"""A pool of ranks for tests: spawned once per session, lent to one test after another.

Importing torch costs a spawned process seconds, so the processes stay. Each job gets a fresh gloo process group of
exactly the world size it asked for, and the environment, seeds and warning filters it would find in a new process.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import itertools
import math
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# By name: `fsshard.launch` the function hides `fsshard.launch` the module.
from fsshard.launch import _death, _die_with_parent, _end, _exported, _Failure, _groups, _unpack_error

ROOT = Path(__file__).resolve().parent.parent
MOST_RANKS = 4
GROUP_TIMEOUT = timedelta(seconds=30)
PATIENCE_SECONDS = 10.0  # after the first failure, for the other ranks to report theirs
WORKER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}

Job = Callable[..., Any]


class RankError(Exception):
    """One or more ranks failed.

    Attributes:
        errors: rank -> (type name, message, traceback), the earliest real failure first.
        exceptions: rank -> the exception itself, or None where it cannot be pickled or the process died.
    """

    def __init__(self, failures: list[_Failure]) -> None:
        ordered = sorted(failures, key=lambda failure: (failure.consequence, failure.time))
        self.errors = {f.rank: (f.type_name, f.message, f.traceback) for f in ordered}
        self.exceptions = {f.rank: _unpack_error(f.pickled) for f in ordered}
        parts = [f"rank {rank}: {name}: {text}\n{trace}" for rank, (name, text, trace) in self.errors.items()]
        super().__init__("\n".join(parts))


@dataclass
class _Worker:
    process: SpawnProcess
    pipe: connection.Connection
    stacks: Path  # where its stack goes when it is asked for it


class RankPool:
    """Up to four spawned ranks, started when first needed."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._jobs = itertools.count()
        self._store: Any = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        atexit.register(self.close)  # runs before multiprocessing joins its children, who would wait for ever

    def run(self, fn: Job, world_size: int, *args: Any, timeout: float = 60, **kwargs: Any) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank and return the results by rank; tensors come back on the CPU.

        Args:
            fn: a module-level function.
            world_size: how many ranks, at most four.
            timeout: seconds after which ranks that have not answered are killed.

        Raises:
            RankError: a rank raised, died or did not answer.
        """
        results, failures = self._run(fn, world_size, args, kwargs, timeout)
        if failures:
            error = RankError(failures)
            raise error from next((one for one in error.exceptions.values() if one is not None), None)
        return [results[rank] for rank in range(world_size)]

    def run_expecting_errors(
        self, fn: Job, world_size: int, *args: Any, timeout: float = 60, **kwargs: Any
    ) -> list[BaseException | None]:
        """As :meth:`run`, but return what each rank raised: None where it raised nothing.

        A rank that died, did not answer, or raised what cannot be pickled is represented by a RankError.
        """
        _, failures = self._run(fn, world_size, args, kwargs, timeout)
        raised: list[BaseException | None] = [None] * world_size
        for failure in failures:
            raised[failure.rank] = _unpack_error(failure.pickled) or RankError([failure])
        return raised

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.pipe.close()  # an idle worker leaves on end of file
        deadline = time.monotonic() + 5
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.exitcode is None:
                worker.process.kill()
                worker.process.join()
        self._workers, self._store = [], None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _run(
        self, fn: Job, world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float
    ) -> tuple[dict[int, Any], list[_Failure]]:
        if not 1 <= world_size <= MOST_RANKS:
            raise ValueError(f"world_size must lie in 1..{MOST_RANKS}, got {world_size}")
        call = pickle.dumps((fn, args, kwargs))
        self._start(world_size)
        number = next(self._jobs)
        try:
            for worker in self._workers[:world_size]:
                worker.pipe.send((number, world_size, call))
            return self._collect(world_size, timeout)
        except BaseException:  # Ctrl-C, say: who is still busy with what is unknown now
            self._kill()
            raise

    def _start(self, count: int) -> None:
        if any(worker.process.exitcode is not None for worker in self._workers):
            self._kill()  # died between two jobs
        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self._folder = tempfile.TemporaryDirectory(prefix="fsshard-ranks-")
        assert self._folder is not None
        with _environment(WORKER_ENVIRONMENT):
            for rank in range(len(self._workers), count):
                stacks = Path(self._folder.name, f"rank{rank}")
                spawn = multiprocessing.get_context("spawn")
                here, there = spawn.Pipe()
                # Not daemonic: a test may want a DataLoader with workers.
                process = spawn.Process(target=_worker, args=(rank, self._store.port, there, stacks), daemon=False)
                process.start()
                there.close()
                self._workers.append(_Worker(process, here, stacks))

    def _collect(self, world_size: int, timeout: float) -> tuple[dict[int, Any], list[_Failure]]:
        """Wait for one outcome and one "ready" from each rank; replace the pool if a rank keeps us waiting."""
        results: dict[int, Any] = {}
        failures: dict[int, _Failure] = {}
        busy, deadline = set(range(world_size)), time.monotonic() + timeout
        while busy and time.monotonic() < deadline:
            waited_for = [self._workers[rank].pipe for rank in busy]
            for pipe in connection.wait(waited_for, max(0.0, deadline - time.monotonic())):
                rank = next(rank for rank in busy if self._workers[rank].pipe is pipe)
                outcome = self._receive(rank)
                if outcome == "ready":
                    busy.discard(rank)
                elif isinstance(outcome, _Failure):
                    failures.setdefault(rank, outcome)
                    deadline = min(deadline, time.monotonic() + PATIENCE_SECONDS)
                    if self._workers[rank].process.exitcode is not None:
                        busy.discard(rank)
                else:
                    results[rank] = outcome[0]
        for rank in busy - set(results) - set(failures):
            failures[rank] = self._stuck(rank)
        if busy or any(worker.process.exitcode is not None for worker in self._workers):
            self._kill()
        return results, list(failures.values())

    def _receive(self, rank: int) -> Any:
        worker = self._workers[rank]
        try:
            return pickle.loads(worker.pipe.recv_bytes())
        except (EOFError, OSError):
            worker.process.join(PATIENCE_SECONDS)
            if worker.process.exitcode is None:  # closed its pipe and stayed
                worker.process.kill()
                worker.process.join()
            return _death(rank, worker.process.exitcode)

    def _stuck(self, rank: int) -> _Failure:
        """The failure of a rank that does not answer, with the stack it is stuck in."""
        worker, text = self._workers[rank], ""
        with suppress(ProcessLookupError, FileNotFoundError):
            os.kill(worker.process.pid or 0, signal.SIGUSR1)
            deadline = time.monotonic() + 2
            while time.monotonic() < deadline and "most recent call first" not in text:
                worker.process.join(0.05)
                text = worker.stacks.read_text()
        return _Failure(rank, math.inf, "TimeoutError", "the rank did not answer in time; its stack:", text)

    def _kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        self.close()


# ------------------------------------------------------------------------------------------------------ in the workers


# References to the groups of the last jobs: see fsshard.launch about the deadlock that they prevent. More would pile
# up threads, three for each group; by the time two more jobs are done a group's threads are idle.
_kept: deque[list[dist.ProcessGroup]] = deque(maxlen=2)


def _worker(rank: int, port: int, pipe: connection.Connection, stacks: Path) -> None:
    _die_with_parent()
    atexit.register(_end, 0)
    os.environ.update(WORKER_ENVIRONMENT)
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    with stacks.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        modules = 0
        while True:
            if len(sys.modules) > modules:
                modules = len(sys.modules)
                gc.freeze()  # what imports made stays anyway; looking through it takes longer than most jobs
            try:
                number, world_size, call = pipe.recv()
            except EOFError:
                return
            job_store = dist.PrefixStore(f"job{number}", store)
            with _environment(_rank_variables(rank, world_size, port)), _fresh_torch():
                pipe.send_bytes(_outcome(rank, world_size, job_store, call))
                _leave()
            pipe.send_bytes(pickle.dumps("ready"))


def _outcome(rank: int, world_size: int, store: Any, call: bytes) -> bytes:
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT)
        fn, args, kwargs = pickle.loads(call)
        outcome = pickle.dumps((_plain(fn(*args, **kwargs)),))
        _kept.append(list(dist.distributed_c10d._world.pg_map))
        return outcome
    except BaseException as error:
        failure = pickle.dumps(_Failure.of(rank, error))
        # Here the group must go at once: while it lives its sockets stay open, and the other ranks, waiting in a
        # collective, would learn of this failure by their timeout only. Should freeing it lock up, the pool goes.
        traceback.clear_frames(error.__traceback__)
        return failure


def _leave() -> None:
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    _groups.clear()


def _plain(value: Any) -> Any:
    """The value with every tensor as a CPU copy of its own; plain pickle then sends bytes, no shared memory."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return type(value)((key, _plain(item)) for key, item in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_plain, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    return value


def _rank_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _fresh_torch() -> Iterator[None]:
    """Global state as a new process has it."""
    random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    _exported.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        yield
