"""Norms and loss scaling of gradients that are spread over their owners: one answer of all ranks.

torch's own look at one rank's gradients. ``clip_grad_norm_`` would scale each rank's part by another factor, silently;
after :func:`count_owners` parameters of a ShardedDataParallel count there with the norms that their owners find, and
the sum has torch's bits. ``GradScaler`` would call ``step`` where one rank's gradients are finite, and another rank
would wait for its parameters; OSS decides itself, with :func:`agreed`.
"""

from __future__ import annotations

import functools
import warnings
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import OptState

from fsshard.errors import GradientError
from fsshard.oss.collectives import all_reduced
from fsshard.oss.reduction import Reduction, reduction_of
from fsshard.patches import CLIP_GRAD_NORM
from fsshard.torch_private.clip_grad import grouped_by_device_and_dtype
from fsshard.torch_private.optimizers import scale_of, states_of_scaler
from fsshard.torch_private.tensors import amp_unscale, foreach_norm


def owned_norms(
    parameters: Sequence[Tensor],
    places: Sequence[int],
    norm_type: float,
    group: dist.ProcessGroup,
    device: torch.device,
) -> dict[int, float]:
    """Return the norm of each gradient, in its own dtype, by place, from the rank that speaks for it. Collective.

    This one does for ``places``; a parameter that no rank speaks for is left out.
    """
    norms = _norms([parameters[place].grad for place in places], norm_type)
    return exchanged(dict(zip(places, norms, strict=True)), len(parameters), group, device)


def exchanged(own: Mapping[int, float], count: int, group: dist.ProcessGroup, device: torch.device) -> dict[int, float]:
    """Return the numbers of all ranks by place, each of which one rank has. Collective, over a tensor on ``device``."""
    places = list(own)
    buffer = torch.zeros(2, count, dtype=torch.float64)
    buffer[0, places] = torch.tensor(list(own.values()), dtype=torch.float64)
    buffer[1, places] = 1
    buffer = buffer.to(device)
    dist.all_reduce(buffer, group=group)
    values, is_there = buffer.tolist()
    return {place: values[place] for place in range(count) if is_there[place]}


def _norms(gradients: Sequence[Any], norm_type: float) -> list[float]:
    """Return the norm of each tensor alone, as ``torch.nn.utils.clip_grad_norm_`` computes it."""
    values = []
    for gradient in gradients:
        # torch's own has no kernel for sparse ones.
        if gradient.is_sparse:
            gradient = gradient.coalesce().values()
        values.append(gradient)
    norms = [0.0] * len(values)
    for places in grouped_by_device_and_dtype(values):
        of_group = foreach_norm([values[place] for place in places], norm_type)
        for place, norm in zip(places, torch.stack(list(of_group)).tolist(), strict=True):
            norms[place] = norm
    return norms


def combined(
    norms: Mapping[int, float] | Mapping[int, Tensor],
    parameters: Sequence[Tensor],
    norm_type: float,
) -> Tensor:
    """Return the norm of all gradients from that of each, by place; devices and dtypes decide how torch adds."""
    present = sorted(norms)
    if not present:
        return torch.tensor(0.0)
    owners = [parameters[place].detach() for place in present]
    device = owners[0].device
    # One list per device and dtype, one list after the other: torch's own grouping gives the order of the sum.
    order = []
    for indices in grouped_by_device_and_dtype(owners):
        order += [present[index] for index in indices]
    if isinstance(norms[order[0]], Tensor):
        # All are tensors then, and no device is waited for.
        tensors = [torch.as_tensor(norms[place]).to(device) for place in order]
        values = torch.stack(tensors)
    else:
        dtypes = [owner.dtype.to_real() for owner in owners]
        dtype = functools.reduce(torch.promote_types, dtypes)
        values = torch.tensor([norms[place] for place in order], dtype=torch.float64)
        values = values.to(device, dtype)
    total: Tensor = torch.linalg.vector_norm(values, norm_type)
    return total


@torch.no_grad()
def scale(
    parameters: Sequence[Tensor],
    max_norm: float,
    total: Tensor,
) -> None:
    """Clip what gradients there are, as ``torch.nn.utils.clip_grads_with_norm_`` does, sparse ones included."""
    dense = []
    sparse = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse:
            sparse.append(parameter.grad)
        else:
            dense.append(parameter)
    torch.nn.utils.clip_grads_with_norm_(dense, max_norm, total)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for gradient in sparse:
        gradient.mul_(factor.to(gradient.device))


def count_owners(wrapper: Any) -> None:
    """Let ``clip_grad_norm_`` be right for parameters of a ShardedDataParallel while ``wrapper`` lives; collective."""
    CLIP_GRAD_NORM.keep_for(wrapper, _norm)


