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

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsshard.backends.base import Backend
from fsshard.complex_params.pairs import viewable
from fsshard.complex_params.replaced import attributes_of
from fsshard.errors import OptimizerError
from fsshard.model.nested import has_arrays
from fsshard.oss.inner_step import unhooked_step
from fsshard.planning.entries import Entry
from fsshard.torch_private.tensors import LOCAL_TENSOR

__all__ = ["check_written", "is_being_stepped", "viewing_class"]

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
    """How many threads share an elementwise kernel."""
    return max(1, min(threads, -(-elements // GRAIN)))


def _evenly(block: _Block, by: int, threads: int) -> list[_Block]:
    """The block moved ``by`` elements, and cut where threads would not share it at multiples of GRID."""
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


@dataclass
class _Kept:
    """What a step has made for one parameter and the next one can use, if the memory is still the same.

    Attributes:
        seen: the parameter that stands for the local part.
        shape: the local part's.
        address: the local part's.
        blocks: what the local part is cut into,
        pieces: and the parameters that stand for these.
        rest: the state at rest, key by key.
        shown: the same state as the optimizer saw it.
    """

    seen: nn.Parameter | None = None
    shape: torch.Size | None = None
    address: int = 0
    blocks: list[_Block] | None = None
    pieces: list[nn.Parameter] = field(default_factory=list)
    rest: dict[str, Any] = field(default_factory=dict)
    shown: dict[str, Any] = field(default_factory=dict)

    def seen_over(self, local: Tensor) -> nn.Parameter | None:
        """The parameter of the step before, if it lies over ``local``. It keeps its memory alive, so that the same
        address is the same memory; memory that an engine has freed has no address."""
        if self.seen is None or self.shape != local.shape or self.seen.data_ptr() != local.data_ptr():
            return None
        return self.seen

    def shows(self, state: Mapping[str, Any]) -> bool:
        """Whether ``shown`` is what stands for ``state``, over the same memory."""
        if len(self.rest) != len(state):
            return False
        for key, value in state.items():
            if self.rest.get(key, self) is not value:
                return False
            shown = self.shown[key]
            if shown is not value and shown.data_ptr() != value.data_ptr():
                return False
        return True

    def unchanged(self, state: Mapping[str, Any]) -> bool:
        """Whether the optimizer has left in ``state`` the tensors that it was shown, and put in no others."""
        shown = self.shown
        return len(shown) == len(state) and all(
            shown.get(key) is value and isinstance(value, Tensor) for key, value in state.items()
        )


@dataclass
class _ViewSpec:
    """How one parameter is shown.

    Attributes:
        entry: the parameter.
        is_complex: whether as complex numbers.
        elsewhere: whether the local part is not shown as the parameter itself.
        turned: whether a whole one is shown with its dims in the user's order.
        part: the local part's start and stop in the whole, and the whole's size, if it is cut into blocks.
        threads: that share a tensor, and each round its own tail; None are all that torch may use.
        blocks: what it is cut into in this step; None: it is shown as it is shaped.
        left: memory of all parameters that an optimizer was shown and that stands for them no more.
        kept: of the step before.
    """

    entry: Entry
    is_complex: bool
    elsewhere: bool
    left: list[Tensor]
    turned: bool = False
    part: tuple[int, int, int] | None = None
    threads: int | None = None
    blocks: list[_Block] | None = None
    kept: _Kept = field(default_factory=lambda: _Kept())

    def cut(self) -> None:
        """Cut it as the threads that torch has now need it."""
        self.blocks = None if self.part is None else blocks_of(*self.part, self.threads or torch.get_num_threads())

    def show(self, local: Tensor) -> list[Tensor]:
        """The pieces that stand for ``local``, over its memory except at padded blocks."""
        seen = self._seen(local)
        if self.blocks is None:
            return [seen]
        flat = seen.reshape(-1)
        return [self._piece(flat, block) for block in self.blocks]

    def keep(self, pieces: list[Tensor], local: Tensor) -> None:
        """Write into ``local`` what the pieces hold and is not in its memory already."""
        if self.blocks is None and pieces[0].data_ptr() == local.data_ptr():
            return
        blocks: Sequence[_Block | None] = [None] if self.blocks is None else self.blocks
        seen = self._seen(local) if pieces and pieces[0].is_complex() == self.is_complex else local
        targets = [seen] if self.blocks is None else [seen.view(-1)[b.start : b.stop] for b in self.blocks]
        for shown, piece, block in zip(targets, pieces, blocks, strict=True):
            value = piece if block is None or not block.size else piece[block.offset : block.offset + shown.numel()]
            if value.data_ptr() != shown.data_ptr():
                shown.copy_(value.view(shown.shape))

    def new_local(self, piece: Tensor, local: Tensor, gradient: Tensor | None) -> Tensor:
        """Memory at rest for a state whose piece is ``piece``: its own, unless it is the engine's ``gradient``."""
        in_order = self.blocks is None and not self.turned and piece.is_contiguous()
        if piece.is_complex() == self.is_complex:
            if in_order and (gradient is None or piece.data_ptr() != gradient.data_ptr()):
                return (torch.view_as_real(piece) if piece.is_complex() else piece).view(local.shape)
            return torch.zeros_like(local, dtype=torch.view_as_real(piece).dtype if piece.is_complex() else piece.dtype)
        return torch.zeros_like(self._seen(local), dtype=piece.dtype)  # a real number per complex one

    def _seen(self, local: Tensor) -> Tensor:
        shown = self._complex(local)
        if not self.turned or local.shape != self.entry.stored_shape:
            return shown
        kind = self.entry.kind
        return kind.turn_back(shown) if shown.dim() == len(kind.order) else shown.permute(*kind.way_back, -1)

    def _complex(self, local: Tensor) -> Tensor:
        if not self.is_complex or local.is_complex():
            return local
        pairs = local if local.dim() > 1 else local.view(local.numel() // 2, 2)  # a flat shard of whole numbers (FSDP1)
        return torch.view_as_complex(viewable(pairs))

    @staticmethod
    def _piece(flat: Tensor, block: _Block) -> Tensor:
        part = flat[block.start : block.stop]
        if not block.size:
            return part
        padded = flat.new_zeros(block.size)
        padded[block.offset : block.offset + part.numel()] = part
        return padded


class _Swap(NamedTuple):
    parameter: nn.Parameter
    view: _ViewSpec
    seen: list[nn.Parameter]
    state: dict[str, Any]


_running: dict[int, int] = {}
"""id of a parameter that an optimizer of ours is shown -> by how many steps that are under way."""


@contextlib.contextmanager
def _stepping(optimizer: Optimizer) -> Iterator[None]:
    """Within it optimizers that the user's keeps inside of it may step the same parameters (SAM's base optimizer)."""
    shown = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    for key in shown:
        _running[key] = _running.get(key, 0) + 1
    try:
        yield
    finally:
        for key in shown:
            _running[key] -= 1
            if not _running[key]:
                del _running[key]


def is_being_stepped(parameter: Tensor) -> bool:
    """Whether an optimizer of ours is within its step over ``parameter``."""
    return id(parameter) in _running


def viewing_class(
    optimizer_class: type[Optimizer], backend: Backend, see_complex: bool, *, fused: bool = False
) -> type[Optimizer]:
    """A subclass of ``optimizer_class`` whose ``step`` works on views of this rank's parts, by fused kernels or not."""
    left: list[Tensor] = []
    memory: dict[int, Tensor] = {}
    views = _views(optimizer_class, backend, see_complex, fused, left)
    pairs = _seen_as_pairs(views) if optimizer_class in READS_PAIRS else views
    base_step = unhooked_step(optimizer_class)
    foreign = not optimizer_class.__module__.startswith("torch.optim")  # torch's own do none of what is looked after

    class Viewing(optimizer_class):  # type: ignore[misc, valid-type]
        gradients_are_local = False  # no optimizer may see them then; only a closure can make others
        begins_with_closure = False  # it calls the closure before it reads or writes anything

        if foreign:
            wrote_elsewhere = False  # to memory that parameters, or their state, have left

            def __init__(self, groups: Sequence[dict[str, Any]], **defaults: Any) -> None:
                # Over what step() shows: whoever keeps views of parameters (DistributedShampoo its blocks), or the
                # parameters themselves, has those that are trained.
                shown = _Shown([{**group, "params": list(group["params"])} for group in groups])
                with torch.no_grad():
                    swaps = _swap_in(shown, views, pairs, backend)
                super().__init__(shown.param_groups, **defaults)
                with torch.no_grad():
                    _take_state_back(self, swaps, _held(self, swaps, memory, left))
                    stored = {id(seen): swap.parameter for swap in swaps for seen in swap.seen}
                    # This rank has no element of them, so that the constructor has not seen them.
                    unseen = {id(swap.parameter) for swap in swaps if not swap.seen}
                    for number, group in enumerate(self.param_groups):
                        kept = {id(stored.get(id(p), p)): stored.get(id(p), p) for p in group["params"]}
                        given = list(groups[number]["params"]) if number < len(groups) else []
                        regrouped = kept.keys() - {id(p) for p in given}  # the class makes groups of its own
                        whole = [p for p in given if id(p) in kept or id(p) in unseen]
                        group["params"][:] = kept.values() if regrouped else whole
                    left.extend(_state_to_copy(self, swaps))
                    _swap_out(self, swaps, backend)

        def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            groups = [list(group["params"]) for group in self.param_groups]
            with torch.no_grad():
                swaps = _swap_in(self, views, pairs, backend)
                kept = _held(self, swaps, memory, left) if foreign else []
                if foreign:
                    _lend_state(self)
            unmoved = [(tensor, tensor.clone()) for tensor in left]
            left.clear()
            try:
                with _stepping(self) if foreign else contextlib.nullcontext():
                    if closure is None:
                        return base_step(self, **kwargs)
                    return base_step(self, _refreshing(self, closure, swaps, kept, backend), **kwargs)
            finally:
                for group, members in zip(self.param_groups, groups, strict=True):
                    group["params"][:] = members
                with torch.no_grad():
                    _put_back(kept)
                    if foreign:
                        _take_state_back(self, swaps, kept)
                    _swap_out(self, swaps, backend)
                    if any(not torch.allclose(t, copy, rtol=0, atol=0, equal_nan=True) for t, copy in unmoved):
                        self.wrote_elsewhere = True

        step.hooked = True  # type: ignore[attr-defined]  # ShardedOptimizer runs the hooks

    Viewing.__name__, Viewing.__qualname__ = optimizer_class.__name__, optimizer_class.__qualname__
    Viewing.__module__ = optimizer_class.__module__
    return Viewing


@dataclass
class _Shown:
    """Stands for an optimizer that is about to be built."""

    param_groups: list[dict[str, Any]]
    state: dict[nn.Parameter, dict[str, Any]] = field(default_factory=dict)


def _state_to_copy(optimizer: Optimizer, swaps: list[_Swap]) -> list[Tensor]:
    """Return the tensors of state that at rest lie elsewhere than the optimizer has put them."""
    pieces = (seen for swap in swaps if swap.view.blocks is not None or swap.view.turned for seen in swap.seen)
    values = (value for seen in pieces for value in optimizer.state.get(seen, {}).values())
    return [value for value in values if isinstance(value, Tensor) and value.dim()]


def check_written(optimizer: Any) -> None:
    """Raise if a step of an optimizer of :func:`viewing_class` has moved other memory than the parameters'. Local."""
    if optimizer.wrote_elsewhere:
        name = type(optimizer).__name__
        raise OptimizerError(
            f"{name}.step() has written to memory that the parameters, or their state, have left: it keeps references "
            "from before they were moved (frozen, unfrozen, given other .data, or cut). Build the optimizer again, "
            f"fsshard.build_optimizer(model, {name}, ...), or use backend='ddp', which moves nothing"
        )


def _views(
    optimizer_class: type[Optimizer], backend: Backend, see_complex: bool, fused: bool, left: list[Tensor]
) -> dict[int, _ViewSpec]:
    divided = backend.facts.divides == "elements" and backend.settings.world_size > 1
    foreign = not optimizer_class.__module__.startswith("torch.optim")
    on_cpu = backend.settings.device.type == "cpu"
    views: dict[int, _ViewSpec] = {}
    for entry in backend.entries.values():
        part, threads = None, None
        if divided and foreign and on_cpu and see_complex and entry.kind.is_complex:
            start, stop = entry.here
            part = (start // 2, stop // 2, entry.stored_shape.numel() // 2)
        elif divided and fused and on_cpu:
            (start, stop), total = entry.here, entry.stored_shape.numel()
            if start % GRID or (stop % GRID and stop < total):
                part, threads = (start, stop, total), 1
        parameter = entry.parameter
        turned = bool(entry.kind.order) and not divided  # a part of a parameter has no dims of its own
        as_it_is = part is None and not turned and not hasattr(parameter, LOCAL_TENSOR)
        elsewhere = not as_it_is or entry.local().shape != parameter.shape
        seen_complex = see_complex and entry.kind.is_complex
        views[id(parameter)] = _ViewSpec(entry, seen_complex, elsewhere, left, turned, part, threads)
    return views


def _seen_as_pairs(views: Mapping[int, _ViewSpec]) -> dict[int, _ViewSpec]:
    """The same, but that complex numbers are shown as pairs of reals."""
    return {key: _ViewSpec(v.entry, False, v.elsewhere, v.left) if v.is_complex else v for key, v in views.items()}


def _swap_in(
    optimizer: Optimizer | _Shown, views: Mapping[int, _ViewSpec], pairs: Mapping[int, _ViewSpec], backend: Backend
) -> list[_Swap]:
    swaps = []
    for group in optimizer.param_groups:
        shown: list[nn.Parameter] = []
        # Weight decay is a product with a complex number in torch, of other zeros and infinities than a real one.
        undecayed = group.get("weight_decay") == 0
        for parameter in group["params"]:
            view = (pairs if undecayed else views).get(id(parameter))
            if view is None:
                raise OptimizerError(
                    "the optimizer holds a parameter that is not the model's; build it with fsshard.build_optimizer"
                )
            if not (view.elsewhere or view.is_complex):
                shown.append(parameter)
                continue
            view.cut()
            local = view.entry.local()
            pieces = _pieces(view, parameter, local)
            swap = _Swap(parameter, view, pieces, optimizer.state.pop(parameter, {}))
            if not getattr(optimizer, "gradients_are_local", False):
                _show_gradient(swap, backend)
            _show_state(optimizer, swap, local)
            shown += pieces
            swaps.append(swap)
        group["params"][:] = shown  # in place: LBFGS keeps the list
    return swaps


def _pieces(view: _ViewSpec, parameter: nn.Parameter, local: Tensor) -> list[nn.Parameter]:
    if view.blocks is not None:
        return _block_pieces(view, parameter, local)
    kept = view.kept
    seen = kept.seen_over(local)
    if seen is None:
        shown, seen = view.show(local)[0], kept.seen
        if seen is not None and kept.address != local.data_ptr():
            view.left.append(seen.data)
        if seen is None or kept.shape != local.shape or seen.dtype != shown.dtype:
            seen = _seen(shown, parameter)
        seen.data = shown  # the same object: an optimizer may keep it
        view.kept = _Kept(seen, local.shape, local.data_ptr())
    if seen.requires_grad != parameter.requires_grad:
        seen.requires_grad_(parameter.requires_grad)
    return [seen]


def _block_pieces(view: _ViewSpec, parameter: nn.Parameter, local: Tensor) -> list[nn.Parameter]:
    shown, kept, blocks = view.show(local), view.kept, view.blocks or []
    if kept.blocks != blocks or kept.address != local.data_ptr():
        view.left += [piece.data for piece in kept.pieces]
        pieces = [_seen(piece, parameter) for piece in shown]
        view.kept = _Kept(address=local.data_ptr(), blocks=blocks, pieces=pieces)
        return pieces
    for piece, block, value in zip(kept.pieces, blocks, shown, strict=True):
        if block.size:
            piece.data.copy_(value)  # a padded copy
        else:
            piece.data = value
        piece.requires_grad_(parameter.requires_grad)
    return list(kept.pieces)


def _seen(piece: Tensor, parameter: nn.Parameter) -> nn.Parameter:
    seen = nn.Parameter(piece, parameter.requires_grad)
    seen.__dict__.update(attributes_of(parameter))
    return seen


def _show_gradient(swap: _Swap, backend: Backend) -> None:
    gradient = swap.view.entry.grad()
    if gradient is not None and swap.view.blocks is None:
        swap.seen[0].grad = swap.view.show(gradient.detach())[0]
        return
    parts: Sequence[Tensor | None] = [None] * len(swap.seen) if gradient is None else swap.view.show(gradient.detach())
    for seen, part in zip(swap.seen, parts, strict=True):
        seen.grad = part


def _show_state(optimizer: Optimizer | _Shown, swap: _Swap, local: Tensor) -> None:
    if not swap.state:
        return
    kept = swap.view.kept
    if swap.view.blocks is None and kept.shows(swap.state):
        optimizer.state[swap.seen[0]] = kept.shown.copy()
        return
    for index, seen in enumerate(swap.seen):
        optimizer.state[seen] = {
            key: swap.view.show(value)[index] if _per_element(value, local) else _own_copy(value, index)
            for key, value in swap.state.items()
        }
    if swap.view.blocks is None:
        kept.rest, kept.shown = dict(swap.state), dict(optimizer.state[swap.seen[0]])


def _own_copy(value: Any, index: int) -> Any:
    return value.clone() if index and isinstance(value, Tensor) else value  # a step counter is counted up in place


def _per_element(value: object, local: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == local.shape and not value.is_complex()


def _swap_out(optimizer: Optimizer, swaps: list[_Swap], backend: Backend) -> None:
    for swap in swaps:
        local = swap.view.entry.local()
        states = [optimizer.state.pop(seen, {}) for seen in swap.seen]
        for seen in swap.seen:
            seen.grad = None  # it is the engine's to keep or drop
        kept = swap.view.kept
        in_place = swap.view.blocks is None and kept.seen_over(local) is not None
        if in_place and kept.unchanged(states[0]):
            if swap.state:
                optimizer.state[swap.parameter] = swap.state
            continue
        swap.view.keep([seen.detach() for seen in swap.seen], local)
        if any(states):
            optimizer.state[swap.parameter] = _at_rest(optimizer, swap, states, local, backend)


def _at_rest(
    optimizer: Optimizer, swap: _Swap, states: list[dict[str, Any]], local: Tensor, backend: Backend
) -> dict[str, Any]:
    """The state of one parameter as it is kept between steps."""
    at_rest = dict(swap.state)
    for key, first in states[0].items():
        shaped = isinstance(first, Tensor) and first.shape == swap.seen[0].shape and first.dim()
        if not shaped and not (len(states) > 1 and has_arrays(first)):
            at_rest[key] = first
            continue
        pieces = [state[key] for state in states]
        real = shaped and backend.facts.divides == "elements" and first.is_complex() != swap.seen[0].is_complex()
        if real or not shaped:
            what = first.dtype if shaped else "something of another shape"
            raise OptimizerError(
                f"{type(optimizer).__name__} keeps state {key!r} as {what} for complex weights; "
                f"backend {backend.name!r} cannot shard that: use 'fairscale' or 'ddp', or see_complex=False"
            )
        if not _per_element(at_rest.get(key), local):
            at_rest[key] = swap.view.new_local(first, local, swap.view.entry.grad())
        swap.view.keep(pieces, at_rest[key])
    return at_rest


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


def _take_state_back(optimizer: Optimizer, swaps: list[_Swap], held: list[tuple[nn.Parameter, Tensor]]) -> None:
    for name, inner in _inner(optimizer).items():
        for parameter in (*(seen for swap in swaps for seen in swap.seen), *(parameter for parameter, _ in held)):
            for key, value in inner.state.pop(parameter, {}).items():
                optimizer.state[parameter][f"{name}/{key}"] = value


def _held(
    optimizer: Optimizer, swaps: list[_Swap], memory: dict[int, Tensor], left: list[Tensor]
) -> list[tuple[nn.Parameter, Tensor]]:
    """The parameters that are shown themselves, with their memory, which is the engine's.

    Args:
        optimizer: with its groups as it is shown them.
        swaps: what stands for other parameters.
        memory: by id of a parameter its memory in the step before; is brought up to date.
        left: gets the memory that they have left since.
    """
    views = {id(seen) for swap in swaps for seen in swap.seen}
    held = []
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        key = id(parameter)
        if key in views:
            continue
        before = memory.get(key)
        if before is None or before.data_ptr() != parameter.data_ptr():
            if before is not None:
                left.append(before)
            before = memory[key] = parameter.data
        held.append((parameter, before))
    return held


def _put_back(held: list[tuple[nn.Parameter, Tensor]]) -> None:
    """Write into the engine's memory what ``p.data = ...`` has put elsewhere (SAM does): it sends and cuts its own."""
    for parameter, memory in held:
        if parameter.data_ptr() != memory.data_ptr():
            memory.copy_(parameter.data)
            parameter.data = memory


def _refreshing(
    optimizer: Any,
    closure: Callable[[], Any],
    swaps: list[_Swap],
    held: list[tuple[nn.Parameter, Tensor]],
    backend: Backend,
) -> Callable[[], Any]:
    """The closure, before which the engine learns what the optimizer has done, and after which it finds new gradients.

    Closures of :class:`~fsshard.sharded.optimizer.ShardedOptimizer` finish their gradients themselves.
    """
    called = False

    def closure_then_gradients() -> Any:
        nonlocal called
        with torch.no_grad():
            _put_back(held)
            for swap in swaps:
                swap.view.keep([seen.detach() for seen in swap.seen], swap.view.entry.local())
                if called or not optimizer.gradients_are_local:
                    _take_gradient(swap, backend)
            if called or not optimizer.begins_with_closure:
                backend.before_closure(optimizer)
        called = True
        loss = closure()
        for swap in swaps:
            _show_gradient(swap, backend)
        return loss

    return closure_then_gradients


def _take_gradient(swap: _Swap, backend: Backend) -> None:
    """Let the engine's gradient be what the optimizer has left: dropped, or changed in a padded copy."""
    gradient = swap.view.entry.grad()
    if gradient is None:
        return
    parts = [seen.grad for seen in swap.seen]
    if any(part is None for part in parts):
        backend.zero_grad([swap.view.entry], set_to_none=True)
    elif swap.view.blocks is not None:
        swap.view.keep([part for part in parts if part is not None], gradient.detach())
