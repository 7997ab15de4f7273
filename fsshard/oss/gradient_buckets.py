"""Sends gradients to their owners: flat buckets of bytes, sorted by owner, one ``all_to_all_single`` each.

A bucket holds, for every rank, the gradients that this rank owns: its *segment*. A rank packs the segments of the
others and keeps its own gradients where autograd put them; it receives one copy of its own segment from every other
rank. Bytes and not numbers, so that parameters of several dtypes share a bucket (FairScale 0.4.13 refuses them:
"Different types for the bucket"), and complex ones are sent as pairs of real ones, which every backend can send.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsshard.complex_params.pairs import real_dtype
from fsshard.oss.collectives import seen_waiting
from fsshard.oss.gradient_marks import carried, is_common, is_sent, mark_common, mark_sent
from fsshard.torch_private.tensors import foreach_add_, foreach_copy_, foreach_mul, foreach_mul_

__all__ = ["GradientBucket", "Slot", "in_buckets"]

_ALIGNMENT = 16  # of a segment, in bytes: the largest element there is


@dataclass
class _OwnedPart:
    """What one rank owns of a bucket: gradients, widest elements first so that none needs padding, then flags.

    A flag is a byte a parameter: the sender's backward reached it. DDP keeps such a map to leave alone the gradients
    of parameters that no rank used.
    """

    indices: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    regions: list[tuple[torch.dtype, int, int]] = field(default_factory=list)  # runs of one real dtype
    flags: int = 0
    size: int = 0

    @classmethod
    def of(
        cls, indices: Iterable[int], parameters: Sequence[nn.Parameter], reduce_dtype: torch.dtype | None
    ) -> _OwnedPart:
        def key(index: int) -> tuple[int, str, int]:
            dtype = reduce_dtype or parameters[index].dtype
            return -real_dtype(dtype).itemsize, str(real_dtype(dtype)), -dtype.itemsize

        segment = cls(sorted(indices, key=key))
        for index in segment.indices:
            dtype, start = reduce_dtype or parameters[index].dtype, segment.size
            segment.places.append(start)
            segment.size = end = start + parameters[index].numel() * dtype.itemsize
            real = real_dtype(dtype)
            if segment.regions and segment.regions[-1][0] == real:
                segment.regions[-1] = (real, segment.regions[-1][1], end)
            else:
                segment.regions.append((real, start, end))
        segment.regions = [region for region in segment.regions if region[2] > region[1]]
        if segment.indices:
            segment.flags = segment.size
            segment.size += len(segment.indices)
            segment.size += -segment.size % _ALIGNMENT
        return segment

    def views(self, flat: Tensor, parameters: Sequence[nn.Parameter], reduce_dtype: torch.dtype | None) -> list[Tensor]:
        """A view of each gradient, in the parameter's own layout."""
        return [
            _view(flat, place, parameters[i], reduce_dtype) for i, place in zip(self.indices, self.places, strict=True)
        ]


def _view(flat: Tensor, start: int, parameter: nn.Parameter, reduce_dtype: torch.dtype | None) -> Tensor:
    dtype = reduce_dtype or parameter.dtype
    part = flat[start : start + parameter.numel() * dtype.itemsize].view(dtype)
    if _fills_its_memory(parameter):
        return part.as_strided(parameter.size(), parameter.stride())
    return part.view(parameter.size())


