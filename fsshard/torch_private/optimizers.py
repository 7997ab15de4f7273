"""Optimizers, the schedulers that watch them, and the scalers that step them."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from fsshard.torch_private.registry import Area

AREA = Area("optimizers")
_HOOKS = "OSS, which runs its hooks and those of the optimizer within it"
Hooks = Callable[[Optimizer], MutableMapping[int, Callable[..., Any]]]

step_pre_hooks: Hooks = AREA.reader(
    "torch.optim.optimizer:Optimizer._optimizer_step_pre_hooks", use="an optimizer's own hooks", otherwise=_HOOKS
)
step_post_hooks: Hooks = AREA.reader(
    "torch.optim.optimizer:Optimizer._optimizer_step_post_hooks", use="an optimizer's own hooks", otherwise=_HOOKS
)

_TRACKED = AREA.attribute(
    "torch.optim.lr_scheduler:LRScheduler._wrapped_by_lr_sched",
    use="on optimizer.step: a scheduler has wrapped it, to note its calls",
    otherwise="a scheduler may warn of an order of calls that is none",
)
STEPPED = AREA.attribute(
    "torch.optim.lr_scheduler:LRScheduler._opt_called",
    use="on an optimizer: it has taken a step since its scheduler was made",
    otherwise="a scheduler may warn of an order of calls that is none",
)


def mark_tracked(step: Any) -> None:
    """Say of ``optimizer.step`` that it sets :data:`STEPPED`."""
    setattr(step, _TRACKED, True)


_SCALES = AREA.attribute(
    "torch.amp.grad_scaler:_step_supports_amp_scaling",
    use="on an optimizer: GradScaler leaves it to its step to unscale gradients and to look for infinities",
    otherwise="the infinities of fused optimizers are looked for as of others under FairScale's ShardedGradScaler",
)


def scales_itself(optimizer: Any) -> bool:
    """Return whether GradScaler leaves it to an optimizer's step to unscale gradients and to look for infinities."""
    return bool(getattr(optimizer, _SCALES, False))


scale_of: Callable[[Any], Tensor | None] = AREA.reader(
    "torch.amp.grad_scaler:GradScaler._scale",
    use="the scale as a tensor, which costs no wait for a device; None before the first use",
    otherwise="no GradScaler",
)
states_of_scaler: Callable[[Any], MutableMapping[int, dict[str, Any]]] = AREA.reader(
    "torch.amp.grad_scaler:GradScaler._per_optimizer_states",
    use="what a scaler has found of the gradients of each optimizer",
    otherwise="torch's GradScaler cannot be refused where it would step alone",
)
