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
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.overrides import has_torch_function_unary
from torch.utils.weak import WeakIdKeyDictionary

from fsshard.complex_params.data_assignment import data, set_item
from fsshard.complex_params.pairs import SUFFIX, Form, Kind, is_odd
from fsshard.complex_params.replaced import MARKS, attributes_of
from fsshard.complex_params.views import KEPT, export_stored, is_dtensor
from fsshard.errors import ModelError, StaleParameter
from fsshard.torch_private.autograd import (
    disable_functorch,
    functorch_transforms_active,
    is_functorch_wrapped,
    run_first,
)
from fsshard.torch_private.compiling import disable_dynamo
from fsshard.torch_private.tensors import DATA, IS_PARAMETER, LOCAL_TENSOR, version_of

__all__ = [
    "Kept",
    "Shown",
    "Switch",
    "UserParameters",
    "even_gradient",
    "moving",
    "show_stored",
    "shows_stored",
    "stand_for",
    "stored_names",
    "stored_of",
]

_GRAD_FN: Any = torch.Tensor.grad_fn
_SHARD = "_fsshard_cut"
"""Attribute of a stored parameter that is a shard."""
_SWAPPED = "_fsshard_swapped"
"""Attribute of what is stored for a while: the user's tensor, which torch.func.functional_call put there."""

# stored -> what shows it: one object for all modules that share a parameter. Neither keeps the other alive.
_shown: MutableMapping[Tensor, weakref.ref[Tensor]] = WeakIdKeyDictionary()


class Switch(threading.local):
    """A flag of this thread, which is on within the context that calling it gives."""

    on = False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        before, self.on = self.on, True
        try:
            yield
        finally:
            self.on = before


stored_names = Switch()
"""For engines that walk through modules: ``named_parameters()`` gives the stored parameters within it."""


def shows_stored(members: Mapping[str, Any]) -> bool:
    """Return whether the module with these ``members`` is to give the stored parameters."""
    return stored_names.on or KEPT not in members


def stored_of(parameter: Any) -> Any:
    """Return the stored parameter behind ``parameter``, which is itself where the module stores it as it is."""
    return parameter.__dict__.get("_fsshard_stored", parameter) if isinstance(parameter, Tensor) else parameter


def stand_for(view: Any, stored: nn.Parameter) -> None:
    """Let :func:`stored_of` know what ``view`` shows."""
    view._fsshard_stored = stored


def even_gradient(stored: Tensor) -> Tensor | None:
    """Return the gradient of a stored complex parameter, moved once where it begins between two complex numbers.

    FSDP2 reduces a unit's gradients into one buffer (torch 2.13), where one behind an odd-sized parameter begins so; it
    moves, so that a complex view shares its memory.
    """
    gradient = stored.grad
    if gradient is None or not is_odd(getattr(gradient, LOCAL_TENSOR, gradient)):
        return gradient
    if hasattr(gradient, LOCAL_TENSOR):
        stored.grad = gradient = gradient.clone()
    else:
        gradient.data = gradient.data.clone()  # it stays the same tensor: reductions have made notes on it
    return gradient