def _fills_its_memory(tensor: Tensor) -> bool:
    """Whether its elements lie side by side, in whichever order of dimensions (channels last, transposed)."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


class Slot:
    """Memory that buckets take turns in, so that not all gradients are twice in memory."""

    def __init__(self, sent: int, received: int, device: torch.device) -> None:
        self.sent = torch.zeros(sent, dtype=torch.uint8, device=device)
        self.received = torch.zeros(received, dtype=torch.uint8, device=device)


class GradientBucket:
    """Some parameters whose gradients are sent together.

    Attributes:
        indices: the parameters' places in the list that all buckets share.
        waiting: how many of them have no gradient yet in the backward pass that runs.
        reduced: those whose gradient here, if there is one, is a mean, or was sent and kept.
    """

    def __init__(
        self,
        indices: list[int],
        owners: Sequence[int],
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        reduce_dtype: torch.dtype | None,
        keep: bool,
        rounds_first: bool = False,
    ) -> None:
        self.indices, self.group = indices, group
        self._keep = keep
        self.rank, self.world_size = group.rank(), group.size()
        self.waiting = len(indices)
        self._rounds_first = rounds_first
        self._reduce_dtype = reduce_dtype  # in which dtype gradients travel and are added up; None is their own
        self._parameters = parameters
        self._segments = [
            _OwnedPart.of([i for i in indices if owners[i] == rank], parameters, self._reduce_dtype)
            for rank in range(self.world_size)
        ]
        mine = self._segments[self.rank]
        self.mine = [parameters[i] for i in mine.indices]
        self.reduced: set[int] = set()
        self._theirs = {i for i in indices if keep and owners[i] != self.rank}
        self._sizes = [0 if rank == self.rank else s.size for rank, s in enumerate(self._segments)]
        self._sizes_received = [0 if rank == self.rank else mine.size for rank in range(self.world_size)]
        self.sent_bytes, self.received_bytes = sum(self._sizes), sum(self._sizes_received)
        self._work: Any = None

    def use(self, slot: Slot) -> None:
        """Take memory, once and for all."""
        self._sent, self._received = slot.sent[: self.sent_bytes], slot.received[: self.received_bytes]
        self._outgoing: list[tuple[list[int], list[Tensor], Tensor]] = []
        start = 0
        for size, segment in zip(self._sizes, self._segments, strict=True):
            flat = self._sent[start : start + size]
            start += size
            if size:
                views = segment.views(flat, self._parameters, self._reduce_dtype)
                flags = flat[segment.flags : segment.flags + len(segment.indices)]
                self._outgoing.append((segment.indices, views, flags))
        mine = self._segments[self.rank]
        received: list[Tensor] = list(self._received.split(mine.size)) if mine.size else []
        self._parts = [mine.views(part, self._parameters, self._reduce_dtype) for part in received]
        self._regions = [[part[a:b].view(dtype) for dtype, a, b in mine.regions] for part in received]
        self._flags = [part[mine.flags : mine.flags + len(mine.indices)] for part in received]

    # ------------------------------------------------------------------------------------------ sending

    def launch(self, arrived: set[int]) -> None:
        """Send what other ranks own; what was sent stays only if it is to be kept."""
        for indices, views, flags in self._outgoing:
            self._pack(indices, views)
            used = [i in arrived for i in indices]
            if all(used):
                flags.fill_(1)
            else:
                flags.copy_(torch.tensor(used, dtype=torch.uint8))
        self._used = [i in arrived for i in self._segments[self.rank].indices]
        self._work = dist.all_to_all_single(
            self._received, self._sent, self._sizes_received, self._sizes, group=self.group, async_op=True
        )

    def _pack(self, indices: list[int], views: list[Tensor]) -> None:
        into: list[Tensor] = []
        gradients: list[Tensor] = []
        for i, view in zip(indices, views, strict=True):
            parameter = self._parameters[i]
            gradient = parameter.grad
            if gradient is None or is_sent(gradient):
                view.zero_()
                continue
            into.append(view)
            gradients.append(gradient.to_dense() if gradient.layout is not torch.strided else gradient)
            if self._keep:
                mark_sent(gradient)
            else:
                parameter.grad = None
        if not into:
            return
        foreach_copy_(into, gradients if self._reduce_dtype is None else self._parts_of_mean(gradients))

    def _parts_of_mean(self, gradients: list[Tensor]) -> list[Tensor]:
        """Of this rank, in the dtype in which they are added up.

        FairScale's ``reduce_fp16`` divides and then rounds. DDP's own hooks round and then divide, which differs where
        a part is subnormal in float16, or too large for it before it is divided.
        """
        scale = 1.0 / self.world_size
        if self._rounds_first:
            return list(foreach_mul([gradient.to(self._reduce_dtype) for gradient in gradients], scale))
        return [gradient.to(self._reduce_dtype) for gradient in foreach_mul(gradients, scale)]

    # ------------------------------------------------------------------------------------------ receiving

    def finish(self) -> None:
        """Wait, and put the mean over the ranks into the gradients that this rank owns."""
        work, self._work = self._work, None
        if work is None:
            return
        with seen_waiting(self.group, "the reduction of gradients"):
            work.wait()
        self.reduced = self._theirs
        if not self.mine:
            return
        chosen = self._to_reduce()
        self.reduced = self._theirs.union(self._segments[self.rank].indices[i] for i in chosen)
        if not chosen:
            return
        local: list[Tensor] = []
        carry: list[tuple[int, Tensor]] = []
        for i in chosen:
            gradient, common = self._local(self.mine[i])
            local.append(gradient)
            if common is not None:
                carry.append((i, common))
        (self._add_in_reduce_dtype if self._reduce_dtype is not None else self._add)(chosen, local, carry)
        for gradient in local:
            mark_common(gradient)

    def _to_reduce(self) -> list[int]:
        """The own parameters that any rank has used. Looks at what others sent only where this rank used none."""
        if all(self._used):
            return list(range(len(self.mine)))
        others = torch.stack(self._flags).amax(0).tolist()
        return [i for i, used in enumerate(self._used) if used or others[i]]

    def _local(self, parameter: nn.Parameter) -> tuple[Tensor, Tensor | None]:
        """This rank's part, which may be changed in place, and the mean that every rank adds its part to."""
        gradient = parameter.grad
        if gradient is None:
            parameter.grad = gradient = torch.zeros_like(parameter)
            return gradient, None
        if is_common(gradient):  # and no part of this rank's
            common = gradient
            parameter.grad = gradient = torch.zeros_like(common) if self._reduce_dtype is not None else common.clone()
            return gradient, common
        common_or_none = carried(gradient)
        if gradient.layout is not torch.strided or gradient.requires_grad or gradient.is_conj():
            gradient = gradient.detach().to_dense().resolve_conj().clone()
            parameter.grad = gradient
        if common_or_none is not None and self._reduce_dtype is None:
            gradient.add_(common_or_none)
        return gradient, common_or_none

    def _add(self, chosen: list[int], local: list[Tensor], carry: list[tuple[int, Tensor]]) -> None:
        """DDP's arithmetic: each rank's sum times 1/N, then added up in the order of ranks.

        Without ``no_sync`` a second backward adds to a mean that all ranks have under DDP; here its owner alone has
        it, and adds it to the part of each rank.
        """
        scale = 1.0 / self.world_size
        for parts, regions in zip(self._parts, self._regions, strict=True):
            if carry:
                foreach_add_([parts[i] for i, _ in carry], [common for _, common in carry])
            for region in regions:
                region.mul_(scale)
        own = [torch.view_as_real(g) if g.is_complex() else g for g in local]
        foreach_mul_(own, scale)
        for first, *rest in self._sums():
            views = self._summed(first, rest, chosen)
            foreach_add_(own, [torch.view_as_real(v) if v.is_complex() else v for v in views])

    def _summed(self, first: int, rest: list[int], chosen: list[int]) -> list[Tensor]:
        for other in rest:
            for region, added in zip(self._regions[first], self._regions[other], strict=True):
                region.add_(added)
        return [self._parts[first][i] for i in chosen]

    def _sums(self) -> list[list[int]]:
        """Which received parts are added up before they are added to this rank's own: all of lower ranks."""
        lower = [list(range(self.rank))] if self.rank else []
        return lower + [[r] for r in range(self.rank, self.world_size - 1)]

    def _add_in_reduce_dtype(self, chosen: list[int], local: list[Tensor], carry: list[tuple[int, Tensor]]) -> None:
        own = self._parts_of_mean(local)
        for first, *rest in self._sums():
            foreach_add_(own, self._summed(first, rest, chosen))
        foreach_copy_(local, own)
        by_index = dict(zip(chosen, local, strict=True))
        for i, common in carry:
            by_index[i].add_(common)


def in_buckets(indices: Iterable[int], parameters: Sequence[nn.Parameter], elements: int, most: int) -> list[list[int]]:
    """Cut a list of parameters into runs.

    Args:
        indices: the parameters, in the order in which their gradients come.
        parameters: what the indices mean.
        elements: at most so many numbers a bucket, if positive.
        most: and at most so many bytes. A larger parameter has a bucket of its own.
    """
    runs: list[list[int]] = []
    count = size = 0
    device = None
    for i in indices:
        p = parameters[i]
        bytes_ = p.numel() * p.element_size()
        full = (elements > 0 and count + p.numel() > elements) or size + bytes_ > most or p.device != device
        if not runs or full:
            runs.append([])
            count = size = 0
            device = p.device
        runs[-1].append(i)
        count, size = count + p.numel(), size + bytes_
    return runs
