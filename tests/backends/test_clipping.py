"""torch's own clipping over a wrapped model's parameters: as over bare replicas, or a typed error on every rank.

Tests fsshard/torch_private/clip_grad.py too.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import fsshard
from fsshard.backends.whole import gather_grads
from fsshard.errors import FsshardError
from tests.models import batch
from tests.on_ranks import on_ranks
from tests.optimizers import average
from tests.training_runs import DISTRIBUTED, check_equal, differences

BITS = ("ddp", "fairscale", "none")
"""Where every gradient is whole somewhere: the norm is torch's to the last bit."""
CLOSE = 4 * torch.finfo(torch.float32).eps
"""Where they are not, the sum of squares is taken in float64 and rounded once; torch's own sums in float32."""


class Waves(nn.Module):
    """A complex weight whose gradient has both halves, an odd-sized parameter, one of fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 5)
        self.weight = nn.Parameter(torch.randn(5, 3, dtype=torch.complex64))
        self.last = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.first(x)).to(torch.complex64) * (1 + 0.5j)
        return self.last((z @ self.weight).abs())


def backward(model: Any, number: int = 0) -> None:
    model(batch(number)).square().mean().backward()


def gradients(model: Any) -> dict[str, Tensor]:
    return {e.name: e.kind.to_user(g).clone() for e, g in gather_grads(model.backend) if g is not None}


def inner(model: Any) -> list[Any]:
    return list(model.module.parameters())


def clipped(backend: str, p: float, which: str, **more: Any) -> tuple[float, float, list[str], float]:
    """(norm, bare norm, what differs in the gradients, by how much at most)."""
    bare = Waves()
    backward(bare)
    average(bare)
    chosen = list(bare.parameters())[:2] if which == "some" else bare.parameters()
    want = clip_grad_norm_(chosen, 0.1, p, **more)
    model = fsshard.wrap(Waves(), backend=backend)
    fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    backward(model)
    given = {"all": model.parameters, "some": lambda: list(model.parameters())[:2], "inner": lambda: inner(model)}
    norm = clip_grad_norm_(given[which](), 0.1, p, **more)
    expected = {name: q.grad for name, q in bare.named_parameters() if q.grad is not None}
    found = gradients(model)
    apart = max(float((found[name] - expected[name]).abs().max() / expected[name].abs().max()) for name in expected)
    return float(norm), float(want), list(differences(expected, found)), apart


@pytest.mark.covering(2)
@pytest.mark.parametrize("backend", [*DISTRIBUTED, "none"])
@pytest.mark.parametrize("p", [2.0, 1.0, 3.0, math.inf])
@pytest.mark.parametrize("which", ["all", "some", "inner"])
def test_norms_are_over_all_ranks(ranks: Any, backend: str, p: float, which: str) -> None:
    """One norm on every rank over FairScale's owners, FSDP1's shards and FSDP2's rows, and of moduli where complex."""
    size = 1 if backend == "none" else 2
    if backend == "fsdp" and which != "inner":
        for error in ranks.run_expecting_errors(clipped, size, backend, p, which):
            assert isinstance(error, FsshardError) and "model.clip_grad_norm_" in str(error)
        return
    for norm, want, different, apart in ranks.run(clipped, size, backend, p, which):
        if backend in BITS:
            assert norm == want and different == []
        else:
            assert abs(norm - want) <= CLOSE * want and apart <= CLOSE


@pytest.mark.parametrize("backend", ["ddp", "fsdp2", "fairscale"])
@on_ranks()
def test_what_is_not_finite_raises_on_every_rank(backend: str) -> None:
    model = fsshard.wrap(Waves(), backend=backend)
    fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    backward(model)
    for entry in list(model.backend.entries.values())[-1:]:
        gradient = entry.grad()
        if gradient is not None and gradient.numel():
            gradient.fill_(math.inf)
    before = gradients(model)
    with pytest.raises(RuntimeError, match=r"norm of order 2\.0"):
        clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True)
    check_equal(before, gradients(model))


def job_values(backend: str) -> list[str]:
    bare = Waves().first
    bare(batch(0)).square().mean().backward()
    average(bare)
    torch.nn.utils.clip_grad_value_(bare.parameters(), 0.02)
    model = fsshard.wrap(Waves().first, backend=backend)
    fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    backward(model)
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.02)
    return list(differences({n: p.grad for n, p in bare.named_parameters()}, gradients(model)))


@pytest.mark.parametrize("backend", [*DISTRIBUTED, "none"])
def test_values_are_clipped_one_by_one(ranks: Any, backend: str) -> None:
    size = 1 if backend == "none" else 2
    if backend == "fsdp":
        errors = ranks.run_expecting_errors(job_values, size, backend)
        assert all(isinstance(error, FsshardError) for error in errors)
    else:
        assert ranks.run(job_values, size, backend) == [[]] * size
