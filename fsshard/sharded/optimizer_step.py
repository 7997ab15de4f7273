"""The parameters that an optimizer sees inside ``step()``: this rank's shards, complex where the model is.

Engines hold real storage. During a step each parameter is swapped in its group for plain local tensors over the same
memory (:mod:`fsshard.sharded.optimizer_views`), and its state likewise, so that optimizers which treat complex numbers
as such keep their meaning (neuraloperator's AdamW uses |g|^2). At rest the state is real and shaped like the stored
local part. Start at :func:`viewing_class`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsshard.backends.base import Backend
from fsshard.errors import OptimizerError
from fsshard.oss.partitioned import unhooked_step
from fsshard.planning.entries import Entry
from fsshard.sharded.optimizer_checks import OptimizerRequest
from fsshard.sharded.optimizer_lbfgs import lbfgs_over
from fsshard.sharded.optimizer_views import GRID, View, end_all, pieces_in_place
from fsshard.sharded.optimizer_whole import Owners

READS_PAIRS = (torch.optim.Adam, torch.optim.AdamW)
"""Take ``view_as_real`` of everything complex before any arithmetic but that of weight decay (torch 2.13).

Shown the pairs at once they compute the same numbers, without making four views of each parameter in each step.
"""

_Group = dict[str, Any]
_Groups = list[list[nn.Parameter]]
_Held = list[tuple[nn.Parameter, Tensor]]
"""Parameters that are shown themselves, and their memory, which is the engine's."""


