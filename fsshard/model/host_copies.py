"""Tensors that wait in host memory for the backward pass: on CUDA copied by streams of their own during the work."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsshard.errors import ModelError
from fsshard.torch_private.tensors import LOCAL_TENSOR, storage_key, version_of

HOST: ContextVar[str] = ContextVar("HOST", default="cpu")
"""The kind of device that activations are offloaded to: another one in an estimate, where the CPU stands for a GPU."""

WINDOW = 3
"""Pieces of memory that may be on their way to the host at once; they stay on the device until others follow."""
AHEAD = 2
"""Pieces that are fetched before the backward pass asks for them."""
LEAST, SHARE = 2**14, 4
"""Tensors of fewer bytes stay, and those that are less than one part in so many of their memory, which would go too."""


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
    nbytes = leaf.numel() * leaf.element_size()
    return nbytes >= LEAST and nbytes * SHARE >= leaf.untyped_storage().nbytes()


class Copies:
    """Copies that are done when the call returns: for devices without streams, and for estimates."""

    def leave(self, source: Tensor) -> tuple[Tensor, Any]:
        """Copy to the host; return the copy, and a mark to wait for."""
        return source.to(HOST.get(), copy=True), None

    def come_back(self, host: Tensor, device: torch.device, left: Any) -> tuple[Tensor, Any]:
        """Copy to the device once ``left`` is done; return the copy, and a mark to wait for."""
        target = torch.empty(host.shape, dtype=host.dtype, device=device)
        return target if host.is_meta else target.copy_(host), None

    def wait(self, mark: Any) -> None:
        """Let what the device does from now on come after ``mark``."""


class StreamedCopies(Copies):
    """Copies through pinned memory while the device computes, out and in by a stream each."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def leave(self, source: Tensor) -> tuple[Tensor, Any]:
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        self._out.wait_stream(torch.cuda.current_stream(self._device))  # which computes it
        with torch.cuda.stream(self._out):
            host.copy_(source, non_blocking=True)
        # Where the graph is dropped before the copy is done, the allocator must not hand this memory out.
        source.record_stream(self._out)
        return host, self._out.record_event()

    def come_back(self, host: Tensor, device: torch.device, left: Any) -> tuple[Tensor, Any]:
        target = torch.empty(host.shape, dtype=host.dtype, device=device)
        # The allocator may have given memory that work already queued on the current stream still reads.
        self._in.wait_stream(torch.cuda.current_stream(self._device))
        self._in.wait_event(left)
        with torch.cuda.stream(self._in):
            target.copy_(host, non_blocking=True)
        target.record_stream(self._in)  # it may be dropped unused
        return target, self._in.record_event()

    def wait(self, mark: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)


class _Held:
    """One piece of memory that was, is or will be on the device, and its copy in host memory."""

    def __init__(self, source: Tensor, previous: weakref.ref[_Held] | None) -> None:
        self.source: Tensor | None = source  # until it has left
        self.device, self.dtype, self.version = source.device, source.dtype, version_of(source)
        self.previous = previous  # the one that left before it, which the backward pass needs after it
        self.host: Any = None
        self.left: Any = None
        self.target: Tensor | None = None  # once it is on its way back
        self.arrived: Any = None

    def check(self) -> None:
        """Raise if the tensor was changed before its copy was known to be complete."""
        if self.source is not None and version_of(self.source) != self.version:
            raise ModelError(
                f"a tensor of {self.dtype} that an offloaded block saved for its backward pass was changed in place "
                "afterwards; compute out of place, clone it before the call if the block was given it, or leave the "
                "block out of Checkpointing(offload_to_cpu=True)"
            )


class Kept(NamedTuple):
    """Stands for a tensor whose memory the host keeps: how it lies in that memory."""

    held: _Held
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool


class Offloader:
    """Keeps tensors of one device in host memory, and fetches them in the opposite order.

    Whole pieces of memory travel, each once: views of one (a query and a key, an input that several layers save) share
    the copy, and come back with their strides, which decide how kernels round.
    """

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._leaving: deque[weakref.ref[_Held]] = deque()
        self._last: weakref.ref[_Held] | None = None

    @torch.no_grad()
    def keep(self, tensor: Tensor) -> Kept:
        """Let the tensor leave; return what :meth:`fetch` takes."""
        tensor = tensor.detach().resolve_neg()  # a negated view would pass for its base, of the same memory and version
        plain = tensor.conj() if tensor.is_conj() else tensor
        held = self._known(plain) or self._start(plain)
        return Kept(held, plain.size(), plain.stride(), int(plain.storage_offset()), tensor.is_conj())

    def _known(self, plain: Tensor) -> _Held | None:
        """Return the piece of memory if it is on its way: only as long as it lives its key says which it is."""
        key = storage_key(plain.untyped_storage())
        for held in (reference() for reference in self._leaving):
            source = None if held is None else held.source
            if source is None or (source.dtype, storage_key(source.untyped_storage())) != (plain.dtype, key):
                continue
            if version_of(source) == version_of(plain):
                return held
        return None

    def _start(self, plain: Tensor) -> _Held:
        held = _Held(plain, self._last)
        held.host, held.left = self._copies.leave(_memory(plain))
        self._last = weakref.ref(held)
        self._leaving.append(self._last)
        if len(self._leaving) > WINDOW and (first := self._leaving.popleft()()) is not None:
            # The device must not run ahead of the copies, or all that should have left would still be there.
            self._copies.wait(first.left)
            first.check()
            first.source = None
        return held

    @torch.no_grad()
    def fetch(self, kept: Kept) -> Tensor:
        """Return the tensor on its device; what left before it is on its way from now on, too."""
        held: _Held | None = kept.held
        kept.held.check()
        for _ in range(1 + AHEAD):
            if held is None:
                break
            if held.source is None and held.target is None:
                held.target, held.arrived = self._copies.come_back(held.host, held.device, held.left)
            held = None if held.previous is None else held.previous()
        if (memory := kept.held.source) is None:
            assert kept.held.target is not None
            self._copies.wait(kept.held.arrived)
            memory = kept.held.target
        result = memory.as_strided(kept.size, kept.stride, kept.offset)
        return result.conj() if kept.is_conj else result


def _memory(tensor: Tensor) -> Tensor:
    """Return all of the tensor's memory, in its dtype."""
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def offloader_of(device: torch.device) -> Offloader:
    """Return the one of a device."""
    if device not in _offloaders:
        _offloaders[device] = Offloader(StreamedCopies(device) if device.type == "cuda" else Copies())
    return _offloaders[device]


_offloaders: dict[torch.device, Offloader] = {}
