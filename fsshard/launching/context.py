"""The place of this process in a job: read from the variables of torchrun and SLURM, joined, and written for others."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from fsshard.comm import watchdog
from fsshard.comm.stores import LOOPBACK, answer_within, loopback_store
from fsshard.errors import LaunchError
from fsshard.launching.leaving import keep_all_groups, watch_end

Environment = Mapping[str, str]

# What this module wrote into os.environ, so that it is not mistaken for a launcher's doing later on.
exported: dict[str, str] = {}


@dataclass(frozen=True)
class RankInfo:
    """The place of a process in its job, and where the ranks meet (nowhere, for a job of one)."""

    source: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str | None = None
    port: int | None = None

    def __post_init__(self) -> None:
        self._check_number("", self.rank, self.world_size)
        self._check_number("LOCAL_", self.local_rank, self.local_world_size)
        # GPUs would seem too few for the host's ranks.
        if self.local_world_size > self.world_size:
            sizes = f"LOCAL_WORLD_SIZE={self.local_world_size} is more than WORLD_SIZE={self.world_size}"
            raise LaunchError(f"{self.source} environment: {sizes}")
        if self.world_size > 1 and self.port is not None and not 0 < self.port < 2**16:
            raise LaunchError(f"{self.source} environment: MASTER_PORT={self.port}: expected a port in 1..65535")

    def _check_number(self, prefix: str, rank: int, size: int) -> None:
        if not 0 <= rank < size:
            size_name = f"{prefix}WORLD_SIZE"
            raise LaunchError(
                f"{self.source} environment: {prefix}RANK={rank}: expected 0..{size_name}-1, got {size_name}={size}"
            )


def launched_rank() -> RankInfo | None:
    """Return this process's place in the job that a launcher started, or None."""
    if any(os.environ.get(name) != value for name, value in exported.items()):
        # Somebody has changed the environment since, so now all of it is theirs.
        exported.clear()
    environment = {name: value for name, value in os.environ.items() if name not in exported}
    return torchrun_rank(environment) or slurm_rank(environment)


def variables_of(info: RankInfo) -> dict[str, str]:
    """Return what torchrun would have put into the environment of this rank."""
    port = os.environ.get("MASTER_PORT", "0")
    if info.port is not None:
        port = str(info.port)
    return {
        "RANK": str(info.rank),
        "LOCAL_RANK": str(info.local_rank),
        "WORLD_SIZE": str(info.world_size),
        "LOCAL_WORLD_SIZE": str(info.local_world_size),
        "MASTER_ADDR": info.address or os.environ.get("MASTER_ADDR", LOOPBACK),
        "MASTER_PORT": port,
    }


def export(info: RankInfo) -> None:
    """Write a rank's place into the environment, for libraries that read it."""
    for name, value in variables_of(info).items():
        if os.environ.get(name) != value:
            os.environ[name] = value
            exported[name] = value


def integer(environment: Environment, name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None:
        if default is None:
            raise LaunchError(f"environment: expected all of a job, got it without {name}; set it, or unset the rest")
        return default
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"{name}={text!r}: expected an integer") from None


def torchrun_rank(environment: Environment) -> RankInfo | None:
    """Return the place that torchrun or a hand-written script exports as RANK, WORLD_SIZE and so on."""
    names = [name for name in ("RANK", "WORLD_SIZE") if name in environment]
    if not names:
        return None
    # A batch script often exports WORLD_SIZE and MASTER_* and leaves the ranks to srun.
    if names == ["WORLD_SIZE"] and _is_slurm_task(environment):
        return None
    if len(names) == 1:
        name = names[0]
        other = "RANK" if name == "WORLD_SIZE" else "WORLD_SIZE"
        raise LaunchError(f"{name}={environment[name]} is set but {other} is not; set both (torchrun does), or neither")
    rank = integer(environment, "RANK")
    world = integer(environment, "WORLD_SIZE")
    if world == 1 and environment.get("MASTER_PORT") == "0":
        # This was inherited from a parent process that made a one-rank group, which is no launcher.
        return None
    local_world = integer(environment, "LOCAL_WORLD_SIZE", min(world, cuda_devices() or world))
    local_rank = integer(environment, "LOCAL_RANK", rank % max(1, local_world))
    if world <= 1 and "MASTER_ADDR" not in environment:
        return RankInfo("torchrun", rank, world, local_rank, local_world)
    address = environment.get("MASTER_ADDR")
    port = integer(environment, "MASTER_PORT")
    if not address:
        raise LaunchError(f"WORLD_SIZE={world} but MASTER_ADDR is not set; set it to the host of rank 0")
    return RankInfo("torchrun", rank, world, local_rank, local_world, address, port)


