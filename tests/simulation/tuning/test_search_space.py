"""Checks which settings are tried: read off a model's profile, and written as code."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

import fsshard
from fsshard.planning.plan import Plan
from fsshard.simulation.simulation import Job
from fsshard.simulation.tuning.search_space import (
    Candidate,
    ModelProfile,
    ModuleFacts,
    code_of,
    plan_of,
    recomputations,
    units,
)
from tests.simulation.tuning.recipes import Tower


def facts(name: str, kind: str, nbytes: int, saved: int, own: int = 0) -> ModuleFacts:
    return ModuleFacts(name=name, kind=kind, nbytes=nbytes, own=own, saved=saved, once=True, container=False)


def profile() -> ModelProfile:
    """Four blocks of 1000 bytes; what each keeps for the backward is a fifth of the whole."""
    blocks = [facts(f"layers.{i}", "Block", 1000, 200, own=1000) for i in range(4)]
    return ModelProfile(modules=(facts("", "Net", 4096, 1000, own=96), *blocks), layers={"Block"})


def test_units_are_the_repeated_classes_and_sizes_from_coarse_to_fine() -> None:
    always, others = units(profile())
    assert list(always) == ["auto", "one unit", "torch's size-based", "transformer layers"]
    assert always["transformer layers"] == {"Block"}
    assert others == [{"Block"}, 512, 1]


def test_blocks_are_computed_again_that_keep_their_share() -> None:
    assert recomputations(profile()) == [{"Block"}]
    small = ModelProfile(modules=(facts("", "Net", 4096, 100_000), *profile().modules[1:]))
    assert recomputations(small) == [], "each keeps less than a hundredth"


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("auto", '"auto"'),
        ({torch.nn.Linear, "Block"}, '{"Block", "Linear"}'),
        (ShardingStrategy.SHARD_GRAD_OP, '"SHARD_GRAD_OP"'),
        (fsshard.Precision(param=torch.bfloat16), None),
        (fsshard.Checkpointing({"Block"}, offload_to_cpu=True), None),
        (print, "auto_wrap_policy"),
    ],
)
def test_a_value_is_written_as_code_or_by_its_arguments_name(value: Any, code: str | None) -> None:
    found = code_of("auto_wrap_policy", value)
    assert found == code if code is not None else eval(found) == value


def test_a_candidate_is_a_call_of_wrap() -> None:
    one = Candidate(backend="fsdp2", settings={"merge_below": 0}).changed(auto_wrap_policy={"Block"}, merge_below=...)
    assert one.settings == {"auto_wrap_policy": {"Block"}}
    assert one.code() == 'backend="fsdp2", auto_wrap_policy={"Block"}' and one.imports() == ["import fsshard"]
    precision = fsshard.Precision(param=torch.float32)
    precise = one.changed(auto_wrap_policy=size_based_auto_wrap_policy, mixed_precision=precision)
    assert [line.split()[0] for line in precise.imports()] == ["import", "import", "from"]


def test_a_real_model_goes_when_its_plan_is_made() -> None:
    job = Job(source="tests.simulation.tuning.recipes:tower", changes={}, backend="none", mesh=(1,), real=True)
    before = [id(found) for found in gc.get_objects() if type(found) is Tower]
    assert isinstance(plan_of(job, {"auto_wrap_policy": None}), Plan)
    gc.collect()
    assert [id(found) for found in gc.get_objects() if type(found) is Tower and id(found) not in before] == []
