"""Activation checkpointing: the matched block itself, recomputed once, with the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsshard.activation import checkpoint_blocks
from fsshard.errors import ConfigurationError
from tests.zoo import ZOO


class Block(nn.Module):
    """Counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.calls = nn.Linear(4, 4), nn.Dropout(0.5), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.drop(self.linear(x)))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), nn.Linear(4, 4), Block(), nn.Linear(4, 1))


def gradients(net: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    net(torch.ones(3, 4)).sum().backward()
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(
    ("choice", "blocks"),
    [
        ({Block}, ["0", "2"]),
        (Block, ["0", "2"]),
        (lambda module: isinstance(module, Block) and module.linear.in_features == 4, ["0", "2"]),
        (None, []),
        (False, []),
    ],
)
def test_blocks_are_recomputed_with_the_same_numbers(choice: Any, blocks: list[str]) -> None:
    plain, other = model(), model()
    held = [plain[0], plain[2], other[0], other[2]]
    assert checkpoint_blocks(other, choice) == blocks
    for one, two in zip(gradients(plain), gradients(other), strict=True):
        assert torch.equal(one, two)
    assert [block.calls for block in held] == [1, 1, *([2, 2] if blocks else [1, 1])]
    assert list(other.state_dict()) == list(plain.state_dict())


def test_without_random_state_dropout_is_another() -> None:
    plain, other = model(), model()
    checkpoint_blocks(other, {Block}, preserve_rng_state=False)
    assert not all(torch.equal(a, b) for a, b in zip(gradients(plain), gradients(other), strict=True))


def test_true_means_the_units_of_the_plan() -> None:
    case = ZOO["tfno_tucker"]
    assert sorted(checkpoint_blocks(case.build(), True)) == sorted(case.owners)


@pytest.mark.parametrize(
    ("choice", "text"),
    [({nn.LSTM}, "matches no block"), (True, "matches no block"), ("Block", "expected True"), (3, "expected True")],
)
def test_bad_choices(choice: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        checkpoint_blocks(model(), choice)
