"""One process that stands for a rank of a job of any size: collectives return at once and move nothing.

What torch 2.13's fake process group cannot do by itself is filled in here, for as long as the context is open.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsshard.estimate.collectives import CALLS
from fsshard.sharded import ShardedModule

__all__ = ["GlooBuffers", "UsedParameters", "fake_ranks", "fsdp2_shards_at_once", "let_ddp_reduce", "let_fsdp2_gather"]


@contextlib.contextmanager
def fake_ranks(rank: int, world_size: int, backend: str = "fake") -> Iterator[None]:
    """Be rank ``rank`` of ``world_size`` ranks, of which the others do exactly what this one does.

    Engines that ask are told that the group's backend is ``backend``: over gloo FSDP2 has collectives of our own.

    The process must have no process group yet; it has none afterwards.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    replaced = {
        "all_gather_object": _all_gather_object,
        "broadcast_object_list": _broadcast_object_list,
        "all_reduce": _finished(dist.all_reduce),
        "get_backend": lambda *_: backend,
    }
    try:
        with contextlib.ExitStack() as stack:
            for name, function in replaced.items():
                stack.enter_context(mock.patch.object(dist, name, function))
            yield
    finally:
        dist.destroy_process_group()


def _all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    """The fake group would unpickle memory that nobody has written."""
    object_list[:] = [obj] * len(object_list)


def _broadcast_object_list(object_list: list[Any], *args: Any, **kwargs: Any) -> None:
    pass


class GlooBuffers(TorchDispatchMode):
    """Takes the memory that gloo takes: its reduce_scatter is an all_reduce of a copy of what goes in (torch 2.13)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.c10d._reduce_scatter_base_.default:
            return func(*args, **(kwargs or {}))
        copy = torch.empty_like(args[1])
        try:
            return func(*args, **(kwargs or {}))
        finally:
            del copy


FILL, READ = torch.ops.aten.fill_.Scalar, torch.ops.aten._local_scalar_dense.default


class UsedParameters(TorchDispatchMode):
    """Remembers which parameters DDP has seen a gradient of, which it reads from memory under find_unused_parameters.

    Its map is one int32 per parameter, written and read one by one in a backward (torch 2.13).
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._written: dict[tuple[int, int], int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (func is not FILL and func is not READ) or args[0].dtype is not torch.int32:
            return func(*args, **(kwargs or {}))
        storage, place = args[0].untyped_storage()._cdata, args[0].storage_offset()
        if func is READ and torch._C._current_graph_task_id() != -1:
            return self._written.get((storage, place), 0)
        if func is FILL:
            for number in range(place, place + args[0].numel()):
                self._written[storage, number] = args[1]
        return func(*args, **(kwargs or {}))


class _Done:
    """A collective that is over. The fake group's own has a future that is None (torch 2.13)."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self, *args: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([self._tensor])
        return future


def _finished(all_reduce: Any) -> Any:
    def all_reduce_at_once(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Control flow over small facts (which gradients are there) goes on: with equal ranks, MAX changes nothing.
        # Fake tensors know such values, and would forget them when an operator writes.
        known = getattr(tensor, "constant", None)
        all_reduce(tensor, *args, **kwargs)
        if known is not None:
            tensor.constant = known  # type: ignore[attr-defined]
        return _Done(tensor) if kwargs.get("async_op") else None

    return all_reduce_at_once


def let_ddp_reduce(model: ShardedModule) -> None:
    """Make DDP's reducer work over a fake group.

    By itself it asserts that an all_reduce has a future (comm.cpp), and before the second step it reads from memory
    in which order the gradients were ready (torch 2.13).
    """
    engine: Any = model.backend.engine
    if not isinstance(engine, torch.nn.parallel.DistributedDataParallel):
        return
    if not engine._comm_hooks:
        engine.register_comm_hook(model.backend.settings.group, _average)
    setattr(engine, "reducer", _NoRebuild(engine.reducer))  # noqa: B010  # typed as a Reducer


def let_fsdp2_gather(model: ShardedModule) -> None:
    """Over many ranks, stand for the broadcasts of our all-gather on gloo, one per rank, by a single one."""
    if model.backend.name != "fsdp2" or model.backend.settings.world_size <= MANY_RANKS:
        return
    from fsshard.backends.gloo_collectives import Gather

    class AtOnce(Gather):
        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
        ) -> Any:
            whole = output_tensor.detach()
            setattr(whole, CALLS, group.size())
            return dist.broadcast(whole, group=group, group_src=0, async_op=True)

    units: Any = model.backend
    for unit in units._units:
        if any(isinstance(group._all_gather_comm, Gather) for group in unit._get_fsdp_state()._fsdp_param_groups):
            unit.set_custom_all_gather(AtOnce())


MANY_RANKS = 16


@contextlib.contextmanager
def fsdp2_shards_at_once() -> Iterator[None]:
    """Within it FSDP2 cuts a parameter for thousands of ranks without an empty tensor for each that gets nothing."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    def parts_of(whole: Tensor, ranks: int, dim: int) -> list[Tensor]:
        parts = whole.chunk(ranks, dim)
        return [*parts, *[whole.new_empty(0)] * (ranks - len(parts))]

    with mock.patch.object(_fsdp_param, "_chunk_with_empty", parts_of):
        yield


def _average(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer()
    dist.all_reduce(buffer, group=group)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


# DDP compares annotations with classes and not with their names ("bucket annotation should be dist.GradBucket", 2.13).
_average.__annotations__.update(bucket=dist.GradBucket, **{"return": torch.futures.Future[torch.Tensor]})


class _NoRebuild:
    """A reducer that keeps the buckets as they are: in another order they would be as large."""

    def __init__(self, reducer: Any) -> None:
        self.__dict__["_reducer"] = reducer

    def _rebuild_buckets(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._reducer, name, value)
