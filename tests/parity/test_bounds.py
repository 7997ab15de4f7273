"""The error model: what it says is a bound is one, and not a loose one."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from fsshard.parity.bounds import (
    NotComparable,
    measured_bound,
    part_of,
    reduction_bound,
    reduction_roundings,
    spread_factor,
)


@pytest.mark.parametrize(
    ("world_size", "reductions", "roundings"),
    [(1, 1, 0), (1, 3, 0), (2, 1, 0), (2, 2, 3), (3, 1, 4), (4, 1, 3), (4, 2, 7), (6, 1, 7)],
)
def test_roundings(world_size: int, reductions: int, roundings: int) -> None:
    """Two summands have one order; divisions count where N is no power of two."""
    assert reduction_roundings(world_size, reductions) == roundings


@pytest.mark.parametrize("world_size", [3, 4, 5, 8])
def test_no_order_of_a_sum_leaves_the_bound(world_size: int) -> None:
    """All orders (up to 120 of them) of random sums, with and without cancellation, divided before or after."""
    torch.manual_seed(world_size)
    terms = torch.randn(world_size, 2000) * 10 ** torch.randint(-4, 4, (world_size, 2000)).float()
    bound = reduction_bound((terms.abs() / world_size).sum(0), reduction_roundings(world_size))
    results = []
    for order in itertools.islice(itertools.permutations(range(world_size)), 120):
        after, before = torch.zeros(2000), torch.zeros(2000)
        for index in order:
            after, before = after + terms[index], before + terms[index] / world_size
        results += [after / world_size, before]
    stack = torch.stack(results).double()
    apart = stack.max(0).values - stack.min(0).values
    assert bool((apart <= bound).all())
    assert float((apart / bound).max()) > 0.1  # not wide of the mark either


def test_spread_factor_holds_its_promise() -> None:
    """With a false alarm of 1e-2 (1e-9 cannot be sampled) at most that share of normal draws exceeds the bound."""
    torch.manual_seed(0)
    for elements, draws, alike in ((1, 8, False), (10, 8, False), (200, 4, False), (200, 4, True)):
        width = 1 if alike else elements  # elements that depend on each other altogether, or not at all
        seen = torch.randn(20_000, draws, width).abs().amax(dim=(1, 2))
        following = torch.randn(20_000, width).abs().amax(dim=1)
        exceeded = float((following > spread_factor(elements, draws, 1e-2) * seen).double().mean())
        assert exceeded <= 1.2e-2, (elements, draws, alike)


def test_measured_bound_has_a_floor() -> None:
    """A tensor whose observed errors are all zero may still be off by one rounding."""
    assert measured_bound(0.0, 1.0, 10, 8, torch.float32) >= 2.0**-24
    assert measured_bound(1e-3, 1.0, 10, 8, torch.float32) > 1e-3
    assert math.isfinite(measured_bound(0.0, 1.0, 10, 0, torch.float32))


def test_samples_lie_along_the_first_dimension_of_all_that_has_one() -> None:
    batch = {"x": torch.arange(6.0).view(6, 1), "y": [np.arange(6), "a name"], "scale": 2.0}
    part = part_of(batch, 1, 3)
    assert (part["x"].tolist(), part["y"][0].tolist(), part["y"][1], part["scale"]) == ([[2], [3]], [2, 3], "a name", 2)
    with pytest.raises(NotComparable, match="6 samples of a joined batch cannot be divided evenly among 4 ranks"):
        part_of(batch, 0, 4)
    with pytest.raises(NotComparable, match=r"tensors of the batch have \[2, 3\] rows"):
        part_of([torch.zeros(2), torch.zeros(3)], 0, 2)
    with pytest.raises(NotComparable, match=r"tensors of the batch have \[\] rows"):
        part_of({"only": "words"}, 0, 2)
