"""backend="none": the unchanged model, on one process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import nn

from fsshard.backends.base import Backend
from fsshard.backends.facts import EngineFacts
from fsshard.backends.registry import register_backend
from fsshard.backends.settings import Settings
from fsshard.errors import UnsupportedByBackend
from fsshard.torch_private.autograd import queue_callback


@register_backend
class SingleBackend(Backend):
    """No engine. What every other backend is compared with."""

    name: ClassVar[str] = "none"
    facts: ClassVar[EngineFacts] = EngineFacts(
        one_process=True,
        is_reference=True,
        keeps_grad_dtype=True,
        adds_in_tree=True,
        strategies=("NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD"),  # the same, on one process
    )

    @classmethod
    def check(cls, settings: Settings) -> Settings:
        if settings.world_size > 1:
            raise UnsupportedByBackend(
                f"a job of {settings.world_size} ranks (each would train its own model)", cls.name, "use 'ddp'"
            )
        return super().check(settings)

    def unused(self, names: Iterable[str]) -> list[str]:
        # As in torch, what has no gradient is not moved; and no other rank can have one.
        return []

    def shard(self) -> nn.Module:
        self._rounds = any(unit.reduce_dtype is not None for unit in self.settings.plan.units)
        return self.module

    def backward_starts(self, *, synchronised: bool) -> None:
        super().backward_starts(synchronised=synchronised)
        if self._rounds and synchronised:
            queue_callback(self._round)

    @torch.no_grad()
    def _round(self) -> None:
        # Nothing is sent, and gradients are rounded all the same, as under every engine.
        for parameter, dtype in self._reduce_dtypes().items():
            gradient = parameter.grad
            if dtype is not None and gradient is not None:
                numbers = torch.view_as_real(gradient) if gradient.is_complex() else gradient
                numbers.copy_(numbers.to(dtype))
