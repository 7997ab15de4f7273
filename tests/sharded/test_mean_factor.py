"""model.mean_factor: the mean over all tokens, against bare replicas of torch alone that are weighted by hand."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsshard
from fsshard.errors import FsshardError, RankMismatch
from tests.models import take_step, with_sgd
from tests.on_ranks import on_ranks
from tests.parity.test_any_ranks import averaged, tree
from tests.sets import often
from tests.sharded.test_gradient_leaves import Net
from tests.training_runs import ENGINES, NAMES, check_equal

STEPS = 3
TOKENS = 6
LEAVES = 8
SCALE = 256.0
WAYS = ("plain", "accumulated", "scaled")
SCALED = ("scaled", "fp16")
"""Ways with a GradScaler; in the second one gradients are sent, and added up, in float16."""
NATIVE = [engine for engine in ENGINES if engine.get("implementation") != "real"]
NATIVE_NAMES = [engine["backend"] for engine in NATIVE]


def count_of(step: int, part: int, rank: int) -> int:
    """Return how many tokens of a micro-batch count: from none to all."""
    return (2 + 5 * rank + 3 * part + 2 * step) % (TOKENS + 1)


def sum_of(model: Any, step: int, part: int, rank: int, rows: slice = slice(None)) -> Tensor:
    """Return the sum of the losses of the tokens that count."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * part + rank)
    x = torch.randn(TOKENS, 9, generator=generator)
    mask = torch.arange(TOKENS) < count_of(step, part, rank)
    return (model(x[rows]).square().sum(1) * mask[rows]).sum()


def parts_of(way: str) -> int:
    return 3 if way == "accumulated" else 1


def gradients_of(model: nn.Module) -> list[Tensor]:
    found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


def bare_trained(means_of: Callable[[nn.Module, int], Iterable[Tensor]], steps: int = STEPS) -> dict[str, Tensor]:
    """Train a bare model with the mean gradients that ``means_of(model, step)`` computes by hand."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        for parameter, mean in zip(model.parameters(), means_of(model, step), strict=True):
            parameter.grad = mean
        take_step(optimizer)
    return {name: value.detach() for name, value in model.state_dict().items()}


def wrapped(**settings: Any) -> tuple[Any, Any]:
    model = fsshard.wrap(Net(), **settings)
    return model, fsshard.build_optimizer(model, torch.optim.AdamW, lr=1e-2)


def weights_of(model: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def by_hand(ranks: int, way: str, mesh: tuple[int, int] | None = None) -> dict[str, Tensor]:
    """Train bare replicas, one after the other, each weighted by the number of ranks over all tokens of the step."""
    scale = SCALE if way in SCALED else 1.0
    dtype = torch.float16 if way == "fp16" else None

    def means_of(model: nn.Module, step: int) -> Iterator[Tensor]:
        total = sum(count_of(step, part, rank) for part in range(parts_of(way)) for rank in range(ranks))
        gradients = []
        for rank in range(ranks):
            for part in range(parts_of(way)):
                (sum_of(model, step, part, rank) * (ranks / total) * scale).backward()
            gradients.append(gradients_of(model))
        for of_ranks in zip(*gradients, strict=True):
            yield averaged(list(of_ranks), mesh, dtype) / scale

    return bare_trained(means_of)


def job_trained(settings: dict[str, Any], way: str, mesh: tuple[int, int] | None = None) -> dict[str, Tensor]:
    if mesh is not None:
        settings = {**settings, "device_mesh": init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))}
    if way == "fp16":
        settings = {**settings, "mixed_precision": fsshard.Precision(param=None, reduce=torch.float16)}
    model, optimizer = wrapped(**settings)
    scaler = fsshard.GradScaler(model, init_scale=SCALE, enabled=way in SCALED)
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in range(STEPS):
        factor = model.mean_factor([count_of(step, part, rank) for part in range(parts_of(way))])
        for part in range(parts_of(way)):
            last = part == parts_of(way) - 1
            with contextlib.nullcontext() if last else model.no_sync():
                scaler.scale(sum_of(model, step, part, rank) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return weights_of(model)


def check(ranks: Any, settings: dict[str, Any], way: str, size: int, mesh: tuple[int, int] | None = None) -> None:
    expected = by_hand(size, way, mesh)
    for weights in ranks.run(job_trained, size, settings, way, mesh):
        check_equal(expected, weights)


ALONE = [({"backend": "none"}, way, 1) for way in WAYS]
PAIRS = [*itertools.product(ENGINES, WAYS, [2])]
FOURS = [*itertools.product(NATIVE, (*WAYS, "fp16"), [4])]
AT_ONCE = [
    *ALONE,
    *zip(ENGINES, itertools.cycle(WAYS), [2] * 5, strict=False),
    *zip(NATIVE, (*WAYS, "fp16"), [4] * 4, strict=True),
]


@pytest.mark.parametrize(("engine", "way", "size"), often([*ALONE, *PAIRS, *FOURS], *AT_ONCE), ids=str)
def test_ranks_have_the_bits_of_replicas_weighted_by_hand(ranks: Any, engine: Any, way: str, size: int) -> None:
    check(ranks, engine, way, size)


@pytest.mark.parametrize("engine", NATIVE[1:], ids=NATIVE_NAMES[1:])
def test_replicas_that_are_sharded_within(ranks: Any, engine: dict[str, Any]) -> None:
    check(ranks, engine, "accumulated", 4, (2, 2))


@on_ranks()
def test_a_mean_of_means_is_another_training() -> None:
    model, optimizer = wrapped(backend="ddp")
    for step in range(STEPS):
        (sum_of(model, step, 0, dist.get_rank()) / max(1, count_of(step, 0, dist.get_rank()))).backward()
        take_step(optimizer)
    found, expected = (weights["last.weight"] for weights in (weights_of(model), by_hand(2, "plain")))
    assert float((found - expected).abs().max()) > 1e-3


# ------------------------------------------------------------------------------------------------ leaves, join, meshes


def leaves_by_hand() -> dict[str, Tensor]:
    """Add up the leaves' gradients in a tree; the factor does not know how many ranks there are."""

    def means_of(model: nn.Module, step: int) -> Iterator[Tensor]:
        total = sum(count_of(step, 0, leaf) for leaf in range(LEAVES))
        gradients = []
        for leaf in range(LEAVES):
            (sum_of(model, step, 0, leaf) * (LEAVES / total)).backward()
            gradients.append(gradients_of(model))
        for of_leaves in zip(*gradients, strict=True):
            yield tree(list(of_leaves)) / LEAVES

    return bare_trained(means_of)


