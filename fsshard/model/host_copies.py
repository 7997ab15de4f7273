"""Tensors that wait in host memory for the backward pass: torch's ``save_on_cpu`` copies them there and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu

from fsshard.torch_private.tensors import LOCAL_TENSOR

HOST: ContextVar[str] = ContextVar("HOST", default="cpu")
"""The kind of device that activations are offloaded to: ``"meta"`` in an estimate, where the CPU stands for a GPU."""

LEAST = 2**14
"""Tensors of fewer bytes stay."""


@contextmanager
def offloading_to(kind: str) -> Iterator[None]:
    """Let activations that are offloaded, within, go to this kind of device."""
    token = HOST.set(kind)
    try:
        yield
    finally:
        HOST.reset(token)


def is_worth_leaving(leaf: Any) -> bool:
    """Return whether ``leaf`` is a tensor of another device that the host can keep, and large enough for it."""
    if not isinstance(leaf, Tensor) or leaf.device.type in (HOST.get(), "meta"):
        return False
    if leaf.layout is not torch.strided or leaf.is_neg() or hasattr(leaf, LOCAL_TENSOR):
        return False
    if 0 in leaf.stride():  # expanded: it has more elements than its memory, and its copy would be as large as it looks
        return False
    return leaf.numel() * leaf.element_size() >= LEAST


class HostCopy(NamedTuple):
    """Stands for a tensor that is in host memory.

    Attributes:
        packed: its device, and its copy.
        order: its dimensions, those of the widest strides first.
        is_conj: whether it is the conjugate of what was copied.
    """

    packed: tuple[torch.device, Tensor]
    order: list[int]
    is_conj: bool


@torch.no_grad()
def to_host(tensor: Tensor) -> HostCopy:
    """Copy a tensor to host memory; pinned memory, and without waiting, where there is CUDA."""
    tensor = tensor.detach()
    plain = tensor.conj() if tensor.is_conj() else tensor
    # Kernels round by strides, and torch's copy has its elements in index order: here that is the order of the memory.
    order = sorted(range(plain.dim()), key=plain.stride, reverse=True)
    pack = _without_numbers if HOST.get() == "meta" else save_on_cpu(pin_memory=True).pack_hook
    return HostCopy(pack(plain.permute(order)), order, tensor.is_conj())


def _without_numbers(tensor: Tensor) -> tuple[torch.device, Tensor]:
    return tensor.device, tensor.to("meta")


@torch.no_grad()
def to_device(copy: HostCopy) -> Tensor:
    """Return the tensor on its device, in the same order in memory."""
    device, host = copy.packed
    if host.is_meta:
        tensor = torch.empty(host.shape, dtype=host.dtype, device=device)
    else:
        tensor = save_on_cpu(pin_memory=True).unpack_hook(copy.packed)
    tensor = tensor.permute(list(map(copy.order.index, range(tensor.dim()))))
    if copy.is_conj:
        return tensor.conj()
    return tensor
