"""Clipping of final gradients, for the Trainer's strategy and for Fabric's."""

from __future__ import annotations

from fsshard.errors import ConfigurationError
from fsshard.sharded.module import ShardedModule

__all__ = ["clip_by_value"]


def clip_by_value(model: ShardedModule, limit: float) -> None:
    """Put every number of the final gradients between -limit and limit. Collective.

    Raises:
        ConfigurationError: a parameter is complex.
    """
    entries = list(model.backend.entries.values())
    named = next((entry.name for entry in entries if entry.kind.is_complex), None)
    if named is not None:  # as torch: "clamp is not supported for complex types"
        raise ConfigurationError(
            f"clipping by value: parameter {named!r} is complex, and complex numbers have no order; clip by norm"
        )
    model.finish_gradients(entries)
    for entry in entries:
        gradient = model.backend.local_grad(entry)
        if gradient is not None:
            gradient.clamp_(-limit, limit)
