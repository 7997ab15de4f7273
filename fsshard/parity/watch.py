"""Digests of each module's output in a forward, to find the first module that computed something else."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fsshard.complex_params.slots import public_name
from fsshard.parity.trace import digest

__all__ = ["ForwardWatch"]


class ForwardWatch:
    """Hooks on the modules of a bare model; they stay with the modules when an engine takes them.

    Args:
        model: whose modules.
        outputs: take digests of what they put out; else only who ran is recorded.
    """

    def __init__(self, model: nn.Module, *, outputs: bool = True) -> None:
        self._outputs = outputs
        self._seen: list[tuple[str, str]] = []
        self._forwards: list[int] = []  # how much had been seen when each forward began
        self._on = False
        for name, module in model.named_modules():
            module.register_forward_hook(self._recorder(public_name(name)))

    def _recorder(self, name: str) -> Any:
        def record(module: nn.Module, arguments: Any, output: Any) -> None:
            # A hook inside of a compiled unit becomes a part of its graph: the graph would break at each module, and
            # dynamo cannot follow the bytes of a tensor ("setStorage ... out of bounds", torch 2.13). So what is
            # compiled is one module here: its unit. And no recomputation is recorded, which runs in the backward pass.
            if not torch.compiler.is_compiling() and self._on:
                self._seen.append((name, digest(output, strict=False) if self._outputs else ""))

        return record

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Record outputs, within."""
        self._on = True
        self._forwards.append(len(self._seen))
        try:
            yield
        finally:
            self._on = False

    def take(self) -> list[tuple[str, str]]:
        """``(module, digest of its output)`` in order of execution, since the last call."""
        seen, self._seen, self._forwards = self._seen, [], []
        return seen

    def repeated(self) -> set[str]:
        """Modules that ran more than once in one forward, since the last :meth:`take`."""
        found: set[str] = set()
        for start, stop in itertools.pairwise([*self._forwards, len(self._seen)]):
            names = [name for name, _ in self._seen[start:stop]]
            found |= {name for name in names if names.count(name) > 1}
        return found


def first_difference(expected: Sequence[Sequence[str]], got: Sequence[Sequence[str]]) -> str:
    """Return what the forward did otherwise first, in words; "" if nothing."""
    for one, other in zip(expected, got, strict=False):
        if one[0] != other[0]:
            return f"module {other[0]!r} ran where {one[0]!r} does under the reference"
        if one[1] != other[1]:
            return f"the first module with another output is {one[0]!r}"
    if len(expected) == len(got):
        return ""
    name = max(expected, got, key=len)[min(len(expected), len(got))][0]
    counts = [sum(item[0] == name for item in side) for side in (got, expected)]
    return f"module {name!r} ran {counts[0]} times, under the reference {counts[1]} times"
