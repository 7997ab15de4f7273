"""Tensors whose elements do not lie in memory in the order of their indices: ``channels_last``, transposed, strided.

FSDP1 puts such a parameter into its flat parameter as it lies in memory (``FlatParamHandle.flatten_tensors``: by
``as_strided``, torch 2.13), so that a unit computes with the strides of the bare model. What is read from a flat
parameter, and written to it, has to go the same way.
"""

from __future__ import annotations

from torch import Tensor

from fsshard.complex_params import order_in_memory

__all__ = ["Order", "flattened", "memory_order", "packed"]

Order = tuple[int, ...]
"""The dimensions of a tensor, the one with the widest strides first: permuted so, it is contiguous."""


def memory_order(tensor: Tensor) -> Order | None:
    """The order in which the dimensions of a packed tensor lie in memory; None where it is that of its indices.

    Args:
        tensor: its elements have one place each, without gaps; see :func:`packed`.
    """
    order = order_in_memory(tensor)
    wide = [dim for dim in order if tensor.shape[dim] != 1]  # the strides of the others mean nothing here
    return None if wide == sorted(wide) else order


def packed(tensor: Tensor) -> Tensor:
    """The tensor itself if its elements lie in memory without gaps, else a copy with its dimensions in that order.

    FSDP1 takes as many elements of the memory as the parameter has, from its first one on: of what is a slice of a
    larger tensor, the wrong ones (torch 2.13).
    """
    order = memory_order(tensor)
    return tensor if (tensor if order is None else tensor.permute(order)).is_contiguous() else tensor.clone()


def flattened(tensor: Tensor, order: Order | None) -> Tensor:
    """The elements in the order of the memory of a tensor with ``order``; over the same memory where that is its own.

    The inverse is ``as_strided`` with the strides of a packed tensor.
    """
    return (tensor if order is None else tensor.permute(order)).reshape(-1)
