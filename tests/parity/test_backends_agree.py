"""Compares settings that the parity matrix has no column for: optimizers', and norms of other orders. Bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sets import often
from tests.training_runs import DISTRIBUTED, Run, compare


@pytest.mark.parametrize(
    ("optimizer", "hyper"),
    [
        ("neuralop.AdamW", {"weight_decay": 0.01}),
        pytest.param("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, marks=pytest.mark.long),
        pytest.param("Adam", {"weight_decay": 0.01, "amsgrad": True}, marks=pytest.mark.long),
        pytest.param("AdamW", {"foreach": True}, marks=pytest.mark.long),
        pytest.param("Adadelta", {"weight_decay": 0.01}, marks=pytest.mark.long),
        pytest.param("RMSprop", {"centered": True, "momentum": 0.9}, marks=pytest.mark.long),
    ],
)
def test_optimizers_keep_their_meaning(ranks: Any, optimizer: str, hyper: dict[str, Any]) -> None:
    """Optimizers that are not the same on real pairs are complex under every engine, cut wherever it cuts."""
    runs = [Run("tfno_tucker", backend, optimizer=optimizer, hyper=hyper) for backend in DISTRIBUTED]
    assert ranks.run(compare, 2, runs) == [[], []]


@pytest.mark.parametrize("norm_type", often([1.0, 2.0, 3.0, float("inf")], 3.0, float("inf")))
def test_clipping_is_the_same_number_everywhere(ranks: Any, norm_type: float) -> None:
    runs = [Run("mlp_complex", backend, clip=(0.01, norm_type)) for backend in DISTRIBUTED]
    assert ranks.run(compare, 2, runs) == [[], []]
