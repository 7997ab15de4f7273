"""Access to shards: the part of a parameter that a rank holds, the whole one, and who counts in a norm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.backends.engine_state import EngineState
from fsshard.backends.whole import gather_all
from fsshard.planning.entries import Entry

__all__ = ["ShardAccess"]


class ShardAccess(EngineState):
    """Parts of parameters and gradients, and the whole ones; as written here, of an engine that divides none."""

    @property
    def divided_among(self) -> int:
        """How many ranks share one copy of what the engine divides."""
        return self.settings.world_size

    def owned(self, entry: Entry) -> bool:
        """Whether this rank's gradient of ``entry`` counts in a norm (each element must count on one rank)."""
        return True

    @property
    def gradients_on_owners(self) -> bool:
        """Whether each gradient is whole and on one rank."""
        return self.divides == "owners" and self.settings.world_size > 1

    def counts_all_ranks(self, entry: Entry) -> bool:
        """Whether a norm of this rank's stored gradient of ``entry`` is not what the user means by its norm."""
        divided = self.divides != "nothing" and self.settings.world_size > 1
        return entry.kind.is_complex or divided or bool(entry.layouts) or not self.settings.knows_all_ranks

    def gather_grads(self) -> Iterator[tuple[Entry, Tensor | None]]:
        """Entry by entry the whole stored gradient on every rank, or None where no rank has one.

        Collective, so run it to its end on every rank.
        """
        mine = [(entry, entry.grad()) for entry in self.entries.values()]
        present = torch.tensor([g is not None for _, g in mine], dtype=torch.uint8, device=self.settings.device)
        if self.settings.group is not None:
            dist.all_reduce(present, op=dist.ReduceOp.MAX, group=self.settings.group)
        flags: list[int] = present.tolist()
        whole = self._gather_gradients(
            (entry, torch.zeros_like(entry.local()) if gradient is None else gradient)
            for (entry, gradient), flag in zip(mine, flags, strict=True)
            if flag
        )
        for (entry, _), flag in zip(mine, flags, strict=True):
            yield entry, next(whole) if flag else None

    def _gather_gradients(self, parts: Iterable[tuple[Entry, Tensor]]) -> Iterator[Tensor]:
        return gather_all(parts, self.settings.device)