@pytest.mark.covering
@pytest.mark.parametrize(
    ("engine", "world_size"),
    [({"backend": "none"}, 1), *((engine, size) for engine in NATIVE for size in (2, 4))],
    ids=lambda value: value["backend"] if isinstance(value, dict) else str(value),
)
@on_ranks()
def test_leaves_have_one_factor_on_any_number_of_ranks(engine: dict[str, Any], world_size: int) -> None:
    expected = leaves_by_hand()
    model, optimizer = wrapped(**engine)
    data = fsshard.data_rank()
    for step in range(STEPS):
        mine = range(data.rank, LEAVES, data.size)
        factor = model.mean_factor([count_of(step, 0, leaf) for leaf in mine], leaves=LEAVES)
        for leaf in model.leaves(LEAVES):
            (sum_of(model, step, 0, leaf) * factor).backward()
        take_step(optimizer)
    check_equal(expected, weights_of(model))


BATCHES = (2, 4)
"""How many batches each of two ranks has."""


def joined_by_hand() -> dict[str, Tensor]:
    def means_of(model: nn.Module, step: int) -> Iterator[Tensor]:
        going_on = [rank for rank, number in enumerate(BATCHES) if step < number]
        total = sum(count_of(step, part, rank) for part in range(2) for rank in going_on)
        gradients = []
        for rank in going_on:
            for part in range(2):
                (sum_of(model, step, part, rank) * (len(going_on) / total)).backward()
            gradients.append(gradients_of(model))
        for of_ranks in zip(*gradients, strict=True):
            yield averaged(list(of_ranks), None, None)

    return bare_trained(means_of, max(BATCHES))


@pytest.mark.parametrize("engine", ENGINES, ids=NAMES)
@on_ranks()
def test_a_batch_that_is_repeated_does_not_count(engine: dict[str, Any]) -> None:
    expected = joined_by_hand()
    model, optimizer = wrapped(**engine)
    rank = dist.get_rank()
    with fsshard.join(model) as joined:
        for step in joined(range(BATCHES[rank])):
            factor = model.mean_factor([count_of(step, 0, rank), count_of(step, 1, rank)])
            with model.no_sync():
                (sum_of(model, step, 0, rank) * factor).backward()
            (sum_of(model, step, 1, rank) * factor).backward()
            take_step(optimizer)
    check_equal(expected, weights_of(model))


HALVES = (slice(0, 2), slice(2, None))
"""The tokens that each rank of a context-parallel pair has."""


