"""Parameters as the user knows them, over the engine's storage."""

from __future__ import annotations

import contextlib
import functools
import re
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from fsshard.backends.base import Backend
from fsshard.backends.part_guards import refuse_parameter
from fsshard.backends.whole import has_no_shapes
from fsshard.complex_params.data_assignment import DATA, data, set_item
from fsshard.complex_params.pairs import Form
from fsshard.complex_params.replaced import MARKS
from fsshard.complex_params.shown import Shown, even_gradient
from fsshard.complex_params.views import export_stored
from fsshard.errors import FsshardError, UnsupportedByBackend
from fsshard.model.second_derivatives import derivatives_by_views, with_derivatives
from fsshard.planning.entries import Entry
from fsshard.torch_private.tensors import LOCAL_TENSOR

__all__ = ["ParameterViews", "refuse_hooks"]


ASKS_FORM = frozenset((
    "size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "storage_offset", "data_ptr", "type",
    "get_device", "untyped_storage", "__len__", "__hash__", "__repr__", "__format__", "requires_grad_", "detach_",
    "share_memory_", "rename_", "retain_grad", "register_hook", "detach", "clone", "view", "reshape", "flatten", "t",
    "transpose", "permute", "squeeze", "unsqueeze", "__getitem__",
))  # fmt: skip
"""What may be asked of a parameter without values: its shape, dtype and device, and views, which have none either."""
GIVES_NEW_VALUES = re.compile(r".*_like|new_.*|.*_as|_?is_.*")
"""Functions that ask a parameter for the same, and have values of their own."""
NO_VALUES = (
    "parameters of the model that this engine has cut have no values here (they are on the meta device): nothing can "
    "be computed with them, or written to them, outside of the forward. Compute a penalty in the forward and return "
    "it, or use the optimizer's weight_decay, or backend='fairscale' or 'ddp'; for numbers that are not "
    "differentiated use model.full_parameters(); write to them within model.full_parameters(writeback=True), or "
    "through model.load_state_dict"
)


def _refuse_hook(view: Any, hook: object) -> NoReturn:
    """Refuse to register a hook: a view takes no gradient, so that torch would never call it."""
    _refuse_hook_on(view._fsshard_entry.name, view._fsshard_backend.name)


def _refuse_hook_on(name: str, backend: str, *_: Any) -> NoReturn:
    raise UnsupportedByBackend(
        f"gradient hooks on {name!r}, which autograd does not reach: the engine writes its gradient",
        backend,
        "read the gradient after backward(), or hook the module's output",
    )


def refuse_hooks(entry: Entry, backend: Backend) -> None:
    """Let the engine's own parameter raise where hooks on it would never be called, as the user's modules show it.

    FSDP2 itself calls the hooks of ``register_post_accumulate_grad_hook``, with the reduced gradient (torch 2.13).
    """
    attributes, refuse = vars(entry.parameter), functools.partial(_refuse_hook_on, entry.name, backend.name)
    attributes["register_hook"] = refuse
    if not backend.facts.has_dtensors:
        attributes["register_post_accumulate_grad_hook"] = refuse


def _attribute(view: Any, name: str) -> Any:
    """Return an attribute that a user has set: the engine's parameter has it, so that the modules show it, too."""
    entry = None if name.startswith(MARKS) else vars(view).get("_fsshard_entry")
    if entry is None or name not in vars(entry.parameter):
        raise AttributeError(f"{type(view).__name__!r} object has no attribute {name!r}")
    return vars(entry.parameter)[name]


def _set_attribute(view: Any, name: str, value: object) -> None:
    entry = None if name.startswith(MARKS) or hasattr(type(view), name) else vars(view).get("_fsshard_entry")
    Tensor.__setattr__(view if entry is None else entry.parameter, name, value)


class _Hollow(Tensor):
    """Made of a parameter without values, and without values itself."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise where values are read, or are written to the meta device, which loses them without a word.

        torch's own kernels there (of norm, sum, abs, ...) make their result with ``device=input.device``, where a
        parameter names the device of its shard: uninitialised memory (2.13, ``torch/_refs``).
        """
        if func is torch.autograd.grad:
            return derivatives_by_views(*args, **kwargs)
        name = getattr(func, "__name__", "")
        is_attribute = name in ("__get__", "__set__", "__delete__")
        if name == "__set__" and func.__self__ is DATA:
            is_attribute, name = False, ".data = ..."
        if not (is_attribute or name in ASKS_FORM or GIVES_NEW_VALUES.fullmatch(name)):
            raise FsshardError(f"{name}: {NO_VALUES}")
        with torch.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        return found.as_subclass(_Hollow) if type(found) is Tensor and found.is_meta else found