class _Shards:
    """All parameters of a model as one optimizer is shown them."""

    def __init__(self, request: OptimizerRequest, backend: Backend) -> None:
        self.request = request
        self.backend = backend
        # Much is looked after for other classes that torch's own do not do.
        self.foreign = not request.of_torch
        names = {}
        for group in request.groups:
            names.update(dict.fromkeys(group["params"]))
        # Who steps each parameter whole; None: each rank steps its part. On one rank, too: what state an optimizer may
        # keep must not depend on how many there are.
        self.owners: Owners | None = None
        if request.whole and backend.facts.divides == "elements" and names:
            self.owners = Owners(backend, list(names))
        # As which weights of more than two dims are shown, by name.
        self.matrices = request.matrices
        self._is_fused = any(settings.get("fused") for settings in (request.defaults, *request.groups))
        # Whether this rank holds a part of each parameter.
        self._divides = backend.facts.divides == "elements" and backend.settings.world_size > 1
        self._views = {id(entry.parameter): self._view_of(entry) for entry in backend.all}
        # Ids of what an optimizer that reads pairs is shown as complex numbers, or as pairs of reals.
        self._two_forms: set[int] = set()
        is_plain = self.owners is None and not self.matrices
        if is_plain and request.see_complex and request.optimizer_class in READS_PAIRS:
            self._two_forms = {key for key, view in self._views.items() if view is not None and view.is_complex}
        # Whether the state lies under the engine's parameters, and not under what was shown.
        self.resting = True
        self._has_stepped = False

    def _view_of(self, entry: Entry) -> View | None:
        """Return how a parameter is shown; None: as it is."""
        is_complex = self.request.see_complex and entry.kind.is_complex
        matrices = self.matrices.get(entry.name)
        if self.owners is not None:
            whole = self.owners.mine.get(entry.name)
            if whole is None:
                # Another rank steps it: here it is in no piece.
                return View(entry, False, part=(0, 0, 0))
            return View(whole, is_complex, is_turned=bool(entry.kind.order), matrices=matrices)
        part = None
        threads = None
        if self._divides and self.backend.settings.device.type == "cpu":
            start, stop = entry.here
            total = entry.stored_shape.numel()
            if self.foreign and is_complex:
                # torch's own optimizers use no kernel for complex products; others may.
                part = (start // 2, stop // 2, total // 2)
            elif self._is_fused and (start % GRID or (stop % GRID and stop < total)):
                # Threads of fused kernels share a tensor by cache lines, so that parts are cut as for one thread.
                part = (start, stop, total)
                threads = 1
        # A part of a parameter has no dims of its own.
        is_turned = bool(entry.kind.order) and not self._divides
        view = View(entry, is_complex, is_turned=is_turned, part=part, threads=threads, matrices=matrices)
        return view if is_complex or view.is_elsewhere else None

    # ------------------------------------------------------------------------------------------ showing

    def show(self, optimizer: Any, *, gradients: bool = True) -> list[View]:
        """Put in the groups what the optimizer is to see, and return the views among it."""
        shown_views = []
        # A set of ids, since a tensor's hash is a call of a Python function.
        with_state: set[int] = set()
        for group in optimizer.param_groups:
            views = self._views_of(group, optimizer)
            if views.count(None) == len(views):
                continue
            with_state = with_state or set(map(id, optimizer.state))
            # Not no_grad(), which takes three times as many calls in each step.
            with torch.set_grad_enabled(False):
                pieces = pieces_in_place(views, with_state, gradients=gradients)
                shown = []
                for parameter, view, piece in zip(group["params"], views, pieces, strict=True):
                    if view is None:
                        shown.append(parameter)
                        continue
                    shown_views.append(view)
                    if piece is not None:
                        shown.append(piece)
                    else:
                        shown += view.begin(optimizer, self.backend, gradients=gradients)
            # In place, since LBFGS keeps the list.
            group["params"][:] = shown
        return shown_views

    def _views_of(self, group: _Group, optimizer: Any) -> list[View | None]:
        """Return how each parameter of a group is shown in this step; None: as it is."""
        # Weight decay is a product with a complex number in torch: of other zeros and infinities than a real one.
        as_pairs = group.get("weight_decay") == 0
        views = []
        for parameter in group["params"]:
            key = id(parameter)
            if key not in self._views:
                raise OptimizerError(
                    "the optimizer holds a parameter that is not the model's; build it with fsshard.build_optimizer"
                )
            view = self._views[key]
            if view is not None:
                if key in self._two_forms and view.is_complex == as_pairs:
                    with torch.no_grad():
                        view.show_complex(not as_pairs, optimizer, self.backend)
                if not (view.is_complex or view.is_elsewhere):
                    view = None
            views.append(view)
        return views

    def build(self, optimizer: Any, constructor: Any, groups: Sequence[_Group], defaults: Any) -> None:
        """Run the constructor of the user's class over what ``step`` shows.

        Whoever keeps parameters, or views of them (DistributedShampoo its blocks), has those that are trained.
        """
        shown_groups = [{**group, "params": list(group["params"])} for group in groups]
        unbuilt = SimpleNamespace(param_groups=shown_groups, state={})
        views = self.show(unbuilt)
        constructor(unbuilt.param_groups, **defaults)
        with torch.no_grad():
            self.rest(optimizer)
            self._regroup_stored(optimizer, views, groups)
            for view in views:
                view.end(optimizer, self.backend, foreign=False)

    def _regroup_stored(self, optimizer: Any, views: list[View], groups: Sequence[_Group]) -> None:
        """Put the engine's parameters into groups that the constructor has made of pieces."""
        # By id of the piece.
        stored = {}
        # What the constructor has not seen, since this rank has no element of it.
        unseen = set()
        for view in views:
            if not view.pieces:
                unseen.add(id(view.parameter))
            for piece in view.pieces:
                stored[id(piece)] = view.parameter
        for number, group in enumerate(optimizer.param_groups):
            kept = {}
            for member in group["params"]:
                parameter = stored.get(id(member), member)
                kept[id(parameter)] = parameter
            given = {}
            if number < len(groups):
                given = {id(parameter): parameter for parameter in groups[number]["params"]}
            if kept.keys() <= given.keys():
                members = [parameter for key, parameter in given.items() if key in kept or key in unseen]
            else:
                # The class makes groups of its own.
                members = list(kept.values())
            group["params"][:] = members

    def rest(self, optimizer: Any) -> None:
        """Put the state of all parameters under the engine's, for who reads it, saves it or replaces it."""
        self.resting = True
        getattr(optimizer, "put_vectors_to_rest", bool)()
        with torch.no_grad():
            for view in self._views.values():
                # One without pieces was not shown yet.
                if view is not None and view.pieces:
                    view.rest(optimizer, self.backend)

    # ------------------------------------------------------------------------------------------ a step

    def step(self, optimizer: Any, base_step: Any, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
        """Run the step of the user's class over what it is shown."""
        if self.owners is None:
            result = self._step(optimizer, base_step, closure, kwargs)
        else:
            failed = True
            self.owners.begin()
            # From here on the other ranks wait for finish(), whatever is raised.
            try:
                result = self._step(optimizer, base_step, closure, kwargs)
                failed = False
            finally:
                self.owners.finish(failed)
        if not self._has_stepped:
            # Once at the first step, since it raises where the state cannot be sharded.
            self._has_stepped = True
            self.rest(optimizer)
        return result

    def _step(self, optimizer: Any, base_step: Any, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
        """Run it between showing and taking back. Local, but for a closure."""
        groups = []
        for group in optimizer.param_groups:
            groups.append(list(group["params"]))
        views = self.show(optimizer, gradients=not optimizer.gradients_are_local)
        held = _shown_themselves(optimizer, views) if self.foreign else []
        arguments = [optimizer]
        if closure is not None:
            arguments.append(self._refreshing(optimizer, closure, views, held, groups))
        self.resting = False
        _under_way.append(optimizer)
        try:
            return base_step(*arguments, **kwargs)
        finally:
            _under_way.pop()
            self.resting = False
            if views or self.foreign:
                _regroup(optimizer, groups)
                with torch.set_grad_enabled(False):
                    _put_back(held)
                    end_all(views, optimizer, self.backend, foreign=self.foreign)

    def _refreshing(self, optimizer: Any, closure: Any, views: list[View], held: _Held, groups: _Groups) -> Any:
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
    def _readable(self, optimizer: Any, views: list[View], groups: _Groups) -> Iterator[None]:
        """Context of a closure, which finds in the optimizer what it does between steps."""
        shown = []
        for group in optimizer.param_groups:
            shown.append(list(group["params"]))
        states = {}
        for view in views:
            for piece in view.pieces:
                if piece in optimizer.state:
                    states[piece] = optimizer.state[piece]
        _regroup(optimizer, groups)
        yield
        _regroup(optimizer, shown)
        if self.resting:
            # The closure has read the state: the optimizer goes on with its own, of which it may hold parts.
            self.resting = False
            for view in views:
                if view.pieces:
                    optimizer.state.pop(view.parameter, None)
            optimizer.state.update(states)


def _regroup(optimizer: Any, groups: _Groups) -> None:
    for group, members in zip(optimizer.param_groups, groups, strict=True):
        # In place, since LBFGS keeps the list.
        group["params"][:] = members


def _shown_themselves(optimizer: Any, views: list[View]) -> _Held:
    """Return the parameters that are shown as they are; leave those out of the groups that have no number."""
    pieces: set[int] = set()
    for view in views:
        pieces.update(map(id, view.pieces))
    held = []
    for group in optimizer.param_groups:
        # A flat part without numbers has no gradient, for which many classes do not look.
        members = [parameter for parameter in group["params"] if parameter.numel()]
        group["params"][:] = members
        for parameter in members:
            if id(parameter) not in pieces:
                held.append((parameter, parameter.data))
    return held


def _put_back(held: _Held) -> None:
    """Write into the engine's memory what ``p.data = ...`` has put elsewhere (SAM does): it sends and cuts its own."""
    for parameter, memory in held:
        if parameter.data_ptr() != memory.data_ptr():
            memory.copy_(parameter.data)
            parameter.data = memory


def viewing_class(request: OptimizerRequest, backend: Backend) -> type[Optimizer]:
    """Make a subclass of the requested class whose ``step`` works on views of this rank's parts."""
    optimizer_class = request.optimizer_class
    if optimizer_class is torch.optim.LBFGS:
        names = []
        for group in request.groups:
            names += group["params"]
        optimizer_class = lbfgs_over(backend, names)
    shards = _Shards(request, backend)
    base_step = unhooked_step(optimizer_class)

    class Viewing(optimizer_class):  # type: ignore[misc, valid-type]
        # No optimizer may see gradients that are local; only a closure can make others.
        gradients_are_local = False
        _fsshard_owners = shards.owners

        if shards.foreign or shards.owners is not None or shards.matrices:

            def __init__(self, groups: Sequence[_Group], **defaults: Any) -> None:
                shards.build(self, super().__init__, groups, defaults)

        def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            return shards.step(self, base_step, closure, kwargs)

        def put_to_rest(self) -> None:
            if not shards.resting:
                shards.rest(self)

        step.hooked = True  # type: ignore[attr-defined]  # ShardedOptimizer runs the hooks

    Viewing.__name__ = request.optimizer_class.__name__
    Viewing.__qualname__ = request.optimizer_class.__qualname__
    Viewing.__module__ = request.optimizer_class.__module__
    return Viewing


_under_way: list[Optimizer] = []


def is_stepping() -> bool:
    """Return whether an optimizer of ours is within its step: those inside of it step the same parameters."""
    return bool(_under_way)
