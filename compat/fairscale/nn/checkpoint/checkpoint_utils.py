"""Batch normalization that counts a batch once, for hand-written checkpointing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fsshard.torch_private.modules import BatchNorm

from ....not_served import missing_from

__all__ = ["patch_batchnorm"]

__getattr__ = missing_from(__name__)

_KEPT = "_track_running_stats_backup"


def patch_batchnorm(module: nn.Module) -> list[RemovableHandle]:
    """Stop the batch normalizations in a module from tracking statistics while gradients are disabled.

    A reentrant checkpoint runs its first forward without gradients, and the statistics would be updated twice.
    :func:`checkpoint_wrapper` does not need this: it would also stop the statistics of a forward in training mode under
    ``no_grad``, which the plain module updates. Layers with an attribute ``disable_patch_batchnorm`` are left alone.

    Returns:
        Handles of the hooks, two a layer; ``remove()`` of all of them undoes it.
    """
    handles = []
    for child in module.modules():
        if isinstance(child, BatchNorm) and not hasattr(child, "disable_patch_batchnorm"):
            handles.append(child.register_forward_pre_hook(_stop_tracking))
            # always_call: without it a forward that raises leaves the layer without statistics for good
            handles.append(child.register_forward_hook(_go_on_tracking, always_call=True))
    return handles


def _stop_tracking(layer: nn.Module, inputs: Any) -> None:
    if not torch.is_grad_enabled() and _KEPT not in layer.__dict__:
        layer.__dict__[_KEPT] = layer.track_running_stats
        layer.__dict__["track_running_stats"] = False


def _go_on_tracking(layer: nn.Module, inputs: Any, output: Any) -> None:
    if _KEPT in layer.__dict__:
        layer.__dict__["track_running_stats"] = layer.__dict__.pop(_KEPT)
