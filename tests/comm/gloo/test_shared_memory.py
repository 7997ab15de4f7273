"""Messages through shared memory: what arrives, in whatever order; what is left of it; and who does without."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fsshard
from fsshard.comm.gloo import shared_memory
from fsshard.comm.gloo.collectives import _Broadcasts, _PendingCopies
from fsshard.comm.gloo.shared_memory import SMALLEST, Exchange, exchange_of
from fsshard.errors import ConfigurationError, RankMismatch
from fsshard.launching.pool import RankPool
from fsshard.torch_private.c10d import set_timeout
from tests.training_runs import differences

OVER_TCP = {"shared_memory": False}


def numbers(count: int, seed: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


class Talk:
    """Messages of this rank, and what is expected of them."""

    def __init__(self) -> None:
        self.group: Any = dist.group.WORLD
        self.rank, self.size = self.group.rank(), self.group.size()
        found = exchange_of(self.group)
        assert found is not None
        self.exchange: Exchange = found

    def gather(self, count: int, seed: int = 0) -> Any:
        return self.exchange.send(self.group, [numbers(count, seed + self.rank)], to_all=True)

    def deal(self, count: int) -> Any:
        """Send each other rank a part of its own."""
        others = [numbers(count, 10 * self.rank + rank) for rank in range(self.size) if rank != self.rank]
        return self.exchange.send(self.group, others, to_all=False)

    def read(self, message: Any, seeds: list[int], count: int) -> bool:
        others = [rank for rank in range(self.size) if rank != self.rank]
        alike = [torch.equal(message.part(rank, torch.empty(count)), numbers(count, seeds[rank])) for rank in others]
        message.end()
        return all(alike)

    def segments(self) -> int:
        return len(self.exchange._lent) + len(self.exchange._free)


# ------------------------------------------------------------------------------------------------ messages


def job_sizes() -> bool:
    talk, alike = Talk(), []
    for count in (0, 1, 3, 1000, SMALLEST // 4, SMALLEST // 4 + 1, 7, 100_003, 0):
        alike.append(talk.read(talk.gather(count, count), [count + rank for rank in range(talk.size)], count))
        alike.append(talk.read(talk.deal(count), [10 * rank + talk.rank for rank in range(talk.size)], count))
    return all(alike)


@pytest.mark.parametrize("size", [2, 3])
def test_messages_of_all_sizes_arrive(ranks: RankPool, size: int) -> None:
    assert all(ranks.run(job_sizes, size))


def job_order() -> tuple[bool, int, int]:
    """Many messages are under way, and read in another order; then one at a time; then some that nobody reads."""
    talk = Talk()
    sent = [talk.gather(100, 10 * n) for n in range(20)]
    alike = [talk.read(sent[n], [10 * n, 10 * n + 1], 100) for n in [*range(19, 9, -1), *range(10)]]
    del sent
    before = talk.segments()
    for n in range(30):
        alike.append(talk.read(talk.gather(100, n), [n, n + 1], 100))
    used = talk.segments() - before
    for _ in range(30):
        talk.gather(100)  # as a backward drops one that raises
    dist.barrier()
    alike.append(talk.read(talk.gather(100, 7), [7, 8], 100))
    return all(alike), used, talk.segments()


def test_segments_are_used_again_once_all_have_read_them(ranks: RankPool) -> None:
    for alike, used, segments in ranks.run(job_order, 2):
        assert alike and used <= 2 and segments <= 20 + 31


def job_apart() -> str:
    talk = Talk()
    message = talk.deal(2) if talk.rank else talk.gather(4)
    with pytest.raises(RankMismatch) as caught:
        message.part(1 - talk.rank, torch.empty(2))
    return str(caught.value)


def test_numbers_that_cannot_meet_are_refused(ranks: RankPool) -> None:
    here, _ = ranks.run(job_apart, 2)
    assert here.startswith(
        "rank 1 sends 8 bytes of reduce_scatter where this rank waits for 16 bytes of all_gather: the"
    )


def job_no_memory() -> str:
    talk = Talk()
    with (
        mock.patch("os.posix_fallocate", side_effect=OSError(28, "No space left")),
        pytest.raises(RuntimeError) as caught,
    ):
        talk.gather(100_000)  # more than the first segment has
    return str(caught.value)


def test_no_memory_is_said_with_the_setting(ranks: RankPool) -> None:
    for said in ranks.run(job_no_memory, 2):
        assert said.startswith("no 400000 bytes of shared memory") and "No space left" in said
        assert said.endswith("wrap the model with shared_memory=False to send them over TCP")


def job_late() -> str:
    """Rank 1 comes when rank 0 has waited for as long as its group may."""
    talk, store = Talk(), dist.distributed_c10d._get_default_store()
    if talk.rank == 1:
        store.wait(["given up"])
        return ""
    set_timeout(timedelta(seconds=0.5))
    message = talk.gather(9)
    with pytest.raises(RuntimeError) as caught:
        message.part(1, torch.empty(9))
    store.set("given up", "")
    return str(caught.value)


def test_a_rank_that_does_not_come_is_missed_in_time(ranks: RankPool) -> None:
    assert "Timed out waiting" in ranks.run(job_late, 2)[0]


@pytest.mark.parametrize("kind", ["shared", "tcp"])
def test_a_wait_that_has_failed_fails_again(kind: str) -> None:
    # FSDP2 waits for the same gather in the next forward: it must not take what never arrived for the numbers.
    failed: Any = mock.Mock(**{"wait.side_effect": RuntimeError("Timed out waiting")})
    message = shared_memory.Message(mock.Mock(), [1, 4], failed, torch.empty(0))
    work: Any = _PendingCopies(message, {1: torch.empty(1)}) if kind == "shared" else _Broadcasts([failed], [])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Timed out waiting"):
            work.wait()


# ------------------------------------------------------------------------------------------------ models


class Net(nn.Module):
    """A few layers with a part that some forwards leave out; ``fails`` makes the middle of the backward raise."""

    def __init__(self, *, complex_ones: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.spare = nn.Linear(8, 8)
        self.phase = nn.Parameter(torch.randn(8, 2, dtype=torch.complex64)) if complex_ones else None
        self.fails = self.whole = False

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if self.fails and number == 1:
                x.register_hook(_fail)
        if self.phase is not None:
            x = x * self.phase.abs().sum(1) + (self.phase * self.phase).real.sum(1)
        return x if self.whole else self.spare(x)


def _fail(_: Tensor) -> None:
    raise ZeroDivisionError("in the middle of a backward")


def data(step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def memory_files() -> int:
    """How many of ours this process has mapped, or open."""
    found = Path("/proc/self/maps").read_text().count("memfd:fsshard")
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found += "memfd:fsshard" in os.readlink(f"/proc/self/fd/{descriptor}")
    return found


def trained(case: str, settings: dict[str, Any]) -> dict[str, Any]:
    """All weights after three steps."""
    given = {"find_unused_parameters": case == "unused", "auto_wrap_policy": {nn.Linear}, **settings}
    model = fsshard.wrap(Net(complex_ones=case == "complex"), backend="fsdp2", **given)
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    for step in range(3):
        if case == "failed":
            model.module.fails = True
            with contextlib.suppress(ZeroDivisionError):
                model(data(step)).sum().backward()
            model.module.fails = False
            model.module._get_fsdp_state()._reset_iter_state()  # what torch offers after a failed step
            model.zero_grad()
        model.module.whole = case == "unused" and step == 1
        with model.no_sync() if case == "no_sync" else contextlib.nullcontext():
            model(data(step + 5)).square().mean().backward()
        if case == "no_sync":
            model(data(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def job_alike(cases: list[str]) -> list[str]:
    found = []
    for case in cases:
        shared = trained(case, {})
        found += [f"{case} {text}" for text in differences(trained(case, OVER_TCP), shared)]
    return found


def test_the_numbers_are_those_that_go_over_tcp(ranks: RankPool) -> None:
    assert ranks.run(job_alike, 2, ["plain", "unused", "no_sync", "complex", "failed"]) == [[], []]
    assert ranks.run(job_alike, 3, ["plain"]) == [[]] * 3


class Seen(TorchDispatchMode):
    """Collectives, of torch's and of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from fsshard.simulation.collectives import collective_of

        result = func(*args, **(kwargs or {}))
        if (collective := collective_of(func, args, result)) is not None:
            self.found.append((collective.kind, collective.nbytes, collective.ranks))
        return result

    def sends(self, kind: str, payload: torch.Tensor, ranks: int) -> None:
        self.found.append((kind, payload.nbytes, ranks))


