"""Run an optimizer's step inside of another optimizer's step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from fsshard.torch_private.optimizers import step_post_hooks, step_pre_hooks

__all__ = ["finished_by", "step_under_hooks_of_another", "step_without_global_hooks", "unhooked_step"]

# What torch wraps around the step of every optimizer class (torch 2.13). By its code, as functools.wraps copies the
# mark "hooked" to whatever a user wraps around it once more.
_HOOKING = Optimizer.profile_hook_step(lambda optimizer: None).__code__


def step_without_global_hooks(inner: Optimizer, kwargs: dict[str, Any]) -> Any:
    """Call ``inner.step(**kwargs)`` with the hooks of ``inner``, without those that torch has for all optimizers.

    The outer optimizer runs these. Under FairScale 0.4.13 they run twice for one step, and the first time before the
    other ranks' parameters are there.
    """
    step: Any = type(inner).step
    if "step" in vars(inner) or getattr(step, "__code__", None) is not _HOOKING:
        return inner.step(**kwargs)
    args: Any = (inner,)
    for pre_hook in step_pre_hooks(inner).values():
        changed = pre_hook(inner, args, kwargs)
        if changed is not None:
            args, kwargs = changed
    loss = step.__wrapped__(*args, **kwargs)
    for post_hook in step_post_hooks(inner).values():
        post_hook(inner, args, kwargs)
    return loss


def unhooked_step(optimizer_class: type[Optimizer]) -> Any:
    """Return ``optimizer_class.step`` without torch's wrapper that runs hooks: the outermost optimizer runs them."""
    step: Any = optimizer_class.step
    return step.__wrapped__ if getattr(step, "hooked", False) and hasattr(step, "__wrapped__") else step


def step_under_hooks_of_another(optimizer_class: type[Optimizer]) -> Any:
    """Make a ``step`` for subclasses of ``optimizer_class`` that runs no hooks: who calls it does."""

    def step(self: Any, closure: Any = None, **kwargs: Any) -> Any:
        return unhooked_step(optimizer_class)(self, closure, **kwargs)

    step.hooked = True  # type: ignore[attr-defined]  # what torch (2.13) marks a class with that it has wrapped
    return step


def finished_by(closure: Callable[[], Any], finish: Callable[[], None]) -> Callable[[], Any]:
    """Return a closure that calls ``finish`` after ``closure``, which makes its gradients final."""

    def finished() -> Any:
        loss = closure()
        finish()
        return loss

    return finished
