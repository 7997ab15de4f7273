"""Clipping of final gradients, and their scale, for other people's trainers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

import fsshard
from fsshard.errors import ConfigurationError
from fsshard.planning.entries import Entry
from fsshard.sharded.module import ShardedModule

__all__ = ["check_scaler", "clip_by_value", "scaler_like"]


def clip_by_value(model: ShardedModule, limit: float, chosen: Iterable[Entry] | None = None) -> None:
    """Put every number of the final gradients between -limit and limit. Collective.

    Args:
        model: wrapped.
        limit: above 0.
        chosen: some of its parameters, the same ones on every rank; None: all.

    Raises:
        ConfigurationError: a parameter is complex.
    """
    entries = list(model.backend.entries.values() if chosen is None else chosen)
    named = next((entry.name for entry in entries if entry.kind.is_complex), None)
    if named is not None:  # as torch: "clamp is not supported for complex types"
        raise ConfigurationError(
            f"clipping by value: parameter {named!r} is complex, and complex numbers have no order; clip by norm"
        )
    model.finish_gradients(entries)
    for entry in entries:
        gradient = entry.grad()
        if gradient is not None:
            gradient.clamp_(-limit, limit)


def check_scaler(scaler: Any) -> None:
    """Raise if :func:`scaler_like` cannot replace a scaler.

    Raises:
        ConfigurationError: it is of a user's own kind.
    """
    known = (torch.amp.GradScaler, torch.cuda.amp.GradScaler, torch.cpu.amp.GradScaler, fsshard.GradScaler)
    if scaler is not None and type(scaler) not in known:
        raise ConfigurationError(
            f"scaler {type(scaler).__name__}(...): ranks with parts of the gradients need fsshard's "
            "scaler, which takes over the settings of a torch.amp.GradScaler, and of no other kind"
        )


def scaler_like(scaler: Any, model: ShardedModule) -> fsshard.GradScaler:
    """Return a scaler for all ranks, with another's scale, factors and interval.

    Raises:
        ConfigurationError: see :func:`check_scaler`.
    """
    check_scaler(scaler)
    found = fsshard.GradScaler(model, enabled=scaler.is_enabled())
    if scaler.is_enabled():
        found.load_state_dict(scaler.state_dict())
    return found
