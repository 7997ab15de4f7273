"""benchmarks/fairscale_cost.py at a tiny size: what does not depend on a clock."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("fairscale")

from benchmarks import fairscale_cost as cost
from tests.sets import often

NEEDS = {"mlp": "torch", "t5": "transformers", "tfno": "neuralop"}


@pytest.mark.parametrize("name", often(list(cost.CASES), "mlp", "tfno"))
def test_ours_costs_no_more_than_the_real_library(ranks: Any, name: str) -> None:
    pytest.importorskip(NEEDS[name])
    costs = ranks.run(cost.measure, 2, name, 1, True)
    rows = {row.what: row for row in cost.rows_of(name, costs)}
    assert rows["state, kB"].kept and rows["least, kB/step"].kept, rows
    assert all(each.equal for each in costs), "both sides must have done the same work"
    for each in costs:
        assert each.state[0] > 0 and each.state[1] > 0
        assert len(each.times.wall[0]) == len(each.times.cpu[1]) == 1
    if costs[0].sent is not None:
        assert rows["sent, kB/step"].kept, rows


@pytest.mark.parametrize("side", [0, 1])
def test_what_is_counted(ranks: Any, side: int) -> None:
    """All gradients to their owners, all parameters to the others: with N ranks 2 (N-1)/N of the model each."""
    model = cost.mlp(True)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    for count in (2, 3):
        costs = ranks.run(cost.measure, count, "mlp", 1, True)
        mean = sum(each.least[side] for each in costs) / count
        expected = 2 * size * (count - 1) / count
        assert expected <= mean <= expected + (cost.flags(costs[0], count) if side else 0)


def test_a_broken_bound_is_told() -> None:
    kept, broken = cost.Row("mlp", "time", "", "", 1.0, 1.0), cost.Row("mlp", "time", "", "", 1.01, 1.0)
    assert kept.kept and not broken.kept and cost.Row("mlp", "cpu", "", "", 2.0).kept
