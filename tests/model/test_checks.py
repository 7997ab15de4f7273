"""agree(): a failure anywhere is raised everywhere. What wrap refuses of a model, and that its advice is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from fsshard.errors import FsshardError, ModelError, RankMismatch, StateDictError, UnsupportedByBackend
from fsshard.model.checks import agree, overlapping
from tests.on_ranks import on_ranks
from tests.training_runs import DISTRIBUTED, check_equal


def job(kind: str) -> int:
    def work() -> int:
        if dist.get_rank() == 1:
            if kind == "value":
                raise ValueError("broken")
            if kind == "state":
                raise StateDictError("the state dict", missing=["x"])
            if kind == "unsupported":
                raise UnsupportedByBackend("this", "ddp", "use that")
        return dist.get_rank()

    return agree(dist.group.WORLD, work)


def test_results_come_back(ranks: Any) -> None:
    assert ranks.run(job, 2, "fine") == [0, 1]


@pytest.mark.parametrize(
    ("kind", "there", "here"),
    [
        ("value", RankMismatch, ValueError),
        ("state", StateDictError, StateDictError),
        ("unsupported", UnsupportedByBackend, UnsupportedByBackend),
    ],
)
def test_errors_reach_every_rank_by_kind(ranks: Any, kind: str, there: type, here: type) -> None:
    one, other = ranks.run_expecting_errors(job, 2, kind)
    assert type(one) is there and "rank" in str(one)
    assert type(other) is here
    assert isinstance(one, FsshardError)


class Words(nn.Module):
    def __init__(self, kind: type[nn.Module], **settings: Any) -> None:
        super().__init__()
        self.embed, self.head = kind(6, 4, **settings), nn.Linear(4, 2)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.embed(words))


def steps(model: Any, optimizer: Any, after: Any) -> None:
    """Each rank looks up other words, some of them on both."""
    for step in range(3):
        words = (torch.arange(6).view(2, 3) + step + dist.get_rank()) % 6
        optimizer.zero_grad()
        model(words[:, :2]).square().sum().backward()
        after(optimizer)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@on_ranks()
def test_embeddings_with_max_norm_are_refused_and_what_the_error_says_is_right(kind: type[nn.Module]) -> None:
    """Under DDP each rank scales the rows of its own batch, so that replicas go apart; FairScale takes rank 0's."""
    torch.manual_seed(0)
    bare = Words(kind)

    def average(optimizer: Any) -> None:
        for parameter in bare.parameters():
            dist.all_reduce(parameter.grad.div_(2))
        optimizer.step()
        with torch.no_grad():
            bare.embed.weight.renorm_(2.0, 0, 0.5)

    steps(bare, torch.optim.SGD(bare.parameters(), lr=0.5), average)
    found = [bare.state_dict()]
    for backend in DISTRIBUTED:
        with pytest.raises(ModelError, match=r"'embed\.weight' belongs to an nn\.Embedding") as raised:
            fsshard.wrap(Words(kind, max_norm=0.5), backend=backend)
        with_block = str(raised.value).split("`")[1]
        torch.manual_seed(0)
        model = fsshard.wrap(Words(kind), backend=backend)

        def advised(optimizer: Any, model: Any = model, with_block: str = with_block) -> None:
            optimizer.step()
            exec(with_block, {"torch": torch, "model": model})

        steps(model, fsshard.build_optimizer(model, torch.optim.SGD, lr=0.5), advised)
        found.append(model.state_dict())
    bare, *wrapped = found
    for state in wrapped:
        check_equal(bare, state)


def job_raw_ddp_max_norm() -> Tensor:
    torch.manual_seed(0)
    raw = nn.parallel.DistributedDataParallel(Words(nn.Embedding, max_norm=0.5))
    steps(raw, torch.optim.SGD(raw.parameters(), lr=0.5), lambda optimizer: optimizer.step())
    return raw.module.embed.weight.detach().clone()


def test_raw_ddp_lets_replicas_with_max_norm_go_apart(ranks: Any) -> None:
    one, other = ranks.run(job_raw_ddp_max_norm, 2)
    assert not torch.equal(one, other)


def test_memory_that_tensors_share() -> None:
    """Columns of a table share none; 2,000 of them are looked through once, and not in pairs (that took a minute)."""
    table, pair = torch.randn(8, 2000), torch.randn(6, 2)
    columns = {f"column {number}": nn.Parameter(table[:, number]) for number in range(2000)}
    assert overlapping(columns) is None
    assert overlapping({**columns, "corner": nn.Parameter(table[3:5, 7:9])}) == ("column 7", "corner")
    halves = {"real": nn.Parameter(pair[:, 0]), "imaginary": nn.Parameter(pair[:, 1])}
    assert overlapping(halves) is None
    assert overlapping({**halves, "both": torch.view_as_complex(pair)}) == ("real", "both")
    assert overlapping({"rows": table[:2], "row": table[1]}) is None  # buffers may
    row = nn.Parameter(table[0].expand(3, 2000))
    assert overlapping({"expanded": row, "slice": nn.Parameter(table[0, 5:9])}) == ("expanded", "slice")
