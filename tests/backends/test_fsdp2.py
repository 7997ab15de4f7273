"""FSDP2: what the backend shields from, shown in raw torch.

Tests fsshard/backends/torch_sharded.py too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fsshard
from tests.models import net
from tests.training_runs import DISTRIBUTED, Run, compare


def job_raw(what: str) -> str:
    from torch.distributed.fsdp import fully_shard

    try:
        if what == "complex":
            model: Any = fully_shard(net())
            model(torch.ones(2, 4))
        elif what == "tied":
            first, second = nn.Linear(4, 4), nn.Linear(4, 4)
            second.weight = first.weight
            fully_shard(first)
            fully_shard(second)
            fully_shard(nn.Sequential(first, second))(torch.ones(2, 4))
        elif what == "scalar":
            module = nn.Linear(4, 4)
            module.scale = nn.Parameter(torch.tensor(1.0))
            fully_shard(module)
        else:
            module = nn.Linear(4, 6)
            module.weight = nn.Parameter(torch.randn(4, 6).t())
            fully_shard(module)
    except (AssertionError, ValueError, NotImplementedError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("complex", "uniform original parameter dtype"),
        ("tied", "shared"),
        ("scalar", "scalar"),
        ("layout", "contiguous"),
    ],
)
def test_what_raw_fsdp2_refuses(ranks: Any, what: str, text: str) -> None:
    assert text in ranks.run(job_raw, 2, what)[0]


@pytest.mark.parametrize("case", ["tied", "t5", "zero_dim", "transposed", "plain", "odd_first"])
def test_and_the_backend_trains(ranks: Any, case: str) -> None:
    assert ranks.run(compare, 2, [Run(case, backend) for backend in DISTRIBUTED]) == [[], []]


def test_a_dimension_smaller_than_the_world(ranks: Any) -> None:
    """A rank without any row takes part in everything."""
    for found in ranks.run(
        compare, 4, [Run("odd_first", "fsdp2", steps=2, optimizer=name) for name in ("Adam", "Adam")]
    ):
        assert found == []


def job_attributes() -> bool:
    module = net()
    module.first.weight.mark = "kept"
    model = fsshard.wrap(module, backend="fsdp2")
    return getattr(model.backend.entries["first.weight"].parameter, "mark", None) == "kept"


def test_python_attributes_of_parameters_survive(ranks: Any) -> None:
    assert ranks.run(job_attributes, 2) == [True, True]


def job_memory(backend: str) -> tuple[int, int]:
    model = fsshard.wrap(net(), backend=backend)
    entries = model.backend.entries.values()
    return sum(model.backend.local_value(e).untyped_storage().nbytes() for e in entries), model.plan.nbytes


def test_a_rank_holds_its_part(ranks: Any) -> None:
    """Half of the bytes, up to the padding of dim 0 to whole rows (less than one row per parameter)."""
    for held, whole in ranks.run(job_memory, 2, "fsdp2"):
        assert held < 0.7 * whole


def job_gradient_behind_an_odd_one() -> list[float]:
    from tests.zoo import ZOO

    case = ZOO["odd_first"]
    model = fsshard.wrap(case.build(), backend="fsdp2", auto_wrap_policy=None)
    model(*case.batch(torch.distributed.get_rank(), 0)).abs().square().mean().backward()
    shown = {name: p for name, p in model.named_parameters() if p.is_complex()}
    for parameter in shown.values():
        parameter.grad._local_tensor.zero_()  # through the view, as a user's own clipping would
    norm = model.clip_grad_norm_(1e9)
    real = [p.grad._local_tensor.square().sum() for p in model.parameters() if not p.is_complex()]
    total = torch.stack(real).sum()
    torch.distributed.all_reduce(total)
    return [norm.item(), total.sqrt().item(), float(len(shown))]


def test_a_complex_gradient_behind_an_odd_sized_one_is_shown_over_its_memory(ranks: Any) -> None:
    for norm, of_the_real_ones, complex_ones in ranks.run(job_gradient_behind_an_odd_one, 2):
        assert complex_ones > 0
        assert norm == pytest.approx(of_the_real_ones, rel=1e-6)
