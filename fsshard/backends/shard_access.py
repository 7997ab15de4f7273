"""Access to shards: the part of a parameter that a rank holds, the whole one, and who counts in a norm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.backends.engine_state import EngineState
from fsshard.planning.entries import Entry

__all__ = ["ShardAccess"]


class ShardAccess(EngineState):
    """Parts of parameters and gradients, and the whole ones; as written here, of an engine that divides none."""

    @property
    def divided_among(self) -> int:
        """How many ranks share one copy of what the engine divides."""
        return self.settings.world_size

    def local_value(self, entry: Entry) -> Tensor:
        """This rank's part of the stored parameter as a plain tensor (no copy)."""
        return entry.parameter.detach()

    def local_grad(self, entry: Entry) -> Tensor | None:
        """This rank's part of the stored gradient as a plain tensor, or None."""
        return entry.parameter.grad

    def local_range(self, entry: Entry) -> tuple[int, int]:
        """[start, stop) of this rank's part among the elements of the whole stored tensor, flattened.

        In the order in which the engine flattens it: see :meth:`has_ranges`.
        """
        return 0, entry.stored_shape.numel()

    def has_ranges(self, entry: Entry) -> bool:
        """Whether the engine divides ``entry`` in the order of its indices, so that a part is a range of elements.

        The same on every rank.
        """
        return not entry.kind.order or not self.shards_within_parameters or self.divided_among == 1

    def owned(self, entry: Entry) -> bool:
        """Whether this rank's gradient of ``entry`` counts in a norm (each element must count on one rank)."""
        return True

    @property
    def gradients_on_owners(self) -> bool:
        """Whether each gradient is whole and on one rank."""
        divided = self.partitions_optimizer and self.settings.world_size > 1
        return divided and not self.shards_within_parameters

    def counts_all_ranks(self, entry: Entry) -> bool:
        """Whether a norm of this rank's stored gradient of ``entry`` is not what the user means by its norm."""
        divided = self.partitions_optimizer and self.settings.world_size > 1
        return entry.kind.is_complex or divided or bool(entry.layouts) or not self.settings.knows_all_ranks

    def reduce_norm(self, value: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        """Combine a scalar over the ranks among which gradients are divided."""
        return value

    def gather(self, entry: Entry, local: Tensor) -> Tensor:
        """The whole stored tensor from every rank's part of it: a new tensor on every rank. Collective."""
        return local.detach().clone()

    def gather_all(self, parts: Iterable[tuple[Entry, Tensor]]) -> Iterator[Tensor]:
        """:meth:`gather` of many. Collective, so run it to its end on every rank."""
        for entry, local in parts:
            yield self.gather(entry, local)

    def stream(self, entry: Entry, *, rank0_only: bool, device: torch.device) -> Tensor | None:
        """The whole stored parameter as a new tensor on ``device``; None where it is not kept. Collective."""
        if rank0_only and self.settings.rank:
            return None
        return self.local_value(entry).to(device, copy=True)

    def gather_grads(self) -> Iterator[tuple[Entry, Tensor | None]]:
        """Entry by entry the whole stored gradient on every rank, or None where no rank has one.

        Collective, so run it to its end on every rank.
        """
        mine = [(entry, self.local_grad(entry)) for entry in self.entries.values()]
        present = torch.tensor([g is not None for _, g in mine], dtype=torch.uint8, device=self.settings.device)
        if self.settings.group is not None:
            dist.all_reduce(present, op=dist.ReduceOp.MAX, group=self.settings.group)
        flags: list[int] = present.tolist()
        whole = self._gather_gradients(
            (entry, torch.zeros_like(self.local_value(entry)) if gradient is None else gradient)
            for (entry, gradient), flag in zip(mine, flags, strict=True)
            if flag
        )
        for (entry, _), flag in zip(mine, flags, strict=True):
            yield entry, next(whole) if flag else None

    def _gather_gradients(self, parts: Iterable[tuple[Entry, Tensor]]) -> Iterator[Tensor]:
        return self.gather_all(parts)

    def scatter(self, entry: Entry, whole: Tensor) -> Tensor:
        """This rank's part of a whole stored tensor. No communication."""
        return whole

    def load_parameter(self, entry: Entry, whole: Tensor) -> None:
        """Copy this rank's part of ``whole`` into the parameter."""
        local = self.local_value(entry)
        local.copy_(self.scatter(entry, whole.to(dtype=local.dtype)).view(local.shape))
