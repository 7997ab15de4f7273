"""The fake mode of a simulation."""

from __future__ import annotations

import torch
from torch import nn

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
