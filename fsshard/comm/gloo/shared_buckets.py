"""Averages DDP's buckets over two ranks of one host in shared memory.

Each rank multiplies its gradients by 1/2 on the way into that memory and adds up both, as DDP divides before it adds:
two numbers have one sum, whatever their order, so it is DDP's own bit by bit. A bucket's sum is taken when the next one
begins, so that the other rank need not be as far; the last one's at once.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.comm.gloo.shared_memory import Exchange, Message, announce
from fsshard.comm.watchdog import taking_part
from fsshard.torch_private.dispatch import disable_torch_dispatch

__all__ = ["SharedBuckets", "sum_bucket", "summed"]

Sum = torch.futures.Future[torch.Tensor]


class SharedBuckets:
    """The state of the hook :func:`sum_bucket` of one model."""

    def __init__(self, exchange: Exchange, group: dist.ProcessGroup) -> None:
        """
        Args:
            exchange: of the two ranks.
            group: whose it is; not kept alive.
        """
        self._exchange, self._group = exchange, weakref.ref(group)
        self._peer = 1 - group.rank()
        self._begun: tuple[Message, Tensor, Sum] | None = None

    def average(self, whole: Tensor, *, first: bool, last: bool) -> Sum:
        """Return the average of a bucket over the ranks, in its own memory, now or when the next one begins."""
        group = self._group()
        with taking_part(group, "DDP's gradient reduction, in backward"):
            return self._average(group, whole, first=first, last=last)

    def _average(self, group: dist.ProcessGroup | None, whole: Tensor, *, first: bool, last: bool) -> Sum:
        begun, self._begun = self._begun, None
        if begun is not None and not first:  # else a backward that raised has left it, and its memory is used again
            self._finish(*begun)
        del begun
        if group is not None and whole.layout is not torch.strided:  # of an embedding with sparse gradients, by itself
            return summed(whole * 0.5, group)  # not in place, as in ddp._reduce_sparse
        if group is not None:
            announce("all_reduce", [whole], group)
        message = self._exchange.begin("all_reduce", whole.nbytes)
        with disable_torch_dispatch():  # a tracker would take the segment for memory of the step
            torch.mul(whole, 0.5, out=message.room(whole))
        message.send(whole.nbytes)
        future: Sum = torch.futures.Future()
        if last:
            self._finish(message, whole, future)
        else:
            self._begun = (message, whole, future)
        return future

    def _finish(self, message: Message, whole: Tensor, future: Sum) -> None:
        with disable_torch_dispatch():
            torch.add(message.room(whole), message.view(self._peer, whole), out=whole)
        message.end()
        future.set_result(whole)


def summed(tensor: Tensor, group: dist.ProcessGroup) -> Sum:
    """Sum over the ranks, in place, by the process group."""
    future: Any = dist.all_reduce(tensor, group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])  # type: ignore[no-any-return]


def sum_bucket(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket, as a communication hook of DDP."""
    buckets: SharedBuckets = state
    return buckets.average(bucket.buffer(), first=bucket.index() == 0, last=bucket.is_last())


# DDP compares annotations with classes and not with their names ("bucket annotation should be dist.GradBucket", 2.13).
sum_bucket.__annotations__.update(bucket=dist.GradBucket, **{"return": torch.futures.Future[torch.Tensor]})
