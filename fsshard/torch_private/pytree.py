"""torch's own traversal of nested containers, which knows those that users have registered with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsshard.torch_private.registry import Area

__all__ = ["tree_flatten", "tree_leaves", "tree_map"]

AREA = Area("pytree")
tree_flatten: Callable[[Any], tuple[list[Any], Any]] = AREA.take(
    "torch.utils._pytree:tree_flatten",
    use="the leaves, and what they lay in",
    source="torch/utils/_pytree.py",
    otherwise="nothing looks into nested containers: no watching of parameters, no estimate, no recomputation",
)


def tree_leaves(tree: Any) -> list[Any]:
    """Return what lies in nested containers, in order."""
    return tree_flatten(tree)[0]


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return the same containers with ``function(leaf)`` in place of each leaf."""
    leaves, structure = tree_flatten(tree)
    return structure.unflatten(map(function, leaves))


# ------------------------------------------------------------------------------------------------ counted on

AREA.stands_on(
    "torch.utils._pytree:TreeSpec",
    why="in which order containers are taken apart",
)
