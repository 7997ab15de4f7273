"""backend="none": the model as it is, on one process."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from fsshard.backends.base import Backend, Settings
from fsshard.errors import UnsupportedByBackend

__all__ = ["SingleBackend"]


class SingleBackend(Backend):
    """No engine. What every other backend is compared with."""

    name: ClassVar[str] = "none"
    strategies: ClassVar[tuple[str, ...]] = ("NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD")  # the same, on one process

    @classmethod
    def check(cls, settings: Settings) -> None:
        super().check(settings)
        if settings.world_size > 1:
            raise UnsupportedByBackend(
                f"a job of {settings.world_size} ranks (each would train a model of its own)", cls.name, "use 'ddp'"
            )

    def _shard(self) -> nn.Module:
        return self.module
