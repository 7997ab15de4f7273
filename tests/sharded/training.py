"""Helpers for tests of wrapped models: backends, and a training."""

from __future__ import annotations

from typing import Any

import fsshard
from tests.models import batch, net, take_step, with_adam
from tests.training_runs import DISTRIBUTED

ALL = (*DISTRIBUTED, "none")


def trained(backend: str, steps: int = 2, **settings: Any) -> tuple[fsshard.ShardedModule, fsshard.ShardedOptimizer]:
    model, optimizer = with_adam(net(), backend=backend, **settings)
    train(model, optimizer, range(steps))
    return model, optimizer


def train(model: Any, optimizer: Any, steps: Any) -> list[float]:
    losses = []
    for step in steps:
        loss = model(batch(step)).square().mean()
        loss.backward()
        take_step(optimizer)
        losses.append(float(loss.detach()))
    return losses
