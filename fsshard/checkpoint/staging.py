"""Copies in host memory, which a thread writes to disk while training changes the originals."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes, of torch's own allocations on the CPU
STRIDE = 1 << 19  # bytes that are copied at once

_lock = threading.Lock()
_spare: list[mmap.mmap] = []  # where the last copies lay


class Staging:
    """Room for one set of copies at a time."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy tensors; complete on return and good until :meth:`give_back`."""
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors if tensor.is_cpu]
        lengths = iter(sizes)
        copies = []
        # What is made in inference mode is of no use outside of it.
        with torch.inference_mode(False), torch.no_grad():
            self._memory = _room(sum(sizes))
            bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
            if self._memory is not None:
                bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
            for tensor in tensors:
                if tensor.is_cpu:
                    copies.append(_copy_into(bytes, tensor))
                    bytes = bytes[next(lengths) :]
                else:
                    # Complete when the device's current stream is. torch keeps pinned memory for the next time itself.
                    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                    copies.append(pinned.copy_(tensor, non_blocking=True))
        for device in {tensor.device for tensor in tensors if not tensor.is_cpu}:
            torch.get_device_module(device).current_stream(device).synchronize()
        return copies

    def give_back(self) -> None:
        """Let the copies go."""
        memory = self._memory
        self._memory = None
        if memory is not None and hasattr(mmap, "MADV_FREE"):
            # The mapping serves the next save; the system may take its pages back at any moment without asking.
            memory.madvise(mmap.MADV_FREE)
            with _lock:
                _spare[:] = [memory]


def _room(nbytes: int) -> mmap.mmap | None:
    """Return where the last copies lay if these fit well, else let that go and map anew; None for no bytes."""
    if not nbytes:
        return None
    with _lock:
        kept = _spare.pop() if _spare else None
    # State that is some bytes shorter (the place in the data) is no reason to be given all pages anew.
    if kept is not None and nbytes <= len(kept) <= 2 * nbytes:
        return kept
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, nbytes, flags=flags)
    # To be given memory in pages of 4 KiB can take longer than the copy itself.
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _copy_into(place: Tensor, tensor: Tensor) -> Tensor:
    """Return a copy of a tensor in the first bytes of ``place``."""
    room = place[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return room.copy_(tensor)
    # For copies of that length glibc uses instructions that do not read the target before they write it: on two ranks
    # at a time they take a tenth to a quarter less than torch's own copy of the whole (glibc 2.36, torch 2.13).
    target = room.data_ptr()
    source = tensor.data_ptr()
    for start in range(0, tensor.nbytes, STRIDE):
        ctypes.memmove(target + start, source + start, min(STRIDE, tensor.nbytes - start))
    return room
