"""One parameter as an optimizer sees it inside ``step()``: plain tensors over this rank's part, complex where it is."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsshard.backends.base import Backend
from fsshard.complex_params.pairs import viewable
from fsshard.complex_params.replaced import attributes_of
from fsshard.errors import OptimizerError
from fsshard.planning.entries import Entry
from fsshard.sharded.optimizer_matrices import Matrices
from fsshard.sharded.optimizer_whole import WholeEntry
from fsshard.state_objects import has_arrays, holds_objects, is_composite
from fsshard.torch_private.tensors import LOCAL_TENSOR, storage_key

# ------------------------------------------------------------------------------------------------ blocks

GRID = 64
"""A multiple of what any CPU kernel handles per iteration (AVX-512: 2 x 8 complex64)."""

GRAIN = 32768
"""``at::internal::GRAIN_SIZE``: a thread of an elementwise kernel has at least as many elements, or all of them."""


class Block(NamedTuple):
    """Elements [start, stop) of the local part, as [offset, offset + stop - start) of a tensor of ``size`` elements.

    ``size`` 0 means in place.
    """

    start: int
    stop: int
    offset: int
    size: int


@functools.lru_cache(maxsize=1024)
def blocks_of(start: int, stop: int, total: int, threads: int = 1) -> list[Block]:
    """Cut the part [start, stop) of ``total`` elements so that each is rounded as in the whole.

    torch's CPU kernels for complex products and quotients round differently in their vectorised body and in the scalar
    tail of a tensor (torch 2.13, AVX2 and AVX-512); torch's fused kernels round real numbers so, too. So a part is cut
    at multiples of :data:`GRID` elements of the *whole* tensor: the middle is stepped in place, and the block at either
    end in a copy as long as the block of the whole is. Each element then sits in the body or the tail as it does in the
    whole. Where torch may use several threads, each gets a stretch of a large tensor, which has a tail of its own.
    """
    blocks = []
    # The elements of one thread (ATen/ParallelOpenMP.h, invoke_parallel).
    shares = _shares(total, threads)
    stretch = max(1, _quotient_up(total, shares))
    for origin in range(0, total, stretch):
        end = min(origin + stretch, total)
        first = max(start, origin)
        last = min(stop, end)
        if first >= last:
            continue
        of_thread = _blocks_within(first - origin, last - origin, end - origin)
        for block in of_thread:
            blocks += _evenly(block, first - start, threads)
    return blocks


def _quotient_up(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _shares(elements: int, threads: int) -> int:
    """Return how many threads share an elementwise kernel."""
    return max(1, min(threads, _quotient_up(elements, GRAIN)))


def _evenly(block: Block, by: int, threads: int) -> list[Block]:
    """Return the block moved ``by`` elements, and cut where threads would not share it at multiples of GRID."""
    start = block.start + by
    stop = block.stop + by
    length = stop - start
    shares = _shares(length, threads)
    round_of_threads = shares * GRID
    whole_rounds = length // round_of_threads * round_of_threads
    even = max(whole_rounds, (shares - 1) * GRAIN)
    if shares == 1 or even == length:
        return [block._replace(start=start, stop=stop)]
    middle = start + even
    rest = Block(middle, stop, 0, 0)
    shared = Block(start, middle, 0, 0)
    return [shared, *_evenly(rest, 0, threads)]


def _blocks_within(start: int, stop: int, total: int) -> Iterator[Block]:
    """Cut the part [start, stop) of one thread's ``total`` elements at multiples of GRID."""
    edges = {start, stop}
    first_on_grid = _quotient_up(start, GRID) * GRID
    last_on_grid = stop // GRID * GRID
    for edge in (first_on_grid, last_on_grid):
        if start < edge < stop:
            edges.add(edge)
    for first, last in itertools.pairwise(sorted(edges)):
        origin = first // GRID * GRID
        size = 0
        ends_within = last % GRID and last != total
        if first != origin or ends_within:
            # In a copy as long as the block of the whole, so that body and tail are where they are there.
            size = min(origin + GRID, total) - origin
        offset = first - origin
        yield Block(first - start, last - start, offset, size)


