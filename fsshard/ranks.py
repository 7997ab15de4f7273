"""A pool of ranks on this machine: spawned once, lent to one job after another.

Importing torch costs a spawned process seconds, so the processes stay. Each job gets a fresh process group of exactly
the world size it asked for, and the environment, seeds and warning filters it would find in a new process::

    with RankPool() as pool:
        losses = pool.run(train, 2, "fsdp2", timeout=60)  # train("fsdp2") on two ranks; results by rank

What runs on the ranks is a function at the top level of a module: they import it by name, from the ``sys.path`` and
the working folder that the caller has.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import itertools
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # torch.distributed's, where typed
from torch.distributed.distributed_c10d import _set_pg_timeout

from fsshard.comm.stores import LOOPBACK, loopback_store
from fsshard.errors import LaunchError, RankFailed, RankHung

# By name: `fsshard.launch` the function hides `fsshard.launch` the module.
from fsshard.launch import (
    _check_picklable,
    _death,
    _die_with_parent,
    _end,
    _exported,
    _Failure,
    _first_failure,
    _groups,
    _unpack_error,
    finish_before_leaving,
    say_leaving,
)
from fsshard.stacks import REDUCER, Place, place_in_dump, place_in_traceback, timed_out

__all__ = ["RankPool", "tell"]

MOST_RANKS = 16
START_SECONDS = 300.0  # for a new process to import torch; a cold disk can take a minute
PATIENCE_SECONDS = 5.0  # after the first failure, for the other ranks to report theirs
STACK_SECONDS = 2.0  # for a rank that does not answer to write down where it is
COLLECTIVE_SHARE = 0.5  # of a job's time, until a collective gives up: an exception tells more than a killed rank
ENVIRONMENT: dict[str, dict[str, str]] = {
    "cpu": {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    "cuda": {},
}

Job = Callable[..., Any]


def tell(value: Any) -> None:
    """Send a small picklable value from a job to the parent, whose ``on_message`` gets it while it waits.

    Outside a job of a :class:`RankPool` it does nothing, so that a function which tells its progress runs anywhere.
    """
    if _line is not None and _line.owner == os.getpid():  # not a DataLoader worker that a rank forked
        _line.send("told", pickle.dumps((_line.job, value)))


class _Surroundings(NamedTuple):
    """Where a job's modules and files are found."""

    path: tuple[str, ...]
    folder: str | None

    @classmethod
    def here(cls) -> _Surroundings:
        folder = None
        with suppress(OSError):  # the folder was deleted
            folder = os.getcwd()
        return cls(tuple(sys.path), folder)


@dataclass
class _Worker:
    process: SpawnProcess
    pipe: connection.Connection
    stacks: Path  # where its stack goes when it is asked for it
    surroundings: _Surroundings | None = None  # what it was told last


class _Order(NamedTuple):
    """What a worker is sent."""

    number: int
    world_size: int
    call: bytes
    timeout: float
    surroundings: _Surroundings | None  # None: as before


