"""Sums gradients of parameters that ranks along another mesh dimension share, each of which has a part.

A context-parallel rank sees a part of the sequence, so that the gradient of a norm or of a positional embedding, which
all of these ranks hold whole, is the sum of what they have. Ours are summed after the engine has reduced them over
data, once per step, before anybody reads them.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.comm import tree
from fsshard.complex_params.layouts import Shared
from fsshard.errors import GradientError
from fsshard.planning.entries import Entry

Kind = tuple[torch.dtype, torch.device]
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
        """Return each part with this rank's gradient."""
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
        self.parts: list[_Part] = []
        for entry in entries:
            for layout in entry.layouts:
                if isinstance(layout, Shared):
                    self.parts.append(_Part(entry, layout))
        self._owned = owned
        self._device = device
        # Names of the parameters whose gradients have their sums.
        self._summed: set[str] = set()
        self._simulated = False

    def simulate(self) -> None:
        """Tensors have no numbers: take it that all ranks have the gradients that this one has."""
        self._simulated = True

    def backward_starts(self) -> None:
        """Leave what has been summed on one rank only: gradients are about to be added to. Local."""
        # Accumulated gradients need no second copy: one rank along the dimension keeps the sum, the others begin at
        # zero, and the next sum has each of its terms once.
        for entry, shared in self.parts:
            # The mean of what all have is what each has: of that nobody need let go.
            if entry.name not in self._summed or shared.mean:
                continue
            gradient = entry.grad()
            if gradient is not None and dist.get_rank(shared.group):
                gradient.zero_()
        self._summed.clear()

    def finish(self, entries: Iterable[Entry]) -> None:
        """Sum what is not summed yet, of ``entries``. Collective over the ranks that share them.

        Raises:
            GradientError: some of the ranks that share a parameter have a gradient of it, and some have none.
        """
        names = {entry.name for entry in entries}
        names -= self._summed
        by_group = defaultdict(list)
        for part in self.parts:
            entry = part.entry
            if entry.name in names and entry.parameter.requires_grad and self._owned(entry):
                by_group[part.shared.group].append(part)
        with torch.no_grad():
            for group, parts in by_group.items():
                self._sum(group, parts)
        self._summed |= names

    def _sum(self, group: dist.ProcessGroup, parts: Sequence[_Part]) -> None:
        # A sum is under way while the next bucket is filled, and the device is waited for once, at the end.
        begun: deque[_Sum] = deque()
        counts = []
        summed = []
        for bucket in self._buckets(parts):
            begun.append(self._begin(group, bucket))
            summed += bucket
            if len(begun) > IN_FLIGHT:
                counts.append(self._end(begun.popleft()))
        for one in begun:
            counts.append(self._end(one))
        # In a simulation all ranks do the same, and have no numbers.
        if not self._simulated:
            of_all = torch.cat([each.float() for each in counts])
            _check_counts(group, summed, of_all.tolist())

    def _buckets(self, parts: Iterable[_Part]) -> Iterator[list[_Part]]:
        """Yield parts whose gradients have one dtype and device, some megabytes at a time, alike on all ranks."""
        by_kind: dict[Kind, list[_Part]] = defaultdict(list)
        sizes: Counter[Kind] = Counter()
        for part in parts:
            tensor = self._value(part)
            kind = (tensor.dtype, tensor.device)
            if kind in by_kind and sizes[kind] + tensor.nbytes > BUCKET_BYTES:
                yield by_kind.pop(kind)
                sizes[kind] = 0
            by_kind[kind].append(part)
            sizes[kind] += tensor.nbytes
        yield from by_kind.values()

    def _value(self, part: _Part) -> Tensor:
        gradient = part.entry.grad()
        if gradient is None:
            return torch.zeros_like(part.entry.local())
        return gradient

    def _begin(self, group: dist.ProcessGroup, parts: Sequence[_Part]) -> _Sum:
        """Begin to sum gradients, all of one dtype, and to learn in the same exchange who has them."""
        gradients = [part.entry.grad() for part in parts]
        values = [self._value(part).reshape(-1) for part in parts]
        first = values[0]
        has_gradient = first.new_tensor([gradient is not None for gradient in gradients])
        device = self._device or first.device
        flat = torch.cat([*values, has_gradient]).to(device)
        return _Sum(parts, gradients, flat, tree.AllReduce(flat, group))

    def _end(self, begun: _Sum) -> Tensor:
        """Put the sums where the gradients are, and return how many ranks have a gradient of each part."""
        begun.reduction.wait()
        sizes = []
        for part, gradient in begun.with_gradients():
            # Where it has none, this rank has sent zeros.
            numbers = part.entry.local() if gradient is None else gradient
            sizes.append(numbers.numel())
        sums = begun.flat.split([*sizes, len(begun.parts)])
        for (part, gradient), total in zip(begun.with_gradients(), sums, strict=False):
            if gradient is None:
                continue
            if part.shared.mean:
                total = total / part.shared.group.size()
            gradient.copy_(total.view(gradient.shape))
        counts: Tensor = sums[-1]
        # A view would keep the whole bucket.
        return counts.clone()


def _check_counts(
    group: dist.ProcessGroup,
    parts: Sequence[_Part],
    counts: Sequence[float],
) -> None:
    """Raise unless of each parameter all ranks have a gradient, or none."""
    for part, count in zip(parts, counts, strict=True):
        if 0 < count < group.size():
            raise GradientError(
                f"of the {group.size()} ranks that share parameter {part.entry.name!r} (replicated=), {round(count)} "
                "have a gradient of it, and the others have none: their sum is not what one process would have; let "
                "every rank use it, multiplied by 0 where it is not needed"
            )
