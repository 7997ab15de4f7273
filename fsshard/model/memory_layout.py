"""Tensors whose elements are not in index order in memory: ``channels_last``, transposed, strided.

FSDP1 puts such a parameter into its flat parameter as it lies in memory (``FlatParamHandle.flatten_tensors``: by
``as_strided``, torch 2.13), so that a unit computes with the strides of the bare model. What is read from a flat
parameter, and written to it, has to go the same way.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn

from fsshard.complex_params.pairs import order_in_memory
from fsshard.torch_private.tensors import LOCAL_TENSOR, storage_key

Order = tuple[int, ...]
"""The dimensions of a tensor, the one with the widest strides first: permuted so, it is contiguous."""


def memory_order(tensor: Tensor) -> Order | None:
    """Return the order in which the dimensions of a packed tensor lie in memory; None where it is their own."""
    order = order_in_memory(tensor)
    if not order:
        return None
    # The strides of dimensions of one element mean nothing.
    wide = [dim for dim in order if tensor.shape[dim] != 1]
    return None if wide == sorted(wide) else order


def packed(tensor: Tensor) -> Tensor:
    """Return the tensor if its elements lie in memory without gaps, else a copy with its dimensions in that order.

    FSDP1 takes as many elements of the memory as the parameter has, from its first one on: of what is a slice of a
    larger tensor, the wrong ones (torch 2.13).
    """
    if tensor.is_contiguous():
        return tensor
    order = memory_order(tensor)
    if order is not None and tensor.permute(order).is_contiguous():
        return tensor
    return tensor.clone()


def own_memory(modules: Collection[nn.Module]) -> None:
    """Close the gaps of parameters that are slices of a larger tensor; give buffers memory that can be written to.

    Engines hold parameters without gaps, and kernels may sum in another order where there are some: closed under all
    of them alike. Buffers that are expanded, lazily conjugated or negated get memory that holds their numbers.

    torch refuses to broadcast into the first ("more than one element of the written-to tensor refers to a single memory
    location") and to view the others as real numbers (2.13).
    """
    for module in modules:
        for parameter in module._parameters.values():
            if parameter is None or parameter.is_contiguous():
                continue
            values = parameter.detach()
            dense = packed(values)
            if dense is not values:
                parameter.data = dense
    resolved = {}
    for module in modules:
        for key, buffer in module._buffers.items():
            if buffer is None or buffer.is_meta:
                continue
            if shares_memory(buffer) or buffer.is_conj() or buffer.is_neg():
                if id(buffer) not in resolved:
                    resolved[id(buffer)] = buffer.detach().resolve_conj().resolve_neg().contiguous()
                module._buffers[key] = resolved[id(buffer)]


def shares_memory(tensor: Tensor) -> bool:
    """Return whether several elements have one place in memory, as in what ``expand`` gives."""
    return not tensor.is_contiguous() and tensor.numel() > max(0, reach(tensor))


def reach(tensor: Tensor) -> int:
    """Return the distance from the first element in memory to behind the last, in elements."""
    if tensor.is_contiguous():
        return int(tensor.numel())
    distance = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        distance += (size - 1) * stride
    return distance


def storage_of(tensor: Tensor) -> int:
    """Return what identifies a piece of memory as long as it lives; of a DTensor that of this rank's part."""
    local: Tensor = getattr(tensor, LOCAL_TENSOR, tensor)
    return int(storage_key(local.untyped_storage()))
