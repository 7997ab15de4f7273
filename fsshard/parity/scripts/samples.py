"""Digests of what a model was given in a forward."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fsshard.checkpoint.format.tensors_file import dtype_name
from fsshard.nested import is_array, leaves, tensors
from fsshard.parity.scripts.store import Samples
from fsshard.parity.sketch import digest, real_view
from fsshard.recipes.recipe import Arguments

Arrays = list[Tensor]


def samples_of(positional: Sequence[Any], keywords: Arguments, computed: str) -> Samples:
    """Return digests of a forward's arguments: of all, and of the samples that lie along dim 0 of all tensors."""
    arrays = _arrays_in([positional, keywords])
    rows = _rows_of(arrays)
    kinds = [(str(array.dtype), tuple(array.shape)) for array in arrays]
    total = 0
    if rows:
        of_samples = _digests_of_rows(arrays, rows)
        everything = digest([kinds, b"".join(of_samples)])
        for one in of_samples:
            total += int.from_bytes(one, "little")
    else:
        everything = digest(arrays)
    return Samples(
        digest=everything,
        rows=rows,
        total=f"{total % 2**128:032x}",
        arguments=dict(_arguments(positional, keywords)),
        computed=computed,
    )


def _rows_of(arrays: Arrays) -> int:
    """Return how many samples lie along dim 0 of all tensors; 0 if they do not."""
    sizes = {array.shape[0] for array in arrays}
    if len(sizes) != 1 or not all(array.numel() for array in arrays):
        return 0
    return sizes.pop()


def _digests_of_rows(arrays: Arrays, rows: int) -> list[bytes]:
    parts = []
    for array in arrays:
        flat = array.contiguous().reshape(rows, -1)
        parts.append(flat.view(torch.uint8).numpy())
    return [hashlib.blake2b(row, digest_size=16).digest() for row in np.concatenate(parts, 1)]


def _arguments(positional: Sequence[Any], keywords: Arguments) -> Iterator[tuple[str, str]]:
    """Yield arguments with tensors by name or number, with their digests."""
    for number, argument in enumerate([*positional, keywords]):
        # What a batch holds by name counts as if it were handed over so.
        named = argument if isinstance(argument, Mapping) else {number: argument}
        for name, value in named.items():
            arrays = _arrays_in(value)
            if arrays:
                yield str(name), digest(arrays)[:16]


def _arrays_in(value: Any) -> Arrays:
    arrays = []
    for leaf in leaves(value):
        if is_array(leaf):
            arrays += _arrays(leaf)
    return arrays


def _arrays(leaf: Any) -> Arrays:
    """Return an argument as real, dense tensors on the CPU; none for an array of texts or objects."""
    if not isinstance(leaf, Tensor):
        if leaf.dtype.kind not in "biufc":
            return []
        return [real_view(torch.as_tensor(leaf))]
    value = asked(leaf, "to_local").detach()
    if value.is_nested:
        return _arrays_in(value.unbind())
    if value.layout is not torch.strided:
        value = value.to_sparse().coalesce()
        return [value.indices().cpu(), *_arrays(value.values())]
    return [real_view(value).resolve_neg().cpu()]


def asked(value: Any, method: str) -> Any:
    """Return what a DTensor's method gives, or any other value itself."""
    if not hasattr(value, method):
        return value
    return getattr(value, method)()


def computed_by(module: nn.Module, output: Any) -> str:
    """Return the dtype of the output, with the autocast that was on, and whether the model was in training mode."""
    words = "nothing"
    device = "cpu"
    first = next(tensors(output), None)
    if first is not None:
        words = dtype_name(first.dtype)
        device = first.device.type
    if torch.is_autocast_enabled(device):
        words += f", autocast to {torch.get_autocast_dtype(device)}"
    if not module.training:
        words += ", in evaluation mode"
    return words
