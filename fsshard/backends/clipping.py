"""torch's own gradient clipping where a rank holds parts of the gradients, or only some of them.

``torch.nn.utils.clip_grad_norm_(model.parameters(), c)`` takes the norm of the gradients that this rank has. Under
FairScale's OSS these are its own parameters', so that each rank scales its part by another factor, silently; over the
shards of ``model.module.parameters()`` under FSDP1, the same; and under FSDP2 a rank without a row of a parameter fails
where the others wait (``inf``, torch 2.13). Here parameters of a wrapped model count with the norm over all ranks, and
complex ones by their modulus even where they are stored as pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fsshard.backends.base import Backend
from fsshard.backends.whole import counted_over_ranks, owned
from fsshard.complex_params.shown import stored_of
from fsshard.oss.norm_and_scaling import combined, exchanged
from fsshard.patches import CLIP_GRAD_NORM
from fsshard.planning.entries import Entry

# By the place of a parameter among those that are clipped.
Entries = dict[int, Entry]
Norms = dict[int, Tensor]


def count_all_ranks(model: Any) -> None:
    """Let ``clip_grad_norm_`` count the parameters of a ModelController over all ranks; it is collective for them."""
    CLIP_GRAD_NORM.keep_for(model, _norm, first=True)


@torch.no_grad()
def _norm(parameters: Sequence[Tensor], p: float, torchs: Callable[..., Tensor]) -> Tensor | None:
    """Return the norm over everything that was given; None where no wrapped model has any of it. Collective."""
    owners = _owners()
    norms = {}
    by_model: dict[Any, Entries] = {}
    # In dtype and device, as the user sees them.
    like = list(parameters)
    for place, parameter in enumerate(parameters):
        stored = stored_of(parameter)
        owner = owners.get(id(stored))
        if owner is not None:
            model, entry = owner
            of_model = by_model.setdefault(model, {})
            of_model[place] = entry
            device = model.backend.settings.device
            like[place] = torch.empty(0, dtype=entry.dtype, device=device)
        elif parameter.grad is not None:
            norms[place] = _each(parameter.grad, p, torchs)
    if not by_model:
        return None
    for model, entries in by_model.items():
        model.check_knows_all_ranks("torch.nn.utils.clip_grad_norm_")
        model.finish_gradients(entries.values())
        # The norm over other mesh dimensions: the same sets of parameters on all ranks, in one order.
        is_divided = model.backend.facts.divides == "elements"
        if is_divided or any(entry.divided_over for entry in model.backend.all):
            # One for all of them.
            first = min(entries)
            norms[first] = model.norm_of(entries.values(), p)
        else:
            norms |= _of_owners(model.backend, entries, p, torchs)
    total = combined(norms, like, p)
    return _as_torchs(total, parameters)


def _owners() -> dict[int, tuple[Any, Entry]]:
    """Return by a parameter's identity the wrapped model, and the entry, that is counted over all ranks."""
    owners = {}
    for model in CLIP_GRAD_NORM.needing(_norm):
        for entry in counted_over_ranks(model.backend):
            key = id(entry.parameter)
            owners[key] = (model, entry)
    return owners


def _of_owners(backend: Backend, entries: Entries, p: float, torchs: Any) -> Norms:
    """Return the norm of each gradient, from the rank that has it, computed as torch computes it there."""
    norms = {}
    for place, entry in entries.items():
        gradient = entry.grad()
        if gradient is None or not owned(backend, entry):
            continue
        detached = gradient.detach()
        numbers = entry.kind.to_user(detached)
        if gradient.is_sparse:
            # torch's own norm has no kernel for sparse gradients.
            coalesced = gradient.coalesce()
            numbers = coalesced.values()
        norms[place] = _each(numbers, p, torchs)
    if backend.facts.divides == "nothing" or backend.settings.world_size == 1:
        return norms
    own = {place: norm.item() for place, norm in norms.items()}
    # All entries of an engine are divided among the same ranks.
    first, *_ = entries.values()
    group: Any = first.group
    device = backend.settings.device
    everywhere = {}
    places = max(entries) + 1
    norms_of_owners = exchanged(own, places, group, device)
    for place, norm in norms_of_owners.items():
        dtype = entries[place].dtype.to_real()
        everywhere[place] = torch.tensor(norm, dtype=dtype, device=device)
    return everywhere


def _each(gradient: Tensor, p: float, torchs: Any) -> Tensor:
    norm: Tensor = torchs([gradient], p, False)
    if hasattr(norm, "full_tensor"):
        norm = norm.full_tensor()
    return norm


def _as_torchs(total: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return ``total`` as torch does, a DTensor where all gradients are: scripts for FSDP2 call ``full_tensor()``."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    are_dtensors = all(hasattr(gradient, "full_tensor") for gradient in gradients)
    if not gradients or not are_dtensors:
        return total
    from torch.distributed.tensor import DTensor, Replicate

    meshes = {gradient.device_mesh for gradient in gradients if isinstance(gradient, DTensor)}
    if len(meshes) != 1:
        return total
    mesh = meshes.pop()
    placements = [Replicate()] * mesh.ndim
    return DTensor.from_local(total, mesh, placements, run_check=False)
