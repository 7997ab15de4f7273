"""Classes for modules that store parameters in another form than they show.

A module's class becomes a subclass of the user's, one per (class, names), with a property for each name: a property
wins over everything that an engine may put into the instance, ``torch.compile`` traces through it, and pickle can make
the class again. The storage has another name (``w__real``), under which engines get and set it.
"""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from fsshard.complex_params.pairs import SUFFIX, Form, Kind, kind_for, viewable
from fsshard.complex_params.replaced import check_no_gradient_hooks, stored_for
from fsshard.complex_params.shown import Kept, Switch, UserParameters, shows_stored, stored_names, stored_of
from fsshard.complex_params.views import KEPT, export_stored, is_dtensor, view_property
from fsshard.errors import ModelError, PrecisionError
from fsshard.torch_private.modules import LOAD_STATE_DICT_PRE_HOOKS, load_state_dict_pre_hooks

__all__ = [
    "Flattened",
    "adopt_factorised",
    "class_in_front",
    "factorised_classes",
    "flatten_module",
    "flattened_class",
    "forget_shown",
    "has_own_layout",
    "mixin_for",
    "raw_state",
    "showing_the_users",
    "store_otherwise",
    "stored_in",
    "views_of",
]

_classes: WeakValueDictionary[tuple[type, tuple[tuple[str, Kind], ...], type], type[nn.Module]] = WeakValueDictionary()
"""Weak: a kind may know a mesh, whose process groups would not end with ``destroy_process_group()``."""


def views_of(module: nn.Module) -> Mapping[str, Kind]:
    """Return the user's names of what the module stores in another way, and how each is stored."""
    return type(module)._fsshard_views if isinstance(module, Flattened) else {}


def stored_in(module: nn.Module) -> dict[str, Any]:
    """Return the dict in which ``module`` keeps its parameters, by the names under which they are stored."""
    # torch.jit's modules have no such member.
    return module.__dict__["_parameters"] if isinstance(module, Flattened) else module._parameters


def showing_the_users(model: nn.Module) -> contextlib.ExitStack:
    """Let ``model`` show parameters by the user's names, shapes and dtypes, in forwards and outside.

    Returns:
        A context manager whose end undoes it; not entering it leaves it so.
    """
    undo = contextlib.ExitStack()
    for module in model.modules():
        if isinstance(module, Flattened) and KEPT not in module.__dict__:
            module.__dict__[KEPT] = Kept()
            undo.callback(module.__dict__.pop, KEPT, None)
    return undo


def forget_shown(module: nn.Module) -> None:
    """Let go of the tensors that ``module`` has shown, which keep the memory of the stored ones."""
    module.__dict__.get(KEPT, {}).clear()


raw_state = Switch()
"""Within it, ``state_dict(keep_vars=True)`` has the user's keys and the *stored* parameters as values."""


@contextmanager
def _as_native(module: nn.Module) -> Iterator[dict[str, nn.Parameter]]:
    """Give the module, within, its original class and parameters of the user's names over the stored memory.

    The original class's own methods then run as written, overrides and hooks of the user included. Yields what is
    shown in place of each stored parameter. A parameter assigned within it replaces the stored one afterwards.
    """
    cls, stored = type(module), stored_in(module)
    views = views_of(module)
    native: dict[str, nn.Parameter | None] = {}
    shown: dict[str, nn.Parameter] = {}
    for key, parameter in stored.items():
        name = key.removesuffix(SUFFIX)
        if key == name or name not in views or parameter is None:
            native[key] = parameter
        elif raw_state.on:
            native[name] = shown[name] = parameter
        else:
            native[name] = shown[name] = nn.Parameter(
                _exported(parameter.detach(), views[name]), parameter.requires_grad
            )
    before = dict(native)
    module.__dict__["_parameters"] = native
    module.__class__ = cls._fsshard_origin  # type: ignore[attr-defined]
    try:
        yield shown
    finally:
        module.__class__ = cls
        module.__dict__["_parameters"] = stored
    for name, parameter in native.items():
        if name not in before or parameter is not before[name]:
            setattr(module, name, parameter)


