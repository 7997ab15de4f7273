"""Parts of many parameters in one collective: who travels with whom, and that every bit arrives where it belongs."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from fsshard.backends.whole import BATCH_BYTES, _packed, _unpacked, collective_batches, gather, scatter_state, set_state
from tests.models import with_sgd
from tests.on_ranks import on_ranks


def part(elements: int, dtype: torch.dtype = torch.float32) -> tuple[Any, Tensor]:
    """This rank's half of a parameter."""
    return SimpleNamespace(stored_shape=torch.Size([elements]), is_cut=True), torch.empty(elements // 2, dtype=dtype)


def test_small_ones_of_one_dtype_travel_together() -> None:
    small, large, half = part(8), part(BATCH_BYTES // 4 + 1), part(8, torch.bfloat16)
    sparse = (small[0], torch.zeros(4).to_sparse())
    batches = [[small, small], [half, half], [small], [large], [small], [sparse], [small]]
    assert list(collective_batches([item for batch in batches for item in batch])) == batches
    exact = part(BATCH_BYTES // 8)
    assert list(collective_batches([exact, exact, exact])) == [[exact, exact], [exact]]
    assert list(collective_batches([])) == []


def test_state_comes_back_where_it_lay() -> None:
    """Of two devices one has no numbers here: what lay there is told by a flag."""
    device = torch.device("meta")
    counter, factor = _packed(torch.tensor(3.0)), _packed(torch.ones(2, 2))
    for packed in (counter, factor):
        assert _unpacked(packed, device).device.type == "cpu"
        assert _unpacked(packed._replace(on_host=False), device).is_meta
    assert _unpacked(_packed([7]), device) == [7]


@on_ranks(1)
def test_factors_are_loaded_beside_what_has_the_parameters_shape() -> None:
    """As of SOAP, Shampoo and Adafactor, whose step fails where they lie on another device."""
    model, optimizer = with_sgd(nn.Linear(3, 2), backend="ddp")
    optimizer.inner._fsshard_state_device = torch.device("meta")
    entry = model.backend.entries["weight"]
    saved = {"momentum": torch.ones(2, 3), "rows": torch.ones(2, 1), "step": torch.tensor(3.0), "calls": 4}
    scatter_state(model.backend, optimizer.inner, entry, saved)
    state = optimizer.inner.state[entry.parameter]
    set_state(model.backend, optimizer.inner, entry, {})
    assert state["calls"] == 4 and state["step"] == 3
    assert [state[key].device.type for key in ("momentum", "rows", "step")] == ["meta", "meta", "cpu"]


class Odd(nn.Module):
    """Parameters that no two engines lay alike: complex, transposed, in another order of memory, of few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.core = nn.Parameter(torch.randn(3, 5, 7, dtype=torch.complex64))
        self.turned = nn.Parameter(torch.randn(5, 3, dtype=torch.complex64).t())
        self.scale = nn.Parameter(torch.randn(()))
        self.kernel = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.thin = nn.Parameter(torch.randn(1, 9))


@pytest.mark.parametrize(
    ("backend", "world_size"), [("fsdp", 2), ("fsdp2", 2), ("fsdp", 3), ("fsdp2", 3), ("fairscale", 2)]
)
@on_ranks()
def test_where_elements_lie(backend: str, world_size: int) -> None:
    torch.manual_seed(0)
    bare = Odd()
    model = fsshard.wrap(copy.deepcopy(bare), backend=backend)
    device = model.backend.settings.device
    for entry, (name, expected) in zip(model.backend.all, bare.named_parameters(), strict=True):
        assert entry.name == name
        parts = [entry.part(rank) for rank in range(world_size)]
        if entry.is_cut:  # they adjoin, from the first element to the last
            assert [0, *(stop for _, stop in parts)] == [*(start for start, _ in parts), entry.stored_shape.numel()]
        assert entry.local().numel() == entry.here[1] - entry.here[0]
        whole = gather(entry, entry.local(), device)
        assert torch.equal(entry.kind.to_user(whole), expected)
        assert torch.equal(entry.take(whole), entry.local())
        entry.put(2 * whole)
    doubled = model.state_dict()
    assert all(torch.equal(doubled[name], 2 * expected) for name, expected in bare.named_parameters())
    if not dist.get_rank():
        assert all(doubled[name].stride() == value.stride() for name, value in bare.state_dict().items())
