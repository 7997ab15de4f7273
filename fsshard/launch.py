"""Start a job, or join the one that a launcher started: spawned processes, torchrun and SLURM, one context.

:func:`init` joins; :func:`launch` joins or, where nothing has been started yet, spawns the processes itself, returns
rank 0's result and raises the first real failure of any rank as :class:`~fsshard.errors.RankFailed`.
"""

from __future__ import annotations

import atexit
import functools
import gc
import logging
import math
import multiprocessing
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore  # torch.distributed's, where typed

from fsshard.comm import presence
from fsshard.comm.presence import speaks_of_a_lost_rank
from fsshard.comm.stores import LOOPBACK, loopback_store
from fsshard.errors import LaunchError, RankFailed, RankMismatch
from fsshard.stacks import place_in_traceback

__all__ = ["Context", "init", "keep_group", "launch"]

logger = logging.getLogger(__name__)

GRACE_SECONDS = 2.0  # after the first failure, for the other ranks to say what happened to them
YIELD_SECONDS = 0.05  # for a group's worker threads to let go of their last work, microseconds as a rule
POLL_SECONDS = 0.5  # a dead rank's forked children can hold its sentinel open, so exit codes are looked at too

# A Python reference to each process group. Without one, a DDP model that outlives destroy_process_group() frees the
# group inside c10d::Reducer's destructor, with the GIL held, while the group's worker thread waits for that GIL:
# a deadlock (pytorch issue #56297; seen on gloo with torch 2.13 in up to half of the runs). Bounded, because a kept
# gloo group keeps its three threads and its sockets; by the time a group falls off the end its threads are idle.
_groups: deque[dist.ProcessGroup] = deque(maxlen=64)

# What this module wrote into os.environ, so that it is not mistaken for a launcher's doing later on.
_exported: dict[str, str] = {}


@dataclass(frozen=True)
class Context:
    """Where this process stands in the job.

    Attributes:
        rank: number of this process among all, from 0.
        local_rank: its number among those on this machine.
        world_size: number of processes.
        local_world_size: number of processes on this machine.
        device: the device this rank computes on.
        backend: ``"gloo"`` or ``"nccl"``.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    backend: str


def keep_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Hold a reference to a process group past its destruction, and return the group.

    Call it on every group that a DDP model is given; see pytorch issue #56297.
    """
    _groups.append(group)
    return group


def init(
    *,
    backend: str | None = None,
    timeout: float | timedelta = 60.0,
    threads: int | None = None,
    device: torch.device | str | None = None,
) -> Context:
    """Join the job that the environment describes.

    The first that applies: a process group that exists already; torchrun's variables; a SLURM task; else a one-rank
    group of its own. ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and
    ``MASTER_PORT`` are exported for libraries that read them; a one-rank group has nobody to meet, and its
    ``MASTER_PORT`` is 0, "any free port".

    Args:
        backend: ``"gloo"`` or ``"nccl"``; by default nccl if every rank on this machine has a CUDA device of its own.
        timeout: seconds, or a timedelta, after which a collective that some rank does not join fails.
        threads: for ``torch.set_num_threads``. By default torch's own choice for one rank per machine or where
            ``OMP_NUM_THREADS`` is set, 1 for several ranks under gloo, and an equal share of the cores under nccl.
        device: where to compute; by default this rank's CUDA device under nccl and the CPU under gloo.

    Raises:
        LaunchError: a variable is missing or invalid, or this machine lacks what was asked for.
    """
    settings = _Settings.check(backend, timeout, threads, device)
    if dist.is_initialized():
        return _existing_context(settings)
    watch_uncaught()
    place = _launched_place()
    if place is None:
        several = torch.cuda.device_count() > 1
        logger.log(
            logging.WARNING if several else logging.INFO,
            "no launcher in the environment: one process makes a one-rank group; fsshard.launch() starts more",
        )
        place = _Place("alone", 0, 1, 0, 1)
    context = _join(place, settings)
    presence.join(dist.group.WORLD)
    return context