@dataclass
class _Outcome:
    """What became of a job, rank by rank."""

    world_size: int
    timeout: float
    results: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, _Failure] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)  # of those that did not answer

    def error(self) -> RankFailed | None:
        """The first real failure; else the rank that waited in vain; else the first echo of what nobody reported."""
        late = [f for f in self.failures.values() if f.consequence and timed_out(f.traceback)]
        real = [f for f in self.failures.values() if not f.consequence]
        if not real and (late or self.stacks):
            return self._hang(late)
        if not self.failures:
            return None
        failure = _first_failure(self.failures.values())
        others = self._others(failure.rank)
        return RankFailed(failure.rank, failure.type_name, failure.message, failure.traceback, others)

    def error_of(self, rank: int) -> RankFailed | None:
        """The failure of one rank, whatever happened on the others."""
        failures = {rank: self.failures[rank]} if rank in self.failures else {}
        stacks = {rank: self.stacks[rank]} if rank in self.stacks else {}
        return _Outcome(self.world_size, self.timeout, {}, failures, stacks).error()

    def cause(self, rank: int) -> BaseException | None:
        """The exception that the rank raised, where it can be pickled."""
        return _unpack_error(self.failures[rank].pickled) if rank in self.failures else None

    def _hang(self, late: list[_Failure]) -> RankHung:
        found = [(place_in_traceback(f.traceback), f.rank) for f in sorted(late, key=lambda f: f.time)]
        found += [(place_in_dump(text), rank) for rank, text in sorted(self.stacks.items())]
        place, rank = next((entry for entry in found if entry[0].collective), found[0])
        if rank in self.failures:
            message, trace = f"{place.told('waited')}, and gave up", self.failures[rank].traceback
        else:
            computing = ", unless it is still computing" if place.collective == REDUCER else ""
            message = f"{place.told()} (no answer within {self.timeout:g} s{computing})"
            trace = self.stacks[rank]
        return RankHung(rank, place.collective, message + self._missing(rank, place), trace, self._others(rank))

    def _missing(self, waiting: int, place: Place) -> str:
        """Who never came to the collective that a rank waits in, and where the first of them is."""
        absent = []
        for rank in range(self.world_size) if place.collective else ():
            found = self._place(rank)
            if rank != waiting and self._told(rank) and (found is None or found.collective != place.collective):
                absent.append((found is not None and bool(found.collective), rank))
        if not absent:
            return ""
        # One that is in no collective at all tells more than one that waits in another.
        first, *others = [rank for _, rank in sorted(absent)]
        more = f" (nor did rank {', '.join(map(str, others))})" if others else ""
        told = self._told(first)
        return f"; rank {first} never came{more}: it {told}"

    def _place(self, rank: int) -> Place | None:
        """Where a rank waits or waited, as far as its stack tells; None if it does not."""
        if rank in self.stacks:
            return place_in_dump(self.stacks[rank])
        failure = self.failures.get(rank)
        return place_in_traceback(failure.traceback) if failure is not None and _is_echo(failure) else None

    def _others(self, rank: int) -> dict[int, str]:
        return {other: self._told(other) for other in range(self.world_size) if other != rank and self._told(other)}

    def _told(self, rank: int) -> str:
        """What became of a rank, in one line."""
        if rank in self.stacks:
            return _told_place(place_in_dump(self.stacks[rank]))
        if rank in self.failures:
            failure, place = self.failures[rank], self._place(rank)
            if place is not None:
                return _told_echo(failure, place)
            first = failure.message.strip().partition("\n")[0]
            return f"raised {failure.type_name}: {first}" if failure.traceback else f"died: {failure.type_name}"
        return "had finished" if rank in self.results else ""


def _told_place(place: Place) -> str:
    return place.told("waited") if place != Place() else "did not answer"


def _is_echo(failure: _Failure) -> bool:
    """Whether a rank raised nothing but what a collective raises when another rank is gone or late."""
    return failure.consequence and ("gloo" in failure.traceback or timed_out(failure.traceback))


