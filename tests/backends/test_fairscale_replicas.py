"""backend="fairscale" over replicas and shards: what other ranks use, accumulate and clip, and what is refused."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsshard
from fsshard.backends.whole import state_of
from fsshard.errors import UnsupportedByBackend
from tests.models import take_step, two_heads, with_sgd
from tests.on_ranks import on_ranks
from tests.training_runs import check_equal

Step = tuple[tuple[str, ...], ...]
"""For each micro-batch, the head that each of the four ranks uses. Ranks 0 and 1 are a replica, and 2 and 3."""

STEPS: list[Step] = [
    (("a", "a", "a", "a"),),
    (("a", "a", "b", "b"),),  # a replica without a gradient of one head
    (("a", "b", "a", "b"), ("b", "b", "b", "a")),  # accumulated
    (("b", "b", "b", "b"),),
]
BOUND = 2.0**-20
"""Sums in another order: four steps at rate 0.1, gradients clipped to 0.5, of numbers below 1."""


def inputs(step: int, part: int, rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + 10 * part + rank))


def mesh() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def job_trained(quiet: bool, torchs: bool, implementation: str) -> tuple[dict[str, Tensor], list[float], list[str]]:
    """Weights, norms before clipping, and the names whose state is here."""
    options = {"implementation": implementation, "find_unused_parameters": True}
    model = fsshard.wrap(two_heads(), backend="fairscale", device_mesh=mesh(), **options)
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    norms = []
    for step, micro in enumerate(STEPS):
        for part, heads in enumerate(micro):
            last = part == len(micro) - 1
            with contextlib.nullcontext() if last or not quiet else model.no_sync():
                model(inputs(step, part, dist.get_rank()), heads[dist.get_rank()]).square().mean().backward()
        clip = torch.nn.utils.clip_grad_norm_ if torchs else None
        norms.append(float(clip(model.parameters(), 0.5) if clip else model.clip_grad_norm_(0.5)))
        take_step(optimizer)
    entries = model.backend.entries.items()
    held = [name for name, entry in entries if state_of(optimizer.inner, entry)]
    return model.state_dict(), norms, held


def by_hand() -> tuple[dict[str, Tensor], list[float]]:
    """Four replicas averaged by hand."""
    model = two_heads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    norms = []
    for step, micro in enumerate(STEPS):
        for part, heads in enumerate(micro):
            for rank, head in enumerate(heads):
                (model(inputs(step, part, rank), head).square().mean() / 4).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        take_step(optimizer)
    return {name: value.detach() for name, value in model.state_dict().items()}, norms


@pytest.mark.parametrize(("quiet", "torchs"), [(True, False), (False, True)], ids=["no_sync", "torch's own clipping"])
@pytest.mark.parametrize("implementation", ["native", "real"])
def test_replicas_that_use_other_parts(ranks: Any, quiet: bool, torchs: bool, implementation: str) -> None:
    if implementation == "real":
        pytest.importorskip("fairscale")
    weights, norms = by_hand()
    answers = ranks.run(job_trained, 4, quiet, torchs, implementation)
    for mine, found, _ in answers:
        assert mine.keys() == weights.keys()
        check_equal(dict(mine), dict(answers[0][0]))
        assert max((mine[name] - weights[name]).abs().max() for name in weights) <= BOUND
        assert found == pytest.approx(norms, rel=2.0**-18)
    held = [set(names) for _, _, names in answers]
    assert held[0] == held[2] and held[1] == held[3], "replicas divide alike"
    assert held[0] and held[1] and not held[0] & held[1] and held[0] | held[1] == set(weights)


def job_reduced_in_bfloat16() -> dict[str, Tensor]:
    precision = fsshard.Precision(reduce=torch.bfloat16)
    options = {"mixed_precision": precision, "device_mesh": mesh(), "find_unused_parameters": True}
    model, optimizer = with_sgd(two_heads(), backend="fairscale", **options)
    for step, micro in enumerate(STEPS[1:3]):
        for part, heads in enumerate(micro):
            model(inputs(step, part, dist.get_rank()), heads[dist.get_rank()]).square().mean().backward()
        take_step(optimizer)
    return dict(model.state_dict())


def test_an_earlier_mean_is_not_rounded_again(ranks: Any) -> None:
    model = two_heads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, micro in enumerate(STEPS[1:3]):
        for part, heads in enumerate(micro):
            means = {weight: [] for weight in model.parameters()}
            for rank, head in enumerate(heads):
                loss = model(inputs(step, part, rank), head).square().mean()
                gradients = torch.autograd.grad(loss, list(means), allow_unused=True, materialize_grads=True)
                for weight, gradient in zip(means, gradients, strict=True):
                    numbers = torch.view_as_real(gradient) if weight.is_complex() else gradient
                    means[weight].append(numbers.bfloat16() / 4)
            for weight, (first, second, third, fourth) in means.items():
                mean = ((first + second) + (third + fourth)).float()
                if weight.is_complex():
                    mean = torch.view_as_complex(mean)
                weight.grad = mean if weight.grad is None else weight.grad + mean
        take_step(optimizer)
    weights = ranks.run(job_reduced_in_bfloat16, 4)[0]
    for name, weight in model.state_dict().items():
        assert torch.equal(weights[name], weight), name


@on_ranks()
def test_what_cannot_be_divided_so_is_refused() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(UnsupportedByBackend) as raised:
        fsshard.wrap(two_heads(), backend="fairscale", device_mesh=mesh)
    assert "a mesh (replicate=2, shard=1), where nothing is divided; use backend='ddp'" in str(raised.value)
