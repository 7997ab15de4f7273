"""Norms of gradients at the border between two float32 numbers, against Python's exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from fsshard.sharded.exact_norm import exact_power, is_settled, rounded_root


def exactly(numbers: Tensor) -> Fraction:
    return sum((Fraction(float(number)) ** 2 for number in numbers), Fraction(0))


@pytest.mark.parametrize("spread", [0, 20, 60])
def test_the_integer_sum_is_the_exact_one(spread: int) -> None:
    generator = torch.Generator().manual_seed(spread)
    numbers = torch.randn(3000, generator=generator) * 2.0 ** -(torch.rand(3000, generator=generator) * spread).floor()
    power = exact_power(numbers.split(700), [])
    assert abs(power - exactly(numbers)) <= exactly(numbers) * Fraction(2) ** -100
    assert exact_power([torch.zeros(4)], []) == exact_power([], []) == 0


def border(root: float) -> Fraction:
    """Return the square of the middle between a float32 number and the next."""
    one = torch.tensor(root)
    other = torch.nextafter(one, torch.tensor(math.inf))
    return ((Fraction(float(one)) + Fraction(float(other))) / 2) ** 2


@pytest.mark.parametrize("root", [1.0, 0.7, 3.1e-5, 1234.5])
def test_roots_are_rounded_by_the_exact_middle(root: float) -> None:
    below, above = torch.tensor(root), torch.nextafter(torch.tensor(root), torch.tensor(math.inf))
    middle = border(float(below))
    hair = middle * Fraction(2) ** -80
    assert rounded_root(middle - hair) == below
    assert rounded_root(middle + hair) == above
    assert not is_settled(float(middle), 1000) and is_settled(float(below) ** 2, 1000)


def test_what_is_no_number_is_settled() -> None:
    assert is_settled(math.nan, 10) and is_settled(math.inf, 10) and is_settled(0.0, 10)


def at_the_border() -> Tensor:
    """Gradients whose squares add up to within float64's rounding of a border."""
    torch.manual_seed(0)
    numbers = torch.randn(4000)
    middle = border(float(exactly(numbers)) ** 0.5)
    # What is missing is added as a few small numbers, each as large as still fits.
    for place in range(40):
        missing = middle - exactly(numbers)
        if missing <= 0:
            break
        numbers[-1 - place] = torch.tensor(math.sqrt(missing + Fraction(float(numbers[-1 - place])) ** 2)).float() * (
            1 - 2.0**-22
        )
    return numbers


def job_norm(numbers: Tensor, backend: str) -> Tensor:
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(len(numbers)))
    module.forward = lambda x: (module.weight * x).sum()  # type: ignore[method-assign]
    model = fsshard.wrap(module, backend=backend)
    fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    model(numbers if backend == "none" else numbers * dist.get_world_size() * (dist.get_rank() == 0)).backward()
    return model.clip_grad_norm_("1e9")  # as torch takes it


def test_divisions_among_ranks_agree_at_a_border(ranks: Any) -> None:
    numbers = at_the_border()
    assert not is_settled(float(exactly(numbers)), 2**17), "else this shows nothing"
    expected = rounded_root(exactly(numbers))
    assert ranks.run(job_norm, 1, numbers, "none") == [expected]
    for backend, size in (("fsdp2", 2), ("fsdp", 2), ("ddp", 2), ("fairscale", 2), ("fsdp2", 4)):
        assert ranks.run(job_norm, size, numbers, backend) == [expected] * size
