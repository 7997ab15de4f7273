"""The meshes over which the ranks of a job can be arranged: what ``meshes=`` of :func:`fsshard.tune` means."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from fsshard.errors import ConfigurationError
from fsshard.parallel.meshes import role_of
from fsshard.recipes.recipe import check_mesh


def arrangements(meshes: Any, world_size: int) -> list[dict[str, int]]:
    """Return the meshes that ``meshes=`` of :func:`fsshard.tune` means for this many ranks.

    Raises:
        ConfigurationError: they are no meshes, or have another number of ranks.
    """
    if not isinstance(meshes, (list, tuple)) or not meshes:
        raise ConfigurationError(
            f'meshes={meshes!r}: expected names of dimensions such as ("replicate", "shard"), or a list of sizes by '
            'name, such as [{"replicate": 2, "shard": 4}]'
        )
    if all(isinstance(each, str) for each in meshes):
        if len(set(meshes)) < len(meshes):
            raise ConfigurationError(f"meshes={meshes!r}: expected each dimension once; name them differently")
        return list(_all_arrangements(meshes, world_size))
    sizes_by_name = list(map(check_mesh, meshes))
    for sizes in sizes_by_name:
        if math.prod(sizes.values()) != world_size:
            raise ConfigurationError(f"meshes=: {sizes} has not world_size={world_size} ranks")
    return sizes_by_name


def _all_arrangements(names: Sequence[str], world_size: int) -> Iterator[dict[str, int]]:
    """Yield all sizes of these dimensions, in all orders; the last dimension's ranks are neighbours."""
    seen = set()
    for order in itertools.permutations(names):
        if not _replicas_consist_of_shards(order):
            continue
        for sizes in _factorisations(world_size, len(order)):
            sizes_by_name = dict(zip(order, sizes, strict=True))
            mesh = check_mesh(sizes_by_name)
            # The place of a dimension of one rank makes no difference.
            key = tuple((name, size) for name, size in mesh.items() if size > 1)
            if key not in seen:
                seen.add(key)
                yield mesh


def _replicas_consist_of_shards(order: Sequence[str]) -> bool:
    """Return whether replicas come before shards, as torch has it, where there are both."""
    roles = list(map(role_of, order))
    if "replicas" not in roles or "shards" not in roles:
        return True
    return roles.index("replicas") < roles.index("shards")


def _factorisations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    divisors = [size for size in range(1, number + 1) if number % size == 0]
    for sizes in itertools.product(divisors, repeat=count):
        if math.prod(sizes) == number:
            yield sizes