def _told_echo(failure: _Failure, place: Place) -> str:
    where = place.told("waited") if place.collective or place.line else ""
    if timed_out(failure.traceback):
        return f"{where or 'waited'}, and gave up"
    return f"lost its neighbour{' while it ' if where else ''}{where}"


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
        self._workers: dict[int, _Worker] = {}
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
            raise error from outcome.cause(error.rank)
        return [outcome.results[rank] for rank in range(world_size)]

    def run_expecting_errors(
        self, fn: Job, world_size: int, *args: Any, timeout: float = 60, **kwargs: Any
    ) -> list[BaseException | None]:
        """As :meth:`run`, but return what each rank raised: None where it raised nothing.

        A rank that died, did not answer, or raised what cannot be pickled is represented by a RankFailed.
        """
        __tracebackhide__ = True
        outcome = self._run(fn, world_size, args, kwargs, timeout, None)
        return [outcome.cause(rank) or outcome.error_of(rank) for rank in range(world_size)]

    def close(self) -> None:
        """End all workers. A later job starts new ones."""
        for worker in self._workers.values():
            worker.pipe.close()  # an idle worker leaves on end of file
        deadline = time.monotonic() + 5
        for worker in self._workers.values():
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.exitcode is None:
                worker.process.kill()
                worker.process.join()
        self._workers, self._store = {}, None
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
    ) -> _Outcome:
        __tracebackhide__ = True
        self._check_size(world_size)
        outcome = _Outcome(world_size, timeout)
        call = _pickled_call(fn, args, kwargs)
        try:
            self._start(world_size)
            number = next(self._jobs)
            here = _Surroundings.here()
            for worker in (self._workers[rank] for rank in range(world_size)):
                news, worker.surroundings = (None if worker.surroundings == here else here), here
                with suppress(BrokenPipeError, ConnectionResetError):  # died just now: found out below
                    worker.pipe.send(_Order(number, world_size, call, timeout, news))
            self._collect(number, outcome, on_message)
        except BaseException:  # Ctrl-C, say: who is still busy with what is unknown now
            self._discard(list(self._workers))
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
        self._discard(self._dead())  # between two jobs
        missing = [rank for rank in range(count) if rank not in self._workers]
        if not missing:
            return
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise LaunchError(
                "a RankPool was used while a spawned rank was importing the main script; "
                'put the call under: if __name__ == "__main__":'
            )
        if self._store is None:
            self._store = loopback_store(LOOPBACK, 0, None, serves=True, timeout=dist.default_pg_timeout)
            self._folder = tempfile.TemporaryDirectory(prefix="fsshard-ranks-")
            atexit.register(self.close)  # runs before multiprocessing joins its children, who would wait for ever
        with _environment(ENVIRONMENT[self.device]):
            for rank in missing:
                self._spawn(rank)
        self._await_started(missing)

    def _spawn(self, rank: int) -> None:
        assert self._folder is not None
        assert self._store is not None
        stacks = Path(self._folder.name, f"rank{rank}")
        spawn = multiprocessing.get_context("spawn")
        here, there = spawn.Pipe()
        with _interrupts_ignored() as ignored:
            # Not daemonic: a job may want a DataLoader with workers.
            process = spawn.Process(
                target=_worker,
                args=(rank, self.device, self._store.port, there, stacks, ignored),
                name=f"rank {rank}",
                daemon=False,
            )
            process.start()
        there.close()
        self._workers[rank] = _Worker(process, here, stacks)

    def _await_started(self, ranks: list[int]) -> None:
        """Let no job's time pass while its ranks still import torch."""
        __tracebackhide__ = True
        deadline = time.monotonic() + START_SECONDS
        for rank in ranks:
            if not self._workers[rank].pipe.poll(max(0.0, deadline - time.monotonic())):
                raise LaunchError(f"rank {rank} did not start within {START_SECONDS:g} s; is the machine overloaded?")
            kind, value = self._receive(rank)
            if kind == "died":
                raise RankFailed(rank, value.type_name, f"while it started: {value.message}{_start_hint(value)}")

    def _collect(self, number: int, outcome: _Outcome, on_message: Callable[[int, Any], None] | None) -> None:
        """Wait for one outcome and one "ready" from each rank; end a rank that keeps us waiting."""
        busy, deadline = set(range(outcome.world_size)), time.monotonic() + outcome.timeout
        while busy and time.monotonic() < deadline:
            waited_for = {self._workers[rank].pipe: rank for rank in busy}
            for pipe in connection.wait(list(waited_for), max(0.0, deadline - time.monotonic())):
                rank = waited_for[pipe]  # type: ignore[index]
                kind, value = self._receive(rank)
                if kind == "told" and on_message is not None and value[0] == number:
                    on_message(rank, value[1])
                elif kind == "returned":
                    outcome.results[rank] = value
                elif kind in ("raised", "died"):
                    outcome.failures.setdefault(rank, value)
                    deadline = min(deadline, time.monotonic() + PATIENCE_SECONDS)
                if kind in ("ready", "died"):
                    busy.discard(rank)
        for rank in busy - set(outcome.results) - set(outcome.failures):
            outcome.stacks[rank] = self._stack(rank)
        self._discard([*busy, *self._dead()])

    def _receive(self, rank: int) -> tuple[str, Any]:
        """Kind and value of a worker's next message; ``"died"`` if there will be none."""
        worker = self._workers[rank]
        try:
            kind, data = pickle.loads(worker.pipe.recv_bytes())
        except (EOFError, OSError):
            worker.process.join(PATIENCE_SECONDS)
            if worker.process.exitcode is None:  # closed its pipe and stayed
                worker.process.kill()
                worker.process.join()
            return "died", _death(rank, worker.process.exitcode)
        try:
            return kind, pickle.loads(data)
        except Exception as error:
            return "raised", _Failure.of(rank, LaunchError(f"what the rank sent cannot be unpickled here: {error}"))

    def _stack(self, rank: int) -> str:
        """The stack that a rank which does not answer is stuck in."""
        worker, text = self._workers[rank], ""
        with suppress(ProcessLookupError, FileNotFoundError):
            os.kill(worker.process.pid or 0, signal.SIGUSR1)
            deadline = time.monotonic() + STACK_SECONDS
            while time.monotonic() < deadline:
                before = text
                worker.process.join(0.05)
                text = worker.stacks.read_text()
                if text and text == before:
                    break
        return text

    def _dead(self) -> list[int]:
        return [rank for rank, worker in self._workers.items() if worker.process.exitcode is not None]

    def _discard(self, ranks: list[int]) -> None:
        """End workers at once; those that a later job needs are started anew."""
        ended = [self._workers.pop(rank) for rank in set(ranks)]
        for worker in ended:
            worker.process.kill()
        for worker in ended:
            worker.process.join()
            worker.pipe.close()


