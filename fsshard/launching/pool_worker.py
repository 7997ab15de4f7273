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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from fsshard.comm.stores import LOOPBACK
from fsshard.errors import LaunchError
from fsshard.launching.context import RankInfo, exported, variables_of
from fsshard.launching.leaving import die_with_parent, end_process, finish_before_leaving, groups, say_leaving
from fsshard.launching.supervisor import Arguments, Failure, Job, packed, say, take_over
from fsshard.torch_private.c10d import all_groups, forget_meshes, set_timeout
from fsshard.torch_private.compiling import import_dynamo

COLLECTIVE_SHARE = 0.5  # of a job's time, until a collective gives up: an exception tells more than a killed rank
ENVIRONMENT: dict[str, dict[str, str]] = {
    "cpu": {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    "cuda": {},
}

# Groups of the last jobs: leaving.py says which deadlock this prevents. More of them would pile up threads, three for
# each group; by the time two more jobs are done a group's threads are idle.
_kept: deque[list[dist.ProcessGroup]] = deque(maxlen=2)

_line: connection.Connection | None = None  # to the parent, while a job runs
_process = 0
# A job may tell things from several threads.
_lock = threading.Lock()


def tell(value: Any) -> None:
    """Send a small picklable value from a job to the parent, whose ``on_message`` gets it while it waits.

    Outside a job of a :class:`RankPool` it does nothing, so that a function which tells its progress runs anywhere.
    """
    # A DataLoader worker that a rank forked has no say.
    if _process == os.getpid():
        with _lock:
            if _line is not None:
                say(_line, "told", pickle.dumps(value))


class Order(NamedTuple):
    """The message to a worker: a job, where its modules and files are found, and what the caller hands on."""

    number: int
    world_size: int
    call: bytes
    timeout: float
    path: tuple[str, ...]
    folder: str | None
    handed: bytes


def folder() -> str | None:
    # The folder may have been deleted.
    with suppress(OSError):
        return os.getcwd()
    return None


def worker_main(
    rank: int,
    device: str,
    port: int,
    stack: Path,
    pipe: connection.Connection,
) -> None:
    """Body of a rank's process: jobs, one after the other, until the parent closes the pipe."""
    global _line, _process
    die_with_parent()
    atexit.register(end_process, 0)
    os.environ.update(ENVIRONMENT[device])
    store = TCPStore(LOOPBACK, port, is_master=False)
    _process = os.getpid()
    _warm_up()
    with stack.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        # It writes also where a fatal signal ends the process.
        faulthandler.enable(file)
        say(pipe, "ready")
        while True:
            freeze_imports()
            try:
                order: Order = pipe.recv()
            except (EOFError, KeyboardInterrupt):
                # Ctrl-C reaches the whole foreground, and no rank shall print a traceback of it.
                return
            # At its end Lightning's Trainer (2.6) puts back the handlers that Python knows of; faulthandler's is none.
            faulthandler.unregister(signal.SIGUSR1)
            faulthandler.register(signal.SIGUSR1, file=file)
            _line = pipe
            info = RankInfo("pool", rank, order.world_size, rank, order.world_size, LOOPBACK, port)
            with environment_of(variables_of(info)), _fresh_torch():
                ending = _outcome(rank, device, PrefixStore(f"job{order.number}", store), order)
                with _lock:
                    _line = None
                    say(pipe, *ending)
                _leave()
            say(pipe, "ready")


_modules = 0


def freeze_imports() -> None:
    """Exempt what imports since the last call have made from garbage collection: it stays, and slows each one."""
    global _modules
    if len(sys.modules) > _modules:
        _modules = len(sys.modules)
        # What the job left must not stay with the process.
        gc.collect()
        gc.freeze()


def _warm_up() -> None:
    """Import what every training does, seconds of it, before any job's time runs."""
    with _fresh_torch():
        # DDP, FSDP and each optimizer import it.
        import_dynamo()
        importlib.import_module("torch.distributed.fsdp")


def _outcome(rank: int, device: str, store: Store, order: Order) -> tuple[str, bytes]:
    try:
        _move_to(order)
        # As in a script, imports come before the group: modules that are imported under one may keep it as a default of
        # their functions (FairScale, torch.distributed.nn), for the jobs after it, and gloo a thread for each of those.
        loaded = None
        with suppress(Exception):
            loaded = _loaded(order.call)
        _join(rank, device, store, order)
        fn, args, kwargs = loaded or _loaded(order.call)
        result = packed(rank, _on_cpu(fn(*args, **kwargs)))
        _kept.append(all_groups())
        return "return", result
    except BaseException as error:
        failure = pickle.dumps(Failure.of(rank, error))
        say_leaving(error)
        # Here the group must go at once: while it lives its sockets stay open, and the other ranks, waiting in a
        # collective, would learn of this failure by their timeout only. Should freeing it lock up, the pool goes.
        traceback.clear_frames(error.__traceback__)
        return "raised", failure


def _move_to(order: Order) -> None:
    """Import and read from where the caller does, whatever the job before has changed."""
    if sys.path != list(order.path):
        sys.path[:] = order.path
        importlib.invalidate_caches()
    if order.folder is not None and folder() != order.folder:
        os.chdir(order.folder)
    # It comes only now, since its functions are imported from that path.
    take_over(pickle.loads(order.handed))


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
    # A rank whose job raises at once destroys its group, at which one that has not connected to it yet fails, or waits.
    connected = [f"connected/{other}" for other in range(order.world_size)]
    store.set(connected[rank], "")
    store.wait(connected, timedelta(seconds=order.timeout))
    set_timeout(timedelta(seconds=order.timeout * COLLECTIVE_SHARE))


def _loaded(call: bytes) -> tuple[Job, Arguments, dict[str, Any]]:
    try:
        return pickle.loads(call)  # type: ignore[no-any-return]
    except (ImportError, AttributeError) as error:
        raise LaunchError(
            f"the rank cannot import the job: {error}; its module must be importable by name from the caller's "
            f"sys.path or working folder ({os.getcwd()})"
        ) from error


def _leave() -> None:
    # Whoever waits for it has been told.
    with suppress(Exception):
        finish_before_leaving()
    forget_meshes()
    gc.collect()  # what hold groups are in reference cycles: models, and what DTensor keeps by mesh (torch 2.15)
    if dist.is_initialized():
        dist.destroy_process_group()
    groups.clear()


def _on_cpu(value: Any) -> Any:
    """Return the value with CPU copies for tensors, so that plain pickle sends bytes and no shared memory."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return type(value)((key, _on_cpu(item)) for key, item in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_on_cpu, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(_on_cpu, value))
    return value


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
    # torch.manual_seed() is slow, so that without a GPU the default generator alone is seeded.
    seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    seed(0)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    exported.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        yield