@torch.no_grad()
def _norm(parameters: Sequence[Tensor], norm_type: float, torchs: Callable[..., Tensor]) -> Tensor | None:
    """Return the norm of these parameters' gradients over all ranks; None where none of them is reduced to owners."""
    reductions = _reductions_of(parameters)
    if not reductions:
        return None
    with_gradient = {id(parameter) for parameter in parameters if parameter.grad is not None}
    counted: list[Tensor] = []
    norms = {}
    for reduction in reductions:
        places = _places_spoken_for(reduction, with_gradient)
        first = len(counted)
        of_owners = owned_norms(reduction.parameters, places, norm_type, reduction.group, parameters[0].device)
        for place, norm in of_owners.items():
            norms[first + place] = norm
        counted += reduction.parameters
    others = with_gradient - set(map(id, counted))
    rest = [parameter for parameter in parameters if id(parameter) in others]
    norms_of_rest = _norms([parameter.grad for parameter in rest], norm_type)
    norms.update(enumerate(norms_of_rest, len(counted)))
    return combined(norms, [*counted, *rest], norm_type).to(parameters[0].device)


def _places_spoken_for(reduction: Reduction, with_gradient: Container[int]) -> list[int]:
    """Return the places of the gradients whose norms this rank tells the others."""
    rank = reduction.group.rank()
    places = []
    for place, parameter in enumerate(reduction.parameters):
        # What is owned everywhere is the same everywhere: the first rank speaks for it.
        owner = max(reduction.owners[place], 0)
        if owner == rank and id(parameter) in with_gradient:
            places.append(place)
    return places


def _reductions_of(parameters: Sequence[Tensor]) -> list[Reduction]:
    """Return the reductions that these parameters' gradients go through, each once, in order.

    Raises:
        GradientError: a parameter has an error's text instead, of an engine that has a norm of its own.
    """
    reductions: dict[Reduction, None] = {}
    for parameter in parameters:
        text = getattr(parameter, "_fsshard_clip_with", None)
        if text is not None:
            raise GradientError(
                f"torch.nn.utils.clip_grad_norm_ would compute the norm of this rank's part only; {text}"
            )
        reduction = reduction_of(parameter)
        if reduction is not None:
            reductions[reduction] = None
    return list(reductions)


# ------------------------------------------------------------------------------------------------ loss scaling

# Of torch 2.13, at every step that is given the scaler. The way that it recommends instead hands over a sum of what
# was found, from which the scaler's own, that update() goes by, cannot be set.
warnings.filterwarnings("ignore", "GradScaler is going to stop passing itself", FutureWarning)


def agreed(optimizer: Any, scaler: Any) -> bool:
    """Unscale the complete gradients of an OSS, unless that is done, and tell whether to step. Collective."""
    groups = [optimizer.group]
    if is_unscaled(optimizer, scaler):
        overflow = unscale_together(lambda _: None, optimizer, scaler, groups)
    else:
        overflow = unscale_together(scaler.unscale_, optimizer, scaler, groups)
    return not bool(overflow)


def is_unscaled(optimizer: Any, scaler: Any) -> bool:
    """Tell whether a scaler has unscaled an optimizer's gradients since its last ``update``."""
    state = states_of_scaler(scaler)[id(optimizer)]
    return state["stage"] is not OptState.READY


def unscale_together(
    work: Callable[[Any], None],
    optimizer: Any,
    scaler: Any,
    groups: Iterable[Any],
) -> Tensor:
    """Unscale by ``work``, and let ``update`` go by what any rank of these groups has found. Collective.

    Returns:
        More than zero where there was an infinity or a NaN.

    Raises:
        GradientError: ``work`` has raised on another rank; here what it has raised is raised again.
    """
    state = states_of_scaler(scaler)[id(optimizer)]
    scaled_by = scale_of(scaler)
    # One for all devices: ranks that own nothing, or own on other devices, take part in the same reduction.
    device = None if scaled_by is None else scaled_by.device
    overflow = torch.zeros((), device=device)
    failure: Exception | None = None
    try:
        work(optimizer)
        for each in state["found_inf_per_device"].values():
            of_device = each.to(overflow.device)
            overflow = torch.maximum(overflow, of_device)
    except Exception as error:
        failure = error
        # More than any overflow is: the other ranks raise, too.
        overflow = torch.full_like(overflow, 2.0)
    for group in groups:
        overflow = all_reduced(overflow, dist.ReduceOp.MAX, group)
    if failure is not None:
        raise failure
    if overflow > 1:
        raise GradientError("unscale_ has raised an error on another rank; see the error there")
    state["found_inf_per_device"] = {overflow.device: overflow}
    return overflow


@torch.no_grad()
def unscale(gradients: Iterable[Tensor], inv_scale: Tensor) -> dict[torch.device, Tensor]:
    """Multiply real gradients of any dtype, in place; tell by device whether one of them has an infinity or a NaN."""
    # torch's own refuses float16, which fully sharded models have, and knows no complex ones (2.13:
    # "_amp_foreach_non_finite_check_and_unscale_cpu" not implemented for 'ComplexFloat').
    by_kind = defaultdict(list)
    for gradient in gradients:
        kind = (gradient.device, gradient.dtype)
        by_kind[kind].append(gradient)
    overflows = {}
    for (device, _), same_kind in by_kind.items():
        if device not in overflows:
            overflows[device] = torch.zeros((), device=device)
        amp_unscale(same_kind, overflows[device], inv_scale.to(device))
    return overflows
