"""Process groups: their time limits, stores and backends, gloo itself, and the fake group of simulations."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.torch_private.fsdp2 import CLASSES
from fsshard.torch_private.patching import replaced
from fsshard.torch_private.registry import Area

AREA = Area("c10d", cpp="torch/csrc/distributed/c10d/init.cpp")

if TYPE_CHECKING:
    from torch._C._distributed_c10d import AllgatherOptions, ProcessGroupGloo
else:
    ProcessGroupGloo = AREA.take(
        "torch._C._distributed_c10d:ProcessGroupGloo",
        use="a connection over gloo that no process group of torch's knows, for checkpoints",
        otherwise="checkpoints of several ranks",
    )
    AllgatherOptions = AREA.take(
        "torch._C._distributed_c10d:AllgatherOptions",
        use="the time limit of one exchange over such a connection",
        otherwise="checkpoints of several ranks",
    )
allgather_base: Callable[[ProcessGroupGloo, Tensor, Tensor, AllgatherOptions], Any] = AREA.take(
    "torch._C._distributed_c10d:ProcessGroupGloo._allgather_base",
    use="one exchange over such a connection",
    otherwise="checkpoints of several ranks",
)
_set_pg_timeout = AREA.take(
    "torch.distributed.distributed_c10d:_set_pg_timeout",
    use="before torch 2.14: lets collectives of a job on the pool of ranks fail sooner than the job",
    otherwise="torch.distributed.set_timeout does; without either a rank that hangs is told by its job's time limit",
    fallback=lambda timeout: None,
)
set_timeout: Callable[[timedelta], None] = getattr(dist, "set_timeout", _set_pg_timeout)
store_of: Callable[[dist.ProcessGroup], Any] = AREA.take(
    "torch.distributed.distributed_c10d:_get_process_group_store",
    use="the store that the ranks of a group share, to find each other without its collectives",
    otherwise="checkpoints of several ranks, and telling which rank is lost",
)
_GET_BACKEND = AREA.attribute(
    "torch.distributed:ProcessGroup._get_backend",
    use="what a group talks over on a device: its kind, and its options",
    otherwise="no time limits of groups",
)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return what a group talks over on a device: its kind, and its options."""
    return getattr(group, _GET_BACKEND)(device)


device_types: Callable[[dist.ProcessGroup], list[torch.device]] = AREA.reader(
    "torch.distributed:ProcessGroup._device_types",
    use="the kinds of device that a group has a backend for",
    otherwise="exchanges that must not depend on the device of the model",
)


def takes_only_cuda(group: dist.ProcessGroup) -> bool:
    """Return whether a group moves CUDA tensors and nothing else, as one of NCCL does, whatever its backend is called.

    It is called nccl, and since torch 2.15 also nccl2, nccl-lazy or nccl-legacy.
    """
    return {device.type for device in device_types(group)} == {"cuda"}


broadcast_coalesced: Callable[[dist.ProcessGroup, list[Tensor], int, int], None] = AREA.take(
    "torch.distributed:_broadcast_coalesced",
    source="torch/csrc/distributed/c10d/comm.cpp",
    use="what DDP and FSDP start from: one rank's values to every rank, few messages",
    otherwise="wrap() on several ranks",
)
_WORLD = AREA.later(
    "torch.distributed.distributed_c10d:_world",
    use="all process groups of this process: those that a fork has inherited, and those that a user has made",
    otherwise="a group that was inherited by a fork is not told, and hangs",
)


def all_groups() -> list[dist.ProcessGroup]:
    """The process groups of this process; none where torch does not say."""
    if _WORLD.present:
        return list(_WORLD.value.pg_map)
    return []


_RECORDS = AREA.later(
    "torch._C._distributed_c10d:_dump_fr_trace_json",
    use="what each rank has begun over gloo, by number, to find ranks that wait in different collectives",
    otherwise="they wait until the time limit of their group",
)


class Collectives(NamedTuple):
    """Collectives that a rank has begun over gloo; each rank numbers the collectives of a group.

    Attributes:
        pending: (a group's name, number there) of what has not ended; of a send or receive, which has no such number
            (torch 2.13), ("", 0).
        last: a group's name -> number of the last one begun there.
        complete: whether there was none in the other groups; else nothing is known of them.
    """

    pending: list[tuple[str, int]]
    last: dict[str, int]
    complete: bool


