"""A warning where all ranks train on the same batches, and none where they do not, or it cannot be told."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fsshard
from tests.models import take_step
from tests.on_ranks import on_ranks
from tests.training_runs import DISTRIBUTED

TEXT = "all ranks are given the same inputs"
DATA = torch.arange(48.0).view(12, 4)


class Taking(nn.Module):
    """Takes tensors in containers, and a size of which it makes them itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, batch: Any = None, size: int = 1) -> Tensor:
        x = torch.ones(size, 4) if batch is None else batch["x"][0]
        return self.layer(x).square().mean()


def batches(kind: str) -> list[dict[str, Any]]:
    """Return what three forwards are called with on this rank."""
    rank = dist.get_rank()
    sampler = DistributedSampler(TensorDataset(DATA), shuffle=False) if kind == "sampler" else None
    loaded = [rows for (rows,) in DataLoader(TensorDataset(DATA), 2, sampler=sampler)]
    if kind == "no tensors":
        return [{"size": 2}] * 3
    if kind == "in another order":
        loaded = [rows.flip(0) if rank else rows for rows in loaded]
    if kind == "differs later":
        loaded[1] = loaded[1] + rank
    return [{"batch": {"x": [rows]}} for rows in loaded[:3]]


def job_trained(backend: str, kind: str, settings: dict[str, Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if kind == "said":
            warnings.filterwarnings("ignore", "all ranks are given the same inputs")
        model = fsshard.wrap(Taking(), backend=backend, **settings)
        optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.01)
        model.train(kind != "evaluation")
        with torch.set_grad_enabled(kind != "no gradients"):
            for given in batches(kind):
                loss = model(**given)
                if loss.requires_grad:
                    loss.backward()
                    take_step(optimizer)
    return [str(warning.message) for warning in caught if TEXT in str(warning.message)]


@pytest.mark.parametrize("backend", DISTRIBUTED)
def test_a_loader_without_a_sampler_is_named_once(ranks: Any, backend: str) -> None:
    (text,), second = ranks.run(job_trained, 2, backend, "same", {})
    assert "sampler=torch.utils.data.DistributedSampler(dataset)" in text and second == []
    for kind in ("sampler", "said"):  # what it says to write
        assert ranks.run(job_trained, 2, backend, kind, {}) == [[], []]
    assert ranks.run(job_trained, 1, backend, "same", {}) == [[]]


@pytest.mark.parametrize("kind", ["in another order", "differs later", "no tensors", "evaluation", "no gradients"])
def test_other_batches_are_not(ranks: Any, kind: str) -> None:
    for backend in ("ddp", "fsdp2"):
        assert ranks.run(job_trained, 2, backend, kind, {}) == [[], []]


@on_ranks()
def test_ranks_that_share_data_are_given_the_same() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tp"))
    torch.manual_seed(0)
    wrong = job_trained("fsdp2", "same", {"device_mesh": mesh["data"], "replicated": {".": mesh["tp"]}})
    assert not wrong


@on_ranks()
def test_batches_of_a_join() -> None:
    """A rank whose batches have ended gets its last one again, while the other goes on with the same."""
    model = fsshard.wrap(Taking(), backend="fsdp2")
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.01)
    with warnings.catch_warnings(record=True) as caught, fsshard.join(model) as joined:
        warnings.simplefilter("always")
        for given in joined([{"x": [DATA[:2] + number * dist.get_rank()]} for number in range(3 - dist.get_rank())]):
            model(given).backward()
            take_step(optimizer)
    wrong = [str(warning.message) for warning in caught if TEXT in str(warning.message)]
    assert not wrong
