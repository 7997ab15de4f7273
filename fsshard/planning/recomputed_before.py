"""Blocks that were checkpointed before the model is planned, by whatever library."""

from __future__ import annotations

import functools

from torch import nn

from fsshard.torch_private.modules import CHECKPOINTED

__all__ = ["RecomputingForward", "is_fairscale_forward", "recognised"]


class RecomputingForward:
    """Stands in the place of a module's ``forward``, and computes it again in the backward pass.

    Attributes:
        origin: who put it there, in words.
    """

    origin: str


def recognised(module: nn.Module) -> str:
    """By what ``module`` is recomputed already, ``""`` if by nothing that is known here."""
    forward = module.__dict__.get("forward")
    if isinstance(forward, RecomputingForward):
        return f"{forward.origin}, before wrap"
    if is_fairscale_forward(forward):
        return "FairScale's checkpoint_wrapper, before wrap"
    if CHECKPOINTED in module._modules:
        return "torch's checkpoint_wrapper, before wrap"
    kinds = {cls.__name__ for cls in type(module).__mro__}  # transformers, told without importing it
    if "GradientCheckpointingLayer" in kinds and getattr(module, "gradient_checkpointing", False):
        return "the model's own gradient checkpointing"
    return ""


def is_fairscale_forward(forward: object) -> bool:
    """Return whether this is what FairScale 0.4.13's ``checkpoint_wrapper`` puts in the place of ``forward``."""
    function = forward.func if isinstance(forward, functools.partial) else None
    return getattr(function, "__module__", "").startswith("fairscale.nn.checkpoint.")
