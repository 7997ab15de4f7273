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
import torch.distributed as dist
from torch import Tensor

from fsshard.backends.whole import counts_all_ranks, owned
from fsshard.complex_params.shown import stored_of
from fsshard.planning.entries import Entry
from fsshard.torch_private.clip_grad import compute_norm_by, grouped_by_device_and_dtype

__all__ = ["count_all_ranks"]

_MODELS: list[Any] = []  # weak references to the wrapped models that count_all_ranks() was told of


class _Member(NamedTuple):
    """A parameter that was given, of a wrapped model."""

    model: Any
    entry: Entry


def count_all_ranks(model: Any) -> None:
    """From now on ``clip_grad_norm_`` counts the parameters of a model over all ranks, and is collective for them.

    Args:
        model: a weak reference to a ShardedModule.
    """
    compute_norm_by(_norm, first=True)
    _MODELS[:] = [known for known in _MODELS if known() is not None]
    _MODELS.append(model)


def _norm(parameters: Sequence[Tensor], norm_type: float, torchs: Callable[..., Tensor]) -> Tensor | None:
    members = _members(parameters)
    if not any(members):
        return None
    return _as_torchs(_total(parameters, members, norm_type, torchs), parameters)


def _members(parameters: Sequence[Any]) -> list[_Member | None]:
    """Whose parameters, or views of parameters, these are."""
    models = [model for reference in _MODELS if (model := reference()) is not None]
    known = {id(entry.parameter): _Member(model, entry) for model in models for entry in model.backend.entries.values()}
    found: list[_Member | None] = []
    for parameter in parameters:
        owner, name = getattr(parameter, "_fsshard_view_of", (lambda: None, ""))
        model = owner()
        member = known.get(id(stored_of(parameter))) if model is None else _Member(model, model.backend.entries[name])
        counts = member is not None and counts_all_ranks(member.model.backend, member.entry)
        found.append(member if counts else None)
    return found


@torch.no_grad()
def _total(parameters: Sequence[Tensor], members: Sequence[_Member | None], p: float, original: Any) -> Tensor:
    """The norm over everything that was given. Collective."""
    models = {id(member.model): member.model for member in members if member is not None}
    values: list[Tensor | None] = [None] * len(parameters)
    for place, (parameter, member) in enumerate(zip(parameters, members, strict=True)):
        if member is None and parameter.grad is not None:
            values[place] = _each(parameter.grad, p, original)
    for key, model in models.items():
        chosen = [(place, m.entry) for place, m in enumerate(members) if m is not None and id(m.model) == key]
        places, entries = [place for place, _ in chosen], [entry for _, entry in chosen]
        model.check_knows_all_ranks("torch.nn.utils.clip_grad_norm_")
        model.finish_gradients(entries)
        # The norm over other mesh dimensions: the same sets of parameters on all ranks, in one order.
        parted = model.backend.facts.divides == "elements" or any(entry.divided_over for entry in model.backend.all)
        found = _of_parts(model, entries, p) if parted else None
        if found is None:
            found = _of_owners(model, entries, p, original)
        for place, value in zip(places, found, strict=True):
            values[place] = value
    return _combined(parameters, members, values, p)


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


def _of_parts(model: Any, entries: list[Entry], p: float) -> list[Tensor | None]:
    """One norm for all of them, in the place of the first; nothing for the others."""
    total: Tensor = model.norm_of(entries, p)
    return [total, *[None] * (len(entries) - 1)]


def _of_owners(model: Any, entries: list[Entry], p: float, original: Any) -> list[Tensor | None]:
    """The norm of each gradient, from the rank that has it, computed as torch computes it there."""
    backend = model.backend
    mine = [(place, entry, entry.grad()) for place, entry in enumerate(entries) if owned(backend, entry)]
    norms = {place: _each(_seen(entry, grad), p, original) for place, entry, grad in mine if grad is not None}
    if backend.facts.divides == "nothing" or backend.settings.world_size == 1:
        return [norms.get(place) for place in range(len(entries))]
    buffer = torch.zeros(2, len(entries), dtype=torch.float64)
    for place, norm in norms.items():
        buffer[:, place] = torch.stack([norm.double().cpu(), torch.ones((), dtype=torch.float64)])
    buffer = buffer.to(backend.settings.device)
    dist.all_reduce(buffer, group=entries[0].group)
    return [
        value.to(entry.dtype.to_real()) if bool(there) else None
        for entry, value, there in zip(entries, *buffer, strict=True)
    ]


def _seen(entry: Entry, gradient: Tensor) -> Tensor:
    """The gradient as the user has it, complex where the parameter is."""
    if gradient.is_sparse:
        return gradient.coalesce().values()  # torch's own has no kernel for these
    seen: Tensor = entry.kind.to_user(gradient.detach())
    return seen


def _each(gradient: Tensor, p: float, original: Any) -> Tensor:
    norm: Tensor = original([gradient], p, False)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def _combined(
    parameters: Sequence[Tensor], members: Sequence[_Member | None], values: list[Tensor | None], p: float
) -> Tensor:
    """The norm of the norms, added in torch's own order: that of its groups by device and dtype."""
    places = [place for place, value in enumerate(values) if value is not None]
    if not places:
        return torch.tensor(0.0)
    standing = []
    for place in places:
        member = members[place]
        dtype = parameters[place].dtype if member is None else member.entry.dtype
        device = parameters[place].device if member is None else member.model.backend.settings.device
        standing.append(torch.empty(0, dtype=dtype, device=device))
    order = [places[index] for indices in grouped_by_device_and_dtype(standing) for index in indices]
    first = standing[0].device
    chosen = [value.to(first) for place in order if (value := values[place]) is not None]
    total: Tensor = torch.linalg.vector_norm(torch.stack(chosen), p)
    return total
