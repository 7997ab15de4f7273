"""OSS under torch's own ``GradScaler``: all ranks step, or none.

torch's scaler looks at one rank's gradients, and calls ``step`` where these are finite. Under OSS ranks have different
ones: one would skip, and another wait for its parameters. An optimizer that says that it supports scaling is called in
any case, and decides itself (torch 2.13, ``_step_supports_amp_scaling`` with the argument ``grad_scaler``).
"""

from __future__ import annotations

import inspect
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState

from fsshard.errors import RankMismatch
from fsshard.torch_private.optimizers import scale_of, states_of_scaler

__all__ = ["ScalerOfAllRanks", "agreed", "asked_by_scaler"]

FOUND, FAILED = 1.0, 2.0

# Of torch 2.13, at every step that is given the scaler. The way that it recommends instead hands over a sum of what
# was found, from which the scaler's own, that update() goes by, cannot be set.
warnings.filterwarnings("ignore", "GradScaler is going to stop passing itself", FutureWarning)


class ScalerOfAllRanks:
    """A base class of gradient scalers that ask all ranks before they call an optimizer's ``step``."""


def asked_by_scaler(optimizer: Any) -> bool:
    """Whether the caller's caller is torch's scaler, which can be given a decision.

    Not for others: Lightning (2.5) refuses to clip where an optimizer supports scaling. Not for a
    :class:`ScalerOfAllRanks`, whose ranks have decided before it calls.
    """
    frame = sys._getframe(2)
    if frame.f_code is not GradScaler.step.__code__ or isinstance(frame.f_locals["self"], ScalerOfAllRanks):
        return False
    return "grad_scaler" in inspect.signature(optimizer.step).parameters


def agreed(optimizer: Any, scaler: Any, device: torch.device) -> bool:
    """Unscale, unless that is done, and decide whether to step. Collective.

    Args:
        optimizer: an OSS; its gradients are complete.
        scaler: torch's.
        device: of what the group can send.

    Returns:
        False where any rank has found an infinity or a NaN. The scaler's ``update`` goes by it on all ranks.

    Raises:
        RankMismatch: another rank's gradients could not be unscaled.
    """
    state: Any = states_of_scaler(scaler)[id(optimizer)]
    error: Exception | None = None
    buffer: Tensor = torch.zeros((), dtype=torch.float32, device=device)
    try:
        if state["stage"] is OptState.READY:
            scaler.unscale_(optimizer)
        for found in state["found_inf_per_device"].values():
            buffer = torch.maximum(buffer, (found > 0).to(buffer))
    except Exception as raised:
        error = raised
        buffer = torch.full_like(buffer, FAILED)
    dist.all_reduce(buffer, dist.ReduceOp.MAX, group=optimizer.group)
    worst = buffer.item()
    if error is not None:
        raise error
    if worst == FAILED:
        raise RankMismatch("GradScaler.step: the gradients of another rank could not be unscaled; see its error")
    scale = scale_of(scaler)
    assert scale is not None  # of unscale_, above
    shared = (buffer >= FOUND).to(device=scale.device, dtype=torch.float32)
    state["found_inf_per_device"] = {shared.device: shared}
    return worst < FOUND
