"""The buffers of a wrapped model: rank 0's on every rank, in the user's dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from fsshard.backends.base import Backend
from fsshard.comm.broadcast import broadcast_tensors

__all__ = ["ModelBuffers", "buffer_dtype", "buffer_for_user", "mark_buffers_differ", "sync_buffers"]


class ModelBuffers:
    """Whether the ranks' buffers may differ, and which dtypes users gave them.

    Attributes:
        differ: a forward in training may have made them differ since they were last sent.
        dtypes: the user's, by name, of those that mixed precision holds in another one.
    """

    def __init__(self, backend: Backend, broadcast: bool, dtypes: Mapping[str, torch.dtype] | None) -> None:
        self._backend = backend
        self._broadcast = broadcast
        self.dtypes = dict(dtypes or {})
        self.differ = False

    def sync(self, *, then_differ: bool = False) -> None:
        """Rank 0's buffers to all, where a training forward may have made them differ (as DDP does)."""
        group = self._backend.settings.group
        if self.differ and self._broadcast and group is not None and group.size() > 1:
            broadcast_tensors(self._backend.buffers(), group)
        self.differ = then_differ

    def for_user(self, key: str, value: Any, *, offload_to_cpu: bool = False) -> Any:
        """A copy of a buffer, or an extra state itself, as a state dict has it under ``key``."""
        if not isinstance(value, Tensor):
            return value
        kept = value.detach().to("cpu" if offload_to_cpu else value.device, copy=True)
        return kept.to(self.dtypes[key]) if key in self.dtypes else kept


class _HoldsBuffers(Protocol):
    """A :class:`~fsshard.sharded.module.ShardedModule`, which stands on this module."""

    _held_buffers: ModelBuffers


def sync_buffers(model: _HoldsBuffers) -> None:
    """Give every rank rank 0's buffers where they may differ, as before a state dict is made. Collective."""
    model._held_buffers.sync()


def mark_buffers_differ(model: _HoldsBuffers) -> None:
    """Let the next forward send rank 0's buffers, as after one in training."""
    model._held_buffers.differ = True


def buffer_dtype(model: _HoldsBuffers, key: str, buffer: Tensor) -> torch.dtype:
    """The dtype that a state dict gives a buffer, which mixed precision may hold in another one."""
    return model._held_buffers.dtypes.get(key, buffer.dtype)


def buffer_for_user(model: _HoldsBuffers, key: str, buffer: Tensor) -> Tensor:
    """A copy of a buffer as a state dict has it."""
    return cast(Tensor, model._held_buffers.for_user(key, buffer))
