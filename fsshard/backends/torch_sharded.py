"""What FSDP1 and FSDP2 have in common as backends: parts of parameters on each rank, and gradients of zeros."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch

from fsshard.backends.base import OWN_FILES, Backend, Entry, Settings
from fsshard.backends.usage import UsageTracker
from fsshard.errors import UnsupportedByBackend

__all__ = ["TorchShardedBackend"]


class TorchShardedBackend(Backend):
    """Base of the backends that divide each parameter among ranks."""

    strategies: ClassVar[tuple[str, ...]] = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD")
    stores_scalars_as_vectors: ClassVar[bool] = True  # "fully_shard doesn't support scalar parameters"
    shards_within_parameters: ClassVar[bool] = True
    partitions_optimizer: ClassVar[bool] = True
    presents_parameters: ClassVar[bool] = True
    needs_whole: ClassVar[frozenset[str]] = OWN_FILES
    usage: UsageTracker

    @classmethod
    def check(cls, settings: Settings) -> None:
        super().check(settings)
        cls._check_unit_dtypes(settings)
        empty = [name for name, info in settings.plan.parameters.items() if 0 in info.shape]
        if empty:  # "_chunk_cat expects non-empty tensor" (FSDP2), or no gradient at all (FSDP1), torch 2.13
            raise UnsupportedByBackend(
                f"parameters without elements ({', '.join(empty[:3])})", cls.name, "remove them, or use backend='ddp'"
            )

    @classmethod
    def _check_offload(cls, settings: Settings) -> None:
        if settings.device.type == "cpu":  # torch 2.13: RuntimeError without an accelerator, from inside the engine
            raise UnsupportedByBackend(
                "cpu_offload=True on a CPU device", cls.name, "leave it off: shards are in host memory already"
            )

    @classmethod
    def _check_unit_dtypes(cls, settings: Settings) -> None:
        """One dtype per unit ("FSDP expects uniform original parameter dtype", torch 2.13)."""
        storage = {torch.complex64: torch.float32, torch.complex128: torch.float64}
        for unit in settings.plan.units:
            dtypes = {storage.get(dtype, dtype) for dtype in unit.dtypes}
            if len(dtypes) > 1:
                names = " and ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
                where = f"unit {unit.name!r}" if unit.name else "the root unit"
                raise UnsupportedByBackend(
                    f"{names} parameters in {where}",
                    cls.name,
                    "put them into modules of their own and pass these in auto_wrap_policy, or use backend='ddp'",
                )

    def finish_backward(self, entries: Iterable[Entry]) -> None:
        self.usage.finish(entries)

    def zero_grad(self, entries: Iterable[Entry], *, set_to_none: bool) -> None:
        entries = list(entries)
        super().zero_grad(entries, set_to_none=set_to_none)
        if set_to_none:  # zeros are a gradient, as they are for DDP
            self.usage.forget(entries)

    def backward_starts(self, *, synchronised: bool) -> None:
        super().backward_starts(synchronised=synchronised)
        self._accumulating = not synchronised

    def before_forward(self, *, training: bool) -> None:
        super().before_forward(training=training)
        if not getattr(self, "_accumulating", False):  # else gradients wait where they cannot be seen
            # A gradient dropped by hand. A rank without elements of a parameter has none to see; others speak for it.
            here = [entry for entry in self.entries.values() if self.local_value(entry).numel()]
            self.usage.forget(entry for entry in here if self.local_grad(entry) is None)

    def unused(self, names: Iterable[str]) -> list[str]:
        return self.usage.unused(names)
