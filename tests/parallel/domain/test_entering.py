"""Checks that inputs which do not fit together raise on every rank, with the reason.

Tests fsshard/comm/watchdog.py too.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsshard
from fsshard.comm import watchdog
from fsshard.comm.watchdog import Place, Watchdog
from fsshard.errors import ConfigurationError, FsshardError, RankMismatch
from fsshard.parallel import shard_domain
from tests.on_ranks import on_ranks
from tests.parallel.domain.operators import TWO, field, mesh_of, operator

pytest.importorskip("neuralop")


def job_bad_input() -> dict[str, tuple[str, str]]:
    """By case: the error's kind and text on this rank. After all of them the model still works."""
    mesh = mesh_of(2, 2)
    model, other = operator(TWO), operator(TWO)
    domain, across = shard_domain(model, mesh["domain"]), shard_domain(other, mesh["data"])
    rank = mesh["domain"].get_local_rank()
    x, pair = field(9, 8), field(9, 8, batch=2)
    inputs = {
        "fewer rows than ranks": lambda: model(domain.scatter(field(1, 8))),
        "another domain": lambda: model(across.scatter(x)),
        "rows of a loader": lambda: model(x[:, :, : 7 if rank else 4].contiguous()),
        "another whole on one rank": lambda: model(domain.scatter(field(10 if rank else 9, 8))),
        "another batch on one rank": lambda: model(domain.scatter(field(9, 8, batch=1 + rank))),
        "another sample on one rank": lambda: model(domain.scatter(field(9, 8, seed=rank))),
        "a flipped sample on one rank": lambda: model(domain.scatter(x.flip(-1) if rank else x)),
        "another order on one rank": lambda: model(domain.scatter(pair.flip(0) if rank else pair)),
        "another target on one rank": lambda: domain.mse_loss(
            domain.scatter(x), domain.scatter(field(9, 8, seed=rank))
        ),
        "a field that asks for a gradient": lambda: domain.scatter(x.clone().requires_grad_()),
        "wrapped over data alone": lambda: fsshard.wrap(model, backend="fsdp2", device_mesh=mesh["data"]),
        "no tensor on one rank": lambda: model(None if rank else domain.scatter(x)),
        "a list": lambda: model([1.0]),
        "slabs of unequal rows": lambda: domain.mse_loss(x[:, :, :2], x[:, :, :3]),
        "of another size than said": lambda: with_shape(domain, (12, 8), lambda: model(x[:, :, :3].clone())),
    }
    found = {}
    for name, call in inputs.items():
        try:
            call()
            found[name] = ("nothing", "")
        except FsshardError as error:
            found[name] = type(error).__name__, str(error)
    loaded = x.tensor_split(2, dim=2)[rank].clone()  # as a loader gives it
    assert torch.equal(model(loaded), model(domain.scatter(x)))
    assert torch.equal(with_shape(domain, (9, 8), lambda: model(loaded)), model(loaded))
    with pytest.warns(UserWarning, match=r"if they are the whole field, pass domain.scatter\(x\)"):
        model(field(8, 8))
    return found


def with_shape(domain: Any, shape: tuple[int, ...], call: Any) -> Any:
    domain.shape = shape
    try:
        return call()
    finally:
        domain.shape = None


def test_bad_input(ranks: Any) -> None:
    every = ranks.run(job_bad_input, 4)
    mismatched = {name for name in every[0] if name.endswith("on one rank")} - {"no tensor on one rank"}
    for found in every:
        for name, (kind, _) in found.items():
            expected = RankMismatch if name in {*mismatched, "rows of a loader"} else ConfigurationError
            assert kind == expected.__name__, name
    told = {name: text for name, (_, text) in every[0].items()}
    assert "have scattered different fields" in told["another sample on one rank"]
    assert "the ranks of a domain have different targets" in told["another target on one rank"]
    assert "and the group of data has [0] of them only" in told["wrapped over data alone"]
    assert "d1 has 1 points, fewer than the 2 ranks" in told["fewer rows than ranks"]
    assert "was scattered over <Domain: d1 over ranks [0, 2]>, and the model is split over" in told["another domain"]
    assert "4 + 7 rows, where torch.tensor_split of 11 rows over 2 ranks gives 6 + 5" in told["rows of a loader"]
    assert (
        "rank 1: a split operator expects a tensor (batch, channels, d1, d2), got NoneType"
        in (told["no tensor on one rank"])
    )


@on_ranks()
def test_how_often_ranks_compare() -> None:
    compared = []
    mesh = mesh_of(1, 2)["domain"]
    for always in (False, True):
        model = operator(TWO)
        domain = shard_domain(model, mesh)
        (axis,) = domain.axes
        rows, calls = axis.rows, []
        axis.rows = lambda row, calls=calls, rows=rows: calls.append(row) or rows(row)  # type: ignore[method-assign]
        assert domain.compares_always
        domain.compares_always = always
        for x in (field(9, 8), field(9, 8, seed=1), field(10, 8), field(9, 8)):
            domain.mse_loss(model(domain.scatter(x)), domain.scatter(x)).backward()
        compared.append(len(calls))
        model(domain.scatter(x).mul(2))  # nobody knows any longer of which field
        compared.append(len(calls) - compared[-1])
    assert compared == [2, 1, 8, 1]


