"""The fake mode of a simulation."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fsshard.simulation.fakes import Fakes


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
