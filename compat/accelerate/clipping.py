"""Clipping of what users pass as parameters: a model's, some of them, or those of several models."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fsshard.complex_params.shown import stored_of
from fsshard.errors import ConfigurationError
from fsshard.planning.entries import Entry
from fsshard.sharded.module import ShardedModule

from ..trainers import clip_by_value

__all__ = ["Chosen", "clip_norm", "clip_value", "find_chosen"]

Chosen = list[tuple[ShardedModule, list[Entry]]]
"""Of each model, what is clipped."""


def find_chosen(parameters: Sequence[Tensor], models: Iterable[Any]) -> Chosen:
    """Return whose parameters these are; nothing where they are no prepared model's.

    Args:
        parameters: as a prepared model, the user's own within it or a prepared optimizer shows them.
        models: prepared.

    Raises:
        ConfigurationError: only some of them are, or a backward without synchronisation came last.
    """
    wrapped = [model for model in models if isinstance(model, ShardedModule)]
    known: dict[int, tuple[int, Entry]] = {}
    for number, model in enumerate(wrapped):
        entries = list(model.backend.entries.values())
        known |= {id(entry.parameter): (number, entry) for entry in entries}
        known |= {id(shown): (number, e) for shown, e in zip(model.parameters(), entries, strict=True)}
    found = [known.get(id(parameter)) or known.get(id(stored_of(parameter))) for parameter in parameters]
    others = found.count(None)
    if others == len(found):
        return []
    if others:
        raise ConfigurationError(
            f"{others} of {len(found)} parameters belong to no model that prepare() gave; clip them by another call"
        )
    members: dict[int, dict[str, Entry]] = {}
    for each in found:
        if each is not None:
            members.setdefault(each[0], {})[each[1].name] = each[1]
    chosen = [(wrapped[number], list(entries.values())) for number, entries in sorted(members.items())]
    if any(model.has_local_gradients for model, _ in chosen):
        raise ConfigurationError(
            "gradients are clipped once they are those of all ranks: `if accelerator.sync_gradients:` belongs before "
            "the call"
        )
    return chosen


def clip_norm(chosen: Chosen, max_norm: float, norm_type: float) -> Tensor:
    """Scale the gradients so that their norm is at most ``max_norm``; the norm before: 0-dim. Collective."""
    if len(chosen) == 1 and _covers(*chosen[0]):
        return chosen[0][0].clip_grad_norm_(max_norm, norm_type)
    for model, entries in chosen:
        model.check_knows_all_ranks("clip_grad_norm_")
        model.finish_gradients(entries)
    norms = torch.stack([model.norm_of(entries, norm_type) for model, entries in chosen])
    wide = norms.double()
    norm = (wide.max() if math.isinf(norm_type) else wide.pow(norm_type).sum().pow(1 / norm_type)).to(norms.dtype)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for _, entries in chosen:
        for entry in entries:
            gradient = entry.grad()
            if gradient is not None:
                gradient.mul_(scale.to(gradient.device, gradient.dtype))
    return norm


def _covers(model: ShardedModule, entries: Sequence[Entry]) -> bool:
    """Return whether nothing else can have a gradient."""
    names = {entry.name for entry in entries}
    return all(e.name in names for e in model.backend.entries.values() if e.parameter.requires_grad)


def clip_value(chosen: Chosen, limit: float) -> None:
    """Put every number of the gradients between -limit and limit. Collective."""
    for model, entries in chosen:
        clip_by_value(model, limit, entries)
