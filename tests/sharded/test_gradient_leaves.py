"""model.leaves: one step of several micro-batches, against a serial loop of torch alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from fsshard.errors import ConfigurationError, ModelError, OptimizerError, RankMismatch
from tests.models import Spectral, take_step, with_sgd
from tests.on_ranks import on_ranks
from tests.parity.test_any_ranks import tree
from tests.sets import often
from tests.training_runs import check_equal, differences

LEAVES = 8
STEPS = 3
ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"backend": "ddp"},
    "fsdp": {"backend": "fsdp"},
    "fsdp2": {"backend": "fsdp2"},
    "fairscale": {"backend": "fairscale", "implementation": "native"},
}


class Net(nn.Module):
    """Complex weights, and noise if it is asked for."""

    def __init__(self, noise: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.spectral, self.last = nn.Linear(9, 11), Spectral(11), nn.Linear(11, 5)
        self.noise = noise

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        if self.noise:
            y = nn.functional.dropout(y, 0.25) + 0.1 * torch.randn_like(y)
        return self.last(self.spectral(y))


DATA = torch.randn(100, 9, generator=torch.Generator().manual_seed(1))


def samples(step: int, leaf: int, leaves: int = LEAVES) -> Tensor:
    return DATA[fsshard.leaf_samples(len(DATA), 3, leaves=leaves, step=step, leaf=leaf)]


def by_hand(leaves: int = LEAVES) -> dict[str, Tensor]:
    """Add up the leaves' gradients in a tree, with nothing of fsshard but the samples' numbers."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        gradients = []
        for leaf in range(leaves):
            optimizer.zero_grad()
            model(samples(step, leaf, leaves)).square().mean().backward()
            gradients.append([p.grad for p in model.parameters()])
        for parameter, of_leaves in zip(model.parameters(), zip(*gradients, strict=True), strict=True):
            parameter.grad = tree(list(of_leaves)) * (1 / leaves)
        optimizer.step()
    return model.state_dict()


def train(model: Any, optimizer: Any, steps: range, leaves: int = LEAVES) -> list[int]:
    """Train, and return the leaves that this rank had."""
    had = []
    for step in steps:
        for leaf in model.leaves(leaves):
            had.append(leaf)
            model(samples(step, leaf, leaves)).square().mean().backward()
        take_step(optimizer)
    return had


def job_trained(
    settings: dict[str, Any], noise: bool, steps: tuple[int, int], folder: str, leaves: int = LEAVES
) -> tuple[dict[str, Tensor], list[int]]:
    """Go on from ``folder`` if it holds a checkpoint, and save there."""
    model = fsshard.wrap(Net(noise), **settings)
    optimizer = fsshard.build_optimizer(model, torch.optim.AdamW, lr=1e-2)
    torch.manual_seed(7 + (dist.get_rank() if dist.is_initialized() else 0))
    if folder and steps[0]:
        fsshard.load(folder, model, optimizer)
    had = train(model, optimizer, range(*steps), leaves)
    if folder:
        fsshard.save(folder, model, optimizer)
    return model.state_dict(), had


NONE = {"backend": "none"}
ANY_NUMBER = [
    (LEAVES, "none", 1),
    *((LEAVES, engine, size) for engine in ENGINES for size in (2, 4, 8)),
    # No powers of two.
    *((6, "none", 1), (6, "fsdp2", 2), (12, "none", 1), (12, "ddp", 2), (12, "fsdp", 4), (12, "fairscale", 4)),
]
OFTEN = [row for row in ANY_NUMBER if row[0] != LEAVES or row[1:] in (("none", 1), ("ddp", 2), ("fsdp", 4))]
OFTEN += [(LEAVES, "fsdp2", 4), (LEAVES, "fairscale", 2)]


@pytest.mark.parametrize(("leaves", "engine", "size"), often(ANY_NUMBER, *OFTEN))
def test_all_engines_have_the_bits_of_the_serial_loop(ranks: Any, leaves: int, engine: str, size: int) -> None:
    expected = by_hand(leaves)
    answers = ranks.run(job_trained, size, ENGINES.get(engine, NONE), False, (0, STEPS), "", leaves)
    for found, _ in answers:
        check_equal(expected, found)
    everyone = sorted(leaf for _, had in answers for leaf in had)
    assert everyone == sorted([*range(leaves)] * STEPS), "each leaf once a step"


def test_random_numbers_are_those_of_the_leaf(ranks: Any) -> None:
    alone, _ = ranks.run(job_trained, 1, NONE, True, (0, STEPS), "")[0]
    assert list(differences(alone, by_hand()))
    for engine, size in (("fsdp2", 4), ("fairscale", 2)):
        for found, _ in ranks.run(job_trained, size, ENGINES[engine], True, (0, STEPS), ""):
            check_equal(alone, found)


