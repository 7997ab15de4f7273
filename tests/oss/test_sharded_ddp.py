"""What FairScale's own tests of ShardedDataParallel check, and here to the last bit.

Tests fsshard/oss/collectives.py, fsshard/oss/gradient_buckets.py, fsshard/oss/reduction.py too.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.compat.fairscale.nn.data_parallel.sharded_ddp_trainings import after, build, values

SETTINGS = {"optim": torch.optim.SGD, "lr": 1e-3, "momentum": 0.99}


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), *(nn.Linear(3, 3) for _ in range(5)))


class TwoInputs(nn.Module):
    """A module of two arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat((self.net(x), self.net(y)), dim=1)


class Embedded(nn.Module):
    """An embedding, a trunk, and a head that may run twice."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.embedding, self.twice = nn.Embedding(32, 2), twice
        self.trunk, self.head = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3)), nn.Linear(3, 3)

    def forward(self, indices: Tensor) -> Tensor:
        h = self.head(self.trunk(self.embedding(indices)))
        return self.head(h) if self.twice else h


# ------------------------------------------------------------------------------------------------ inputs, optimizers


def job_two_inputs(kind: str, halves: bool) -> list[Tensor]:
    torch.manual_seed(0)
    module = TwoInputs()
    parameters = list(module.parameters())
    parts = [parameters[:-10], parameters[-10:]] if halves else [parameters]
    wrapped, optimizers = build(kind, module, parts, [SETTINGS] * len(parts))
    generator = torch.Generator().manual_seed(dist.get_rank())

    def closure() -> Tensor:
        loss = wrapped(torch.rand(8, 2, generator=generator), y=torch.rand(8, 2, generator=generator)).abs().sum()
        loss.backward()
        after(wrapped)
        return loss

    for _ in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for optimizer in optimizers:  # the second one's closure adds to gradients that are reduced already
            optimizer.step(closure)
    return values(module)


def job_same(*args: Any) -> list[bool]:
    return [
        torch.equal(a, b) for a, b in zip(job_two_inputs("hand", *args), job_two_inputs("ours", *args), strict=True)
    ]


@pytest.mark.parametrize("halves", [False, True])
def test_two_inputs_and_two_optimizers_with_closures(ranks: Any, halves: bool) -> None:
    assert all(all(each) for each in ranks.run(job_same, 2, halves))


# ------------------------------------------------------------------------------------------------ modes, casts


def job_modes() -> list[bool]:
    torch.manual_seed(0)
    module = small()
    wrapped, optimizer = build("ours", module, settings=SETTINGS)
    first = next(module.parameters())
    owned = optimizer._param_to_rank[first] == dist.get_rank()
    wrapped(torch.rand(2, 2)).sum().backward()
    wrapped.zero_grad()
    wrapped.eval()
    wrapped(torch.rand(2, 2))
    seen = [first.grad is None or not first.grad.any()]
    wrapped.train()
    wrapped(torch.rand(2, 2)).sum().backward()
    seen.append((first.grad is not None and bool(first.grad.norm() > 0)) == owned)
    wrapped.eval()  # and a backward in evaluation mode is reduced as well
    optimizer.zero_grad()
    wrapped(torch.rand(2, 2)).sum().backward()
    seen.append((first.grad is not None and bool(first.grad.norm() > 0)) == owned)
    return seen


def test_training_and_evaluation_mode(ranks: Any) -> None:
    assert ranks.run(job_modes, 2) == [[True] * 3] * 2


# ------------------------------------------------------------------------------------------------ parity


def job_parity(size: int, accumulate: bool, thaw: bool, clip: bool, by_hand: bool, twice: bool) -> list[str]:
    """Ours against DDP; DDP is made anew where the trainable parameters change."""

    def train(kind: str) -> list[Tensor]:
        torch.manual_seed(dist.get_rank())
        module = Embedded(twice)
        module.register_buffer("mark", torch.ones(1) * dist.get_rank())
        next(module.parameters()).requires_grad = False
        kw = {"reduce_buffer_size": size} if kind == "ours" else {}
        settings = {"optim": torch.optim.SGD, "lr": 1e-2, "momentum": 0.99}
        wrapped, optimizer = build(kind, module, settings=settings, **kw)
        generator = torch.Generator().manual_seed(dist.get_rank())
        norms = []
        for step in range(4):
            wrapped.zero_grad(set_to_none=True)
            micro_batches = 3 if accumulate else 1
            for micro in range(micro_batches):
                last = micro == micro_batches - 1
                quiet = (accumulate and not last) or (last and by_hand and kind == "ours")
                indices = torch.randint(0, 32, (8, 2), generator=generator)
                with wrapped.no_sync() if quiet else contextlib.nullcontext():
                    wrapped(indices).abs().sum().backward()
            if by_hand and kind == "ours":
                wrapped.reduce()
            if clip:
                if kind == "ours":
                    norms.append(optimizer.clip_grad_norm(0.3))
                else:
                    norms.append(nn.utils.clip_grad_norm_(wrapped.parameters(), 0.3))
            optimizer.step()
            if thaw and step == 0:
                next(module.parameters()).requires_grad = True
                if kind == "ddp":
                    wrapped = nn.parallel.DistributedDataParallel(module, find_unused_parameters=True)
        return [*values(module), *norms]

    pairs = zip(train("ddp"), train("ours"), strict=True)
    return [f"{i}: {float((a - b).abs().max())}" for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]


@pytest.mark.covering(2)
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("thaw", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
def test_parity(ranks: Any, accumulate: bool, thaw: bool, clip: bool, by_hand: bool, twice: bool) -> None:
    for size in (0, 2**20):
        assert ranks.run(job_parity, 2, size, accumulate, thaw, clip, by_hand, twice) == [[], []]
