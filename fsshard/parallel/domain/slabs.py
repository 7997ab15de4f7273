"""A field in slabs: where they begin and end, how it is cut and put together, where a forward's activations lie."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fsshard.errors import ConfigurationError, RankMismatch
from fsshard.parallel.domain.exchange import Axis, Parts, gathered
from fsshard.torch_private.autograd import current_graph_task_id

Sizes = tuple[int, ...]
Shape = Sequence[int]

Replicated = Mapping[str, tuple[Any, str]]

Layout = tuple[Sizes, ...]
"""The number of points that each rank of a split dimension has, in rank order."""


def even_parts(size: int, parts: int) -> Sizes:
    """Return the lengths that ``torch.tensor_split`` gives: the first ``size % parts`` have one more."""
    length, longer = divmod(size, parts)
    sizes = [length + 1] * longer
    sizes += [length] * (parts - longer)
    return tuple(sizes)


def confusable(layouts: Iterable[Layout]) -> bool:
    """Return whether some rank has slabs of one size in two of them; the same on ranks with the same ``layouts``."""
    for one, other in itertools.combinations(layouts, 2):
        # Along every split dimension some rank has the same number of points in both.
        pairs = zip(one, other, strict=True)
        if all(any(map(int.__eq__, *pair)) for pair in pairs):
            return True
    return False


def layout_text(layout: Sequence[Shape]) -> str:
    """Return a layout for people: ``"5 + 4 + 4 + 4 rows"``."""
    sums = [" + ".join(map(str, sizes)) for sizes in layout]
    return " by ".join(sums) + " rows"


CHUNK = 2**20
"""Elements that a checksum looks at together."""

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By which integers the bits of a number of so many bytes are taken."""

MULTIPLIER = 6364136223846793005
"""Factor of Knuth's linear congruential generator, MMIX: spreads a place over all bits."""

FIRST = 2
"""The tensor dimension of the first spatial one in a layer: (batch, channels, d1, ..., dN)."""


class Mark(NamedTuple):
    """The facts that are known of a slab."""

    domain: Slabs
    # The sizes of the whole field.
    sizes: Sizes
    # A checksum of the whole field, by which ranks see whether theirs is the same, if it was there.
    checksum: Tensor | None = None


_marks: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def mark_of(tensor: Tensor) -> Mark | None:
    """Return which domain a tensor is a slab of, and how large the whole is; None where that is not known."""
    return _marks.get(tensor)  # type: ignore[no-any-return]


def checksum(field: Tensor) -> Tensor:
    """Return a sum of all bits, taken as integers and weighted by their places: the same for the same field only."""
    values = field.detach()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    integers = INTEGERS[values.element_size()]
    flat = values.contiguous().view(integers).reshape(-1)
    device = field.device
    total = torch.zeros((), dtype=torch.int64, device=device)
    first = 0
    for part in flat.split(CHUNK):
        end = first + len(part)
        weights = torch.arange(first, end, device=device) * MULTIPLIER + 1
        # Integers wrap around, in whatever order they are added.
        total += (part * weights).sum()
        first = end
    return total