def job_seen() -> tuple[bool, list[Any], int]:
    """Whether a step shows those who watch the same collectives either way; and what is left of it."""
    seen, before = [], memory_files()  # of models that another test has left behind
    for settings in ({}, OVER_TCP):
        model = fsshard.wrap(Net(), backend="fsdp2", **settings)
        with Seen() as watching:
            model(data(0)).square().mean().backward()
        seen.append(watching.found)
        if not settings:
            assert memory_files() > before, "nothing went through shared memory"
        del model
        gc.collect()
    return seen[0] == seen[1], seen[0], memory_files() - before


def test_who_counts_collectives_sees_the_same_and_nothing_is_left(ranks: RankPool) -> None:
    for same, found, left in ranks.run(job_seen, 2):
        assert same and found and all(count == 2 for _, _, count in found)
        assert left == 0


# ------------------------------------------------------------------------------------------------ who can


LACKING: dict[str, Any] = {
    "memory": lambda: mock.patch("os.memfd_create", side_effect=PermissionError),
    "sockets": lambda: mock.patch("socket.socket", side_effect=OSError(24, "Too many open files")),
    "the way": lambda: mock.patch.object(Exchange, "_post", side_effect=ConnectionRefusedError),
    "room for files": lambda: mock.patch.object(Exchange, "look"),
    "nothing": contextlib.nullcontext,
}


