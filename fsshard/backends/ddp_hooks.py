"""Hooks that average DDP's buckets in the order of :mod:`fsshard.comm.tree`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsshard.comm import tree

TensorFuture = torch.futures.Future[Tensor]


class BucketSums:
    """The state of :func:`reduce_bucket`: how gradients are sent, and the bucket that is on its way.

    Args:
        group: the ranks.
        reduce_dtypes: by parameter the dtype in which its gradient is sent and added up; None is its own.
    """

    def __init__(self, group: dist.ProcessGroup, reduce_dtypes: Mapping[nn.Parameter, torch.dtype | None]) -> None:
        self.group = group
        self.reduce_dtypes = reduce_dtypes
        self._begun: list[_PartOfBucket] = []
        self._future: TensorFuture | None = None
        self._bucket: Tensor | None = None

    def begin(self, parts: list[_PartOfBucket], bucket: Tensor) -> TensorFuture:
        """Send a bucket; return the future of its mean."""
        self._begun = parts
        self._bucket = bucket
        self._future = TensorFuture(devices=[bucket.device] if bucket.is_cuda else None)
        for part in parts:
            part.begin(self.group)
        return self._future

    def go_on(self) -> None:
        """Add up the bucket that has been sent, and gather its sums."""
        # One bucket at a time needs its memory twice. It was on its way while the gradients of the next were computed.
        future = self._future
        bucket = self._bucket
        self._future = None
        self._bucket = None
        if future is None or bucket is None:
            return
        gathered = []
        for part in self._begun:
            for work in part.add():
                gathered.append(work.get_future())
        finish = functools.partial(_finish, self._begun, bucket, future)
        torch.futures.collect_all(gathered).then(finish)
        self._begun = []

    def drop(self) -> None:
        """Forget a bucket of a backward that broke off."""
        self._future = None
        self._bucket = None
        self._begun = []


def _finish(parts: list[_PartOfBucket], bucket: Tensor, future: TensorFuture, gathered: Any) -> None:
    try:
        gathered.wait()
        for part in parts:
            part.end()
    except Exception as error:
        # Of a collective: DDP raises what its future holds.
        future.set_exception(error)  # type: ignore[arg-type]
        return
    future.set_result(bucket)


class _PartOfBucket:
    """Gradients of one bucket that are sent in one dtype.

    Args:
        gradients: views of the bucket, or the whole of it.
        reduce_dtype: None for their own.
    """

    def __init__(self, gradients: Sequence[Tensor], reduce_dtype: torch.dtype | None) -> None:
        self._gradients = gradients
        self._dtype = reduce_dtype or gradients[0].dtype
        self._sum: tree.AllReduce | None = None

    def sent(self) -> Tensor:
        """Return what this rank sends."""
        whole = self._gradients[0]
        if len(self._gradients) > 1:
            vectors = [gradient.reshape(-1) for gradient in self._gradients]
            whole = torch.cat(vectors)
        return whole.to(self._dtype)

    def begin(self, group: dist.ProcessGroup) -> None:
        # Divided first, so that a sum in float16 does not overflow.
        factor = 1.0 / group.size()
        self._sum = tree.AllReduce(self.sent(), group, factor)

    def add(self) -> list[dist.Work]:
        assert self._sum is not None
        return self._sum.add()

    def end(self) -> None:
        assert self._sum is not None
        sums = self._sum.end()
        if len(self._gradients) == 1:
            (gradient,) = self._gradients
            # A sum in the gradient's own dtype is made in its memory.
            if sums is not gradient:
                gradient.copy_(sums)
            return
        sizes = [gradient.numel() for gradient in self._gradients]
        for gradient, part in zip(self._gradients, sums.split(sizes), strict=True):
            gradient.copy_(part.view(gradient.shape))


def reduce_bucket(state: BucketSums, bucket: dist.GradBucket) -> TensorFuture:
    """Average a bucket over the ranks."""
    if bucket.index() == 0:
        state.drop()
    state.go_on()
    whole = bucket.buffer()
    if whole.layout is not torch.strided:
        done = TensorFuture()
        done.set_result(_mean_of_sparse(whole, state.group))
        return done
    future = state.begin(_parts(state, bucket), whole)
    if bucket.is_last():
        state.go_on()
    return future


def _parts(state: BucketSums, bucket: dist.GradBucket) -> list[_PartOfBucket]:
    """Return what is sent together: all of a bucket, or where it has fp32 units among others, each dtype by itself."""
    gradients: dict[torch.dtype | None, list[Tensor]] = {}
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        dtype = state.reduce_dtypes.get(cast(nn.Parameter, parameter))
        gradients.setdefault(dtype, []).append(gradient)
    if len(gradients) == 1:
        # No copy of what lies together already.
        return [_PartOfBucket([bucket.buffer()], dtype)]
    parts = []
    # Ranks meet in one order.
    for dtype in sorted(gradients, key=str):
        parts.append(_PartOfBucket(gradients[dtype], dtype))
    return parts


def _mean_of_sparse(gradient: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the mean of sparse gradients, which may have other indices on each rank."""
    # DDP divides these in place, where their values can be the very memory of the gradient that the rest of the
    # backward reads: below a sum with an embedding, gradients come out divided twice, silently (torch 2.13).
    own = gradient.coalesce()
    rows = own.values() * (1.0 / group.size())
    counts_of_ranks = torch.zeros(group.size(), dtype=torch.int64, device=gradient.device)
    counts_of_ranks[group.rank()] = len(rows)
    dist.all_reduce(counts_of_ranks, group=group)
    counts: list[int] = counts_of_ranks.tolist()
    places_of_ranks = _gather_rows(own.indices().T, counts, group)
    rows_of_ranks = _gather_rows(rows, counts, group)
    parts = []
    for places, values in zip(places_of_ranks, rows_of_ranks, strict=True):
        part = torch.sparse_coo_tensor(
            places.T,
            values,
            gradient.shape,
            is_coalesced=True,
        )
        parts.append(part)
    # In the order of the tree, as everything that is added up over ranks.
    return tree.add_up(parts).coalesce()


def _gather_rows(rows: Tensor, counts: list[int], group: dist.ProcessGroup) -> list[Tensor]:
    """Return the rows of every rank, which may have another number of them. Collective."""
    sent = rows.new_zeros(max(counts), *rows.shape[1:])
    sent[: len(rows)] = rows
    received = [torch.empty_like(sent) for _ in counts]
    dist.all_gather(received, sent, group=group)
    return [padded[:count] for padded, count in zip(received, counts, strict=True)]


def reduce_fake(state: BucketSums, bucket: dist.GradBucket) -> TensorFuture:
    """Send and receive as :func:`reduce_bucket` does, where there are no other ranks and no numbers."""
    buffer = bucket.buffer()
    for part in _parts(state, bucket):
        tree.all_reduce(part.sent(), state.group)
    future: TensorFuture = torch.futures.Future()
    future.set_result(buffer)
    return future


# DDP compares annotations with classes and not with their names ("bucket annotation should be dist.GradBucket", 2.13).
for _hook in (reduce_bucket, reduce_fake):
    _hook.__annotations__["bucket"] = dist.GradBucket
    _hook.__annotations__["return"] = TensorFuture
