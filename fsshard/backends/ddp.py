"""backend="ddp": torch's DistributedDataParallel. Everything whole on every rank, gradients averaged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import nn

from fsshard.backends.base import Backend

__all__ = ["DDPBackend"]


class DDPBackend(Backend):
    """Replicated parameters, all-reduced gradients."""

    name: ClassVar[str] = "ddp"
    option_names: ClassVar[tuple[str, ...]] = ("bucket_cap_mb", "gradient_as_bucket_view", "static_graph")

    def _shard(self) -> nn.Module:
        from torch.nn.parallel import DistributedDataParallel

        if not any(entry.parameter.requires_grad for entry in self.entries.values()):
            return self.module  # DDP refuses a module with nothing to reduce; there is nothing to reduce
        cuda = self.settings.device.type == "cuda"
        return DistributedDataParallel(
            self.module,
            device_ids=[self.settings.device] if cuda else None,
            process_group=self.settings.group,
            find_unused_parameters=self.settings.find_unused_parameters,
            init_sync=False,  # wrap() has broadcast parameters and buffers, non-persistent ones too
            **self.settings.options,
        )

    def _on_trainable_changed(self, changed: list[str]) -> None:
        # DDP fixes its set of parameters when built: one unfrozen later would never be reduced, in silence, and the
        # ranks would drift apart (torch 2.13).
        self.engine = self._shard()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        if isinstance(self.engine, torch.nn.parallel.DistributedDataParallel):
            with self.engine.no_sync():
                yield
        else:
            yield
