"""Small units travel with the unit around them under FSDP2, and nothing that is computed shows it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fsshard
from fsshard.backends.fsdp2 import MERGED_BYTES, grouped
from fsshard.errors import ConfigurationError
from tests.on_ranks import on_ranks

APART = {"merge_below": 0}
TOGETHER = {"merge_below": 2**20}


def nested() -> nn.Module:
    """Units "0", "1" without parameters of its own, "1.0" and "1.1" in it, and the root."""
    wide = nn.Sequential(nn.Linear(127, 128), nn.Linear(128, 127))
    return nn.Sequential(nn.Linear(127, 127), wide, nn.LayerNorm(127))


def planned(model: nn.Module, **settings: Any) -> Any:
    return fsshard.plan(model, auto_wrap_policy={nn.Linear, nn.Sequential}, **settings)


def test_which_units_are_merged() -> None:
    plan = planned(nested())
    assert list(grouped(plan, 0, 2)) == [unit.name for unit in plan.units]
    assert list(grouped(plan, 2**20, 2)) == [""]
    assert sorted(grouped(plan, 2**20, 2)[""]) == sorted(plan.parameters)
    assert list(grouped(plan, 65_100, 2)) == ["", "1.0", "1.1"]  # "0" has 65,024 bytes, "1" none


class Number(nn.Module):
    """A complex weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))


@pytest.mark.parametrize(("width", "ranks_", "merged"), [(4, 2, True), (3, 3, False), (4, 4, False), (2, 1, True)])
def test_no_complex_gradient_lands_at_an_odd_place(width: int, ranks_: int, merged: bool) -> None:
    model = nn.Sequential(nn.LayerNorm(width), Number(), nn.Linear(3, 1))  # what lies behind it does not count
    plan = fsshard.plan(model, auto_wrap_policy={Number})
    assert list(grouped(plan, 2**20, ranks_)) == ([""] if merged else ["", "1"])


def test_other_dtypes_and_large_sums_stay_apart() -> None:
    mixed = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    plan = planned(mixed, mixed_precision="bf16")
    assert len({unit.compute for unit in plan.units if unit.parameters}) == 2
    assert list(grouped(plan, 2**20, 2)) == [unit.name for unit in plan.units]
    many = nn.Sequential(*(nn.Linear(500, 500) for _ in range(MERGED_BYTES // 1_002_000 + 1)))
    assert len(grouped(planned(many), 2**20, 2)) == len(many) + 1


@on_ranks()
def test_the_setting() -> None:
    """Parameters per group that is gathered, with and without merging; and a wrong value."""
    found = []
    for settings in (TOGETHER, APART):
        model = fsshard.wrap(nested(), backend="fsdp2", auto_wrap_policy={nn.Linear}, **settings)
        found.append(len([module for module in model.module.modules() if hasattr(module, "unshard")]))
        output = model(torch.ones(2, 127))
        output.sum().backward()
    assert found == [1, 4] and [unit.name for unit in model.plan.units] == ["", "0", "1.0", "1.1"]
    with pytest.raises(ConfigurationError, match=r"merge_below=-1.*0 merges nothing"):
        fsshard.wrap(nested(), backend="fsdp2", merge_below=-1)
