"""Classes for modules that store parameters in another form than they show.

A module's class becomes a subclass of the user's, one per (class, names), with a property for each name: a property
wins over everything that an engine may put into the instance, ``torch.compile`` traces through it, and pickle can make
the class again. The storage has another name (``w__real``), under which engines get and set it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from fsshard.complex_params.pairs import SUFFIX, Form, Kind, is_dtensor, is_odd, kind_for
from fsshard.complex_params.parameter_records import record_of
from fsshard.complex_params.replaced import check_no_gradient_hooks, stored_for
from fsshard.complex_params.shown import GRAD_FN, KEPT, PLAIN, Kept, UserParameters, stored_names, stored_of
from fsshard.errors import ModelError, PrecisionError
from fsshard.torch_private.autograd import disable_functorch, functorch_transforms_active, run_first
from fsshard.torch_private.tensors import version_of

LISTED = "_fsshard_flat"
"""Attribute of a module that stores parameters as lists of their numbers: name -> how it is stored."""

Stored = tuple[nn.Parameter, Kind]
Views = tuple[tuple[str, Kind], ...]

_classes: WeakValueDictionary[tuple[type, Views, type], type[nn.Module]] = WeakValueDictionary()
"""Weak: a kind may know a mesh, whose process groups would not end with ``destroy_process_group()``."""


def views_of(module: nn.Module) -> Mapping[str, Kind]:
    """Return the user's names of what the module stores in another way, and how each is stored."""
    if isinstance(module, Flattened):
        return type(module)._fsshard_views
    return {}


def stored_in(module: nn.Module) -> dict[str, Any]:
    """Return the dict in which ``module`` keeps its parameters, by the names under which they are stored."""
    # Past what Flattened shows under that name; torch.jit's modules have no such member.
    parameters = module.__dict__.get("_parameters")
    return module._parameters if parameters is None else parameters


def showing_the_users(modules: Iterable[nn.Module]) -> contextlib.ExitStack:
    """Let ``modules`` show parameters by the user's names, shapes and dtypes; what is returned undoes it at its end."""
    undo = contextlib.ExitStack()
    for module in modules:
        if isinstance(module, Flattened) and KEPT not in module.__dict__:
            module.__dict__[KEPT] = Kept()
            undo.callback(module.__dict__.pop, KEPT, None)
    return undo


def forget_shown(module: nn.Module) -> None:
    """Let go of the tensors that ``module`` has shown, which keep the memory of the stored ones."""
    module.__dict__.get(KEPT, {}).clear()


