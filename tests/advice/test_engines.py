"""The advice of fsshard/backends, followed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fsshard
from tests.advice.following import Scale, batch, cases, is_right, plain, refuse, refused, square


def case_values_are_assigned() -> None:
    from torch.distributed.tensor import Replicate, distribute_tensor

    model = fsshard.wrap(plain(), backend="fsdp2")
    weight = next(model.parameters())
    with refused(
        "write to weights within `with torch.no_grad(), model.full_parameters(writeback=True):`, alike on every rank"
    ):
        weight[0] = 3.0
    with refused("change the model before fsshard.wrap"):
        weight.data = torch.ones(2, 2)
    whole = distribute_tensor(torch.full((6, 4), 2.0), weight.device_mesh, [Replicate()])
    weight.data = whole
    assert model.state_dict()["0.weight"].eq(2).all()
    weight.data = torch.full((6, 4), 3.0)
    assert model.state_dict()["0.weight"].eq(3).all()
    total = sum(p.detach().square().sum() for p in model.parameters())
    with refused("On every rank write value.full_tensor().item(), or compute with the whole weights within"):
        total.item()
    with model.full_parameters():
        expected = float(sum(p.detach().double().square().sum() for p in model.module.parameters()))
    assert total.full_tensor().item() == pytest.approx(expected)


def case_backwards() -> None:
    told = "call model(x). Or every backward since the last step ran under no_sync(): run the last one outside"
    refuse(told, loss=lambda model, x: square(model.module, x), backend="ddp")
    with refused("call what wrap returned"):
        fsshard.wrap(plain(), backend="fsdp2", auto_wrap_policy={Scale}, merge_below=0).module[1](torch.ones(3, 6))
    model = fsshard.wrap(plain(), backend="fsdp")
    model(batch())
    with refused("whole in forwards of the wrapped model (call model(x), not model.module(x) or"):
        model.module(batch())
    is_right(model)


@pytest.mark.parametrize("case", cases(globals()), ids=lambda case: case.__name__)
def test_advice_is_right(ranks: Any, case: Any) -> None:
    ranks.run(case, 2)
