"""backend="ddp": torch's DistributedDataParallel. Everything whole on every rank, gradients averaged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from fsshard.backends.base import Backend
from fsshard.errors import ModelError

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
        engine = DistributedDataParallel(
            self.module,
            device_ids=[self.settings.device] if cuda else None,
            process_group=self.settings.group,
            find_unused_parameters=self.settings.find_unused_parameters,
            forward_sync_buffers=False,  # ShardedModule does it, alike for every backend
            init_sync=False,  # wrap() has broadcast parameters and buffers, non-persistent ones too
            **self.settings.options,
        )
        if not self.settings.options.get("static_graph"):  # there a tied parameter may well arrive twice
            self._watch_second_backward(engine)
        return engine

    def _watch_second_backward(self, engine: torch.nn.parallel.DistributedDataParallel) -> None:
        """A second backward after one forward is not reduced: the ranks would drift apart in silence (torch 2.13)."""
        self._arrived: set[nn.Parameter] = set()
        for hook in getattr(self, "_hooks", []):
            hook.remove()

        def arrived(parameter: nn.Parameter) -> None:
            if not engine.require_backward_grad_sync:
                return
            if parameter in self._arrived:
                raise ModelError(
                    "a second backward() since the last forward: DistributedDataParallel reduces the first one only; "
                    "add the losses and call backward() once, put all but the last backward under model.no_sync(), or "
                    "use backend='fsdp2' or 'fairscale'"
                )
            self._arrived.add(parameter)

        trainable = [entry.parameter for entry in self.entries.values() if entry.parameter.requires_grad]
        self._hooks: list[Any] = [parameter.register_post_accumulate_grad_hook(arrived) for parameter in trainable]

    def before_forward(self, *, training: bool) -> None:
        super().before_forward(training=training)
        if torch.is_grad_enabled() and hasattr(self, "_arrived"):
            self._arrived.clear()

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
