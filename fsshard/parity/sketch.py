"""A tensor in a few numbers: equal bits are told by a digest, and the distance of unequal ones is estimated.

Beside digest, largest modulus, sum and norm a sketch holds dot products of the tensor with vectors of random signs.
For a difference d = a - b each of them gives r.d, and the mean of (r.d)^2 over the vectors r is an unbiased estimate
of |d|^2 (Alon, Matias and Szegedy, J. Comput. Syst. Sci. 58, 1999), with a relative standard deviation of sqrt(2 /
PROJECTIONS). So two files without a single tensor in them can tell how far apart two weights are. They cannot tell at
which element.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fsshard.parity.trace import digest, real_view

__all__ = ["PROJECTIONS", "Sketch", "apart", "distance", "least_distance", "sketch", "sketches"]

PROJECTIONS = 12
"""Vectors of signs. Distances are estimated to about 20 percent (half of sqrt(2 / 12), by the root)."""
CHUNK = 2**16  # elements at a time


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
        projections: dot products with vectors of signs, the same for all tensors of as many elements.
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

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found


def sketches(items: Iterable[tuple[str, Tensor]]) -> dict[str, Sketch]:
    """The sketch of each tensor, by name."""
    return {name: sketch(value) for name, value in items}


def sketch(tensor: Tensor) -> Sketch:
    """The sketch of one tensor."""
    value = tensor.detach().cpu()
    dense = value.to_dense() if value.layout is not torch.strided else value
    flat = _canonical(real_view(dense)).reshape(-1)
    numbers = flat.double()
    return Sketch(
        digest=digest([str(dense.dtype), tuple(dense.shape), flat]),
        dtype=str(dense.dtype).removeprefix("torch."),
        shape=tuple(dense.shape),
        largest=float(numbers.abs().max()) if len(numbers) else 0.0,
        total=float(numbers.sum()),
        norm=float(numbers.square().sum().sqrt()),
        projections=tuple(_projections(numbers).tolist()),
    )


def _canonical(value: Tensor) -> Tensor:
    """-0.0 as 0.0 and every NaN as the same one: a comparison calls them equal."""
    if not value.is_floating_point():
        return value
    return torch.nan_to_num(value + 0.0, nan=math.nan, posinf=math.inf, neginf=-math.inf)


def _projections(numbers: Tensor) -> Tensor:
    found = torch.zeros(PROJECTIONS, dtype=torch.float64)
    for number, start in enumerate(range(0, len(numbers), CHUNK)):
        part = numbers[start : start + CHUNK]
        found += _signs(-number - 1, 1)[:, 0] * (_signs(1, CHUNK)[:, : len(part)] @ part)
    return found


@lru_cache(maxsize=64)
def _signs(start: int, count: int) -> Tensor:
    """+1 and -1 for ``count`` places and every projection, by integer arithmetic: the same on every machine.

    Bits of the SplitMix64 generator (Steele, Lea and Flood, OOPSLA 2014), as in the golden recipes.
    """
    state = torch.arange(start, start + count, dtype=torch.int64) * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ _shifted(state, shift)) * _signed(factor)
    state = state ^ _shifted(state, 31)
    bits = torch.stack([(state >> number) & 1 for number in range(PROJECTIONS)])
    return 1.0 - 2.0 * bits.double()


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _shifted(value: Tensor, bits: int) -> Tensor:
    return torch.bitwise_and(value >> bits, 2 ** (64 - bits) - 1)


def apart(one: Sketch, other: Sketch) -> Iterator[float]:
    """|r.(a - b)| for every vector of signs; infinite where one side has no number."""
    for a, b in zip(one.projections, other.projections, strict=True):
        yield abs(a - b) if math.isfinite(a - b) else math.inf


def distance(one: Sketch, other: Sketch) -> float:
    """Estimate of the L2 norm of the difference."""
    values = list(apart(one, other))
    return _rms(values) if values else math.inf


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))


def least_distance(one: Sketch, other: Sketch) -> float:
    """Return a lower bound of the L2 norm of the difference: by the triangle's and by Cauchy's inequality."""
    root = math.sqrt(max(1, one.elements))
    shares = [value / root for value in (*apart(one, other), abs(one.total - other.total))]
    found = max([abs(one.norm - other.norm), abs(one.largest - other.largest), *shares])
    return found if math.isfinite(found) else math.inf
