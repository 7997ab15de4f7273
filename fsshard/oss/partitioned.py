"""Optimizers whose state is divided among ranks, whichever implementation they are of, and the step within theirs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from fsshard.errors import MisuseError
from fsshard.oss.collectives import used_anywhere
from fsshard.torch_private.optimizers import step_post_hooks, step_pre_hooks


class PartitionedOptimizer:
    """An optimizer of all parameters whose ranks each update those that they own: ours, and FairScale's OSS.

    Attributes:
        optim: this rank's optimizer, with all groups, of which it has its own parameters.
        group: the ranks, of which this one is number ``rank`` of ``world_size``.
    """

    optim: Optimizer
    group: dist.ProcessGroup
    rank: int
    world_size: int
    _param_to_rank: Mapping[Tensor, int]

    def owner_of(self, parameter: Tensor) -> int | None:
        """Return the rank of the group that updates ``parameter``; None where this optimizer does not have it."""
        return self._param_to_rank.get(parameter)

    def send_parameters(self) -> None:
        """Send the parameters from their owners to all ranks, as at the end of a step. Collective."""
        self._broadcast_params()

    def _broadcast_params(self) -> None:
        raise NotImplementedError

    def with_gradient_at_owner(self, frozen: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Return those frozen parameters that their owner's optimizer moves: an old gradient is left. Collective."""
        # Momentum, weight decay and Adam's averages go on. FairScale 0.4.13 sends trainable parameters only, and the
        # ranks drift apart.
        flags = [self.owner_of(p) == self.rank and p.grad is not None for p in frozen]
        moved = used_anywhere(flags, self.group, device) if flags else []
        return [parameter for parameter, flag in zip(frozen, moved, strict=True) if flag]


def local_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that has this rank's state: one within, where the state is divided by owner."""
    return optimizer.optim if isinstance(optimizer, PartitionedOptimizer) else optimizer


def partitioned_within(optimizer: Any) -> PartitionedOptimizer | None:
    """Return the optimizer that divides its state among ranks: this one, or one that it wraps and passes on.

    Raises:
        MisuseError: it is the OSS of FairScale itself, which does not say which rank owns what.
    """
    partitioned = getattr(getattr(optimizer, "owner_of", None), "__self__", None)
    if isinstance(partitioned, PartitionedOptimizer):
        return partitioned
    # Taken for an optimizer that all ranks have whole, an overflow on one rank would let the others wait forever.
    if any((cls.__module__, cls.__qualname__) == ("fairscale.optim.oss", "OSS") for cls in type(optimizer).__mro__):
        raise MisuseError(
            "expected an OSS of fsshard, got FairScale's own, imported without the redirect; import OSS as the "
            "script imports FairScale's other names, or train with fsshard.wrap(model, backend='fairscale')"
        )
    return None


# ------------------------------------------------------------------------------------------------ a step within a step

# What torch wraps around the step of every optimizer class (torch 2.13). By its code, as functools.wraps copies the
# mark "hooked" to whatever a user wraps around it once more.
_HOOKING = Optimizer.profile_hook_step(lambda optimizer: None).__code__


def unhooked_step(optimizer_class: type[Optimizer]) -> Any:
    """Return ``optimizer_class.step`` without torch's wrapper that runs hooks: the outermost optimizer runs them."""
    step: Any = optimizer_class.step
    return step.__wrapped__ if getattr(step, "__code__", None) is _HOOKING else step


def step_without_global_hooks(inner: Optimizer, kwargs: dict[str, Any]) -> Any:
    """Call ``inner.step(**kwargs)`` with the hooks of ``inner``, without those that torch has for all optimizers.

    The outer optimizer runs these. Under FairScale 0.4.13 they run twice for one step, and the first time before the
    other ranks' parameters are there.
    """
    step = unhooked_step(type(inner))
    if "step" in vars(inner) or step is type(inner).step:
        # A step of the user's own, which torch has not wrapped.
        return inner.step(**kwargs)
    args = (inner,)
    for pre_hook in step_pre_hooks(inner).values():
        args, kwargs = pre_hook(inner, args, kwargs) or (args, kwargs)
    loss = step(*args, **kwargs)
    for post_hook in step_post_hooks(inner).values():
        post_hook(inner, args, kwargs)
    return loss


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
