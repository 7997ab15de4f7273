"""Flat buffers: an owner's parameters are views of one buffer, which a step sends in one piece."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

__all__ = ["ParameterBucket", "as_bytes", "dense_strides", "lay_out"]

ALIGNMENT = 16  # elements: 64 bytes of float32, what torch's own allocator gives


class ParameterBucket:
    """The trainable parameters of one owner on one device.

    Attributes:
        buffers: one flat tensor per dtype. FairScale 0.4.13 has one for all, and "Different types for the bucket and
            the param, cannot proceed".
        owner: the rank of the group that updates them.
        as_bytes: the same memory, as what is sent.
        parameters: the views of it.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        device: torch.device,
        owner: int,
    ) -> None:
        self.owner = owner
        self.buffers: dict[torch.dtype, Tensor] = {}
        self.parameters: list[Tensor] = []
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            group = [parameter for parameter in parameters if parameter.dtype == dtype]
            group.sort(key=lambda p: (-_alignment(p.numel()), p.numel()))
            buffer = torch.empty(sum(p.numel() for p in group), dtype=dtype, device=device)
            start = 0
            for parameter in group:
                view = torch.as_strided(buffer, parameter.shape, dense_strides(parameter), start)
                view.copy_(parameter.detach())
                parameter.data = view
                self.parameters.append(parameter)
                start += parameter.numel()
            self.buffers[dtype] = buffer
        self.as_bytes = [as_bytes(buffer) for buffer in self.buffers.values()]

    @property
    def buffer(self) -> Tensor:
        """Return the only buffer, or the one with the most bytes."""
        return max(self.buffers.values(), key=lambda buffer: buffer.nbytes)


def as_bytes(dense: Tensor) -> Tensor:
    """Return a dense tensor's memory as bytes, to be sent; gloo (torch 2.13) on 8-bit floats: "Invalid scalar type"."""
    return dense.detach().as_strided((dense.numel(),), (1,), dense.storage_offset()).view(torch.uint8)


def _alignment(numel: int) -> int:
    """Return the largest power of two, up to ``ALIGNMENT``, that divides ``numel``.

    In falling order of it every parameter begins at a multiple of its own, without a gap. Packed by size, as FairScale
    does, a complex view behind a parameter of odd size fails: "Tensor must have a storage_offset divisible by 2".
    """
    return min(numel & -numel, ALIGNMENT)


def dense_strides(parameter: Tensor) -> tuple[int, ...]:
    """Return its own strides if it is dense in any order of dimensions (channels_last), else contiguous ones."""
    return torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format).stride()


def lay_out(
    parameters: Iterable[Tensor], owners: dict[Tensor, int], before: dict[torch.device, dict[int, ParameterBucket]]
) -> dict[torch.device, dict[int, ParameterBucket]]:
    """Put the trainable parameters into new buckets, by device and owner.

    Args:
        parameters: in an order that all ranks have.
        owners: by parameter.
        before: the buckets of the last time; what is frozen since leaves them for memory of its own.
    """
    left = {parameter for buckets in before.values() for bucket in buckets.values() for parameter in bucket.parameters}
    lists: dict[torch.device, dict[int, list[Tensor]]] = {}
    for parameter in dict.fromkeys(parameters):
        if parameter.requires_grad and parameter.numel():
            lists.setdefault(parameter.device, {}).setdefault(owners[parameter], []).append(parameter)
        elif parameter in left:
            parameter.data = parameter.detach().clone()
    return {
        device: {rank: ParameterBucket(by_owner[rank], device, rank) for rank in sorted(by_owner)}
        for device, by_owner in lists.items()
    }