def collectives(since: int) -> Collectives:
    """Return what was begun over gloo since then (ns of the epoch).

    Nothing where torch keeps no records (TORCH_FR_BUFFER_SIZE=0).
    """
    records = json.loads(_RECORDS.value(True, False)).get("entries", []) if _RECORDS.present else []
    # The oldest comes first, and is forgotten for the 2001st (torch 2.13).
    complete = False
    if records:
        oldest = records[0]
        complete = oldest["record_id"] == 0 or oldest["time_created_ns"] <= since
    found = Collectives([], {}, complete)
    for record in records:
        name = record["process_group"][0]
        number = record["collective_seq_id"]
        if record["time_created_ns"] <= since:
            continue
        if not record["is_p2p"]:
            found.last[name] = max(number, found.last.get(name, number))
        if not record["retired"]:
            found.pending.append(("", 0) if record["is_p2p"] else (name, number))
    return found


_TIMEOUT = AREA.attribute(
    "torch._C._distributed_c10d:Backend.Options._timeout",
    use="the time limit of a group's collectives",
    otherwise="torch's default limit is taken for the group's",
)


def timeout_of_options(options: Any) -> timedelta | None:
    """The time limit in the options of a group's backend; None where they have none."""
    limit = getattr(options, _TIMEOUT, None)
    return limit if isinstance(limit, timedelta) else None


_flatten: Callable[[Any], Any] = AREA.take(
    "torch.distributed.device_mesh:DeviceMesh._flatten",
    use="all ranks of a mesh of replicas and shards as one group",
    otherwise="2-D device meshes",
)


def flattened(mesh: Any) -> Any:
    """The 1-D mesh of all ranks of a mesh; asked again, the same one."""
    return _flatten(mesh)


_get_root_mesh = AREA.attribute(
    "torch.distributed.device_mesh:DeviceMesh._get_root_mesh",
    use="the mesh that a slice was taken from, for the dimensions that wrap was not told of",
    otherwise="a dimension that is named nowhere is not noticed",
)


def whole_mesh(mesh: Any) -> Any:
    """The mesh that ``mesh`` is a slice of, or itself; None where torch does not tell."""
    if hasattr(mesh, _get_root_mesh):
        return getattr(mesh, _get_root_mesh)()
    return None


_TENSOR = "torch.distributed.tensor"
_forget_meshes = AREA.later(
    f"{_TENSOR}.debug:_clear_sharding_prop_cache",
    source="torch/distributed/tensor/debug/__init__.py",
    use="lets DTensor forget the meshes of a world that is gone",
    otherwise="DTensors in a pool of ranks whose size changes",
)
_forget_planners = AREA.later(
    f"{_TENSOR}._redistribute:clear_redistribute_planner_cache",
    use="empties a cache by meshes, which keep their process groups alive",
    otherwise="a thread of gloo's goes on for each process group of a pool's earlier jobs, and takes CPU time",
)


def forget_meshes() -> None:
    """Let DTensor forget what it has remembered of meshes, whose groups are gone with their world.

    A mesh of the next world with the same ranks and names is equal to a remembered one, which is handed out in its
    place: "Could not resolve the process group registered under the name 7" (torch 2.13). Its groups' threads stay.
    """
    if f"{_TENSOR}.debug" not in sys.modules and _TENSOR not in sys.modules:
        return
    _forget_meshes.value()
    if _forget_planners.present:
        _forget_planners.value()
    for cached in _caches(len(sys.modules)):
        cached.cache_clear()
    if CLASSES.present:
        CLASSES.value.clear()


@functools.lru_cache(1)  # looking through all classes takes longer than many a job of a pool
def _caches(imported: int) -> list[Any]:
    values: list[Any] = []
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{_TENSOR}."):
            values += vars(module).values()
    members = []
    for kind in values:
        if isinstance(kind, type):
            members += [getattr(member, "__func__", member) for member in vars(kind).values()]
    # Some are by meshes.
    return [value for value in values + members if isinstance(value, type(_caches))]


_resolve: Callable[[str], Any] = AREA.take(
    "torch._C._distributed_c10d:_resolve_process_group",
    use="the group that a functional collective names",
    otherwise="functional collectives are counted as of one rank",
    fallback=lambda name: None,
)


def group_named(name: str) -> Any:
    """The process group that an operator was given by name; None where it is another string."""
    try:
        return _resolve(name)
    except (RuntimeError, ValueError):
        return None


_fake_store = AREA.later(
    "torch.testing._internal.distributed.fake_pg:FakeStore",
    use="registers the backend 'fake', whose collectives return at once, for simulations",
    otherwise="estimates",
)


def fake_store() -> Any:
    """Return what ``init_process_group("fake", store=...)`` takes; the backend is there afterwards."""
    return _fake_store.value()


@contextlib.contextmanager
def collectives_replaced(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace functions of ``torch.distributed`` by name, within; engines look them up when they call them."""
    with ExitStack() as stack:
        for name, function in functions.items():
            stack.enter_context(replaced(dist, name, function))
        yield
