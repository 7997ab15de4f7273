"""One process that acts as a rank of a job of any size: collectives return at once and send nothing.

What torch 2.13's fake process group cannot do by itself is filled in here, for as long as the context is open.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.torch_private.autograd import current_graph_task_id
from fsshard.torch_private.c10d import collectives_replaced, fake_store, forget_meshes
from fsshard.torch_private.dispatch import LOCAL_SCALAR_DENSE, REDUCE_SCATTER_BASE, TorchDispatchMode
from fsshard.torch_private.tensors import storage_key

__all__ = ["GlooBuffers", "UsedParameters", "fake_ranks"]


@contextlib.contextmanager
def fake_ranks(rank: int, world_size: int, backend: str = "fake") -> Iterator[None]:
    """Be rank ``rank`` of ``world_size`` ranks, of which the others do exactly what this one does.

    Engines that ask are told that the group's backend is ``backend``: over gloo FSDP2 has collectives of our own.

    The process must have no process group yet; it has none afterwards.
    """
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=fake_store())
    functions: dict[str, Any] = {
        "all_gather_object": _all_gather_object,
        "broadcast_object_list": _broadcast_object_list,
        "all_reduce": _finished(dist.all_reduce),
        "get_backend": lambda *_: backend,
    }
    try:
        with collectives_replaced(functions):
            yield
    finally:
        dist.destroy_process_group()
        forget_meshes()


def _all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    """The fake group would unpickle memory that nobody has written."""
    object_list[:] = [obj] * len(object_list)


def _broadcast_object_list(object_list: list[Any], *args: Any, **kwargs: Any) -> None:
    pass


class GlooBuffers(TorchDispatchMode):
    """Takes the memory that gloo takes: its reduce_scatter is an all_reduce of a copy of what goes in (torch 2.13)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not REDUCE_SCATTER_BASE:
            return func(*args, **(kwargs or {}))
        copy = torch.empty_like(args[1])
        try:
            return func(*args, **(kwargs or {}))
        finally:
            del copy


FILL, READ = torch.ops.aten.fill_.Scalar, LOCAL_SCALAR_DENSE


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
        storage, place = storage_key(args[0].untyped_storage()), args[0].storage_offset()
        if func is READ and current_graph_task_id() != -1:
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