def _start_hint(failure: _Failure) -> str:
    """Where a rank left by itself, the usual reason: it imports the main script, which starts ranks once more."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is None or not failure.type_name.startswith("exit code"):
        return ""
    return (
        f'. Ranks import the main script, {script}: whatever it does must be under: if __name__ == "__main__":, or '
        "each rank would start ranks of its own"
    )


@contextmanager
def _interrupts_ignored() -> Iterator[bool]:
    """Let what is started meanwhile ignore Ctrl-C; yields whether that is our doing, and for the worker to end.

    Ctrl-C reaches the whole foreground, and a process that imports would print a traceback: its parent ends it.
    """
    before = signal.getsignal(signal.SIGINT)
    mine = threading.current_thread() is threading.main_thread() and before not in (None, signal.SIG_IGN)
    if not mine:
        yield False
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield True
    finally:
        signal.signal(signal.SIGINT, before)


def _pickled_call(fn: Job, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    __tracebackhide__ = True
    if not callable(fn):
        raise LaunchError(f"a job must be a module-level function, got {fn!r}")
    _check_picklable(fn)
    try:
        return pickle.dumps((fn, args, kwargs))
    except Exception as error:
        raise LaunchError(
            f"the job cannot be sent to the ranks: {error}; they need a module-level function and plain data"
        ) from error


# ------------------------------------------------------------------------------------------------------ in the workers


# References to the groups of the last jobs: see fsshard.launch about the deadlock that they prevent. More would pile
# up threads, three for each group; by the time two more jobs are done a group's threads are idle.
_kept: deque[list[dist.ProcessGroup]] = deque(maxlen=2)


NOTHING = pickle.dumps(None)


class _Line:
    """A worker's line to the parent."""

    def __init__(self, pipe: connection.Connection) -> None:
        self.owner = os.getpid()
        self._pipe, self._lock = pipe, threading.Lock()  # a job may tell things from several threads
        self.job = -1

    def send(self, kind: str, data: bytes = NOTHING) -> None:
        """Send a message; ``data`` is its pickled value."""
        with self._lock:
            self._pipe.send_bytes(pickle.dumps((kind, data)))


