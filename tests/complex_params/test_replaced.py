"""Parameters that stored ones have replaced: given back, carried over, refused."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import Tensor, nn

from fsshard import ModelError, tensorfy, untensorfy
from fsshard.errors import StaleParameter
from tests.complex_params.training import equal, gradients, weights
from tests.training_runs import call
from tests.zoo import ZOO, ComplexAffine, ToReal, number

pytestmark = pytest.mark.filterwarnings("ignore:Complex modules are a new feature under active development")


def test_untensorfy_when_nobody_holds_the_old_parameters() -> None:
    model = ZOO["tied"].build()
    model.first.w.mark = "kept"
    values = copy.deepcopy(weights(model))
    tensorfy(model)
    gc.collect()
    model.first.w__real.grad = torch.ones_like(model.first.w__real)
    untensorfy(model)
    assert equal(values, weights(model))
    assert model.first.w is model.second.w and model.gain is model.alias
    assert isinstance(model.first.w, nn.Parameter) and model.first.w.mark == "kept"
    assert torch.equal(model.first.w.grad, torch.full((4, 4), 1 + 1j))


def test_models_that_share_a_parameter_may_be_tensorfied_one_by_one() -> None:
    one, other = ComplexAffine(), ComplexAffine()
    other.w = one.w
    tensorfy(one), tensorfy(other)
    assert one.w__real is other.w__real
    original = untensorfy(one).w
    assert isinstance(original, nn.Parameter)


def test_sharing_after_one_side_has_moved_is_refused() -> None:
    one, other = ComplexAffine(), ComplexAffine()
    other.w = one.w
    tensorfy(one).to(torch.complex128)
    with pytest.raises(ModelError, match="'w' was tensorfied before"):
        tensorfy(other)


@pytest.mark.parametrize("held", [False, True])
def test_requires_grad_and_gradients_are_carried_over_and_back(held: bool) -> None:
    """Into the parameters of before where somebody holds them, else into new ones."""
    model = ZOO["frozen"].build()
    old = list(model.parameters()) if held else []
    ZOO["frozen"].loss(call(model, ZOO["frozen"].batch(0, 0))).backward()
    before = copy.deepcopy(gradients(model))
    tensorfy(model)
    assert not model.first.w__real.requires_grad and not model.first.w.requires_grad
    assert model.second.w__real.requires_grad and model.second.w.requires_grad
    assert equal(gradients(model), before)
    model.second.w__real.grad.zero_()
    model.second.w__real.requires_grad_(False)
    untensorfy(model)
    assert not model.second.w.requires_grad and not model.second.w.grad.any()
    assert equal(model.first.b.grad, before["first.b"])
    assert not held or all(a is b for a, b in zip(old, model.parameters(), strict=True))


class Captured(nn.Module):
    """Keeps its weight in a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.w = number(4, 4)
        weight = self.w
        self.apply_weight = lambda x: x.to(torch.complex64) @ weight

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_weight(x)


def test_a_captured_parameter_raises_in_backward() -> None:
    model = tensorfy(nn.Sequential(Captured(), ToReal()))
    with pytest.raises(StaleParameter, match=r"'0\.w' was captured before fsshard replaced it"):
        model(torch.randn(2, 4)).sum().backward()
