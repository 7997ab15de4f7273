"""Who owns what, and the optimizer over the own parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsshard.errors import ConfigurationError, OptimizerError, UnsupportedByBackend
from fsshard.oss.partition import assign_owners, build_inner, check_distinct, check_separable, group_of_owner


def parameter(numel: int, dtype: torch.dtype = torch.float32, trained: bool = True) -> nn.Parameter:
    return nn.Parameter(torch.zeros(numel, dtype=dtype), requires_grad=trained)


def test_each_parameter_goes_to_the_rank_with_the_fewest_bytes() -> None:
    first, second, third = parameter(8), parameter(3), parameter(4, torch.complex64)
    owners: dict[Tensor, int] = {}
    loads = [0, 0]
    assign_owners([first, second, third], owners, loads)
    assert [owners[p] for p in (first, second, third)] == [0, 1, 1] and loads == [32, 44]


def test_owners_stay_and_frozen_parameters_weigh_one_element() -> None:
    old, frozen, new = parameter(8), parameter(100, trained=False), parameter(1)
    owners: dict[Tensor, int] = {old: 1}
    loads = [0, 32]
    assign_owners([old, frozen, new], owners, loads)
    assert (owners[old], owners[frozen], owners[new]) == (1, 0, 0) and loads == [8, 32]


def test_two_parameters_over_one_memory_are_refused_by_their_places() -> None:
    one = parameter(4)
    check_distinct([one, one, parameter(0), parameter(0)])  # the same object twice is tied, and none has no memory
    with pytest.raises(OptimizerError, match="parameters 0 and 2 are different objects over the same memory"):
        check_distinct([one, parameter(4), nn.Parameter(one.data)])


def test_a_rank_has_its_own_parameters_of_a_group_with_their_names() -> None:
    parts = [parameter(1), parameter(2), parameter(3)]
    group = {"params": parts, "param_names": ["a", "b", "c"], "lr": 0.5}
    mine = group_of_owner(group, {parts[0]: 1, parts[1]: 0, parts[2]: 1}, 1)
    assert mine["params"] == [parts[0], parts[2]] and mine["param_names"] == ["a", "c"] and mine["lr"] == 0.5


def test_what_needs_all_parameters_is_refused_on_several_ranks() -> None:
    check_separable(torch.optim.LBFGS, 1)
    check_separable(torch.optim.Adam, 2)
    with pytest.raises(UnsupportedByBackend, match="LBFGS on 2 ranks"):
        check_separable(torch.optim.LBFGS, 2)
    with pytest.raises(ConfigurationError, match="optim= must be"):
        check_separable(3, 2)


def test_defaults_that_a_class_sets_by_itself_are_left_out() -> None:
    """As Lightning hands them over: AdamW (torch 2.13) keeps a default that its constructor does not take."""
    defaults: dict[str, Any] = dict(torch.optim.AdamW([parameter(1)], lr=0.5).defaults)
    assert "decoupled_weight_decay" in defaults
    made = build_inner(torch.optim.AdamW, [{"params": [parameter(1)]}], defaults)
    assert type(made) is torch.optim.AdamW and made.defaults["lr"] == 0.5
    with pytest.raises(TypeError, match="decoupled_weight_decay"):
        build_inner(torch.optim.AdamW, [{"params": [parameter(1)]}], {**defaults, "decoupled_weight_decay": False})
