"""Marks on parameters, so that functions of torch that would silently be wrong with them raise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from fsshard.oss.gradient_norm import count_owners
from fsshard.sharded.optimizer import refuse_foreign_optimizers

__all__ = ["mark_replaced", "mark_shards"]


def mark_replaced(wrapper: nn.Module, before: Iterable[tuple[str, nn.Parameter]], now: Sequence[nn.Parameter]) -> None:
    """Let an optimizer over parameters that a wrapper has replaced by a flat one raise at its step.

    It would go on over tensors that nobody computes with, and train nothing. With ``flatten_parameters=False`` the
    parameters stay, and such an optimizer is right.
    """
    refuse_foreign_optimizers(wrapper)
    kept = {id(parameter) for parameter in now}
    for name, parameter in before:
        if id(parameter) not in kept:
            parameter._fsshard_stale = (  # type: ignore[attr-defined]
                f"parameter {name!r} was replaced by a flat one when FullyShardedDataParallel wrapped its module, so "
                "that this optimizer would train nothing; build the optimizer after wrapping, over model.parameters(), "
                "or wrap with flatten_parameters=False"
            )


def mark_shards(wrapper: nn.Module, parameters: Iterable[nn.Parameter], world_size: int) -> None:
    """Let ``torch.nn.utils.clip_grad_norm_`` over one rank's shards raise: its norm is another one on each rank."""
    if world_size == 1:
        return
    count_owners(wrapper)
    for parameter in parameters:
        parameter._fsshard_clip_with = (  # type: ignore[attr-defined]
            "call fsdp.clip_grad_norm_(max_norm): the FullyShardedDataParallel's own method, on the outermost wrapper, "
            "adds up the norms of all ranks"
        )
