"""Complex parameters stored as real ones and seen as complex by their module.

Sharding engines flatten, cut and pack *real* parameters of one dtype. :func:`tensorfy` therefore moves each
complex parameter ``w`` of shape ``S`` to a real parameter ``w__real`` of shape ``(*S, 2)`` over the same memory,
and gives the module a property ``w`` that returns ``torch.view_as_complex(self.w__real)``. The forward of the
model, its state dict, ``.to()``, deepcopy and pickle go on seeing ``w``; engines see only real numbers.
:func:`untensorfy` undoes it.

How it is done, and why:

* *A dynamic subclass per (class, names)*, with one property per name, rather than ``__getattr__``: a property wins
  over everything an engine may put into the instance, ``torch.compile`` traces through it, and pickle can rebuild
  the class from the original one.
* *The storage has another name* (``w__real``): engines call ``getattr(module, name)`` and ``setattr(module, name)``
  on what they manage, and must get the real tensor there.
* *Ties stay ties*: one memo by identity over the whole model.
* *A reference captured before* (a closure, a list, an optimizer) would lose its gradient in silence; it shares the
  memory, and a hook on it raises :class:`~fsshard.errors.StaleParameter`.

Real 0-dim parameters can travel the same way (``scalars=True``), stored with shape ``(1,)``: FSDP1 and FSDP2 refuse
scalars (torch 2.13: "fully_shard doesn't support scalar parameters"). So can real parameters that are not contiguous
(``in_order=True``): a transposed matrix, a convolution in ``torch.channels_last``. Like complex ones they are stored in
the order of their memory, contiguous to every engine, and seen through ``permute`` with the very strides that they
had, by which kernels choose how to multiply.

An engine that cuts along dim 0 may ask for a list of numbers instead (:func:`lay_flat`): the stored parameter has shape
``(numbers, 2)`` then, so that it can be cut between any two of them, and the module goes on seeing ``S``.
"""

from __future__ import annotations

import enum
import sys
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fsshard.errors import ModelError, PrecisionError, StaleParameter

__all__ = [
    "Form",
    "Kind",
    "ParameterSlot",
    "is_tensorfied",
    "lay_flat",
    "order_in_memory",
    "original_of",
    "parameter_slots",
    "raw_state",
    "tensorfy",
    "untensorfy",
]

SUFFIX = "__real"
ModuleT = TypeVar("ModuleT", bound=nn.Module)


class Form(enum.Enum):
    """What a stored tensor is made of."""

    PLAIN = "stored as it is"
    COMPLEX = "complex of shape S, stored as real of shape (*S, 2)"
    COMPLEX_SCALAR = "0-dim complex, stored as real of shape (1, 2)"
    SCALAR = "0-dim real, stored with shape (1,)"
    RENAMED = "real (*S, 2) for the user too (tltorch Complex*), stored under another name"


@dataclass(frozen=True)
class Kind:
    """How a stored tensor relates to the one that the user sees.

    Attributes:
        form: what it is made of.
        order: dim ``i`` of what is stored is the user's dim ``order[i]``, so that what is stored is contiguous where
            the user's tensor is not; empty where the dims are in the user's order.
    """

    form: Form
    order: tuple[int, ...] = ()

    PLAIN: ClassVar[Kind]
    COMPLEX: ClassVar[Kind]
    COMPLEX_SCALAR: ClassVar[Kind]
    SCALAR: ClassVar[Kind]
    RENAMED: ClassVar[Kind]

    @cached_property
    def is_complex(self) -> bool:
        """Whether the user sees a complex number."""
        return self.form in (Form.COMPLEX, Form.COMPLEX_SCALAR)

    @cached_property
    def way_back(self) -> tuple[int, ...]:
        """``permute(*way_back)`` puts the dims of what is stored, pairs as one number, into the user's order."""
        return tuple(self.order.index(dim) for dim in range(len(self.order)))

    def to_user(self, stored: Tensor) -> Tensor:
        """The user's tensor over the memory of ``stored``; a copy only where the layout cannot be viewed."""
        if self.form is Form.SCALAR:
            return stored.reshape(())
        if self.is_complex:
            number = torch.view_as_complex(viewable(stored))
            return number[0] if self.form is Form.COMPLEX_SCALAR else self.turn_back(number)
        return self.turn_back(stored)

    def turn_back(self, value: Tensor) -> Tensor:
        """``value``, whose dims are as stored, with its dims in the user's order."""
        return value.permute(self.way_back) if self.order else value

    def to_stored(self, value: Tensor) -> Tensor:
        """The stored tensor over the memory of the user's ``value`` where that has its layout, else a copy."""
        if self.form is Form.SCALAR:
            return value.reshape(1)
        if self.is_complex:
            number = value if value.is_complex() else value.to(_complex_of(value.dtype))
            number = number.resolve_conj()
            real = torch.view_as_real(number.permute(self.order) if self.order else number)
            return (real.unsqueeze(0) if self.form is Form.COMPLEX_SCALAR else real).contiguous()
        return value.permute(self.order).contiguous() if self.order else value

    def user_shape(self, stored: torch.Size) -> torch.Size:
        """The shape that the user sees."""
        if self.form in (Form.COMPLEX_SCALAR, Form.SCALAR):
            return torch.Size(())
        shape = stored[:-1] if self.form is Form.COMPLEX else stored
        return torch.Size([shape[dim] for dim in self.way_back]) if self.order else shape

    def user_dtype(self, stored: torch.dtype) -> torch.dtype:
        """The dtype that the user sees."""
        return _complex_of(stored) if self.is_complex else stored


