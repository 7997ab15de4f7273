"""The formulas, on numbers that can be checked by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import fsshard
from fsshard.backends import backend_class
from fsshard.planning.bounds import Bounds, Circumstances, bounds_of, sent


def model() -> nn.Module:
    first, second = nn.Linear(100, 100, bias=False), nn.Linear(100, 300, bias=False)
    return nn.Sequential(first, second)


P, U = 4 * 40_000, 4 * 30_000


def bounds(backend: str, **changes: object) -> Bounds:
    given = Circumstances(shards=4, state_ratio=2.0, activations=1000)
    precision = changes.pop("mixed_precision", None)
    plan = fsshard.plan(model(), auto_wrap_policy={nn.Linear}, mixed_precision=precision)
    return bounds_of(plan, backend_class(backend, 4).facts.divides, dataclasses.replace(given, **changes))


def test_replicas() -> None:
    found = bounds("ddp")
    assert found.peak == 4 * P and found.payloads == {"all_reduce": P} and found.sent == 2 * 3 * P // 4
    assert bounds("ddp", shards=1).sent == 0 and bounds("none", shards=1).peak == 4 * P


def test_owners_hold_at_least_the_largest_parameter() -> None:
    found = bounds("fairscale")
    assert found.peak == P + 3 * U and found.sent == 2 * 3 * P // 4
    assert bounds("fairscale", shards=2).peak == P + 3 * U


def test_shards_hold_the_largest_unit_and_its_gradient() -> None:
    for backend in ("fsdp", "fsdp2"):
        found = bounds(backend)
        assert found.peak == 3 * P // 4 + 2 * U
        assert found.payloads == {"all_gather": 2 * P - U, "reduce_scatter": P}
        assert found.by_kind["gathered units"] == U and found.by_kind["gradients"] == P // 4


def test_units_that_are_joined_are_one() -> None:
    found = bounds("fsdp2", comm_groups={"": ("0.weight", "1.weight")})
    assert found.payloads == {"all_gather": P, "reduce_scatter": P} and found.sent == 2 * 3 * P // 4
    assert found.by_kind["gathered units"] == P and found.peak == 3 * P // 4 + 2 * P


def test_activations_count_where_they_are_more() -> None:
    assert bounds("ddp", activations=10 * P).peak == 3 * P + 10 * P
    assert bounds("fsdp2", activations=10 * P).peak == 3 * P // 4 + 10 * P
    assert bounds("fsdp2", activations=10 * P, stays_gathered=True).peak == 3 * P // 4 + 11 * P


def test_units_count_in_the_dtype_in_which_they_compute() -> None:
    found = bounds("fsdp2", mixed_precision=fsshard.Precision(param=torch.bfloat16))
    assert found.peak == 3 * P // 4 + U and found.payloads == {"all_gather": P - U // 2, "reduce_scatter": P // 2}
    assert bounds("ddp", mixed_precision=fsshard.Precision(param=torch.bfloat16)).payloads == {"all_reduce": P // 2}


def test_a_frozen_unit_is_gathered_once() -> None:
    frozen = model()
    frozen.get_submodule("0").requires_grad_(False)
    plan = fsshard.plan(frozen, auto_wrap_policy={nn.Linear})
    found = bounds_of(plan, backend_class("fsdp2", 4).facts.divides, Circumstances(shards=4, state_ratio=2.0))
    assert found.payloads == {"all_gather": P, "reduce_scatter": U}


def test_where_parameters_may_take_no_part_little_is_certain() -> None:
    assert bounds("fsdp2", partly=True).peak == P // 4 + 1000 and bounds("fsdp2", partly=True).sent == 0
    assert bounds("ddp", partly=True).peak == P + 1000 and bounds("fairscale", partly=True).by_kind["gradients"] <= 1


def test_offloaded_shards_leave_the_device() -> None:
    assert bounds("fsdp2", offloaded=True).peak == 2 * U


def test_accumulation_gathers_for_each_batch_and_replicas_reduce_once_more() -> None:
    assert bounds("fsdp2", micro_batches=3).payloads["all_gather"] == 3 * (2 * P - U)
    assert bounds("fsdp2", replicas=2).payloads["all_reduce"] == P // 4


@pytest.mark.parametrize(
    ("kind", "ranks", "expected"),
    [
        ("all_gather", 4, 750),
        ("reduce_scatter", 4, 750),
        ("all_reduce", 4, 1500),
        ("broadcast", 2, 500),
        ("send", 4, 1000),
        ("receive", 4, 0),
        ("all_reduce", 1, 0),
        ("all_gather", 0, 0),
    ],
)
def test_a_rank_sends_its_share(kind: str, ranks: int, expected: float) -> None:
    assert sent(kind, 1000, ranks) == expected
