"""What all parts of a backend have in common: facts about the engine, and what it holds of one model."""

from __future__ import annotations

import contextlib
import weakref
from abc import ABC
from collections.abc import Callable
from typing import ClassVar

from torch import Tensor, nn

from fsshard.backends.facts import EngineFacts
from fsshard.backends.partial_state_guards import PartsGuard
from fsshard.backends.settings import Settings
from fsshard.planning.entries import Entry

__all__ = ["EngineState"]


class EngineState(ABC):
    """What the parts of a backend share.

    Attributes:
        module: the user's model, complex parameters stored as pairs of reals.
        settings: what ``wrap`` was asked for.
        entries: the distinct parameters by name; ``all`` is the list of them.
        pending: the hooks on the outputs of forwards with gradients that await their backward.
        drops: names of the parameters whose gradient was dropped since a backward has begun.
        guard: refuses state dicts of a module that holds parts of parameters; None where it holds all.
        follower: a weak reference to the method that makes the context of ``relocating_storage``, or None.
    """

    name: ClassVar[str]
    facts: ClassVar[EngineFacts] = EngineFacts()

    module: nn.Module
    settings: Settings
    entries: dict[str, Entry]
    all: list[Entry]
    pending: weakref.WeakSet[Callable[[Tensor], None]]
    drops: set[str]
    guard: PartsGuard | None
    follower: weakref.WeakMethod[Callable[[], contextlib.AbstractContextManager[None]]] | None

    @classmethod
    def keeps_grad_dtype(cls) -> bool:
        """Whether gradients of real parameters have the dtype that ``Tensor.grad_dtype`` asks for."""
        return False
