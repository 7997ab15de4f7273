"""Copies in host memory, which a thread writes to disk while training changes the originals."""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Staging"]

Kind = tuple[torch.dtype, tuple[int, ...]]
ALIGNMENT = 64  # bytes, of torch's own allocations on the CPU
STRIDE = 1 << 19  # bytes that are copied at once


class Staging:
    """Room for one set of copies at a time.

    Copies of what is on the CPU lie in one mapping, of large pages where the system has them: to be given memory in
    pages of 4 KiB can take longer than the copy itself. After use the mapping is kept for the next time, and the
    system may take its pages back at any moment without asking (MADV_FREE). Copies of what is on a device lie in pinned
    memory, which torch keeps itself.
    """

    def __init__(self) -> None:
        self._room: _Room | None = None

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy tensors; complete on return and good until :meth:`give_back`.

        Args:
            tensors: of any shape, dtype and device.

        Raises:
            OSError: there is no such amount of memory.
        """
        kinds = [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors if tensor.is_cpu]
        with torch.inference_mode(False), torch.no_grad():  # what is made in inference mode is of no use outside of it
            self._room = _kept(kinds) or _Room(kinds)
            room = iter(self._room.tensors)
            copies = [_copy_into(next(room), tensor) if tensor.is_cpu else _pinned(tensor) for tensor in tensors]
        for device in {tensor.device for tensor in tensors if not tensor.is_cpu}:
            torch.get_device_module(device).current_stream(device).synchronize()
        return copies

    def give_back(self) -> None:
        """Let the copies go."""
        room, self._room = self._room, None
        if room is not None and room.memory is not None and hasattr(mmap, "MADV_FREE"):
            room.memory.madvise(mmap.MADV_FREE)
            with _lock:
                _spare[:] = [room]


class _Room:
    """Uninitialised tensors side by side in one mapping.

    Args:
        kinds: their dtypes and shapes.
    """

    def __init__(self, kinds: list[Kind]) -> None:
        self.kinds = kinds
        self.memory: mmap.mmap | None = None
        sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in kinds]
        places = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        if not sum(places):
            self.tensors = [torch.empty(shape, dtype=dtype, device="cpu") for dtype, shape in kinds]
            return
        self.memory = memory = mmap.mmap(-1, sum(places), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        parts = torch.frombuffer(memory, dtype=torch.uint8).split(places)
        self.tensors = [
            part[:size].view(dtype).view(shape) for part, size, (dtype, shape) in zip(parts, sizes, kinds, strict=True)
        ]


_lock = threading.Lock()
_spare: list[_Room] = []


def _kept(kinds: list[Kind]) -> _Room | None:
    """Return where the last copies lay, if these are of the same kinds; else let it go."""
    with _lock:
        room = _spare.pop() if _spare else None
    return room if room is not None and room.kinds == kinds else None


def _copy_into(room: Tensor, tensor: Tensor) -> Tensor:
    """Fill ``room`` with the numbers of a tensor of its dtype and shape.

    For copies of that length glibc uses instructions that do not read the target before they write it: on two ranks at
    a time they take a tenth to a quarter less than torch's own copy of the whole (glibc 2.36, torch 2.13).
    """
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return room.copy_(tensor)
    target, source = room.data_ptr(), tensor.data_ptr()
    for start in range(0, tensor.nbytes, STRIDE):
        ctypes.memmove(target + start, source + start, min(STRIDE, tensor.nbytes - start))
    return room


def _pinned(tensor: Tensor) -> Tensor:
    """Return a copy that is complete when the device's current stream is."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
