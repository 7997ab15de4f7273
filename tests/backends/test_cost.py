"""Checks the cost of a unit against sums done by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsshard.backends.cost import Payload, UnitCost, unit_cost
from fsshard.planning.entries import Cut

FOUR = SimpleNamespace(size=lambda: 4)


def cost(divides: str, frozen: int = 0, ranks: int = 4, gathers: int = 1, reduce: Any = None) -> UnitCost:
    """Return the cost of a unit with one parameter of seven float32 and one of three, perhaps frozen, on four ranks."""
    cuts = [Cut(stride=2), Cut(stride=1)] if divides == "elements" else [None, None]
    shapes = (torch.Size([7]), torch.Size([3]))
    entries = [
        SimpleNamespace(
            name=str(number),
            stored_shape=shape,
            cut=cut,
            group=None if divides == "nothing" else FOUR,
            parameter=torch.zeros(shape).requires_grad_(not (number and frozen)),
        )
        for number, (shape, cut) in enumerate(zip(shapes, cuts, strict=True))
    ]
    backend = SimpleNamespace(
        entries={entry.name: entry for entry in entries},
        all=entries,
        facts=SimpleNamespace(divides=divides),
        settings=SimpleNamespace(group=FOUR, world_size=ranks),
        _gathers=lambda unit: (4,) * gathers,
        _gathered_again=lambda unit: [],
    )
    unit = SimpleNamespace(name="", parameters=("0", "1"), nbytes=40, compute=reduce, reduce_dtype=reduce, send=None)
    return unit_cost(backend, unit)


@pytest.mark.parametrize(
    ("found", "held", "payloads"),
    [
        (cost("nothing", reduce=torch.bfloat16), 40, [("all_reduce", 20, 20, 4)]),
        (cost("owners", frozen=3), 40, [("all_to_all", 28, 28, 4), ("broadcast", 28, 28, 4)]),
        (cost("owners", ranks=8), 40, [("all_to_all", 40, 40, 4), ("broadcast", 40, 40, 4), ("all_reduce", 10, 10, 2)]),
        (
            cost("elements", gathers=2, reduce=torch.bfloat16),
            12,
            [("all_gather", 24, 20, 4), ("all_gather", 24, 20, 4), ("reduce_scatter", 24, 20, 4)],
        ),
        (
            cost("elements", frozen=3, ranks=8),
            12,
            [("all_gather", 48, 40, 4), ("reduce_scatter", 32, 28, 4), ("all_reduce", 8, 8, 2)],
        ),
    ],
)
def test_bytes(found: UnitCost, held: int, payloads: list[tuple[str, int, int, int]]) -> None:
    """Ten numbers on four ranks are three each, twelve with padding; what is frozen is not reduced."""
    assert found.held == held and found.payloads == tuple(Payload(*payload) for payload in payloads)
    assert (found.gathers > 0) == (found.gathered > 0) == (payloads[0][0] == "all_gather")
