"""fsshard.join: ranks whose batches end earlier, against bare replicas whose gradients are averaged by hand."""

from __future__ import annotations

import copy
from collections import UserDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from fsshard.errors import ConfigurationError, RankMismatch
from tests.forked import forking
from tests.models import Spectral, net, take_step, with_adam
from tests.on_ranks import on_ranks
from tests.training_runs import ENGINES, NAMES


class Net(nn.Module):
    """Complex rows that ranks cannot share evenly, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.spectral, self.norm = nn.Linear(4, 7), Spectral(7), nn.BatchNorm1d(7)
        self.last = nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(torch.tanh(self.spectral(self.first(x)))))


def batches(rank: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 4, generator=generator) for _ in range(count)]


def by_hand(
    counts: list[int], *, broadcast: bool, clip: float, stop: int = 9, twice: bool = False
) -> list[dict[str, Tensor]]:
    """Train one replica per rank, in this process; who has no batch left takes the others' step.

    ``stop``: leave the loop after so many batches; ``twice``: each loss is of two forwards.
    """
    replicas = [Net() for _ in counts]
    optimizers = [torch.optim.Adam(replica.parameters(), lr=1e-2) for replica in replicas]
    source = 0

    def send() -> None:
        for replica in replicas if broadcast else ():
            for mine, theirs in zip(replica.buffers(), replicas[source].buffers(), strict=True):
                mine.data.copy_(theirs.clone())

    for step in range(min(max(counts), stop) + 1):
        send()
        going_on = [rank for rank, count in enumerate(counts) if step < min(count, stop)]
        source = going_on[0] if going_on else source
        losses = {rank: replicas[rank](batches(rank, counts[rank])[step]).square().mean() for rank in going_on}
        if twice:
            send()
        for rank, loss in losses.items():
            again = replicas[rank](2 * batches(rank, counts[rank])[step]).square().mean() if twice else 0.0
            (loss + again).backward()
        for copies in zip(*(replica.parameters() for replica in replicas), strict=True):
            gradients = [copies[rank].grad for rank in going_on if copies[rank].grad is not None]
            for weight in copies if gradients else ():
                weight.grad = sum(gradients[1:], gradients[0]) / len(going_on)  # type: ignore[arg-type, operator]
        for replica, optimizer in zip(replicas, optimizers, strict=True) if going_on else ():
            nn.utils.clip_grad_norm_(replica.parameters(), clip)
            take_step(optimizer)
    return [replica.state_dict() for replica in replicas]


def job_uneven(engine: dict[str, Any], counts: list[int], broadcast: bool, exact: bool) -> list[tuple[bool, int]]:
    rank, told = dist.get_rank(), []
    model, optimizer = with_adam(Net(), broadcast_buffers=broadcast, **engine)
    with fsshard.join(model) as joined:
        for x in joined(iter(batches(rank, counts[rank]))):
            loss = model(x).square().mean()
            (loss if joined.active else loss * float("nan")).backward()  # which is nobody's affair
            model.clip_grad_norm_(1e9)  # gradients as they are, and a collective more
            take_step(optimizer)
            told.append((joined.active, joined.ranks))
    found = model.state_dict()
    for key, value in by_hand(counts, broadcast=broadcast, clip=1e9)[rank].items():
        if exact:
            assert torch.equal(found[key], value), key
        elif "num" not in key:
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)
    model(batches(rank, 1)[0]).square().mean().backward()  # and goes on with all ranks, at their full weight
    optimizer.step()
    return told


@pytest.mark.parametrize("engine", ENGINES, ids=NAMES)
def test_the_average_is_over_the_ranks_that_go_on(ranks: Any, engine: dict[str, Any]) -> None:
    first, second = ranks.run(job_uneven, 2, engine, [2, 4], True, True)
    assert first == [(True, 2), (True, 2), (False, 1), (False, 1)] and [active for active, _ in second] == [True] * 4
    ranks.run(job_uneven, 2, engine, [4, 1], False, True)


@pytest.mark.parametrize("engine", ENGINES[3:], ids=NAMES[3:])
def test_three_of_four_ranks_go_on(ranks: Any, engine: dict[str, Any]) -> None:
    # Three of four: 4 / 3 is rounded, and four numbers are added in another order.
    told = ranks.run(job_uneven, 4, engine, [3, 2, 4, 3], True, False)
    assert [count for _, count in told[0]] == [4, 4, 3, 1]


@pytest.mark.parametrize("engine", [ENGINES[0], ENGINES[4]], ids=["ddp", "fsdp2"])
@on_ranks()
def test_buffers_are_those_of_a_rank_that_goes_on(engine: dict[str, Any]) -> None:
    """Rank 0 ends first, and its buffers are asked for, or sent, before the others' loop is over."""
    counts, rank = [2, 4], dist.get_rank()

    def close(state: dict[str, Tensor], **asked: Any) -> None:
        for key, value in by_hand(counts, broadcast=True, clip=1e9, **asked)[rank].items():
            torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5)

    def train(stop: int, twice: bool = False, look: bool = False) -> None:
        model, optimizer = with_adam(Net(), **engine)
        joined = fsshard.join(model)
        with joined:
            for step, x in enumerate(joined(batches(rank, counts[rank])), 1):
                (model(x).square().mean() + (model(2 * x).square().mean() if twice else 0.0)).backward()
                take_step(optimizer)
                if look:
                    close(model.state_dict(), stop=step)
                if step == stop:
                    break
        close(model.state_dict(), stop=stop, twice=twice)
        assert joined.ranks == 2 and joined.active and model._fsshard.buffers.source == 0

    train(9, twice=True)
    train(9, look=True)
    train(3)


