"""A tensor in a few numbers: a digest tells equal bits, and projections estimate the distance of unequal ones."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsshard.errors import RecipeError

PROJECTIONS = 12
"""Vectors of signs. Distances are estimated to about 20 percent (half of sqrt(2 / 12), by the root)."""
CHUNK = 2**16  # elements that have signs of their own; those of the next chunk are the same, or all of them flipped
AT_ONCE = 4  # chunks that are multiplied by their signs together


def real_view(tensor: Tensor) -> Tensor:
    """Return ``tensor`` itself, or the pairs of a complex one."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def digest(value: Any, *, strict: bool = True) -> str:
    """Return a short digest of every tensor and number in a nested structure, bit for bit.

    Of what cannot be looked into the type alone counts; ``strict`` raises RecipeError for it.
    """
    found = hashlib.blake2b(digest_size=16)
    _feed(found, value, strict, [])
    return found.hexdigest()


def _feed(found: Any, value: Any, strict: bool, above: list[int]) -> None:
    if id(value) in above:
        return  # an object that holds itself
    above = [*above, id(value)]
    if isinstance(value, Tensor):
        dense = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
        found.update(f"{value.dtype}{tuple(value.shape)}".encode())
        found.update(real_view(dense).contiguous().cpu().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, (np.ndarray, np.generic)) and value.dtype != object:
        found.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, (bool, int, float, complex, str, bytes, type(None), type, Enum, torch.dtype, torch.device)):
        found.update(repr(value).encode())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            found.update(repr(key).encode())
            _feed(found, item, strict, above)
    elif isinstance(value, (list, tuple, np.ndarray)):
        found.update(f"{type(value).__name__}{len(value)}".encode())
        for item in value:
            _feed(found, item, strict, above)
    elif isinstance(value, (set, frozenset)):
        _feed(found, sorted(digest(item, strict=strict) for item in value), strict, above)
    elif hasattr(value, "__dict__") or hasattr(value, "__slots__"):  # by its attributes, not its address
        names = [*getattr(value, "__dict__", ()), *getattr(value, "__slots__", ())]
        held = {name: getattr(value, name) for name in names if hasattr(value, name)}
        _feed(found, {type(value).__qualname__: held}, strict, above)
    elif strict:
        raise RecipeError(
            f"a batch, or an optimizer's state, holds a {type(value).__name__}, whose contents cannot be compared; use "
            "tensors, arrays, numbers, texts, and containers of them"
        )
    else:
        found.update(type(value).__qualname__.encode())


@dataclass(frozen=True, kw_only=True)
class Sketch:
    """The record of a tensor; numbers are in float64, of the real view (a complex number is two).

    Attributes:
        digest: of dtype, shape and bits, the two zeros and all NaN being the same.
        dtype: such as ``"float32"``.
        shape: of the tensor.
        largest: largest modulus.
        total: sum.
        norm: L2 norm.
        projections: dot products with vectors of random signs, the same for all tensors of as many elements.
    """

    digest: str
    dtype: str
    shape: tuple[int, ...]
    largest: float
    total: float
    norm: float
    projections: tuple[float, ...]

    @property
    def elements(self) -> int:
        """Real numbers in the tensor."""
        return math.prod(self.shape) * (2 if self.dtype.startswith("complex") else 1)


