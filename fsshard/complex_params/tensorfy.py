"""tensorfy() and untensorfy(): store complex parameters as real ones that modules show as complex, and undo it.

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
* *A reference captured before* (a closure, a list, an optimizer) would lose its gradient silently; it shares the
  memory, and a hook on it raises :class:`~fsshard.errors.StaleParameter`.

Real 0-dim parameters can be handled the same way (``scalars=True``), stored with shape ``(1,)``: FSDP1 and FSDP2 refuse
scalars (torch 2.13: "fully_shard doesn't support scalar parameters"). So can real parameters that are not contiguous
(``in_order=True``): a transposed matrix, a convolution in ``torch.channels_last``. Like complex ones they are stored in
the order of their memory, contiguous to every engine, and seen through ``permute`` with the very strides that they had,
by which kernels choose how to multiply.

An engine that cuts along dim 0 may ask for a list of numbers instead (:func:`store_as_pairs`): the stored parameter has
shape ``(numbers, 2)`` then, so that it can be cut between any two of them, and the module goes on seeing ``S``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar, cast

import torch
from torch import nn

from fsshard.complex_params.factorised import adopt_factorised, factorised_classes
from fsshard.complex_params.flattened import Flattened, flatten_module, stored_in
from fsshard.complex_params.pairs import SUFFIX, Kind, kind_for
from fsshard.complex_params.replaced import check_no_gradient_hooks, restored
from fsshard.complex_params.slots import ParameterSlot, parameter_slots
from fsshard.complex_params.views import KEPT, is_dtensor
from fsshard.errors import ModelError

__all__ = ["check_tensorfiable", "flatten_model", "store_as_pairs", "tensorfy", "untensorfy"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def tensorfy(model: ModuleT, *, scalars: bool = False, in_order: bool = False) -> ModuleT:
    """Store each complex parameter of ``model`` as a real one, in place and over the same memory.

    A parameter that is not contiguous is stored in memory order, and seen with its own strides. Nothing is copied,
    except to close gaps between elements.

    Args:
        model: any module; complex64 parameters become float32 storage of shape ``(*shape, 2)``, complex128 float64.
            Already tensorfied modules are left alone, so calling it twice does no harm.
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
    check_tensorfiable(parameter_slots(model), scalars=scalars, in_order=in_order)
    flatten_model(model, scalars=scalars, in_order=in_order)
    return model


def flatten_model(model: nn.Module, *, scalars: bool = False, in_order: bool = False) -> None:
    """Do what :func:`tensorfy` does, for a caller that has run :func:`check_tensorfiable` already."""
    memo: dict[int, nn.Parameter] = {}
    known = factorised_classes()
    for name, module in list(model.named_modules()):
        if known is not None:
            adopt_factorised(module, *known)
        if not (isinstance(module, Flattened) and module._fsshard_holds_reals):
            flatten_module(module, name, memo, scalars=scalars, in_order=in_order)


def check_tensorfiable(slots: Iterable[ParameterSlot], *, scalars: bool = False, in_order: bool = False) -> None:
    """Raise what :func:`tensorfy` would raise for a model with these parameters, before anything is changed."""
    for slot in slots:
        if nn.parameter.is_lazy(slot.parameter):
            raise ModelError(f"parameter {slot.name!r} is lazy; run one forward before sharding so that it has a shape")
        if slot.kind == Kind.PLAIN and kind_for(slot.parameter, scalars, in_order) != Kind.PLAIN:
            if isinstance(slot.owner, torch.jit.ScriptModule):
                raise ModelError(
                    f"parameter {slot.name!r} is inside of a torch.jit module, whose parameters cannot be replaced"
                )
            check_no_gradient_hooks(slot.name, slot.parameter)
            if slot.attribute + SUFFIX in {**vars(slot.owner), **stored_in(slot.owner), **slot.owner._buffers}:
                raise ModelError(
                    f"parameter {slot.name!r} is stored under the name {slot.attribute + SUFFIX!r}, which "
                    f"{type(slot.owner).__name__} has given to something else; rename one of the two"
                )


def store_as_pairs(slots: Sequence[ParameterSlot]) -> nn.Parameter:
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
        stored_in(slot.owner)[slot.stored] = new
        slot.owner.__dict__.setdefault("_fsshard_flat", {})[slot.attribute] = old.shape[:-1]  # as stored
    return new


def untensorfy(model: ModuleT) -> ModuleT:
    """Undo :func:`tensorfy` in place: native complex parameters again, over the same memory, ties kept.

    The original Parameter objects come back if they are still referenced, so an optimizer built before :func:`tensorfy`
    works again.
    """
    modules = [module for module in model.modules() if isinstance(module, Flattened)]
    if any(p is not None and is_dtensor(p) for module in modules for p in stored_in(module).values()):
        raise ModelError("the model is sharded by an engine; untensorfy works on whole models only")
    memo: dict[int, nn.Parameter] = {}
    for module in modules:
        _restore_module(module, memo)
    return model


def _restore_module(module: Flattened, memo: dict[int, nn.Parameter]) -> None:
    views = type(module)._fsshard_views
    kept: dict[str, nn.Parameter | None] = {}
    held = stored_in(module)
    for stored, parameter in held.items():
        name = stored[: -len(SUFFIX)] if stored.endswith(SUFFIX) else ""
        if name not in views or parameter is None:
            kept[name if name in views else stored] = parameter
        elif views[name] == Kind.RENAMED:
            kept[name] = parameter
        else:
            if id(parameter) not in memo:
                memo[id(parameter)] = restored(parameter, views[name])
            kept[name] = memo[id(parameter)]
    held.clear()
    held.update(kept)
    module.__dict__.pop(KEPT, None)
    cast(nn.Module, module).__class__ = type(module)._fsshard_origin