def split_by_hand() -> dict[str, Tensor]:
    """Two data ranks, each of two ranks that have some of its tokens: means over data, and their sums."""

    def means_of(model: nn.Module, step: int) -> Iterator[Tensor]:
        total = count_of(step, 0, 0) + count_of(step, 0, 1)
        means = []
        for rows in HALVES:
            gradients = []
            for rank in range(2):
                (sum_of(model, step, 0, rank, rows) * (2 / total)).backward()
                gradients.append(gradients_of(model))
            means.append([averaged(list(of_ranks), None, None) for of_ranks in zip(*gradients, strict=True)])
        for first, second in zip(*means, strict=True):
            yield first + second

    return bare_trained(means_of)


@pytest.mark.parametrize("engine", NATIVE, ids=NATIVE_NAMES)
@on_ranks(4)
def test_ranks_that_see_the_same_samples_count_once(engine: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "cp"))
    rows = HALVES[mesh.get_local_rank("cp")]
    model, optimizer = wrapped(device_mesh=mesh["data"], replicated={"": mesh["cp"]}, **engine)
    rank = fsshard.data_rank(mesh).rank
    with pytest.raises(RankMismatch) as refused:
        model.mean_factor(rows.stop or 4)
    for step in range(STEPS):
        factor = model.mean_factor(count_of(step, 0, rank))
        (sum_of(model, step, 0, rank, rows) * factor).backward()
        take_step(optimizer)
    check_equal(split_by_hand(), weights_of(model))
    assert "ranks 0 and 1 differ in other mesh dimensions than data" in str(refused.value)
    assert "expected the same count, got 2 and 4; count whole samples" in str(refused.value)


# ------------------------------------------------------------------------------------------------ arguments


@on_ranks(1)
def test_numbers() -> None:
    model = fsshard.wrap(Net(), backend="none")
    assert model.mean_factor(4) == 0.25
    assert model.mean_factor([3, torch.tensor(1), np.int64(4), torch.tensor([2, 6])]) == 1 / 16
    assert model.mean_factor(0.1) == 1 / 0.1, "weights of points"
    assert model.mean_factor([0.1] * 10) == 1.0, "sums are rounded once"
    assert model.mean_factor((2**53 - 1, 1)) == 2.0**-53


BAD: tuple[Any, ...] = (
    *("12", None, -1, [4, -4, 9], float("nan"), float("inf"), True, 1j),
    *(
        torch.tensor([True, False]),
        torch.tensor(-2),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2, device="meta"),
    ),
)


def job_refused() -> list[str]:
    """Return what this rank was told, call by call; then train."""
    rank = dist.get_rank()
    model, optimizer = with_sgd(Net(), backend="fsdp2")
    told = []

    def refused(*counts: Any, **leaves: Any) -> None:
        with pytest.raises(FsshardError) as error:
            model.mean_factor(*counts, **leaves)
        told.append(f"{type(error.value).__name__}: {error.value}")

    for bad in BAD:
        refused(bad if rank == 1 else 5)
    refused(0)
    refused(4, leaves=3)
    refused(4, leaves=4 << rank)
    with model.no_sync():
        sum_of(model, 0, 0, rank).backward()
    refused(4)
    sum_of(model, 0, 0, rank).backward()
    model.mean_factor(4)
    optimizer.zero_grad()
    for _ in model.leaves(2):
        refused(4)
        (sum_of(model, 0, 0, rank) * 0.5).backward()
    optimizer.step()
    assert model.mean_factor(rank) == 2.0
    return told


def test_bad_counts_are_refused_on_every_rank(ranks: Any) -> None:
    first, second = ranks.run(job_refused, 2)
    for here, there in zip(first[: len(BAD)], second, strict=False):
        assert here.startswith("ConfigurationError: rank 1: model.mean_factor(): expected how many tokens")
        assert there == here.replace("rank 1: ", "")
    assert "got '12'" in second[0]
    for told in (first, second):
        nothing, odd, unlike, between, within = told[len(BAD) :]
        assert nothing.startswith("ConfigurationError") and "all ranks have counted 0" in nothing
        assert odd.startswith("ConfigurationError") and "2 ranks cannot share 3 leaves evenly" in odd
        assert unlike.startswith("RankMismatch") and "got 4 on rank 0 and 8 on rank 1" in unlike
        assert between.startswith("OptimizerError") and "between two of its micro-batches" in between
        assert within.startswith("ModelError") and "within `for leaf in model.leaves(2)`" in within
