"""The memory that a save and a load take beside the state itself: none, and this rank's part once; and that of copies.

Tests fsshard/checkpoint/staging.py too.
"""

from __future__ import annotations

import itertools
import mmap
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from fsshard.backends.whole import state_of
from fsshard.checkpoint import staging
from fsshard.checkpoint.staging import Staging
from fsshard.launching.pool import RankPool
from tests.memory import LiveBytes
from tests.models import Spectral, take_step
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
    take_step(optimizer)
    found = {"own": own_bytes(model, optimizer), "saved": 0, "loaded": 0}
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


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    staging._spare.clear()


def tensors() -> list[Tensor]:
    return [
        torch.randn(3, 5),
        torch.randn(7, dtype=torch.complex64),
        torch.randn(4, 6).bfloat16().T,
        torch.tensor(2),
        torch.empty(0, 3),
        torch.rand(9) > 0.5,
        torch.randn(2, 2, dtype=torch.complex64).conj(),
    ]


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_copies_are_equal_and_apart() -> None:
    given = tensors()
    copies = Staging().copy(given)
    for one, copy in zip(given, copies, strict=True):
        assert (copy.dtype, copy.shape) == (one.dtype, one.shape) and torch.equal(copy, one)
        assert copy.is_contiguous() and not copy.is_conj()
    before = [copy.clone() for copy in copies]
    for one in given:
        one.zero_()
    assert all(torch.equal(copy, kept) for copy, kept in zip(copies, before, strict=True))
    assert len({address(copy) for copy in copies}) == 1  # one mapping
    assert all(copy.data_ptr() % staging.ALIGNMENT == 0 for copy in copies)


def test_the_memory_serves_again() -> None:
    room = Staging()
    first = address(room.copy(tensors())[0])
    with mock.patch.object(mmap, "mmap", side_effect=AssertionError("another mapping")):
        room.give_back()
        given = tensors()
        again = Staging().copy(given)
    assert address(again[0]) == first and all(torch.equal(a, b) for a, b in zip(again, given, strict=True))