def job_fallback() -> dict[str, bool]:
    """By what rank 1 lacks: whether this rank has got an exchange."""
    group: Any = dist.group.WORLD
    found = {}
    for lacking, fake in LACKING.items():
        with fake() if dist.get_rank() == 1 else contextlib.nullcontext():
            found[lacking] = exchange_of(group) is not None
    return found


def test_all_ranks_agree_to_do_without(ranks: RankPool) -> None:
    assert ranks.run(job_fallback, 2) == [{lacking: lacking == "nothing" for lacking in LACKING}] * 2


def job_settings() -> tuple[list[int], list[str]]:
    left, told, before = [], [], memory_files()
    for settings in (OVER_TCP, {"fast_collectives": False}):
        model = fsshard.wrap(Net(), backend="fsdp2", **settings)
        model(data(0)).sum().backward()
        left.append(memory_files() - before)
    for name in ("shared_memory", "fast_collectives"):
        with pytest.raises(ConfigurationError) as caught:
            fsshard.wrap(Net(), backend="fsdp2", **{name: "no"})
        told.append(str(caught.value))
    return left, told


def test_the_settings(ranks: RankPool) -> None:
    told = [f"{name}='no': expected a bool" for name in ("shared_memory", "fast_collectives")]
    assert ranks.run(job_settings, 2) == [([0, 0], told)] * 2


def job_killed(backend: str) -> None:
    model = fsshard.wrap(Net(), backend=backend)
    for _ in range(4):  # the fourth forward begins by comparing steps, which would show the loss first
        model(data(0)).sum().backward()
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    model(data(0)).sum().backward()


@pytest.mark.long
def test_a_rank_that_is_killed_is_missed_at_once() -> None:
    with RankPool() as pool, pytest.raises(fsshard.errors.RankFailed) as caught:
        pool.run(job_killed, 2, "fsdp2")
    assert caught.value.rank == 1 and "SIGKILL" in str(caught.value)
    assert "all_gather (FSDP2)" in caught.value.others[0]
