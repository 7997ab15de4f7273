"""What the formats of states know of a FullyShardedDataParallel; they are below it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

__all__ = ["Wrapper"]


class Wrapper(nn.Module):
    """The one subclass is FullyShardedDataParallel, whose arguments have these names too.

    Attributes:
        process_group: the ranks.
        rank: this one.
        world_size: how many there are.
        flatten_parameters: optimizers see one flat parameter, else a flat part of each.
        mixed_precision: buffers are held in ``buffer_dtype``.
        buffer_dtype: of floating buffers.
        compute_device: where parameters are whole.
        state_dict_device: of tensors in state dicts, by type.
        no_broadcast_optim_state: this wrapper's part stays out of a gathered optimizer state.
    """

    process_group: Any
    rank: int
    world_size: int
    flatten_parameters: bool
    mixed_precision: bool
    buffer_dtype: torch.dtype
    compute_device: torch.device
    state_dict_device: torch.device
    no_broadcast_optim_state: bool
    _return_full_state_dict: bool

    @property
    def module(self) -> Any:
        """The engine around the wrapped module."""
        raise NotImplementedError

    @property
    def params(self) -> list[nn.Parameter]:
        """Return what optimizers see of this wrapper."""
        raise NotImplementedError

    @property
    def _has_params(self) -> bool:
        """Return whether this wrapper shards any parameter."""
        raise NotImplementedError

    def summon_full_params(self, recurse: bool = True, volatile: bool = False) -> AbstractContextManager[Any]:
        """Show whole parameters. Collective."""
        raise NotImplementedError
