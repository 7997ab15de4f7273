"""GradScaler: loss scaling for float16, where a rank holds parts of the gradients, or none.

torch's scaler looks at one rank's gradients. Where these differ between ranks, one rank would skip a step that the
others take, and every collective after that would hang or mix the wrong tensors (fairscale PR 179, 182). Here all ranks
share one answer per optimizer, under every backend and on every device.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from fsshard.errors import OptimizerError, RankMismatch
from fsshard.oss.norm_and_scaling import unscale
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer
from fsshard.torch_private.optimizers import scale_of


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for a wrapped model: the same methods, one decision of all ranks.

    ::

        scaler = fsshard.GradScaler(model)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # only needed for clipping
        model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()

    Powers of two as scales change no bit of a gradient that neither overflows nor underflows.

    Args:
        model: what :func:`fsshard.wrap` returned.
        *args: as ``torch.amp.GradScaler`` takes them after the device: ``init_scale``, ``growth_factor``,
            ``backoff_factor``, ``growth_interval``, ``enabled``.
        **kwargs: the same by name.

    Raises:
        OptimizerError: ``model`` is not wrapped.
    """

    def __init__(self, model: ShardedModule, *args: Any, **kwargs: Any) -> None:
        if not isinstance(model, ShardedModule):
            raise OptimizerError(
                f"GradScaler(model): expected what fsshard.wrap returned, got {type(model).__name__}; "
                "for a plain model use torch.amp.GradScaler"
            )
        settings = model.backend.settings
        super().__init__(settings.device.type, *args, **kwargs)
        self._group = settings.everyone
        model._fsshard.scaled |= self.is_enabled()

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by the scale, and agree whether all are finite. Collective.

        Raises:
            OptimizerError: it was not built by ``fsshard.build_optimizer``.
            RankMismatch: the ranks' scales differ; raised on every rank.
            RuntimeError: this, or ``step``, was called since the last ``update``.
        """
        if self.is_enabled():
            self._sharded(optimizer).finish_gradients()
            super().unscale_(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Call ``optimizer.step(*args)`` if the gradients are finite on all ranks, else do nothing. Collective.

        Raises:
            OptimizerError: it was not built by ``fsshard.build_optimizer``.
            RankMismatch: the ranks' scales differ; raised on every rank.
            RuntimeError: a second step since the last ``update``, or ``closure=...``.
        """
        with self._sharded(optimizer).under_scaler():
            return super().step(optimizer, *args, **kwargs)

    def _sharded(self, optimizer: Optimizer) -> ShardedOptimizer:
        if not isinstance(optimizer, ShardedOptimizer):
            raise OptimizerError(
                f"fsshard.GradScaler got a {type(optimizer).__name__}; build it with fsshard.build_optimizer"
            )
        return optimizer

    @torch.no_grad()
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Do what torch's method does with this rank's parts of the gradients; what one rank finds, all have found."""
        for found in unscale(self._sharded(optimizer).local_gradients(), inv_scale).values():
            torch.maximum(found_inf, found.to(found_inf.device), out=found_inf)
        scale = scale_of(self)
        if self._group is None or self._group.size() == 1 or scale is None:
            # There is no scale yet where nothing was scaled; torch's unscale_ has made one.
            return {found_inf.device: found_inf}
        # One exchange: found_inf, and whether all ranks have scaled alike.
        shared = torch.cat([found_inf.reshape(1), scale.reshape(1), -scale.reshape(1)])
        dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self._group)
        largest, smallest = float(shared[1]), -float(shared[2])
        if largest != smallest:
            raise RankMismatch(
                f"GradScaler: the ranks' scales differ, from {smallest} to {largest}, so each rank scaled its loss by "
                "another number; create the scaler with the same init_scale, and load its state, on every rank. These "
                "gradients are wrong: drop them with optimizer.zero_grad()"
            )
        found_inf.copy_(shared[:1].reshape(found_inf.shape))
        return {found_inf.device: found_inf}
