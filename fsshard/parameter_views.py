"""Parameters as the user knows them, over what an engine holds."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from fsshard.backends.base import Backend, Entry
from fsshard.complex_params import export_stored, is_odd
from fsshard.errors import FsshardError

__all__ = ["ParameterViews"]


class _ShapeOnly(nn.Parameter):
    """Stands for a parameter whose part on this rank has no shape of its own (FSDP1's flat shards).

    It is on the meta device: shape, dtype and ``requires_grad`` are right, there are no values. Its gradient can be
    dropped, and nothing else: reading None there would make torch's own clipping skip it in silence.
    """

    _fsshard_entry: Entry
    _fsshard_backend: Backend

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where the shard is; ``next(model.parameters()).device`` is asked for that."""
        return self._fsshard_backend.settings.device

    @property
    def grad(self) -> Tensor | None:
        raise FsshardError(
            f"the gradient of {self._fsshard_entry.name!r} is a flat shard of its unit; use model.clip_grad_norm_ and "
            "optimizer.zero_grad"
        )

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            raise FsshardError(f"the gradient of {self._fsshard_entry.name!r} is a flat shard; it can only be dropped")
        self._fsshard_backend.zero_grad([self._fsshard_entry], set_to_none=True)

    @grad.deleter
    def grad(self) -> None:
        self._fsshard_backend.zero_grad([self._fsshard_entry], set_to_none=True)


class _Listed(_ShapeOnly):
    """Stands for a complex parameter that FSDP2 holds as a list of its numbers, cut between any two of them.

    Its gradient is a DTensor of one dimension over the engine's memory: what is done number by number, and norms, are
    right on it.
    """

    @property
    def grad(self) -> Tensor | None:
        parameter = self._fsshard_entry.parameter
        if parameter.grad is None:
            return None
        shown: Tensor = export_stored(_in_pairs(parameter), self._fsshard_entry.kind)
        return shown

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            raise FsshardError(
                f"the gradient of {self._fsshard_entry.name!r} is the engine's; change it in place, or drop it"
            )
        self._fsshard_backend.zero_grad([self._fsshard_entry], set_to_none=True)

    @grad.deleter
    def grad(self) -> None:
        self._fsshard_backend.zero_grad([self._fsshard_entry], set_to_none=True)


def _in_pairs(parameter: nn.Parameter) -> Tensor:
    """The gradient of a complex parameter, moved once where it begins between two complex numbers.

    FSDP2 reduces a unit's gradients into one buffer (torch 2.13), where one behind an odd-sized parameter begins so; it
    moves, so that the view shares its memory.
    """
    gradient = cast(Tensor, parameter.grad)
    if is_odd(_local(gradient)):
        parameter.grad = gradient = gradient.clone()
    return gradient


class ParameterViews:
    """One view per parameter that the engine does not hold in its original shape and dtype.

    Views are made once and kept, so that what is done to one (``requires_grad_``, dropping the gradient) can be taken
    over by :meth:`adopt` before the next forward. They never keep memory that the engine has left: see :meth:`moving`.
    """

    def __init__(self, backend: Backend, owner: Any) -> None:
        self._backend = backend
        self._owner = weakref.ref(owner)
        self._views: dict[str, nn.Parameter] = {}
        self._graded: set[str] = set()
        self._flags: dict[str, bool] = {}  # requires_grad when view and parameter were last the same

    def show(self, entry: Entry) -> nn.Parameter:
        """The engine's own parameter where it is the user's, else the view, with the gradient as it is now."""
        parameter = entry.parameter
        if parameter.shape == entry.shape and not entry.kind.is_complex:
            return parameter
        value = self._value(entry, parameter.detach())
        view = self._views.get(entry.name)
        if view is None or (not view.is_meta and _pointer(view) != _pointer(value)):
            view = self._views[entry.name] = self._new(entry, value)
            self._flags[entry.name] = parameter.requires_grad
        if not isinstance(view, _ShapeOnly):
            if entry.kind.is_complex and parameter.grad is not None:
                _in_pairs(parameter)
            view.grad = None if parameter.grad is None else self._value(entry, parameter.grad)
            self._graded = self._graded - {entry.name} if view.grad is None else self._graded | {entry.name}
        return view

    def adopt(self) -> None:
        """Take over what was done to the views: frozen, unfrozen, or their gradient dropped."""
        for name, view in self._views.items():
            parameter = self._backend.entries[name].parameter
            if view.requires_grad != self._flags[name]:  # changed through the view
                parameter.requires_grad_(view.requires_grad)
            elif view.requires_grad != parameter.requires_grad:  # changed through the user's module
                view.requires_grad_(parameter.requires_grad)
            self._flags[name] = view.requires_grad
            if name in self._graded and view.grad is None:
                self._backend.zero_grad([self._backend.entries[name]], set_to_none=True)
                self._graded.discard(name)

    def require_grad(self, flag: bool) -> None:
        """Freeze or unfreeze everything."""
        for entry in self._backend.entries.values():
            entry.parameter.requires_grad_(flag)
        for name, view in self._views.items():
            view.requires_grad_(flag)
            self._flags[name] = flag

    def forget_gradients(self) -> None:
        """Gradients were dropped through the optimizer or the module."""
        for name in self._graded:
            self._views[name].grad = None
        self._graded.clear()

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """Within it the engine puts its parameters elsewhere; views let go of the old memory and then hold the new.

        The views themselves stay: who has a list of them goes on seeing the parameters, and keeps no second copy.
        """
        held = {name: view for name, view in self._views.items() if not view.is_meta}
        local = {name: view for name, view in held.items() if _local(view) is view}
        for name in held.keys() - local.keys():
            del self._views[name]  # of a DTensor: made anew when it is shown again
        for view in local.values():
            view.data = view.new_empty(0)
        try:
            yield
        finally:
            for name, view in local.items():
                entry = self._backend.entries[name]
                view.data = self._value(entry, entry.parameter.detach())

    def _value(self, entry: Entry, stored: Tensor) -> Tensor:
        """``stored`` as the user sees it: over the same memory, or shape and dtype only."""
        is_dtensor = hasattr(stored, "_local_tensor")
        if stored.shape == entry.stored_shape and (not is_dtensor or entry.kind.name == "COMPLEX"):
            shown: Tensor = export_stored(stored, entry.kind)
            return shown
        return torch.empty(entry.shape, dtype=entry.dtype, device="meta")

    def _new(self, entry: Entry, value: Tensor) -> nn.Parameter:
        listed = hasattr(entry.parameter, "_local_tensor") and entry.parameter.shape != entry.stored_shape
        kind = (_Listed if listed else _ShapeOnly) if value.is_meta else nn.Parameter
        view = kind(value, requires_grad=entry.parameter.requires_grad)
        if isinstance(view, _ShapeOnly):
            view._fsshard_entry, view._fsshard_backend = entry, self._backend
        view._fsshard_view_of = (self._owner, entry.name)  # type: ignore[attr-defined]
        view._fsshard_stale = (  # type: ignore[attr-defined]
            f"parameter {entry.name!r} is a view of what the engine manages; build the optimizer with "
            "fsshard.build_optimizer"
        )
        return view


def _pointer(tensor: Tensor) -> int:
    return _local(tensor).data_ptr()


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local
