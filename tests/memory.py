"""Bytes that are alive, counted as torch hands them out: nothing is timed, and no operating system is asked."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Context manager that counts the bytes of storages that operators make, until these are freed.

    Attributes:
        now: bytes alive.
        peak: the most there were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and key(leaf) not in given:
                self._made(leaf)
        return out

    def _made(self, tensor: Tensor) -> None:
        storage, which = tensor.untyped_storage(), key(tensor)
        if which in self._known:
            return
        nbytes = storage.nbytes()
        self.now += nbytes
        self.peak = max(self.peak, self.now)

        def freed(_: Any) -> None:
            self.now -= nbytes
            del self._known[which]

        self._known[which] = weakref.ref(storage, freed)


def key(tensor: Tensor) -> int:
    """Return what two tensors over the same storage have in common."""
    return tensor.untyped_storage()._cdata