def _is_slurm_task(environment: Environment) -> bool:
    # salloc and sbatch export SLURM_* too, so a bare python there would look like a task without the step's id; their
    # own shells are steps with ids at the very top of 32 bits (interactive, batch, extern).
    if "SLURM_PROCID" not in environment or "SLURM_STEP_ID" not in environment:
        return False
    return integer(environment, "SLURM_STEP_ID") < 0xFFFF_FFF0


def slurm_rank(environment: Environment) -> RankInfo | None:
    """Return the place of a task that srun started."""
    if not _is_slurm_task(environment):
        return None
    rank = integer(environment, "SLURM_PROCID")
    world = integer(environment, "SLURM_STEP_NUM_TASKS", integer(environment, "SLURM_NTASKS", 0))
    if world < 1:
        raise LaunchError("SLURM_PROCID and SLURM_STEP_ID are set but SLURM_NTASKS is not; start the ranks with srun")
    local_world = slurm_local_world_size(environment, world)
    local_rank = integer(environment, "SLURM_LOCALID", rank % max(1, local_world))
    address = environment.get("MASTER_ADDR") or _slurm_address(environment)
    nodes = environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES")
    if nodes == "1" and "MASTER_ADDR" not in environment:
        # No other host has to reach it.
        address = LOOPBACK
    if "MASTER_PORT" in environment:
        port = integer(environment, "MASTER_PORT")
    else:
        # The same on every task and different for jobs and steps that may share a node; below the ephemeral range.
        number = integer(environment, "SLURM_JOB_ID") + 1009 * integer(environment, "SLURM_STEP_ID")
        port = 10000 + number % 20000
    return RankInfo("SLURM", rank, world, local_rank, local_world, address, port)


def slurm_local_world_size(environment: Environment, world: int) -> int:
    # There is one count per node, from a text such as "4(x2),3".
    counts = []
    text = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(repeat or 1)
    node = integer(environment, "SLURM_NODEID", 0)
    if 0 <= node < len(counts):
        return counts[node]
    nodes = integer(environment, "SLURM_STEP_NUM_NODES", integer(environment, "SLURM_NNODES", 1))
    return math.ceil(world / max(1, nodes))


def _slurm_address(environment: Environment) -> str:
    """Return the host of rank 0: the step's first node."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST")
    if nodes:
        return first_host(nodes)
    # Only second: it is where srun was typed, a login node at times, not where rank 0 runs.
    address = environment.get("SLURM_LAUNCH_NODE_IPADDR")
    if not address:
        raise LaunchError("neither SLURM_STEP_NODELIST nor SLURM_LAUNCH_NODE_IPADDR is set; export MASTER_ADDR")
    return address


def first_host(nodes: str) -> str:
    """Return ``node01`` of ``node[01-04,07],x``."""
    entry = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", nodes.strip())
    if entry is None:
        raise LaunchError(f"SLURM_STEP_NODELIST={nodes!r} names no host")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", entry.group())


def check_count(name: str, value: object) -> None:
    """Raise unless an argument is a positive integer or None."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise LaunchError(f"{name}: expected a positive integer or None, got {value!r}")


def cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cuda_devices() -> int:
    # A broken driver counts devices that are not available.
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


logger = logging.getLogger(__name__)
CONNECT_SECONDS = 1.0  # beyond the timeout, for torch's own error to come first


