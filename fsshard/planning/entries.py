"""A model's distinct parameters, each once, as an engine and its user know them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsshard.complex_params.layouts import Layout
from fsshard.complex_params.pairs import Kind, viewable
from fsshard.complex_params.slots import ModuleTable, ParameterSlot
from fsshard.torch_private.tensors import LOCAL_TENSOR


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The cuts of stored elements among ranks: equally long places in a row, one for each rank of the entry's group.

    Attributes:
        stride: elements of a place, padding included; even for complex numbers.
        offset: elements of the run in front of this parameter.
        buffer: the first parameter of the flat one that it lies in (FSDP1); "" where it has memory of its own.
        order: of dims in the run, where that is not the order of indices.
        strides: of the whole stored tensor, where they are not those of a contiguous one.
    """

    stride: int
    offset: int = 0
    buffer: str = ""
    order: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None


@dataclass(eq=False)
class Entry:
    """One distinct parameter under an engine.

    Where its elements lie is fixed when the model is wrapped; its memory is not: ask :meth:`local` each time.

    Attributes:
        name: the user's name, the first one where tied.
        kind: how storage and user's view relate.
        stored_shape: shape of the whole stored (real) tensor.
        slots: every place that holds it.
        parameter: the engine's parameter between steps: whole, a DTensor, or a flat shard.
        layouts: what it is along other mesh dimensions than data. "Whole" without more means whole over data.
        group: ranks of data that hold other elements of it, or own other parameters; None where all are replicas.
        cut: how its elements are divided among ``group``; None where each rank has all.
    """

    name: str
    kind: Kind
    stored_shape: torch.Size
    slots: list[ParameterSlot]
    parameter: nn.Parameter
    layouts: tuple[Layout, ...] = ()
    group: dist.ProcessGroup | None = None
    cut: Cut | None = None

    @property
    def shape(self) -> torch.Size:
        """Return the shape that the user sees of what is whole over data."""
        return self.kind.user_shape(self.stored_shape)

    @property
    def full_shape(self) -> torch.Size:
        """Return the shape of what is whole over all mesh dimensions."""
        shape = self.shape
        for layout in self.layouts:
            shape = layout.whole_shape(shape)
        return shape

    @property
    def divided_over(self) -> tuple[dist.ProcessGroup, ...]:
        """Return the groups of other mesh dimensions whose ranks have different elements of it."""
        groups = []
        for layout in self.layouts:
            groups += layout.divides
        return tuple(groups)

    def put_together(self, part: Tensor) -> Tensor:
        """Return what is whole over all mesh dimensions, of what is over data; both the user's. Collective."""
        for layout in self.layouts:
            part = layout.whole(part)
        return part

    def take_part(self, whole: Tensor) -> Tensor:
        """Return a rank's part of what :meth:`put_together` gives. No communication."""
        for layout in reversed(self.layouts):
            whole = layout.part(whole)
        return whole

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype that the user sees."""
        return self.kind.user_dtype(self.parameter.dtype)

    # ------------------------------------------------------------------------------------------ this rank's part

    def local(self) -> Tensor:
        """Return this rank's part of the stored parameter as a plain tensor, without a copy; between steps only."""
        # This is a DTensor's local tensor, without a dispatch.
        part: Tensor | None = getattr(self.parameter, LOCAL_TENSOR, None)
        if part is None:
            return self.parameter.detach()
        return part

    def grad(self) -> Tensor | None:
        """Return this rank's part of the stored gradient as a plain tensor, or None."""
        gradient = self.parameter.grad
        if gradient is None:
            return None
        return getattr(gradient, LOCAL_TENSOR, gradient)

    @property
    def is_cut(self) -> bool:
        """Return whether other ranks of data hold other elements."""
        return self.cut is not None and self.group is not None and self.group.size() > 1

    @property
    def in_order(self) -> bool:
        """Return whether each rank's part is a range of elements in index order; the same on every rank."""
        if self.cut is None or not self.is_cut:
            return True
        return not self.kind.order and self.cut.order is None

    @property
    def here(self) -> tuple[int, int]:
        """[start, stop) of this rank's part among the stored elements, in the order in which the engine lays them."""
        rank = 0 if self.group is None else self.group.rank()
        return self.part(rank)

    def part(self, rank: int) -> tuple[int, int]:
        """:attr:`here` of ``rank`` of the group."""
        total = self.stored_shape.numel()
        if self.cut is None:
            return 0, total
        start = rank * self.cut.stride - self.cut.offset
        stop = start + self.cut.stride
        return min(max(start, 0), total), min(max(stop, 0), total)

    def take(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole stored tensor, in the shape of :meth:`local`. No communication."""
        if self.cut is None:
            return whole
        if self.cut.order is not None:
            whole = whole.permute(self.cut.order)
        start, stop = self.here
        return whole.reshape(-1)[start:stop].view(self.local().shape)

    # ------------------------------------------------------------------------------------------ as checkpoints keep it

    @property
    def user_range(self) -> tuple[int, int]:
        """Return the range of the user's elements that this rank holds: a complex number is two stored ones."""
        start, stop = self.here
        width = 2 if self.kind.is_complex else 1
        assert start % width == stop % width == 0, f"{self.name}: a complex number is split between two ranks"
        return start // width, stop // width

    @property
    def pairs_shape(self) -> tuple[int, ...]:
        """Return the shape of a complex parameter's numbers as pairs in the user's order."""
        return (*self.full_shape, 2) if self.shape else tuple(self.stored_shape)

    def kept_as_pairs(self, dtype: torch.dtype) -> bool:
        """Return whether numbers of a stored dtype have no complex one of their width."""
        return self.kind.is_complex and dtype not in (torch.float32, torch.float64)

    def flat(self, stored: Tensor, *, whole: bool) -> Tensor:
        """Flatten stored elements to the user's dtype, if there is one so wide; what is whole, to the user's order."""
        pairs = self.kept_as_pairs(stored.dtype)
        if whole and self.kind.order:
            user: Tensor = stored.permute(*self.kind.way_back, -1) if pairs else self.kind.to_user(stored)
            return user.reshape(-1)
        flat = stored.reshape(-1)
        if pairs or not self.kind.is_complex:
            return flat
        return torch.view_as_complex(viewable(flat.view(-1, 2)))

    def put(self, whole: Tensor) -> None:
        """Copy this rank's part of ``whole`` into the parameter."""
        local = self.local()
        part = self.take(whole.to(dtype=local.dtype))
        local.copy_(part.view(local.shape))


def collect_entries(table: ModuleTable, layouts: Mapping[str, tuple[Layout, ...]] | None = None) -> dict[str, Entry]:
    """Return the distinct parameters of a model by first name, in the model's order.

    ``layouts`` are, by first name, what was said of a parameter along other mesh dimensions than data.
    """
    entries: dict[int, Entry] = {}
    for slot in table.slots():
        parameter = slot.parameter
        if id(parameter) in entries:
            # A tied parameter has several places, and one entry.
            entries[id(parameter)].slots.append(slot)
            continue
        entry = Entry(
            name=slot.name,
            kind=slot.kind,
            stored_shape=parameter.shape,
            slots=[slot],
            parameter=parameter,
        )
        if slot.kind.layout is not None:
            entry.layouts += (slot.kind.layout,)
        if layouts is not None:
            entry.layouts += layouts.get(slot.name, ())
        entries[id(parameter)] = entry
    return {entry.name: entry for entry in entries.values()}
