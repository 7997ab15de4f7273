"""A model's distinct parameters: names, places, and what the user sees of each."""

from __future__ import annotations

import torch
from torch import nn

import fsshard
from fsshard.complex_params.slots import ModuleTable
from fsshard.planning.entries import collect_entries


class Tied(nn.Module):
    """Two layers with one weight, and a complex one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.spectral = nn.Parameter(torch.zeros(2, 5, dtype=torch.complex64))


def test_a_tied_parameter_is_one_entry_with_all_its_places() -> None:
    found = collect_entries(ModuleTable(Tied()))
    assert sorted(found) == ["first.weight", "spectral"]
    assert [slot.name for slot in found["first.weight"].slots] == ["first.weight", "second.weight"]


def test_the_user_sees_complex_numbers_where_pairs_are_stored() -> None:
    module = Tied()
    fsshard.tensorfy(module)
    entry = collect_entries(ModuleTable(module))["spectral"]
    assert entry.parameter.dtype == torch.float32 and entry.stored_shape == (2, 5, 2)
    assert entry.dtype == torch.complex64 and entry.shape == (2, 5)
