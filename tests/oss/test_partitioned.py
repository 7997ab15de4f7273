"""A step within a step runs the hooks that torch has for all optimizers once."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsshard.oss.partitioned import step_without_global_hooks


def test_only_the_own_hooks_run() -> None:
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    inner = torch.optim.SGD([weight], lr=0.5)
    ran = []

    def noted(name: str) -> Any:
        return lambda *_: ran.append(name)

    own = [inner.register_step_pre_hook(noted("before")), inner.register_step_post_hook(noted("after"))]
    everywhere = [register_optimizer_step_pre_hook(noted("all")), register_optimizer_step_post_hook(noted("all"))]
    try:
        step_without_global_hooks(inner, {})
        assert ran == ["before", "after"] and weight.item() == 0.5
        inner.step()
        assert ran.count("all") == 2
    finally:
        for handle in (*own, *everywhere):
            handle.remove()
    inner.step = lambda closure=None: f"mine, {closure}"  # type: ignore[method-assign,assignment]
    assert step_without_global_hooks(inner, {"closure": 3}) == "mine, 3"  # a step of the user's own