# ------------------------------------------------------------------------------------------------ one parameter


@dataclass(eq=False)
class View:
    """A parameter's local part as an optimizer is shown it: in one piece, or in blocks.

    The pieces, and the state that the optimizer has for them, stay from step to step, since building them takes longer
    than most optimizers' arithmetic.

    Attributes:
        is_elsewhere: real numbers are shown otherwise than the engine's parameter holds them.
        pieces: stand for the local part.
        alone: the one piece, where it lies over the parameter's own memory and in its order; else None.
        address: of the local part when the pieces were made, whose ``shape`` it was.
    """

    entry: Entry
    is_complex: bool
    # Whether a whole one is shown with its dims in the user's order.
    is_turned: bool = False
    # Start and stop in the whole and its size, where there are blocks.
    part: tuple[int, int, int] | None = None
    # How many share a tensor, and each rounds its own tail; None: all that torch may use.
    threads: int | None = None
    # As which a whole one is shown; None: as it is shaped.
    matrices: Matrices | None = None

    def __post_init__(self) -> None:
        self.parameter = self.entry.parameter
        is_whole = isinstance(self.entry, WholeEntry)
        is_cut = self.part is not None or self.matrices is not None
        self._may_be_alone = not (is_cut or self.is_turned or is_whole)
        self.is_elsewhere = not self._may_be_alone or hasattr(self.parameter, LOCAL_TENSOR)
        # None: shown as it is shaped.
        self._blocks: list[Block] | None = None
        self.pieces: list[nn.Parameter] = []
        self.alone: nn.Parameter | None = None
        self.address = 0
        self.shape = torch.Size()

    # ------------------------------------------------------------------------------------------ in a step

    def begin(self, optimizer: Any, backend: Backend, *, gradients: bool) -> list[nn.Parameter]:
        """Let ``optimizer`` have the state and, with ``gradients``, the gradient of the pieces, and return these."""
        local = self.entry.local()
        self._place_pieces(optimizer, backend, local)
        if gradients:
            self.show_gradient()
        # Without pieces nobody could have the state, which then stays where it is.
        if self.pieces:
            at_rest = optimizer.state.pop(self.parameter, {})
            for key, value in at_rest.items():
                states = self._state_shown(value, local)
                for piece, shown in zip(self.pieces, states, strict=True):
                    optimizer.state.setdefault(piece, {})[key] = shown
        return self.pieces

    def show_complex(self, shown: bool, optimizer: Any, backend: Backend) -> None:
        """Show complex numbers as such from now on, or as pairs of reals."""
        self.rest(optimizer, backend)
        self.is_complex = shown
        self.pieces = []
        self.alone = None

    def _place_pieces(self, optimizer: Any, backend: Backend, local: Tensor) -> None:
        blocks = None
        if self.part is not None:
            threads = self.threads or torch.get_num_threads()
            blocks = blocks_of(*self.part, threads)
        same_blocks = blocks == self._blocks
        if not same_blocks or not self._is_in_place(local):
            # In the same blocks the pieces stay the objects that the optimizer knows, and get other memory.
            same_shape = self.shape == local.shape
            stay = same_blocks and same_shape and bool(self.pieces)
            if not stay:
                self.rest(optimizer, backend)
            self._blocks = blocks
            self._place_over(local, stay)
        requires_grad = self.parameter.requires_grad
        for piece in self.pieces:
            if piece.requires_grad != requires_grad:
                piece.requires_grad_(requires_grad)

    def _place_over(self, local: Tensor, stay: bool) -> None:
        values = self._cut(local)
        if not stay or self.pieces[0].dtype != values[0].dtype:
            self.pieces = []
            for value in values:
                piece = nn.Parameter(value, self.parameter.requires_grad)
                piece.__dict__.update(attributes_of(self.parameter))
                self.pieces.append(piece)
        memory = memory_of(local)
        for piece, value in zip(self.pieces, values, strict=True):
            if stay and memory_of(value) != memory:
                # A padded copy, or a mode: an optimizer may keep views of its memory.
                piece.data.copy_(value)
            else:
                piece.data = value
        self.address = local.data_ptr()
        self.shape = local.shape
        self.alone = self.pieces[0] if self._may_be_alone else None

    def _is_in_place(self, local: Tensor) -> bool:
        """Return whether the one piece lies over ``local``."""
        if self._blocks is not None or len(self.pieces) != 1:
            return False
        if self.shape != local.shape:
            return False
        # A piece keeps its memory alive: the same address is the same memory. What an engine has freed has none.
        return self.pieces[0].data_ptr() == local.data_ptr() == self.address

    def show_gradient(self) -> None:
        """Let the pieces have the engine's gradient, or none."""
        gradient = self.entry.grad()
        if gradient is None:
            for piece in self.pieces:
                piece.grad = None
            return
        parts = self._cut(gradient.detach())
        for piece, part in zip(self.pieces, parts, strict=True):
            piece.grad = part

    def end(self, optimizer: Any, backend: Backend, *, foreign: bool) -> None:
        """Write back what the optimizer has computed elsewhere, and take its gradients, which are the engine's."""
        keeps_gradient = foreign and self._keeps_gradient(optimizer)
        for piece in self.pieces:
            piece.grad = None
        local = self.entry.local()
        if not self._is_in_place(local):
            self.write_back()
        if keeps_gradient:
            # The engine will use the gradient's memory again; state at rest has memory of its own.
            self.rest(optimizer, backend)

    def _keeps_gradient(self, optimizer: Any) -> bool:
        """Return whether state lies in the memory of a gradient, which classes of others may keep."""
        gradients = set()
        for piece in self.pieces:
            if piece.grad is not None:
                gradients.add(memory_of(piece.grad))
        for piece in self.pieces:
            for value in optimizer.state.get(piece, {}).values():
                if isinstance(value, Tensor) and memory_of(value) in gradients:
                    return True
        return False

    def write_back(self) -> None:
        """Write into the local part what the pieces hold and is not in its memory already."""
        values = [piece.detach() for piece in self.pieces]
        self._write(values, self.entry.local())

    def take_gradient(self, backend: Backend) -> None:
        """Let the engine's gradient be what the optimizer has left: dropped, or changed in a padded copy."""
        gradient = self.entry.grad()
        if gradient is None:
            return
        parts = []
        for piece in self.pieces:
            if piece.grad is not None:
                parts.append(piece.grad)
        if len(parts) < len(self.pieces):
            # The optimizer has dropped it.
            backend.zero_grad([self.entry], set_to_none=True)
        elif self._blocks is not None or self.matrices is not None:
            self._write(parts, gradient.detach())

    # ------------------------------------------------------------------------------------------ state

    def _state_shown(self, value: Any, local: Tensor) -> list[Any]:
        """Return what each piece has of a state at rest."""
        value = self._as_at_rest(value, local)
        is_tensor = isinstance(value, Tensor)
        if is_tensor and value.shape == local.shape and not value.is_complex():
            return self._cut(value)
        if self.matrices is not None:
            if is_tensor and value.shape == self.entry.shape:
                # A real number for each complex one.
                return self.matrices.cut(value)
            return self.matrices.state_of_pieces(value, len(self.pieces))
        states = [value]
        for _ in self.pieces[1:]:
            # A step counter is counted up in place, by each piece.
            states.append(value.clone() if is_tensor else value)
        return states

    def _as_at_rest(self, value: Any, local: Tensor) -> Any:
        """Return state as it lies at rest, of which a user may have put what ``p.data`` is like: ``zeros_like`` it."""
        part = getattr(value, LOCAL_TENSOR, None)
        if part is None:
            return value
        is_complex = part.is_complex() and not local.is_complex()
        numel = part.numel()
        if is_complex:
            numel *= 2
        if numel == local.numel():
            stored = self.entry.kind.to_stored(part)
            return stored.reshape(local.shape)
        return part

    def rest(self, optimizer: Any, backend: Backend) -> None:
        """Put the state of the pieces back under the engine's parameter: real, and shaped like the local part."""
        states = [optimizer.state.pop(piece, {}) for piece in self.pieces]
        keys = set(map(frozenset, states))
        if len(keys) > 1:
            raise OptimizerError(
                f"{type(optimizer).__name__} keeps different state for different parts of {self.entry.name!r}"
            )
        # No piece, or no state yet.
        if not any(keys):
            return
        self._check_can_rest(states[0], optimizer, backend)
        local = self.entry.local()
        at_rest = {}
        for key, first in states[0].items():
            values = [state[key] for state in states]
            if self._is_shaped(first):
                memory = self._memory_at_rest(first, local)
                self._write(values, memory)
                at_rest[key] = memory
            elif self.matrices is not None:
                at_rest[key] = self._state_of_matrices(key, values)
            else:
                at_rest[key] = first
        optimizer.state[self.parameter] = at_rest

    def _is_shaped(self, value: Any) -> bool:
        """Return whether a piece's state is a tensor with an element for each of the piece."""
        if not isinstance(value, Tensor) or is_composite(value):
            return False
        return value.dim() > 0 and value.shape == self.pieces[0].shape

    def _check_can_rest(self, state: dict[str, Any], optimizer: Any, backend: Backend) -> None:
        """Raise for state of the first piece that could not be put together."""
        is_whole = isinstance(self.entry, WholeEntry)
        is_part = backend.facts.divides == "elements" and not is_whole
        for key, value in state.items():
            what = None
            if self._is_shaped(value):
                # A real number per complex one has no place in a part of pairs.
                if is_part and value.is_complex() != self.pieces[0].is_complex():
                    what = value.dtype
            elif self.matrices is None and len(self.pieces) > 1 and (has_arrays(value) or holds_objects(value)):
                # Each piece has one of its own, and nobody knows how they belong together.
                what = "something of a different shape"
            if what is None:
                continue
            raise OptimizerError(
                f"{type(optimizer).__name__} keeps state {key!r} as {what} for complex weights; "
                f"backend {backend.name!r} cannot shard that: use 'fairscale' or 'ddp', or see_complex=False"
            )

    def _state_of_matrices(self, key: str, values: list[Any]) -> Any:
        """Return as one value what is not shaped as the matrices are."""
        assert self.matrices is not None
        value = self.matrices.state_at_rest(values)
        shapes = (self.entry.stored_shape, self.entry.shape)
        if isinstance(value, Tensor) and value.shape in shapes:
            raise OptimizerError(
                f"state {key!r} of {self.entry.name!r} has the weight's shape {tuple(value.shape)}, and is none of its "
                "matrices: a checkpoint could not tell; keep its transpose, or keep it in a list"
            )
        return value

    def _memory_at_rest(self, piece: Tensor, local: Tensor) -> Tensor:
        """Return memory for a state whose piece is ``piece``: its own, unless it is the engine's gradient."""
        if piece.is_complex() != self.is_complex:
            # A real number for each complex one.
            seen = self._seen(local)
            return torch.zeros_like(seen, dtype=piece.dtype)
        real = torch.view_as_real(piece) if piece.is_complex() else piece
        # With its strides where they can be kept: a square factor's eigenvectors lie in columns, and products round so.
        has_strides = piece.is_contiguous() or real.shape == local.shape
        if has_strides and self._is_laid_as_at_rest():
            gradient = self.entry.grad()
            if gradient is None or memory_of(piece) != memory_of(gradient):
                return real.view(local.shape)
        return torch.zeros_like(local, dtype=real.dtype)

    def _is_laid_as_at_rest(self) -> bool:
        """Return whether the one piece has its elements in the order of the local part."""
        if self._blocks is not None or self.is_turned:
            return False
        return self.matrices is None or self.matrices.how == "matrix"

    # ------------------------------------------------------------------------------------------ pieces

    def _write(self, pieces: Sequence[Tensor], local: Tensor) -> None:
        """Write into a tensor shaped like the local part what pieces of it hold elsewhere."""
        if not pieces:
            return
        seen = local
        if pieces[0].is_complex() == self.is_complex:
            seen = self._seen(local)
        if self.matrices is not None:
            value = self.matrices.put_together(pieces, seen.shape)
            _write_to(seen, value)
        elif self._blocks is None:
            _write_to(seen, pieces[0])
        else:
            flat = seen.view(-1)
            for block, piece in zip(self._blocks, pieces, strict=True):
                target = flat[block.start : block.stop]
                if block.size:
                    piece = piece.narrow(0, block.offset, len(target))
                _write_to(target, piece)

    def _cut(self, local: Tensor) -> list[Tensor]:
        """Return the pieces of a tensor shaped like the local part, over its memory except at padded blocks."""
        seen = self._seen(local)
        if self.matrices is not None:
            return self.matrices.cut(seen)
        if self._blocks is None:
            return [seen]
        flat = seen.reshape(-1)
        pieces = []
        for block in self._blocks:
            piece = flat[block.start : block.stop]
            if block.size:
                padded = flat.new_zeros(block.size)
                padded.narrow(0, block.offset, len(piece)).copy_(piece)
                piece = padded
            pieces.append(piece)
        return pieces

    def _seen(self, local: Tensor) -> Tensor:
        shown = local
        if self.is_complex and not local.is_complex():
            pairs = local
            if local.dim() == 1:
                # A flat shard is of whole numbers: no pair is cut.
                pairs = local.view(local.numel() // 2, 2)
            shown = torch.view_as_complex(viewable(pairs))
        if not self.is_turned or local.shape != self.entry.stored_shape:
            return shown
        kind = self.entry.kind
        if shown.dim() == len(kind.order):
            return kind.turn_back(shown)
        # Pairs have one dim more, which stays the last.
        return shown.permute(*kind.way_back, -1)


def _write_to(target: Tensor, value: Tensor) -> None:
    if value.data_ptr() != target.data_ptr():
        target.copy_(value.view(target.shape))


def memory_of(tensor: Tensor) -> int:
    """Return a key of its memory, which tensors of a simulation have, too."""
    return storage_key(tensor.untyped_storage())


# ------------------------------------------------------------------------------------------------ many views

# Once per step, in loops without a Python call: one for each parameter takes longer than the kernels of a small model.


def pieces_in_place(
    views: Sequence[View | None], at_rest: Collection[int], *, gradients: bool
) -> list[nn.Parameter | None]:
    """Return the piece of each view that lies alone over the memory where it did; None for those that must begin.

    ``at_rest`` are ids of the parameters that the optimizer has state for: it is not under the pieces.
    """
    pieces: list[nn.Parameter | None] = []
    for view in views:
        pieces.append(None)
        if view is None or view.alone is None:
            continue
        piece = view.alone
        parameter = view.parameter
        local = getattr(parameter, LOCAL_TENSOR, parameter)
        address = view.address
        # The engine has other memory for it, or somebody has put the piece elsewhere.
        if local.data_ptr() != address or local.shape != view.shape:
            continue
        if piece.data_ptr() != address:
            continue
        if id(parameter) in at_rest:
            continue
        if piece.requires_grad != parameter.requires_grad:
            continue
        pieces[-1] = piece
        if not gradients:
            continue
        gradient = parameter.grad
        if gradient is None:
            piece.grad = None
            continue
        part = getattr(gradient, LOCAL_TENSOR, gradient).detach()
        if not view.is_complex or part.is_complex():
            piece.grad = part
            continue
        try:
            pairs = part
            if part.dim() == 1:
                pairs = part.view(part.numel() // 2, 2)
            piece.grad = torch.view_as_complex(pairs)
        except RuntimeError:
            # A part that begins at an odd place has no complex view, and is copied.
            view.show_gradient()
    return pieces


def end_all(views: Sequence[View], optimizer: Any, backend: Backend, *, foreign: bool) -> None:
    """Call :meth:`View.end` of views, but of those that lie alone over the memory where they did: they have ended."""
    for view in views:
        piece = view.alone
        if piece is not None and not foreign:
            piece.grad = None
            local = getattr(view.parameter, LOCAL_TENSOR, view.parameter)
            is_there = local.data_ptr() == view.address == piece.data_ptr()
            if is_there and local.shape == view.shape:
                continue
        view.end(optimizer, backend, foreign=foreign)