class _AsParameter:
    """Makes a view a parameter to its user."""

    _fsshard_stored: Tensor
    _fsshard_kind: Kind
    _fsshard_see: Callable[[Tensor], Tensor]
    _fsshard_trains: bool | None  # whether the stored one did when the view was made, which its graph tells
    data = data
    is_leaf, grad_fn = True, None  # as of a bare one: tltorch registers it in modules that it makes in forwards

    @property
    def grad(self) -> Tensor | None:
        """The stored parameter's gradient, as the user sees it."""
        stored = self._fsshard_stored
        if not stored.is_leaf:
            return None
        gradient = even_gradient(stored) if self._fsshard_kind.is_complex else stored.grad
        return None if gradient is None else self._fsshard_see(gradient)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        stored = self._fsshard_stored
        if value is not None and (hasattr(value, LOCAL_TENSOR) or hasattr(stored, LOCAL_TENSOR)):
            raise ModelError(
                "p.grad = ... of a parameter that ranks share: its gradient is the engine's; change it in place, or "
                "drop it (p.grad = None)"
            )
        stored.grad = None if value is None else self._fsshard_kind.to_stored(value).reshape(stored.shape)

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
        kind, see = self._fsshard_kind, self._fsshard_see

        def on_stored(gradient: Tensor) -> Tensor | None:
            result = hook(see(gradient))
            return None if result is None else kind.to_stored(result).reshape(gradient.shape)

        return cast(Any, self._fsshard_stored).register_hook(on_stored)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        """Register a hook that is called with what the user knows as the parameter."""
        kind, see = self._fsshard_kind, self._fsshard_see

        def on_stored(stored: Tensor) -> None:
            hook(_view(stored, kind, see) if _is_plain(stored) else _at_rest(stored, kind, see))

        return self._fsshard_stored.register_post_accumulate_grad_hook(on_stored)

    def __hash__(self) -> int:
        return hash(self._fsshard_stored)

    def __eq__(self, other: Any) -> Any:
        """Return True for the stored parameter, and whatever else shows it; compare elements with all other tensors.

        So the two are one key of sets and dicts: ``optimizer.state[p]``, Lightning's map of parameters to names. An
        object finds itself there without being asked, and ``(p == p).all()`` is as of any tensor.
        """
        is_same = other is not self and stored_of(other) is self._fsshard_stored
        return True if is_same else Tensor.__eq__(cast(Tensor, self), other)

    def __getattr__(self, name: str) -> Any:
        """Return a Python attribute of the stored parameter, the user's or the engine's."""
        stored = self.__dict__.get("_fsshard_stored")
        if stored is None or name not in stored.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return stored.__dict__[name]

    def __setattr__(self, name: str, value: object) -> None:
        own = name.startswith(MARKS) or hasattr(type(self), name)
        Tensor.__setattr__(self if own else self.__dict__.get("_fsshard_stored", self), name, value)


class Shown(_AsParameter, nn.Parameter):  # type: ignore[misc]
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
    from torch.distributed.tensor import DTensor

    class ShownDTensor(_AsParameter, DTensor):  # type: ignore[misc]
        __setitem__ = set_item

        # The engine's parameter says whether it is a part, which may not be copied.
        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            return self._fsshard_stored.__deepcopy__(memo)

        def __reduce_ex__(self, protocol: Any) -> Any:
            return self._fsshard_stored.__reduce_ex__(protocol)

    return ShownDTensor


class _Known(NamedTuple):
    """A tensor that a module has shown in place of a stored one, and the state of that one at the time."""

    shown: Shown
    stored: Tensor
    kind: type
    version: int
    runs_first: bool


