"""Send gradients to their owners: flat buckets, sorted by owner, one ``all_to_all_single`` each.

A bucket holds, for every rank, the gradients that this rank owns: its *segment*. A rank packs the segments of the
others and keeps its own gradients where autograd put them; it receives one copy of its own segment from every other
rank. A bucket has one real dtype, in which complex gradients are pairs; all are sent as bytes, which every backend can.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsshard.comm import tree
from fsshard.comm.watchdog import seen_waiting
from fsshard.complex_params.pairs import real_dtype
from fsshard.oss.collectives import as_dense
from fsshard.oss.partition import dense_strides
from fsshard.torch_private.tensors import foreach_add_, foreach_copy_, foreach_mul, foreach_mul_

_ALIGNMENT = 16  # of a segment, in bytes: the largest element there is


class _Segment:
    """A rank's own part of a bucket: gradients, complex ones first so that their pairs begin at even places.

    Behind them lies a flag for each, a byte: the sender's backward reached it. What no rank used is left alone.
    """

    def __init__(self, indices: Iterable[int], parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        self.indices = sorted(indices, key=lambda i: not parameters[i].is_complex())
        numels = [parameters[i].numel() * (1 + parameters[i].is_complex()) for i in self.indices]
        self.places = [0, *itertools.accumulate(numels)]  # where each gradient begins, in numbers; and the end
        self.gradients = self.places.pop() * dtype.itemsize  # bytes of all of them
        size = self.gradients + len(self.indices)
        self.size = size + -size % _ALIGNMENT  # bytes up to where the next segment may begin

    def parts(
        self, data: Tensor, parameters: Sequence[nn.Parameter], dtype: torch.dtype
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """Return views of a segment's bytes: its numbers, each gradient in its parameter's own layout, the flags."""
        flat = data[: self.gradients].view(dtype)
        found = []
        for i, place in zip(self.indices, self.places, strict=True):
            parameter = parameters[i]
            part = flat[place : place + parameter.numel() * (1 + parameter.is_complex())]
            if parameter.is_complex():
                part = torch.view_as_complex(part.view(-1, 2))
            found.append(part.as_strided(parameter.size(), dense_strides(parameter)))
        return flat, found, data[self.gradients : self.gradients + len(self.indices)]


def share_memory(buckets: Sequence[GradientBucket], device: torch.device) -> None:
    """Give buckets memory that they take turns in, so that not all gradients are twice in memory."""
    sent, received = max(b.sent_bytes for b in buckets), max(b.received_bytes for b in buckets)
    memory = [torch.zeros(size, dtype=torch.uint8, device=device) for size in (sent, received)]
    for bucket in buckets:
        bucket.use(*memory)


class GradientBucket:
    """Some parameters of one device, and of one real dtype on the way, whose gradients are sent together.

    Attributes:
        indices: the parameters' places in the list that all buckets share.
        waiting: how many of them have no gradient yet in the backward pass that runs.
    """

    def __init__(
        self,
        indices: list[int],
        owners: Sequence[int],
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        reduce_dtype: torch.dtype | None,
        rounds_first: bool = False,
    ) -> None:
        self.indices, self.group = indices, group
        self.rank, self.world_size = group.rank(), group.size()
        self._scale = 1.0 / self.world_size
        self.waiting = len(indices)
        self._rounds_first = rounds_first
        self._reduce_dtype = reduce_dtype  # in which dtype gradients travel and are added up; None is their own
        self._dtype = reduce_dtype or real_dtype(parameters[indices[0]].dtype)
        self._parameters = parameters
        self._segments = [
            _Segment([i for i in indices if owners[i] == rank], parameters, self._dtype)
            for rank in range(self.world_size)
        ]
        mine = self._segments[self.rank]
        self.mine = [parameters[i] for i in mine.indices]
        self._sizes = [0 if rank == self.rank else s.size for rank, s in enumerate(self._segments)]
        self._sizes_received = [0 if rank == self.rank else mine.size for rank in range(self.world_size)]
        self.sent_bytes, self.received_bytes = sum(self._sizes), sum(self._sizes_received)
        self._work: Any = None

    def use(self, sent: Tensor, received: Tensor) -> None:
        """Take memory, once and for all."""
        self._sent, self._received = sent[: self.sent_bytes], received[: self.received_bytes]
        self._outgoing: list[tuple[list[int], list[Tensor], Tensor]] = []
        for part, segment in zip(self._sent.split(self._sizes), self._segments, strict=True):
            if part.numel():
                _, views, flags = segment.parts(part, self._parameters, self._dtype)
                self._outgoing.append((segment.indices, views, flags))
        mine = self._segments[self.rank]
        received = self._received.split(mine.size) if mine.size else []
        found = [mine.parts(part, self._parameters, self._dtype) for part in received]
        self._numbers = [numbers for numbers, _, _ in found]
        self._parts = [views for _, views, _ in found]
        self._flags = [flags for _, _, flags in found]

    # ------------------------------------------------------------------------------------------ sending

    def launch(self, arrived: set[int]) -> None:
        """Send what other ranks own, and drop it here."""
        self._used = [i in arrived for i in self._segments[self.rank].indices]
        for indices, views, flags in self._outgoing:
            self._pack(indices, views)
            used = [i in arrived for i in indices]
            if all(used):
                flags.fill_(1)
            else:
                flags.copy_(torch.tensor(used, dtype=torch.uint8))
        self._work = dist.all_to_all_single(
            self._received, self._sent, self._sizes_received, self._sizes, group=self.group, async_op=True
        )

    def _pack(self, indices: list[int], views: list[Tensor]) -> None:
        into: list[Tensor] = []
        gradients: list[Tensor] = []
        for i, view in zip(indices, views, strict=True):
            gradient, self._parameters[i].grad = self._parameters[i].grad, None
            if gradient is None:
                view.zero_()
                continue
            into.append(view)
            gradients.append(as_dense(gradient))
        if into:
            foreach_copy_(into, gradients if self._reduce_dtype is None else self._parts_of_mean(gradients))

    def _parts_of_mean(self, gradients: list[Tensor]) -> list[Tensor]:
        """Return this rank's gradients divided by the number of ranks, in the dtype in which they are added up."""
        # FairScale's reduce_fp16 divides and then rounds. DDP's own hooks round and then divide, which differs where a
        # part is subnormal in float16, or too large for it before it is divided.
        scale = self._scale
        if self._rounds_first:
            return list(foreach_mul([gradient.to(self._reduce_dtype) for gradient in gradients], scale))
        return [gradient.to(self._reduce_dtype) for gradient in foreach_mul(gradients, scale)]

    # ------------------------------------------------------------------------------------------ receiving

    def finish(self, take_mean: Callable[[int], Tensor | None]) -> list[int]:
        """Wait, put the mean over the ranks into the gradients that this rank owns, and return whose these are.

        ``take_mean`` takes an earlier mean, to which every rank's part is to be added, out of ``grad``.
        """
        work, self._work = self._work, None
        if work is None:
            return []
        with seen_waiting(self.group, "the reduction of gradients"):
            work.wait()
        chosen = self._to_reduce() if self.mine else []
        if not chosen:
            return []
        indices = self._segments[self.rank].indices
        means = {i: mean for i in chosen if (mean := take_mean(indices[i])) is not None}
        local = [self._local(self.mine[i]) for i in chosen]
        (self._add_in_reduce_dtype if self._reduce_dtype is not None else self._add)(chosen, local, means)
        return [indices[i] for i in chosen]

    def _to_reduce(self) -> list[int]:
        """Return the own parameters that any rank has used; look at others' flags only where this one used none."""
        if all(self._used):
            return list(range(len(self.mine)))
        others = torch.stack(self._flags).amax(0).tolist()
        return [i for i, used in enumerate(self._used) if used or others[i]]

    def _local(self, parameter: nn.Parameter) -> Tensor:
        """Return this rank's part, which may be changed in place."""
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        elif gradient.layout is not torch.strided or gradient.requires_grad or gradient.is_conj():
            gradient = as_dense(gradient.detach()).resolve_conj().clone()
        parameter.grad = gradient
        return gradient

    def _add(self, chosen: list[int], local: list[Tensor], means: dict[int, Tensor]) -> None:
        """Add each rank's sum times 1/N, in the order of :mod:`fsshard.comm.tree`."""
        # Without no_sync a second backward adds to a mean that all ranks have under DDP; here its owner alone has it,
        # and adds it to the part of each rank.
        if means:
            own_parts = [gradient for i, gradient in zip(chosen, local, strict=True) if i in means]
            for parts in (own_parts, *([received[i] for i in means] for received in self._parts)):
                foreach_add_(parts, list(means.values()))
        for numbers in self._numbers:
            numbers.mul_(self._scale)
        own = [torch.view_as_real(g) if g.is_complex() else g for g in local]
        foreach_mul_(own, self._scale)
        for views in self._sums(chosen):
            foreach_add_(own, [torch.view_as_real(v) if v.is_complex() else v for v in views])

    def _sums(self, chosen: list[int]) -> Iterator[list[Tensor]]:
        """Yield sums of other ranks' parts of the chosen parameters, to be added to the own part in turn."""
        for block in tree.siblings(self.rank, self.world_size):
            # What this rank has received lacks its own place.
            places = [rank if rank < self.rank else rank - 1 for rank in block]
            tree.add_up([self._numbers[place] for place in places])
            yield [self._parts[places[0]][i] for i in chosen]

    def _add_in_reduce_dtype(self, chosen: list[int], local: list[Tensor], means: dict[int, Tensor]) -> None:
        own = self._parts_of_mean(local)
        for views in self._sums(chosen):
            foreach_add_(own, views)
        foreach_copy_(local, own)
        for i, gradient in zip(chosen, local, strict=True):
            if i in means:
                gradient.add_(means[i])
