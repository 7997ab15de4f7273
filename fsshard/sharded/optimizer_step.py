"""What an optimizer sees inside ``step()``: this rank's shards, complex where the model is.

Engines hold real storage: whole tensors, DTensors, or flat shards. During a step each parameter is swapped in its
group for plain local tensors over the same memory, complex where the user's parameter is, and its state likewise. At
rest the state is real and shaped like the stored local part, so that it can be gathered, saved and resharded. So
optimizers that treat complex numbers as such keep their meaning (neuraloperator's AdamW uses |g|^2), and no kernel goes
through DTensor dispatch. What would look at its complex parameters as pairs of reals and do nothing else with them
(:data:`READS_PAIRS`) is shown the pairs at once: the same numbers without the way there and back.

*Shards and rounding.* torch's CPU kernels for complex products and quotients round differently in their vectorised
body and in the scalar tail of a tensor (torch 2.13, AVX2 and AVX-512), so an element of a shard can differ in the last
bit from the same element of the whole tensor. torch's own optimizers use no such kernel; for others the part of a
complex parameter is cut at multiples of ``GRID`` elements of the *whole* tensor: the middle is stepped in place, and
the block at either end is stepped in a copy as long as the block of the whole tensor is. Each element then sits in the
body or the tail as it does in the whole, and the result is the same to the last bit. Where torch has several threads,
each gets a stretch of a large tensor, which has a tail of its own. Then the cuts are at multiples of ``GRID`` elements
of the whole tensor's stretches, and the threads that share a part meet at such cuts. torch's fused kernels round real
numbers in their body and tail differently, too; their threads share a tensor by cache lines, so that parts are cut as
for one thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsshard.backends.base import Backend
from fsshard.complex_params.pairs import viewable
from fsshard.complex_params.replaced import attributes_of
from fsshard.errors import OptimizerError
from fsshard.nested import has_arrays
from fsshard.oss.inner_step import unhooked_step
from fsshard.planning.entries import Entry
from fsshard.torch_private.tensors import LOCAL_TENSOR

__all__ = ["is_stepping", "viewing_class"]

GRID = 64
"""A multiple of what any CPU kernel handles per iteration (AVX-512: 2 x 8 complex64)."""

GRAIN = 32768
"""``at::internal::GRAIN_SIZE``: a thread of an elementwise kernel has at least as many elements, or all of them."""

READS_PAIRS = (torch.optim.Adam, torch.optim.AdamW)
"""Take ``view_as_real`` of everything complex before any arithmetic but that of weight decay (torch 2.13)."""


class _Block(NamedTuple):
    """Elements [start, stop) of the local part, as [offset, offset + stop - start) of a tensor of ``size`` elements.

    ``size`` 0 means in place.
    """

    start: int
    stop: int
    offset: int
    size: int


@functools.lru_cache(maxsize=1024)
def blocks_of(start: int, stop: int, total: int, threads: int = 1) -> list[_Block]:
    """Cut the part [start, stop) of ``total`` elements so that each is rounded as in the whole.

    Args:
        start: of the part.
        stop: its end.
        total: elements of the whole.
        threads: that torch may use.
    """
    cuts: list[_Block] = []
    stretch = max(1, -(-total // _shares(total, threads)))  # of one thread (ATen/ParallelOpenMP.h, invoke_parallel)
    for origin in range(0, total, stretch):
        end = min(origin + stretch, total)
        first, last = max(start, origin), min(stop, end)
        if first < last:
            within = _blocks_within(first - origin, last - origin, end - origin)
            cuts += [moved for block in within for moved in _evenly(block, first - start, threads)]
    return cuts


def _shares(elements: int, threads: int) -> int:
    """Return how many threads share an elementwise kernel."""
    return max(1, min(threads, -(-elements // GRAIN)))


def _evenly(block: _Block, by: int, threads: int) -> list[_Block]:
    """Return the block moved ``by`` elements, and cut where threads would not share it at multiples of GRID."""
    start, stop = block.start + by, block.stop + by
    shares = _shares(stop - start, threads)
    even = max((stop - start) // (shares * GRID) * shares * GRID, (shares - 1) * GRAIN)
    if shares == 1 or even == stop - start:
        return [block._replace(start=start, stop=stop)]
    return [_Block(start, start + even, 0, 0), *_evenly(_Block(start + even, stop, 0, 0), 0, threads)]


def _blocks_within(start: int, stop: int, total: int) -> list[_Block]:
    """Cut the part [start, stop) of one thread's ``total`` elements at multiples of :data:`GRID`."""
    cuts: list[_Block] = []
    first, last = -(-start // GRID) * GRID, stop // GRID * GRID
    position = start
    while position < stop:
        if position == first and first < last:
            cuts.append(_Block(first - start, last - start, 0, 0))
            position = last
            continue
        origin = position // GRID * GRID
        end = min(origin + GRID, total)
        upto = min(end, stop)
        whole = position == origin and upto == end
        cuts.append(_Block(position - start, upto - start, position - origin, 0 if whole else end - origin))
        position = upto
    return cuts


class _View:
    """One parameter as an optimizer is shown it: its local part in one piece, or in blocks.

    What a step has made the next one uses again, if the memory is still the same: building it for each parameter takes
    longer than most optimizers' arithmetic.

    Attributes:
        entry: the parameter.
        is_complex: shown as complex numbers.
        turned: a whole one is shown with its dims in the user's order.
        pieces: the parameters that stand for the local part.
        state: in a step, the state at rest.
    """

    def __init__(
        self,
        entry: Entry,
        is_complex: bool,
        turned: bool = False,
        part: tuple[int, int, int] | None = None,
        threads: int | None = None,
    ) -> None:
        """
        Args:
            entry: as above.
            is_complex: as above.
            turned: as above.
            part: start and stop in the whole, and the whole's size, where it is cut into blocks.
            threads: that share a tensor, and each round its own tail; None: all that torch may use.
        """
        self.entry, self.is_complex, self.turned = entry, is_complex, turned
        self._part, self._threads = part, threads
        self.blocks: list[_Block] | None = None  # of this step; None: shown as it is shaped
        self.pieces: list[nn.Parameter] = []
        self.state: dict[str, Any] = {}
        self._over: tuple[int, torch.Size] | None = None  # address and shape of the local part
        self._rest: dict[str, Any] = {}  # the state at rest of the step before,
        self._shown: dict[str, Any] = {}  # and as the optimizer saw it

    # ------------------------------------------------------------------------------------------ before a step

    def begin(self, optimizer: Optimizer | _Unbuilt, *, gradients: bool) -> list[nn.Parameter]:
        """Let ``optimizer`` have the state and, with ``gradients``, the gradient of the pieces, and return these."""
        local = self.entry.local()
        self._place_pieces(local)
        self.state = optimizer.state.pop(self.entry.parameter, {})
        if gradients:
            self.show_gradient()
        if self.state:
            self._show_state(optimizer, local)
        return self.pieces

    def _place_pieces(self, local: Tensor) -> None:
        parameter, before = self.entry.parameter, self.blocks
        if self._part is not None:
            self.blocks = blocks_of(*self._part, self._threads or torch.get_num_threads())
        if not self._in_place(local):
            values, over = self._cut(local), (local.data_ptr(), local.shape)
            same = self.blocks == before and (self._over or over)[1] == local.shape
            if not same or [piece.dtype for piece in self.pieces] != [value.dtype for value in values]:
                self.pieces = [_piece_over(value, parameter) for value in values]
            for number, (piece, value) in enumerate(zip(self.pieces, values, strict=True)):
                if same and self.blocks and self.blocks[number].size:
                    piece.data.copy_(value)  # a padded copy; an optimizer may keep views of it,
                else:
                    piece.data = value  # and the object, which is the same as before
            self._over, self._rest = over, {}
        for piece in self.pieces:
            if piece.requires_grad != parameter.requires_grad:
                piece.requires_grad_(parameter.requires_grad)

    def _in_place(self, local: Tensor) -> bool:
        """Return whether the one piece lies over ``local``.

        It keeps its memory alive, so that the same address is the same memory; what an engine has freed has none.
        """
        alone = self.blocks is None and len(self.pieces) == 1
        return alone and self.pieces[0].data_ptr() == local.data_ptr() and self._over == (local.data_ptr(), local.shape)

    def show_gradient(self) -> None:
        """Let the pieces have the engine's gradient, or none."""
        gradient = self.entry.grad()
        parts = [None] * len(self.pieces) if gradient is None else self._cut(gradient.detach())
        for piece, part in zip(self.pieces, parts, strict=True):
            piece.grad = part

    def _show_state(self, optimizer: Optimizer | _Unbuilt, local: Tensor) -> None:
        if self.blocks is None and self._shows_state():
            optimizer.state[self.pieces[0]] = self._shown.copy()
            return
        for index, piece in enumerate(self.pieces):
            optimizer.state[piece] = {
                key: self._cut(value)[index] if _per_element(value, local) else _own_copy(value, index)
                for key, value in self.state.items()
            }
        if self.blocks is None:
            self._rest, self._shown = dict(self.state), dict(optimizer.state[self.pieces[0]])

    def _shows_state(self) -> bool:
        """Return whether what was shown in the step before stands for the state of now, over the same memory."""
        if len(self._rest) != len(self.state):
            return False
        for key, value in self.state.items():
            shown: Any = self._shown[key] if self._rest.get(key, self) is value else None
            if shown is not value and (shown is None or shown.data_ptr() != value.data_ptr()):
                return False
        return True

    # ------------------------------------------------------------------------------------------ after a step

    def end(self, optimizer: Optimizer | _Unbuilt, backend: Backend) -> None:
        """Take back what the optimizer was given, and keep what it has made of it."""
        local = self.entry.local()
        states = [optimizer.state.pop(piece, {}) for piece in self.pieces]
        for piece in self.pieces:
            piece.grad = None  # it is the engine's to keep or drop
        if self._in_place(local) and self._left_alone(states[0]):
            states = [self.state] if self.state else []
        else:
            self.write_back()
            states = [self._at_rest(optimizer, states, local, backend)] if any(states) else []
        if states:
            optimizer.state[self.entry.parameter] = states[0]

    def _left_alone(self, state: Mapping[str, Any]) -> bool:
        """Return whether the optimizer has left in ``state`` the tensors that it was shown, and put in no others."""
        shown = self._shown if self.state else {}
        return len(shown) == len(state) and all(
            shown.get(key) is value and isinstance(value, Tensor) for key, value in state.items()
        )

    def write_back(self) -> None:
        """Write into the local part what the pieces hold and is not in its memory already."""
        self._write([piece.detach() for piece in self.pieces], self.entry.local())

    def _write(self, pieces: Sequence[Tensor], local: Tensor) -> None:
        if self.blocks is None and pieces[0].data_ptr() == local.data_ptr():
            return
        seen = self._seen(local) if pieces and pieces[0].is_complex() == self.is_complex else local
        places = [(seen, piece) for piece in pieces]
        if self.blocks is not None:
            flat, inside = seen.view(-1), zip(self.blocks, pieces, strict=True)
            places = [(flat[b.start : b.stop], p[b.offset :][: b.stop - b.start] if b.size else p) for b, p in inside]
        for target, value in places:
            if value.data_ptr() != target.data_ptr():
                target.copy_(value.view(target.shape))

    def _at_rest(
        self, optimizer: Optimizer | _Unbuilt, states: list[dict[str, Any]], local: Tensor, backend: Backend
    ) -> dict[str, Any]:
        """Return the state as it is kept between steps."""
        at_rest = dict(self.state)
        for key, first in states[0].items():
            shaped = isinstance(first, Tensor) and first.shape == self.pieces[0].shape and first.dim()
            if not shaped and not (len(states) > 1 and has_arrays(first)):
                at_rest[key] = first
                continue
            real = shaped and backend.facts.divides == "elements" and first.is_complex() != self.pieces[0].is_complex()
            if real or not shaped:
                what = first.dtype if shaped else "something of another shape"
                raise OptimizerError(
                    f"{type(optimizer).__name__} keeps state {key!r} as {what} for complex weights; "
                    f"backend {backend.name!r} cannot shard that: use 'fairscale' or 'ddp', or see_complex=False"
                )
            if not _per_element(at_rest.get(key), local):
                at_rest[key] = self._memory_at_rest(first, local)
            self._write([state[key] for state in states], at_rest[key])
        return at_rest

    def _memory_at_rest(self, piece: Tensor, local: Tensor) -> Tensor:
        """Return memory for a state whose piece is ``piece``: its own, unless it is the engine's gradient."""
        if piece.is_complex() != self.is_complex:
            return torch.zeros_like(self._seen(local), dtype=piece.dtype)  # a real number per complex one
        gradient, real = self.entry.grad(), torch.view_as_real(piece) if piece.is_complex() else piece
        own = gradient is None or piece.data_ptr() != gradient.data_ptr()
        if own and self.blocks is None and not self.turned and piece.is_contiguous():
            return real.view(local.shape)
        return torch.zeros_like(local, dtype=real.dtype)

    def take_gradient(self, backend: Backend) -> None:
        """Let the engine's gradient be what the optimizer has left: dropped, or changed in a padded copy."""
        gradient, parts = self.entry.grad(), [piece.grad for piece in self.pieces]
        if gradient is None:
            return
        if any(part is None for part in parts):
            backend.zero_grad([self.entry], set_to_none=True)
        elif self.blocks is not None:
            self._write([part for part in parts if part is not None], gradient.detach())

    # ------------------------------------------------------------------------------------------ shapes

    def _cut(self, local: Tensor) -> list[Tensor]:
        """Return the pieces of a tensor shaped like the local part, over its memory except at padded blocks."""
        seen = self._seen(local)
        if self.blocks is None:
            return [seen]
        flat, pieces = seen.reshape(-1), []
        for block in self.blocks:
            piece = flat[block.start : block.stop]
            if block.size:
                padded = flat.new_zeros(block.size)
                padded[block.offset : block.offset + piece.numel()] = piece
                piece = padded
            pieces.append(piece)
        return pieces

    def _seen(self, local: Tensor) -> Tensor:
        shown = local
        if self.is_complex and not local.is_complex():
            pairs = local if local.dim() > 1 else local.view(local.numel() // 2, 2)  # a flat shard of whole numbers
            shown = torch.view_as_complex(viewable(pairs))
        if not self.turned or local.shape != self.entry.stored_shape:
            return shown
        kind = self.entry.kind
        return kind.turn_back(shown) if shown.dim() == len(kind.order) else shown.permute(*kind.way_back, -1)


def _piece_over(value: Tensor, parameter: nn.Parameter) -> nn.Parameter:
    piece = nn.Parameter(value, parameter.requires_grad)
    piece.__dict__.update(attributes_of(parameter))
    return piece


def _own_copy(value: Any, index: int) -> Any:
    return value.clone() if index and isinstance(value, Tensor) else value  # a step counter is counted up in place


def _per_element(value: object, local: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == local.shape and not value.is_complex()


@dataclass
class _Unbuilt:
    """Stands for an optimizer that is about to be built."""

    param_groups: list[dict[str, Any]]
    state: dict[nn.Parameter, dict[str, Any]] = field(default_factory=dict)


class _Shards:
    """All parameters of a model as one optimizer is shown them.

    Attributes:
        backend: the model's.
        foreign: the class is not torch's: of those much is looked after that torch's own do not do.
    """

    def __init__(self, optimizer_class: type[Optimizer], backend: Backend, see_complex: bool, fused: bool) -> None:
        self.backend, self.foreign = backend, not optimizer_class.__module__.startswith("torch.optim")
        self._views = {id(entry.parameter): self._view_of(entry, see_complex, fused) for entry in backend.all}
        self._undecayed = self._views
        if optimizer_class in READS_PAIRS:
            self._undecayed = {
                key: (_View(view.entry, False) if hasattr(view.entry.parameter, LOCAL_TENSOR) or view.turned else None)
                if view is not None and view.is_complex
                else view
                for key, view in self._views.items()
            }

    def _view_of(self, entry: Entry, see_complex: bool, fused: bool) -> _View | None:
        """Return how a parameter is shown; None: as it is."""
        divided = self.backend.facts.divides == "elements" and self.backend.settings.world_size > 1
        is_complex, part, threads = see_complex and entry.kind.is_complex, None, None
        if divided and self.backend.settings.device.type == "cpu":
            (start, stop), total = entry.here, entry.stored_shape.numel()
            if self.foreign and is_complex:
                part = (start // 2, stop // 2, total // 2)
            elif fused and (start % GRID or (stop % GRID and stop < total)):
                part, threads = (start, stop, total), 1
        turned = bool(entry.kind.order) and not divided  # a part of a parameter has no dims of its own
        shown = is_complex or part is not None or turned or hasattr(entry.parameter, LOCAL_TENSOR)
        return _View(entry, is_complex, turned, part, threads) if shown else None

    def show(self, optimizer: Optimizer | _Unbuilt, *, gradients: bool = True) -> list[_View]:
        """Put in the groups what the optimizer is to see, and return the views among it."""
        views = []
        for group in optimizer.param_groups:
            # Weight decay is a product with a complex number in torch, of other zeros and infinities than a real one.
            known = self._undecayed if group.get("weight_decay") == 0 else self._views
            shown: list[nn.Parameter] = []
            for parameter in group["params"]:
                if id(parameter) not in known:
                    raise OptimizerError(
                        "the optimizer holds a parameter that is not the model's; build it with fsshard.build_optimizer"
                    )
                view = known[id(parameter)]
                if view is None:
                    shown.append(parameter)
                else:
                    shown += view.begin(optimizer, gradients=gradients)
                    views.append(view)
            group["params"][:] = shown  # in place: LBFGS keeps the list
        return views

    def hold(self, optimizer: Optimizer, views: list[_View]) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the parameters that are shown themselves, with their memory, which is the engine's."""
        pieces = {id(piece) for view in views for piece in view.pieces}
        shown = (parameter for group in optimizer.param_groups for parameter in group["params"])
        return [(parameter, parameter.data) for parameter in shown if id(parameter) not in pieces]

    def build(self, optimizer: Any, constructor: Any, groups: Sequence[dict[str, Any]], defaults: Any) -> None:
        """Run the constructor of the user's class over what ``step`` shows.

        Whoever keeps parameters, or views of them (DistributedShampoo its blocks), has those that are trained.
        """
        unbuilt = _Unbuilt([{**group, "params": list(group["params"])} for group in groups])
        with torch.no_grad():
            views = self.show(unbuilt)
        constructor(unbuilt.param_groups, **defaults)
        with torch.no_grad():
            _take_state_back(optimizer, views, self.hold(optimizer, views))
            stored = {id(piece): view.entry.parameter for view in views for piece in view.pieces}
            # This rank has no element of them, so that the constructor has not seen them.
            unseen = {id(view.entry.parameter) for view in views if not view.pieces}
            for number, group in enumerate(optimizer.param_groups):
                kept = {id(stored.get(id(p), p)): stored.get(id(p), p) for p in group["params"]}
                given = list(groups[number]["params"]) if number < len(groups) else []
                regrouped = kept.keys() - {id(p) for p in given}  # the class makes groups of its own
                whole = [p for p in given if id(p) in kept or id(p) in unseen]
                group["params"][:] = kept.values() if regrouped else whole
            for view in views:
                view.end(optimizer, self.backend)

    def step(self, optimizer: Any, base_step: Any, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
        """Run the step of the user's class over what it is shown."""
        groups = [list(group["params"]) for group in optimizer.param_groups]
        with torch.no_grad():
            views = self.show(optimizer, gradients=not optimizer.gradients_are_local)
            held = self.hold(optimizer, views) if self.foreign else []
            if self.foreign:
                _lend_state(optimizer)
        given = () if closure is None else (self._refreshing(optimizer, closure, views, held),)
        try:
            _under_way.append(optimizer)
            return base_step(optimizer, *given, **kwargs)
        finally:
            _under_way.pop()
            for group, members in zip(optimizer.param_groups, groups, strict=True):
                group["params"][:] = members
            with torch.no_grad():
                _put_back(held)
                if self.foreign:
                    _take_state_back(optimizer, views, held)
                for view in views:
                    view.end(optimizer, self.backend)

    def _refreshing(
        self,
        optimizer: Any,
        closure: Callable[[], Any],
        views: list[_View],
        held: list[tuple[nn.Parameter, Tensor]],
    ) -> Callable[[], Any]:
        """Return the closure, before which the engine sees what the optimizer has done, and which shows new gradients.

        Closures of :class:`~fsshard.sharded.optimizer.ShardedOptimizer` finish their gradients themselves.
        """
        called = False

        def closure_then_gradients() -> Any:
            nonlocal called
            with torch.no_grad():
                _put_back(held)
                for view in views:
                    view.write_back()
                    if called or not optimizer.gradients_are_local:
                        view.take_gradient(self.backend)
                if called or not optimizer.begins_with_closure:
                    self.backend.before_closure(optimizer)
            called = True
            loss = closure()
            for view in views:
                view.show_gradient()
            return loss

        return closure_then_gradients


def viewing_class(
    optimizer_class: type[Optimizer], backend: Backend, see_complex: bool, *, fused: bool = False
) -> type[Optimizer]:
    """Make a subclass of ``optimizer_class`` whose ``step`` works on views of this rank's parts, fused or not."""
    shards, base_step = _Shards(optimizer_class, backend, see_complex, fused), unhooked_step(optimizer_class)

    class Viewing(optimizer_class):  # type: ignore[misc, valid-type]
        gradients_are_local = False  # no optimizer may see them then; only a closure can make others
        begins_with_closure = False  # it calls the closure before it reads or writes anything

        if shards.foreign:

            def __init__(self, groups: Sequence[dict[str, Any]], **defaults: Any) -> None:
                shards.build(self, super().__init__, groups, defaults)

        def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            return shards.step(self, base_step, closure, kwargs)

        step.hooked = True  # type: ignore[attr-defined]  # ShardedOptimizer runs the hooks

    Viewing.__name__, Viewing.__qualname__ = optimizer_class.__name__, optimizer_class.__qualname__
    Viewing.__module__ = optimizer_class.__module__
    return Viewing


_under_way: list[Optimizer] = []


def is_stepping() -> bool:
    """Return whether an optimizer of ours is within its step: those inside of it step the same parameters."""
    return bool(_under_way)


def _inner(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Optimizers that the user's keeps inside of it, by attribute: SAM's base optimizer."""
    return {name: value for name, value in vars(optimizer).items() if isinstance(value, Optimizer)}


def _lend_state(optimizer: Optimizer) -> None:
    """Give optimizers inside what is theirs. At rest it lies in the outer one's state, as ``"base/momentum_buffer"``:
    a parameter that is shown is another object in another step, and is in nobody's state dict."""
    for name, inner in _inner(optimizer).items():
        for parameter, state in optimizer.state.items():
            theirs = [key for key in state if isinstance(key, str) and key.startswith(f"{name}/")]
            if theirs:
                inner.state[parameter] = {key.removeprefix(f"{name}/"): state.pop(key) for key in theirs}


def _take_state_back(optimizer: Optimizer, views: list[_View], held: list[tuple[nn.Parameter, Tensor]]) -> None:
    for name, inner in _inner(optimizer).items():
        for parameter in (*(piece for view in views for piece in view.pieces), *(parameter for parameter, _ in held)):
            for key, value in inner.state.pop(parameter, {}).items():
                optimizer.state[parameter][f"{name}/{key}"] = value


def _put_back(held: list[tuple[nn.Parameter, Tensor]]) -> None:
    """Write into the engine's memory what ``p.data = ...`` has put elsewhere (SAM does): it sends and cuts its own."""
    for parameter, memory in held:
        if parameter.data_ptr() != memory.data_ptr():
            memory.copy_(parameter.data)
            parameter.data = memory
