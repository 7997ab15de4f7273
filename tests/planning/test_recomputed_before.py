"""Who has arranged before wrap() that a block is computed again: recognised by what they leave."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fsshard.planning.recomputed_before import RecomputingForward, is_fairscale_forward, recognised


class Ours(RecomputingForward):
    origin = "somebody"


class GradientCheckpointingLayer(nn.Linear):
    """Named as transformers' class is."""

    gradient_checkpointing = False


def fairscale_forward(module: nn.Module) -> Any:
    """As fairscale.nn.checkpoint leaves it: a partial of a function of that module."""

    def forward(*args: Any) -> Any: ...

    forward.__module__ = "fairscale.nn.checkpoint.checkpoint_activations"
    return functools.partial(forward, module)


def test_nothing_is_known_of_a_plain_block() -> None:
    assert recognised(nn.Linear(2, 2)) == "" and recognised(GradientCheckpointingLayer(2, 2)) == ""


@pytest.mark.parametrize(
    ("make", "said"),
    [(Ours, "somebody, before wrap"), (lambda: fairscale_forward(nn.Linear(2, 2)), "FairScale's checkpoint_wrapper")],
)
def test_a_forward_that_was_replaced(make: Any, said: str) -> None:
    module = nn.Linear(2, 2)
    module.__dict__["forward"] = make()
    assert recognised(module).startswith(said)


def test_torchs_wrapper_and_transformers_switch() -> None:
    assert recognised(checkpoint_wrapper(nn.Linear(2, 2))).startswith("torch's checkpoint_wrapper")
    layer = GradientCheckpointingLayer(2, 2)
    layer.gradient_checkpointing = True
    assert recognised(layer) == "the model's own gradient checkpointing"


def test_another_partial_is_not_fairscales() -> None:
    assert is_fairscale_forward(fairscale_forward(nn.Linear(2, 2)))
    assert not is_fairscale_forward(functools.partial(print)) and not is_fairscale_forward(None)