def sketch(tensor: Tensor) -> Sketch:
    """Return the sketch of one tensor; a part of it at a time is copied."""
    kind, flat = _flat(tensor)
    found, chunks = _digest_of(kind, flat), -(-len(flat) // CHUNK)
    total, squares, largest = torch.zeros(3, dtype=torch.float64)
    projections, signs = torch.zeros(PROJECTIONS, dtype=torch.float64), _signs(-chunks, chunks).flip(1)
    most = min(len(flat), AT_ONCE * CHUNK)  # fresh pages cost more than the sums
    room, plain = torch.empty(most, dtype=torch.float64), torch.empty(most, dtype=flat.dtype)
    for first in range(0, chunks, AT_ONCE):
        part = flat[first * CHUNK : (first + AT_ONCE) * CHUNK]
        wide = room[: len(part)].copy_(part)
        low, high = torch.aminmax(part if _has_arithmetic(part) else wide)
        if _has_arithmetic(part):
            part = torch.add(part, 0.0, out=plain[: len(part)])
            part = _plain_nan(part) if low.isnan() else part
        found.update(_bytes_of(part))
        total += wide.sum()
        largest = torch.maximum(largest, torch.maximum(-low, high))
        rows, width = -(-len(wide) // CHUNK), min(len(wide), CHUNK)
        missing = rows * width - len(wide)
        even = (torch.nn.functional.pad(wide, (0, missing)) if missing else wide).view(rows, width)
        projections += (signs[:, first : first + rows].T * (even @ _signs(1, CHUNK)[:, :width].T)).sum(0)
        squares += wide.square_().sum()
    return Sketch(
        digest=found.hexdigest(),
        dtype=kind[0].removeprefix("torch."),
        shape=kind[1],
        largest=float(largest),
        total=float(total),
        norm=math.sqrt(float(squares)),
        projections=tuple(projections.tolist()),
    )


def sketch_digest(tensor: Tensor) -> str:
    """Return the digest of a tensor's sketch, without the rest of it."""
    kind, flat = _flat(tensor)
    found = _digest_of(kind, flat)
    for start in range(0, len(flat), CHUNK):
        part = flat[start : start + CHUNK]
        # -0.0 as 0.0 and every NaN as the same one: a comparison calls them equal
        found.update(_bytes_of(_plain_nan(part + 0.0) if _has_arithmetic(part) else part))
    return str(found.hexdigest())


def _flat(tensor: Tensor) -> tuple[tuple[str, tuple[int, ...]], Tensor]:
    """Return dtype and shape, and the numbers of the real view."""
    value = tensor.detach().cpu()
    dense = value.to_dense() if value.layout is not torch.strided else value
    return (str(dense.dtype), tuple(dense.shape)), real_view(dense).reshape(-1)


def _digest_of(kind: tuple[str, tuple[int, ...]], flat: Tensor) -> Any:
    """Return a hash that has taken in all but the numbers; files hold what digest([dtype, shape, numbers]) gives."""
    found = hashlib.blake2b(b"list3", digest_size=16)
    for item in kind:
        _feed(found, item, True, [])
    found.update(f"{flat.dtype}{tuple(flat.shape)}".encode())
    return found


def _has_arithmetic(part: Tensor) -> bool:
    return part.is_floating_point() and part.element_size() > 1  # torch has none of float8


def _plain_nan(part: Tensor) -> Tensor:
    return torch.nan_to_num_(part, nan=math.nan, posinf=math.inf, neginf=-math.inf)


def _bytes_of(part: Tensor) -> Any:
    return part.contiguous().view(torch.uint8).numpy()


@lru_cache(maxsize=64)
def _signs(start: int, count: int) -> Tensor:
    """Return +1 and -1 for ``count`` places and every projection, by integer arithmetic: the same on every machine."""
    state = splitmix64(torch.arange(start, start + count, dtype=torch.int64) * signed(0x9E3779B97F4A7C15))
    return 1.0 - 2.0 * torch.stack([(state >> number) & 1 for number in range(PROJECTIONS)]).double()


def splitmix64(state: Tensor) -> Tensor:
    """Scramble int64 numbers by the SplitMix64 finaliser (Steele, Lea and Flood, OOPSLA 2014)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ shifted(state, shift)) * signed(factor)
    return state ^ shifted(state, 31)


def signed(value: int) -> int:
    """Return the int64 that has the bits of an unsigned number."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def shifted(value: Tensor, bits: int) -> Tensor:
    """Shift int64 numbers to the right, zeros coming in; torch's shift repeats the sign."""
    return torch.bitwise_and(value >> bits, 2 ** (64 - bits) - 1)


def apart(one: Sketch, other: Sketch) -> Iterator[float]:
    """Yield |r.(a - b)| for every vector of signs r; infinite where one side has no number."""
    for a, b in zip(one.projections, other.projections, strict=True):
        yield abs(a - b) if math.isfinite(a - b) else math.inf


def distance(one: Sketch, other: Sketch) -> float:
    """Estimate the L2 norm of the difference d: the mean of (r.d)^2 over the vectors of signs r is |d|^2.

    An unbiased estimate (Alon, Matias and Szegedy, J. Comput. Syst. Sci. 58, 1999).
    """
    return math.sqrt(sum(value * value for value in apart(one, other)) / PROJECTIONS)
