"""tensorfy() and untensorfy(): store complex parameters as real ones that modules show as complex, and undo it.

Sharding engines flatten, cut and pack *real* parameters of one dtype. :func:`tensorfy` therefore moves each
complex parameter ``w`` of shape ``S`` to a real parameter ``w__real`` of shape ``(*S, 2)`` over the same memory,
and gives the module a property ``w`` that returns ``torch.view_as_complex(self.w__real)``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import nn

from fsshard.complex_params.flattened import (
    LISTED,
    Flattened,
    adopt_factorised,
    factorised_classes,
    flatten_module,
    store_otherwise,
    stored_in,
)
from fsshard.complex_params.layouts import DTensorLayout
from fsshard.complex_params.pairs import SUFFIX, Form, Kind, is_dtensor, kind_for
from fsshard.complex_params.replaced import adopt, check_no_gradient_hooks, forget_replacement, restored
from fsshard.complex_params.shown import KEPT
from fsshard.complex_params.slots import ModuleTable, ParameterSlot, refuse_lazy
from fsshard.errors import ModelError

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
    table = ModuleTable(model)
    slots = list(table.slots())
    refuse_lazy(slots)
    check_tensorfiable(slots, scalars=scalars, in_order=in_order)
    flatten_modules(table.modules, scalars=scalars, in_order=in_order)
    return model


def flatten_modules(modules: Mapping[str, nn.Module], *, scalars: bool = False, in_order: bool = False) -> None:
    """Do what :func:`tensorfy` does to a model's modules, for a caller that has run :func:`check_tensorfiable`."""
    memo: dict[int, nn.Parameter] = {}
    classes = factorised_classes()
    for name, module in modules.items():
        if classes is not None:
            adopt_factorised(module, *classes)
        if not isinstance(module, Flattened) or not module._fsshard_holds_reals:
            flatten_module(module, name, memo, scalars=scalars, in_order=in_order)


def check_tensorfiable(slots: Iterable[ParameterSlot], *, scalars: bool = False, in_order: bool = False) -> None:
    """Raise what :func:`tensorfy` would raise for a model with these parameters, before anything is changed."""
    for slot in slots:
        parameter = slot.parameter
        if not slot.kind.is_plain or kind_for(parameter, scalars, in_order).is_plain:
            continue
        if isinstance(slot.owner, torch.jit.ScriptModule):
            raise ModelError(
                f"parameter {slot.name!r} is inside of a torch.jit module, whose parameters cannot be replaced"
            )
        stored = slot.attribute + SUFFIX
        if hasattr(slot.owner, stored):
            raise ModelError(
                f"parameter {slot.name!r} is complex or of another form than engines take, and would be stored "
                f"as {stored!r}, which its module has already; rename the module's own {stored!r}"
            )
        check_no_gradient_hooks(slot.name, parameter)


def store_as_pairs(slots: Sequence[ParameterSlot]) -> nn.Parameter:
    """Store a complex parameter as a list of its numbers, of shape ``(numbers, 2)``, over the same memory, for good.

    For engines, which cut along dim 0. ``slots`` are all places that hold it, tensorfied and contiguous.
    """
    old = slots[0].parameter
    new = nn.Parameter(old.detach().view(-1, 2), requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)
    for slot in slots:
        stored_in(slot.owner)[slot.stored] = new
        kind = replace(slot.kind, form=Form.COMPLEX, listed=old.shape[:-1])
        slot.owner.__dict__.setdefault(LISTED, {})[slot.attribute] = kind
    return new


def untensorfy(model: ModuleT) -> ModuleT:
    """Undo :func:`tensorfy` in place: native complex parameters again, over the same memory, ties kept.

    The original Parameter objects come back if they are still referenced, so an optimizer built before :func:`tensorfy`
    works again.
    """
    modules = [module for module in model.modules() if isinstance(module, Flattened)]
    for module in modules:
        if any(map(is_dtensor, stored_in(module).values())):
            raise ModelError("the model is sharded by an engine; untensorfy works on whole models only")
    memo = {}
    for module in modules:
        views = type(module)._fsshard_views
        parameters = stored_in(module)
        natives = {}
        for stored, parameter in parameters.items():
            name = stored.removesuffix(SUFFIX)
            kind = views.get(name, Kind.PLAIN) if name != stored else Kind.PLAIN
            if kind.is_plain:
                name = stored
            elif parameter is not None and kind != Kind.RENAMED:
                if id(parameter) not in memo:
                    memo[id(parameter)] = restored(parameter, kind)
                parameter = memo[id(parameter)]
            natives[name] = parameter
        parameters.clear()
        parameters.update(natives)
        module.__dict__.pop(KEPT, None)
        cast(nn.Module, module).__class__ = type(module)._fsshard_origin
    return model