class _ShapeOnly(nn.Parameter):
    """Stands for a parameter whose part on this rank has no shape of its own (FSDP1's flat shards).

    It is on the meta device: shape, dtype and ``requires_grad`` are right, there are no values, and none can be
    written. Its gradient can be dropped, and nothing else: reading None there would make torch's own clipping skip it
    silently.
    """

    __torch_function__ = _Hollow.__torch_function__
    __reduce_ex__ = refuse_parameter
    register_hook = register_post_accumulate_grad_hook = _refuse_hook
    __getattr__, __setattr__ = _attribute, _set_attribute

    _fsshard_entry: Entry
    _fsshard_backend: Backend

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device of the shard; ``next(model.parameters()).device`` is asked for that."""
        return self._fsshard_backend.settings.device

    @property
    def grad(self) -> Tensor | None:
        raise FsshardError(
            f"the gradient of {self._fsshard_entry.name!r} is a flat shard of its unit. An optimizer that "
            "fsshard.build_optimizer(model, torch.optim.AdamW, ...) has made takes it for step() and zero_grad(); clip "
            "with model.clip_grad_norm_(max_norm)"
        )

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            raise FsshardError(f"the gradient of {self._fsshard_entry.name!r} is a flat shard; it can only be dropped")
        _drop_gradient(self)

    @grad.deleter
    def grad(self) -> None:
        _drop_gradient(self)


def _gradient(view: Any) -> Tensor | None:
    """Return the engine's gradient, as it is now: over the same memory, and never a copy that is kept."""
    entry: Entry = view._fsshard_entry
    gradient = even_gradient(entry.parameter) if entry.kind.is_complex else entry.parameter.grad
    return None if gradient is None else export_stored(gradient, entry.kind)


def _set_gradient(view: Any, value: Tensor | None) -> None:
    if value is not None:
        raise FsshardError(
            f"the gradient of {view._fsshard_entry.name!r} is the engine's; change it in place, or drop it"
        )
    _drop_gradient(view)


def _drop_gradient(view: Any) -> None:
    view._fsshard_backend.zero_grad([view._fsshard_entry], set_to_none=True)
    view._fsshard_backend.drops.add(view._fsshard_entry.name)


class _View(nn.Parameter):
    """A parameter in the user's shape and dtype over the engine's memory."""

    __torch_function__: Any = classmethod(with_derivatives)

    data = data
    register_hook = register_post_accumulate_grad_hook = _refuse_hook
    __getattr__, __setattr__ = _attribute, _set_attribute
    grad = property(_gradient, _set_gradient, _drop_gradient)

    __deepcopy__: Any = Shown.__deepcopy__
    __reduce_ex__: Any = Shown.__reduce_ex__


class _Listed(_ShapeOnly):
    """Stands for a complex parameter that FSDP2 holds as a list of its numbers, cut between any two of them.

    Its gradient is a DTensor of one dimension over the engine's memory: what is done number by number, and norms, are
    right on it.
    """

    grad = property(_gradient, _set_gradient, _drop_gradient)


@functools.cache
def _dtensor_view() -> type[Tensor]:
    from torch.distributed.tensor import DTensor

    class DTensorView(DTensor):
        """A :class:`_View` of a DTensor."""

        __torch_function__: Any = classmethod(with_derivatives)
        __reduce_ex__ = refuse_parameter
        data = data
        __setitem__ = set_item
        register_hook = register_post_accumulate_grad_hook = _refuse_hook
        __getattr__, __setattr__ = _attribute, _set_attribute
        grad = property(_gradient, _set_gradient, _drop_gradient)

    return DTensorView


