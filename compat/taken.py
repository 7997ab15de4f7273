"""A model that a Trainer has put under an engine, and that can come back from it; used by those of Lightning and HF."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fsshard.sharded.handing_back import Bare
from fsshard.sharded.module import ShardedModule

__all__ = ["MARK", "Taken", "taken_of"]

MARK = "_fsshard_taken"


@dataclass
class Taken:
    """An engine's hold on a model, kept by the model itself, so that it is there for as long as that.

    Attributes:
        wrapped: what ``fsshard.wrap`` made of it, just now.
        bare: what it was like before.
    """

    wrapped: ShardedModule
    bare: Bare

    def __post_init__(self) -> None:
        self.bare.wrapped()
        vars(self.wrapped.module)[MARK] = self

    def come_back(self) -> None:
        """Let the model be plain again, with whole weights in host memory. Collective."""
        self.bare.hand_back(self.wrapped)
        vars(self.wrapped.module).pop(MARK, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return None: no engine holds a copy of the model."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def taken_of(model: Any) -> Any:
    """Return the :class:`Taken` of a model that a Trainer of ours has put under an engine and kept, else None."""
    return getattr(model, "__dict__", {}).get(MARK)
