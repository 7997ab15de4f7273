"""Parameters that are DTensors over other mesh dimensions than data: kept as this rank's part, shown as DTensors.

No engine takes them as they are: DDP, FSDP1 and FairScale stop at "aten.cat got mixed torch.Tensor and DTensor", and
what FSDP2 makes of them has other state dicts and norms (torch 2.13). To an engine a rank's part is a parameter like
any other; the module goes on seeing the DTensor over it, so that tensor-parallel code runs as written, and DTensor's
own backward sums what ranks that share a parameter have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn

from fsshard.complex_params.flattened import flattened_class, mixin_for, views_of
from fsshard.complex_params.layouts import DTensorLayout
from fsshard.complex_params.pairs import SUFFIX, Kind, kind_for
from fsshard.complex_params.replaced import adopt, check_no_gradient_hooks
from fsshard.complex_params.views import is_dtensor
from fsshard.errors import ModelError

__all__ = ["check_dtensors", "dtensor_parameters", "has_dtensors", "keep_local_parts"]


def has_dtensors(model: nn.Module) -> bool:
    """Return whether any parameter or buffer is a DTensor."""
    held = ((*module._parameters.values(), *module._buffers.values()) for module in model.modules())
    return any(is_dtensor(tensor) for tensors in held for tensor in tensors)


def dtensor_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any]]:
    """Name, owner, attribute and value of every place that holds a DTensor parameter."""
    for prefix, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None and is_dtensor(parameter):
                yield (f"{prefix}.{attribute}" if prefix else attribute), module, attribute, parameter


def check_dtensors(model: nn.Module) -> None:
    """Raise for DTensor parameters that cannot be kept as local parts. Local.

    Raises:
        ModelError: a placement that is neither Shard nor Replicate, a subclass of DTensor, the meta device, hooks; or a
            buffer that is one.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    for name, _, _, parameter in dtensor_parameters(model):
        if type(parameter) is not DTensor:
            raise ModelError(
                f"parameter {name!r} is a {type(parameter).__name__}: only torch's own DTensor is taken; leave "
                "the parameter plain, and name the mesh dimension that shares it in replicated="
            )
        strange = [placed for placed in parameter.placements if type(placed) not in (Shard, Replicate)]
        if strange:
            raise ModelError(
                f"parameter {name!r} is a DTensor with placement {strange[0]!r}: Shard and Replicate are taken; "
                "redistribute it before wrap"
            )
        if parameter.is_meta:
            raise ModelError(
                f"parameter {name!r} is a DTensor on the meta device: give it values before wrap "
                "(model.to_empty(device=...) and reset_parameters), or parallelise the real model"
            )
        check_no_gradient_hooks(name, cast(nn.Parameter, parameter))
    for name, buffer in model.named_buffers():
        if is_dtensor(buffer):
            raise ModelError(
                f"buffer {name!r} is a DTensor, and ranks exchange plain buffers; leave it plain (distribute_module's "
                "partition_fn chooses what becomes a DTensor), and replace BatchNorm by GroupNorm or LayerNorm"
            )


def keep_local_parts(model: nn.Module) -> Callable[[], None]:
    """Replace DTensor parameters by this rank's parts, over the same memory, which modules show as DTensors.

    Args:
        model: what :func:`check_dtensors` accepts.

    Returns:
        What undoes it.
    """
    undo: list[Callable[[], object]] = []
    memo: dict[int, tuple[nn.Parameter, Kind]] = {}
    owners = dict.fromkeys(owner for _, owner, _, _ in dtensor_parameters(model))
    names = {id(value): name for name, _, _, value in reversed(list(dtensor_parameters(model)))}
    for module in owners:
        undo.append(_restorer(module))
        kept: dict[str, nn.Parameter | None] = {}
        views = dict(views_of(module))
        for attribute, parameter in module._parameters.items():
            if parameter is None or not is_dtensor(parameter):
                kept[attribute] = parameter
                continue
            if id(parameter) not in memo:
                stored, kind, forget = _local_part(parameter, names[id(parameter)])
                memo[id(parameter)] = stored, kind
                undo.append(forget)
            kept[attribute + SUFFIX], views[attribute] = memo[id(parameter)]
        origin = getattr(type(module), "_fsshard_origin", type(module)) if views_of(module) else type(module)
        module._parameters.clear()
        module._parameters.update(kept)
        module.__class__ = flattened_class(origin, tuple(views.items()), mixin_for(origin))

    def restore() -> None:
        for each in reversed(undo):
            each()

    return restore


def _local_part(parameter: Any, name: str) -> tuple[nn.Parameter, Kind, Callable[[], object]]:
    local: Tensor = parameter.detach().to_local()
    mesh = parameter.device_mesh
    groups = tuple(mesh.get_group(dim).group_name for dim in range(mesh.ndim))
    layout = DTensorLayout(mesh, tuple(parameter.placements), parameter.shape, parameter.stride(), groups)
    kind = replace(kind_for(cast(nn.Parameter, local), scalars=True, in_order=True), layout=layout)
    gradient = (
        None
        if parameter.grad is None
        else kind.to_stored(parameter.grad.redistribute(placements=parameter.placements).to_local())
    )
    stored = nn.Parameter(kind.to_stored(local), requires_grad=parameter.requires_grad)
    stored.grad = gradient
    return stored, kind, adopt(stored, parameter, name)


def _restorer(module: nn.Module) -> Callable[[], None]:
    cls, parameters = module.__class__, dict(module._parameters)

    def restore() -> None:
        module.__class__ = cls
        module._parameters.clear()
        module._parameters.update(parameters)

    return restore
