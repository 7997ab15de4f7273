"""State of several objects under one name, of data in the middle of an epoch, and paths from the home directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler, StepLR
from torch.utils.data import DataLoader, Sampler, TensorDataset

import fsshard
from fsshard.checkpoint.arguments import as_one
from fsshard.checkpoint.format.directory import from_home
from fsshard.errors import CheckpointError
from tests.checkpoint.test_saving import refused, trained
from tests.models import net


def schedulers(optimizer: fsshard.ShardedOptimizer, how: str) -> Any:
    both: list[LRScheduler] = [StepLR(optimizer, 2), ExponentialLR(optimizer, 0.5)]
    return both if how == "list" else dict(zip(("body", "head"), both, strict=True))


def states(several: Any) -> list[Any]:
    return [one.state_dict() for one in (several.values() if isinstance(several, dict) else several)]


def job_several(path: str, how: str) -> tuple[Any, Any, list[str]]:
    model, optimizer = trained(net())
    mine, fresh = schedulers(optimizer, how), schedulers(optimizer, how)
    for _ in range(3):
        optimizer.step()
        for one in mine.values() if how == "dict" else mine:
            one.step()
    fsshard.save(path, model, optimizer, mine)
    fsshard.load(path, model, optimizer, fresh)
    other = schedulers(optimizer, "dict" if how == "list" else "list")
    few = fresh[:1] if how == "list" else {"body": fresh["body"]}
    wrong = [refused(lambda given=given: fsshard.load(path, model, optimizer, given)) for given in (other, few)]
    return states(mine), states(fresh), wrong


@pytest.mark.parametrize("how", ["list", "dict"])
def test_several_schedulers(ranks: Any, tmp_path: Path, how: str) -> None:
    for saved, loaded, (other, few) in ranks.run(job_several, 2, str(tmp_path / "c"), how):
        assert saved == loaded and saved[0]["last_epoch"] == 3
        assert "was handed over" in other and "was handed over" in few and other.startswith("CheckpointError")


def test_what_is_no_group_of_objects_stays() -> None:
    given = {"numbers": [1, 2], "mixed": [1, torch.nn.Linear(1, 1)], "none": [], "module": torch.nn.ModuleList()}
    assert all(as_one(value) is value for value in given.values())


# ------------------------------------------------------------------------------------------------ data


class Resumable(Sampler[int]):
    """One order for all ranks, each of which takes its share of what is left; it counts what was trained.

    As in docs/checkpoints.md.
    """

    def __init__(self, length: int) -> None:
        self.length, self.epoch, self.taken = length, 0, 0

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.length, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return iter(order[self.taken + dist.get_rank() :: dist.get_world_size()])

    def trained(self, samples: int) -> None:
        """A step is done with so many samples of all ranks; a loader may have drawn more."""
        self.taken += samples
        if self.taken >= self.length:
            self.epoch, self.taken = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.taken = state["epoch"], state["taken"]


SAMPLES, EACH = 24, 2


def job_epochs(path: str, stop: int, steps: int) -> list[float]:
    """Losses of so many steps, six of which make an epoch on two ranks; from the start where ``stop`` is set."""
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(SAMPLES, 4))
    model, optimizer = trained(net())
    sampler = Resumable(SAMPLES)
    if not stop:
        fsshard.load(path, model, optimizer, data=sampler)
    losses: list[float] = []
    while len(losses) < steps:
        for (x,) in DataLoader(data, batch_size=EACH, sampler=sampler):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            sampler.trained(EACH * dist.get_world_size())
            losses.append(float(loss))
            if len(losses) == stop:
                fsshard.save(path, model, optimizer, data=sampler)
            if len(losses) == steps:
                break
    return losses


def test_goes_on_in_the_middle_of_an_epoch(ranks: Any, tmp_path: Path) -> None:
    """Six steps make an epoch: it stops in the second one, after the eighth."""
    path = str(tmp_path / "c")
    undisturbed = ranks.run(job_epochs, 2, path, 8, 14)
    assert [losses[8:] for losses in undisturbed] == ranks.run(job_epochs, 2, path, 0, 6)


# ------------------------------------------------------------------------------------------------ paths


def job_at_home(home: str) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", home)
        model, optimizer = trained(net())
        saved = fsshard.save("~/runs/c", model, optimizer).path
        return [str(saved), str(fsshard.load("~/runs/c", model, optimizer).path), str(fsshard.latest("~/runs"))]


def test_paths_from_the_home_directory(ranks: Any, tmp_path: Path) -> None:
    assert ranks.run(job_at_home, 2, str(tmp_path)) == 2 * [3 * [str(tmp_path / "runs" / "c")]]
    assert from_home("./~") == "./~" and from_home(3) == 3
    with pytest.raises(CheckpointError, match="no such home directory"):
        from_home("~nobody-of-that-name/runs")
