"""The parameters that an optimizer sees inside ``step()``: this rank's shards, complex where the model is.

Engines hold real storage: whole tensors, DTensors, or flat shards. During a step each parameter is swapped in its
group for plain local tensors over the same memory, complex where the user's parameter is, and its state likewise, so
that optimizers which treat complex numbers as such keep their meaning (neuraloperator's AdamW uses |g|^2). At rest the
state is real and shaped like the stored local part. :func:`blocks_of` cuts shards so that they round as the whole does.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsshard.backends.base import Backend
from fsshard.complex_params.pairs import viewable
from fsshard.complex_params.replaced import attributes_of
from fsshard.errors import OptimizerError
from fsshard.oss.partitioned import unhooked_step
from fsshard.planning.entries import Entry
from fsshard.sharded.optimizer_checks import OptimizerRequest
from fsshard.sharded.optimizer_lbfgs import lbfgs_over
from fsshard.sharded.optimizer_matrices import Matrices
from fsshard.sharded.optimizer_whole import Owners, WholeEntry
from fsshard.state_objects import has_arrays, holds_objects, is_composite
from fsshard.torch_private.tensors import LOCAL_TENSOR, storage_key

GRID = 64
"""A multiple of what any CPU kernel handles per iteration (AVX-512: 2 x 8 complex64)."""

GRAIN = 32768
"""``at::internal::GRAIN_SIZE``: a thread of an elementwise kernel has at least as many elements, or all of them."""

READS_PAIRS = (torch.optim.Adam, torch.optim.AdamW)
"""Take ``view_as_real`` of everything complex before any arithmetic but that of weight decay (torch 2.13).