_line: _Line | None = None


def _worker(
    rank: int, device: str, port: int, pipe: connection.Connection, stacks: Path, interruptible: bool = False
) -> None:
    global _line
    _die_with_parent()
    atexit.register(_end, 0)
    os.environ.update(ENVIRONMENT[device])
    store = TCPStore("127.0.0.1", port, is_master=False)
    _line = line = _Line(pipe)
    _warm_up()
    surroundings = _Surroundings.here()
    with stacks.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        line.send("ready")
        modules = 0
        while True:
            if len(sys.modules) > modules:
                modules = len(sys.modules)
                gc.freeze()  # what imports made stays anyway; looking through it takes longer than most jobs
            try:
                if interruptible:  # it was not, while it started
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                order: _Order = pipe.recv()
            except (EOFError, KeyboardInterrupt):  # Ctrl-C reaches the whole foreground; no traceback from each rank
                return
            line.job = order.number
            surroundings = order.surroundings or surroundings
            with _environment(_rank_variables(rank, order.world_size, port)), _fresh_torch():
                line.send(*_outcome(rank, device, PrefixStore(f"job{order.number}", store), order, surroundings))
                _leave()
            line.send("ready")


def _warm_up() -> None:
    """Import what every training does, seconds of it, before any job's time runs."""
    with _fresh_torch():
        importlib.import_module("torch._dynamo")  # by DDP, FSDP and each optimizer
        importlib.import_module("torch.distributed.fsdp")


def _outcome(rank: int, device: str, store: Store, order: _Order, surroundings: _Surroundings) -> tuple[str, bytes]:
    try:
        _move_to(surroundings)
        _join(rank, device, store, order)
        fn, args, kwargs = _loaded(order.call)
        result = pickle.dumps(_plain(fn(*args, **kwargs)))
        _kept.append(list(dist.distributed_c10d._world.pg_map))
        return "returned", result
    except BaseException as error:
        failure = pickle.dumps(_Failure.of(rank, error))
        say_leaving(error)
        # Here the group must go at once: while it lives its sockets stay open, and the other ranks, waiting in a
        # collective, would learn of this failure by their timeout only. Should freeing it lock up, the pool goes.
        traceback.clear_frames(error.__traceback__)
        return "raised", failure


def _move_to(surroundings: _Surroundings) -> None:
    """Import and read from where the caller does, whatever the job before has changed."""
    if sys.path != list(surroundings.path):
        sys.path[:] = surroundings.path
        importlib.invalidate_caches()
    if surroundings.folder is not None and _Surroundings.here().folder != surroundings.folder:
        os.chdir(surroundings.folder)


def _join(rank: int, device: str, store: Store, order: _Order) -> None:
    place = torch.device("cuda", rank) if device == "cuda" else None
    if place is not None:
        torch.cuda.set_device(place)
    dist.init_process_group(
        "gloo" if place is None else "nccl",
        store=store,
        rank=rank,
        world_size=order.world_size,
        timeout=timedelta(seconds=order.timeout),  # also for ranks that come late, which is no hang
        device_id=place,
    )
    _set_pg_timeout(timedelta(seconds=order.timeout * COLLECTIVE_SHARE))


def _loaded(call: bytes) -> tuple[Job, tuple[Any, ...], dict[str, Any]]:
    try:
        return pickle.loads(call)  # type: ignore[no-any-return]
    except (ImportError, AttributeError) as error:
        raise LaunchError(
            f"the rank cannot import the job: {error}; its module must be importable by name from the caller's "
            f"sys.path or working folder ({os.getcwd()})"
        ) from error


def _leave() -> None:
    with suppress(Exception):  # whoever waits for it has been told
        finish_before_leaving()
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
