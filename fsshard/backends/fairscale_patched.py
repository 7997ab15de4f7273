"""FairScale 0.4.13's OSS, patched to be right on torch 2.13, under the reduction of :mod:`fsshard.oss`.

FairScale's ShardedDataParallel reduces in a hook at each gradient, in place. On torch 2.13 that is silently wrong after
``optimizer.zero_grad()`` (FairScale issue #354), below reentrant checkpoints, where a second backward accumulates, on
sub-groups and in evaluation mode. What is put right in all of these is another reduction, and there is one already.

Imported by :mod:`fsshard.backends.fairscale` when that backend is used; the only module that imports fairscale.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fairscale
import torch
import torch.distributed as dist
from fairscale.optim.oss import OSS

from fsshard.oss.partition import packed
from fsshard.oss.partitioned import PartitionedOptimizer, step_under_hooks_of_another


class PatchedOSS(OSS, PartitionedOptimizer):
    """OSS that aligns what it packs, keeps frozen layers equal on all ranks, and runs step hooks once."""

    about = f"FairScale {fairscale.__version__}, patched"
    step = step_under_hooks_of_another(OSS)  # ShardedOptimizer runs them
    _layout: list[tuple[int, bool]] | None = None

    def refresh_trainable(self) -> None:
        # OSS moves parameters into its buffers after it has built the inner optimizer, and again whenever a
        # ShardedDataParallel is made; an inner optimizer that keeps views of parameters from its constructor
        # (DistributedShampoo's blocks) trains nothing then, silently. So they move before, and only if they must.
        if not hasattr(self, "optim"):
            self._setup_flat_buffers()
        super().refresh_trainable()

    def _setup_flat_buffers(self) -> None:
        if self._layout == self._current_layout():
            return
        super()._setup_flat_buffers()
        parts: dict[Any, list[Any]] = {}
        for parameter in self._parameters():
            if parameter.requires_grad:
                parts.setdefault((parameter.device, self.owner_of(parameter)), []).append(parameter)
        for (device, rank), trained in parts.items():
            self.buckets[device][rank].buffer = packed(trained, trained[0].dtype, device)
        self._layout = self._current_layout()

    def _parameters(self) -> Iterator[Any]:
        for group in self.param_groups:
            yield from group["params"]

    def _current_layout(self) -> list[tuple[int, bool]]:
        return [(parameter.data_ptr(), parameter.requires_grad) for parameter in self._parameters()]

    @torch.no_grad()
    def _broadcast_params(self) -> None:
        super()._broadcast_params()
        frozen = [parameter for parameter in self._parameters() if not parameter.requires_grad]
        if not frozen:
            return
        for parameter in self.with_gradient_at_owner(frozen, frozen[0].device):
            dist.broadcast(parameter.data, group=self.group, group_src=self.owner_of(parameter))
