"""The place in the data: saved with a training, and gone on with on another number of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data.distributed import DistributedSampler

import fsshard
from fsshard.checkpoint.position import DataPosition
from fsshard.errors import ConfigurationError, FsshardError

LENGTH = 48


class Counting(DistributedSampler):  # type: ignore[type-arg]
    """Counts the samples of its rank, as torchdata's StatefulDistributedSampler does."""

    yielded = 0

    def __iter__(self) -> Iterator[int]:
        for index in list(super().__iter__())[self.yielded :]:
            self.yielded += 1
            yield index

    def state_dict(self) -> dict[str, Any]:
        return {"yielded": self.yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.yielded = state["yielded"]


class Loader:
    """Says of itself what torchdata's StatefulDataLoader says, with a seed that each rank has of its own."""

    def __init__(self, sampler: Counting, batch_size: int) -> None:
        self.sampler, self.batch_size, self.batches = sampler, batch_size, 0

    def __iter__(self) -> Iterator[list[int]]:
        place = iter(self.sampler)
        while batch := [index for _, index in zip(range(self.batch_size), place, strict=False)]:
            self.batches += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        inner = {"sampler_state": self.sampler.state_dict(), "samples_yielded": self.sampler.yielded}
        return {
            "_num_yielded": self.batches,
            "_base_seed": dist.get_rank(),
            "_sampler_iter_state": inner,
            "dataset": None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["_num_yielded"]
        self.sampler.load_state_dict(state["_sampler_iter_state"]["sampler_state"])


class Steps:
    """Goes by steps of leaves, which are the same on any number of ranks."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def job(kind: str, batch_size: int, steps: int, load: str, save: str) -> list[list[int]]:
    """Train on, and return the samples of each step of this rank."""
    model = fsshard.wrap(nn.Linear(2, 2), backend="ddp" if dist.get_world_size() > 1 else "none")
    sampler = Counting(range(LENGTH), seed=3)  # type: ignore[arg-type]
    loader = {"sampler": sampler, "loader": Loader(sampler, batch_size), "leaves": Steps()}[kind]
    if load:
        fsshard.load(load, model, loader=loader)
    seen = []
    if kind == "leaves":
        for _ in range(steps):
            for leaf in model.leaves(4):
                samples = fsshard.leaf_samples(LENGTH, 2, leaves=4, step=loader.step, leaf=leaf)
                model(torch.ones(1, 2)).sum().backward()
                seen.append([leaf, *samples])
            loader.step += 1
            model.zero_grad()
    else:
        place = iter(loader) if kind == "loader" else iter(Loader(sampler, batch_size))
        seen = [next(place) for _ in range(steps)]
    if save:
        fsshard.save(save, model, loader=loader)
    return seen


def steps_of(found: list[list[list[int]]]) -> list[list[int]]:
    """All ranks' samples of each step, in the order of the data."""
    order = list(DistributedSampler(range(LENGTH), 1, 0, seed=3))  # type: ignore[arg-type]
    return [sorted(map(order.index, itertools.chain(*rows))) for rows in zip(*found, strict=True)]


@pytest.mark.parametrize("kind", ["loader", "sampler"])
@pytest.mark.parametrize("later", [2, 4])
def test_goes_on_with_the_next_sample(ranks: Any, tmp_path: Path, kind: str, later: int) -> None:
    """On two ranks, four and one, with the batch of all ranks as it was or doubled: none twice, none lost."""
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    found = steps_of(ranks.run(job, 2, kind, 4, 2, "", first))
    found += steps_of(ranks.run(job, 4, kind, later, 1, first, second))
    found += steps_of(ranks.run(job, 1, kind, 8, 1, second, ""))
    together = 4 * later
    assert found == [
        list(range(8)),
        list(range(8, 16)),
        list(range(16, 16 + together)),
        [*range(16 + together, 24 + together)],
    ]


def test_leaves_go_on_in_the_same_order(ranks: Any, tmp_path: Path) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    whole = sorted(ranks.run(job, 1, "leaves", 0, 3, "", "")[0])
    found = ranks.run(job, 2, "leaves", 0, 1, "", first) + ranks.run(job, 4, "leaves", 0, 1, first, second)
    found += ranks.run(job, 1, "leaves", 0, 1, second, "")
    assert sorted(itertools.chain(*found)) == whole


class Unclear(Steps):
    def state_dict(self) -> dict[str, Any]:
        return {"index": self.step}


class Redivided(Unclear):
    def redivide(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        return {"step": sum(state["index"] for state in states)}


def job_told(folder: str, kind: Any, count: int, load: bool) -> Any:
    model = fsshard.wrap(nn.Linear(2, 2), backend="fsdp2")
    loader = kind()
    loader.step = count + dist.get_rank()
    if not load:
        fsshard.save(folder, model, loader=loader)
        return loader.step
    try:
        fsshard.load(folder, model, loader=loader)
    except FsshardError as error:
        return str(error)
    return loader.step


def test_what_does_not_say_what_it_counts_is_refused_or_asked(ranks: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    for kind, says in ((Unclear, "'index' differs between the ranks"), (Redivided, 11)):
        assert ranks.run(job_told, 2, folder, kind, 5, False) == [5, 6]
        (told,) = ranks.run(job_told, 1, folder, kind, 0, True)
        assert told == says or ("redivide(states)" in told and says in told)


@pytest.mark.parametrize(
    ("state", "now", "says"),
    [
        ({"index": 4}, (4, 1), "may count samples of this rank or of all"),
        ({"yielded": 3}, (4, 2), "save after another step"),
        ({"_num_yielded": 3}, (4, None), "does not tell"),
        ({"_last_yielded_worker_id": 0}, (4, 2), "with workers"),
    ],
)
def test_refusals(state: Any, now: Any, says: str) -> None:
    settings = type("Settings", (), {"world_size": now[0]})
    loader = Steps()
    loader.batch_size = now[1]  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match=says):
        DataPosition(loader, settings).load_state_dict({"ranks": 2, "batch_size": 2, "state": state})
    with pytest.raises(ConfigurationError, match="StatefulDataLoader"):
        DataPosition(object(), settings)
