"""torch's own gradient clipping where a rank holds parts of the gradients, or only some of them.

``torch.nn.utils.clip_grad_norm_(model.parameters(), c)`` takes the norm of the gradients that this rank has. Under
FairScale's OSS these are its own parameters', so that each rank scales its part by another factor, silently; over the
shards of ``model.module.parameters()`` under FSDP1, the same; and under FSDP2 a rank without a row of a parameter fails
where the others wait (``inf``, torch 2.13). Here parameters of a wrapped model count with the norm over all ranks, and
complex ones by their modulus even where they are stored as pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsshard.backends.whole import counts_all_ranks, owned
from fsshard.complex_params.shown import stored_of
from fsshard.oss.norm_and_scaling import exchanged
from fsshard.patches import CLIP_GRAD_NORM
from fsshard.planning.entries import Entry
from fsshard.torch_private.clip_grad import grouped_by_device_and_dtype


class _Member(NamedTuple):
    """A parameter that was given, of a wrapped model."""

    model: Any
    entry: Entry


def count_all_ranks(model: Any) -> None:
    """Let ``clip_grad_norm_`` count the parameters of a ShardedModule over all ranks; it is collective for them."""
    CLIP_GRAD_NORM.keep_for(model, _norm, first=True)


def _norm(parameters: Sequence[Tensor], norm_type: float, torchs: Callable[..., Tensor]) -> Tensor | None:
    members = _members(parameters)
    return _as_torchs(_total(parameters, members, norm_type, torchs), parameters) if any(members) else None


def _members(parameters: Sequence[Any]) -> list[_Member | None]:
    """Whose parameters, or views of parameters, these are."""
    models = CLIP_GRAD_NORM.needing(_norm)
    known = {id(entry.parameter): _Member(model, entry) for model in models for entry in model.backend.all}
    found: list[_Member | None] = []
    for parameter in parameters:
        member = known.get(id(stored_of(parameter)))
        counts = member is not None and counts_all_ranks(member.model.backend, member.entry)
        found.append(member if counts else None)
    return found


@torch.no_grad()
def _total(parameters: Sequence[Tensor], members: Sequence[_Member | None], p: float, torchs: Any) -> Tensor:
    """Return the norm over everything that was given. Collective."""
    pairs = [*zip(parameters, members, strict=True)]
    norms = {i: _each(q.grad, p, torchs) for i, (q, m) in enumerate(pairs) if m is None and q.grad is not None}
    for model in dict.fromkeys(member.model for member in members if member is not None):
        chosen = {i: member.entry for i, member in enumerate(members) if member is not None and member.model is model}
        model.check_knows_all_ranks("torch.nn.utils.clip_grad_norm_")
        model.finish_gradients(chosen.values())
        # The norm over other mesh dimensions: the same sets of parameters on all ranks, in one order.
        if model.backend.facts.divides == "elements" or any(entry.divided_over for entry in model.backend.all):
            norms[min(chosen)] = model.norm_of(chosen.values(), p)  # one for all of them
        else:
            norms |= _of_owners(model.backend, chosen, p, torchs)
    if not norms:
        return torch.tensor(0.0)
    # The norm of the norms, added in torch's own order: that of its groups by device and dtype.
    places, like = sorted(norms), []
    for parameter, member in (pairs[place] for place in places):
        dtype, device = parameter.dtype, parameter.device
        if member is not None:
            dtype, device = member.entry.dtype, member.model.backend.settings.device
        like.append(torch.empty(0, dtype=dtype, device=device))
    order = [places[index] for indices in grouped_by_device_and_dtype(like) for index in indices]
    total: Tensor = torch.linalg.vector_norm(torch.stack([norms[place].to(like[0].device) for place in order]), p)
    return total


def _of_owners(backend: Any, entries: dict[int, Entry], p: float, torchs: Any) -> dict[int, Tensor]:
    """Return the norm of each gradient, from the rank that has it, computed as torch computes it there."""
    norms: dict[int, Tensor] = {}
    for place, entry in entries.items():
        gradient = entry.grad()
        if gradient is not None and owned(backend, entry):  # torch's own has no kernel for sparse ones
            seen = gradient.coalesce().values() if gradient.is_sparse else entry.kind.to_user(gradient.detach())
            norms[place] = _each(seen, p, torchs)
    if backend.facts.divides == "nothing" or backend.settings.world_size == 1:
        return norms
    own = {place: norm.item() for place, norm in norms.items()}
    group: Any = next(iter(entries.values())).group
    device = backend.settings.device
    found = exchanged(own, max(entries) + 1, group, device)
    return {p: torch.tensor(norm, dtype=entries[p].dtype.to_real(), device=device) for p, norm in found.items()}


def _each(gradient: Tensor, p: float, torchs: Any) -> Tensor:
    norm: Tensor = torchs([gradient], p, False)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def _as_torchs(total: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """``total`` as torch gives it: a DTensor where all gradients are; scripts for FSDP2 call its ``full_tensor()``."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients or not all(hasattr(gradient, "full_tensor") for gradient in gradients):
        return total
    from torch.distributed.tensor import DTensor, Replicate

    meshes = {gradient.device_mesh for gradient in gradients if isinstance(gradient, DTensor)}
    if len(meshes) != 1:
        return total
    mesh = meshes.pop()
    return DTensor.from_local(total, mesh, [Replicate()] * mesh.ndim, run_check=False)
