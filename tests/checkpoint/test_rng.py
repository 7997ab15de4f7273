"""Generators, saved and put back."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch

from fsshard.checkpoint.rng import capture, derive, restore
from fsshard.errors import CorruptCheckpoint

CPU = torch.device("cpu")


def draws() -> list[Any]:
    gauss = [random.gauss(0, 1), float(numpy.random.normal())]  # both keep the second of a pair for later
    return [torch.rand(3).tolist(), torch.randn(20).tolist(), random.random(), numpy.random.rand(3).tolist(), gauss]


@pytest.fixture(autouse=True)
def _as_before() -> Any:
    state = capture(CPU)
    yield
    restore(state, CPU)


def test_what_is_drawn_next_is_drawn_again() -> None:
    draws()
    state = capture(CPU)
    first = draws()
    assert draws() != first
    assert restore(state, CPU) == []
    assert draws() == first


def test_new_ranks_differ_and_are_always_alike() -> None:
    state = capture(CPU)
    drawn = []
    for rank in (2, 3, 2):
        derive(state, rank, CPU)
        drawn.append(draws())
    assert drawn[0] == drawn[2] != drawn[1]


@pytest.mark.parametrize("key", ["torch", "python", "numpy"])
def test_a_state_that_is_none(key: str) -> None:
    state = capture(CPU)
    for wrong in ({**state, key: 3}, {k: v for k, v in state.items() if k != key}):
        with pytest.raises(CorruptCheckpoint, match="state of the random number generators"):
            restore(wrong, CPU)