@dataclass(frozen=True)
class Context:
    """The place of this process in the job.

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


def init(
    *,
    process_group_backend: str | None = None,
    timeout: float | timedelta | None = None,
    threads: int | None = None,
    device: torch.device | str | None = None,
) -> Context:
    """Join the job that the environment describes.

    The first that applies: a process group that exists already; torchrun's variables; a SLURM task; else a one-rank
    group of its own. ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and
    ``MASTER_PORT`` are exported for libraries that read them; a one-rank group needs no port, so its ``MASTER_PORT`` is
    0, "any free port".

    Args:
        process_group_backend: ``"gloo"`` or ``"nccl"``; by default nccl if every rank on this machine has a CUDA device
            of its own.
        timeout: seconds, or a timedelta, after which a collective that some rank does not join fails; by default
            torch's own, 10 minutes under nccl and 30 under gloo. A rank that is gone is named immediately.
        threads: for ``torch.set_num_threads``. By default torch's own choice for one rank per machine or where
            ``OMP_NUM_THREADS`` is set, 1 for several ranks under gloo, and an equal share of the cores under nccl.
        device: where to compute; by default this rank's CUDA device under nccl and the CPU under gloo.

    Raises:
        LaunchError: a variable is missing or invalid, this machine lacks what was asked for, or nobody answers at
            ``MASTER_ADDR:MASTER_PORT``.
    """
    settings = JoinSettings.check(process_group_backend, timeout, threads, device)
    if dist.is_initialized():
        return _existing_context(settings)
    info = launched_rank()
    if info is None:
        level = logging.WARNING if torch.cuda.device_count() > 1 else logging.INFO
        logger.log(
            level,
            "no launcher in the environment: one process makes a one-rank group; fsshard.launch() starts more",
        )
        info = RankInfo("alone", 0, 1, 0, 1)
    context = join(info, settings)
    assert dist.group.WORLD is not None
    watch_end(dist.group.WORLD)
    watchdog.join()
    return context


@dataclass(frozen=True)
class JoinSettings:
    """Checked arguments of :func:`init`."""

    backend: str | None
    timeout: timedelta | None
    threads: int | None
    device: torch.device | None

    @property
    def store_timeout(self) -> timedelta:
        """Return the limit for ranks to find each other; torch's where none was asked for."""
        return self.timeout or dist.default_pg_timeout

    @classmethod
    def check(
        cls,
        backend: str | None,
        timeout: float | timedelta | None,
        threads: int | None,
        device: torch.device | str | None,
    ) -> JoinSettings:
        if backend not in (None, "gloo", "nccl"):
            raise LaunchError(f"process_group_backend: expected 'gloo', 'nccl' or None, got {backend!r}")
        limit = None
        if timeout is not None:
            seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
            if not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
                raise LaunchError(f"timeout: expected positive seconds, a timedelta or None, got {timeout!r}")
            limit = timedelta(seconds=seconds)
        check_count("threads", threads)
        place = None
        if device is not None:
            place = torch.device(device)
            if place.type not in ("cpu", "cuda"):
                raise LaunchError(f"device: expected a CPU or a CUDA device, got {device!r}")
            if backend == "nccl" and place.type == "cpu":
                raise LaunchError(
                    "process_group_backend='nccl' moves CUDA tensors only, but device='cpu'; use "
                    "process_group_backend='gloo'"
                )
        return cls(backend, limit, threads, place)


def running_sizes() -> tuple[int, int] | None:
    """Return the world size and local world size of the job this process is a rank of, or None."""
    info = launched_rank()
    if info is not None:
        return info.world_size, info.local_world_size
    if dist.is_initialized() and dist.get_world_size() > 1:
        return dist.get_world_size(), dist.get_world_size()
    # A one-rank group, as a notebook has, does not forbid spawning.
    return None


def join(info: RankInfo, settings: JoinSettings, store: Store | None = None) -> Context:
    """Make the process group; without a store, over the address that ``info`` names."""
    backend, device = _choose_device(info, settings)
    _set_threads(info, settings, backend)
    export(info)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if store is None:
        store = HashStore() if info.address is None else _store_of_job(info, settings)
    dist.init_process_group(
        backend,
        store=store,
        rank=info.rank,
        world_size=info.world_size,
        timeout=settings.timeout,
        device_id=device if backend == "nccl" else None,  # torch 2.13 refuses a CPU device here
    )
    keep_all_groups()
    return Context(info.rank, info.local_rank, info.world_size, info.local_world_size, device, backend)


