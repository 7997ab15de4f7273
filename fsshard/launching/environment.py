"""Variables that launchers set: torchrun and SLURM, read and, for libraries that ask it, written."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fsshard.comm.stores import LOOPBACK
from fsshard.errors import LaunchError

__all__ = ["RankInfo", "check_count", "cores", "cuda_devices", "export", "exported", "integer", "launched_rank"]

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


def launched_rank() -> RankInfo | None:
    """Return this process's place in the job that a launcher started, or None."""
    if any(os.environ.get(name) != value for name, value in exported.items()):
        exported.clear()  # somebody has changed it since, so now all of it is theirs
    environment = {name: value for name, value in os.environ.items() if name not in exported}
    return torchrun_rank(environment) or slurm_rank(environment)


def variables_of(info: RankInfo) -> dict[str, str]:
    """Return what torchrun would have put into the environment of this rank."""
    return {
        "RANK": str(info.rank),
        "LOCAL_RANK": str(info.local_rank),
        "WORLD_SIZE": str(info.world_size),
        "LOCAL_WORLD_SIZE": str(info.local_world_size),
        "MASTER_ADDR": info.address or os.environ.get("MASTER_ADDR", LOOPBACK),
        "MASTER_PORT": os.environ.get("MASTER_PORT", "0") if info.port is None else str(info.port),
    }


def export(info: RankInfo) -> None:
    """Write a rank's place into the environment, for libraries that read it."""
    for name, value in variables_of(info).items():
        if os.environ.get(name) != value:
            os.environ[name] = exported[name] = value


def integer(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None:
        if default is None:
            raise LaunchError(f"the environment describes a job only in part: {name} is not set")
        return default
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"{name}={text!r} must be an integer") from None


def torchrun_rank(environment: Mapping[str, str]) -> RankInfo | None:
    """Return the place that torchrun or a hand-written script exports as RANK, WORLD_SIZE and so on."""
    there = [name for name in ("RANK", "WORLD_SIZE") if name in environment]
    # A batch script often exports WORLD_SIZE and MASTER_* and leaves the ranks to srun.
    if not there or (there == ["WORLD_SIZE"] and _is_slurm_task(environment)):
        return None
    if len(there) == 1:
        other = "RANK" if there == ["WORLD_SIZE"] else "WORLD_SIZE"
        raise LaunchError(
            f"{there[0]}={environment[there[0]]} is set but {other} is not; set both (torchrun does), or neither"
        )
    rank, world = integer(environment, "RANK"), integer(environment, "WORLD_SIZE")
    if world == 1 and environment.get("MASTER_PORT") == "0":
        return None  # inherited from a parent process that made a one-rank group: no launcher
    local_world = integer(environment, "LOCAL_WORLD_SIZE", min(world, cuda_devices() or world))
    local_rank = integer(environment, "LOCAL_RANK", rank % max(1, local_world))
    if world <= 1 and "MASTER_ADDR" not in environment:
        return RankInfo("torchrun", rank, world, local_rank, local_world)
    address, port = environment.get("MASTER_ADDR"), integer(environment, "MASTER_PORT")
    if not address:
        raise LaunchError(f"WORLD_SIZE={world} but MASTER_ADDR is not set; set it to the host of rank 0")
    return RankInfo("torchrun", rank, world, local_rank, local_world, address, port)


def _is_slurm_task(environment: Mapping[str, str]) -> bool:
    # salloc and sbatch export SLURM_* too, so a bare python there would look like a task without the step's id; their
    # own shells are steps with ids at the very top of 32 bits (interactive, batch, extern).
    if "SLURM_PROCID" not in environment or "SLURM_STEP_ID" not in environment:
        return False
    return integer(environment, "SLURM_STEP_ID") < 0xFFFF_FFF0


def slurm_rank(environment: Mapping[str, str]) -> RankInfo | None:
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
        address = LOOPBACK  # nobody else has to reach it
    if "MASTER_PORT" in environment:
        port = integer(environment, "MASTER_PORT")
    else:
        # The same on every task and different for jobs and steps that may share a node; below the ephemeral range.
        number = integer(environment, "SLURM_JOB_ID") + 1009 * integer(environment, "SLURM_STEP_ID")
        port = 10000 + number % 20000
    return RankInfo("SLURM", rank, world, local_rank, local_world, address, port)


def slurm_local_world_size(environment: Mapping[str, str], world: int) -> int:
    counts: list[int] = []  # one per node, from "4(x2),3"
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(count)] * int(repeat or 1)
    node = integer(environment, "SLURM_NODEID", 0)
    if 0 <= node < len(counts):
        return counts[node]
    nodes = integer(environment, "SLURM_STEP_NUM_NODES", integer(environment, "SLURM_NNODES", 1))
    return math.ceil(world / max(1, nodes))


def _slurm_address(environment: Mapping[str, str]) -> str:
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
        raise LaunchError(f"{name} must be a positive integer or None, got {value!r}")


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cuda_devices() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
