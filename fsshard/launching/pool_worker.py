"""A rank of the pool, on its own side: it waits for jobs, and runs each as if in a new process."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import os
import pickle
import random
import signal
import sys
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from fsshard.errors import LaunchError
from fsshard.launching.environment import exported
from fsshard.launching.failures import Failure
from fsshard.launching.handing_on import Handed, handed_on, take_over
from fsshard.launching.leaving import die_with_parent, end_process, finish_before_leaving, groups, say_leaving
from fsshard.torch_private.c10d import all_groups, forget_meshes, set_timeout
from fsshard.torch_private.compiling import import_dynamo

__all__ = ["ENVIRONMENT", "Job", "Order", "Surroundings", "environment_of", "tell", "worker_main"]

COLLECTIVE_SHARE = 0.5  # of a job's time, until a collective gives up: an exception tells more than a killed rank
ENVIRONMENT: dict[str, dict[str, str]] = {
    "cpu": {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    "cuda": {},
}

Job = Callable[..., Any]

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


def tell(value: Any) -> None:
    """Send a small picklable value from a job to the parent, whose ``on_message`` gets it while it waits.

    Outside a job of a :class:`RankPool` it does nothing, so that a function which tells its progress runs anywhere.
    """
    if _line is not None and _line.owner == os.getpid():  # not a DataLoader worker that a rank forked
        _line.send("told", pickle.dumps((_line.job, value)))


class Surroundings(NamedTuple):
    """Where a job's modules and files are found, and what the caller hands on."""

    path: tuple[str, ...]
    folder: str | None
    handed: bytes

    @classmethod
    def here(cls) -> Surroundings:
        folder = None
        with suppress(OSError):  # the folder was deleted
            folder = os.getcwd()
        return cls(tuple(sys.path), folder, pickle.dumps(handed_on()))


class Order(NamedTuple):
    """What a worker is sent."""

    number: int
    world_size: int
    call: bytes
    timeout: float
    surroundings: Surroundings | None  # None: as before


def worker_main(
    rank: int, device: str, port: int, stacks: Path, interruptible: bool, pipe: connection.Connection
) -> None:
    global _line
    die_with_parent()
    atexit.register(end_process, 0)
    os.environ.update(ENVIRONMENT[device])
    store = TCPStore("127.0.0.1", port, is_master=False)
    _line = line = _Line(pipe)
    _warm_up()
    surroundings = Surroundings.here()
    with stacks.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        faulthandler.enable(file)  # also where a fatal signal ends it
        line.send("ready")
        modules = 0
        while True:
            if len(sys.modules) > modules:
                modules = len(sys.modules)
                gc.collect()  # what the job left must not stay with it
                gc.freeze()  # what imports made stays anyway; looking through it takes longer than most jobs
            try:
                if interruptible:  # it was not, while it started
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                order: Order = pipe.recv()
            except (EOFError, KeyboardInterrupt):  # Ctrl-C reaches the whole foreground; no traceback from each rank
                return
            line.job = order.number
            surroundings = order.surroundings or surroundings
            with environment_of(_rank_variables(rank, order.world_size, port)), _fresh_torch():
                line.send(*_outcome(rank, device, PrefixStore(f"job{order.number}", store), order, surroundings))
                _leave()
            line.send("ready")


def _warm_up() -> None:
    """Import what every training does, seconds of it, before any job's time runs."""
    with _fresh_torch():
        import_dynamo()  # by DDP, FSDP and each optimizer
        importlib.import_module("torch.distributed.fsdp")


def _outcome(rank: int, device: str, store: Store, order: Order, surroundings: Surroundings) -> tuple[str, bytes]:
    try:
        _move_to(surroundings)
        # As in a script, imports come before the group: modules that are imported under one may keep it as a default of
        # their functions (FairScale, torch.distributed.nn), for the jobs after it, and gloo a thread for each of those.
        loaded = None
        with suppress(Exception):
            loaded = _loaded(order.call)
        _join(rank, device, store, order)
        fn, args, kwargs = loaded or _loaded(order.call)
        result = pickle.dumps(_on_cpu(fn(*args, **kwargs)))
        _kept.append(all_groups())
        return "returned", result
    except BaseException as error:
        failure = pickle.dumps(Failure.of(rank, error))
        say_leaving(error)
        # Here the group must go at once: while it lives its sockets stay open, and the other ranks, waiting in a
        # collective, would learn of this failure by their timeout only. Should freeing it lock up, the pool goes.
        traceback.clear_frames(error.__traceback__)
        return "raised", failure


def _move_to(surroundings: Surroundings) -> None:
    """Import and read from where the caller does, whatever the job before has changed."""
    if sys.path != list(surroundings.path):
        sys.path[:] = surroundings.path
        importlib.invalidate_caches()
    if surroundings.folder is not None and Surroundings.here().folder != surroundings.folder:
        os.chdir(surroundings.folder)
    handed: Handed = pickle.loads(surroundings.handed)  # only now: its functions are imported from that path
    take_over(handed)


def _join(rank: int, device: str, store: Store, order: Order) -> None:
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
    set_timeout(timedelta(seconds=order.timeout * COLLECTIVE_SHARE))


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
        forget_meshes()
    groups.clear()


def _on_cpu(value: Any) -> Any:
    """The value with every tensor as a CPU copy of its own; plain pickle then sends bytes, no shared memory."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return type(value)((key, _on_cpu(item)) for key, item in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_on_cpu, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(_on_cpu, value))
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
def environment_of(values: dict[str, str]) -> Iterator[None]:
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
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    exported.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        yield