@on_ranks()
def test_a_batch_that_the_loop_takes_apart_comes_again_as_it_was() -> None:
    rank, seen = dist.get_rank(), []
    data = [UserDict(x=torch.ones(1), more={"y": [number, (number,)]}) for number in range(1 + rank)]
    with fsshard.join(fsshard.wrap(net(), backend="ddp")) as joined:
        for batch in joined(data):
            assert isinstance(batch, UserDict) and float(batch.pop("x")) == 1.0
            seen.append(batch["more"]["y"].pop())
            batch["more"].clear()
            assert bool(batch["more"]) is False
    assert seen == [(0,), (rank,)]


@pytest.mark.parametrize("engine", [pytest.param(ENGINES[0], marks=pytest.mark.long), ENGINES[4]], ids=["ddp", "fsdp2"])
@on_ranks()
def test_lbfgs_compares_the_losses_of_the_ranks_that_go_on(engine: dict[str, Any]) -> None:
    settings = {"lr": 1.0, "max_iter": 4, "line_search_fn": "strong_wolfe"}
    first, second = [10 * x for x in batches(0, 1)], batches(1, 2)
    torch.manual_seed(0)
    bare = nn.Linear(4, 2)
    model = fsshard.wrap(copy.deepcopy(bare), **engine)
    theirs = torch.optim.LBFGS(bare.parameters(), **settings)
    ours = fsshard.build_optimizer(model, torch.optim.LBFGS, **settings)

    def loss_of(net: nn.Module, x: Tensor) -> Tensor:
        return (net(x) - x.sum(1, keepdim=True).sin()).square().mean()

    def of_those_that_go_on(batches: list[Tensor]) -> Tensor:
        theirs.zero_grad()
        loss = torch.stack([loss_of(bare, x) for x in batches]).mean()
        loss.backward()
        return loss

    theirs.step(lambda: of_those_that_go_on([first[0], second[0]]))
    theirs.step(lambda: of_those_that_go_on([second[1]]))
    with fsshard.join(model) as joined:
        for x in joined(second if dist.get_rank() else first):

            def closure(x: Tensor = x) -> Tensor:
                ours.zero_grad()
                loss = loss_of(model, x) * (1.0 if joined.active else float("nan"))
                loss.backward()
                return loss

            ours.step(closure)
    for key, value in bare.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("engine", [pytest.param(ENGINES[0], marks=pytest.mark.long), ENGINES[4]], ids=["ddp", "fsdp2"])
