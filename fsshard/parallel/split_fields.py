"""Checks that a model whose fields are split (``shard_domain``) is wrapped over all ranks that it needs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from fsshard.complex_params.layouts import Layout, Shared
from fsshard.complex_params.slots import ParameterSlot
from fsshard.errors import ConfigurationError
from fsshard.parallel.model_mesh import ModelMesh
from fsshard.parallel.replicas import layouts_by_name

__all__ = ["check_split_fields"]


def check_split_fields(
    model: nn.Module, slots: Sequence[ParameterSlot], data: dist.ProcessGroup, mesh: ModelMesh | None
) -> None:
    """Raise unless gradients, of which each rank has a part, are averaged over the model's domain. Local."""
    sharding: Any = sys.modules.get("fsshard.parallel.domain.sharding")  # without it no model is split
    domain = None if sharding is None else sharding.domain_of(model)
    if domain is None or not domain.attached:
        return
    ranks = set(dist.get_process_group_ranks(data))
    layouts = dict.fromkeys((slot.name for slot in slots), ()) if mesh is None else layouts_by_name(slots, mesh)
    for axis in domain.axes:
        if axis.size == 1 or set(axis.ranks) <= ranks:
            continue
        left = [name for name, found in layouts.items() if not any(_averages(each, axis.ranks) for each in found)]
        if left:
            raise ConfigurationError(
                f"the model's fields are split over ranks {list(axis.ranks)} (shard_domain), and the group of data has "
                f"{sorted(ranks & set(axis.ranks))} of them only, so that nobody averages their gradients "
                f"({left[0]!r}, ...): wrap over all ranks of data and domain, leaving device_mesh out; or, with "
                "shard_domain(weights='modes'), pass replicated=domain.replicated"
            )


def _averages(layout: Layout, ranks: Sequence[int]) -> bool:
    """Return whether a gradient is averaged over these ranks, or each has its own part of the parameter."""
    groups = [*layout.divides, *(layout.shares if isinstance(layout, Shared) and layout.mean else ())]
    return any(tuple(dist.get_process_group_ranks(group)) == tuple(ranks) for group in groups)
