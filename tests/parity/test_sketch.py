"""Digests and sketches: equal ones for equal numbers, and an honest distance between others."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fsshard.parity.sketch import PROJECTIONS, apart, digest, distance, sketch


def test_digests_tell_bits_apart() -> None:
    values = [
        torch.tensor([1.0]),
        torch.tensor([1.0 + 2**-23]),
        torch.tensor([1.0]).double(),
        torch.tensor([[1.0]]),
        {"x": torch.tensor([1.0])},
        {"y": torch.tensor([1.0])},
        [torch.tensor([1.0])],
        (torch.tensor([1.0]),),
        np.array([1.0]),
        1.0,
        "1.0",
        None,
    ]
    assert len({digest(value) for value in values}) == len(values)
    assert digest(torch.arange(4.0)[::2]) == digest(torch.tensor([0.0, 2.0]))
    assert digest(torch.tensor([1.0]).bfloat16()) == digest(torch.tensor([1.0]).bfloat16())


def test_equal_numbers_have_one_digest() -> None:
    value = torch.tensor([0.0, 1.0, math.nan, math.inf])
    assert sketch(value).digest == sketch(torch.tensor([-0.0, 1.0, -math.nan, math.inf])).digest
    others = [value.double(), value.reshape(2, 2), torch.tensor([0.0, 1.0 + 2**-23, math.nan, math.inf])]
    assert len({sketch(one).digest for one in [value, *others]}) == 4
    assert sketch(value[::2]).digest == sketch(torch.tensor([0.0, math.nan])).digest
    assert sketch(torch.tensor([1 + 2j]).conj()).digest == sketch(torch.tensor([1 - 2j])).digest


def test_numbers_are_those_of_the_tensor() -> None:
    found = sketch(torch.tensor([[3 - 4j, 0j]]))
    assert (found.dtype, found.shape, found.elements) == ("complex64", (1, 2), 4)
    assert (found.largest, found.total, found.norm) == (4.0, -1.0, 5.0)
    assert {abs(value) for value in found.projections} <= {1.0, 7.0} and len(found.projections) == PROJECTIONS
    empty = sketch(torch.zeros(0))
    assert (empty.largest, empty.norm, empty.projections) == (0.0, 0.0, (0.0,) * PROJECTIONS)
    assert sketch(torch.tensor(7)).total == 7.0


@pytest.mark.parametrize("elements", [1, 10, 1000, 200_000])
def test_the_distance_is_estimated(elements: int) -> None:
    """It is as near as twelve projections can tell, also over more than one chunk."""
    generator = torch.Generator().manual_seed(elements)
    ratios = []
    for _ in range(8):
        one = torch.randn(elements, generator=generator)
        other = one + 1e-4 * torch.randn(elements, generator=generator)
        true = float((one.double() - other.double()).norm())
        ratios.append(distance(sketch(one), sketch(other)) / true)
    assert 0.8 < sum(ratios) / len(ratios) < 1.2, ratios
    assert all(0.3 < ratio < 2 for ratio in ratios)


def test_one_element_is_seen_by_every_projection() -> None:
    one = torch.randn(70_000, generator=torch.Generator().manual_seed(0))
    other = one.clone()
    other[66_000] += 0.5
    assert list(apart(sketch(one), sketch(other))) == pytest.approx([0.5] * PROJECTIONS)


def test_what_is_no_number_is_infinitely_far() -> None:
    assert distance(sketch(torch.tensor([1.0])), sketch(torch.tensor([math.nan]))) == math.inf


def test_signs_are_the_same_everywhere() -> None:
    """Pinned: traces of other machines are compared with these."""
    assert sketch(torch.arange(1.0, 9.0)).projections == PINNED
    assert sum(sketch(torch.ones(65_536)).projections) == ONES


PINNED = (4.0, 6.0, 0.0, -18.0, 6.0, -20.0, 8.0, 14.0, 0.0, 6.0, -14.0, -18.0)
ONES = -2010.0
