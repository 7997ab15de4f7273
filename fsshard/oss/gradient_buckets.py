"""Send gradients to their owners: flat buckets, sorted by owner, one ``all_to_all_single`` each.

A bucket holds, for every rank, the gradients that this rank owns: its *segment*. A rank packs the segments of the
others and keeps its own gradients where autograd put them; it receives one copy of its own segment from every other
rank. A bucket has one real dtype, in which complex gradients are pairs; all are sent as bytes, which every backend can.
"""

from __future__ import annotations

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

# Of a segment, in bytes: the largest element there is.
_ALIGNMENT = 16


class _Segment:
    """A rank's own part of a bucket: gradients, and behind them a flag for each, a byte.

    A flag says that the sender's backward reached the parameter. What no rank used is left alone.
    """

    def __init__(
        self,
        indices: Iterable[int],
        parameters: Sequence[nn.Parameter],
        dtype: torch.dtype,
    ) -> None:
        # Complex ones come first, so that their pairs begin at even places.
        self.indices = sorted(indices, key=lambda index: not parameters[index].is_complex())
        self._reals = [_reals(parameters[index]) for index in self.indices]
        # Bytes of all gradients, and those up to where the next segment may begin.
        self.gradients = sum(self._reals) * dtype.itemsize
        self._end = self.gradients + len(self.indices)
        self.size = self._end + -self._end % _ALIGNMENT

    def parts(
        self,
        data: Tensor,
        parameters: Sequence[nn.Parameter],
        dtype: torch.dtype,
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """Return views of a segment's bytes: its numbers, each gradient in its parameter's own layout, the flags."""
        numbers = data[: self.gradients].view(dtype)
        views = []
        parts = numbers.split(self._reals)
        for index, part in zip(self.indices, parts, strict=True):
            parameter = parameters[index]
            if parameter.is_complex():
                part = torch.view_as_complex(part.view(-1, 2))
            views.append(part.as_strided(parameter.size(), dense_strides(parameter)))
        return numbers, views, data[self.gradients : self._end]


def _reals(parameter: Tensor) -> int:
    """Return how many real numbers a gradient is."""
    numel = parameter.numel()
    if parameter.is_complex():
        return 2 * numel
    return numel


def _as_reals(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return views of tensors, complex ones as pairs of reals."""
    return [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]


def share_memory(buckets: Sequence[GradientBucket], device: torch.device) -> None:
    """Give buckets memory that they take turns in, so that not all gradients are twice in memory."""
    sent = max(bucket.sent_bytes for bucket in buckets)
    received = max(bucket.received_bytes for bucket in buckets)
    outgoing = torch.zeros(sent, dtype=torch.uint8, device=device)
    incoming = torch.zeros(received, dtype=torch.uint8, device=device)
    for bucket in buckets:
        bucket.use(outgoing, incoming)


Outgoing = tuple[list[int], list[Tensor], Tensor]
"""Of a segment that is sent: places of parameters, where each gradient goes, and the flags."""


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
        self.indices = indices
        self.group = group
        self.rank = group.rank()
        self.world_size = group.size()
        self._scale = 1.0 / self.world_size
        self.waiting = len(indices)
        self._rounds_first = rounds_first
        # In which dtype gradients travel and are added up; None is their own.
        self._reduce_dtype = reduce_dtype
        self._dtype = reduce_dtype or real_dtype(parameters[indices[0]].dtype)
        self._parameters = parameters
        self._segments = []
        for rank in range(self.world_size):
            owned = [index for index in indices if owners[index] == rank]
            self._segments.append(_Segment(owned, parameters, self._dtype))
        self._own = self._segments[self.rank]
        # A rank sends its own segment to nobody, and receives one from every other rank.
        self._sizes = [segment.size for segment in self._segments]
        self._sizes_received = [self._own.size] * self.world_size
        self._sizes[self.rank] = 0
        self._sizes_received[self.rank] = 0
        self.sent_bytes = sum(self._sizes)
        self.received_bytes = sum(self._sizes_received)
        self._work: Any = None

    def use(self, sent: Tensor, received: Tensor) -> None:
        """Take memory, once and for all."""
        parameters = self._parameters
        self._sent = sent[: self.sent_bytes]
        self._received = received[: self.received_bytes]
        self._outgoing: list[Outgoing] = []
        parts = self._sent.split(self._sizes)
        for part, segment in zip(parts, self._segments, strict=True):
            if part.numel():
                _, views, flags = segment.parts(part, parameters, self._dtype)
                self._outgoing.append((segment.indices, views, flags))
        # Of each other rank, in their order: its numbers, the same by parameter, and its flags.
        self._numbers: list[Tensor] = []
        self._parts: list[list[Tensor]] = []
        self._flags: list[Tensor] = []
        if not self._own.size:
            return
        for part in self._received.split(self._own.size):
            numbers, views, flags = self._own.parts(part, parameters, self._dtype)
            self._numbers.append(numbers)
            self._parts.append(views)
            self._flags.append(flags)

    # ------------------------------------------------------------------------------------------ sending

    def launch(self, arrived: set[int]) -> None:
        """Send what other ranks own, and drop it here."""
        self._used = [index in arrived for index in self._own.indices]
        for indices, views, flags in self._outgoing:
            self._pack(indices, views)
            used = [index in arrived for index in indices]
            if all(used):
                flags.fill_(1)
            else:
                flags.copy_(torch.tensor(used, dtype=torch.uint8))
        self._work = dist.all_to_all_single(
            self._received, self._sent, self._sizes_received, self._sizes, group=self.group, async_op=True
        )

    def _pack(
        self,
        indices: list[int],
        views: list[Tensor],
    ) -> None:
        targets = []
        gradients = []
        for index, view in zip(indices, views, strict=True):
            parameter = self._parameters[index]
            gradient = parameter.grad
            parameter.grad = None
            if gradient is None:
                view.zero_()
                continue
            targets.append(view)
            gradients.append(as_dense(gradient))
        if not targets:
            return
        if self._reduce_dtype is not None:
            gradients = self._parts_of_mean(gradients)
        foreach_copy_(targets, gradients)

    def _parts_of_mean(self, gradients: list[Tensor]) -> list[Tensor]:
        """Return this rank's gradients divided by the number of ranks, in the dtype in which they are added up."""
        # FairScale's reduce_fp16 divides and then rounds. DDP's own hooks round and then divide, which differs where a
        # part is subnormal in float16, or too large for it before it is divided.
        dtype = self._reduce_dtype
        if self._rounds_first:
            rounded = [gradient.to(dtype) for gradient in gradients]
            return list(foreach_mul(rounded, self._scale))
        scaled = foreach_mul(gradients, self._scale)
        return [part.to(dtype) for part in scaled]

    # ------------------------------------------------------------------------------------------ receiving

    def finish(self, take_mean: Callable[[int], Tensor | None], unrounded: dict[int, Tensor]) -> list[int]:
        """Wait, put the mean over the ranks into the gradients that this rank owns, and return whose these are.

        Args:
            take_mean: takes an earlier mean, to which every rank's part is to be added, out of ``grad``.
            unrounded: gets the earlier means that are to be added last, since they would be rounded once more.
        """
        work = self._work
        self._work = None
        # It was finished before, when another bucket took its memory.
        if work is None:
            return []
        with seen_waiting(self.group, "the reduction of gradients"):
            work.wait()
        own = self._own.indices
        if not own:
            return []
        chosen = self._to_reduce()
        if not chosen:
            return []
        means = {}
        for place in chosen:
            mean = take_mean(own[place])
            if mean is not None:
                means[place] = mean
        local = []
        for place in chosen:
            parameter = self._parameters[own[place]]
            local.append(self._local(parameter))
        if self._reduce_dtype is None:
            self._add(chosen, local, means)
        else:
            self._add_in_reduce_dtype(chosen, local)
            for place, mean in means.items():
                unrounded[own[place]] = mean
        return [own[place] for place in chosen]

    def _to_reduce(self) -> list[int]:
        """Return the places of the own parameters that any rank has used.

        Others' flags are looked at only where this one used none: that waits for the device.
        """
        if all(self._used):
            return list(range(len(self._used)))
        others = torch.stack(self._flags).amax(0).tolist()
        return [place for place, used in enumerate(self._used) if used or others[place]]

    def _local(self, parameter: nn.Parameter) -> Tensor:
        """Return this rank's part, which may be changed in place."""
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        elif gradient.layout is not torch.strided or gradient.requires_grad or gradient.is_conj():
            gradient = as_dense(gradient.detach()).resolve_conj().clone()
        parameter.grad = gradient
        return gradient

    def _add(
        self,
        chosen: list[int],
        local: list[Tensor],
        means: dict[int, Tensor],
    ) -> None:
        """Add each rank's sum times 1/N, in the order of :mod:`fsshard.comm.tree`."""
        # Without no_sync a second backward adds to a mean that all ranks have under DDP; here its owner alone has it,
        # and adds it to the part of each rank.
        if means:
            earlier = list(means.values())
            of_place = dict(zip(chosen, local, strict=True))
            with_means = [of_place[place] for place in means]
            foreach_add_(with_means, earlier)
            for views in self._parts:
                parts = [views[place] for place in means]
                foreach_add_(parts, earlier)
        for numbers in self._numbers:
            numbers.mul_(self._scale)
        own = _as_reals(local)
        foreach_mul_(own, self._scale)
        for views in self._sums(chosen):
            foreach_add_(own, _as_reals(views))

    def _sums(self, chosen: list[int]) -> Iterator[list[Tensor]]:
        """Yield sums of other ranks' parts of the chosen parameters, to be added to the own part in turn."""
        for block in tree.siblings(self.rank, self.world_size):
            # What this rank has received lacks its own place.
            places = []
            for rank in block:
                places.append(rank if rank < self.rank else rank - 1)
            numbers = [self._numbers[place] for place in places]
            tree.add_up(numbers)
            views = self._parts[places[0]]
            yield [views[place] for place in chosen]

    def _add_in_reduce_dtype(self, chosen: list[int], local: list[Tensor]) -> None:
        own = self._parts_of_mean(local)
        for views in self._sums(chosen):
            foreach_add_(own, views)
        foreach_copy_(local, own)