def _store_of_job(info: RankInfo, settings: JoinSettings) -> Store:
    """Return the store at the address that ``info`` names."""
    limit = settings.store_timeout

    def connected() -> Store:
        own_store = own_store_of(info, settings)
        if own_store is not None:
            return own_store
        rendezvous = dist.rendezvous("env://", info.rank, info.world_size, timeout=limit)
        store: Store = next(iter(rendezvous))[0]
        return store

    try:
        # A TCPStore waits without a limit for the first word of who has accepted its connection (torch 2.13).
        return answer_within(limit.total_seconds() + CONNECT_SECONDS, connected)
    except dist.DistStoreError as error:
        raise LaunchError(
            f"rank {info.rank} cannot join the job at MASTER_ADDR={info.address}, MASTER_PORT={info.port} within "
            f"{limit.total_seconds():g} s ({error}); check that rank 0 runs there, that no other program has this "
            "port, or give slow ranks a longer timeout="
        ) from error


def own_store_of(info: RankInfo, settings: JoinSettings) -> Store | None:
    """Return the launcher's store, or one that rank 0 serves on the loopback interface; None leaves it to torch."""
    address = info.address or ""
    port = info.port
    timeout = settings.store_timeout
    if not port:
        return None
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun keeps one store for all starts, whose addresses of ranks that are gone a new start finds before the
        # new ones ("Gloo connectFullMesh failed ... Connection refused", torch 2.13). The starts are counted per host,
        # so several hosts have no number that they agree on.
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT")
        if start is None or info.local_world_size < info.world_size:
            return None
        return PrefixStore(f"start {start}", TCPStore(address, port, is_master=False, timeout=timeout))
    if address != "localhost" and not address.startswith("127."):
        return None
    if address == "localhost":
        address = LOOPBACK
    return loopback_store(address, port, info.world_size, serves=info.rank == 0, timeout=timeout)


def _choose_device(info: RankInfo, settings: JoinSettings) -> tuple[str, torch.device]:
    count = cuda_devices()
    device = settings.device
    kind = "" if device is None else device.type
    backend = settings.backend
    if backend is None:
        # With one device bound to each task, a task sees its own only.
        own_device = info.source == "SLURM" and "SLURM_GPUS_PER_TASK" in os.environ
        enough = count >= (1 if own_device else info.local_world_size)
        backend = "nccl" if enough and kind != "cpu" else "gloo"
    if backend == "gloo" and kind != "cuda":
        return backend, torch.device("cpu")
    if not count:
        raise LaunchError(
            f"process_group_backend={settings.backend!r}, device={settings.device!r} needs a CUDA device and none was "
            "found; use process_group_backend='gloo' and device='cpu'"
        )
    if device is None or device.index is None:
        return backend, torch.device("cuda", info.local_rank % count)
    if device.index >= count:
        raise LaunchError(f"device='cuda:{device.index}', but this machine has {count} CUDA device(s), from cuda:0")
    return backend, torch.device("cuda", device.index)


def _set_threads(info: RankInfo, settings: JoinSettings, backend: str) -> None:
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    elif info.local_world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        share = max(1, cores() // info.local_world_size)
        torch.set_num_threads(1 if backend == "gloo" else share)


def _existing_context(settings: JoinSettings) -> Context:
    """Return the context of a process group that somebody else made, or an earlier init()."""
    rank = dist.get_rank()
    world = dist.get_world_size()
    backend = "nccl" if "nccl" in dist.get_backend_config() and cuda_devices() else "gloo"
    if settings.backend not in (None, backend):
        raise LaunchError(
            f"process_group_backend={settings.backend!r}, but the process group that exists uses {backend!r}; "
            "leave it out, or destroy that group first"
        )
    local_rank = rank
    local_world = world
    if os.environ.get("RANK") == str(rank) and os.environ.get("WORLD_SIZE") == str(world):
        local_world = integer(os.environ, "LOCAL_WORLD_SIZE", world)
        local_rank = integer(os.environ, "LOCAL_RANK", rank % max(1, local_world))
    info = RankInfo("existing process group's", rank, world, local_rank, local_world)
    if settings.device is None and backend == "nccl" and torch.cuda.current_device():
        # Not device 0, so the caller has chosen already.
        settings = replace(settings, device=torch.device("cuda", torch.cuda.current_device()))
    _, device = _choose_device(info, replace(settings, backend=backend))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    export(info)
    keep_all_groups()
    return Context(rank, local_rank, world, local_world, device, backend)
