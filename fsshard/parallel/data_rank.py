"""Number a rank among those that see other samples, for samplers and loaders."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch.distributed as dist

from fsshard.errors import ConfigurationError
from fsshard.parallel.meshes import data_slice, is_flattened_with_parts, role_of, shape_text


class DataRank(NamedTuple):
    """A rank's place among those that see other samples."""

    # Which of the ``size`` parts of every batch it sees, from 0 on.
    rank: int
    # Into how many parts a batch is divided.
    size: int


def data_rank(mesh: Any = None) -> DataRank:
    """This rank's number, and how many there are, along the dimensions of a mesh whose ranks see other samples. Local.

    Ranks that differ only in other dimensions (``"tp"``, ``"cp"``, ``"domain"``, ...) get the same answer, and have to
    be given the same samples: ``DistributedSampler(dataset, num_replicas=found.size, rank=found.rank)``. Several data
    dimensions count in the order of the mesh, the last one fastest.

    Args:
        mesh: a ``DeviceMesh``: a 1-D slice of data ranks, one of replicas and shards, or a whole one with names for its
            dimensions. None: all ranks see other samples.

    Raises:
        ConfigurationError: the names of the dimensions do not say which are for data, or this rank is not in the mesh.
    """
    if mesh is None:
        if dist.is_initialized():
            return DataRank(dist.get_rank(), dist.get_world_size())
        return DataRank(0, 1)
    if not hasattr(mesh, "get_coordinate") or not getattr(mesh, "ndim", 0):
        raise ConfigurationError(f"data_rank({mesh!r}): expected a DeviceMesh, or None for all ranks")
    chosen = _dimensions(mesh)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ConfigurationError(f"data_rank: rank {dist.get_rank()} is not in {shape_text(mesh)}")
    rank = 0
    shape = tuple(mesh.shape)
    for dim in chosen:
        rank = rank * shape[dim] + coordinate[dim]
    return DataRank(rank, math.prod(shape[dim] for dim in chosen))


def _dimensions(mesh: Any) -> list[int]:
    """The numbers of the dimensions whose ranks see other samples."""
    names = tuple(mesh.mesh_dim_names or ())
    roles = list(map(role_of, names))
    mixed = [name for name in names if is_flattened_with_parts(name)]
    if mixed:
        raise ConfigurationError(
            f"data_rank of {shape_text(mesh)}: along {mixed[0]!r} ranks hold other shards, and some of them see the "
            "same samples; pass the mesh before it was flattened, or a slice of its data dimensions"
        )
    if mesh.ndim == 1 and roles != ["model"]:
        # A slice, whatever its name.
        return [0]
    unknown = [name for name in names if role_of(name) is None]
    data = [dim for dim, role in enumerate(roles) if role not in (None, "model")]
    if unknown or not data:
        if unknown:
            why = f"{unknown[0]!r} does not say"
        elif names:
            why = "no dimension's name says"
        else:
            why = "nothing says"
        raise ConfigurationError(
            f"data_rank of {shape_text(mesh)}: {why} whether its ranks see the same samples; pass a 1-D slice such as "
            f"{data_slice(mesh)}, or name the dimensions (data, replicate, shard; tp, cp, pp, domain, ...)"
        )
    return data
