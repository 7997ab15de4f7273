"""A front's own calls, for errors whose words are of ``fsshard.wrap``."""

from __future__ import annotations

from fsshard.sharded.module import ShardedModule

__all__ = ["name_calls"]


def name_calls(model: ShardedModule, save: str, load: str) -> None:
    """Let errors about whole weights name the calls of a front, whose users have called no ``wrap``.

    Args:
        model: what ``wrap`` returned to the front.
        save: how its users save them.
        load: how its users load them.
    """
    if model.backend.guard is not None:
        model.backend.guard.save, model.backend.guard.load = save, load