def job_lost() -> None:
    model = operator(TWO)
    mesh = mesh_of(1, 2)["domain"]
    domain = shard_domain(model, mesh)
    if mesh.get_local_rank() == 1:
        raise ValueError("of the user")
    model(domain.scatter(field(8, 8)))


def test_a_rank_that_never_comes(ranks: Any) -> None:
    first, second = ranks.run_expecting_errors(job_lost, 2)
    assert isinstance(first, RankMismatch) and "an exchange of slabs (shard_domain)" in str(first)
    assert type(second) is ValueError


def job_late() -> tuple[str, str]:
    """Rank 1 takes another way than rank 0 of its domain: for a while, as others do; for good; longer than allowed."""
    watchdog.INTERVAL, watchdog.FIRST_QUESTION, watchdog.NEXT_QUESTION = 0.1, 0.2, 0.4
    mesh = mesh_of(2, 2)
    rank, told = dist.get_rank(), ["", ""]
    model, limited = operator(TWO), operator(TWO)
    domain, short = shard_domain(model, mesh["domain"]), shard_domain(limited, mesh["domain"], timeout=0.2)
    slab = domain.scatter(field(8, 8, seed=mesh["data"].get_local_rank()))
    watch = Watchdog.of_job()
    assert watch is not None
    store = watch.store
    if rank == 3:
        while store.add("asked", 0) < 5:  # busy: those that wait for it are right to do so
            torch.ones(1000).sum()
    if rank % 2:
        dist.barrier(mesh["data"].get_group())
    model(slab)
    if rank == 0:
        with pytest.raises(RankMismatch) as waited:
            model(slab)
        told[0] = str(waited.value)
    dist.all_reduce(torch.zeros(1))
    if rank == 0:
        with pytest.raises(RankMismatch) as over:
            limited(short.scatter(field(8, 8)))
        told[1] = str(over.value)
        store.set("over", "")
    while store.get("over") is None:
        torch.ones(1000).sum()
    return told[0], told[1]


def test_a_rank_that_goes_another_way(ranks: Any) -> None:
    (waited, over), *_ = ranks.run(job_late, 4)
    where = r"a loss of its domain: rank 1 waits in all_reduce, at .*test_entering\.py:\d+ in job_late"
    assert re.search(where, waited) and "they wait for each other" in waited, waited
    assert "rank 1 computes, or does not answer (0.2 s have passed)" in over, over


def at(text: str, *pending: tuple[str, int], ranks: tuple[int, ...] = (0, 1, 2, 3), **last: int) -> Place:
    """Waits in what is ``pending``, or in a meeting; has begun this many collectives in each group."""
    return Place(text, ranks, 1.0, 10.0, pending or None, last)


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        pytest.param([at("forward", ("a", 3), a=3, b=1), at("step", ("b", 2), a=2, b=2)], {0, 1}, id="two orders"),
        pytest.param([at("save", ranks=(0, 1), a=3), at("step", ("a", 4), ("a", 5), a=5)], {0, 1}, id="a meeting"),
        pytest.param([at("save", ranks=(0, 1)), at("save", ranks=(0, 1))], set(), id="one meeting"),
        pytest.param([at("save", ranks=(0, 1), a=3), at("", ranks=())], set(), id="one is elsewhere"),
        pytest.param([at("save", ranks=(0, 1), a=3)], set(), id="one computes, and does not answer"),
        pytest.param(
            [at("exchange", ("a", 5), a=5), at("broadcast", ("a", 4), a=4), at("broadcast", ("a", 4), a=4)],
            set(),
            id="a broadcast that two relay",
        ),
        pytest.param(
            [at("save", ranks=(0, 1), b=0), at("gather", ("a", 4), ("b", 2), a=4, b=2), at("gather", ("a", 4), a=4)],
            set(),
            id="one of two gathers may be slow",
        ),
        pytest.param([at("save", ranks=(0, 1), a=3), at("recv", ("a", 4), ("", 0), a=4)], set(), id="a receive"),
        pytest.param([at("save", ranks=(0, 1)), at("step", ("a", 4), a=4)], set(), id="nothing is known of a group"),
        pytest.param(
            [
                at("a", ("a", 1), a=1, c=0),
                at("b", ("b", 1), a=0, b=1),
                at("c", ("c", 1), b=0, c=1),
                at("c", ("d", 1), d=1),
            ],
            {0, 1, 2},
            id="a circle",
        ),
    ],
)
def test_who_waits_for_good(where: list[Place], expected: set[int]) -> None:
    now = dict(enumerate(where))
    before = {rank: place._replace(clock=0.0) for rank, place in now.items()}
    assert watchdog.stuck(now, before) == expected
    assert watchdog.stuck(now, {}) == set()
    moved = {rank: place._replace(text="before") for rank, place in before.items()}
    worked = {rank: place._replace(busy=0.0, clock=9.0) for rank, place in before.items()}
    went_on = {rank: place._replace(last={"a": 0}) for rank, place in before.items()}
    assert watchdog.stuck(now, moved) == watchdog.stuck(now, worked) == watchdog.stuck(now, went_on) == set()
