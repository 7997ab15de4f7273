"""Policies that find whole settings: wrap() asks them, whatever they are; plan() says what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import fsshard
from fsshard.errors import ConfigurationError
from fsshard.planning.searched_policies import SearchedPolicy, searched_policy


class Everything:
    """Finds one unit per linear layer, recomputed, under the backend that it is told."""

    given: Mapping[str, Any]

    def find_settings(self, model: nn.Module, optimizer: Any, given: Mapping[str, Any], group: Any) -> dict[str, Any]:
        type(self).given = given
        found = {"auto_wrap_policy": {nn.Linear}, "activation_checkpointing": {nn.Linear}}
        return {**found, **given, "backend": "none" if group.size() == 1 else "ddp", "bucket_cap_mb": 3}


def settings_of_wrapped() -> tuple[list[str], list[str], dict[str, Any], dict[str, Any]]:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    wrapped = fsshard.wrap(model, auto_wrap_policy=Everything(), find_unused_parameters=True, cpu_offload=False)
    wrapped(torch.ones(1, 2)).sum().backward()
    plan, backend = wrapped.plan, wrapped.backend
    return list(plan.unit_names), list(plan.recomputed), dict(Everything.given), dict(backend.settings.options)


def test_wrap_goes_on_with_what_a_policy_object_found(ranks: Any) -> None:
    for units, recomputed, given, options in ranks.run(settings_of_wrapped, 2):
        assert units == recomputed == ["0", "2"]
        assert given == {"backend": "auto", "find_unused_parameters": True}  # what is left at its default is not chosen
        assert options["bucket_cap_mb"] == 3


def test_arguments_go_with_a_name_only() -> None:
    assert searched_policy("auto", None) is None and searched_policy({nn.Linear}, None) is None
    assert isinstance(searched_policy("tuned", None), SearchedPolicy)
    for policy in ("auto", Everything()):
        with pytest.raises(ConfigurationError, match=r"tuning=\{\} goes with auto_wrap_policy='tuned'"):
            searched_policy(policy, {})


def test_a_plan_by_itself_is_not_searched() -> None:
    with pytest.raises(ConfigurationError, match=r"fsshard\.wrap"):
        fsshard.plan(nn.Linear(2, 2), auto_wrap_policy=Everything())
