"""Buffers: rank 0's everywhere, under their own names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from fsshard.model.activation_checkpointing import checkpoint_blocks
from tests.models import Spectral
from tests.sharded.training import train
from tests.training_runs import DISTRIBUTED, differences


class Noisy(nn.Module):
    """Its buffers differ between ranks after each training forward."""

    seen: Tensor
    spectrum: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = Spectral(4), nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("spectrum", torch.zeros(4, dtype=torch.complex64))
        self.register_buffer("flag", torch.tensor(False), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += x.detach().mean(0)
            self.spectrum += torch.fft.fft(x.detach().mean(0))
        return self.norm(self.layer(x)) + self.seen


def job_buffers(backend: str) -> tuple[dict[str, Any], Tensor]:
    torch.manual_seed(0)
    model = fsshard.wrap(Noisy(), backend=backend)
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    train(model, optimizer, range(3))
    model.eval()
    with torch.no_grad():
        output = model(torch.ones(2, 4))
    return model.state_dict(), output


def test_buffers_are_rank_zeros_everywhere(ranks: Any) -> None:
    """DDP broadcasts buffers before a forward, FSDP1 and FSDP2 leave them to drift apart: one rule for all."""
    reference = ranks.run(job_buffers, 2, "ddp")
    assert list(differences(*[list(result) for result in reference])) == []
    for backend in DISTRIBUTED[1:]:
        for result in ranks.run(job_buffers, 2, backend):
            assert list(differences(list(reference[0]), list(result))) == []


def job_part_trains(backend: str) -> tuple[dict[str, Any], Tensor]:
    torch.manual_seed(0)
    model = fsshard.wrap(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), backend=backend, auto_wrap_policy=None)
    model.eval()
    model.module[1].train()  # fine-tuning of a head
    with torch.no_grad():
        model(torch.ones(2, 4) * torch.tensor([[1.0], [3.0]]) * (1 + dist.get_rank()))
    model.eval()
    with torch.no_grad():
        output = model(torch.ones(2, 4))
    return model.state_dict(), output


def test_buffers_are_rank_zeros_where_only_a_part_is_in_training_mode(ranks: Any) -> None:
    reference = ranks.run(job_part_trains, 2, "ddp")
    assert reference[0][0]["1.num_batches_tracked"] == 1
    for backend in DISTRIBUTED:
        for result in ranks.run(job_part_trains, 2, backend):
            assert list(differences(list(reference[0]), list(result))) == []


def job_buffer_names(backend: str) -> list[str]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.ReLU()))
    checkpoint_blocks(model, lambda module: module is model[1])
    return [name for name, _ in fsshard.wrap(model, backend=backend).named_buffers()]


@pytest.mark.parametrize("backend", DISTRIBUTED)
def test_buffers_keep_their_names_under_checkpointing(ranks: Any, backend: str) -> None:
    names = ["1.0.running_mean", "1.0.running_var", "1.0.num_batches_tracked"]
    assert ranks.run(job_buffer_names, 2, backend) == [names, names]
