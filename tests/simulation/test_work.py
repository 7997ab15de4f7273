"""The work of a step is counted: flops by dtype, bytes written, operators."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

import fsshard
from fsshard.recipes.recipe import Recipe
from fsshard.simulation.simulation import Job, simulate
from fsshard.simulation.tracking import Tracker
from fsshard.simulation.work import RECOMPUTATION, Work
from tests.forked import forking


def work_of(step: object) -> Work:
    assert callable(step)
    with Tracker() as tracker:
        step()
    return tracker.usage().work


def test_products_count_by_dtype_and_complex_ones_four_times() -> None:
    real, halves = torch.ones(8, 8), torch.ones(8, 8, dtype=torch.bfloat16)
    mixed = torch.ones(8, 8, dtype=torch.complex128)
    found = work_of(lambda: (real @ real, halves @ halves, mixed @ mixed))
    flops = 2 * 8**3
    assert found.flops == {"float32": flops, "bfloat16": flops, "float64": 4 * flops}
    assert found.operators == 3 and found.written == 64 * (4 + 2 + 16)


def test_transforms_and_attention_count() -> None:
    x = torch.ones(3, 64)
    assert work_of(lambda: torch.fft.rfft(x)).flops == {"float32": int(2.5 * x.numel() * math.log2(64))}
    assert work_of(lambda: torch.fft.fft(x + 0j)).flops == {"float32": 5 * x.numel() * int(math.log2(64))}
    q = torch.ones(1, 2, 16, 8, requires_grad=True)
    attention = nn.functional.scaled_dot_product_attention
    forward = work_of(lambda: attention(q, q, q)).flops["float32"]
    assert forward == 2 * 2 * (2 * 16 * 16 * 8)  # heads, products, multiplications and additions
    whole = work_of(lambda: attention(q, q, q).sum().backward()).flops["float32"]
    assert whole == forward + 5 * forward // 2  # torch's formula of the backward: five products


def test_products_with_vectors_count() -> None:
    for dtype, times in ((torch.float64, 2), (torch.complex128, 8)):
        a, x, y = torch.ones(8, 5, dtype=dtype), torch.ones(5, dtype=dtype), torch.ones(8, dtype=dtype)
        assert work_of(lambda: a @ x).flops == {"float64": times * 8 * 5}  # noqa: B023
        assert work_of(lambda: torch.addmv(y, a, x)).flops == {"float64": times * 8 * 5}  # noqa: B023
        assert work_of(lambda: y.addmv_(a, x)).flops == {"float64": times * 8 * 5}  # noqa: B023
        assert work_of(lambda: (x @ x, torch.vdot(x, x))).flops == {"float64": 2 * times * 5}  # noqa: B023


def test_recurrent_layers_count() -> None:
    time, samples, width, hidden = 7, 3, 4, 6
    x = torch.ones(time, samples, width, requires_grad=True)
    layer = nn.LSTM(width, hidden, num_layers=2, bidirectional=True)
    products = 2 * 4 * hidden * (width + hidden) + 2 * 4 * hidden * (2 * hidden + hidden)
    forward = 2 * time * samples * products
    with torch.no_grad():
        assert work_of(lambda: layer(x)[0]).flops == {"float32": forward}
    assert work_of(lambda: layer(x)[0].sum().backward()).flops == {"float32": 3 * forward}


def test_operators_without_a_formula_are_named() -> None:
    large, small = torch.eye(64), torch.eye(4)
    assert work_of(lambda: torch.linalg.eigh(small)).uncounted == ()
    found = work_of(lambda: (torch.linalg.eigh(large), torch.cdist(large, large, 1.0), torch.linalg.qr(large)))
    assert found.uncounted == ("_cdist_forward", "_linalg_eigh", "linalg_qr")
    with forking():
        made = fsshard.estimate(Pair(), batch=torch.ones(2, 4), loss=with_eigenvalues, backend="none")
    assert "flops of _linalg_eigh are missing: there is no formula" in str(made)


def with_eigenvalues(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).sum() + torch.linalg.eigvalsh(torch.eye(64)).sum()


def test_a_view_writes_nothing_and_an_operator_in_place_what_it_changes() -> None:
    x, several = torch.ones(16), [torch.ones(4), torch.ones(5)]
    assert work_of(lambda: x.view(4, 4).t()) == Work(flops={}, written=0, operators=2)
    assert work_of(lambda: torch.empty(100)).written == 0
    assert work_of(lambda: x.add_(1.0)).written == 64
    assert work_of(lambda: torch._foreach_add_(several, 1.0)) == Work(flops={}, written=36, operators=1)


def test_a_recomputed_block_costs_the_host_more_than_its_operators() -> None:
    def work(again: object) -> Work:
        recipe = Recipe(build=Pair, batches=ones, loss=total, activation_checkpointing=again, accumulate=2)
        return simulate(Job(source=recipe, changes={}, backend="ddp", mesh=(2,), device="cuda")).usage.work

    first, second, third = work(None), work({"Tanhs"}), work(fsshard.Checkpointing({"Tanhs"}, True, recompute=False))
    assert second.flops["float32"] == first.flops["float32"] + 2 * (2 * 2 * 4 * 4)
    assert 0 < second.operators - first.operators - 2 * RECOMPUTATION < 40
    assert third.flops == first.flops and abs(third.operators - first.operators - 2 * RECOMPUTATION) < 40


class Tanhs(nn.Sequential):
    """A block."""


class Pair(nn.Sequential):
    """A block and a layer."""

    def __init__(self) -> None:
        super().__init__(Tanhs(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4))


def ones(rank: int, world_size: int, number: int) -> torch.Tensor:
    return torch.ones(2, 4)


def total(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).sum()