def launch(
    fn: Callable[..., Any],
    nprocs: int | None = None,
    args: Sequence[Any] = (),
    *,
    backend: str | None = None,
    timeout: float | timedelta = 60.0,
    threads: int | None = None,
) -> Any:
    """Run ``fn(context, *args)`` on every rank.

    Under torchrun or SLURM this process is one of the ranks: it joins, runs ``fn`` and leaves. Otherwise ``nprocs``
    processes are spawned on this machine, and a rank that fails takes the others down. In spawned ranks
    ``MASTER_ADDR`` and ``MASTER_PORT`` name a TCPStore that the parent serves: connect to it, do not bind it.

    Args:
        fn: a module-level function; spawned processes import it by name.
        nprocs: processes on this machine; by default one per CUDA device, or one without CUDA.
        args: what ``fn`` gets after the context; must be picklable when processes are spawned.
        backend: as in :func:`init`.
        timeout: as in :func:`init`.
        threads: as in :func:`init`.

    Returns:
        What ``fn`` returned: on rank 0 when spawned (it must be picklable), on this rank under a launcher. ``None``
        if ``fn`` left with ``sys.exit(0)``.

    Raises:
        LaunchError: the request does not fit the machine, the environment or pickle. Nothing was started.
        RankFailed: a spawned rank raised, was killed or left early; the earliest failure that no other one caused.
            Its ``__cause__`` is that rank's exception, where that can be pickled.
    """
    settings = _Settings.check(backend, timeout, threads, None)
    _check_nprocs(nprocs)
    _check_call(fn, args)
    sizes = _running_sizes()
    if sizes is None:
        return _spawn(fn, tuple(args), _fitting_nprocs(nprocs, settings.backend), settings)
    if nprocs is not None and nprocs not in sizes:
        raise LaunchError(
            f"launch(nprocs={nprocs}), but a job of WORLD_SIZE={sizes[0]} (LOCAL_WORLD_SIZE={sizes[1]}) is already "
            "running in this environment; leave nprocs out, or start that many processes with the launcher"
        )
    run = functools.partial(_run, functools.partial(init, backend=backend, timeout=timeout, threads=threads))
    if dist.is_torchelastic_launched():
        from torch.distributed.elastic.multiprocessing.errors import record

        return record(lambda: run(fn, tuple(args)))()  # tells torchrun which rank failed first, and why
    return run(fn, tuple(args))


# ---------------------------------------------------------------------------------------------------- what was asked


@dataclass(frozen=True)
class _Settings:
    """Checked arguments of :func:`init`."""

    backend: str | None
    timeout: timedelta
    threads: int | None
    device: torch.device | None

    @classmethod
    def check(
        cls,
        backend: str | None,
        timeout: float | timedelta,
        threads: int | None,
        device: torch.device | str | None,
    ) -> _Settings:
        if backend not in (None, "gloo", "nccl"):
            raise LaunchError(f"backend must be 'gloo', 'nccl' or None, got {backend!r}")
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if not isinstance(seconds, (int, float)) or not math.isfinite(seconds) or seconds <= 0:
            raise LaunchError(f"timeout must be a positive number of seconds or a timedelta, got {timeout!r}")
        if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool) or threads < 1):
            raise LaunchError(f"threads must be a positive integer or None, got {threads!r}")
        place = None if device is None else torch.device(device)
        if place is not None and place.type not in ("cpu", "cuda"):
            raise LaunchError(f"device must be a CPU or a CUDA device, got {device!r}")
        if backend == "nccl" and place is not None and place.type == "cpu":
            raise LaunchError("backend='nccl' moves CUDA tensors only, but device='cpu'; use backend='gloo'")
        return cls(backend, timedelta(seconds=seconds), threads, place)


def _check_nprocs(nprocs: int | None) -> None:
    if nprocs is not None and (not isinstance(nprocs, int) or isinstance(nprocs, bool) or nprocs < 1):
        raise LaunchError(f"nprocs must be a positive integer or None, got {nprocs!r}")


def _check_call(fn: Callable[..., Any], args: Sequence[Any]) -> None:
    if not callable(fn):
        raise LaunchError(f"launch() needs a function fn(context, *args), got {fn!r}")
    if not isinstance(args, (tuple, list)):
        raise LaunchError(f"args must be a tuple or a list, got {type(args).__name__}; for one argument: args=(x,)")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cuda_devices() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _fitting_nprocs(nprocs: int | None, backend: str | None) -> int:
    """The number of processes to spawn, if this machine can hold it."""
    devices = _cuda_devices()
    if backend == "nccl" and not devices:
        raise LaunchError("backend='nccl' needs a CUDA device and this machine shows none; use backend='gloo'")
    if devices and backend != "gloo":
        wanted = devices if nprocs is None else nprocs
        if wanted > devices:
            raise LaunchError(
                f"nprocs={wanted}, but this machine has {devices} CUDA device{'s' if devices > 1 else ''}; "
                f"pass nprocs={devices} or less, or backend='gloo' to run on the CPU"
            )
        return wanted
    wanted, limit = nprocs or 1, max(4, _cores())
    if wanted > limit:
        raise LaunchError(
            f"nprocs={wanted}, but this machine has {_cores()} CPU cores and at most {limit} ranks are started on "
            f"them; pass nprocs={limit} or less"
        )
    return wanted


