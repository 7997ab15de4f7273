"""The norm of gradients, over the original numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from fsshard.backends.whole import gather_grads
from tests.models import batch, net
from tests.optimizers import average
from tests.sharded.training import ALL
from tests.training_runs import DISTRIBUTED, lost_by_saving, ranks_of


def job_norm(backend: str, norm_type: float) -> tuple[float, float]:
    model = fsshard.wrap(net(), backend=backend)
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    model(batch(0)).square().mean().backward()
    ours = float(model.clip_grad_norm_(0.01, norm_type))
    optimizer.step()
    native = net()
    whole = torch.cat([batch_of(rank) for rank in range(dist.get_world_size())])
    native(whole).square().mean().backward()
    return ours, float(torch.nn.utils.clip_grad_norm_(native.parameters(), 0.01, norm_type))


def batch_of(rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("norm_type", [0.5, 1.0, 2.0, float("inf")])
@pytest.mark.parametrize("backend", ALL)
def test_norm_counts_complex_numbers(ranks: Any, backend: str, norm_type: float) -> None:
    """The value of torch's own function on the unsharded model with native complex weights.

    1e-5: torch sums in float32 over some hundred numbers, and 0.5 takes the square of a sum.
    """
    ours = ranks.run(job_norm, ranks_of(backend), backend, norm_type)
    assert len({value for value, _ in ours}) == 1
    assert ours[0][0] == pytest.approx(ours[0][1], rel=1e-5)


class Wide(nn.Module):
    """float64 and complex128."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 5, dtype=torch.float64), nn.Linear(3, 1, dtype=torch.float64)
        self.weight = nn.Parameter(torch.randn(5, 3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last((torch.tanh(self.first(x)) * (1 + 0.5j) @ self.weight).abs())
        return out


NEAR = 8 * torch.finfo(torch.float64).eps
"""Another order of the same sums in float64."""


def job_wide() -> list[str]:
    wrong = []
    x = batch(0).double()
    for backend in DISTRIBUTED:
        for p in (2.0, 3.0, float("inf")):
            bare = Wide()
            bare(x).square().mean().backward()
            average(bare)
            want = torch.nn.utils.clip_grad_norm_(bare.parameters(), 0.01, p)
            model = fsshard.wrap(Wide(), backend=backend)
            optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
            model(x).square().mean().backward()
            norm = model.clip_grad_norm_(0.01, p)
            clipped = {e.name: e.kind.to_user(g) for e, g in gather_grads(model.backend) if g is not None}
            apart = max(float((clipped[n] - q.grad).abs().max()) for n, q in bare.named_parameters())
            if norm.dtype != want.dtype or abs(norm - want) > NEAR * want or apart > 0.01 * NEAR:
                wrong.append(f"{backend} {p}: {norm} ({norm.dtype}) for {want}, {apart}")
        optimizer.step()  # by the last
        torch.optim.SGD(bare.parameters(), lr=0.1, momentum=0.9).step()
        state = model.state_dict()
        apart = max(float((state[name] - value).detach().abs().max()) for name, value in bare.named_parameters())
        if apart > 0.01 * NEAR or {v.dtype for v in state.values()} != {torch.float64, torch.complex128}:
            wrong.append(f"{backend}: weights {apart}")
        wrong += lost_by_saving(model, optimizer, Wide, torch.optim.SGD, lr=0.1, momentum=0.9)
    return wrong


def test_the_norm_of_float64_gradients_is_float64(ranks: Any) -> None:
    assert ranks.run(job_wide, 2) == [[], []]