# ------------------------------------------------------------------------------------------------ DTensors


def has_dtensors(modules: Iterable[nn.Module]) -> bool:
    """Return whether any parameter or buffer of these modules is a DTensor."""
    tensors: list[object] = []
    for module in modules:
        tensors += module._parameters.values()
        tensors += module._buffers.values()
    return any(map(is_dtensor, tensors))


def dtensor_parameters(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module, str, Any]]:
    """Yield name, owner, attribute and value of every place in these modules that holds a DTensor parameter."""
    for name, module in modules.items():
        prefix = f"{name}." if name else ""
        for attribute, parameter in module._parameters.items():
            if is_dtensor(parameter):
                yield prefix + attribute, module, attribute, parameter


def check_dtensors(table: ModuleTable) -> None:
    """Raise for DTensor parameters that cannot be kept as local parts, and for buffers that are DTensors. Local."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    for name, _, _, parameter in dtensor_parameters(table.modules):
        strange = [placed for placed in parameter.placements if type(placed) not in (Shard, Replicate)]
        if type(parameter) is not DTensor or strange or parameter.is_meta:
            raise ModelError(
                f"parameter {name!r} is a {type(parameter).__name__} with placements {parameter.placements} on device "
                f"{parameter.device}: expected torch's own DTensor with Shard and Replicate, and with values; "
                "redistribute it or give it values before wrap, or leave the parameter plain, and name the mesh "
                "dimension that shares it in replicated="
            )
        check_no_gradient_hooks(name, cast(nn.Parameter, parameter))
    for name, buffer in table.buffers().items():
        if is_dtensor(buffer):
            raise ModelError(
                f"buffer {name!r} is a DTensor, and ranks exchange plain buffers; leave it plain (distribute_module's "
                "partition_fn chooses what becomes a DTensor), and replace BatchNorm by GroupNorm or LayerNorm"
            )


@contextlib.contextmanager
def keep_local_parts(modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Replace DTensor parameters by this rank's parts, which modules show as DTensors, unless the context raises."""
    # No engine takes them as they are: DDP, FSDP1 and FairScale stop at "aten.cat got mixed torch.Tensor and DTensor",
    # and FSDP2's have other state dicts and norms (torch 2.13). To an engine a rank's part is a parameter like any
    # other; tensor-parallel code sees the DTensor over it, whose own backward sums what ranks share.
    places = list(dtensor_parameters(modules))
    before = {}
    parts = {}
    for name, owner, _, parameter in places:
        before[owner] = (owner.__class__, dict(owner._parameters))
        if id(parameter) not in parts:
            part, kind = _local_part(parameter)
            parts[id(parameter)] = (part, kind)
            adopt(part, parameter, name)
    for owner in before:
        store_otherwise(owner, lambda _, parameter: parts.get(id(parameter)))

    try:
        yield
    except BaseException:
        for *_, parameter in places:
            forget_replacement(parameter)
        for owner, (cls, parameters) in before.items():
            owner.__class__ = cls
            owner._parameters.clear()
            owner._parameters.update(parameters)
        raise


def _local_part(parameter: Any) -> tuple[nn.Parameter, Kind]:
    """Return this rank's part as it is stored, with its gradient, and how it relates to the DTensor."""
    local = parameter.detach().to_local()
    mesh = parameter.device_mesh
    gradient = parameter.grad
    groups = tuple(mesh.get_group(dim).group_name for dim in range(mesh.ndim))
    layout = DTensorLayout(mesh, tuple(parameter.placements), parameter.shape, parameter.stride(), groups)
    kind = replace(kind_for(cast(nn.Parameter, local), scalars=True, in_order=True), layout=layout)
    stored = nn.Parameter(kind.to_stored(local), requires_grad=parameter.requires_grad)
    if gradient is not None:
        stored.grad = kind.to_stored(gradient.redistribute(placements=parameter.placements).to_local())
    return stored, kind