class Slabs:
    """The ranks that share every sample, each with a slab of it; see :class:`~fsshard.parallel.domain.domain.Domain`.

    Slabs are those of ``torch.tensor_split``: the first ones have one row more where ranks do not divide the rows. The
    spatial dimensions of a tensor are its last ones, whatever comes before them.

    Attributes:
        axes: the split dimensions and their ranks.
        order: how many spatial dimensions the operator has.
        shape: sizes of the whole field, for slabs that come from a loader. With it, or with :meth:`scatter`, ranks need
            not tell each other before every forward how many rows they have. None: unknown.
        compares_always: whether ranks compare what they have before every forward, which costs an exchange of a few
            numbers; else for inputs of a new size, where they know the whole's. False where their group has no backend
            for the CPU (``"nccl"`` alone; torch's default has one): it would wait for the device.
        compares_numbers: whether they then compare samples and targets on an accelerator too, by a checksum, which
            waits for the device; on the CPU they do.
        replicated: with ``weights="modes"``, what ``wrap(replicated=...)`` has to know of the other parameters.
        agreed: inputs of which all ranks are known to have the same kind.
        notes: what layers write down in a forward for the rest of it, and for when it is computed again.
    """

    def __init__(self, axes: Sequence[Axis], order: int) -> None:
        self.axes = tuple(axes)
        self.order = order
        self.shape: Sizes | None = None
        # The layout of the activations of the forward under way.
        self._current: Layout | None = None
        # By module, the layouts of all forwards.
        self._seen: dict[str, dict[Layout, None]] = {}
        # Modules where the local size does not tell the layout on some rank.
        self._confusable: set[str] = set()
        devices = {axis.device for axis in self.axes}
        self.compares_always = devices <= {"cpu"}
        self.compares_numbers = False
        self.agreed: set[Any] = set()
        self.replicated: Replicated | None = None
        self.notes: dict[Any, Any] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Slabs:
        # A copy of a model works on the same ranks.
        return self

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        # A model out of a file begins anew: its layouts are found out in its first forward.
        state.update(
            _current=None,
            _seen={},
            _confusable=set(),
            agreed=set(),
            notes={},
            replicated=None,
        )
        return state

    def __repr__(self) -> str:
        parts = []
        for axis in self.axes:
            ranks = list(axis.ranks)
            parts.append(f"d{axis.dim + 1} over ranks {ranks}")
        return f"<Domain: {', '.join(parts)}>"

    @property
    def attached(self) -> bool:
        """Return whether it has its ranks: not after it came out of a file."""
        return all(axis.attached for axis in self.axes)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to others, of its own model and losses; sums of a few numbers not counted."""
        return sum(axis.bytes_sent for axis in self.axes)

    @property
    def size(self) -> int:
        """Return how many ranks share a sample."""
        return math.prod(axis.size for axis in self.axes)

    # ---------------------------------------------------------------------------------------- for users

    def scatter(self, field: Tensor) -> Tensor:
        """This rank's slab of a whole field, which every rank of the domain has. Local.

        Args:
            field: (..., d1, ..., dN).

        Raises:
            ConfigurationError: a split dimension has fewer points than ranks; or the field is a leaf that requires a
                gradient, of which a slab has a part only, from what all ranks backpropagate.
        """
        sizes = self._spatial(field.shape)
        if field.requires_grad and field.is_leaf and self.size > 1 and torch.is_grad_enabled():
            raise ConfigurationError(
                "scatter: the field requires a gradient, and would get that of its own rows only, summed over what all "
                "ranks backpropagate; take it of the slab, domain.scatter(field.detach()).requires_grad_(), and divide "
                "it by domain.size where every rank has the whole loss"
            )
        for axis in self.axes:
            self.check_rows(sizes[axis.dim], axis)
        slab = self.cut(field, self.even(sizes))
        slab = slab.clone(memory_format=torch.contiguous_format)
        # A number of one byte has no integer that the checksum knows.
        total = checksum(field) if field.element_size() > 1 else None
        self.mark(slab, sizes, total)
        return slab

    def gather(self, slab: Tensor) -> Tensor:
        """The whole field on every rank, differentiable: any loss of it is that of one process. Collective.

        Args:
            slab: (..., d1, ..., dN), this rank's.

        Raises:
            RankMismatch: slabs do not fit together.
        """
        return self.join(slab, self.layout_of(slab))

    # ---------------------------------------------------------------------------------------- for layers

    def layout(self, place: str, shape: Shape) -> Layout:
        """Return how the field that a module got lies on the ranks. Collective only while something is computed again.

        A backward pass may run a forward again after later layers, or other forwards, have changed the layout. So it is
        looked up by the local size among those that the module has seen; where that does not tell it on some rank, all
        ranks tell each other their sizes. Every rank knows the same layouts, and so all of them do, or none.

        Args:
            place: the module's name.
            shape: (..., d1, ..., dN) of this rank's slab.
        """
        local = self._rows(shape)
        # No backward pass runs, and nothing is computed again.
        if current_graph_task_id() == -1:
            return self._current_layout(place, local)
        if place in self._confusable:
            return self._ask(shape)
        for layout in self._seen.get(place, {}):
            if self.own(layout) == local:
                return layout
        raise ConfigurationError(f"{place or 'the model'}: called in a backward pass with a size that no forward had")

    def _current_layout(self, place: str, local: Sizes) -> Layout:
        layout = self._current
        if layout is None or self.own(layout) != local:
            expected = "no forward"
            if layout is not None:
                expected = f"one of {self.own(layout)}"
            raise ConfigurationError(
                f"{place or 'the model'} got a slab of {local} rows where the domain expects {expected}: call the "
                "model that was given to shard_domain, not a part of it"
            )
        layouts = self._seen.setdefault(place, {})
        if layout not in layouts:
            layouts[layout] = None
            if confusable(layouts):
                self._confusable.add(place)
        return layout

    def becomes(self, layout: Layout) -> None:
        """Set how activations lie from here on. Local, and without effect where something is recomputed."""
        if current_graph_task_id() == -1:
            self._current = layout

    def resized(self, layout: Layout, target: Shape) -> Layout:
        """Return the layout of a field of other sizes: the same where a split dimension keeps its own."""
        resized = []
        for axis in self.axes:
            self.check_rows(target[axis.dim], axis)
        for axis, sizes in zip(self.axes, layout, strict=True):
            rows = target[axis.dim]
            if sum(sizes) != rows:
                sizes = even_parts(rows, axis.size)
            resized.append(sizes)
        return tuple(resized)

    def whole(self, layout: Layout, shape: Shape) -> list[int]:
        """Return the spatial sizes of the whole field, of a slab's shape (..., d1, ..., dN)."""
        sizes = list(self._spatial(shape))
        for axis, rows in zip(self.axes, layout, strict=True):
            sizes[axis.dim] = sum(rows)
        return sizes

    def own(self, layout: Layout) -> Sizes:
        """Return this rank's sizes along the split dimensions."""
        own = [sizes[axis.rank] for axis, sizes in zip(self.axes, layout, strict=True)]
        return tuple(own)

    def cut(self, field: Tensor, layout: Layout) -> Tensor:
        """Return this rank's slab of a whole field (..., d1, ..., dN), by this layout: a view. Local."""
        for axis, sizes in zip(self.axes, layout, strict=True):
            field = axis.own_part(field, self._parts(field, axis, sizes))
        return field

    def join(self, slab: Tensor, layout: Layout) -> Tensor:
        """Return the whole field, by this layout. Collective."""
        for index in reversed(range(len(layout))):
            axis = self.axes[index]
            parts = self._parts(slab, axis, layout[index])
            slab = gathered(slab, axis, parts)
        return slab

    def layout_of(self, slab: Tensor) -> Layout:
        """Return how a slab lies on the ranks: as it was marked, else as the ranks tell each other. Collective then."""
        mark = mark_of(slab)
        if mark is not None and mark.domain.same_ranks(self):
            return self.even(mark.sizes)
        return self._ask(slab.shape)

    def mark(
        self,
        slab: Tensor,
        sizes: Shape,
        total: Tensor | None = None,
    ) -> None:
        """Remember of which whole a tensor is this rank's slab, and the :func:`checksum` of that."""
        _marks[slab] = Mark(self, tuple(sizes), total)

    def same_ranks(self, other: Slabs) -> bool:
        """Return whether fields are split alike."""
        split = [(axis.dim, axis.ranks) for axis in self.axes]
        return split == [(axis.dim, axis.ranks) for axis in other.axes]

    def enter(self, layout: Layout) -> None:
        """Begin a forward, with a field that lies so. Local."""
        self._current = layout

    def leave(self, output: Tensor) -> Sizes:
        """Return the sizes of the whole of what a forward has returned. Local."""
        assert self._current is not None, "a forward that has entered"
        return tuple(self.whole(self._current, output.shape))

    def table(self, row: Tensor) -> Tensor:
        """Return ``row`` of all ranks: a dimension for each axis, then the row's. Collective."""
        for axis in reversed(self.axes):
            row = axis.rows(row)
        return row

    def fitting(self, rows: Tensor) -> Layout:
        """The layout, of the ranks' sizes along the split dimensions.

        Args:
            rows: a dimension for each axis, then one with each rank's sizes.

        Raises:
            RankMismatch: ranks that should have the same rows have not.
        """
        layout = []
        for dim, rows_of_dim in enumerate(rows.unbind(-1)):
            # One line for each number of the axis; the ranks of a line belong to different rows of the other axes.
            moved = rows_of_dim.movedim(dim, 0)
            lines = moved.reshape(len(moved), -1)
            if not bool((lines == lines[:, :1]).all()):
                raise RankMismatch(f"slabs do not fit together: along one split dimension, rows {lines.tolist()}")
            sizes = lines[:, 0].tolist()
            layout.append(tuple(sizes))
        return tuple(layout)

    def _ask(self, shape: Shape) -> Layout:
        rows = torch.tensor(self._rows(shape))
        return self.fitting(self.table(rows))

    def _rows(self, shape: Shape) -> Sizes:
        """Return this rank's sizes along the split dimensions, of a slab's shape."""
        spatial = self._spatial(shape)
        rows = [spatial[axis.dim] for axis in self.axes]
        return tuple(rows)

    def even(self, sizes: Shape) -> Layout:
        """Return the layout that ``torch.tensor_split`` gives a field of these spatial sizes."""
        layout = []
        for axis in self.axes:
            rows = even_parts(sizes[axis.dim], axis.size)
            layout.append(rows)
        return tuple(layout)

    def is_uneven(self, sizes: Shape) -> bool:
        """Return whether ranks have different numbers of rows of a field of these spatial sizes."""
        remainders = [sizes[axis.dim] % axis.size for axis in self.axes]
        return any(remainders)

    def _spatial(self, shape: Shape) -> Sizes:
        if len(shape) < self.order:
            raise ConfigurationError(f"expected at least {self.order} dimensions, got {tuple(shape)}")
        return tuple(shape[len(shape) - self.order :])

    def _parts(self, field: Tensor, axis: Axis, sizes: Sizes) -> Parts:
        return Parts(field.ndim - self.order + axis.dim, sizes)

    def check_rows(self, rows: int, axis: Axis) -> None:
        """Raise unless each rank can have a row."""
        if rows < axis.size:
            raise ConfigurationError(
                f"d{axis.dim + 1} has {rows} points, fewer than the {axis.size} ranks that it is split over"
            )
