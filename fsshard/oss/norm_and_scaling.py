"""Norms and loss scaling of gradients that are spread over their owners: one answer of all ranks.

torch's own look at one rank's gradients. ``clip_grad_norm_`` would scale each rank's part by another factor, silently;
after :func:`count_owners` parameters of a ShardedDataParallel count there with the norms that their owners find, and
the sum has torch's bits. ``GradScaler`` would call ``step`` where one rank's gradients are finite, and another rank
would wait for its parameters; OSS decides itself, with :func:`agreed`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import OptState

from fsshard.errors import GradientError
from fsshard.oss.collectives import all_reduced
from fsshard.oss.reduction import reduction_of
from fsshard.patches import CLIP_GRAD_NORM
from fsshard.torch_private.clip_grad import grouped_by_device_and_dtype
from fsshard.torch_private.optimizers import scale_of, states_of_scaler
from fsshard.torch_private.tensors import amp_unscale, foreach_norm


def owned_norms(
    parameters: Sequence[Tensor], mine: Sequence[int], norm_type: float, group: dist.ProcessGroup, device: torch.device
) -> dict[int, float]:
    """Return the norm of each gradient, in its own dtype, by place, from the rank that speaks for it. Collective.

    This one does for the places in ``mine``; a parameter that no rank speaks for is left out.
    """
    own = _norms([parameters[i].grad for i in mine], norm_type)
    return exchanged(dict(zip(mine, own, strict=True)), len(parameters), group, device)


def exchanged(own: Mapping[int, float], count: int, group: dist.ProcessGroup, device: torch.device) -> dict[int, float]:
    """Return the numbers of all ranks by place, each of which one rank has. Collective, over a tensor on ``device``."""
    buffer = torch.zeros(2, count, dtype=torch.float64)
    buffer[0, list(own)] = torch.tensor(list(own.values()), dtype=torch.float64)
    buffer[1, list(own)] = 1
    buffer = buffer.to(device)
    dist.all_reduce(buffer, group=group)
    values, seen = buffer.tolist()
    return {place: value for place, (value, there) in enumerate(zip(values, seen, strict=True)) if there}


def _norms(gradients: Sequence[Any], norm_type: float) -> list[float]:
    """Return the norm of each tensor alone, as ``torch.nn.utils.clip_grad_norm_`` computes it."""
    found = [0.0] * len(gradients)
    # torch's own has no kernel for sparse ones
    values = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    for places in grouped_by_device_and_dtype(values):
        norms = torch.stack(list(foreach_norm([values[place] for place in places], norm_type))).tolist()
        for place, norm in zip(places, norms, strict=True):
            found[place] = norm
    return found


def combined(
    norms: Mapping[int, float] | Mapping[int, Tensor], parameters: Sequence[Tensor], norm_type: float
) -> Tensor:
    """Return the norm of all gradients from that of each, by place; devices and dtypes decide how torch adds."""
    present = sorted(norms)
    if not present:
        return torch.tensor(0.0)
    owners = [parameters[index].detach() for index in present]
    # One list per device and dtype, one list after the other: torch's own grouping gives the order of the sum.
    order = [present[place] for places in grouped_by_device_and_dtype(owners) for place in places]
    if isinstance(norms[order[0]], Tensor):  # all are, and no device is waited for
        values = torch.stack([torch.as_tensor(norms[index]).to(owners[0].device) for index in order])
    else:
        dtype = functools.reduce(torch.promote_types, [parameter.dtype.to_real() for parameter in owners])
        values = torch.tensor([norms[index] for index in order], dtype=torch.float64).to(owners[0].device, dtype)
    total: Tensor = torch.linalg.vector_norm(values, norm_type)
    return total


@torch.no_grad()
def scale(parameters: Sequence[Tensor], max_norm: float, total: Tensor) -> None:
    """Clip what gradients there are, as ``torch.nn.utils.clip_grads_with_norm_`` does, sparse ones included."""
    dense = [p for p in parameters if p.grad is not None and not p.grad.is_sparse]
    torch.nn.utils.clip_grads_with_norm_(dense, max_norm, total)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad.mul_(factor.to(parameter.device))


def count_owners(wrapper: Any) -> None:
    """Let ``clip_grad_norm_`` be right for parameters of a ShardedDataParallel while ``wrapper`` lives; collective."""
    CLIP_GRAD_NORM.keep_for(wrapper, _norm)


@torch.no_grad()
def _norm(parameters: Sequence[Tensor], norm_type: float, torchs: Callable[..., Tensor]) -> Tensor | None:
    told = next((text for p in parameters if (text := getattr(p, "_fsshard_clip_with", None))), None)
    if told is not None:
        raise GradientError(f"torch.nn.utils.clip_grad_norm_ would compute the norm of this rank's part only; {told}")
    reductions = list(dict.fromkeys(r for p in parameters if (r := reduction_of(p)) is not None))
    if not reductions:
        return None
    given = {id(parameter) for parameter in parameters if parameter.grad is not None}
    counted, norms = list[Tensor](), dict[int, float]()
    for reduction in reductions:
        # What is owned everywhere is the same everywhere: the first rank speaks for it.
        speaks = [reduction.group.rank() == max(owner, 0) for owner in reduction.owners]
        mine = [i for i, p in enumerate(reduction.parameters) if id(p) in given and speaks[i]]
        found = owned_norms(reduction.parameters, mine, norm_type, reduction.group, parameters[0].device)
        norms.update({len(counted) + i: value for i, value in found.items()})
        counted += reduction.parameters
    known = {id(parameter) for parameter in counted}
    rest = [p for p in parameters if id(p) in given and id(p) not in known]  # of other modules
    norms.update(enumerate(_norms([p.grad for p in rest], norm_type), len(counted)))
    return combined(norms, [*counted, *rest], norm_type).to(parameters[0].device)


# ------------------------------------------------------------------------------------------------ loss scaling

# Of torch 2.13, at every step that is given the scaler. The way that it recommends instead hands over a sum of what
# was found, from which the scaler's own, that update() goes by, cannot be set.
warnings.filterwarnings("ignore", "GradScaler is going to stop passing itself", FutureWarning)


def agreed(optimizer: Any, scaler: Any) -> bool:
    """Unscale the complete gradients of an OSS, unless that is done, and tell whether to step. Collective."""
    work = (lambda _: None) if is_unscaled(optimizer, scaler) else scaler.unscale_
    return not bool(unscale_together(work, optimizer, scaler, [optimizer.group]))


def is_unscaled(optimizer: Any, scaler: Any) -> bool:
    """Tell whether a scaler has unscaled an optimizer's gradients since its last ``update``."""
    return states_of_scaler(scaler)[id(optimizer)]["stage"] is not OptState.READY


