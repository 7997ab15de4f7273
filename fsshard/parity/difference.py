"""Compares two tensors: how far they differ, where, and whether rounding explains it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fsshard.parity.report import Difference
from fsshard.parity.sketch import real_view

__all__ = ["difference", "number_difference", "place_of", "ulps_between", "unequal", "value_differences"]


def difference(expected: Tensor, got: Tensor, bound: Tensor | float = 0.0, *, rank: int = 0) -> Difference:
    """Compare ``got`` with ``expected``.

    ``bound`` is the largest difference that rounding explains, of a real number or element by element of the real view;
    ``rank`` is this one, for the record.
    """
    if expected.dtype != got.dtype or expected.shape != got.shape:
        note = f"{got.dtype}{tuple(got.shape)} where the reference has {expected.dtype}{tuple(expected.shape)}"
        return Difference(verdict="different", max_abs=math.inf, ulps=math.inf, rank=rank, note=note)
    a, b = (real_view(tensor.detach().cpu()).reshape(-1) for tensor in (expected, got))
    if _equal(a, b):
        return Difference(rank=rank)
    apart = _apart(a, b)
    allowed = bound.reshape(-1).double().cpu() if isinstance(bound, Tensor) else torch.tensor(float(bound)).double()
    allowed = torch.nan_to_num(allowed, nan=0.0, posinf=0.0)  # an overflow allows nothing
    worst = _worst(apart, allowed)
    limit = float(allowed[worst] if allowed.dim() else allowed)
    index = _index(expected, worst)
    return Difference(
        verdict="different" if float(apart[worst]) > limit else "bound",
        max_abs=float(apart.max()),
        apart=float(apart[worst]),
        ulps=ulps_between(a, b),
        bound=limit,
        rank=rank,
        index=index,
        expected=_element_text(expected, index),
        got=_element_text(got, index),
    )


def number_difference(expected: float, got: float, bound: float = 0.0, *, rank: int = 0) -> Difference:
    """Compare two numbers; units in the last place are counted in float32."""
    a, b = torch.tensor([expected], dtype=torch.float64), torch.tensor([got], dtype=torch.float64)
    if _equal(a, b):
        return Difference(rank=rank)
    apart = float(_apart(a, b))
    return Difference(
        verdict="bound" if apart <= bound else "different",
        max_abs=apart,
        apart=apart,
        ulps=ulps_between(a.float(), b.float()),
        bound=bound,
        rank=rank,
        expected=repr(expected),
        got=repr(got),
    )


def unequal(rank: int, note: str, expected: str = "", got: str = "") -> Difference:
    """Return a difference for which there is no bound."""
    return Difference(verdict="different", rank=rank, expected=expected, got=got, note=note)


def value_differences(
    expected: Mapping[str, Any], got: Mapping[str, Any], rank: int
) -> Iterator[tuple[str, Difference]]:
    """Compare values that are no tensors, key by key; a key that one side lacks is a difference too."""
    for key in [*expected, *(key for key in got if key not in expected)]:
        one, other = (repr(side[key]) if key in side else "missing" for side in (expected, got))
        # as texts: equal for NaN, and exact for numbers
        yield key, Difference(rank=rank) if one == other else unequal(rank, "not equal", one, other)


def place_of(shape: Sequence[int], pairs: bool, index: tuple[int, ...]) -> int:
    """Return where an element begins in the real view of a tensor, whose numbers are pairs if it is complex."""
    flat = 0
    for size, place in zip(shape, index, strict=False):
        flat = flat * size + place
    return flat * (2 if pairs else 1)


def _worst(apart: Tensor, allowed: Tensor) -> int:
    """Return the element that uses most of its bound; the largest difference among those that have none."""
    share = apart / allowed  # inf where the bound is zero, NaN where there is no difference either
    share = torch.nan_to_num(share, nan=0.0, posinf=math.inf)
    share[apart == 0] = 0.0
    return int(torch.where(share == share.max(), apart, -1.0).argmax())


def _equal(a: Tensor, b: Tensor) -> bool:
    """Return whether numbers are equal at every place; two NaN are, and so are the two zeros."""
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def _apart(a: Tensor, b: Tensor) -> Tensor:
    """Return |a - b| in float64; infinite where one is NaN, or only one is infinite."""
    if a.is_floating_point():
        apart = (a.double() - b.double()).abs()
        apart[(a == b) | (a.isnan() & b.isnan())] = 0.0  # inf - inf
        return torch.nan_to_num(apart, nan=math.inf, posinf=math.inf)
    return (a.to(torch.int64) - b.to(torch.int64)).abs().double()


_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


def ulps_between(a: Tensor, b: Tensor) -> float:
    """Return the largest number of representable numbers between two real tensors' elements; inf if only one is NaN.

    The bits of IEEE numbers, read as integers, count them in order on each side of zero (Bruce Dawson, Comparing
    Floating Point Numbers, 2012).
    """
    if a.dtype not in _BITS:
        return float((a.to(torch.int64) - b.to(torch.int64)).abs().max()) if a.numel() else 0.0
    if bool((a.isnan() != b.isnan()).any()):
        return math.inf
    both = ~(a.isnan() | b.isnan())
    if not bool(both.any()):
        return 0.0
    one, other = _ordered(a[both]), _ordered(b[both])
    # A difference of int64 counts can overflow where signs differ; there the counts are so many that float64 will do.
    apart = torch.where(
        (one < 0) == (other < 0), (one - other).abs().double(), one.double().abs() + other.double().abs()
    )
    return float(apart.max())


def _ordered(value: Tensor) -> Tensor:
    bits = value.contiguous().view(_BITS[value.dtype]).to(torch.int64)
    lowest = torch.iinfo(_BITS[value.dtype]).min
    return torch.where(bits < 0, lowest - bits, bits)


def _index(tensor: Tensor, flat: int) -> tuple[int, ...]:
    """Return the index into ``tensor`` of an element of its real view."""
    flat = flat // 2 if tensor.is_complex() else flat
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), tensor.shape)) if tensor.dim() else ()


def _element_text(tensor: Tensor, index: tuple[int, ...]) -> str:
    value = tensor.detach()[index].item() if index else tensor.detach().item()
    if isinstance(value, complex):
        return f"{value.real:.9g}{value.imag:+.9g}j"
    return f"{value:.9g}" if isinstance(value, float) else str(value)
