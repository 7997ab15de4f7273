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

# Vectors of signs. Distances are estimated to about 20 percent (half of sqrt(2 / 12), by the root).
PROJECTIONS = 12
# Elements that have signs of their own. Those of the next chunk are the same, or all of them flipped.
CHUNK = 2**16
AT_ONCE = 4  # chunks that are multiplied by their signs together


def real_view(tensor: Tensor) -> Tensor:
    """Return ``tensor`` itself, or the pairs of a complex one."""
    if not tensor.is_complex():
        return tensor
    return torch.view_as_real(tensor.resolve_conj())


def digest(value: Any, *, strict: bool = True) -> str:
    """Return a short digest of every tensor and number in a nested structure, bit for bit.

    Of what cannot be looked into the type alone counts; ``strict`` raises RecipeError for it.
    """
    feeder = _Feeder(hashlib.blake2b(digest_size=16), strict)
    feeder.feed(value)
    return str(feeder.hasher.hexdigest())


# Types whose repr says all.
WRITTEN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type,
    Enum,
    torch.dtype,
    torch.device,
)


class _Feeder:
    """Feeds nested values to a hasher."""

    def __init__(self, hasher: Any, strict: bool) -> None:
        self.hasher = hasher
        self._strict = strict
        self._above: list[int] = []

    def feed(self, value: Any) -> None:
        if id(value) in self._above:
            # This object holds itself, and is being looked into already.
            return
        self._above.append(id(value))
        if isinstance(value, Tensor):
            self._text(f"{value.dtype}{tuple(value.shape)}")
            self.hasher.update(_bytes_of(_dense_numbers(value)))
        elif isinstance(value, (np.ndarray, np.generic)) and value.dtype != object:
            self._text(f"{value.dtype}{value.shape}")
            self.hasher.update(value.tobytes())
        elif isinstance(value, WRITTEN):
            self._text(repr(value))
        elif isinstance(value, Mapping):
            for key, item in value.items():
                self._text(repr(key))
                self.feed(item)
        elif isinstance(value, (list, tuple, np.ndarray)):
            self._text(f"{type(value).__name__}{len(value)}")
            for item in value:
                self.feed(item)
        elif isinstance(value, (set, frozenset)):
            digests = [digest(item, strict=self._strict) for item in value]
            self.feed(sorted(digests))
        else:
            self._feed_object(value)
        self._above.pop()

    def _feed_object(self, value: Any) -> None:
        """Feed the attributes of an object, not its address."""
        kind = type(value)
        if hasattr(value, "__dict__") or hasattr(value, "__slots__"):
            attributes = {}
            names = [*getattr(value, "__dict__", ())]
            names += getattr(value, "__slots__", ())
            for name in names:
                # A slot may be empty.
                if hasattr(value, name):
                    attributes[name] = getattr(value, name)
            self.feed({kind.__qualname__: attributes})
            return
        if self._strict:
            raise RecipeError(
                f"a batch, or an optimizer's state, holds a {kind.__name__}, whose contents cannot be compared; use "
                "tensors, arrays, numbers, texts, and containers of them"
            )
        self._text(kind.__qualname__)

    def _text(self, text: str) -> None:
        self.hasher.update(text.encode())


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
        elements = math.prod(self.shape)
        return 2 * elements if self.dtype.startswith("complex") else elements


def sketch(tensor: Tensor) -> Sketch:
    """Return the sketch of one tensor; a part of it at a time is copied."""
    dtype, shape = _kind(tensor)
    flat = _dense_numbers(tensor)
    hasher = _hash_of(dtype, shape, flat)
    chunks = math.ceil(len(flat) / CHUNK)
    total, squares, largest = torch.zeros(3, dtype=torch.float64)
    projections = torch.zeros(PROJECTIONS, dtype=torch.float64)
    signs_in_chunk = _signs(1, CHUNK)
    signs_of_chunks = _signs(-chunks, chunks).flip(1)
    # Memory is allocated once: fresh pages cost more than the sums.
    most = min(len(flat), AT_ONCE * CHUNK)
    wide_numbers = torch.empty(most, dtype=torch.float64)
    plain_numbers = torch.empty(most, dtype=flat.dtype)
    for first in range(0, chunks, AT_ONCE):
        start = first * CHUNK
        part = flat[start : start + AT_ONCE * CHUNK]
        count = len(part)
        wide = wide_numbers[:count].copy_(part)
        if _has_arithmetic(part):
            low, high = torch.aminmax(part)
            part = torch.add(part, 0.0, out=plain_numbers[:count])
            if low.isnan():
                part = _plain_nan(part)
        else:
            low, high = torch.aminmax(wide)
        hasher.update(_bytes_of(part))
        total += wide.sum()
        largest = torch.maximum(largest, torch.maximum(-low, high))
        rows = math.ceil(count / CHUNK)
        width = min(count, CHUNK)
        missing = rows * width - count
        # The last chunk of several may be shorter; zeros add nothing to its sums.
        even = torch.nn.functional.pad(wide, (0, missing)) if missing else wide
        signs_in_row = signs_in_chunk[:, :width].T
        sums = even.view(rows, width) @ signs_in_row
        signs = signs_of_chunks[:, first : first + rows].T
        projections += (signs * sums).sum(0)
        squares += wide.square_().sum()
    return Sketch(
        digest=hasher.hexdigest(),
        dtype=dtype.removeprefix("torch."),
        shape=shape,
        largest=float(largest),
        total=float(total),
        norm=math.sqrt(float(squares)),
        projections=tuple(projections.tolist()),
    )


