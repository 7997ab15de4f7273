"""What the FSDP1 and FSDP2 backends share: sharded parameters, and zero gradients for unused ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch.distributed as dist

from fsshard.backends.base import Backend
from fsshard.backends.facts import OWN_FILES, EngineFacts
from fsshard.backends.gradient_usage import UsageTracker
from fsshard.backends.settings import Settings
from fsshard.complex_params.pairs import real_dtype
from fsshard.errors import UnsupportedByBackend
from fsshard.planning.entries import Entry
from fsshard.planning.torch_settings import HYBRIDS

__all__ = ["DIVIDED", "TorchShardedBackend"]


DIVIDED = EngineFacts(
    divides="elements",
    strategies=("FULL_SHARD", "SHARD_GRAD_OP", *HYBRIDS),
    needs_whole=OWN_FILES,
    hooks_outputs=True,
    shards_integers=True,  # frozen ones, in a unit of their own
)


class TorchShardedBackend(Backend):
    """Base of the backends that divide each parameter among ranks."""

    facts: ClassVar[EngineFacts] = DIVIDED
    shard_group: dist.ProcessGroup  # the ranks among which one copy of the parameters is divided
    usage: UsageTracker | None  # None where the engine itself leaves None what got no gradient

    @classmethod
    def check(cls, settings: Settings) -> Settings:
        settings = super().check(settings)
        if settings.cpu_offload and settings.device.type == "cpu":
            # torch 2.13: RuntimeError without an accelerator, from inside the engine
            raise UnsupportedByBackend(
                "cpu_offload=True on a CPU device", cls.name, "leave it off: shards are in host memory already"
            )
        cls._check_unit_dtypes(settings)
        cls._check_compilation(settings)
        empty = [name for name, info in settings.plan.parameters.items() if 0 in info.shape]
        if empty:  # "_chunk_cat expects non-empty tensor" (FSDP2), or no gradient at all (FSDP1), torch 2.13
            raise UnsupportedByBackend(
                f"parameters without elements ({', '.join(empty[:3])})", cls.name, "remove them, or use backend='ddp'"
            )
        return settings

    @classmethod
    def _check_compilation(cls, settings: Settings) -> None:
        """Refuse CUDA graphs: they read parameters where they were recorded; here each gather allocates them anew."""
        if settings.compilation is None or settings.device.type != "cuda" or not settings.compilation.uses_cuda_graphs:
            return
        raise UnsupportedByBackend(
            f"compile={dict(settings.compilation.keywords)!r}, which records CUDA graphs",
            cls.name,
            "use mode='max-autotune-no-cudagraphs', or backend='ddp'",
        )

    @classmethod
    def _check_unit_dtypes(cls, settings: Settings) -> None:
        """Refuse units of several dtypes ("FSDP expects uniform original parameter dtype", torch 2.13)."""
        for unit in settings.plan.units:
            dtypes = {real_dtype(dtype) for dtype in unit.dtypes}
            counts = [dtype for dtype in dtypes if not dtype.is_floating_point]
            if len(dtypes) > 1 or (counts and not cls.facts.shards_integers):
                names = " and ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
                where = f"unit {unit.name!r}" if unit.name else "the root unit"
                own = "put them into modules of their own and pass these in auto_wrap_policy"
                buffer = "make what is not trained a buffer, module.register_buffer(name, tensor)"
                raise UnsupportedByBackend(
                    f"{names} parameters in {where}", cls.name, f"{buffer if counts else own}, or use backend='ddp'"
                )

    def finish_backward(self, entries: Iterable[Entry]) -> None:
        if self.usage is not None:
            self.usage.finish(entries)

    def zero_grad(self, entries: Iterable[Entry], *, set_to_none: bool) -> None:
        entries = list(entries)
        super().zero_grad(entries, set_to_none=set_to_none)
        if set_to_none and self.usage is not None:  # zeros are a gradient, as they are for DDP
            self.usage.forget(entries)

    def backward_starts(self, *, synchronised: bool) -> None:
        super().backward_starts(synchronised=synchronised)
        self._accumulating = not synchronised

    def before_forward(self, *, training: bool) -> None:
        super().before_forward(training=training)
        accumulating = getattr(self, "_accumulating", False)  # gradients wait where they cannot be seen
        if self.usage is not None and self.usage.used and not accumulating:
            # A gradient dropped by hand. A rank without elements of a parameter has none to see; others speak for it.
            gone = [entry for entry in self.all if entry.parameter.grad is None]
            self.usage.forget(entry for entry in gone if entry.local().numel())

    def unused(self, names: Iterable[str]) -> list[str]:
        return super().unused(names) if self.usage is None else self.usage.unused(names)
