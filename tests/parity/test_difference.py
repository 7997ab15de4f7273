"""One tensor against another."""

from __future__ import annotations

import math

import pytest
import torch

from fsshard.parity.difference import difference, number_difference, ulps_between

ONE = torch.tensor([1.0, 2.0, -3.0])


def bumped(value: torch.Tensor, index: int, ulps: int) -> torch.Tensor:
    moved = value.clone()
    moved.view(torch.int32)[index] += ulps
    return moved


def test_equal_is_exact() -> None:
    found = difference(ONE, ONE.clone(), rank=3)
    assert (found.verdict, found.max_abs, found.ulps, found.rank) == ("exact", 0.0, 0.0, 3)
    assert difference(torch.empty(0), torch.empty(0)).verdict == "exact"


def test_nan_and_zeros() -> None:
    nan = torch.tensor([math.nan, 1.0])
    assert difference(nan, nan.clone()).verdict == "exact"
    assert difference(torch.tensor([0.0]), torch.tensor([-0.0])).verdict == "exact"
    found = difference(torch.tensor([1.0, 1.0]), nan, bound=1e9)
    assert (found.verdict, found.max_abs, found.ulps, found.index) == ("different", math.inf, math.inf, (0,))
    inf = torch.tensor([math.inf])
    assert difference(inf, inf.clone()).verdict == "exact"
    assert difference(inf, -inf, bound=1e9).verdict == "different"


@pytest.mark.parametrize("ulps", [1, 5, 1000])
def test_units_in_the_last_place_are_counted(ulps: int) -> None:
    found = difference(ONE, bumped(ONE, 2, ulps))
    assert (found.verdict, found.ulps, found.index) == ("different", ulps, (2,))
    assert found.expected == "-3"


def test_ulps_across_zero_and_of_other_types() -> None:
    tiny = torch.tensor([1e-45])
    assert ulps_between(tiny, -tiny) == 2
    one = torch.ones(1, dtype=torch.float64)
    assert ulps_between(one, torch.nextafter(one, 2 * one)) == 1
    assert ulps_between(torch.tensor([1.0]).bfloat16(), torch.tensor([1.0 + 2.0**-7]).bfloat16()) == 1
    assert ulps_between(torch.tensor([3]), torch.tensor([7])) == 4


def test_a_bound_is_per_element() -> None:
    got = ONE + torch.tensor([0.5, 0.0, 0.1])
    assert difference(ONE, got, 0.6).verdict == "bound"
    assert difference(ONE, got, 0.4).verdict == "different"
    tight = difference(ONE, got, torch.tensor([0.6, 0.0, 0.05]))
    assert (tight.verdict, tight.index) == ("different", (2,))  # beyond its bound, though not the largest
    assert tight.apart == pytest.approx(0.1)
    loose = difference(ONE, got, torch.tensor([1.0, 0.0, 0.11]))
    assert (loose.verdict, loose.index) == ("bound", (2,))  # uses most of its bound
    assert tight.bound == pytest.approx(0.05)
    assert tight.max_abs == pytest.approx(0.5)


def test_complex_numbers_are_pairs() -> None:
    one = torch.tensor([[1 + 1j, 2 - 2j]])
    other = one.clone()
    other.view(torch.float32)[0, 3] += 2.0**-22
    found = difference(one, other)
    assert (found.index, found.ulps, found.max_abs) == ((0, 1), 2, 2.0**-22)  # below 2 ulps are half as large
    assert "j" in found.got


def test_shape_and_dtype_are_named() -> None:
    found = difference(ONE, ONE.double())
    assert found.verdict == "different" and "float64" in found.note
    assert "(2,)" in difference(ONE, ONE[:2]).note


def test_numbers() -> None:
    assert number_difference(1.5, 1.5).verdict == "exact"
    assert number_difference(math.nan, math.nan).verdict == "exact"
    assert number_difference(1.5, 1.5 + 2**-23).ulps == 1
    assert number_difference(1.5, 1.6, 0.2).verdict == "bound"
    assert number_difference(1.5, math.nan, 0.2).verdict == "different"