# ------------------------------------------------------------------------------------------- what the environment says


@dataclass(frozen=True)
class _Place:
    """Where a process stands, and where the ranks meet (nowhere, for a job of one)."""

    source: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str | None = None
    port: int | None = None

    def __post_init__(self) -> None:
        for name, value, size_name, size in (
            ("RANK", self.rank, "WORLD_SIZE", self.world_size),
            ("LOCAL_RANK", self.local_rank, "LOCAL_WORLD_SIZE", self.local_world_size),
        ):
            if not 0 <= value < size:
                raise LaunchError(
                    f"{self.source} environment: {name}={value} must lie in 0..{size_name}-1, and {size_name}={size}"
                )
        if self.local_world_size > self.world_size:
            raise LaunchError(
                f"{self.source} environment: LOCAL_WORLD_SIZE={self.local_world_size} is more than "
                f"WORLD_SIZE={self.world_size}"
            )
        if self.world_size > 1 and self.port is not None and not 0 < self.port < 2**16:
            raise LaunchError(f"{self.source} environment: MASTER_PORT={self.port} is not a port in 1..65535")


def _launched_place() -> _Place | None:
    """This process's place in the job that a launcher started, or None."""
    if any(os.environ.get(name) != value for name, value in _exported.items()):
        _exported.clear()  # somebody has changed it since, so now all of it is theirs
    environment = {name: value for name, value in os.environ.items() if name not in _exported}
    return _torchrun_place(environment) or _slurm_place(environment)


def _integer(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None:
        if default is None:
            raise LaunchError(f"the environment describes a job only in part: {name} is not set")
        return default
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"{name}={text!r} must be an integer") from None


def _is_slurm_task(environment: Mapping[str, str]) -> bool:
    # salloc and sbatch export SLURM_* too, so a bare python there would look like a task without the step's id; their
    # own shells are steps with ids at the very top of 32 bits (interactive, batch, extern).
    if "SLURM_PROCID" not in environment or "SLURM_STEP_ID" not in environment:
        return False
    return _integer(environment, "SLURM_STEP_ID") < 0xFFFF_FFF0


def _torchrun_place(environment: Mapping[str, str]) -> _Place | None:
    """RANK, WORLD_SIZE and so on, as torchrun or a hand-written script exports them."""
    if "RANK" not in environment:
        # A batch script often exports WORLD_SIZE and MASTER_* and leaves the ranks to srun.
        if "WORLD_SIZE" not in environment or _is_slurm_task(environment):
            return None
        raise LaunchError(
            f"WORLD_SIZE={environment['WORLD_SIZE']} is set but RANK is not; set both (torchrun does), or neither"
        )
    if "WORLD_SIZE" not in environment:
        raise LaunchError(
            f"RANK={environment['RANK']} is set but WORLD_SIZE is not; set both (torchrun does), or neither"
        )
    rank, world = _integer(environment, "RANK"), _integer(environment, "WORLD_SIZE")
    if world == 1 and environment.get("MASTER_PORT") == "0":
        return None  # inherited from a parent process that made a one-rank group: no launcher
    local_world = _integer(environment, "LOCAL_WORLD_SIZE", min(world, _cuda_devices() or world))
    local_rank = _integer(environment, "LOCAL_RANK", rank % max(1, local_world))
    if world <= 1 and "MASTER_ADDR" not in environment:
        return _Place("torchrun", rank, world, local_rank, local_world)
    address, port = environment.get("MASTER_ADDR"), _integer(environment, "MASTER_PORT")
    if not address:
        raise LaunchError(f"WORLD_SIZE={world} but MASTER_ADDR is not set; set it to the host of rank 0")
    return _Place("torchrun", rank, world, local_rank, local_world, address, port)


