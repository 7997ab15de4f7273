"""Parameters that a module under an engine shows its user in place of the real tensors that it stores.

To the user it is the parameter: of his name, shape and dtype, an ``nn.Parameter``, with a gradient, differentiable. It
is a view, so that a gradient which reaches it goes on to the stored parameter, where the engine waits for it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.overrides import has_torch_function_unary
from torch.utils.weak import WeakIdKeyDictionary

from fsshard.complex_params.pairs import SUFFIX, Form, Kind, is_dtensor, is_odd
from fsshard.complex_params.parameter_records import record_of
from fsshard.complex_params.replaced import MARKS, attributes_of, memory_of
from fsshard.complex_params.shard_tensors import assign, is_shown_by, shard_tensor
from fsshard.errors import ModelError, StaleParameter
from fsshard.torch_private.autograd import (
    disable_functorch,
    functorch_transforms_active,
    is_functorch_wrapped,
)
from fsshard.torch_private.compiling import disable_dynamo
from fsshard.torch_private.tensors import DATA, GRAD, IS_PARAMETER, LOCAL_TENSOR

KEPT = "_fsshard_shown"
"""Attribute of a module that shows its user's parameters: a :class:`Kept`."""
GRAD_FN: Any = Tensor.grad_fn
PLAIN = (Tensor, nn.Parameter)
_SWAPPED_IN = "_fsshard_swapped"
"""Attribute of a stored tensor that torch.func.functional_call put in: the user's tensor that it was made from."""

# stored -> what shows it: one object for all modules that share a parameter. Neither keeps the other alive.
_shown: MutableMapping[Tensor, weakref.ref[Tensor]] = WeakIdKeyDictionary()


class Switch(threading.local):
    """A flag of this thread, which is on within the context that calling it gives."""

    on = False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        before = self.on
        self.on = True
        try:
            yield
        finally:
            self.on = before


stored_names = Switch()
"""For engines that walk through modules: ``named_parameters()`` gives the stored parameters within it."""
raw_state = Switch()
"""For who reads what is stored: ``state_dict(keep_vars=True)`` has *stored* parameters under the user's keys."""


def stored_of(parameter: Any) -> Any:
    """Return the stored parameter behind ``parameter``, which is itself where the module stores it as it is."""
    if isinstance(parameter, Tensor):
        return parameter.__dict__.get("_fsshard_stored", parameter)
    return parameter


def stand_for(view: Any, stored: nn.Parameter) -> None:
    """Let :func:`stored_of` know what ``view`` shows."""
    view._fsshard_stored = stored


def even_gradient(stored: Tensor) -> Tensor | None:
    """Return the gradient of a stored complex parameter, moved once where it begins between two complex numbers."""
    # FSDP2 reduces a unit's gradients into one buffer (torch 2.13), where one behind an odd-sized parameter begins so;
    # it moves, so that a complex view shares its memory.
    gradient = stored.grad
    if gradient is None or not is_odd(getattr(gradient, LOCAL_TENSOR, gradient)):
        return gradient
    if hasattr(gradient, LOCAL_TENSOR):
        stored.grad = gradient = gradient.clone()
    else:
        # It stays the same tensor: reductions have made notes on it.
        gradient.data = gradient.data.clone()
    return gradient


# ------------------------------------------------------------------------------------------------ gradients


class ShownGradient(Tensor):
    """An engine's gradient as the user knows it: what is put in its place reaches the engine's memory."""

    # What is computed from it is a plain tensor.
    __torch_function__ = nn.Parameter.__torch_function__
    data: Any = property(DATA.__get__, assign)

    def set_(self, source: Any = None, *others: Any) -> Any:
        """Copy ``source`` into the engine's memory."""
        assign(self, None if others else source)
        return self


_gradients: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()
"""The engine's gradient -> what shows it, with the attributes that its user has given it."""


def shown_gradient(gradient: Tensor, kind: Kind) -> Any:
    """Return what shows an engine's gradient: the same object as long as that is the same."""
    shown = _gradients.get(gradient)
    if shown is not None and memory_of(shown) == memory_of(gradient):
        return shown
    # Of ``.data``, so that what is shown, which lives as long as the gradient, does not keep it alive as its base.
    value = kind.shown(DATA.__get__(gradient))
    if memory_of(value) != memory_of(gradient):
        # A copy, of a layout that cannot be viewed.
        return value
    value.__class__ = shard_tensor() if hasattr(value, LOCAL_TENSOR) else ShownGradient
    _gradients[gradient] = value
    return value


# ------------------------------------------------------------------------------------------------ classes