def _view_property(name: str, kind: Kind) -> property:
    """Return the property by which a module shows what it stores as ``kind`` under another name."""
    stored_name = name + SUFFIX
    is_renamed = kind.form is Form.RENAMED
    if is_renamed:
        # tltorch's own attribute is a view, and no parameter.
        kind = Kind.COMPLEX

    def get(self: Any) -> Any:
        members = self.__dict__
        parameters = members["_parameters"]
        stored = parameters.get(stored_name)
        if stored is None:
            if stored_name in parameters:
                return None
            # A plain buffer, in what tltorch's slicing makes of this very class under Dynamo.
            return type(self)._fsshard_origin.__getattr__(self, name)
        kept = members.get(KEPT)
        listed = members.get(LISTED, {})
        own_kind = listed.get(name, kind)
        if is_renamed or kept is None or torch.compiler.is_compiling():
            return own_kind.shown(stored)
        # As long as the stored one is the same, so is the tensor that shows it. In line: at each access of a weight.
        shown = kept.get(name)
        if (
            shown is None
            or shown._fsshard_stored is not stored
            or type(stored) not in PLAIN
            or shown._fsshard_trains != stored.requires_grad
            or shown.data_ptr() != stored.data_ptr()
        ):
            shown = kept.show(name, stored, own_kind)
            if kept.get(name) is not shown:
                return shown
        is_current = shown._fsshard_written == version_of(stored)
        # FSDP1's views, which are no leaves, are new at every forward.
        if is_current or not stored.is_leaf or torch.is_inference_mode_enabled():
            return shown
        # An optimizer has written it, so that autograd makes its nodes anew. Gradients go on from them to the stored
        # parameter as soon as they are there, as they reach a bare one: the engine of autograd runs the youngest node
        # first, and a view of an earlier forward is older than the hooks by which FSDP2 learns that a unit's backward
        # has ended, which would find the gradient missing; and all reductions would wait for the end of the backward.
        # Past __setattr__, which would be called once per weight and step.
        shown.__dict__["_fsshard_written"] = version_of(stored)
        if functorch_transforms_active():
            with disable_functorch():
                node = GRAD_FN.__get__(shown)
        else:
            node = GRAD_FN.__get__(shown)
        while node is not None and (inputs := node.next_functions):
            run_first(node)
            node = inputs[0][0]
        return shown

    return property(get)


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
        if stored_names.on or KEPT not in self.__dict__:
            return self.__dict__["_parameters"]
        return UserParameters(self, type(self)._fsshard_views)

    @_parameters.setter
    def _parameters(self, value: Any) -> None:
        self.__dict__["_parameters"] = value

    def __setattr__(self, name: str, value: Any) -> None:
        kind = type(self)._fsshard_views.get(name)
        parameters = self.__dict__.get("_parameters", {})
        if kind is None and name.endswith(SUFFIX):
            # FSDP1 puts another view in place of one of its own, whose graph would hold the engine through C++.
            shown = self.__dict__.get(KEPT, {})
            users = name.removesuffix(SUFFIX)
            if users in shown and shown[users]._fsshard_stored.grad_fn is not None:
                del shown[users]
            is_stored = name in parameters
            if type(value) is Tensor and not is_stored:
                # FSDP1 does so, several times in each step.
                self.__dict__[name] = value
                return
            # FSDP2, two times in each step: what nn.Module does with a leaf in the place of another.
            is_leaf = (
                isinstance(value, nn.Parameter) and value.grad_fn is None and "_fsshard_stored" not in value.__dict__
            )
            if is_stored and is_leaf and name not in self.__dict__ and not value.is_complex():
                parameters[name] = value
                return
        is_parameter = isinstance(value, nn.Parameter)
        if kind is None and not is_parameter:
            super().__setattr__(name, value)
            return
        stored_name = name + SUFFIX
        stored = parameters.get(stored_name)
        if value is not None and stored_of(value) is stored:
            return
        if stored_of(value) is not value:
            raise ModelError(
                f"parameter {name!r}: a parameter of a wrapped model cannot be put into another place; tie parameters "
                "before fsshard.wrap, or assign nn.Parameter(value.detach().clone())"
            )
        if kind is None or self._fsshard_holds_reals:
            super().__setattr__(name, value)
            if kind is None and value.is_complex() and not self._fsshard_holds_reals:
                flatten_module(self, "", {}, scalars=False, in_order=False)
            return
        if value is None:
            parameters[stored_name] = None
            return
        if not is_parameter:
            raise TypeError(
                f"cannot assign {torch.typename(value)!r} as parameter {name!r} (torch.nn.Parameter or None expected)"
            )
        has_form = kind_for(value, True, True).form is kind.form
        has_order = len(kind.order) in (0, value.dim())
        if not has_form or not has_order or is_dtensor(stored):
            raise ModelError(
                f"parameter {name!r} cannot be replaced by this one: expected one of the same form "
                f"({kind.form.value}), in a model that no engine has sharded; change the model before tensorfy or "
                "wrap, or load values with load_state_dict"
            )
        check_no_gradient_hooks(name, value)
        parameters[stored_name] = stored_for(value, kind, name)

    def __delattr__(self, name: str) -> None:
        cls = type(self)
        parameters = self.__dict__["_parameters"]
        stored_name = name + SUFFIX
        if name not in cls._fsshard_views or stored_name not in parameters:
            super().__delattr__(name)
            return
        stored = parameters[stored_name]
        if is_dtensor(stored) or (stored is not None and record_of(stored).is_shard):
            raise ModelError(
                f"parameter {name!r} cannot be deleted: an engine has divided it; change the model before fsshard.wrap"
            )
        del parameters[stored_name]
        self.__dict__.get(KEPT, {}).pop(name, None)
        # Otherwise torch's parametrize has put a class of its own in front.
        if cls in _classes.values():
            rest = tuple(view for view in cls._fsshard_views.items() if view[0] != name)
            self.__class__ = flattened_class(cls._fsshard_origin, rest, cls._fsshard_mixin)  # type: ignore[assignment]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move and cast the complex value, as is done natively; raise where its half would be lost."""
        kinds = {}
        forget_shown(self)
        parameters = stored_in(self)
        for name, kind in type(self)._fsshard_views.items():
            parameter = parameters.get(name + SUFFIX)
            if parameter is not None and (kind.is_complex or kind.order):
                kinds[id(parameter)] = kind
                if parameter.grad is not None:
                    kinds[id(parameter.grad)] = kind

        def on_value(tensor: Tensor) -> Tensor:
            kind = kinds.get(id(tensor))
            if kind is None or is_dtensor(tensor):
                return fn(tensor)
            if not kind.is_complex:
                return fn(kind.turn_back(tensor)).permute(kind.order)
            if tensor.shape[-1:] != (2,):
                return fn(tensor)
            moved = fn(Kind(Form.COMPLEX, kind.order).to_user(tensor))
            if not moved.is_complex():
                raise PrecisionError(
                    f"casting a complex parameter to {moved.dtype} would discard its imaginary part; cast the real "
                    "parameters only, as model.double(), .float(), .half() and .bfloat16() do"
                )
            if kind.order:
                moved = moved.permute(kind.order)
            return torch.view_as_real(moved)

        with stored_names():
            return super()._apply(on_value, recurse)  # type: ignore[no-untyped-call]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        # The class's own methods run as written.
        with showing_the_users([self]):
            super()._save_to_state_dict(destination, prefix, keep_vars)
        if keep_vars:
            return
        for name in type(self)._fsshard_views:
            key = prefix + name
            value = destination.get(key)
            if type(value) is not Tensor or not value.is_complex():
                continue
            if value.untyped_storage().nbytes() > value.nbytes:
                # An engine (OSS) has packed it with real ones: "Cannot save multiple tensors or storages that view
                # the same data as different types" (torch.save, torch 2.13).
                destination[key] = value.clone()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        with showing_the_users([self]):
            super()._load_from_state_dict(state_dict, prefix, *rest)
        parameters = stored_in(self)
        for name, kind in type(self)._fsshard_views.items():
            stored = parameters.get(name + SUFFIX)
            if not kind.is_complex or type(stored) is not nn.Parameter or stored.dim() < 2:
                continue
            value = state_dict.get(prefix + name)
            fits = isinstance(value, Tensor) and value.shape == kind.user_shape(stored.shape)
            # What is shown of one that lies at an odd place, and was written to, is a copy.
            if fits and is_odd(stored):
                with torch.no_grad():
                    stored.copy_(kind.to_stored(value))

    def extra_repr(self) -> str:
        with showing_the_users([self]):
            return super().extra_repr()

    def __reduce_ex__(self, protocol: Any) -> Any:
        cls = type(self)
        state = self.__dict__
        if hasattr(self, "__getstate__"):
            state = self.__getstate__()  # type: ignore[no-untyped-call]
        views = tuple(cls._fsshard_views.items())
        return _rebuild, (cls._fsshard_origin, views, cls._fsshard_mixin), state