class Flattened(nn.Module):
    """First base of every dynamic subclass: keeps the outside of the module as it was."""

    _fsshard_views: Mapping[str, Kind] = {}
    _fsshard_origin: type[nn.Module] = nn.Module
    _fsshard_mixin: type[Flattened]
    _fsshard_holds_reals: ClassVar[bool] = False
    """True if the class keeps complex numbers as real parameters itself, so that none need be stored otherwise."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Swallow it: tltorch demands ``name=`` here, and neuralop and tltorch would register the subclass."""

    @property
    def _parameters(self) -> Any:
        members = self.__dict__
        if shows_stored(members):
            return members["_parameters"]
        return UserParameters(cast(nn.Module, self), type(self)._fsshard_views)

    @_parameters.setter
    def _parameters(self, value: Any) -> None:
        self.__dict__["_parameters"] = value

    def __setattr__(self, name: str, value: Any) -> None:
        kind = type(self)._fsshard_views.get(name)
        if kind is None and name.endswith(SUFFIX):
            # FSDP1 puts another view in place of one of its own, whose graph would hold the engine through C++.
            known = self.__dict__.get(KEPT, {}).get(name.removesuffix(SUFFIX))
            if known is not None and known.stored.grad_fn is not None:
                del self.__dict__[KEPT][name.removesuffix(SUFFIX)]
            if type(value) is Tensor and name not in self.__dict__["_parameters"]:  # FSDP1, several times in each step
                self.__dict__[name] = value
                return
        if kind is None and not isinstance(value, nn.Parameter):
            super().__setattr__(name, value)
            return
        if value is not None and stored_of(value) is self.__dict__.get("_parameters", {}).get(name + SUFFIX):
            return
        if stored_of(value) is not value:
            raise ModelError(
                f"parameter {name!r}: a parameter of a wrapped model cannot be put into another place; tie parameters "
                "before fsshard.wrap, or assign nn.Parameter(value.detach().clone())"
            )
        held = kind is not None and name + SUFFIX in self.__dict__.get("_parameters", {})
        is_real = kind is not None and not kind.is_complex and (kind.form is Form.SCALAR or bool(kind.order))
        takes = isinstance(value, nn.Parameter) and (value.is_complex() or is_real) and not self._fsshard_holds_reals
        if held and value is not None and not isinstance(value, nn.Parameter):
            found = torch.typename(value)
            raise TypeError(f"cannot assign {found!r} as parameter {name!r} (torch.nn.Parameter or None expected)")
        if takes:
            check_no_gradient_hooks(name, value)
        if held:
            self._give_up(name)
        super().__setattr__(name, value)
        if takes:
            flatten_module(self, "", {}, scalars=kind == Kind.SCALAR, in_order=is_real)

    def __delattr__(self, name: str) -> None:
        if name in type(self)._fsshard_views and name + SUFFIX in self.__dict__["_parameters"]:
            self._give_up(name)
        super().__delattr__(name)

    def _give_up(self, name: str) -> None:
        """Make ``name`` an ordinary parameter that is None, at its old place, with no property in its way."""
        cls = type(self)
        if cls not in _classes.values():
            raise ModelError(
                f"parameter {name!r} cannot be replaced now: an engine has sharded {cls.__qualname__}; "
                "change the model before wrapping it, or load values with load_state_dict"
            )
        held = stored_in(self)
        kept = {name if key == name + SUFFIX else key: parameter for key, parameter in held.items()}
        held.clear()
        held.update(kept | {name: None})
        views = tuple((other, kind) for other, kind in cls._fsshard_views.items() if other != name)
        self.__class__ = flattened_class(cls._fsshard_origin, views, cls._fsshard_mixin)  # type: ignore[assignment]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move and cast the complex value, as is done natively; raise where its half would be lost."""
        owned: dict[int, Kind] = {}
        forget_shown(cast(nn.Module, self))
        for name, kind in type(self)._fsshard_views.items():
            parameter = stored_in(self).get(name + SUFFIX)
            if parameter is not None and (kind.is_complex or kind.order):
                owned[id(parameter)] = kind
                if parameter.grad is not None:
                    owned[id(parameter.grad)] = kind

        def on_value(tensor: Tensor) -> Tensor:
            kind = owned.get(id(tensor))
            if kind is None or is_dtensor(tensor) or (kind.is_complex and tensor.shape[-1:] != (2,)):
                return fn(tensor)
            if not kind.is_complex:
                return fn(kind.turn_back(tensor)).permute(kind.order)
            moved = fn(kind.turn_back(torch.view_as_complex(viewable(tensor))))
            if not moved.is_complex():
                raise PrecisionError(
                    f"casting a complex parameter to {moved.dtype} would discard its imaginary part; cast the real "
                    "parameters only, as model.double(), .float(), .half() and .bfloat16() do"
                )
            return torch.view_as_real(moved.permute(kind.order) if kind.order else moved)

        with stored_names():
            return cast(Any, super())._apply(on_value, recurse)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if not raw_state.on:
            _refuse_lists(self)
        with _as_native(self) as shown:
            self._save_to_state_dict(destination, prefix, keep_vars)
        if raw_state.on:
            return
        if not keep_vars:
            for name in shown:
                value = destination.get(prefix + name)
                if type(value) is Tensor and value.is_complex() and value.untyped_storage().nbytes() > value.nbytes:
                    # An engine (OSS) has packed it with real ones: "Cannot save multiple tensors or storages that view
                    # the same data as different types" (torch.save, torch 2.13).
                    destination[prefix + name] = value.clone()
            return
        for name, parameter in shown.items():  # within reach of autograd, as the module's attribute is
            if destination.get(prefix + name) is parameter:
                kind = type(self)._fsshard_views[name]
                destination[prefix + name] = _exported(stored_in(self)[name + SUFFIX], kind)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        hooks = load_state_dict_pre_hooks(self)
        for hook in hooks.values():  # before the swap: FSDP2's brings its shards back into place
            hook(state_dict, prefix, *rest)
        if any(prefix + name in state_dict for name in self.__dict__.get("_fsshard_flat", ())):
            _refuse_lists(self)
        before = dict(stored_in(self))
        setattr(self, LOAD_STATE_DICT_PRE_HOOKS, OrderedDict())
        try:
            with _as_native(self) as shown:
                self._load_from_state_dict(state_dict, prefix, *rest)
        finally:
            setattr(self, LOAD_STATE_DICT_PRE_HOOKS, hooks)
        for name, parameter in shown.items():
            stored = stored_in(self).get(name + SUFFIX)
            if stored is None or stored is not before[name + SUFFIX] or is_dtensor(stored):
                continue
            if is_dtensor(parameter):
                parameter = cast(Any, parameter).to_local()
            if stored.data_ptr() == parameter.data_ptr():
                continue
            with torch.no_grad():  # what was shown is a copy (odd offset), or torch has swapped its memory
                stored.copy_(type(self)._fsshard_views[name].to_stored(parameter))

    def extra_repr(self) -> str:
        with _as_native(self):
            return self.extra_repr()

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = cast(Any, self).__getstate__() if hasattr(self, "__getstate__") else self.__dict__
        views = tuple(type(self)._fsshard_views.items())
        return _rebuild, (type(self)._fsshard_origin, views, type(self)._fsshard_mixin), state