@on_ranks()
def test_several_models_and_accumulation(engine: dict[str, Any]) -> None:
    """Two models in one loop, two batches a step, the first of them without communication."""
    model, other = fsshard.wrap(Net(), **engine), fsshard.wrap(net(), **engine)
    with fsshard.join({"one": model, "two": other}) as joined:
        for number, x in enumerate(joined(batches(dist.get_rank(), 2 - dist.get_rank()))):
            if number == 0:
                with model.no_sync(), other.no_sync():
                    (model(x).square().mean() + other(x).square().mean()).backward()
            else:
                (model(x).square().mean() + other(x).square().mean()).backward()
    norms = [float(each.clip_grad_norm_(1e9)) for each in (model, other)]
    for bare, norm in zip((Net(), net()), norms, strict=True):
        first, second = batches(0, 2)
        bare(first).square().mean().div(2).backward()
        bare(batches(1, 1)[0]).square().mean().div(2).backward()
        bare(second).square().mean().backward()  # by itself
        assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(bare.parameters(), 1e9)), rel=1e-5)


@on_ranks()
def test_misuse_is_told() -> None:
    model, said = fsshard.wrap(net(), backend="ddp"), []
    joined = fsshard.join(model)
    with pytest.raises(ConfigurationError) as raised:
        next(joined([1]))
    said.append(str(raised.value))
    for wrong in (net(), [], 3):
        with pytest.raises(ConfigurationError) as raised:
            fsshard.join(wrong)  # type: ignore[arg-type]
        said.append(str(raised.value))
    with pytest.raises(RankMismatch) as lost, joined:
        list(joined([1] * dist.get_rank()))
    said.append(str(lost.value))
    with joined:  # and is as before
        assert [each for each in joined([1]) if joined.active] == [1]
        assert list(joined([])) == []
    texts = [
        "`with fsshard.join(model) as joined: for batch in joined(loader): ...`",
        "got Net",
        "got none",
        "got int",
    ]
    for told, text in zip(said, [*texts, "rank 0 has no batch at all"], strict=True):
        assert text in told


@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
def test_without_it_the_rank_that_ended_is_named(backend: str) -> None:
    """Its own processes: the ranks lose each other."""
    with forking(), pytest.raises(fsshard.RankFailed, match=r"rank 1 failed with an early return.*fewer batches"):
        fsshard.launch(job_ends_early, nprocs=2, args=(backend,), threads=1, timeout=60)


def job_ends_early(context: fsshard.Context, backend: str) -> None:
    model = fsshard.wrap(net(), backend=backend)
    for x in batches(0, 3 - context.rank):
        model(x).square().mean().backward()


@pytest.mark.parametrize(("backend", "call"), [("ddp", "barrier"), ("fsdp2", "evaluation")])
def test_without_it_ranks_in_different_collectives_are_named(backend: str, call: str) -> None:
    """When the process group's time is over; which rank notices first is left to chance."""
    named = r"(?=.*in job_goes_elsewhere: ).*rank \d never came to .*waited in .*rank \d waited in "
    with forking(), pytest.raises(fsshard.RankFailed, match=named):
        fsshard.launch(job_goes_elsewhere, nprocs=2, args=(backend, call), threads=1, timeout=5)


def job_goes_elsewhere(context: fsshard.Context, backend: str, call: str) -> None:
    model = fsshard.wrap(net(), backend=backend)
    for x in batches(0, 3 - context.rank):
        model(x).square().mean().backward()
    if call == "evaluation":
        with torch.no_grad():
            model(batches(0, 1)[0])
    if call == "barrier":
        dist.barrier()
    dist.all_reduce(torch.ones(7))