for _form in Form:
    setattr(Kind, _form.name, Kind(_form))


def order_in_memory(tensor: Tensor) -> tuple[int, ...]:
    """The dims of ``tensor`` from the outermost in memory to the innermost; empty where that is their own order.

    Kernels look at strides, those of dims of size 1 included: a matrix whose columns lie one after the other is
    multiplied in another order of sums than the same numbers row by row (MKL with AVX-512, torch 2.13).
    """
    sizes, strides = tensor.shape, tensor.stride()
    dims = range(tensor.dim())
    order = tuple(sorted(dims, key=lambda dim: (-strides[dim], -sizes[dim])))
    if order == tuple(dims) or tensor.numel() == 0:
        return ()
    if not tensor.is_contiguous():
        return order
    # Only dims of size 1 are at another place: to be kept where it gives back the very strides.
    turned = Kind(Form.PLAIN, order).turn_back(torch.empty([sizes[dim] for dim in order], device="meta"))
    return order if turned.stride() == strides else ()


def _complex_of(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype == torch.float64 else torch.complex64


def viewable(stored: Tensor) -> Tensor:
    """``stored`` itself when ``view_as_complex`` accepts its layout, else a contiguous copy.

    ``view_as_complex`` wants an even storage offset and even strides ("Tensor must have a storage_offset divisible
    by 2"); a packed buffer of an engine can break both.
    """
    return stored.clone(memory_format=torch.contiguous_format) if is_odd(stored) else stored


def is_odd(stored: Tensor) -> bool:
    """Whether ``view_as_complex`` refuses the layout."""
    *others, last = stored.stride()
    if last != 1 or stored.storage_offset() & 1:
        return True
    for stride in others:  # noqa: SIM110  at each access of a weight: a generator takes five times as long
        if stride & 1:
            return True
    return False


class ParameterSlot(NamedTuple):
    """One place where a module holds a parameter.

    Attributes:
        name: fully qualified name as the user knows it.
        owner: the module.
        attribute: the name the user knows within the module.
        stored: the key in ``owner._parameters``.
        kind: how storage and user's view relate.
    """

    name: str
    owner: nn.Module
    attribute: str
    stored: str
    kind: Kind

    @property
    def parameter(self) -> nn.Parameter:
        """The stored parameter as it is now."""
        return cast(nn.Parameter, self.owner._parameters[self.stored])

    @property
    def is_complex(self) -> bool:
        """Whether the module computes with it as a complex number; the same before and after :func:`tensorfy`."""
        if self.kind.is_complex or self.parameter.is_complex():
            return True
        known = _tltorch_classes()
        return known is not None and isinstance(self.owner, known)


def public_name(name: str) -> str:
    """``name`` without what torch's activation-checkpoint wrapper adds, and strips from state dicts itself."""
    return ".".join(part for part in name.split(".") if part != "_checkpoint_wrapped_module")


def parameter_slots(model: nn.Module) -> Iterator[ParameterSlot]:
    """Every slot of every module in the order of ``named_parameters(remove_duplicate=False)``, ties repeated."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        views = _views(module)
        names = {name + SUFFIX: (name, kind) for name, kind in views.items()}
        for stored, parameter in module._parameters.items():
            if parameter is None:
                continue
            attribute, kind = names.get(stored, (stored, Kind.PLAIN))
            prefix = public_name(prefix)
            yield ParameterSlot(f"{prefix}.{attribute}" if prefix else attribute, module, attribute, stored, kind)


def is_tensorfied(module: nn.Module) -> bool:
    """Whether this very module holds flattened parameters."""
    return isinstance(module, _Flattened)


def _views(module: nn.Module) -> Mapping[str, Kind]:
    return type(module)._fsshard_views if isinstance(module, _Flattened) else {}


# ----------------------------------------------------------------------------------------------- access


_PAIRED = (torch.float32, torch.float64)


class _Warned:
    copy = False


def _see(stored: Tensor, kind: Kind) -> Tensor:
    """What the property returns: the user's view of ``stored``, whatever state an engine has put it in."""
    if kind.form is Form.COMPLEX and stored.dim() > 1 and stored.dtype in _PAIRED:
        try:
            return torch.view_as_complex(stored)  # at each access of a weight: no questions where it works
        except RuntimeError:  # begins at an odd place, or is a flat shard
            pass
    return _see_any(stored, kind)


def _see_any(stored: Tensor, kind: Kind) -> Tensor:
    if kind.form is Form.SCALAR:
        return stored.reshape(()) if stored.numel() == 1 else stored
    if kind.form is Form.PLAIN or stored.dim() < 2 or stored.shape[-1] != 2:
        return stored  # a flat shard (FSDP1 at rest): hand back what the engine holds, and never read its memory
    if torch.compiler.is_compiling():  # probing offsets and strides would break the graph
        wide = stored.float() if stored.dtype in (torch.bfloat16, torch.float16) else stored
        number = torch.view_as_complex(wide)
        return number[0] if kind.form is Form.COMPLEX_SCALAR else number
    if stored.dtype in (torch.bfloat16, torch.float16):
        stored = stored.float()  # view_as_complex refuses bfloat16 and makes complex32 of float16
    if is_odd(stored) and _has_memory(stored):
        stored = viewable(stored)
        if not _Warned.copy:
            _Warned.copy = True
            warnings.warn(
                "fsshard copies a complex weight at each access: the engine packed it at an odd offset", stacklevel=4
            )
    number = torch.view_as_complex(stored)
    return number[0] if kind.form is Form.COMPLEX_SCALAR else number


def _see_turned(stored: Tensor, kind: Kind) -> Tensor:
    """:func:`_see` of what is stored in the order of its memory; of a flat shard what the engine holds."""
    number = _see(stored, kind)
    return number.permute(kind.way_back) if number.dim() == len(kind.order) else number


def _see_flat(stored: Tensor, kind: Kind, shape: torch.Size) -> Tensor:
    """:func:`_see` of what :func:`lay_flat` has laid out; of a shard what the engine holds, a list as well."""
    number = _see(stored, kind)
    if not torch.compiler.is_compiling() and (number is stored or _is_dtensor(number)):
        return number
    return kind.turn_back(number.view(shape))


def _has_memory(tensor: Tensor) -> bool:
    # FSDP1 frees the storage of a resharded parameter (torch 2.13): copying from it is a segmentation fault.
    if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
        return True  # DTensor and other subclasses have no single storage to ask
    return tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0


def _property(name: str, kind: Kind) -> property:
    stored_name = name + SUFFIX
    see = _see_turned if kind.order else _see

    def get(self: Any) -> Any:
        members = self.__dict__
        stored = members.get(stored_name)  # FSDP1 puts unsharded views here
        if stored is None:
            stored = members["_parameters"].get(stored_name)
        if stored is None:
            # None; or a plain buffer, in what tltorch's slicing makes of this very class under Dynamo.
            return type(self)._fsshard_origin.__getattr__(self, name)
        flat = members.get("_fsshard_flat")
        return see(stored, kind) if flat is None or name not in flat else _see_flat(stored, kind, flat[name])

    return property(get)


# ----------------------------------------------------------------------------------------------- state dicts


class _RawState(threading.local):
    on = False


_raw = _RawState()


@contextmanager
def raw_state() -> Iterator[None]:
    """Within it, ``state_dict(keep_vars=True)`` has the user's keys and the *stored* parameters as values."""
    before, _raw.on = _raw.on, True
    try:
        yield
    finally:
        _raw.on = before


def _is_dtensor(value: object) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # no DTensor can exist before its module does
    return module is not None and isinstance(value, module.DTensor)


def _map_dtensor(value: Any, local: Tensor, kind: Kind) -> Any:
    """What the user sees of the DTensor ``value`` as a DTensor over ``local``, its part here (no communication)."""
    from torch.distributed.tensor import DTensor, Shard

    shape = kind.user_shape(value.shape)
    stride = kind.turn_back(
        torch.empty([shape[dim] for dim in kind.order or range(len(shape))], device="meta")
    ).stride()
    placements = value.placements
    if kind.order:
        placements = [Shard(kind.order[p.dim]) if isinstance(p, Shard) else p for p in placements]
    return DTensor.from_local(local, value.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def export_stored(stored: Any, kind: Kind) -> Any:
    """The user's tensor over the memory of ``stored``, a DTensor where that is one; a flat shard as it is."""
    if _is_dtensor(stored):
        if kind.form is not Form.COMPLEX and not kind.order:
            return stored  # 0-dim values have no dimension to shard: they stay as FSDP2 holds them
        # From the local shard: DTensor's own view_as_complex needs a redistribution for a dim 0 of size 1.
        return _map_dtensor(stored, kind.to_user(stored.to_local()), kind)
    if (kind.is_complex and stored.dim() < 2) or (kind.form is Form.SCALAR and stored.numel() != 1):
        return stored  # a flat shard
    return stored if kind.form is Form.PLAIN and stored.dim() != len(kind.order) else kind.to_user(stored)


@contextmanager
def _as_native(module: nn.Module) -> Iterator[dict[str, nn.Parameter]]:
    """Within it the module has its original class and parameters of the user's names over the stored memory.

    The original class's own methods then run as written, overrides and hooks of the user included. Yields what is
    shown in place of each stored parameter. A parameter assigned within it replaces the stored one afterwards.
    """
    cls, stored = type(module), module._parameters
    views = _views(module)
    native: dict[str, nn.Parameter | None] = {}
    shown: dict[str, nn.Parameter] = {}
    for key, parameter in stored.items():
        name = key.removesuffix(SUFFIX)
        if key == name or name not in views or parameter is None:
            native[key] = parameter
        elif _raw.on:
            native[name] = shown[name] = parameter
        else:
            native[name] = shown[name] = nn.Parameter(
                export_stored(parameter.detach(), views[name]), parameter.requires_grad
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


# ----------------------------------------------------------------------------------------------- the mixin


class _Flattened(nn.Module):
    """First base of every dynamic subclass: keeps the outside of the module as it was."""

    _fsshard_views: Mapping[str, Kind] = {}
    _fsshard_origin: type[nn.Module] = nn.Module

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Swallow it: tltorch demands ``name=`` here, and neuralop and tltorch would register the subclass."""

    def __setattr__(self, name: str, value: Any) -> None:
        kind = type(self)._fsshard_views.get(name)
        if kind is None and not isinstance(value, nn.Parameter):
            super().__setattr__(name, value)
            return
        held = kind is not None and name + SUFFIX in self.__dict__.get("_parameters", {})
        takes = isinstance(value, nn.Parameter) and (value.is_complex() or _is_real(kind)) and not _opts_out(self)
        if held and value is not None and not isinstance(value, nn.Parameter):
            found = torch.typename(value)
            raise TypeError(f"cannot assign {found!r} as parameter {name!r} (torch.nn.Parameter or None expected)")
        if takes:
            _check(name, value)
        if held:
            self._give_up(name)
        super().__setattr__(name, value)
        if takes:
            _flatten_module(self, "", {}, scalars=kind == Kind.SCALAR, in_order=_is_real(kind))

    def __delattr__(self, name: str) -> None:
        if name in type(self)._fsshard_views and name + SUFFIX in self._parameters:
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
        kept = {name if key == name + SUFFIX else key: parameter for key, parameter in self._parameters.items()}
        self._parameters.clear()
        self._parameters.update(kept | {name: None})
        views = tuple((other, kind) for other, kind in cls._fsshard_views.items() if other != name)
        self.__class__ = _flattened_class(cls._fsshard_origin, views, _mixin_of(self))  # type: ignore[assignment]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Device and dtype moves act on the complex value, as they do natively; losing its half raises."""
        owned: dict[int, Kind] = {}
        for name, kind in type(self)._fsshard_views.items():
            parameter = self._parameters.get(name + SUFFIX)
            if parameter is not None and (kind.is_complex or kind.order):
                owned[id(parameter)] = kind
                if parameter.grad is not None:
                    owned[id(parameter.grad)] = kind

        def on_value(tensor: Tensor) -> Tensor:
            kind = owned.get(id(tensor))
            if kind is None or _is_dtensor(tensor) or (kind.is_complex and tensor.shape[-1:] != (2,)):
                return fn(tensor)
            if not kind.is_complex:
                return fn(kind.turn_back(tensor)).permute(kind.order)
            moved = fn(kind.turn_back(torch.view_as_complex(viewable(tensor))))
            if not moved.is_complex():
                raise PrecisionError(
                    f"casting a complex parameter to {moved.dtype} would discard its imaginary part; "
                    "cast the real parameters only, or use complex128 / complex64"
                )
            return torch.view_as_real(moved.permute(kind.order) if kind.order else moved)

        return cast(Any, super())._apply(on_value, recurse)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if not _raw.on:
            _refuse_lists(self)
        with _as_native(self) as shown:
            self._save_to_state_dict(destination, prefix, keep_vars)
        if _raw.on:
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
                destination[prefix + name] = export_stored(self._parameters[name + SUFFIX], kind)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        hooks = self._load_state_dict_pre_hooks
        for hook in hooks.values():  # before the swap: FSDP2's brings its shards back into place
            hook(state_dict, prefix, *rest)
        if any(prefix + name in state_dict for name in self.__dict__.get("_fsshard_flat", ())):
            _refuse_lists(self)
        before = dict(self._parameters)
        self._load_state_dict_pre_hooks = OrderedDict()
        try:
            with _as_native(self) as shown:
                self._load_from_state_dict(state_dict, prefix, *rest)
        finally:
            self._load_state_dict_pre_hooks = hooks
        for name, parameter in shown.items():
            stored = self._parameters.get(name + SUFFIX)
            if stored is None or stored is not before[name + SUFFIX] or _is_dtensor(stored):
                continue
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
        return _rebuild, (type(self)._fsshard_origin, views, _mixin_of(self)), state


def _refuse_lists(module: nn.Module) -> None:
    """A shard of a list of numbers has none of the shapes that a state dict of the model could have."""
    for name in module.__dict__.get("_fsshard_flat", ()):
        if _is_dtensor(module._parameters.get(name + SUFFIX)):
            raise ModelError(
                f"state dict of a sharded {type(module).__qualname__}: its {name!r} is cut between any two numbers, so "
                "that a part has no shape; use the state_dict and load_state_dict of what fsshard.wrap returned"
            )


class _FlattenedList(_Flattened):
    """``nn.ParameterList``: a native slice makes new Parameters of the views, and their gradient is lost."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(cast(Any, self))))]
        return super().__getitem__(index)  # type: ignore[misc]


class _FlattenedDict(_Flattened):
    """``nn.ParameterDict``: a native copy makes new Parameters of the views, and their gradient is lost."""

    def copy(self) -> dict[str, Any]:
        return dict(cast(Any, self).items())

    def __ror__(self, other: Any) -> dict[str, Any]:
        return dict(other.items()) | self.copy()  # Python asks it before a plain ParameterDict's own __or__


class _HandlerFlattened(_Flattened):
    """tltorch's ``ComplexHandler`` (SFNO, ``factorization="ComplexTucker"``).

    It stores real tensors under the user's name already, but its ``__setattr__`` and ``register_*`` accept complex
    ones only, so an engine cannot put its real tensors there ("view_as_real is only supported for complex tensors").
    The storage gets another name, for which these overrides step aside. Its state dict stays real, as it is natively.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name.endswith(SUFFIX):
            nn.Module.__setattr__(self, name, value)
        elif name in type(self)._fsshard_views and isinstance(value, nn.Parameter):
            nn.Module.__setattr__(self, name + SUFFIX, nn.Parameter(torch.view_as_real(value.detach())))
        else:
            super(_Flattened, self).__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name.endswith(SUFFIX):
            return nn.Module.__getattr__(self, name)
        return super(_Flattened, self).__getattr__(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name.endswith(SUFFIX):
            nn.Module.register_parameter(self, name, param)
        else:
            super().register_parameter(name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        if name.endswith(SUFFIX):
            nn.Module.register_buffer(self, name, tensor, persistent)
        else:
            super().register_buffer(name, tensor)


class _RealListFlattened(_Flattened):
    """tltorch's ``ComplexFactorList``: storage and names are fine, but registering must accept real tensors."""

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.is_complex():
            super().register_parameter(name, param)
        else:
            nn.Module.register_parameter(self, name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        if tensor is not None and tensor.is_complex():
            super().register_buffer(name, tensor)
        else:
            nn.Module.register_buffer(self, name, tensor, persistent)


_MIXINS: tuple[type[_Flattened], ...] = (
    _HandlerFlattened,
    _RealListFlattened,
    _FlattenedList,
    _FlattenedDict,
    _Flattened,
)
_classes: dict[tuple[type, tuple[tuple[str, Kind], ...], type], type[nn.Module]] = {}


def _mixin_of(module: nn.Module) -> type[_Flattened]:
    return next(mixin for mixin in _MIXINS if isinstance(module, mixin))


def _mixin_for(origin: type[nn.Module]) -> type[_Flattened]:
    if issubclass(origin, nn.ParameterList):
        return _FlattenedList
    return _FlattenedDict if issubclass(origin, nn.ParameterDict) else _Flattened


@cache
def _calling_origin(metaclass: type) -> Any:
    """What ``type(self)(...)`` in a method makes (tltorch's slices, at every forward) has nothing flattened in it.

    The original class is called, as its metaclass wishes (tltorch's initialises, fastai's does so for its own classes
    only, others do something afterwards). ``__new__`` stays as it is, for those who copy ``__dict__`` into a blank.
    Dynamo knows nothing of metaclasses and makes a flattened instance, which is right and slower (torch 2.13).
    """

    def call(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return cls._fsshard_origin(*args, **kwargs)

    return type(metaclass.__name__, (metaclass,), {"__call__": call})


def _flattened_class(
    origin: type[nn.Module], views: tuple[tuple[str, Kind], ...], mixin: type[_Flattened]
) -> type[nn.Module]:
    key = (origin, views, mixin)
    if key not in _classes:
        members: dict[str, Any] = {
            "_fsshard_views": dict(views),
            "_fsshard_origin": origin,
            "__module__": origin.__module__,
            "__qualname__": origin.__qualname__,
            "__doc__": origin.__doc__,
        }
        for name, kind in views:
            members[name] = _property(name, Kind.COMPLEX if kind == Kind.RENAMED else kind)
        metaclass: Any = type(origin)
        make: Callable[..., type[nn.Module]] = _calling_origin(metaclass)
        _classes[key] = make(origin.__name__, (mixin, origin), members)
    return _classes[key]


def _rebuild(origin: type[nn.Module], views: tuple[tuple[str, Kind], ...], mixin: type[_Flattened]) -> nn.Module:
    cls = _flattened_class(origin, views, mixin)
    return nn.Module.__new__(cls)


# ----------------------------------------------------------------------------------------------- there and back


class _Original(NamedTuple):
    parameter: weakref.ref[nn.Parameter]
    hook: Any


class _Successor(NamedTuple):
    stored: weakref.ref[nn.Parameter]
    hook: Any


# Neither keeps the other alive: stored parameter -> the one it replaced, and the way back.
_originals: MutableMapping[nn.Parameter, _Original] = WeakIdKeyDictionary()
_successors: MutableMapping[nn.Parameter, _Successor] = WeakIdKeyDictionary()


def _opts_out(module: nn.Module) -> bool:
    return isinstance(module, (_HandlerFlattened, _RealListFlattened))


def _stored_for(parameter: nn.Parameter, kind: Kind, name: str) -> nn.Parameter:
    """The stored parameter of ``parameter``: the one there is, when another module has brought it in before."""
    known = _successors.get(parameter)
    stored = known.stored() if known is not None else None
    if stored is None:
        if known is not None and known.hook is not None:
            known.hook.remove()
        return _replacement(parameter, kind, name)
    value = kind.to_user(stored.detach())
    if (value.data_ptr(), value.dtype, value.shape) != (parameter.data_ptr(), parameter.dtype, parameter.shape):
        raise ModelError(
            f"parameter {name!r} was taken over by fsshard before, and what replaced it has moved since; "
            "tensorfy modules that share parameters first, together, and assign a new nn.Parameter here"
        )
    return stored


def _replacement(parameter: nn.Parameter, kind: Kind, name: str) -> nn.Parameter:
    stored = nn.Parameter(kind.to_stored(parameter.detach()), requires_grad=parameter.requires_grad)
    if stored.data_ptr() != parameter.data_ptr():
        parameter.data = kind.to_user(stored.detach())  # it was not contiguous: let the two share memory all the same
    stored.__dict__.update({key: item for key, item in parameter.__dict__.items() if not key.startswith("_fsshard")})
    if parameter.grad is not None:
        stored.grad = kind.to_stored(parameter.grad)
    message = (
        f"parameter {name!r} was captured before fsshard took it over; use the module's attribute, "
        "or build the optimizer with fsshard.build_optimizer"
    )

    def refuse(_: Tensor) -> None:
        raise StaleParameter(message)

    hook = cast(Any, parameter).register_hook(refuse) if parameter.requires_grad else None
    parameter._fsshard_stale = message  # type: ignore[attr-defined]
    _originals[stored] = _Original(weakref.ref(parameter), hook)
    _successors[parameter] = _Successor(weakref.ref(stored), hook)
    return stored


def original_of(stored: nn.Parameter) -> nn.Parameter | None:
    """The user's parameter that ``stored`` has replaced, if somebody still holds it."""
    record = _originals.get(stored)
    return None if record is None else record.parameter()


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Whether somebody has registered hooks on it."""
    known = _successors.get(parameter)
    ours = {known.hook.id} if known is not None and known.hook is not None else set()
    others = set(parameter._backward_hooks or ()) - ours
    return bool(others or getattr(parameter, "_post_accumulate_grad_hooks", None))


def _check(name: str, parameter: nn.Parameter) -> None:
    if has_gradient_hooks(parameter):
        what = "complex parameter" if parameter.is_complex() else "parameter"
        raise ModelError(
            f"{what} {name!r} has gradient hooks, which storing it in another way would lose; "
            "register them after fsshard.wrap, on the module's output, or remove them"
        )


def _is_real(kind: Kind | None) -> bool:
    """Whether it is a real parameter that is stored in another way than it is seen."""
    return kind is not None and (kind.form is Form.SCALAR or (kind.form is Form.PLAIN and bool(kind.order)))


def _kind_for(parameter: nn.Parameter, scalars: bool, in_order: bool) -> Kind:
    if not parameter.dim():
        return Kind.COMPLEX_SCALAR if parameter.is_complex() else Kind.SCALAR if scalars else Kind.PLAIN
    if parameter.is_complex():
        return Kind(Form.COMPLEX, order_in_memory(parameter))
    return Kind(Form.PLAIN, order_in_memory(parameter)) if in_order else Kind.PLAIN


def _flatten_module(
    module: nn.Module, prefix: str, memo: dict[int, nn.Parameter], *, scalars: bool, in_order: bool
) -> None:
    views = dict(_views(module))
    kept: dict[str, nn.Parameter | None] = {}
    for name, parameter in module._parameters.items():
        kind = Kind.PLAIN if parameter is None or name.endswith(SUFFIX) else _kind_for(parameter, scalars, in_order)
        if parameter is None or kind == Kind.PLAIN:
            kept[name] = parameter
            continue
        full_name = f"{prefix}.{name}" if prefix else name
        if id(parameter) not in memo:
            memo[id(parameter)] = _stored_for(parameter, kind, full_name)
        kept[name + SUFFIX] = memo[id(parameter)]
        views[name] = kind
    if all(name in kept for name in module._parameters.keys()):  # noqa: SIM118  torch.jit's dict iterates values
        return
    origin = type(module)._fsshard_origin if isinstance(module, _Flattened) else type(module)
    module._parameters.clear()
    module._parameters.update(kept)
    module.__class__ = _flattened_class(origin, tuple(views.items()), _mixin_for(origin))


def _tltorch_classes() -> tuple[type, type] | None:
    """(ComplexHandler, ComplexFactorList) when tltorch is in use; a model made of it has imported it."""
    handlers = sys.modules.get("tltorch.factorized_tensors.complex_factorized_tensors")
    lists = sys.modules.get("tltorch.utils.parameter_list")
    return (handlers.ComplexHandler, lists.ComplexFactorList) if handlers and lists else None


def _rename_tltorch(module: nn.Module, handler: type, factor_list: type) -> None:
    if isinstance(module, factor_list) and not is_tensorfied(module):
        module.__class__ = _flattened_class(type(module), (), _RealListFlattened)
    elif isinstance(module, handler) and not is_tensorfied(module):
        present = [name for name, parameter in module._parameters.items() if parameter is not None]
        if present:
            stored = {name + SUFFIX: module._parameters[name] for name in present}
            module._parameters.clear()
            module._parameters.update(stored)
            views = tuple((name, Kind.RENAMED) for name in present)
            module.__class__ = _flattened_class(type(module), views, _HandlerFlattened)


def check_tensorfiable(model: nn.Module, *, scalars: bool = False, in_order: bool = False) -> None:
    """Raise what :func:`tensorfy` would raise, before anything is changed."""
    for slot in parameter_slots(model):
        if nn.parameter.is_lazy(slot.parameter):
            raise ModelError(f"parameter {slot.name!r} is lazy; run one forward before sharding so that it has a shape")
        if slot.kind == Kind.PLAIN and _kind_for(slot.parameter, scalars, in_order) != Kind.PLAIN:
            if isinstance(slot.owner, torch.jit.ScriptModule):
                raise ModelError(f"parameter {slot.name!r} is inside of a torch.jit module, which keeps what it has")
            _check(slot.name, slot.parameter)
            if slot.attribute + SUFFIX in {**vars(slot.owner), **slot.owner._parameters, **slot.owner._buffers}:
                raise ModelError(
                    f"parameter {slot.name!r} is stored under the name {slot.attribute + SUFFIX!r}, which "
                    f"{type(slot.owner).__name__} has given to something else; rename one of the two"
                )


def tensorfy(model: ModuleT, *, scalars: bool = False, in_order: bool = False) -> ModuleT:
    """Store each complex parameter of ``model`` as a real one, in place and over the same memory.

    One that is not contiguous is stored in the order of its memory, and seen with the strides that it has. Nothing is
    copied, unless its elements have gaps between them, which are closed.

    Args:
        model: any module; complex64 parameters become float32 storage of shape ``(*shape, 2)``, complex128 float64.
            Already tensorfied modules are left alone, so calling it twice is calling it once.
        scalars: also store real 0-dim parameters with shape ``(1,)``, which FSDP1 and FSDP2 need.
        in_order: also store real parameters that are not contiguous in the order of their memory, for engines that
            hold contiguous ones only.

    Returns:
        ``model`` itself. Attributes, forward, ``state_dict`` (names, order, dtypes, shapes), ``load_state_dict``,
        ``.to``, ``repr``, deepcopy, pickle and ``torch.save`` are as before; ``named_parameters()`` of the bare
        module shows the real storage as ``<name>__real`` (``fsshard.wrap`` hides that too).

    Raises:
        ModelError: a parameter is lazy, or a complex one has gradient hooks; nothing was changed.
    """
    check_tensorfiable(model, scalars=scalars, in_order=in_order)
    memo: dict[int, nn.Parameter] = {}
    known = _tltorch_classes()
    for name, module in list(model.named_modules()):
        if known is not None:
            _rename_tltorch(module, *known)
        if not _opts_out(module):
            _flatten_module(module, name, memo, scalars=scalars, in_order=in_order)
    return model


def lay_flat(slots: Sequence[ParameterSlot]) -> nn.Parameter:
    """Store a complex parameter as a list of its numbers, of shape ``(numbers, 2)``, over the same memory.

    For engines, which cut along dim 0, and for good: :func:`untensorfy` does not undo it.

    Args:
        slots: every place that holds it; tensorfied, and contiguous.

    Returns:
        The parameter that they hold now.
    """
    old = slots[0].parameter
    new = nn.Parameter(old.detach().view(-1, 2), requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)
    for slot in slots:
        slot.owner._parameters[slot.stored] = new
        slot.owner.__dict__.setdefault("_fsshard_flat", {})[slot.attribute] = old.shape[:-1]  # as stored
    return new


def _restored(stored: nn.Parameter, kind: Kind) -> nn.Parameter:
    record = _originals.pop(stored, None)
    original = record.parameter() if record is not None else None
    if record is not None and record.hook is not None and original is not None:
        record.hook.remove()
    value = kind.to_user(stored.detach())
    if original is None:
        original = nn.Parameter(value, requires_grad=stored.requires_grad)
    else:
        original.data = value
        original.__dict__.pop("_fsshard_stale", None)
        _successors.pop(original, None)
        original.requires_grad_(stored.requires_grad)
    original.grad = None if stored.grad is None else kind.to_user(stored.grad)
    extra = {key: item for key, item in stored.__dict__.items() if not key.startswith("_fsshard")}
    original.__dict__.update(extra)
    return original


def _restore_module(module: _Flattened, memo: dict[int, nn.Parameter]) -> None:
    views = type(module)._fsshard_views
    kept: dict[str, nn.Parameter | None] = {}
    for stored, parameter in module._parameters.items():
        name = stored[: -len(SUFFIX)] if stored.endswith(SUFFIX) else ""
        if name not in views or parameter is None:
            kept[name if name in views else stored] = parameter
        elif views[name] == Kind.RENAMED:
            kept[name] = parameter
        else:
            if id(parameter) not in memo:
                memo[id(parameter)] = _restored(parameter, views[name])
            kept[name] = memo[id(parameter)]
    module._parameters.clear()
    module._parameters.update(kept)
    cast(nn.Module, module).__class__ = type(module)._fsshard_origin


def untensorfy(model: ModuleT) -> ModuleT:
    """Undo :func:`tensorfy` in place: native complex parameters again, over the same memory, ties kept.

    The very Parameter objects of before come back where somebody still holds them, so an optimizer built before
    :func:`tensorfy` works again.
    """
    modules = [module for module in model.modules() if isinstance(module, _Flattened)]
    if any(p is not None and _is_dtensor(p) for module in modules for p in module._parameters.values()):
        raise ModelError("the model is sharded by an engine; untensorfy works on whole models only")
    memo: dict[int, nn.Parameter] = {}
    for module in modules:
        _restore_module(module, memo)
    return model