class ParameterViews:
    """One view per parameter that the engine does not hold in its original shape and dtype.

    Views are made once and kept, so that who has frozen one (``requires_grad_``) is heard: :meth:`adopt` takes it over
    before the next forward. Their gradients are the engine's at any time, and they never keep memory that the engine
    has left: see :meth:`relocating_storage`.
    """

    def __init__(self, backend: Backend, owner: Any) -> None:
        self._backend = backend
        self._owner = weakref.ref(owner)
        self._views: dict[str, nn.Parameter] = {}
        self._flags: dict[str, bool] = {}  # requires_grad when view and parameter were last the same
        self.moves = 0  # how often the engine has put parameters into other memory, the same on every rank

    def show(self, entry: Entry) -> nn.Parameter:
        """Return the engine's own parameter where it is the user's, else the view."""
        parameter = entry.parameter
        as_stored = parameter.shape == entry.shape and not entry.kind.is_complex and not entry.kind.order
        if as_stored and not has_no_shapes(self._backend):
            return parameter
        with torch.inference_mode(False):  # it is kept; and DTensors have no detach() there (torch 2.13)
            value = self._value(entry, parameter.detach())
            view = self._views.get(entry.name)
            if view is None or (not view.is_meta and _pointer(view) != _pointer(value)):
                view = self._views[entry.name] = self._new(entry, value)
                self._flags[entry.name] = parameter.requires_grad
        return view

    def adopt(self) -> None:
        """Take over what was done to the views: frozen or unfrozen."""
        with torch.DisableTorchFunctionSubclass():  # at each forward
            for name, view in self._views.items():
                parameter = self._backend.entries[name].parameter
                if view.requires_grad != self._flags[name]:  # changed through the view
                    parameter.requires_grad_(view.requires_grad)
                elif view.requires_grad != parameter.requires_grad:  # changed through the user's module
                    view.requires_grad_(parameter.requires_grad)
                self._flags[name] = view.requires_grad

    def require_grad(self, flag: bool) -> None:
        """Freeze or unfreeze everything."""
        for entry in self._backend.entries.values():
            entry.parameter.requires_grad_(flag)
        for name, view in self._views.items():
            view.requires_grad_(flag)
            self._flags[name] = flag

    @contextlib.contextmanager
    def relocating_storage(self) -> Iterator[None]:
        """Context in which the engine moves its parameters; views let go of the old memory and then hold the new.

        The views themselves stay: who has a list of them goes on seeing the parameters, and keeps no second copy.
        """
        self.moves += 1
        held = {name: view for name, view in self._views.items() if not view.is_meta}
        local = {name: view for name, view in held.items() if _local(view) is view}
        for name in held.keys() - local.keys():
            del self._views[name]  # of a DTensor: made anew when it is shown again
        for view in local.values():
            DATA.__set__(view, view.new_empty(0))
        try:
            yield
        finally:
            for name, view in local.items():
                entry = self._backend.entries[name]
                DATA.__set__(view, self._value(entry, entry.parameter.detach()))

    def _value(self, entry: Entry, stored: Tensor) -> Tensor:
        """``stored`` as the user sees it: over the same memory, or shape and dtype only."""
        is_dtensor = hasattr(stored, LOCAL_TENSOR)
        if has_no_shapes(self._backend):
            return torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        if stored.shape == entry.stored_shape and (
            not is_dtensor or entry.kind.form is Form.COMPLEX or entry.kind.order
        ):
            shown: Tensor = export_stored(stored, entry.kind)
            return shown
        return torch.empty(entry.shape, dtype=entry.dtype, device="meta")

    def _new(self, entry: Entry, value: Tensor) -> nn.Parameter:
        listed = hasattr(entry.parameter, LOCAL_TENSOR) and entry.parameter.shape != entry.stored_shape
        kind = (_Listed if listed else _ShapeOnly) if value.is_meta else _View
        view: Any = kind(value, requires_grad=entry.parameter.requires_grad)
        if _local(value) is not value:  # Parameter gives back a DTensor as one
            view.__class__ = _dtensor_view()
        view._fsshard_entry, view._fsshard_backend = entry, self._backend
        if view.requires_grad:
            cast(Any, Tensor).register_hook(view, functools.partial(_refuse_gradient, entry.name))
        view._fsshard_view_of = (self._owner, entry.name)
        view._fsshard_stale = (
            f"parameter {entry.name!r} is a view of what the engine manages; build the optimizer with "
            "fsshard.build_optimizer"
        )
        shown: nn.Parameter = view
        return shown


def _refuse_gradient(name: str, gradient: Tensor) -> None:
    raise FsshardError(
        f"a loss was computed with {name!r} of model.parameters(), a view whose gradient would be lost; compute it "
        "within the model's forward"
    )


def _pointer(tensor: Tensor) -> int:
    return _local(tensor).data_ptr()


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = getattr(tensor, LOCAL_TENSOR, tensor)
    return local
