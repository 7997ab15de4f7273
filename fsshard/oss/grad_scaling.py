"""OSS under torch's own ``GradScaler``: all ranks step, or none.

torch's scaler looks at one rank's gradients, and calls ``step`` where these are finite. Under OSS ranks have different
ones: one would skip, and another wait for its parameters. An optimizer that says that it supports scaling is called in
any case, and decides itself (torch 2.13, ``_step_supports_amp_scaling`` with the argument ``grad_scaler``).
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState

from fsshard.torch_private.optimizers import scale_of, states_of_scaler

__all__ = ["agreed"]

# Of torch 2.13, at every step that is given the scaler. The way that it recommends instead hands over a sum of what
# was found, from which the scaler's own, that update() goes by, cannot be set.
warnings.filterwarnings("ignore", "GradScaler is going to stop passing itself", FutureWarning)


def agreed(optimizer: Any, scaler: Any, device: torch.device) -> bool:
    """Unscale, unless that is done, and decide whether to step. Collective.

    Args:
        optimizer: an OSS; its gradients are complete.
        scaler: torch's.
        device: of what the group can send.

    Returns:
        False where any rank has found an infinity or a NaN. The scaler's ``update`` goes by it on all ranks.
    """
    state: Any = states_of_scaler(scaler)[id(optimizer)]
    if state["stage"] is OptState.READY:
        scaler.unscale_(optimizer)
    found = [each > 0 for each in state["found_inf_per_device"].values()]
    buffer = torch.tensor(float(any(found)), device=device)
    dist.all_reduce(buffer, dist.ReduceOp.MAX, group=optimizer.group)
    scale = scale_of(scaler)
    assert scale is not None  # of unscale_, above
    state["found_inf_per_device"] = {scale.device: buffer.to(scale.device)}
    return not bool(buffer)
