"""Norms of the gradients of a loss's terms, and cosines between them: of the means over ranks, under every engine.

:func:`term_gradients` is where to start. The engine gives this rank's derivatives by whole parameters
(:meth:`~fsshard.backends.base.Backend.derivatives_of`); what follows is the same for all engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.backends.base import Backend
from fsshard.backends.whole import BATCH_BYTES
from fsshard.comm import tree
from fsshard.comm.agreement import batches, exchange
from fsshard.errors import ConfigurationError, RankMismatch
from fsshard.sharded.grad_norm import bounded

DOUBLE = (torch.float64, torch.complex128)


class TermGradients(NamedTuple):
    """The lengths of the gradients of T loss terms, and the angles between them; the same on every rank.

    Attributes:
        norms: shape (T,): 2-norm of each term's gradient, averaged over the ranks. A complex number counts by its
            modulus. In the loss's unit per the weights' unit.
        cosines: shape (T, T): cosine of the angle between two of them, from -1 (they pull against each other) to 1; 0
            where one is zero.
    """

    norms: Tensor
    cosines: Tensor


def term_gradients(backend: Backend, terms: Sequence[Tensor]) -> TermGradients:
    """Differentiate each term by all trainable parameters, and compare the means over the ranks. Collective."""
    group = backend.settings.group
    # A rank keeps its part of each mean: the norm of a mean is not the mean of norms.
    parts = []
    for term in terms:
        gradients = backend.derivatives_of(term)
        means = _parts_of_means(gradients, group)
        parts.append(list(means))
    gram = _inner_products(parts, backend.settings.device)
    if group is not None:
        dist.all_reduce(gram, group=group)
    norms = gram.diagonal().sqrt()
    lengths = torch.outer(norms, norms)
    cosines = torch.where(lengths == 0, 0.0, gram / lengths)
    # Rounding may bring the cosine of a term with itself beyond 1.
    cosines = cosines.clamp(-1, 1)
    # Rounded as clip_grad_norm_ rounds: so that the order of sums does not show, and a weight made of a norm leaves the
    # dtype of the loss as it is.
    dtype = torch.float32
    if any(entry.dtype in DOUBLE for entry in backend.all):
        dtype = torch.float64
    return TermGradients(norms.to(dtype), cosines.to(dtype))


def check_terms(backend: Backend, terms: Any) -> list[Tensor]:
    """Return the terms as a list. Raise, on every rank if on one, for what has no gradient. Collective.

    Raises:
        ConfigurationError: not scalars of a loss that depends on weights; or other mesh dimensions hold parameters.
        RankMismatch: the ranks have different numbers of terms.
    """
    counts = exchange(backend.settings.group, lambda: _count(backend, terms))
    if len(set(counts)) > 1:
        got = ", ".join(f"rank {rank} {count}" for rank, count in enumerate(counts))
        raise RankMismatch(f"term_gradients: expected as many terms on every rank, got {got}; pass the same ones")
    return list(terms)


def _count(backend: Backend, terms: Any) -> int:
    """Return how many terms there are. Local."""
    if backend.settings.model_mesh is not None or any(entry.layouts for entry in backend.all):
        raise ConfigurationError(
            "term_gradients: other mesh dimensions than data divide or share parameters of this model, and gradients "
            "are compared over the ranks of data only; use fixed weights of the terms, or a mesh of data alone"
        )
    if isinstance(terms, Tensor) or not isinstance(terms, Sequence) or not terms:
        got = repr(terms)
        if isinstance(terms, Tensor):
            got = f"a tensor of shape {tuple(terms.shape)}"
        raise ConfigurationError(f"term_gradients: expected a list of the loss's terms, got {got}; pass [term, ...]")
    for place, term in enumerate(terms):
        got = type(term).__name__
        if isinstance(term, Tensor):
            if term.numel() == 1 and term.requires_grad and not term.is_complex():
                continue
            got = f"{term.dtype} of shape {tuple(term.shape)} with requires_grad={term.requires_grad}"
        raise ConfigurationError(
            f"term_gradients: expected terms[{place}] to be one real number with a graph, got {got}; pass a mean "
            "or a sum that depends on the weights and is not detached"
        )
    return len(terms)


def _parts_of_means(gradients: list[Tensor], group: dist.ProcessGroup | None) -> Iterator[Tensor]:
    """Yield this rank's part of the ranks' means, flat; lets go of each gradient once it is sent. Collective."""
    # Flat gradients of one dtype together; larger ones are alone.
    parts = _flattened(gradients)
    for batch in batches(parts, lambda flat: flat.nbytes, BATCH_BYTES, kind=lambda flat: flat.dtype):
        flat = batch[0]
        if len(batch) > 1:
            flat = torch.cat(batch)
        batch.clear()
        if group is None or group.size() == 1:
            yield flat
        else:
            yield _part_of_mean(flat, group)


def _flattened(gradients: list[Tensor]) -> Iterator[Tensor]:
    """Yield each gradient flat, in float32 at least, and take it out of the list."""
    gradients.reverse()
    while gradients:
        gradient = gradients.pop()
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        flat = gradient.reshape(-1)
        yield flat.float() if flat.element_size() < 4 else flat


def _part_of_mean(flat: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of the mean of ``flat``, padded to as many elements on every rank. Collective."""
    ranks = group.size()
    padding = -flat.numel() % ranks
    flat = torch.nn.functional.pad(flat, (0, padding))
    mean = flat.new_empty(flat.numel() // ranks)
    tree.reduce_scatter(mean, flat, group, 1.0 / ranks)
    return mean


def _inner_products(parts: Iterable[Sequence[Tensor]], device: torch.device) -> Tensor:
    """Return the terms' inner products over this rank's parts: (T, T) float64."""
    parts = list(parts)
    gram = torch.zeros(len(parts), len(parts), dtype=torch.float64, device=device)
    for same in zip(*parts, strict=True):
        # Bounded chunks, since a whole part in float64 would take twice its memory.
        chunks_of_terms = map(bounded, same)
        for chunks in zip(*chunks_of_terms, strict=True):
            rows = torch.stack(chunks)
            wide = rows.to(device, torch.float64)
            gram += wide @ wide.T
    return gram