def _set_grad(tensor: Any, value: Any) -> None:
    """Set the gradient, and note a user's ``p.grad = None``: engines cannot tell it from one that never came."""
    GRAD.__set__(tensor, value)
    if value is not None:
        if hasattr(value, LOCAL_TENSOR):
            # The engine has made it, of torch's own class.
            value.__class__ = shard_tensor()
        return
    drops = record_of(tensor).drops
    if drops is not None:
        names, name = drops
        names.add(name)


class AsParameter:
    """Makes a view a parameter to its user."""

    _fsshard_stored: Tensor
    _fsshard_kind: Kind
    # The requires_grad of the stored one when the view was made; None: the view is not used again (see moving()).
    _fsshard_trains: bool | None
    # How often the stored one had been written when the view's nodes were made.
    _fsshard_written: int = -1
    data: Any = property(DATA.__get__, assign)
    # As of a bare one: tltorch registers it in modules that it makes in forwards.
    is_leaf = True
    grad_fn = None

    @property
    def grad(self) -> Tensor | None:
        """The stored parameter's gradient, as the user sees it."""
        stored = self._fsshard_stored
        kind = self._fsshard_kind
        if not stored.is_leaf:
            return None
        gradient = even_gradient(stored) if kind.is_complex else stored.grad
        if gradient is None:
            return None
        return shown_gradient(gradient, kind)  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        stored = self._fsshard_stored
        own = self.grad
        if value is not None and value is own:
            # As in ``p.grad *= 2``.
            return
        if value is None or not (hasattr(value, LOCAL_TENSOR) or hasattr(stored, LOCAL_TENSOR)):
            stored.grad = None if value is None else self._fsshard_kind.to_stored(value).reshape(stored.shape)
        elif own is None:
            raise ModelError(
                "p.grad = ... of a parameter that ranks share and that has no gradient: it is the engine's to make; "
                "call backward() first, then change it"
            )
        else:
            assign(own, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def requires_grad_(self, flag: bool = True) -> Any:
        """Freeze or unfreeze the stored parameter."""
        self._fsshard_stored.requires_grad_(flag)
        return self

    requires_grad = property(lambda shown: shown._fsshard_stored.requires_grad, requires_grad_)

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """Register a hook as on a bare parameter: it outlives the view, and gets the user's gradient."""
        # A shard refuses it; see refuse_hooks in fsshard/sharded/parameters.py.
        kind = self._fsshard_kind

        def on_stored(gradient: Tensor) -> Tensor | None:
            result = hook(kind.shown(gradient))
            if result is None:
                return None
            return kind.to_stored(result).reshape(gradient.shape)

        return cast(Any, self._fsshard_stored).register_hook(on_stored)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        """Register a hook that is called with what the user knows as the parameter."""
        kind = self._fsshard_kind
        return self._fsshard_stored.register_post_accumulate_grad_hook(lambda stored: hook(_show(stored, kind)))

    def __hash__(self) -> int:
        return hash(self._fsshard_stored)

    def __eq__(self, other: Any) -> Any:
        """Return True for the stored parameter, and whatever else shows it; compare elements with all other tensors."""
        # So the two are one key of sets and dicts: ``optimizer.state[p]``, Lightning's map of parameters to names. An
        # object finds itself there without being asked, and ``(p == p).all()`` is as of any tensor.
        if other is not self and stored_of(other) is self._fsshard_stored:
            return True
        return Tensor.__eq__(cast(Tensor, self), other)

    def __getattr__(self, name: str) -> Any:
        """Return a Python attribute of the stored parameter, the user's or the engine's."""
        stored = self.__dict__.get("_fsshard_stored")
        if stored is None or name not in stored.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return stored.__dict__[name]

    def __setattr__(self, name: str, value: object) -> None:
        own = name.startswith(MARKS) or hasattr(type(self), name)
        Tensor.__setattr__(self if own else self.__dict__.get("_fsshard_stored", self), name, value)


class Shown(AsParameter, nn.Parameter):  # type: ignore[misc]
    """A parameter of the user's shape and dtype over the memory of a stored one."""

    grad_dtype: Any = property(lambda shown: shown.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return repr(nn.Parameter(self.detach(), self.requires_grad))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a parameter of its own."""
        memo[id(self)] = copied = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a parameter of its own: torch refuses to save one memory as real and as complex numbers (2.13)."""
        return nn.Parameter(self.detach().clone(), self.requires_grad).__reduce_ex__(protocol)


@functools.cache
def _shown_dtensor() -> type[Tensor]:
    class ShownDTensor(AsParameter, shard_tensor()):  # type: ignore[misc]
        # The engine's parameter says whether it is a part, which may not be copied.
        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            return self._fsshard_stored.__deepcopy__(memo)

        def __reduce_ex__(self, protocol: Any) -> Any:
            return self._fsshard_stored.__reduce_ex__(protocol)

    return ShownDTensor


@functools.cache
def held_dtensor() -> type[Tensor]:
    """Return the class of the DTensors that an engine holds as parameters."""

    class HeldDTensor(shard_tensor()):  # type: ignore[misc]
        # torch's own is for classes whose clone() has their type; the copy is nobody's parameter.
        __deepcopy__ = Shown.__deepcopy__
        grad = property(GRAD.__get__, _set_grad)
        __hash__ = Tensor.__hash__
        __eq__ = is_shown_by

    return HeldDTensor


# ------------------------------------------------------------------------------------------------ views


class Kept(dict[str, Shown]):
    """The tensors that a module has shown, by name; copies of the module show tensors of their own."""

    def __reduce__(self) -> Any:
        return Kept, ()

    def show(self, name: str, stored: Any, kind: Kind) -> Any:
        """Return a new view of ``stored``, which was replaced or has moved, and keep it if it may be kept."""
        swapped = stored.__dict__.get(_SWAPPED_IN)
        if swapped is not None:
            return swapped
        self.pop(name, None)
        shown = _show(stored, kind)
        # A copy or a shard is shown for one access only.
        if type(shown) is Shown and _is_plain(stored) and shown.data_ptr() == stored.data_ptr():
            # Its nodes are older than what the engine does from here on.
            shown.__dict__.pop("_fsshard_written", None)
            self[name] = shown
        return shown


def show_stored(stored: Tensor, kind: Kind) -> Any:
    """Return the user's view of an engine's parameter, whatever its module holds at this moment."""
    # DTensors have no detach() in inference mode (torch 2.13).
    with torch.inference_mode(False):
        if kind.layout is not None:
            # Its module shows it as a DTensor over other mesh dimensions.
            return _marked(kind.to_user(stored), stored, replace(kind, layout=None))
        return _show(stored, kind)


def _show(stored: Tensor, kind: Kind) -> Any:
    """Return what shows ``stored``: the object that there is, if it is in use and still right."""
    # A view of a plain one can be kept. Not so of shards, and of tensors of a simulation or of torch.func.
    is_plain = _is_plain(stored)
    if not is_plain and not kind.is_complex and has_torch_function_unary(stored):
        # As the engine holds it: a guard watches who reads it.
        return stored
    if is_dtensor(stored) and functorch_transforms_active():
        # DTensor's own functions know nothing of torch.func (torch 2.13).
        return stored
    shown = _alive(stored)
    is_current = shown is not None and shown._fsshard_trains == stored.requires_grad
    if is_plain and is_current:
        # A guard may watch who reads a shard, and lets everybody ask for the pointer.
        is_there = getattr(shown, LOCAL_TENSOR, shown).data_ptr() == stored.data_ptr()
        if is_there or _follow(shown, stored):
            return shown
    transforms = _outside_of_transforms() if is_plain else contextlib.nullcontext()
    with torch.enable_grad(), transforms:
        value = kind.shown(stored)
    if value is stored:
        return stored
    value = _marked(value, stored, kind)
    if not is_plain and is_current and type(shown) is type(value) and shown.shape == value.shape:
        # Other tensors of simulations and of torch.func have no place in memory that could be compared.
        has_place = value.is_meta or hasattr(value, LOCAL_TENSOR)
        if not has_place or memory_of(shown) == memory_of(value):
            return shown
    _shown[stored] = weakref.ref(value)
    return value


@contextlib.contextmanager
def moving(parameters: Iterable[Tensor], others: Iterable[Tensor]) -> Iterator[None]:
    """Enter a context in which an engine moves ``parameters``: what shows them, and ``others``, follows."""
    shown = {}
    for each in (*map(_alive, parameters), *others):
        if type(each) is Shown:
            shown[id(each)] = each
    for each in shown.values():
        # It lets go of the memory that the engine leaves.
        DATA.__set__(each, each.new_empty(()).expand(each.shape))
    try:
        yield
    finally:
        for each in shown.values():
            if not _follow(each, each._fsshard_stored):
                # It cannot follow: a module makes a new view at the next access.
                each._fsshard_trains = None


def _is_plain(stored: Tensor) -> bool:
    """Return whether its view can be kept: not of a shard, which may not be read at any time, nor of a fake."""
    if type(stored) not in PLAIN or torch.is_inference_mode_enabled() or stored.is_inference():
        return False
    return not (functorch_transforms_active() and is_functorch_wrapped(stored))


def _alive(stored: Tensor) -> Any:
    reference = _shown.get(stored)
    if reference is None:
        return None
    return reference()


def _follow(shown: Any, stored: Tensor) -> bool:
    """Let a view that somebody holds show where an engine has moved ``stored`` to; return whether it can train."""
    if not stored.is_leaf:
        # One of FSDP1's views.
        return False
    value = shown._fsshard_kind.shown(stored.detach())
    if value.data_ptr() != stored.data_ptr() or value.shape != shown.shape:
        return False
    DATA.__set__(shown, value)
    if not stored.requires_grad and shown._fsshard_trains is not False:
        # Frozen since: autograd cannot make the view's node again, an internal assertion (torch 2.13).
        return False
    # When a parameter has been written in place, autograd makes a view of a view again from the offset that it had in
    # memory when it was made (torch 2.13): its gradient would go to other elements, or nowhere.
    try:
        node = GRAD_FN.__get__(shown)
    except RuntimeError:
        # The new memory is shorter than that offset.
        return False
    # A view of a leaf has two nodes; three are those of a view of a view.
    if node is None or not node.next_functions or not node.next_functions[0][0].next_functions:
        return True
    nn.Parameter.register_hook(shown, _refuse_gradient)
    return False


def _refuse_gradient(_: Tensor) -> NoReturn:
    raise StaleParameter(
        "a loss was computed with a parameter that was taken from its module before the optimizer was built, which has "
        "moved it; read it as an attribute of its module, in the forward"
    )


def _outside_of_transforms() -> contextlib.AbstractContextManager[Any]:
    """Return a context outside of torch.func's transforms: what is made inside them is gone when they end."""
    if functorch_transforms_active():
        return disable_functorch()
    return contextlib.nullcontext()


def _marked(value: Any, stored: Tensor, kind: Kind) -> Any:
    """Make the view ``value`` a parameter to the user, with the Python attributes of the stored one."""
    if hasattr(value, LOCAL_TENSOR):
        value.__class__ = _shown_dtensor()
    elif type(value) is Tensor and not (functorch_transforms_active() and is_functorch_wrapped(value)):
        value.__class__ = Shown
    is_parameter = type(value) is Shown or hasattr(value, LOCAL_TENSOR)
    if not is_parameter:
        value.__dict__.update(attributes_of(stored))
    # Those of simulations and of torch.func show that they are no leaves, so that no module takes them.
    setattr(value, IS_PARAMETER, is_parameter)
    value._fsshard_stored = stored
    value._fsshard_kind = kind
    value._fsshard_trains = stored.requires_grad
    return value


class UserParameters(MutableMapping[str, Any]):
    """``module._parameters`` by the user's names; by the name of a stored one it takes and gives that, for engines."""

    __slots__ = ("_module", "_stored", "_views")

    def __init__(self, module: nn.Module, views: Mapping[str, Kind]) -> None:
        self._module = module
        self._views = views
        self._stored: dict[str, Any] = module.__dict__["_parameters"]

    def __iter__(self) -> Iterator[str]:
        for key in list(self._stored):
            name = key.removesuffix(SUFFIX)
            yield name if name in self._views else key

    def __len__(self) -> int:
        return len(self._stored)

    # For state_dict(); Dynamo's switch in __getitem__ takes most of its time.
    def items(self) -> Any:
        if raw_state.on:
            return dict(zip(self, self._stored.values(), strict=True)).items()
        return super().items()

    def __contains__(self, name: object) -> bool:
        return name in self._stored or self._is_view(name)

    def _is_view(self, name: Any) -> bool:
        return name in self._views and name + SUFFIX in self._stored

    # Dynamo's own views of a tied parameter would not be one object.
    @disable_dynamo
    def __getitem__(self, name: str) -> Any:
        if not self._is_view(name):
            return self._stored[name]
        stored = self._stored[name + SUFFIX]
        if stored is None or raw_state.on or self._views[name].form is Form.RENAMED:
            return stored
        return getattr(self._module, name)

    def __setitem__(self, name: str, value: Any) -> None:
        if not self._is_view(name):
            self._stored[name] = value
        elif stored_of(value) is not value or (isinstance(value, Tensor) and record_of(value).is_shard):
            # What was there before, or the parameter of a shard.
            self._stored[name + SUFFIX] = stored_of(value)
        elif value is None or isinstance(value, nn.Parameter):
            setattr(self._module, name, value)
        else:
            # For a while only, as torch.func.functional_call does.
            kind = self._views[name]
            stored = value
            if kind.form is not Form.RENAMED:
                stored = kind.to_stored(value)
            if stored is not value:
                stored.__dict__[_SWAPPED_IN] = value
            self._stored[name + SUFFIX] = stored

    def __delitem__(self, name: str) -> None:
        if self._is_view(name):
            delattr(self._module, name)
        else:
            del self._stored[name]