def test_a_training_moves_between_numbers_of_ranks(ranks: Any, tmp_path: Path) -> None:
    """Two ranks, then four, then one, under another engine each time; noise included."""
    folder = str(tmp_path / "last")
    stayed, _ = ranks.run(job_trained, 1, NONE, True, (0, 6), "")[0]
    ranks.run(job_trained, 2, ENGINES["fairscale"], True, (0, 2), folder)
    ranks.run(job_trained, 4, ENGINES["fsdp2"], True, (2, 4), folder)
    moved, _ = ranks.run(job_trained, 1, NONE, True, (4, 6), folder)[0]
    check_equal(stayed, moved)


@on_ranks(1)
def test_random_generators_are_put_back() -> None:
    model = fsshard.wrap(Net(True), backend="none")
    torch.manual_seed(3)
    for leaf in model.leaves(4, seed=5):
        model(samples(0, leaf, 4)).mean().backward()
    after = torch.randn(3)
    torch.manual_seed(3)
    torch.randint(2**62, ())  # not drawn where a seed is given
    assert not torch.equal(after, torch.randn(3))
    torch.manual_seed(3)
    assert torch.equal(after, torch.randn(3))


@on_ranks(3)
def test_numbers_without_a_tree_are_refused() -> None:
    model = fsshard.wrap(Net(), backend="ddp")
    with pytest.raises(ConfigurationError, match=r"expected 1, 2, 4, 8, ... ranks, got 3.*start 2 or 4 ranks"):
        model.leaves(6)
    with pytest.raises(ConfigurationError, match="expected a number of micro-batches"):
        model.leaves(0)


@on_ranks(4)
def test_ranks_that_do_not_fit_are_told_on_every_rank() -> None:
    model, optimizer = with_sgd(Net(), backend="ddp")
    told = []
    for leaves in (2, 8 if dist.get_rank() else 16):
        try:
            for leaf in model.leaves(leaves):
                model(samples(0, leaf, 16)).mean().backward()
        except (ConfigurationError, RankMismatch) as error:
            told.append(f"{type(error).__name__}: {error}")
    for leaf in model.leaves(4):
        model(samples(0, leaf)).mean().backward()
    optimizer.step()
    uneven, other = told
    assert uneven.startswith("ConfigurationError") and "4 ranks cannot share 2 leaves evenly" in uneven
    assert other.startswith("RankMismatch") and "rank 0 16, rank 1 8" in other


@on_ranks(1)
def test_a_step_in_the_middle_and_a_loop_that_was_left() -> None:
    model, optimizer = with_sgd(Net(), backend="none")
    for leaf in model.leaves(4):
        model(samples(0, leaf, 4)).mean().backward()
        if leaf == 1:
            with pytest.raises(OptimizerError, match=r"within `for leaf in model.leaves\(4\)`"):
                optimizer.step()
            with pytest.raises(OptimizerError, match="would drop gradients of this step"):
                optimizer.zero_grad()
            break
    with pytest.raises(OptimizerError, match="behind a loop that was left early"):
        optimizer.step()
    with pytest.raises(OptimizerError, match="behind a loop that was left early"):
        model.clip_grad_norm_(1.0)
    optimizer.zero_grad()
    train(model, optimizer, range(1))


@on_ranks()
def test_a_mean_over_ranks_within_the_loop_is_refused() -> None:
    model = fsshard.wrap(torch.nn.Linear(5, 3), backend="ddp")
    for _ in model.leaves(4):
        loss = model(torch.randn(2, 5)).square().mean()
        with pytest.raises(ModelError) as refused:
            model.term_gradients([loss])
        loss.backward()
    text = str(refused.value)
    assert "term_gradients() within `for leaf in model.leaves(4)`" in text and "before the loop" in text


@on_ranks(1)
def test_gradients_of_before_are_not_mixed_in() -> None:
    model = fsshard.wrap(Net(), backend="none")
    model(samples(0, 0)).mean().backward()
    with pytest.raises(OptimizerError, match=r"call optimizer.zero_grad\(\) before the loop"):
        next(model.leaves(4))


@on_ranks(1)
def test_buffers_that_a_forward_writes_are_refused() -> None:
    model = fsshard.wrap(nn.Sequential(nn.Linear(9, 4), nn.BatchNorm1d(4)), backend="none")

    def step() -> None:
        for leaf in model.leaves(2):
            model(samples(0, leaf, 2)).mean().backward()

    with pytest.raises(ModelError, match=r"the forward writes 1.running_mean.*GroupNorm"):
        step()
    model.zero_grad()
    model.module[1].eval()
    step()


def test_samples_of_an_epoch_come_once() -> None:
    seen = [
        index
        for step in range(4)
        for leaf in range(LEAVES)
        for index in fsshard.leaf_samples(100, 3, leaves=LEAVES, step=step, leaf=leaf)
    ]
    assert len(seen) == len({*seen}) == 96
    again = fsshard.leaf_samples(100, 3, leaves=LEAVES, step=4, leaf=0)
    assert again != fsshard.leaf_samples(100, 3, leaves=LEAVES, step=0, leaf=0), "another order in the next epoch"
    assert fsshard.leaf_samples(100, 3, leaves=LEAVES, step=1, leaf=2, seed=None) == [30, 31, 32]
    with pytest.raises(ConfigurationError, match="need more than the 10 samples"):
        fsshard.leaf_samples(10, 3, leaves=8, step=0, leaf=0)
