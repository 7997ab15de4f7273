"""A step that a rank leaves out, or takes at another rate, raises on every rank and says what two of them did."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsshard
from fsshard.backends.step_counts import StepCounts
from fsshard.errors import RankMismatch
from tests.models import batch, net
from tests.on_ranks import on_ranks

EVERY = 16


def job_steps(backend: str, how: str) -> int:
    rank = dist.get_rank()
    model = fsshard.wrap(net(), backend=backend)
    names = [name for name, _ in model.named_parameters()]
    optimizers = [fsshard.build_optimizer(model, torch.optim.Adam, half, lr=0.01) for half in (names[:3], names[3:])]
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizers[1], patience=0)
    for number in range(2 * EVERY):
        model(batch(number)).square().mean().backward()
        skipped = rank == 1 and ((how == "always") or (how == "late" and number == 7))
        if not skipped:
            optimizers[0].step()
        if not (how == "other" and number == 0 and rank == 0):
            optimizers[1].step()
        if how == "plateau":
            plateau.step(float(-number if rank else number))
        for optimizer in optimizers:
            optimizer.zero_grad()
        if how == "state dict" and number == 6:
            if rank == 0:
                optimizers[0].step()
            model.state_dict()
    return number


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("always", "got 1 steps of optimizer 0 at lr [0.01], "),
        ("always", "and 0 steps of optimizer 0 at lr [], "),
        ("late", "and 14 steps of optimizer 0"),
        ("other", "0 steps of optimizer 1 at lr [] on rank 0"),
        ("plateau", "ReduceLROnPlateau the mean of all ranks' losses"),
        ("state dict", "7 steps of optimizer 0"),
    ],
)
def test_ranks_take_the_same_steps(ranks: Any, how: str, text: str) -> None:
    for backend in ("fsdp2", "fsdp") if how in ("always", "late") else ("fsdp2",):
        for error in ranks.run_expecting_errors(job_steps, 2, backend, how):
            assert isinstance(error, RankMismatch)
            assert text in str(error)


def test_who_takes_them_all_is_let_go(ranks: Any) -> None:
    assert ranks.run(job_steps, 2, "fsdp2", "") == [2 * EVERY - 1] * 2


def test_replicas_are_compared_before_they_are_saved(ranks: Any) -> None:
    """DDP's forwards are each rank's own, as those of raw DDP are; a state dict is everybody's."""
    for error in ranks.run_expecting_errors(job_steps, 2, "ddp", "state dict"):
        assert isinstance(error, RankMismatch)


@on_ranks()
def test_on_a_gpu_a_comparison_is_read_at_the_next() -> None:
    """Whose answer is there by then: the host does not wait."""
    counts = StepCounts(dist.group.WORLD, torch.device("cpu"))
    counts._reads_later = True
    number = counts.new_optimizer()
    told = []
    for _ in range(3):
        if dist.get_rank() == 0:
            counts.took_step(number, [{"lr": 0.1}])
        try:
            counts.compare()
            told.append("")
        except RankMismatch as error:
            told.append(str(error))
            break
    assert told[0] == "" and "expected optimizer.step() on every rank" in told[1]