def _slurm_place(environment: Mapping[str, str]) -> _Place | None:
    """The place of a task that srun started."""
    if not _is_slurm_task(environment):
        return None
    rank = _integer(environment, "SLURM_PROCID")
    world = _integer(environment, "SLURM_STEP_NUM_TASKS", _integer(environment, "SLURM_NTASKS", 0))
    if world < 1:
        raise LaunchError("SLURM_PROCID and SLURM_STEP_ID are set but SLURM_NTASKS is not; start the ranks with srun")
    local_world = _slurm_local_world_size(environment, world)
    local_rank = _integer(environment, "SLURM_LOCALID", rank % max(1, local_world))
    address = environment.get("MASTER_ADDR") or _slurm_address(environment)
    nodes = environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES")
    if nodes == "1" and "MASTER_ADDR" not in environment:
        address = LOOPBACK  # nobody else has to reach it
    if "MASTER_PORT" in environment:
        port = _integer(environment, "MASTER_PORT")
    else:
        # The same on every task and different for jobs and steps that may share a node; below the ephemeral range.
        number = _integer(environment, "SLURM_JOB_ID") + 1009 * _integer(environment, "SLURM_STEP_ID")
        port = 10000 + number % 20000
    return _Place("SLURM", rank, world, local_rank, local_world, address, port)


def _slurm_local_world_size(environment: Mapping[str, str], world: int) -> int:
    counts: list[int] = []  # one per node, from "4(x2),3"
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(count)] * int(repeat or 1)
    node = _integer(environment, "SLURM_NODEID", 0)
    if 0 <= node < len(counts):
        return counts[node]
    nodes = _integer(environment, "SLURM_STEP_NUM_NODES", _integer(environment, "SLURM_NNODES", 1))
    return math.ceil(world / max(1, nodes))


def _slurm_address(environment: Mapping[str, str]) -> str:
    """The host of rank 0: the step's first node.

    ``SLURM_LAUNCH_NODE_IPADDR`` is only second: it is where srun was typed, a login node at times, not where rank 0
    runs.
    """
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST")
    if nodes:
        return _first_host(nodes)
    address = environment.get("SLURM_LAUNCH_NODE_IPADDR")
    if not address:
        raise LaunchError("neither SLURM_STEP_NODELIST nor SLURM_LAUNCH_NODE_IPADDR is set; export MASTER_ADDR")
    return address


def _first_host(nodes: str) -> str:
    """``node[01-04,07],x`` -> ``node01``."""
    entry = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", nodes.strip())
    if entry is None:
        raise LaunchError(f"SLURM_STEP_NODELIST={nodes!r} names no host")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", entry.group())


def _running_sizes() -> tuple[int, int] | None:
    """World size and local world size of the job this process is a rank of, or None."""
    place = _launched_place()
    if place is not None:
        return place.world_size, place.local_world_size
    if dist.is_initialized() and dist.get_world_size() > 1:
        return dist.get_world_size(), dist.get_world_size()
    return None  # a one-rank group, as a notebook has, does not forbid spawning


# ------------------------------------------------------------------------------------------------------ joining a job


def _join(place: _Place, settings: _Settings, store: Store | None = None) -> Context:
    """Make the process group; without a store, over the address in the place."""
    backend, device = _choose_device(place, settings)
    _set_threads(place, settings, backend)
    _export(place)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if store is None:
        store = HashStore() if place.address is None else _own_store_of(place, settings)
    dist.init_process_group(
        backend,
        init_method="env://" if store is None else None,
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=settings.timeout,
        device_id=device if backend == "nccl" else None,  # torch 2.13 refuses a CPU device here
    )
    _keep_all_groups()
    return Context(place.rank, place.local_rank, place.world_size, place.local_world_size, device, backend)


