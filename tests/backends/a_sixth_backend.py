"""A backend from outside of the package, all of it in this file: gradients averaged by hand."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn

from fsshard.backends import Backend, EngineFacts, register_backend


@register_backend
class HandAveraged(Backend):
    """Replicas whose gradients are averaged one by one, as soon as each is there."""

    name: ClassVar[str] = "by_hand"
    facts: ClassVar[EngineFacts] = EngineFacts(strategies=("NO_SHARD",))

    def shard(self) -> nn.Module:
        self._silent = False
        this = weakref.ref(self)  # torch hides its hooks from the garbage collector

        def average(parameter: torch.Tensor) -> None:
            if (backend := this()) is not None:  # else the model is trained on without it
                backend._average(parameter)

        for entry in self.entries.values():
            if entry.parameter.requires_grad:
                entry.parameter.register_post_accumulate_grad_hook(average)
        return self.module

    def _average(self, parameter: torch.Tensor) -> None:
        if self._silent or parameter.grad is None or self.settings.group is None:
            return
        parameter.grad.div_(self.settings.world_size)
        dist.all_reduce(parameter.grad, group=self.settings.group)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self._silent = True
        try:
            yield
        finally:
            self._silent = False
