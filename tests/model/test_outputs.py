"""Outputs that are views, and are written in place: hooks on them are lost, and what hangs on these must not be."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from tests.models import take_step, with_adam
from tests.on_ranks import on_backends
from tests.training_runs import DISTRIBUTED, check_equal

ALL = (*DISTRIBUTED, "none")


class Block(nn.Module):
    """A unit whose output is a view of a tensor that it has made."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh()).sin().unsqueeze(1).transpose(0, 1).squeeze(0)


class Fills(Block):
    """A unit that writes into memory that it is given, and returns a part of that."""

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:  # type: ignore[override]
        memory[0] = super().forward(x)
        return memory[0]


WITHIN = ("view", "view of a view", "part of it", "given memory")
OUTSIDE = ("output", "view of the output", "output of one unit", "one of two outputs")


class Net(nn.Module):
    """``where`` says what is written, by ``+=`` or beside it."""

    def __init__(self, where: str, in_place: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([(Fills if where == "given memory" else Block)() for _ in range(3)])
        self.where, self.in_place = where, in_place

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            h = block(x, x.new_zeros(2, len(x), 6)) if self.where == "given memory" else block(x)
            x = add(h, x, self.where, self.in_place) if self.where in WITHIN else h.sin()
        if self.where == "view of the output":
            return x * 1.5  # itself no view
        return [x.view(-1, 2, 3), x.sum()] if self.where == "one of two outputs" else x.view(-1, 2, 3)


def add(target: Tensor, value: Tensor, where: str, in_place: bool) -> Tensor:
    """``target`` with ``value`` added, to some of it."""
    if not in_place:
        if where != "part of it":
            return target + value
        return torch.cat([target[:, :2] + value[:, :2], target[:, 2:]], dim=1)
    if where == "view of a view":
        target.view(3, -1).add_(value.view(3, -1))
    elif where == "part of it":
        target[:, :2] += value[:, :2]
    else:
        target += value
    return target


def losses(where: str, in_place: bool, model: Any, steps: int) -> Iterator[Tensor]:
    for step in range(steps):
        found = model(torch.randn(6, 6, generator=torch.Generator().manual_seed(2 * step + dist.get_rank())))
        found, more = found if where == "one of two outputs" else (found, torch.zeros(()))
        if where in WITHIN:
            yield found.square().sum()
        elif not in_place:
            yield (found.flatten() + 0.5).square().sum() + more
        else:
            (found.view(-1) if where == "view of the output" else found).add_(0.5)
            yield found.square().sum() + more


def job_train(backend: str, where: str, in_place: bool, recompute: bool) -> tuple[dict[str, Any], list[str]]:
    settings = {"merge_below": 0} if backend == "fsdp2" else {}
    units = None if where == "output of one unit" else {Fills if where == "given memory" else Block}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = fsshard.wrap(Net(where, in_place), backend=backend, auto_wrap_policy=units, **settings,
                             activation_checkpointing=recompute or None)  # fmt: skip
        optimizer = fsshard.build_optimizer(model, torch.optim.Adam, lr=0.01)
        for loss in losses(where, in_place, model, 3):
            loss.backward()
            take_step(optimizer)
    return model.state_dict(), [str(warning.message) for warning in caught if "view" in str(warning.message)]


@pytest.mark.covering
@pytest.mark.parametrize("where", [*WITHIN, *OUTSIDE])
@pytest.mark.parametrize("backend", ALL)
def test_views_may_be_written_in_place(ranks: Any, backend: str, where: str) -> None:
    """As they may natively: to the bit what is computed beside them, and nothing to warn of."""
    count = 1 if backend == "none" else 2
    recompute = where == "view of a view"
    beside = ranks.run(job_train, count, "ddp" if count == 2 else "none", where, False, recompute)
    for (reference, _), (found, warned) in zip(
        beside, ranks.run(job_train, count, backend, where, True, recompute), strict=True
    ):
        check_equal(reference, found)
        assert not warned


@on_backends(ALL)
def test_our_own_hook_is_not_lost(backend: str) -> None:
    settings = {"merge_below": 0} if backend == "fsdp2" else {}
    model, _ = with_adam(Net("output", True), backend=backend, auto_wrap_policy={Block}, **settings)
    with model.no_sync():
        (loss,) = losses("output", True, model, 1)
    with pytest.raises(fsshard.ModelError, match=r"must both be inside no_sync\(\)"):
        loss.backward()


def job_raw(engine: str, in_place: bool) -> list[Tensor]:
    """Return what a step of the engine by itself, with one unit, adds to this rank's part of the weights."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    network = nn.Sequential(Block())
    if engine == "fsdp2":
        model = fully_shard(network)
    else:
        model = FullyShardedDataParallel(network, device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [local(parameter).clone() for parameter in optimizer.param_groups[0]["params"]]
    found = model(torch.ones(2, 6) + dist.get_rank())
    found = found.add_(1.0) if in_place else found + 1.0
    found.sum().backward()
    optimizer.step()
    after = optimizer.param_groups[0]["params"]
    return [
        local(new).sub(old) for old, new in zip(before, after, strict=True) if new.shape == old.shape or new.numel()
    ]


def local(parameter: Any) -> Tensor:
    return getattr(parameter, "_local_tensor", parameter).detach()


@pytest.mark.parametrize("engine", ["fsdp", "fsdp2"])
def test_the_raw_engines_lose_gradients(ranks: Any, engine: str) -> None:
    """torch 2.13 only warns of it for FSDP2; where it fails it does so deep inside."""
    right = ranks.run(job_raw, 2, engine, False)
    assert all(any(change.abs().sum() > 0 for change in rank) for rank in right)
    try:
        found = ranks.run(job_raw, 2, engine, True)
    except fsshard.RankFailed:
        return
    same = all(a.shape == b.shape and torch.equal(a, b) for one in zip(right, found, strict=True)
               for a, b in zip(*one, strict=True))  # fmt: skip
    assert not same, "torch has repaired it: outputs.py is not needed any more"
