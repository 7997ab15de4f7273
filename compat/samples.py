"""Which samples a rank is given by the samplers that Lightning makes, where some ranks have to see the same ones."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

import fsshard
from fsshard.parallel.data_rank import DataRank

__all__ = ["sampler_arguments", "split_over"]


def split_over(model: nn.Module | None) -> Any:
    """Return what :func:`fsshard.parallel.shard_domain` made of the model; None: its samples are whole."""
    sharding = sys.modules.get("fsshard.parallel.domain.sharding")  # not imported: nothing is split, nor needed for it
    return None if sharding is None or model is None else sharding.domain_of(model)


def sampler_arguments(
    settings: Mapping[str, Any], model: nn.Module | None, lightnings: dict[str, Any] | None
) -> dict[str, Any] | None:
    """Return a ``DistributedSampler``'s ``num_replicas`` and ``rank``. Collective where a domain splits the model.

    Args:
        settings: further arguments of :func:`fsshard.wrap`, of which ``device_mesh`` is asked.
        model: whose domain is asked then, if it is known.
        lightnings: what Lightning would take: all ranks.

    Raises:
        ConfigurationError: the mesh's dimensions have names that do not tell which are for data.
    """
    mesh, domain = settings.get("device_mesh"), split_over(model)
    if mesh is not None and (mesh.mesh_dim_names or mesh.ndim == 1):
        found = fsshard.data_rank(mesh)
    elif mesh is None and domain is not None:
        found = _among_domains(domain)
    else:  # replicas and shards, whose dimensions need no names
        return lightnings
    return {"num_replicas": found.size, "rank": found.rank}


def _among_domains(domain: Any) -> DataRank:
    """Return the place of this rank's domain among all, in the order of their first ranks."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [axis.ranks for axis in domain.axes])
    firsts = [min(first for rank in axes[0] for first in everyone[rank][-1]) for axes in everyone]
    domains = sorted(set(firsts))
    return DataRank(domains.index(firsts[dist.get_rank()]), len(domains))
