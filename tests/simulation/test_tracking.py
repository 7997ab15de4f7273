"""Live bytes by kind, the moment of their peak; and the fake mode of a simulation.

Tests fsshard/simulation/fakes.py too.
"""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from fsshard.simulation.fakes import Fakes
from fsshard.simulation.tracking import KINDS, Tracker, Usage
from tests.models import take_step
from tests.simulation.recipes import Net

PARAMETERS = 4 * (2 * 16 * 64 + 64 + 16)
BUFFERS = 4 * 16


def steps(model: nn.Module, tracker: Tracker, count: int = 2, optimizer: Any = None) -> Usage:
    optimizer = optimizer or torch.optim.Adam(model.parameters())
    tracker.watch(model)
    with tracker:
        for _ in range(count):
            x = torch.ones(8, 16)
            tracker.mark(x, "inputs")
            tracker.reset()
            model(x).square().mean().backward()
            take_step(optimizer)
            usage = tracker.usage()
            del x
    return usage


def test_each_kind_is_counted_to_the_byte() -> None:
    usage = steps(Net(), Tracker())
    saved = 4 * 8 * (64 + 16)  # what tanh gives, and what is squared
    counters = 4 * 4  # Adam's step of each parameter
    assert usage.highest["parameters"] == usage.highest["gradients"] == PARAMETERS
    assert usage.highest["optimizer state"] == 2 * PARAMETERS + counters
    assert usage.highest["buffers"] == BUFFERS
    assert usage.highest["inputs"] == 4 * 8 * 16
    assert saved <= usage.saved <= saved + 8  # and the loss, and its gradient
    assert usage.highest["gathered units"] == 0 and usage.collectives == ()


def test_the_kinds_at_the_peak_add_up_to_it() -> None:
    usage = steps(Net(), Tracker())
    assert sum(usage.by_kind.values()) == usage.peak == max(usage.phases.values())
    assert set(usage.by_kind) == set(usage.highest) == set(KINDS)
    assert usage.moment.phase == "step" and usage.peak > 4 * PARAMETERS


def test_the_peak_of_a_backward_is_told_with_its_module() -> None:
    usage = steps(Net(4096), Tracker(), 1, torch.optim.SGD(nn.Linear(1, 1).parameters()))
    assert usage.moment.phase == "backward" and usage.moment.module in ("a", "b")
    assert usage.moment.operation.startswith("aten::")


def test_what_is_recomputed_is_activations_and_no_longer_kept() -> None:
    class Recomputed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    kept, recomputed = steps(Net(1024), Tracker()), steps(Recomputed(1024), Tracker())
    assert recomputed.saved < kept.saved / 4


def test_what_dies_is_not_alive() -> None:
    tracker = Tracker()
    with tracker:
        before = tracker.now
        x = torch.ones(1000)
        y = x + 1
        assert tracker.now - before == 8000
        del x, y
        gc.collect()
        assert tracker.now == before and tracker.peak >= 8000
    assert sum(tracker.live().values()) == before


def test_a_storage_that_is_shrunk_and_grown_is_followed() -> None:
    with Tracker() as tracker:
        x = torch.ones(1000)
        x.untyped_storage().resize_(0)
        assert tracker.now == 0
        x.untyped_storage().resize_(4000)
        assert tracker.now == 4000 and tracker.live()["gathered units"] == 4000
    assert torch.UntypedStorage.resize_.__name__ == "resize_"  # torch's own again


@pytest.mark.parametrize(("granularity", "counted"), [(1, 4), (512, 512)])
def test_sizes_are_rounded_as_an_allocator_does(granularity: int, counted: int) -> None:
    with Tracker(granularity=granularity) as tracker:
        x = torch.ones(1)
        assert tracker.now == counted
    del x


def test_what_is_offloaded_is_left_out() -> None:
    tracker = Tracker()
    steps(Net(), tracker)
    left = tracker.usage(offloaded=True)
    kinds = ("parameters", "optimizer state", "gradients")
    assert not any(left.highest[kind] for kind in kinds) and left.peak < PARAMETERS
    assert left.saved == tracker.usage().saved


def test_views_do_not_bring_back_memory_that_was_given_back() -> None:
    """Torch's fake mode grows it from the second view on, which it remembers."""
    with Fakes():
        weight = nn.Parameter(torch.empty(8, 16))
        memory = weight.untyped_storage()
        for shape in [(8, 16), (8, 16), (128,), (128,)]:
            memory.resize_(0)
            assert weight.view(shape).shape == shape and weight.detach().t().numel() == 128
            torch.autograd.graph.get_gradient_edge(weight)
            assert memory.nbytes() == 0
        memory.resize_(512)
        assert weight.view(16, 8).untyped_storage().nbytes() == 512


def test_addresses_are_compared_without_a_warning() -> None:
    """Torch warns of each, once a process unless it is asked to do so always."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    told = []
    try:
        for mode in (FakeTensorMode(), Fakes()):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                with mode:
                    assert torch.empty(2).data_ptr() == torch.empty(3).data_ptr() == 0
            told.append([str(one.message)[:41] for one in said])
    finally:
        torch.set_warn_always(before)
    assert told == [["Accessing the data pointer of FakeTensor "] * 2, []]