class _FlattenedContainer(Flattened):
    """``nn.ParameterList`` and ``nn.ParameterDict``, whose own slices and copies make new Parameters of the views."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            numbers = range(len(self))  # type: ignore[arg-type]
            return [self[number] for number in numbers[index]]
        return super().__getitem__(index)  # type: ignore[misc]

    def copy(self) -> dict[str, Any]:
        return dict(self.items())  # type: ignore[operator]

    def __ror__(self, other: Any) -> dict[str, Any]:
        # Python asks it before a plain ParameterDict's own __or__.
        return dict(other.items()) | self.copy()


def _call_origin(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Let ``type(self)(...)`` in a method make modules with nothing flattened (tltorch's slices, at every forward)."""
    # The original class is called, as its metaclass wishes; __new__ stays, for those who copy __dict__ into a blank.
    # Dynamo knows nothing of metaclasses and makes a flattened instance, which is right and slower (torch 2.13).
    return cls._fsshard_origin(*args, **kwargs)


def flattened_class(origin: type[nn.Module], views: Views, mixin: type[Flattened]) -> type[nn.Module]:
    key = (origin, views, mixin)
    cls = _classes.get(key)
    if cls is None:
        members: dict[str, Any] = {
            "__module__": origin.__module__,
            "__qualname__": origin.__qualname__,
            "__doc__": origin.__doc__,
            "_fsshard_views": dict(views),
            "_fsshard_origin": origin,
            "_fsshard_mixin": mixin,
        }
        for name, kind in views:
            members[name] = _view_property(name, kind)
        cls = class_in_front(mixin, origin, origin.__name__, members, _call_origin)
        _classes[key] = cls
    return cls


