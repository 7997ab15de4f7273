"""backend="none" is the plain model."""

from __future__ import annotations

from typing import Any

import torch

import fsshard
from tests.models import batch, net


def job() -> list[bool]:
    native, optimizer = net(), None
    optimizer = torch.optim.SGD(native.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    model = fsshard.wrap(net(), backend="none")
    sharded = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
    for number in range(4):
        for net_, opt in ((native, optimizer), (model, sharded)):
            net_(batch(number)).square().mean().backward()
            opt.step()
            opt.zero_grad()
    state = model.state_dict()
    return [torch.equal(value, state[name]) for name, value in native.state_dict().items()]


def test_equal_to_torch_with_native_complex_weights(ranks: Any) -> None:
    """SGD on real pairs differs from SGD on complex numbers in the last bit: the optimizer sees complex ones here."""
    assert all(ranks.run(job, 1)[0])
