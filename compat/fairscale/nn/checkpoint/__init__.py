"""``fairscale.nn.checkpoint``: activation checkpointing in place, on torch's non-reentrant one."""

from __future__ import annotations

from ....not_served import missing_from
from .checkpoint_activations import (
    checkpoint_wrapper,
    disable_checkpointing,
    is_checkpointing,
    is_checkpointing_disabled,
    is_recomputing,
)
from .checkpoint_utils import patch_batchnorm

__all__ = [
    "checkpoint_wrapper",
    "disable_checkpointing",
    "is_checkpointing",
    "is_checkpointing_disabled",
    "is_recomputing",
    "patch_batchnorm",
]

__getattr__ = missing_from(__name__)