def _own_store_of(place: _Place, settings: _Settings) -> Store | None:
    """The launcher's store, or one that rank 0 serves on the loopback interface; None leaves it to torch."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _store_of_this_start(place, settings)
    local = place.address == "localhost" or (place.address or "").startswith("127.")
    if not local or not place.port:
        return None
    address = LOOPBACK if place.address == "localhost" else place.address
    assert address is not None
    return loopback_store(address, place.port, place.world_size, serves=place.rank == 0, timeout=settings.timeout)


def _store_of_this_start(place: _Place, settings: _Settings) -> Store | None:
    """The launcher's store, of which a rank that was started again sees what this start's ranks have written.

    torchrun keeps one store for all starts, whose addresses of ranks that are gone a new start finds before the new
    ones ("Gloo connectFullMesh failed ... Connection refused", torch 2.13). The starts are counted per host, so on
    several hosts there is no number that they agree on; None leaves the store to torch.
    """
    start, port = os.environ.get("TORCHELASTIC_RESTART_COUNT"), place.port
    several = place.local_world_size < place.world_size
    if start is None or port is None or several or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    assert place.address is not None
    return PrefixStore(f"start {start}", TCPStore(place.address, port, is_master=False, timeout=settings.timeout))


def _choose_device(place: _Place, settings: _Settings) -> tuple[str, torch.device]:
    count, device = _cuda_devices(), settings.device
    # With one device bound to each task, a task sees its own only.
    own_device = place.source == "SLURM" and "SLURM_GPUS_PER_TASK" in os.environ
    enough = count >= (1 if own_device else place.local_world_size)
    if settings.backend is not None:
        backend = settings.backend
    else:
        backend = "nccl" if enough and (device is None or device.type == "cuda") else "gloo"
    if backend == "gloo" and (device is None or device.type == "cpu"):
        return backend, torch.device("cpu")
    if not count:
        raise LaunchError(
            f"backend={settings.backend!r}, device={settings.device!r} needs a CUDA device and this machine shows "
            "none; use backend='gloo' and device='cpu'"
        )
    index = place.local_rank % count if device is None or device.index is None else device.index
    if index >= count:
        raise LaunchError(f"device='cuda:{index}', but this machine has {count} CUDA device(s), from cuda:0")
    return backend, torch.device("cuda", index)


def _set_threads(place: _Place, settings: _Settings, backend: str) -> None:
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    elif place.local_world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1 if backend == "gloo" else max(1, _cores() // place.local_world_size))


def _export(place: _Place) -> None:
    values = {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "MASTER_ADDR": place.address or os.environ.get("MASTER_ADDR", LOOPBACK),
        "MASTER_PORT": os.environ.get("MASTER_PORT", "0") if place.port is None else str(place.port),
    }
    for name, value in values.items():
        if os.environ.get(name) != value:
            os.environ[name] = _exported[name] = value


def _existing_context(settings: _Settings) -> Context:
    """The context of a process group that somebody else made, or an earlier init()."""
    rank, world = dist.get_rank(), dist.get_world_size()
    backend = "nccl" if "nccl" in dist.get_backend_config() and _cuda_devices() else "gloo"
    if settings.backend not in (None, backend):
        raise LaunchError(
            f"backend={settings.backend!r}, but the process group that exists uses {backend!r}; "
            "leave backend out, or destroy that group first"
        )
    local_rank, local_world = rank, world
    if os.environ.get("RANK") == str(rank) and os.environ.get("WORLD_SIZE") == str(world):
        local_world = _integer(os.environ, "LOCAL_WORLD_SIZE", world)
        local_rank = _integer(os.environ, "LOCAL_RANK", rank % max(1, local_world))
    place = _Place("existing process group's", rank, world, local_rank, local_world)
    if settings.device is None and backend == "nccl" and torch.cuda.current_device():
        # Not device 0, so the caller has chosen already.
        settings = replace(settings, device=torch.device("cuda", torch.cuda.current_device()))
    _, device = _choose_device(place, replace(settings, backend=backend))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    _export(place)
    _keep_all_groups()
    return Context(rank, local_rank, world, local_world, device, backend)


def _keep_all_groups() -> None:
    for group in list(dist.distributed_c10d._world.pg_map):
        if not any(group is kept for kept in _groups):
            keep_group(group)


def before_leaving(finish: Callable[[bool], None]) -> None:
    """Have ``finish(lost)`` called on each rank before its process group is destroyed: what goes on needs it."""
    _unfinished.append(finish)


def finish_before_leaving(lost: bool = False) -> None:
    """Call what :func:`before_leaving` was given.

    Args:
        lost: whether this rank ends because it has lost another one, so that there is little to wait for.
    """
    for finish in _unfinished:
        finish(lost)


_unfinished: list[Callable[[bool], None]] = []


def say_leaving(error: BaseException) -> None:
    """Tell the ranks that wait for this one what it ended with, where that is no echo of what happened to another."""
    if _is_consequence(error):
        return
    if isinstance(error, SystemExit):
        presence.leave(f"left with sys.exit({error.code or 0})")
    else:
        presence.leave(f"ended with {type(error).__name__}: {str(error).partition(chr(10))[0]}")


_watching = False


def watch_uncaught() -> None:
    """From now on, an error that ends this process because another rank was lost is followed by that rank's name."""
    global _watching
    if _watching:
        return
    _watching, before = True, sys.excepthook

    def told(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        before(kind, error, trace)
        with suppress(Exception):
            for finish in _unfinished if _is_consequence(error) else ():
                finish(True)
        with suppress(Exception):
            named = _named(error)
            if named is not error:
                print(f"fsshard: {named}", file=sys.stderr)
            say_leaving(error)

    sys.excepthook = told


def _named(error: BaseException) -> BaseException:
    """The error that names the rank that was lost, where ``error`` is what that looks like; else ``error``."""
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None or world.size() == 1 or not speaks_of_a_lost_rank(error):
        return error
    place = place_in_traceback("".join(traceback.format_exception(error)))
    return presence.lost_ranks(world, error, place.collective or "a collective")


def _tear_down() -> None:
    """Destroy the process group with every group still referenced, and so without the deadlock of issue #56297."""
    # A gloo worker takes the GIL to drop its last work. If the interpreter is finalizing by then, Python before 3.14
    # ends that thread inside a C++ destructor (gh-87135): "terminate called without an active exception", SIGABRT,
    # in up to a tenth of the ranks that leave right after a backward pass of DDP (torch 2.13). So hand the GIL over.
    time.sleep(YIELD_SECONDS)
    if dist.is_initialized():
        _keep_all_groups()
        gc.collect()  # models in reference cycles go before their group does
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------------- on each rank


class _Left(Exception):
    """``fn`` left with ``sys.exit(0)``, a way of finishing."""


def _run(join: Callable[[], Context], fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """As :func:`_run_or_leave`, where it does not matter how ``fn`` finished."""
    try:
        return _run_or_leave(join, fn, args)
    except _Left:
        return None


def _run_or_leave(join: Callable[[], Context], fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Join, call, leave; raises :class:`_Left` where ``fn`` did ``sys.exit(0)``."""
    made_here = not dist.is_initialized()
    context = join()
    try:
        result = fn(context, *args)
        finish_before_leaving()
        presence.leave("had finished: its function had returned")
    except BaseException as error:
        with suppress(Exception):  # a save that began before the error may still be completed
            finish_before_leaving(_is_consequence(error))
        say_leaving(error)
        if not isinstance(error, SystemExit) or error.code not in (None, 0):
            # Destroying an NCCL group here could wait for collectives that will never be complete.
            named = _named(error)
            if made_here and context.backend == "gloo":
                _tear_down()
            if named is not error:
                raise named from error
            raise
        result = _Left()
    if made_here:
        _tear_down()
    if isinstance(result, _Left):
        raise result
    return result


@dataclass(frozen=True)
class _Finished:
    """How a rank ended that did not fail: ``"return"`` or ``"sys.exit(0)"``; and what rank 0 returned."""

    how: str
    result: bytes | None = None


@dataclass(frozen=True)
class _Failure:
    """What went wrong on a rank, in a form that any process can read."""

    rank: int
    time: float
    type_name: str
    message: str
    traceback: str = ""
    consequence: bool = False  # most likely only an echo of another rank's failure
    pickled: bytes | None = None

    @classmethod
    def of(cls, rank: int, error: BaseException) -> _Failure:
        text = "".join(traceback.format_exception(error))
        consequence = _is_consequence(error)
        return cls(rank, time.time(), type(error).__name__, str(error), text, consequence, _pack_error(error))


def _is_consequence(error: BaseException) -> bool:
    """Whether the error, or the one it was raised from, speaks of a neighbour that went away."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        if isinstance(link, RankMismatch):
            return True
        if speaks_of_a_lost_rank(link):
            return True
        seen.add(id(link))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return False


def _pack_error(error: BaseException) -> bytes | None:
    """The exception as bytes that are known to load, or None."""
    # The default pickle calls the class with error.args, which fails for an __init__ of another signature.
    for state in (error, (type(error), error.args, error.__dict__)):
        with suppress(Exception):
            data = pickle.dumps(state)
            copy = _unpack_error(data)
            if type(copy) is type(error) and str(copy) == str(error):
                return data
    return None


def _unpack_error(data: bytes | None) -> BaseException | None:
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


def _rank_main(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    place: _Place,
    settings: _Settings,
    pipe: connection.Connection,
) -> None:
    """Body of a spawned process: run, then tell the parent how it ended, in one message."""
    _die_with_parent()
    code = 0
    try:
        try:
            result, how = _run_or_leave(lambda: _join_parent(place, settings), fn, args), "return"
        except _Left:
            result, how = None, "sys.exit(0)"
        message = pickle.dumps(_Finished(how, _pack_result(result) if place.rank == 0 else None))
    except BaseException as error:
        message, code = pickle.dumps(_Failure.of(place.rank, error)), 1
    pipe.send_bytes(message)
    pipe.close()
    atexit.register(_end, code)
    sys.exit(code)


def _end(code: int) -> None:
    """Run what others registered for the exit, then leave without finalizing the interpreter.

    The last step of a spawned rank, which is sure to be safe from the abort that :func:`_tear_down` describes.
    """
    try:
        atexit.unregister(_end)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _join_parent(place: _Place, settings: _Settings) -> Context:
    assert place.address is not None
    assert place.port is not None
    store = TCPStore(place.address, place.port, is_master=False, timeout=settings.timeout)
    context = _join(place, settings, PrefixStore("fsshard", store))
    # From here on this process is a rank like any other: a nested launch() must see the job that it is in.
    _exported.clear()
    return context


def _pack_result(result: Any) -> bytes:
    # Plain pickle, not multiprocessing's: a tensor travels as bytes, not as shared memory that dies with this process.
    try:
        return pickle.dumps(result)
    except Exception as error:
        raise LaunchError(
            f"rank 0 returned a {type(result).__name__} that cannot be pickled ({error}); return plain data"
        ) from error


def _unpack_result(data: bytes | None) -> Any:
    try:
        return None if data is None else pickle.loads(data)
    except Exception as error:
        raise LaunchError(f"rank 0's result cannot be unpickled here ({error}); return plain data") from error


def _die_with_parent() -> None:
    """Leave no orphan when the parent is killed: nobody would be there to end a stuck rank."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        sentinel = parent.sentinel

        def watch() -> None:
            connection.wait([sentinel])
            os._exit(1)

        threading.Thread(target=watch, name="fsshard-parent-watch", daemon=True).start()


# ------------------------------------------------------------------------------------------------------ in the parent


def _spawn(fn: Callable[..., Any], args: tuple[Any, ...], nprocs: int, settings: _Settings) -> Any:
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise LaunchError(
            "launch() was called while a spawned rank was importing the main script; "
            'put the call under: if __name__ == "__main__":'
        )
    _check_picklable(fn)
    # Bound here, on a port the system picks, and never closed in between: no other process can take it.
    store = loopback_store(LOOPBACK, 0, None, serves=True, timeout=settings.timeout)
    crew = _Crew()
    try:
        for rank in range(nprocs):
            crew.start(fn, args, _Place("launch()", rank, nprocs, rank, nprocs, LOOPBACK, store.port), settings)
        crew.watch()
    finally:
        crew.stop()
    if crew.failures:
        failure = _first_failure(crew.failures)
        raise _rank_failed(failure, crew.finished) from _unpack_error(failure.pickled)
    return _unpack_result(crew.result)


def _check_picklable(fn: Callable[..., Any]) -> None:
    __tracebackhide__ = True  # pytest shows the caller's line above the message
    target = fn
    while isinstance(target, functools.partial):
        target = target.func
    name = getattr(target, "__qualname__", repr(target))
    remedy = "spawned ranks import it by name: use a function at the top level of a module"
    main = sys.modules.get("__main__")
    if getattr(target, "__module__", None) == "__main__" and not os.path.exists(getattr(main, "__file__", None) or ""):
        raise LaunchError(f"{name} lives in an interactive session; {remedy}, or call fsshard.init() for one rank here")
    if "<lambda>" in name or "<locals>" in name:
        raise LaunchError(f"{name} cannot be pickled; {remedy}, and hand over data through args")


def _first_failure(failures: Iterable[_Failure]) -> _Failure:
    """The earliest failure that is not the echo of another one; the earliest echo if there is nothing else."""
    return min(failures, key=lambda failure: (failure.consequence, failure.time))


def _rank_failed(failure: _Failure, finished: Mapping[int, str]) -> RankFailed:
    """The failure; or, where it is the echo of ranks that had finished before, of the first of these."""
    if not failure.consequence or not finished:
        return RankFailed(failure.rank, failure.type_name, failure.message, failure.traceback)
    left, *others = finished
    how = {"return": "an early return", "sys.exit(0)": "SystemExit"}[finished[left]]
    also = f" (so had rank {', '.join(map(str, others))})" if others else ""
    waited = place_in_traceback(failure.traceback).told("waited")
    said = "sys.exit(0) was called there" if how == "SystemExit" else "its function had returned"
    message = (
        f"{said}{also} while rank {failure.rank} still needed it: did it skip a collective? {failure.type_name} on "
        f"rank {failure.rank}: {failure.message}"
    )
    return RankFailed(left, how, message, failure.traceback, {failure.rank: waited})


class _Crew:
    """The spawned ranks, as the parent sees them.

    Each sends exactly one message, its result or its failure. One that ends without a message has died.
    """

    def __init__(self) -> None:
        self.processes: dict[int, SpawnProcess] = {}
        self.pipes: dict[int, connection.Connection] = {}  # of those that have not been heard of yet
        self.failures: list[_Failure] = []
        self.finished: dict[int, str] = {}  # rank -> how, the first one first
        self.result: bytes | None = None

    def start(self, fn: Callable[..., Any], args: tuple[Any, ...], place: _Place, settings: _Settings) -> None:
        spawn = multiprocessing.get_context("spawn")
        reader, writer = spawn.Pipe(duplex=False)
        # Not daemonic: a daemon may not have children, and a DataLoader wants workers.
        process = spawn.Process(
            target=_rank_main, args=(fn, args, place, settings, writer), name=f"rank {place.rank}", daemon=False
        )
        try:
            process.start()  # pickles everything before it starts anything
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise LaunchError(
                f"fn or args cannot be pickled ({error}); spawned ranks need a module-level function and plain data"
            ) from error
        finally:
            writer.close()
        self.processes[place.rank], self.pipes[place.rank] = process, reader

    def watch(self) -> None:
        """Return when all ranks have been heard of, or soon after the first failure."""
        deadline = math.inf
        while self.pipes and time.monotonic() < deadline:
            sentinels = [self.processes[rank].sentinel for rank in self.pipes]
            connection.wait([*self.pipes.values(), *sentinels], POLL_SECONDS)
            for rank in list(self.pipes):
                self._look_at(rank)
            if self.failures:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)

    def _look_at(self, rank: int) -> None:
        process, pipe = self.processes[rank], self.pipes[rank]
        dead = process.exitcode is not None  # before the pipe: what it sent before it died is there by then
        readable = pipe.poll()
        if not readable and not dead:
            return
        try:
            # A dead rank's forked children may hold the pipe open: reading could wait for ever.
            message = pickle.loads(pipe.recv_bytes() if readable else b"")
        except (EOFError, OSError):
            process.join(GRACE_SECONDS)
            self.failures.append(_death(rank, process.exitcode))
        else:
            if isinstance(message, _Failure):
                self.failures.append(message)
            else:
                self.finished[rank] = message.how
                self.result = message.result if rank == 0 else self.result
        pipe.close()
        del self.pipes[rank]

    def stop(self) -> None:
        """End every process: those that finished in their own time, the others now."""
        complete = not self.failures and not self.pipes
        for rank, pipe in self.pipes.items():
            self.processes[rank].terminate()
            pipe.close()
        deadline = time.monotonic() + GRACE_SECONDS
        for rank, process in self.processes.items():
            process.join(None if complete else max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()
            elif complete and process.exitcode:
                logger.warning("rank %d finished, but its process then ended with code %d", rank, process.exitcode)


def _death(rank: int, code: int | None) -> _Failure:
    if code is not None and code < 0:
        names = {number.value: number.name for number in signal.Signals}
        name = names.get(-code, f"signal {-code}")
        hint = "; out of memory, perhaps" if name == "SIGKILL" else ""
        return _Failure(rank, time.time(), name, f"the process was killed by a signal{hint}")
    message = "the process exited without finishing: os._exit(), or an error on standard error before fn was reached"
    return _Failure(rank, time.time(), f"exit code {code}", message)
