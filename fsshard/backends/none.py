"""backend="none": the unchanged model, on one process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from torch import nn

from fsshard.backends.base import Backend
from fsshard.backends.facts import EngineFacts
from fsshard.backends.registry import register_backend
from fsshard.backends.settings import Settings
from fsshard.errors import UnsupportedByBackend


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
        return self.module
