"""``fairscale.optim.grad_scaler``: loss scaling where each rank holds the gradients of its own parameters only.

One that skips its step while another broadcasts parameters would leave that one waiting. FairScale 0.4.13 throws what
other ranks found away where the gradients are on the CPU of a machine with CUDA, takes a sum of 2 for nothing found,
and disables itself without CUDA. Here both scalers work on the CPU as well.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fsshard.oss.norm_and_scaling import is_unscaled, unscale, unscale_together
from fsshard.oss.partitioned import partitioned_within
from fsshard.torch_private.optimizers import scale_of, scales_itself
from fsshard.torch_private.tensors import sparse_values

from ...not_served import missing_from
from ...report import called

__all__ = ["GradScaler", "ShardedGradScaler"]

__getattr__ = missing_from(__name__)


class GradScaler(torch.cuda.amp.GradScaler):
    """torch's scaler on any device, for gradients of any dtype.

    Where the optimizer is an OSS, whose ranks hold different gradients, all ranks step, or none; with FairScale 0.4.13
    an overflow on one rank is a deadlock. A subclass of the CUDA one because FairScale's is, and frameworks ask for
    that class.
    """

    _name = "GradScaler"

    @functools.wraps(torch.cuda.amp.GradScaler.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # By "cpu" torch disables nothing; scale and found_inf go where the loss is. The constructor in between, of
        # torch.cuda.amp (2.13), would warn that it is deprecated.
        torch.amp.GradScaler.__init__(self, "cpu", *args, **kwargs)
        called(f"fairscale.optim.grad_scaler.{self._name}", "torch.amp.GradScaler")

    def _groups(self, optimizer: Any) -> list[Any]:
        """Return the process groups whose ranks must agree about a step of this optimizer."""
        oss = partitioned_within(optimizer)
        if oss is None:
            return []
        return [oss.group]

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale, and find out whether any rank has one that is infinite or NaN.

        Collective in the groups that share the optimizer. A pending reduction of ShardedDataParallel is waited for.
        """
        if not self.is_enabled():
            return
        # That of OSS ends what ShardedDataParallel has begun.
        finish = getattr(optimizer, "finish_gradients", None)
        if finish is not None:
            finish()
        again = is_unscaled(optimizer, self)  # torch's error
        unscale_together(super().unscale_, optimizer, self, [] if again else self._groups(optimizer))

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        return unscale(_values(optimizer), inv_scale)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale, unless that is done, and return ``optimizer.step(...)`` if all is finite on all ranks."""
        ready = self.is_enabled() and "closure" not in kwargs and scale_of(self) is not None
        # torch leaves it to a fused optimizer to look for infinities, in the gradients of this rank alone
        fused = scales_itself(optimizer) and "grad_scaler" not in inspect.signature(optimizer.step).parameters
        if ready and fused and not is_unscaled(optimizer, self):
            self.unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Lower the scale after a step that was skipped, raise it after enough that were not; or set ``new_scale``."""
        super().update(None if new_scale is None else float(new_scale))


class ShardedGradScaler(GradScaler):
    """A gradient scaler for OSS, ShardedDataParallel and FullyShardedDataParallel: all ranks step, or none.

    Args:
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as of :class:`GradScaler`.
        process_group: the ranks that decide together; None is all. Those that share an OSS do in any case.
    """

    _name = "ShardedGradScaler"

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Any = None,
    ) -> None:
        super().__init__(init_scale, growth_factor, backoff_factor, growth_interval, enabled)  # type: ignore[arg-type]
        self.group = process_group

    def _groups(self, optimizer: Any) -> list[Any]:
        return [self.group, *(group for group in super()._groups(optimizer) if self.group not in (None, group))]


def _values(optimizer: Optimizer) -> Iterator[Tensor]:
    """Return what there is of an optimizer's gradients on this rank, as real tensors to be changed in place."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient: Any = parameter.grad
            if gradient is None:
                continue
            # It is a DTensor of a fully sharded model, whose ranks exchange what they find.
            if hasattr(gradient, "to_local"):
                gradient = gradient.to_local()
            if gradient.is_sparse:
                if gradient.dtype is torch.float16 and not gradient.is_coalesced():
                    # The sum of an index's values may overflow. Not in float16: coalesce on the CPU does not have it.
                    gradient = parameter.grad = gradient.float().coalesce().half()
                gradient = sparse_values(gradient)
            yield torch.view_as_real(gradient) if gradient.is_complex() else gradient
