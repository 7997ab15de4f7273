"""Sums gradients of parameters that ranks along another mesh dimension share, each of which has a part.

A context-parallel rank sees a part of the sequence, so that the gradient of a norm or of a positional embedding, which
all of these ranks hold whole, is the sum of what they have. Ours are summed after the engine has reduced them over
data, once per step, before anybody reads them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.comm import tree
from fsshard.complex_params.layouts import Shared
from fsshard.errors import GradientError
from fsshard.planning.entries import Entry

BUCKET_BYTES = 32 * 2**20
IN_FLIGHT = 2
"""How many sums are under way while the next bucket is filled: copies of their gradients."""


class _Part(NamedTuple):
    """A shared parameter along one dimension."""

    entry: Entry
    shared: Shared


class _Sum(NamedTuple):
    """A sum that is under way."""

    parts: Sequence[_Part]
    gradients: Sequence[Tensor | None]
    flat: Tensor
    reduction: tree.AllReduce

    def with_gradients(self) -> list[tuple[_Part, Tensor | None]]:
        """Each part with this rank's gradient."""
        return list(zip(self.parts, self.gradients, strict=True))


class SharedGradients:
    """Sums the gradients of a model's shared parameters over the ranks that share them.

    Args:
        entries: the model's parameters.
        owned: whether this rank has a gradient of it, where an engine reduces each to one rank.
        device: where ranks exchange them, if gradients are elsewhere (cpu_offload); None: where they are.
    """

    def __init__(
        self,
        entries: Iterable[Entry],
        owned: Callable[[Entry], bool],
        device: torch.device | None = None,
    ) -> None:
        self._parts = [
            _Part(entry, layout) for entry in entries for layout in entry.layouts if isinstance(layout, Shared)
        ]
        self._owned, self._device = owned, device
        self._summed: set[str] = set()  # names of the parameters whose gradients have their sums
        self._simulated = False

    def simulate(self) -> None:
        """Tensors have no numbers: take it that all ranks have the gradients that this one has."""
        self._simulated = True

    def backward_starts(self) -> None:
        """Leave what has been summed on one rank only: gradients are about to be added to. Local."""
        # Accumulated gradients need no second copy: one rank along the dimension keeps the sum, the others begin at
        # zero, and the next sum has each of its terms once.
        for entry, shared in self._parts:
            gradient = entry.grad() if entry.name in self._summed else None
            # The mean of what all have is what each has: of that nobody need let go.
            if gradient is not None and not shared.mean and dist.get_rank(shared.group):
                gradient.zero_()
        self._summed.clear()

    @torch.no_grad()
    def finish(self, entries: Iterable[Entry]) -> None:
        """Sum what is not summed yet, of ``entries``. Collective over the ranks that share them.

        Raises:
            GradientError: some of the ranks that share a parameter have a gradient of it, and some have none.
        """
        if not self._parts:
            return
        wanted = {entry.name for entry in entries}
        left = [part for part in self._parts if part.entry.name in wanted and part.entry.name not in self._summed]
        trained = [part for part in left if part.entry.parameter.requires_grad and self._owned(part.entry)]
        for group, parts in _by_group(trained):
            # A sum is under way while the next bucket is filled, and the device is waited for once, at the end.
            begun: deque[_Sum] = deque()
            told: list[tuple[Sequence[_Part], Tensor]] = []
            for bucket in _buckets(parts, self._value):
                begun.append(self._begin(group, bucket))
                if len(begun) > IN_FLIGHT:
                    told.append(self._end(begun.popleft()))
            told += [self._end(one) for one in begun]
            if not self._simulated:  # whose ranks do all the same, and have no numbers
                _check_counts(group, told)
        self._summed.update(part.entry.name for part in left)

    def _value(self, part: _Part) -> Tensor:
        gradient = part.entry.grad()
        return torch.zeros_like(part.entry.local()) if gradient is None else gradient

    def _begin(self, group: dist.ProcessGroup, parts: Sequence[_Part]) -> _Sum:
        """Begin to sum gradients, all of one dtype, and to learn in the same exchange who has them."""
        gradients = [part.entry.grad() for part in parts]
        values = [self._value(part).reshape(-1) for part in parts]
        there = values[0].new_tensor([gradient is not None for gradient in gradients])
        flat = torch.cat([*values, there]).to(self._device or values[0].device)
        return _Sum(parts, gradients, flat, tree.AllReduce(flat, group))

    def _end(self, begun: _Sum) -> tuple[Sequence[_Part], Tensor]:
        """Put the sums where the gradients are; the parts, and how many ranks have a gradient of each."""
        begun.reduction.wait()
        sizes = [part.entry.local().numel() if grad is None else grad.numel() for part, grad in begun.with_gradients()]
        *sums, counts = begun.flat.split([*sizes, len(begun.parts)])
        for (part, gradient), total in zip(begun.with_gradients(), sums, strict=True):
            if gradient is not None:
                mean = total / part.shared.group.size() if part.shared.mean else total
                gradient.copy_(mean.view(gradient.shape))
        return begun.parts, counts.clone()  # a view would keep the whole bucket


def _check_counts(group: dist.ProcessGroup, told: Sequence[tuple[Sequence[_Part], Tensor]]) -> None:
    """Raise unless of each parameter all ranks have a gradient, or none."""
    if not told:
        return
    counts = torch.cat([counts.float() for _, counts in told]).tolist()
    for part, count in zip((part for parts, _ in told for part in parts), counts, strict=True):
        if 0 < count < group.size():
            raise GradientError(
                f"of the {group.size()} ranks that share parameter {part.entry.name!r} (replicated=), {round(count)} "
                "have a gradient of it, and the others have none: their sum is not what one process would have; let "
                "every rank use it, multiplied by 0 where it is not needed"
            )


def _by_group(parts: Iterable[_Part]) -> Iterator[tuple[dist.ProcessGroup, list[_Part]]]:
    found: dict[dist.ProcessGroup, list[_Part]] = {}
    for part in parts:
        found.setdefault(part.shared.group, []).append(part)
    yield from found.items()


def _buckets(parts: Iterable[_Part], value: Callable[[_Part], Tensor]) -> Iterator[list[_Part]]:
    """Parts whose gradients are of one dtype and device, some megabytes at a time, in one order on all ranks."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[_Part]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for part in parts:
        tensor = value(part)
        kind = (tensor.dtype, tensor.device)
        if sizes.get(kind, 0) + tensor.nbytes > BUCKET_BYTES and kind in by_kind:
            yield by_kind.pop(kind)
            sizes[kind] = 0
        by_kind.setdefault(kind, []).append(part)
        sizes[kind] = sizes.get(kind, 0) + tensor.nbytes
    yield from by_kind.values()
