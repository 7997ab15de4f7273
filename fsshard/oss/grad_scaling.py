"""One answer of all ranks under torch's ``GradScaler``: they step, or none does.

torch's scaler looks at one rank's gradients, and calls ``step`` where these are finite. Under OSS ranks have different
ones: one would skip, and another wait for its parameters. An optimizer that says that it supports scaling is called in
any case, and decides itself (torch 2.13, ``_step_supports_amp_scaling`` with the argument ``grad_scaler``).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import OptState

from fsshard.oss.collectives import all_reduced
from fsshard.torch_private.optimizers import scale_of, states_of_scaler
from fsshard.torch_private.tensors import amp_unscale

__all__ = ["agreed", "is_unscaled", "share_infinities", "unscale"]

# Of torch 2.13, at every step that is given the scaler. The way that it recommends instead hands over a sum of what
# was found, from which the scaler's own, that update() goes by, cannot be set.
warnings.filterwarnings("ignore", "GradScaler is going to stop passing itself", FutureWarning)


def agreed(optimizer: Any, scaler: Any) -> bool:
    """Unscale the complete gradients of an OSS, unless that is done, and tell whether to step. Collective."""
    if not is_unscaled(optimizer, scaler):
        scaler.unscale_(optimizer)
    return not bool(share_infinities(optimizer, scaler, [optimizer.group]))


def is_unscaled(optimizer: Any, scaler: Any) -> bool:
    """Tell whether a scaler has unscaled an optimizer's gradients since its last ``update``."""
    return states_of_scaler(scaler)[id(optimizer)]["stage"] is not OptState.READY


def share_infinities(optimizer: Any, scaler: Any, groups: Iterable[Any]) -> Tensor:
    """Let a scaler's ``update`` go by what any rank of these groups has found in unscaled gradients. Collective.

    Returns:
        More than zero where there was an infinity or a NaN.
    """
    state: Any = states_of_scaler(scaler)[id(optimizer)]
    scale = scale_of(scaler)
    assert scale is not None  # of unscale_, before
    # One for all devices: ranks that own nothing, or own on other devices, take part in the same reduction.
    found = torch.zeros((), device=scale.device)
    for each in state["found_inf_per_device"].values():
        found = torch.maximum(found, each.to(found.device))
    for group in groups:
        found = all_reduced(found, dist.ReduceOp.MAX, group)
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
