"""One checkpoint for every mesh: saved over data and domain, loaded over others, the next steps are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fsshard
from fsshard.parallel import shard_domain
from tests.on_ranks import on_ranks
from tests.parallel.domain.operators import TWO, field, mesh_of, operator, worst

pytest.importorskip("neuralop")

SINGLE = 2.0**-20
"""Bound for numbers of order 1 in float32: sixteen rounding units, for four steps of Adam."""
ADAM = {"lr": 1e-3, "eps": 1e-4}
ANY_TO_ANY = [("fairscale", (4, 1), "whole"), ("fsdp2", (1, 4), "whole"), ("fsdp2", (2, 2), "modes")]


class Training:
    """One mesh's: of the same operator, over the same batches."""

    def __init__(self, backend: str, shape: tuple[int, int], weights: str) -> None:
        mesh, model = mesh_of(*shape), operator(TWO)
        self.domain = shard_domain(model, mesh["domain"], weights=weights)
        more = {"device_mesh": mesh["data"], "replicated": self.domain.replicated} if weights == "modes" else {}
        self.model = fsshard.wrap(model, backend=backend, **more)
        self.optimizer = fsshard.build_optimizer(self.model, torch.optim.Adam, **ADAM)
        self.data = fsshard.data_rank(mesh)

    def steps(self, numbers: range) -> dict[str, Any]:
        """The weights after them."""
        for number in numbers:
            x, y = (field(9, 8, batch=4, seed=2 * number + at).chunk(self.data.size)[self.data.rank] for at in (0, 1))
            self.optimizer.zero_grad()
            self.domain.mse_loss(self.model(self.domain.scatter(x)), self.domain.scatter(y)).backward()
            self.optimizer.step()
        return without_metadata(self.model.state_dict())


def without_metadata(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() for name, value in state.items() if name != "_metadata"}


def by_hand() -> dict[str, Any]:
    """Four steps on one process."""
    model = operator(TWO)
    optimizer = torch.optim.Adam(model.parameters(), **ADAM)
    for number in range(4):
        x, y = (field(9, 8, batch=4, seed=2 * number + at) for at in (0, 1))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return without_metadata(model.state_dict())


@on_ranks(4)
def test_any_mesh_to_any(tmp_path: Path) -> None:
    path = str(tmp_path / "last")
    wanted = by_hand()
    first = Training("fsdp2", (2, 2), "whole")
    saved = first.steps(range(2))
    fsshard.save(path, first.model, first.optimizer, steps=2)
    different, after = [], []
    for settings in ANY_TO_ANY:
        there = Training(*settings)
        fsshard.load(path, there.model, there.optimizer)
        loaded = without_metadata(there.model.state_dict())
        different += [f"{settings}: {name}" for name in saved if not torch.equal(loaded[name], saved[name])]
        after.append(there.steps(range(2, 4)))
    assert different == []
    assert [worst(state, wanted) <= SINGLE for state in after] == [True] * len(ANY_TO_ANY)
