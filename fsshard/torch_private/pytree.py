"""torch's own traversal of nested containers, which knows those that users have registered with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsshard.torch_private.registry import Area

__all__ = ["tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]

AREA = Area("pytree")
_WHERE = {
    "source": "torch/utils/_pytree.py",
    "otherwise": "nothing looks into nested containers: no watching of parameters, no estimate, no recomputation",
}

tree_flatten: Callable[[Any], tuple[list[Any], Any]] = AREA.take(
    "torch.utils._pytree:tree_flatten", use="the leaves, and what they lay in", **_WHERE
)
tree_leaves: Callable[[Any], list[Any]] = AREA.take("torch.utils._pytree:tree_leaves", use="the leaves", **_WHERE)
tree_map: Callable[[Callable[[Any], Any], Any], Any] = AREA.take(
    "torch.utils._pytree:tree_map", use="the same containers, with other leaves", **_WHERE
)
tree_unflatten: Callable[[Any, Any], Any] = AREA.take(
    "torch.utils._pytree:tree_unflatten", use="the containers again", **_WHERE
)

# ------------------------------------------------------------------------------------------------ counted on

AREA.stands_on(
    "torch.utils._pytree:TreeSpec",
    why="in which order containers are taken apart",
)
