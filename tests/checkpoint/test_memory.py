"""The memory that a save and a load take beside the state itself: none, and this rank's part once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from fsshard.backends.whole import state_of
from fsshard.launching.pool import RankPool
from tests.memory import LiveBytes
from tests.models import Spectral
from tests.portability.runs import SHARDED

WIDTH = 128


class Wide(nn.Module):
    """Large against everything that is saved beside it; real and complex, a quarter of it in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH))
        self.spectral = nn.Sequential(*[Spectral(WIDTH) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.spectral(self.layers(x))


def job_memory(folder: str, backend: str, save: bool) -> dict[str, Any]:
    """Bytes that operators made at the most during a save and a load, against those of this rank's state."""
    torch.manual_seed(0)
    model = fsshard.wrap(Wide(), backend=backend)
    optimizer = fsshard.build_optimizer(model, torch.optim.AdamW, lr=1e-3)
    model(torch.ones(4, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    found: dict[str, Any] = {"own": own_bytes(model, optimizer), "saved": 0, "loaded": 0}
    found["piece"] = max(entry.shape.numel() * 8 for entry in model.backend.entries.values())
    if save:
        with LiveBytes() as live:
            fsshard.save(f"{folder}/{backend}", model, optimizer)
        found["saved"] = live.peak
    for saved in SHARDED if not save else ():
        dist.barrier()
        with LiveBytes() as live:
            fsshard.load(f"{folder}/{saved}", model, optimizer)
        found["loaded"] = max(found["loaded"], live.peak)
    return found


def own_bytes(model: fsshard.ShardedModule, optimizer: fsshard.ShardedOptimizer) -> int:
    """The bytes of this rank's part of the parameters and of the optimizer's state."""
    backend, total = model.backend, 0
    for entry in backend.entries.values():
        state = state_of(optimizer.inner, entry)
        tensors = [entry.local(), *(value for value in state.values() if isinstance(value, Tensor))]
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return total


@pytest.fixture(scope="module")
def folder(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of each backend, and that none of them took memory to speak of."""
    folder = str(tmp_path_factory.mktemp("memory"))
    for backend in SHARDED:
        for found in ranks.run(job_memory, 2, folder, backend, True):
            assert found["own"] > 1 << 20
            # Two percent: generators, what the ranks tell each other, counters.
            assert 0 < found["saved"] < 0.02 * found["own"], (backend, found)
    return folder


@pytest.mark.covering
@pytest.mark.parametrize(("backend", "world"), list(itertools.product(SHARDED, (1, 2))))
def test_a_load_takes_its_own_part_and_a_piece(ranks: RankPool, folder: str, backend: str, world: int) -> None:
    for found in ranks.run(job_memory, world, folder, backend, False):
        assert 0.3 * found["own"] < found["loaded"] <= 1.1 * found["own"] + found["piece"], found
