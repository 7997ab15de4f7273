"""Names and shard sizes that FullyShardedDataParallel and FairScale's files share."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["INNER", "clean", "shard"]

INNER = "_fsdp_wrapped_module"
"""Attribute of what is wrapped, in FairScale's wrapper and in torch's."""

_WRAPPERS = {INNER, "_fpw_module"}


def clean(path: str) -> str:
    """A name without the levels of wrappers."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


def shard(whole: Tensor, rank: int, world_size: int) -> tuple[Tensor, int]:
    """A rank's part of a whole tensor as FairScale and FSDP1 cut it, and how many elements of it are padding."""
    chunks = list(whole.reshape(-1).chunk(world_size))
    width = chunks[0].numel()
    mine = chunks[rank] if rank < len(chunks) else chunks[0].new_empty(0)
    padding = width - mine.numel()
    return nn.functional.pad(mine.detach(), [0, padding]) if padding else mine.detach().clone(), padding
