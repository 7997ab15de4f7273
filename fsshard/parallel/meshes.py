"""The roles of the dimensions of a device mesh, told by their names.

The names are those of torch's tutorials, torchtitan, accelerate, PhysicsNeMo and NERSC's scripts. A name that is not
known here says nothing.
"""

from __future__ import annotations

import warnings
from typing import Any

from fsshard.errors import ConfigurationError

REPLICAS = frozenset({"replicate", "replica", "replicas", "dp_replicate", "data_replicate", "ddp"})
"""Dimensions along which all ranks hold the same, and see other samples."""

SHARDS = frozenset({"shard", "shards", "dp_shard", "data_shard", "fsdp"})
"""Dimensions along which parameters, gradients or optimizer states are divided, and ranks see other samples."""

DATA = frozenset({"data", "dp", "data_parallel", "batch"})
"""Dimensions along which ranks see other samples."""

SHARDS_OF_PARTS = frozenset({"dp_shard_cp", "dp_cp", "fsdp_cp"})
"""torchtitan's and accelerate's flattened dimensions: parameters are divided, and some of its ranks share samples."""

OTHER_MODULES = frozenset(
    {"pp", "pipe", "pipeline", "pipeline_parallel", "stage", "ep", "etp", "expert", "expert_parallel"}
)
"""Dimensions of MODEL along which ranks hold other modules, or other experts: of a model's own parameters they know
nothing."""

MODEL = frozenset(
    {"tp", "tensor", "tensor_parallel", "model", "model_parallel", "mp"}
    | {"cp", "context", "context_parallel", "sp", "sequence", "sequence_parallel", "ring", "ulysses"}
    | {"domain", "domain_parallel", "spatial", "spatial_parallel", "dx", "dy", "dz"}
    | OTHER_MODULES
)
"""Dimensions along which ranks share samples: each has a part of the model, or of every sample."""

_ROLES = {"replicas": REPLICAS, "shards": SHARDS | SHARDS_OF_PARTS, "data": DATA, "model": MODEL}


def role_of(name: str) -> str | None:
    """Return ``"replicas"``, ``"shards"``, ``"data"`` or ``"model"`` for a dimension's name; None if it is unknown."""
    plain = _plain(name)
    for role, names in _ROLES.items():
        if plain in names:
            return role
    return None


def shares_samples(name: str) -> bool:
    """Return whether a dimension's ranks see the same samples: each has a part of the model, or of every sample."""
    return role_of(name) == "model" and _plain(name) not in OTHER_MODULES


def is_flattened_with_parts(name: str) -> bool:
    """Return whether some of a dimension's ranks see the same samples, and others not."""
    return _plain(name) in SHARDS_OF_PARTS


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def shape_text(mesh: Any) -> str:
    """Return a mesh for people, such as ``"a mesh (data=2, tp=2)"``."""
    texts = list(map(str, mesh.shape))
    names = _names(mesh)
    if names:
        texts = [f"{name}={size}" for name, size in zip(names, texts, strict=True)]
    return f"a mesh ({', '.join(texts)})"


def _names(mesh: Any) -> tuple[str, ...]:
    return tuple(mesh.mesh_dim_names or ())


def data_dimensions(mesh: Any) -> list[str]:
    """Return the names of the dimensions of a mesh along which ranks see other samples."""
    return [name for name in _names(mesh) if role_of(name) in ("replicas", "shards", "data")]


def data_slice(mesh: Any) -> str:
    """Return how a user takes the dimensions of data out of ``mesh``, by names that it has; for errors."""
    names = _names(mesh)
    data = data_dimensions(mesh)[:2]
    if not data:
        others = [name for name in names if role_of(name) != "model"]
        data = others[:1] or ["data"]
    hint = "" if names else ", once the mesh has mesh_dim_names="
    return f"mesh[{', '.join(map(repr, data))}]{hint}"


def data_mesh(mesh: Any, *, hybrid: bool) -> Any:
    """A mesh of one dimension as it is, or one of replicas and shards, with names; warns where they do not say so.

    Args:
        mesh: a ``DeviceMesh`` of any number of dimensions; of one it may have any name. What is none is given back.
        hybrid: hybrid sharding was asked for by its name, so that the dimensions may have any name but those of
            dimensions that split the model.

    Raises:
        ConfigurationError: a dimension splits the model; or there are more than two; or they are the wrong way round.
    """
    if not hasattr(mesh, "mesh_dim_names") or mesh.ndim == 1:
        return mesh
    _check(mesh, hybrid)
    if _names(mesh):
        return mesh
    # "Cannot flatten a DeviceMesh without mesh_dim_names!" (torch 2.13), and fully_shard wants them too.
    if not hasattr(mesh, _NAMED):
        from torch.distributed.device_mesh import DeviceMesh

        setattr(mesh, _NAMED, DeviceMesh(mesh.device_type, mesh.mesh, mesh_dim_names=("replicate", "shard")))
    return getattr(mesh, _NAMED)


_NAMED = "_fsshard_named"
"""Attribute of a mesh: the same with names, so that its groups are made once."""


def _check(mesh: Any, hybrid: bool) -> None:
    names = _names(mesh)
    roles = list(map(role_of, names))
    splits = [name for name in names if role_of(name) == "model"]
    if splits or mesh.ndim != 2:
        why = "expected a 1-D DeviceMesh slice, or a 2-D one (replicas, shards)"
        if splits:
            verb = "split" if len(splits) > 1 else "splits"
            dimensions = " and ".join(map(repr, splits))
            why = f"{dimensions} {verb} the model, and wrap shares work among ranks that see different samples"
        raise ConfigurationError(f"device_mesh={shape_text(mesh)}: {why}; pass device_mesh={data_slice(mesh)}")
    first, second = roles or (None, None)
    if first == "shards" and second != "shards":
        raise ConfigurationError(
            f"device_mesh={shape_text(mesh)}: expected replicas first and shards second, as torch takes them; make it "
            f"with mesh_dim_names=({names[1]!r}, {names[0]!r})"
        )
    if hybrid or (first in ("replicas", "data") and second == "shards"):
        return
    # One rank speaks for all of its mesh.
    if not any(mesh.get_coordinate() or ()):
        warnings.warn(
            f"device_mesh={shape_text(mesh)} is taken as (replicas, shards): every rank sees different samples. If "
            "this is intended, name its dimensions mesh_dim_names=('replicate', 'shard') or pass "
            f"sharding_strategy='HYBRID_SHARD'; if not, pass a 1-D slice such as {data_slice(mesh)}",
            # The line of whoever called wrap().
            stacklevel=6,
        )
