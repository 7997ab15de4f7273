"""A step of an optimizer inside of another one's step."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

__all__ = ["step_without_global_hooks"]

# What torch wraps around the step of every optimizer class (torch 2.13). By its code, as functools.wraps copies the
# mark "hooked" to whatever a user wraps around it once more.
_HOOKING = Optimizer.profile_hook_step(lambda optimizer: None).__code__


def step_without_global_hooks(inner: Optimizer, kwargs: dict[str, Any]) -> Any:
    """``inner.step(**kwargs)``, with the hooks of ``inner`` and without those that torch has for all optimizers.

    The outer optimizer runs these. Under FairScale 0.4.13 they run twice for one step, and the first time before the
    other ranks' parameters are there.
    """
    step: Any = type(inner).step
    if "step" in vars(inner) or getattr(step, "__code__", None) is not _HOOKING:
        return inner.step(**kwargs)
    args: Any = (inner,)
    for pre_hook in inner._optimizer_step_pre_hooks.values():
        changed = pre_hook(inner, args, kwargs)
        if changed is not None:
            args, kwargs = changed
    loss = step.__wrapped__(*args, **kwargs)
    for post_hook in inner._optimizer_step_post_hooks.values():
        post_hook(inner, args, kwargs)
    return loss