class Kept(dict[str, _Known]):
    """The tensors that a module has shown, by name; copies of the module show tensors of their own."""

    def __reduce__(self) -> Any:
        return Kept, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Kept:
        return Kept()

    def show(self, name: str, stored: Any, kind: Kind, see: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the tensor that shows ``stored``: the same at each access as long as that is the same.

        Args:
            name: the user's name of it.
            stored: what the module holds now, whatever state an engine has put it in.
            kind: how it is stored.
            see: makes the user's view of it.
        """
        known = self.get(name)
        if (  # at each access of a weight
            known is not None
            and known.stored is stored
            and known.kind is type(stored)
            and known.shown._fsshard_trains == stored.requires_grad
            and known.shown.data_ptr() == stored.data_ptr()
        ):
            version, shown = version_of(stored), known.shown
            if torch.is_inference_mode_enabled():
                return shown
            if known.version != version:  # an optimizer has stepped: the next use gives the view new nodes
                self[name] = _Known(shown, stored, known.kind, version, False)
            elif not known.runs_first:  # used again, with nodes that may be older than this forward
                _run_first(shown, stored)
                self[name] = _Known(shown, stored, known.kind, version, True)
            return shown
        if (swapped := stored.__dict__.get(_SWAPPED)) is not None:
            value: Tensor = swapped
            return value
        if _is_plain(stored):
            shown = _view(stored, kind, see)
            if type(shown) is Shown and shown.data_ptr() == stored.data_ptr():  # else a copy, for one access
                _run_first(shown, stored)
                self[name] = _Known(shown, stored, type(stored), version_of(stored), True)
            return shown
        self.pop(name, None)
        shard: Tensor = _at_rest(stored, kind, see)
        return shard


def show_stored(stored: Tensor, kind: Kind) -> Tensor:
    """Return what shows an engine's parameter outside of modules, which may hold another tensor for a while."""
    see = functools.partial(export_stored, kind=kind)
    with torch.inference_mode(False):  # DTensors have no detach() there (torch 2.13)
        if kind.layout is not None:  # its module shows it as a DTensor over other mesh dimensions
            return cast(Tensor, _marked(see(stored), stored, kind, see))
        return cast(Tensor, _view(stored, kind, see) if _is_plain(stored) else _at_rest(stored, kind, see))


@contextlib.contextmanager
def moving(parameters: Iterable[Tensor], others: Iterable[Tensor]) -> Iterator[None]:
    """Context in which an engine moves parameters: what shows them lets go of the old memory, then holds the new.

    Args:
        parameters: the engine's.
        others: of :func:`show_stored`; what modules have shown is known here.
    """
    known = {id(each): each for each in (*map(_alive, parameters), *others) if type(each) is Shown}
    for each in known.values():
        DATA.__set__(each, each.new_empty(()).expand(each.shape))
    try:
        yield
    finally:
        for each in known.values():
            if not _follow(each, each._fsshard_stored, each._fsshard_see):
                each._fsshard_trains = None  # modules show another one from now on


def _is_plain(stored: Tensor) -> bool:
    """Return whether its view can be kept: not of a shard, which may not be read at any time, nor of a fake."""
    if type(stored) is not Tensor and type(stored) is not nn.Parameter:
        return False
    if torch.is_inference_mode_enabled() or stored.is_inference():
        return False
    return not (functorch_transforms_active() and is_functorch_wrapped(stored))


def _alive(stored: Tensor) -> Tensor | None:
    reference = _shown.get(stored)
    return None if reference is None else reference()


def _view(stored: Tensor, kind: Kind, see: Callable[[Tensor], Tensor]) -> Any:
    """Return the view of a whole ``stored``; the one that there is, if it is in use."""
    shown: Any = _alive(stored)
    is_there = shown is not None and shown._fsshard_trains == stored.requires_grad
    if is_there and (_pointer(shown) == stored.data_ptr() or _follow(shown, stored, see)):
        return shown
    with torch.enable_grad(), _outside_of_transforms():
        shown = see(stored)
    if shown is not stored:
        _shown[stored] = weakref.ref(_marked(shown, stored, kind, see))
    return shown


def _follow(shown: Any, stored: Tensor, see: Callable[[Tensor], Tensor]) -> bool:
    """Let a view that somebody holds show where an engine has moved ``stored`` to; return whether it still can train.

    When a parameter has been written in place, autograd makes a view of a view again from the offset that it had in
    memory when it was made (torch 2.13): its gradient would go to other elements, or nowhere.
    """
    if not stored.is_leaf:  # FSDP1's views
        return False
    value = see(stored.detach())
    if value.data_ptr() != stored.data_ptr() or value.shape != shown.shape:
        return False
    DATA.__set__(shown, value)
    node = _GRAD_FN.__get__(shown)
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
    return disable_functorch() if functorch_transforms_active() else contextlib.nullcontext()


def _at_rest(stored: Tensor, kind: Kind, see: Callable[[Tensor], Tensor]) -> Any:
    """Return what shows the user a shard, or a tensor of a simulation or a transform of torch.func."""
    if not kind.is_complex and has_torch_function_unary(stored):
        return stored  # as the engine holds it: a guard watches who reads it
    if is_dtensor(stored):
        if functorch_transforms_active():
            return stored  # DTensor's own functions know nothing of torch.func (torch 2.13)
        # From the local shard: DTensor's own operators communicate where dim 0 is 1 or goes away (torch 2.13).
        whole = kind.form is Form.COMPLEX and len(kind.order) <= stored.dim() - 1
        see = functools.partial(export_stored, kind=kind if whole or not kind.is_complex else Kind.COMPLEX)
    with torch.enable_grad():
        value = see(stored)
    if value is stored:
        return stored
    value, other = _marked(value, stored, kind, see), cast(Any, _alive(stored))
    alike = type(other) is type(value) and other.shape == value.shape
    same = alike and other._fsshard_trains == stored.requires_grad
    has_memory = value.is_meta or hasattr(value, LOCAL_TENSOR)  # those of simulations and of torch.func have none
    if same and (not has_memory or _pointer(other) == _pointer(value)):
        return other
    _shown[stored] = weakref.ref(value)
    return value


def _pointer(tensor: Tensor) -> int:
    local: Tensor = getattr(tensor, LOCAL_TENSOR, tensor)
    return local.data_ptr()


def _marked(value: Any, stored: Tensor, kind: Kind, see: Callable[[Tensor], Tensor]) -> Any:
    """Make the view ``value`` a parameter to the user, with the Python attributes of the stored one."""
    if hasattr(value, LOCAL_TENSOR):
        value.__class__ = _shown_dtensor()
    elif type(value) is Tensor and not (functorch_transforms_active() and is_functorch_wrapped(value)):
        value.__class__ = Shown
    value._fsshard_trains = stored.requires_grad
    if type(value) is not Shown and not hasattr(value, LOCAL_TENSOR):
        value.__dict__.update(attributes_of(stored))
    # Those of simulations and of torch.func show that they are no leaves, so that no module takes them.
    setattr(value, IS_PARAMETER, type(value) is Shown or hasattr(value, LOCAL_TENSOR))
    value._fsshard_stored, value._fsshard_kind, value._fsshard_see = stored, kind, see
    return value


def _run_first(shown: Tensor, stored: Tensor) -> None:
    """Let gradients go on from the view to the stored parameter as soon as they are there, as they reach a bare one.

    The engine of autograd runs the youngest node first. A view of an earlier forward is older than the hooks by which
    FSDP2 learns that a unit's backward has ended, which would find the gradient missing; and all reductions would wait
    for the end of the backward. Writing to the parameter in place, as optimizers do, lets the next use of the view make
    its nodes anew (torch 2.13), which are young enough then.
    """
    if not stored.is_leaf:  # FSDP1's views, which are new at every forward
        return
    with _outside_of_transforms():
        node = _GRAD_FN.__get__(shown)
    while node is not None and (inputs := node.next_functions):
        run_first(node)
        node = inputs[0][0]


class UserParameters(MutableMapping[str, Any]):
    """``module._parameters`` by the user's names; by the name of a stored one it takes and gives that.

    Engines write what they gather by the stored name, at every forward. Those that look for names use
    :func:`stored_names`.
    """

    __slots__ = ("_module", "_stored", "_views")

    def __init__(self, module: nn.Module, views: Mapping[str, Kind]) -> None:
        self._module, self._views = module, views
        self._stored: dict[str, Any] = module.__dict__["_parameters"]

    def __iter__(self) -> Iterator[str]:
        for key in list(self._stored):
            name = key.removesuffix(SUFFIX)
            yield name if name in self._views else key

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, name: object) -> bool:
        return name in self._stored or self._is_view(name)

    def _is_view(self, name: Any) -> bool:
        return name in self._views and name + SUFFIX in self._stored

    @disable_dynamo  # Dynamo's own views of a tied parameter would not be one object
    def __getitem__(self, name: str) -> Any:
        if not self._is_view(name):
            return self._stored[name]
        stored = self._stored[name + SUFFIX]
        if stored is None or self._views[name].form is Form.RENAMED:
            return stored
        return getattr(self._module, name)

    def __setitem__(self, name: str, value: Any) -> None:
        if not self._is_view(name):
            self._stored[name] = value
        elif stored_of(value) is not value or _SHARD in getattr(value, "__dict__", ()):
            self._stored[name + SUFFIX] = stored_of(value)  # what was there before
        elif value is None or isinstance(value, nn.Parameter):
            setattr(self._module, name, value)
        else:  # for a while: torch.func.functional_call
            kind = self._views[name]
            self._stored[name + SUFFIX] = stored = value if kind.form is Form.RENAMED else kind.to_stored(value)
            if stored is not value:
                stored.__dict__[_SWAPPED] = value

    def __delitem__(self, name: str) -> None:
        if self._is_view(name):
            delattr(self._module, name)
        else:
            del self._stored[name]

    def copy(self) -> dict[str, Any]:
        """Copy into a plain dict."""
        return dict(self)

    def __repr__(self) -> str:
        return repr(dict(self))