def _exported(stored: Any, kind: Kind) -> Any:
    """Return what the module shows of ``stored``: a DTensor where it came as one, and is not an engine's shard."""
    value = export_stored(stored, kind)
    if kind.layout is None or is_dtensor(value) or value.dim() != len(kind.layout.shape):
        return value
    return kind.layout.as_dtensor(value)


def _refuse_lists(module: nn.Module) -> None:
    """Raise if a parameter is a shard of a list of numbers, which has no shape that a state dict could have."""
    for name in module.__dict__.get("_fsshard_flat", ()):
        if is_dtensor(stored_in(module).get(name + SUFFIX)):
            raise ModelError(
                f"state dict of a sharded {type(module).__qualname__}: its {name!r} is stored as a flat list of "
                "numbers, so a rank's part has no shape; use the state_dict and load_state_dict of what fsshard.wrap "
                "returned"
            )


class _FlattenedList(Flattened):
    """``nn.ParameterList``: a native slice makes new Parameters of the views, and their gradient is lost."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(cast(Any, self))))]
        return super().__getitem__(index)  # type: ignore[misc]


class _FlattenedDict(Flattened):
    """``nn.ParameterDict``: a native copy makes new Parameters of the views, and their gradient is lost."""

    def copy(self) -> dict[str, Any]:
        return dict(cast(Any, self).items())

    def __ror__(self, other: Any) -> dict[str, Any]:
        return dict(other.items()) | self.copy()  # Python asks it before a plain ParameterDict's own __or__


def mixin_for(origin: type[nn.Module]) -> type[Flattened]:
    """Return the first base of the subclass of ``origin``."""
    if issubclass(origin, nn.ParameterList):
        return _FlattenedList
    return _FlattenedDict if issubclass(origin, nn.ParameterDict) else Flattened


@cache
def _calling_origin(metaclass: type) -> Any:
    """Let ``type(self)(...)`` in a method make modules with nothing flattened (tltorch's slices, at every forward).

    The original class is called, as its metaclass wishes (tltorch's initialises, fastai's does so for its own classes
    only, others do something afterwards). ``__new__`` stays as it is, for those who copy ``__dict__`` into a blank.
    Dynamo knows nothing of metaclasses and makes a flattened instance, which is right and slower (torch 2.13).
    """

    def call(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return cls._fsshard_origin(*args, **kwargs)

    return type(metaclass.__name__, (metaclass,), {"__call__": call})


def flattened_class(
    origin: type[nn.Module], views: tuple[tuple[str, Kind], ...], mixin: type[Flattened]
) -> type[nn.Module]:
    key = (origin, views, mixin)
    found = _classes.get(key)
    if found is None:
        members: dict[str, Any] = {
            "_fsshard_views": dict(views),
            "_fsshard_origin": origin,
            "_fsshard_mixin": mixin,
            "__module__": origin.__module__,
            "__qualname__": origin.__qualname__,
            "__doc__": origin.__doc__,
        }
        for name, kind in views:
            members[name] = view_property(name, kind)
        metaclass: Any = type(origin)
        found = _classes[key] = class_in_front(mixin, origin, origin.__name__, members, _calling_origin(metaclass))
    return found


def _rebuild(origin: type[nn.Module], views: tuple[tuple[str, Kind], ...], mixin: type[Flattened]) -> nn.Module:
    cls = flattened_class(origin, views, mixin)
    return nn.Module.__new__(cls)


def store_otherwise(
    module: nn.Module,
    stored_as: Callable[[str, nn.Parameter], tuple[nn.Parameter, Kind] | None],
    mixin: type[Flattened] | None = None,
) -> None:
    """Let ``module`` keep other parameters than it shows, in their places.

    Args:
        module: may have some already.
        stored_as: gives for a name and parameter what is stored, and how it relates; None: itself.
        mixin: first base of its class from then on; None: as its class asks.
    """
    views, held = dict(views_of(module)), stored_in(module)
    kept: dict[str, nn.Parameter | None] = {}
    for name, parameter in held.items():
        chosen = None if parameter is None or name.endswith(SUFFIX) else stored_as(name, parameter)
        if chosen is None:
            kept[name] = parameter
        else:
            kept[name + SUFFIX], views[name] = chosen
    if all(name in kept for name in held.keys()):  # noqa: SIM118  torch.jit's dict iterates values
        return
    origin = type(module)._fsshard_origin if isinstance(module, Flattened) else type(module)
    held.clear()
    held.update(kept)
    module.__class__ = flattened_class(origin, tuple(views.items()), mixin or mixin_for(origin))


def flatten_module(
    module: nn.Module, prefix: str, memo: dict[int, nn.Parameter], *, scalars: bool, in_order: bool
) -> None:
    """Store the complex parameters of one module as real ones; ``memo`` keeps ties over the whole model."""

    def stored_as(name: str, parameter: nn.Parameter) -> tuple[nn.Parameter, Kind] | None:
        kind = kind_for(parameter, scalars, in_order)
        if kind == Kind.PLAIN:
            return None
        if id(parameter) not in memo:
            memo[id(parameter)] = stored_for(parameter, kind, f"{prefix}.{name}" if prefix else name)
        return memo[id(parameter)], kind

    store_otherwise(module, stored_as)


# ------------------------------------------------------------------------------------------------ their classes


def class_in_front(front: type, origin: type[nn.Module], name: str, members: dict[str, Any], kind: Any = None) -> Any:
    """Make a class (front, origin) with ``front``'s methods first, to which modules of ``origin`` can be turned.

    Args:
        front: whose methods win.
        origin: the user's class.
        name: of the new class.
        members: of the new class.
        kind: its metaclass; None: that of ``origin``.
    """
    kind = type(origin) if kind is None else kind
    if not has_own_layout(origin):
        return kind(name, (front, origin), members)
    # Python refuses the turn ("object layout differs") where the first base of ``origin``, or of a base of it, has no
    # attributes of its own: with ``class Net(Generic[T], nn.Module)`` it is ``Net`` that brings them, and a class that
    # inherits from ``front`` first has them from there. So it inherits from ``origin`` first, in another order.
    order = (*(base for base in front.__mro__ if base not in origin.__mro__), *origin.__mro__)
    return _ordering(kind)(name, (origin, front), {**members, _ORDER: order})


def has_own_layout(origin: type) -> bool:
    """Return whether modules of a class get their attributes from another class than ``nn.Module``."""
    while origin.__base__ is not None and origin.__base__.__dictoffset__:
        origin = origin.__base__
    return origin is not nn.Module


_ORDER = "_fsshard_order"


@cache
def _ordering(metaclass: type) -> Any:
    def mro(cls: Any) -> Any:
        order = vars(cls).get(_ORDER)
        return type.mro(cls) if order is None else [cls, *order]

    return type(metaclass.__name__, (metaclass,), {"mro": mro})


# ------------------------------------------------------------------------------------------------ tltorch


def factorised_classes() -> tuple[type, type] | None:
    """Return (ComplexHandler, ComplexFactorList) if tltorch is in use; a model made of it has imported it."""
    handlers = sys.modules.get("tltorch.factorized_tensors.complex_factorized_tensors")
    lists = sys.modules.get("tltorch.utils.parameter_list")
    return (handlers.ComplexHandler, lists.ComplexFactorList) if handlers and lists else None


def adopt_factorised(module: nn.Module, handler: type, factor_list: type) -> None:
    """Give tltorch's modules a class that takes the real tensors of an engine."""
    if isinstance(module, Flattened):
        return
    if isinstance(module, factor_list):
        module.__class__ = flattened_class(type(module), (), _HoldsReals)
    elif isinstance(module, handler):
        store_otherwise(module, lambda _, parameter: (parameter, Kind.RENAMED), _HandlerFlattened)


class _HoldsReals(Flattened):
    """tltorch's modules that store complex numbers as real tensors, and let nobody register any.

    An engine could not put its own there ("view_as_real is only supported for complex tensors").
    """

    _fsshard_holds_reals = True

    def _is_stored(self, name: str, tensor: Tensor | None) -> bool:
        """Return whether it is registered past their own methods. Of ``ComplexFactorList`` the names are fine."""
        return tensor is None or not tensor.is_complex()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if self._is_stored(name, param):
            nn.Module.register_parameter(self, name, param)
        else:
            super().register_parameter(name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        if self._is_stored(name, tensor):
            nn.Module.register_buffer(self, name, tensor, persistent)
        else:
            super().register_buffer(name, tensor)


class _HandlerFlattened(_HoldsReals):
    """tltorch's ``ComplexHandler`` (SFNO, ``factorization="ComplexTucker"``).

    It stores real tensors under the user's name already. The storage gets another name, for which its own methods step
    aside. Its state dict stays real, as it is natively.
    """

    def _is_stored(self, name: str, tensor: Tensor | None) -> bool:
        return name.endswith(SUFFIX)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.endswith(SUFFIX):
            nn.Module.__setattr__(self, name, value)
        elif name in type(self)._fsshard_views and isinstance(value, nn.Parameter):
            nn.Module.__setattr__(self, name + SUFFIX, nn.Parameter(torch.view_as_real(value.detach())))
        else:
            super(Flattened, self).__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name.endswith(SUFFIX):
            return nn.Module.__getattr__(self, name)
        return super(Flattened, self).__getattr__(name)