Shown the pairs at once they compute the same numbers, without making four views of each parameter in each step.
"""

# ------------------------------------------------------------------------------------------------ blocks


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

    torch's CPU kernels for complex products and quotients round differently in their vectorised body and in the scalar
    tail of a tensor (torch 2.13, AVX2 and AVX-512); torch's fused kernels round real numbers so, too. So a part is cut
    at multiples of :data:`GRID` elements of the *whole* tensor: the middle is stepped in place, and the block at either
    end in a copy as long as the block of the whole is. Each element then sits in the body or the tail as it does in the
    whole. Where torch may use several threads, each gets a stretch of a large tensor, which has a tail of its own.
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


def _blocks_within(start: int, stop: int, total: int) -> Iterator[_Block]:
    """Cut the part [start, stop) of one thread's ``total`` elements at multiples of GRID."""
    inner = {-(-start // GRID) * GRID, stop // GRID * GRID}
    for first, last in itertools.pairwise(sorted({start, stop, *(edge for edge in inner if start < edge < stop)})):
        origin = first // GRID * GRID
        in_place = first == origin and (last % GRID == 0 or last == total)
        size = 0 if in_place else min(origin + GRID, total) - origin
        yield _Block(first - start, last - start, first - origin, size)


# ------------------------------------------------------------------------------------------------ one parameter


class _View:
    """One parameter as an optimizer is shown it: its local part in one piece, or in blocks.

    The pieces, and the state that the optimizer has for them, stay from step to step, since building them takes longer
    than most optimizers' arithmetic.
    """

    def __init__(
        self,
        entry: Entry,
        is_complex: bool,
        turned: bool = False,  # a whole one is shown with its dims in the user's order
        part: tuple[int, int, int] | None = None,  # start and stop in the whole and its size, where there are blocks
        threads: int | None = None,  # share a tensor, and each rounds its own tail; None: all that torch may use
        matrices: Matrices | None = None,  # as which a whole one is shown; None: as it is shaped
    ) -> None:
        self.entry, self.is_complex, self.turned = entry, is_complex, turned
        self._part, self._threads, self._matrices = part, threads, matrices
        # Whether real numbers are shown otherwise than the engine's parameter holds them.
        self.is_elsewhere = part is not None or turned or matrices is not None or isinstance(entry, WholeEntry)
        self.is_elsewhere |= hasattr(entry.parameter, LOCAL_TENSOR)
        self.blocks: list[_Block] | None = None  # None: shown as it is shaped
        self.pieces: list[nn.Parameter] = []  # stand for the local part
        self._over: tuple[int, torch.Size] | None = None  # address and shape of the local part

    def begin(self, optimizer: Any, backend: Backend, *, gradients: bool) -> list[nn.Parameter]:
        """Let ``optimizer`` have the state and, with ``gradients``, the gradient of the pieces, and return these."""
        local = self.entry.local()
        self._place_pieces(optimizer, backend, local)
        if gradients:
            self.show_gradient()
        at_rest = optimizer.state.pop(self.entry.parameter, {}) if self.pieces else {}
        shown = {key: self._state_shown(value, local) for key, value in at_rest.items()}
        for index, piece in enumerate(self.pieces if at_rest else ()):
            optimizer.state[piece] = {key: values[index] for key, values in shown.items()}
        return self.pieces

    def show_complex(self, shown: bool, optimizer: Any, backend: Backend) -> None:
        """Show complex numbers as such from now on, or as pairs of reals."""
        if shown != self.is_complex:
            self.rest(optimizer, backend)
            self.is_complex, self.pieces, self._over = shown, [], None

    def _state_shown(self, value: Any, local: Tensor) -> list[Any]:
        """Return what each piece has of a state at rest."""
        value = self._as_at_rest(value, local)
        if isinstance(value, Tensor) and value.shape == local.shape and not value.is_complex():
            return self._cut(value)
        if self._matrices is not None:
            if isinstance(value, Tensor) and value.shape == self.entry.shape:  # a real number per complex one
                return self._matrices.cut(value)
            return self._matrices.state_of_pieces(value, len(self.pieces))
        # A step counter is counted up in place, by each piece.
        return [value, *(value.clone() if isinstance(value, Tensor) else value for _ in self.pieces[1:])]

    def _as_at_rest(self, value: Any, local: Tensor) -> Any:
        """Return state as it lies at rest, of which a user may have put what ``p.data`` is like: ``zeros_like`` it."""
        part: Tensor | None = getattr(value, LOCAL_TENSOR, None)
        if part is None:
            return value
        is_complex = part.is_complex() and not local.is_complex()
        if part.numel() * (1 + is_complex) == local.numel():
            return self.entry.kind.to_stored(part).reshape(local.shape)
        return part

    def _place_pieces(self, optimizer: Any, backend: Backend, local: Tensor) -> None:
        parameter, before = self.entry.parameter, self.blocks
        blocks = None if self._part is None else blocks_of(*self._part, self._threads or torch.get_num_threads())
        if blocks != before or not self._in_place(local):
            same = blocks == before and self._over is not None and self._over[1] == local.shape
            if not same:
                self.rest(optimizer, backend)
            self.blocks = blocks
            values = self._cut(local)
            if not same or [piece.dtype for piece in self.pieces] != [value.dtype for value in values]:
                self.pieces = [nn.Parameter(value, parameter.requires_grad) for value in values]
                for piece in self.pieces:
                    piece.__dict__.update(attributes_of(parameter))
            memory = _memory_of(local)
            for piece, value in zip(self.pieces, values, strict=True):
                if same and _memory_of(value) != memory:
                    piece.data.copy_(value)  # a padded copy, or a mode; an optimizer may keep views of it,
                else:
                    piece.data = value  # and the object, which is the same as before
            self._over = (local.data_ptr(), local.shape)
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

    def end(self, optimizer: Any, backend: Backend, *, foreign: bool) -> None:
        """Write back what the optimizer has computed elsewhere, and take its gradients, which are the engine's."""
        gradients = {_memory_of(piece.grad) for piece in self.pieces if piece.grad is not None} if foreign else set()
        for piece in self.pieces:
            piece.grad = None
        if not self._in_place(self.entry.local()):
            self.write_back()
        values = [v for p in self.pieces for v in optimizer.state.get(p, {}).values()] if gradients else []
        if any(isinstance(value, Tensor) and _memory_of(value) in gradients for value in values):
            self.rest(optimizer, backend)  # it keeps a gradient, whose memory the engine will use again

    def write_back(self) -> None:
        """Write into the local part what the pieces hold and is not in its memory already."""
        self._write([piece.detach() for piece in self.pieces], self.entry.local())

    def take_gradient(self, backend: Backend) -> None:
        """Let the engine's gradient be what the optimizer has left: dropped, or changed in a padded copy."""
        gradient, parts = self.entry.grad(), [piece.grad for piece in self.pieces]
        if gradient is None:
            return
        if any(part is None for part in parts):
            backend.zero_grad([self.entry], set_to_none=True)
        elif self.blocks is not None or self._matrices is not None:
            self._write([part for part in parts if part is not None], gradient.detach())

    def _write(self, pieces: Sequence[Tensor], local: Tensor) -> None:
        seen = self._seen(local) if pieces and pieces[0].is_complex() == self.is_complex else local
        places = [(seen, piece) for piece in pieces]
        if self._matrices is not None:
            places = [(seen, self._matrices.put_together(pieces, seen.shape))] if pieces else []
        elif self.blocks is not None:
            flat, inside = seen.view(-1), zip(self.blocks, pieces, strict=True)
            places = [(flat[b.start : b.stop], p[b.offset :][: b.stop - b.start] if b.size else p) for b, p in inside]
        for target, value in places:
            if value.data_ptr() != target.data_ptr():
                target.copy_(value.view(target.shape))

    def rest(self, optimizer: Any, backend: Backend) -> None:
        """Put the state of the pieces back under the engine's parameter: real, and shaped like the local part."""
        states = [optimizer.state.pop(piece, {}) for piece in self.pieces]
        if len(set(map(frozenset, states))) > 1:
            raise OptimizerError(
                f"{type(optimizer).__name__} keeps different state for different parts of {self.entry.name!r}"
            )
        local, at_rest = self.entry.local(), dict[str, Any]()
        for key, first in (states[0] if states else {}).items():
            shaped = isinstance(first, Tensor) and first.shape == self.pieces[0].shape and first.dim()
            shaped = shaped and not is_composite(first)
            if not shaped and self._matrices is not None:
                at_rest[key] = self._state_of_matrices(key, [state[key] for state in states])
                continue
            if not shaped and not (len(states) > 1 and (has_arrays(first) or holds_objects(first))):
                at_rest[key] = first
                continue
            is_part = backend.facts.divides == "elements" and not isinstance(self.entry, WholeEntry)
            real = shaped and is_part and first.is_complex() != self.pieces[0].is_complex()
            if real or not shaped:
                what = first.dtype if shaped else "something of a different shape"
                raise OptimizerError(
                    f"{type(optimizer).__name__} keeps state {key!r} as {what} for complex weights; "
                    f"backend {backend.name!r} cannot shard that: use 'fairscale' or 'ddp', or see_complex=False"
                )
            at_rest[key] = self._memory_at_rest(first, local)
            self._write([state[key] for state in states], at_rest[key])
        if at_rest:
            optimizer.state[self.entry.parameter] = at_rest

    def _state_of_matrices(self, key: str, values: list[Any]) -> Any:
        """Return as one value what is not shaped as the matrices are."""
        assert self._matrices is not None
        value = self._matrices.state_at_rest(values)
        if isinstance(value, Tensor) and value.shape in (self.entry.stored_shape, self.entry.shape):
            raise OptimizerError(
                f"state {key!r} of {self.entry.name!r} has the weight's shape {tuple(value.shape)}, and is none of its "
                "matrices: a checkpoint could not tell; keep its transpose, or keep it in a list"
            )
        return value

    def _memory_at_rest(self, piece: Tensor, local: Tensor) -> Tensor:
        """Return memory for a state whose piece is ``piece``: its own, unless it is the engine's gradient."""
        if piece.is_complex() != self.is_complex:
            return torch.zeros_like(self._seen(local), dtype=piece.dtype)  # a real number per complex one
        gradient, real = self.entry.grad(), torch.view_as_real(piece) if piece.is_complex() else piece
        own = gradient is None or _memory_of(piece) != _memory_of(gradient)
        own = own and (self._matrices is None or self._matrices.how == "matrix")
        # With its strides where they can be kept: a square factor's eigenvectors lie in columns, and products round so.
        fits = piece.is_contiguous() or real.shape == local.shape
        if own and self.blocks is None and not self.turned and fits:
            return real.view(local.shape)
        return torch.zeros_like(local, dtype=real.dtype)

    def _cut(self, local: Tensor) -> list[Tensor]:
        """Return the pieces of a tensor shaped like the local part, over its memory except at padded blocks."""
        seen = self._seen(local)
        if self._matrices is not None:
            return self._matrices.cut(seen)
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


def _memory_of(tensor: Tensor) -> int:
    """Return a key of its memory, which tensors of a simulation have, too."""
    return storage_key(tensor.untyped_storage())


# ------------------------------------------------------------------------------------------------ one optimizer

_Groups = list[list[nn.Parameter]]
_Held = list[tuple[nn.Parameter, Tensor]]
"""Parameters that are shown themselves, and their memory, which is the engine's."""


class _Shards:
    """All parameters of a model as one optimizer is shown them."""

    def __init__(self, request: OptimizerRequest, backend: Backend) -> None:
        self.request, self.backend = request, backend
        self.foreign = not request.of_torch  # of those much is looked after that torch's own do not do
        names = dict.fromkeys(name for group in request.groups for name in group["params"])
        # Who steps each parameter whole; None: each rank steps its part. On one rank, too: what state an optimizer may
        # keep must not depend on how many there are.
        divided = backend.facts.divides == "elements"
        self.owners = Owners(backend, list(names)) if request.whole and divided and names else None
        fused = any(settings.get("fused") for settings in (request.defaults, *request.groups))
        self.matrices = request.matrices  # as which weights of more than two dims are shown, by name
        self._views = {id(entry.parameter): self._view_of(entry, request.see_complex, fused) for entry in backend.all}
        self._reads_pairs = request.optimizer_class in READS_PAIRS and self.owners is None and not self.matrices
        self.resting = True  # the state lies under the engine's parameters, and not under what was shown
        self._has_stepped = False

    def _view_of(self, entry: Entry, see_complex: bool, fused: bool) -> _View | None:
        """Return how a parameter is shown; None: as it is."""
        if self.owners is not None:
            if (whole := self.owners.mine.get(entry.name)) is None:
                return _View(entry, False, part=(0, 0, 0))  # another rank's: in no piece
            shown_as = self.matrices.get(entry.name)
            return _View(whole, see_complex and entry.kind.is_complex, bool(entry.kind.order), matrices=shown_as)
        divided = self.backend.facts.divides == "elements" and self.backend.settings.world_size > 1
        is_complex, part, threads = see_complex and entry.kind.is_complex, None, None
        if divided and self.backend.settings.device.type == "cpu":
            (start, stop), total = entry.here, entry.stored_shape.numel()
            # torch's own optimizers use no kernel for complex products; others may.
            if self.foreign and is_complex:
                part = (start // 2, stop // 2, total // 2)
            # Threads of fused kernels share a tensor by cache lines, so that parts are cut as for one thread.
            elif fused and (start % GRID or (stop % GRID and stop < total)):
                part, threads = (start, stop, total), 1
        turned = bool(entry.kind.order) and not divided  # a part of a parameter has no dims of its own
        matrices = self.matrices.get(entry.name)
        view = _View(entry, is_complex, turned, part, threads, matrices)
        return view if is_complex or view.is_elsewhere else None

    def show(self, optimizer: Any, *, gradients: bool = True) -> list[_View]:
        """Put in the groups what the optimizer is to see, and return the views among it."""
        views = []
        for group in optimizer.param_groups:
            shown: list[nn.Parameter] = []
            # Weight decay is a product with a complex number in torch: of other zeros and infinities than a real one.
            as_pairs = self._reads_pairs and group.get("weight_decay") == 0
            for parameter in group["params"]:
                if id(parameter) not in self._views:
                    raise OptimizerError(
                        "the optimizer holds a parameter that is not the model's; build it with fsshard.build_optimizer"
                    )
                view = self._views[id(parameter)]
                if view is not None and view.entry.kind.is_complex and self._reads_pairs:
                    view.show_complex(self.request.see_complex and not as_pairs, optimizer, self.backend)
                if view is None or not (view.is_complex or view.is_elsewhere):
                    shown.append(parameter)
                else:
                    shown += view.begin(optimizer, self.backend, gradients=gradients)
                    views.append(view)
            group["params"][:] = shown  # in place: LBFGS keeps the list
        return views

    def build(self, optimizer: Any, constructor: Any, groups: Sequence[dict[str, Any]], defaults: Any) -> None:
        """Run the constructor of the user's class over what ``step`` shows.

        Whoever keeps parameters, or views of them (DistributedShampoo its blocks), has those that are trained.
        """
        unbuilt = SimpleNamespace(param_groups=[{**g, "params": list(g["params"])} for g in groups], state={})
        with torch.no_grad():
            views = self.show(unbuilt)
        constructor(unbuilt.param_groups, **defaults)
        with torch.no_grad():
            self.rest(optimizer)
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
                view.end(optimizer, self.backend, foreign=False)

    def rest(self, optimizer: Any) -> None:
        """Put the state of all parameters under the engine's, for who reads it, saves it or replaces it."""
        self.resting = True
        getattr(optimizer, "put_vectors_to_rest", bool)()
        with torch.no_grad():
            for view in self._views.values():
                if view is not None and view.pieces:  # it was shown
                    view.rest(optimizer, self.backend)

    def step(self, optimizer: Any, base_step: Any, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
        """Run the step of the user's class over what it is shown."""
        if self.owners is None:
            result = self._step(optimizer, base_step, closure, kwargs)
        else:
            failed = True
            with torch.no_grad():
                self.owners.begin()
            try:  # from here on the other ranks wait for finish(), whatever is raised
                result = self._step(optimizer, base_step, closure, kwargs)
                failed = False
            finally:
                with torch.no_grad():
                    self.owners.finish(failed)
        if not self._has_stepped:  # the first time: it raises where the state cannot be sharded
            self._has_stepped = True
            self.rest(optimizer)
        return result

    def _step(self, optimizer: Any, base_step: Any, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
        """Run it between showing and taking back. Local, but for a closure."""
        groups: _Groups = [list(group["params"]) for group in optimizer.param_groups]
        with torch.no_grad():
            views = self.show(optimizer, gradients=not optimizer.gradients_are_local)
            held: _Held = []
            if self.foreign:
                for group in optimizer.param_groups:
                    # A flat part without numbers has no gradient, for which many classes do not look.
                    group["params"][:] = [parameter for parameter in group["params"] if parameter.numel()]
                pieces = {id(piece) for view in views for piece in view.pieces}
                held = [(p, p.data) for group in optimizer.param_groups for p in group["params"] if id(p) not in pieces]
        given = () if closure is None else (self._refreshing(optimizer, closure, views, held, groups),)
        self.resting = False
        try:
            _under_way.append(optimizer)
            return base_step(optimizer, *given, **kwargs)
        finally:
            _under_way.pop()
            _regroup(optimizer, groups)
            self.resting = False
            with torch.no_grad():
                _put_back(held)
                for view in views:
                    view.end(optimizer, self.backend, foreign=self.foreign)

    def _refreshing(self, optimizer: Any, closure: Any, views: list[_View], held: _Held, groups: _Groups) -> Any:
        """Return the closure: before it the engine sees what was stepped, after it the optimizer has new gradients."""
        called = False

        def closure_then_gradients() -> Any:
            nonlocal called
            with torch.no_grad():
                _put_back(held)
                for view in views:
                    view.write_back()
                    if called or not optimizer.gradients_are_local:
                        view.take_gradient(self.backend)
                if called or not self.request.begins_with_closure:
                    self.backend.before_closure(optimizer)
            called = True
            with self._readable(optimizer, views, groups):
                loss = closure()
            for view in views:
                view.show_gradient()
            return loss

        return closure_then_gradients

    @contextlib.contextmanager
    def _readable(self, optimizer: Any, views: list[_View], groups: _Groups) -> Iterator[None]:
        """Context of a closure, which finds in the optimizer what it does between steps."""
        shown = [list(group["params"]) for group in optimizer.param_groups]
        pieces = [piece for view in views for piece in view.pieces if piece in optimizer.state]
        states = {piece: optimizer.state[piece] for piece in pieces}
        _regroup(optimizer, groups)
        yield
        _regroup(optimizer, shown)
        if self.resting:  # the state was read: the optimizer goes on with its own, of which it may hold parts
            self.resting = False
            for view in views:
                if view.pieces:
                    optimizer.state.pop(view.entry.parameter, None)
            optimizer.state.update(states)


def _regroup(optimizer: Any, groups: _Groups) -> None:
    for group, members in zip(optimizer.param_groups, groups, strict=True):
        group["params"][:] = members  # in place: LBFGS keeps the list


def viewing_class(request: OptimizerRequest, backend: Backend) -> type[Optimizer]:
    """Make a subclass of the requested class whose ``step`` works on views of this rank's parts."""
    optimizer_class = request.optimizer_class
    if optimizer_class is torch.optim.LBFGS:
        optimizer_class = lbfgs_over(backend, [name for group in request.groups for name in group["params"]])
    shards, base_step = _Shards(request, backend), unhooked_step(optimizer_class)

    class Viewing(optimizer_class):  # type: ignore[misc, valid-type]
        gradients_are_local = False  # no optimizer may see them then; only a closure can make others
        _fsshard_owners = shards.owners

        if shards.foreign or shards.owners is not None or shards.matrices:

            def __init__(self, groups: Sequence[dict[str, Any]], **defaults: Any) -> None:
                shards.build(self, super().__init__, groups, defaults)

        def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            return shards.step(self, base_step, closure, kwargs)

        def put_to_rest(self) -> None:
            if not shards.resting:
                shards.rest(self)

        step.hooked = True  # type: ignore[attr-defined]  # ShardedOptimizer runs the hooks

    Viewing.__name__, Viewing.__qualname__ = request.optimizer_class.__name__, request.optimizer_class.__qualname__
    Viewing.__module__ = request.optimizer_class.__module__
    return Viewing


_under_way: list[Optimizer] = []


def is_stepping() -> bool:
    """Return whether an optimizer of ours is within its step: those inside of it step the same parameters."""
    return bool(_under_way)


def _put_back(held: _Held) -> None:
    """Write into the engine's memory what ``p.data = ...`` has put elsewhere (SAM does): it sends and cuts its own."""
    for parameter, memory in held:
        if parameter.data_ptr() != memory.data_ptr():
            memory.copy_(parameter.data)
            parameter.data = memory