def unscale_together(work: Callable[[Any], None], optimizer: Any, scaler: Any, groups: Iterable[Any]) -> Tensor:
    """Unscale by ``work``, and let ``update`` go by what any rank of these groups has found. Collective.

    Returns:
        More than zero where there was an infinity or a NaN.

    Raises:
        GradientError: ``work`` has raised on another rank; here what it has raised is raised again.
    """
    state: Any = states_of_scaler(scaler)[id(optimizer)]
    scaled_by = scale_of(scaler)
    # One for all devices: ranks that own nothing, or own on other devices, take part in the same reduction.
    found = torch.zeros((), device=None if scaled_by is None else scaled_by.device)
    failed: Exception | None = None
    try:
        work(optimizer)
        for each in state["found_inf_per_device"].values():
            found = torch.maximum(found, each.to(found.device))
    except Exception as error:
        failed, found = error, torch.full_like(found, 2.0)
    for group in groups:
        found = all_reduced(found, dist.ReduceOp.MAX, group)
    if failed is not None:
        raise failed
    if found > 1:
        raise GradientError("unscale_ has raised an error on another rank; see the error there")
    state["found_inf_per_device"] = {found.device: found}
    return found


@torch.no_grad()
def unscale(gradients: Iterable[Tensor], inv_scale: Tensor) -> dict[torch.device, Tensor]:
    """Multiply real gradients of any dtype, in place; tell by device whether one of them has an infinity or a NaN."""
    # torch's own refuses float16, which fully sharded models have, and knows no complex ones (2.13:
    # "_amp_foreach_non_finite_check_and_unscale_cpu" not implemented for 'ComplexFloat').
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    found: dict[torch.device, Tensor] = {}
    for (device, _), same_kind in by_kind.items():
        found.setdefault(device, torch.zeros((), device=device))
        amp_unscale(same_kind, found[device], inv_scale.to(device))
    return found
