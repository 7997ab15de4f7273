"""The table of a model's modules, against what torch's own walks say."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fsshard import tensorfy
from fsshard.complex_params.slots import ModuleTable


def shared() -> nn.ModuleDict:
    """A model with a module in two places, a tied parameter, a shared buffer, and torch's checkpoint wrapper."""
    norm = nn.BatchNorm1d(4)
    model = nn.ModuleDict({"one": nn.Sequential(norm, nn.Linear(4, 4)), "two": norm, "three": nn.Linear(4, 4)})
    model["three"].weight = model["one"][1].weight
    model["three"].register_buffer("mean", norm.running_mean)
    model["three"].register_buffer("none", None)
    model["four"] = checkpoint_wrapper(nn.Sequential(nn.Linear(4, 4)))
    model["four"].register_parameter("w", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    return model


def test_names_are_torchs() -> None:
    model = shared()
    table = ModuleTable(model)
    assert list(table.modules.items()) == list(model.named_modules())
    assert [module for _, module in table.places] == [m for _, m in model.named_modules(remove_duplicate=False)]
    assert list(table.buffers()) == [name for name, _ in model.named_buffers()]
    assert all(found is held for found, held in zip(table.buffers().values(), model.buffers(), strict=True))
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert [slot.name for slot in table.slots()] == [name.replace("_checkpoint_wrapped_module.", "") for name in names]
    assert table.by_public_name()["four"] is model["four"] and table.by_public_name()["two"] is model["one"][0]


def test_what_modules_hold_is_looked_up_each_time() -> None:
    model = shared()
    table = ModuleTable(model)
    tensorfy(model)
    assert {slot.name: slot.stored for slot in table.slots()}["four.w"] == "w__real"
    model["one"][0].running_mean = torch.ones(4)
    assert table.buffers()["one.0.running_mean"] is model["one"][0].running_mean
    assert table.buffers()["three.mean"] is model["three"].mean, "shared no more"


@pytest.mark.parametrize("root", [None, 3, nn.Linear])
def test_what_is_no_module_has_none(root: object) -> None:
    table = ModuleTable(root)
    assert not table.modules and not table.places and not list(table.slots()) and not table.buffers()