def _rebuild(*described: Any) -> nn.Module:
    return nn.Module.__new__(flattened_class(*described))


def store_otherwise(
    module: nn.Module,
    stored_as: Callable[[str, nn.Parameter], Stored | None],
    mixin: type[Flattened] | None = None,
) -> None:
    """Let ``module`` keep what ``stored_as(name, parameter)`` gives, if not None, in the places of its parameters."""
    parameters = stored_in(module)
    views = dict(views_of(module))
    new = {}
    for name, parameter in parameters.items():
        chosen = None
        if parameter is not None and not name.endswith(SUFFIX):
            chosen = stored_as(name, parameter)
        if chosen is None:
            new[name] = parameter
        else:
            new[name + SUFFIX], views[name] = chosen
    # Whatever is stored otherwise has another name.
    if list(new) == list(parameters.keys()):
        return
    origin = type(module)._fsshard_origin if isinstance(module, Flattened) else type(module)
    if mixin is None:
        mixin = Flattened
        if issubclass(origin, (nn.ParameterList, nn.ParameterDict)):
            mixin = _FlattenedContainer
    parameters.clear()
    parameters.update(new)
    module.__class__ = flattened_class(origin, tuple(views.items()), mixin)


def flatten_module(
    module: nn.Module,
    prefix: str,
    memo: dict[int, nn.Parameter],
    *,
    scalars: bool,
    in_order: bool,
) -> None:
    """Store the complex parameters of one module as real ones; ``memo`` keeps ties over the whole model."""

    def stored_as(name: str, parameter: nn.Parameter) -> Stored | None:
        kind = kind_for(parameter, scalars, in_order)
        if kind.is_plain:
            return None
        if id(parameter) not in memo:
            full_name = f"{prefix}.{name}" if prefix else name
            memo[id(parameter)] = stored_for(parameter, kind, full_name)
        return memo[id(parameter)], kind

    store_otherwise(module, stored_as)


# ------------------------------------------------------------------------------------------------ their classes


def class_in_front(
    front: type,
    origin: type[nn.Module],
    name: str,
    members: dict[str, Any],
    call: Any = None,
) -> Any:
    """Make a class with ``front``'s methods before ``origin``'s, to which modules of ``origin`` can be turned.

    ``call``, if not None, is what calling the class does.
    """
    # Python refuses the turn ("object layout differs") where the first base of ``origin``, or of a base of it, has no
    # attributes of its own: with ``class Net(Generic[T], nn.Module)`` it is ``Net`` that brings them, and a class that
    # inherits from ``front`` first has them from there. So it inherits from ``origin`` first, in another order.
    own_bases = [base for base in front.__mro__ if base not in origin.__mro__]
    order = (*own_bases, *origin.__mro__)
    metaclass: Any = type(origin)
    return _ordering(metaclass, call)(name, (origin, front), {**members, _ORDER: order})


_ORDER = "_fsshard_order"


@cache
def _ordering(metaclass: Any, call: Any) -> Any:
    def mro(cls: Any) -> Any:
        order = vars(cls).get(_ORDER)
        if order is None:
            return type.mro(cls)
        return [cls, *order]

    members = {"mro": mro}
    if call is not None:
        members["__call__"] = call
    return type(metaclass.__name__, (metaclass,), members)


def has_own_layout(origin: type) -> bool:
    """Return whether modules of a class get their attributes from another class than ``nn.Module``."""
    while origin.__base__ is not None and origin.__base__.__dictoffset__:
        origin = origin.__base__
    return origin is not nn.Module


# ------------------------------------------------------------------------------------------------ tltorch


def factorised_classes() -> tuple[type, type] | None:
    """Return (ComplexHandler, ComplexFactorList) if tltorch is in use; a model made of it has imported it."""
    handlers = sys.modules.get("tltorch.factorized_tensors.complex_factorized_tensors")
    lists = sys.modules.get("tltorch.utils.parameter_list")
    if handlers and lists:
        return (handlers.ComplexHandler, lists.ComplexFactorList)
    return None


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
            pairs = torch.view_as_real(value.detach())
            nn.Module.__setattr__(self, name + SUFFIX, nn.Parameter(pairs))
        else:
            super(Flattened, self).__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name.endswith(SUFFIX):
            return nn.Module.__getattr__(self, name)
        return super(Flattened, self).__getattr__(name)