def sketch_digest(tensor: Tensor) -> str:
    """Return the digest of a tensor's sketch, without the rest of it."""
    flat = _dense_numbers(tensor)
    dtype, shape = _kind(tensor)
    hasher = _hash_of(dtype, shape, flat)
    for part in flat.split(CHUNK):
        if _has_arithmetic(part):
            # -0.0 as 0.0 and every NaN as the same one: a comparison calls them equal.
            part = _plain_nan(part + 0.0)
        hasher.update(_bytes_of(part))
    return str(hasher.hexdigest())


def _kind(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    return str(tensor.dtype), tuple(tensor.shape)


def _dense_numbers(tensor: Tensor) -> Tensor:
    """Return the numbers of the real view, on the CPU, in one dimension."""
    value = tensor.detach().cpu()
    if value.layout is not torch.strided:
        value = value.to_dense()
    return real_view(value).reshape(-1)


def _hash_of(dtype: str, shape: tuple[int, ...], flat: Tensor) -> Any:
    """Return a hash that has taken in all but the numbers; files hold what digest([dtype, shape, numbers]) gives."""
    feeder = _Feeder(hashlib.blake2b(b"list3", digest_size=16), strict=True)
    feeder.feed(dtype)
    feeder.feed(shape)
    feeder.hasher.update(f"{flat.dtype}{tuple(flat.shape)}".encode())
    return feeder.hasher


def _has_arithmetic(part: Tensor) -> bool:
    # torch has no arithmetic of float8.
    return part.is_floating_point() and part.element_size() > 1


def _plain_nan(part: Tensor) -> Tensor:
    return torch.nan_to_num_(part, nan=math.nan, posinf=math.inf, neginf=-math.inf)


def _bytes_of(part: Tensor) -> Any:
    return part.contiguous().view(torch.uint8).numpy()


@lru_cache(maxsize=64)
def _signs(start: int, count: int) -> Tensor:
    """Return +1 and -1 for ``count`` places and every projection, by integer arithmetic: the same on every machine."""
    places = torch.arange(start, start + count, dtype=torch.int64)
    state = splitmix64(places * signed(0x9E3779B97F4A7C15))
    bits = [(state >> number) & 1 for number in range(PROJECTIONS)]
    return 1.0 - 2.0 * torch.stack(bits).double()


def splitmix64(state: Tensor) -> Tensor:
    """Scramble int64 numbers by the SplitMix64 finaliser (Steele, Lea and Flood, OOPSLA 2014)."""
    state = (state ^ shifted(state, 30)) * signed(0xBF58476D1CE4E5B9)
    state = (state ^ shifted(state, 27)) * signed(0x94D049BB133111EB)
    return state ^ shifted(state, 31)


def signed(value: int) -> int:
    """Return the int64 that has the bits of an unsigned number."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def shifted(value: Tensor, bits: int) -> Tensor:
    """Shift int64 numbers to the right, zeros coming in; torch's shift repeats the sign."""
    # The bits that come in.
    mask = 2 ** (64 - bits) - 1
    return torch.bitwise_and(value >> bits, mask)


def apart(one: Sketch, other: Sketch) -> Iterator[float]:
    """Yield |r.(a - b)| for every vector of signs r; infinite where one side has no number."""
    for a, b in zip(one.projections, other.projections, strict=True):
        gap = a - b
        yield abs(gap) if math.isfinite(gap) else math.inf


def distance(one: Sketch, other: Sketch) -> float:
    """Estimate the L2 norm of the difference d: the mean of (r.d)^2 over the vectors of signs r is |d|^2.

    An unbiased estimate (Alon, Matias and Szegedy, J. Comput. Syst. Sci. 58, 1999).
    """
    squares = [gap * gap for gap in apart(one, other)]
    mean = sum(squares) / PROJECTIONS
    return math.sqrt(mean)
