"""Messages through shared memory: what arrives, in whatever order; what is left of it; and ranks that are lost."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fsshard
from fsshard.comm.gloo import same_host
from fsshard.comm.gloo.collectives import _Broadcasts, _PendingCopies
from fsshard.comm.gloo.shared_memory import SMALLEST, Exchange
from fsshard.errors import ConfigurationError, RankMismatch
from fsshard.launching.pool import RankPool
from tests.training_runs import differences

OVER_TCP = {"shared_memory": False}


class Group:
    """What an exchange asks of its process group."""

    group_name = "test"

    def __init__(self, rank: int, seconds: float) -> None:
        self._rank, self.seconds = rank, seconds

    def rank(self) -> int:
        return self._rank

    def _get_backend(self, device: Any) -> Any:
        return SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=self.seconds)))


class Ranks(list[Exchange]):
    """All ranks of a group, in this thread: no message waits, once its peers have sent theirs."""

    def __init__(self, size: int, seconds: float = 60.0) -> None:
        sockets: list[dict[int, socket.socket]] = [{} for _ in range(size)]
        for one in range(size):
            for other in range(one):
                pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                sockets[one][other], sockets[other][one] = pair
        self.groups = [Group(rank, seconds) for rank in range(size)]
        super().__init__(Exchange("test", group, each) for group, each in zip(self.groups, sockets, strict=True))  # type: ignore[arg-type]

    def gather(self, tensors: list[Tensor]) -> list[Any]:
        """The messages of an all-gather, sent and not yet read."""
        messages = [each.begin("all_gather", tensor.nbytes) for each, tensor in zip(self, tensors, strict=True)]
        for message, tensor in zip(messages, tensors, strict=True):
            message.put(tensor)
            message.send(tensor.nbytes)
        return messages


@pytest.fixture
def pair() -> Iterator[Ranks]:
    yield (ranks := Ranks(2))
    ranks.clear()


def numbers(count: int, seed: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------------------ messages


@pytest.mark.parametrize("size", [2, 3])
def test_messages_of_all_sizes_arrive(size: int) -> None:
    ranks = Ranks(size)
    for count in (0, 1, 3, 1000, SMALLEST // 4, SMALLEST // 4 + 1, 7, 100_003, 0):
        tensors = [numbers(count, seed=count + rank) for rank in range(size)]
        messages = ranks.gather(tensors)
        for rank, message in enumerate(messages):
            for other in set(range(size)) - {rank}:
                message.copy(other, into := torch.empty(count))
                assert torch.equal(into, tensors[other])
            message.end()


def test_many_messages_are_read_in_another_order_than_they_were_sent(pair: Ranks) -> None:
    sent = [[numbers(100 + n, 2 * n), numbers(100 + n, 2 * n + 1)] for n in range(60)]
    messages = [pair.gather(tensors) for tensors in sent]
    for place in [*range(59, 30, -1), *range(31)]:
        for rank in (0, 1):
            messages[place][rank].copy(1 - rank, into := torch.empty(100 + place))
            assert torch.equal(into, sent[place][1 - rank])
            messages[place][rank].end()


def test_ranks_that_send_more_than_the_sockets_hold_do_not_block_each_other(pair: Ranks) -> None:
    def flood(exchange: Exchange) -> int:
        messages = [exchange.begin("all_gather", 0) for _ in range(2000)]
        for message in messages:
            message.send(0)
        for message in reversed(messages):
            message.copy(1 - pair.index(exchange), torch.empty(0))
            message.end()
        return len(messages)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(flood, pair)) == [2000, 2000]


def test_a_segment_is_used_again_once_all_have_read_it(pair: Ranks) -> None:
    made = [exchange._segments for exchange in pair]
    first, second = pair.gather([torch.ones(9), torch.ones(9)]), pair.gather([torch.zeros(9), torch.zeros(9)])
    for messages, expected in ((second, 0.0), (first, 1.0)):  # the first was not overwritten by the second
        for rank in (0, 1):
            assert set(messages[rank].view(1 - rank, torch.empty(9)).tolist()) == {expected}
            messages[rank].end()
    for _ in range(20):
        for rank, message in enumerate(pair.gather([torch.ones(9), torch.ones(9)])):
            message.copy(1 - rank, torch.empty(9))
            message.end()
    assert [next(count) for count in made] == [3, 3]


def test_a_message_that_nobody_reads_gives_its_segment_back(pair: Ranks) -> None:
    for _ in range(20):
        pair.gather([torch.ones(9), torch.ones(9)])  # dropped at once, as a gather is by a backward that raises
    messages = pair.gather([torch.zeros(9), torch.ones(9)])
    messages[0].copy(1, into := torch.empty(9))
    assert into.sum() == 9 and next(pair[0]._segments) <= 5


def test_numbers_that_cannot_meet_are_refused(pair: Ranks) -> None:
    one, other = pair[0].begin("all_gather", 8), pair[1].begin("reduce_scatter", 16)
    one.send(8)
    other.send({0: (0, 16)})
    with pytest.raises(RankMismatch, match=r"rank 1 sends 16 bytes of reduce_scatter where .* 8 of all_gather"):
        one.copy(1, torch.empty(2))
    with pytest.raises(RuntimeError, match="rank 1 sends 16 bytes"):
        pair[0].begin("all_gather", 8)


def test_no_memory_is_said_with_the_setting(pair: Ranks) -> None:
    with mock.patch("os.posix_fallocate", side_effect=OSError(28, "No space left")):
        with pytest.raises(RuntimeError, match=r"no 65536 bytes of shared memory .*No space left.*shared_memory=False"):
            pair[0].begin("all_gather", 9)


def test_a_message_that_was_read_in_part_gives_its_segment_back() -> None:
    ranks = Ranks(3)
    for _ in range(5):
        messages = ranks.gather([torch.ones(9)] * 3)
        messages[0].copy(1, torch.empty(9))  # and not 2, as where something raises between them
        del messages
    for _ in range(3):
        for rank, message in enumerate(ranks.gather([torch.ones(9)] * 3)):
            for other in {0, 1, 2} - {rank}:
                message.copy(other, torch.empty(9))
            message.end()
    assert len(ranks[1]._lent) <= 1  # the last one: it has not looked since


def test_a_timeout_may_be_longer_than_the_kernel_can_sleep() -> None:
    ranks = Ranks(2, seconds=1e9)
    ranks.gather([torch.ones(1), torch.ones(1)])[0].copy(1, into := torch.zeros(1))
    assert into.item() == 1


def test_a_descriptor_for_which_there_is_no_room_is_no_silence(pair: Ranks) -> None:
    messages, into = pair.gather([torch.ones(9), torch.ones(9)]), torch.zeros(9)
    free, limits = os.dup(0), resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        with pytest.raises(RuntimeError, match=r"memory of rank 1: .*no more files \(ulimit -n\).*shared_memory=False"):
            messages[0].copy(1, into)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    with pytest.raises(RuntimeError, match="Connection closed by peer: rank 0"):
        pair[1].begin("all_gather", 4).copy(0, into)


def test_a_system_error_is_told_to_all(pair: Ranks) -> None:
    message = pair[0].begin("all_gather", 9)
    with mock.patch("socket.send_fds", side_effect=OSError(109, "Too many references")):
        with pytest.raises(RuntimeError, match=r"failed \(.*Too many references\); .*shared_memory=False"):
            message.send(9)
    with pytest.raises(RuntimeError, match="Connection closed by peer: rank 0"):
        pair[1].begin("all_gather", 4).copy(0, torch.empty(1))


@pytest.mark.parametrize("method", ["_take", "_post"])
def test_an_interrupt_in_the_middle_of_a_message_is_told_to_all(pair: Ranks, method: str) -> None:
    messages = pair.gather([torch.ones(9), torch.ones(9)])
    with mock.patch.object(Exchange, method, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        messages[0].copy(1, torch.empty(9)) if method == "_take" else messages[0].send(9)
    with pytest.raises(RuntimeError, match="interrupted by KeyboardInterrupt; wrap the model anew"):
        pair[0].begin("all_gather", 4)
    with pytest.raises(RuntimeError, match="Connection closed by peer: rank 0"):
        pair[1].begin("all_gather", 4).send(4)


@pytest.mark.parametrize("kind", ["shared", "tcp"])
def test_a_wait_that_has_failed_fails_again(kind: str) -> None:
    # FSDP2 waits for the same gather in the next forward: it must not take what never arrived for the numbers.
    ranks = Ranks(2, seconds=0.001)
    message = ranks[0].begin("all_gather", 4)
    failed = SimpleNamespace(wait=mock.Mock(side_effect=RuntimeError("Timed out waiting")))
    work: Any = _PendingCopies(message, {1: torch.empty(1)}) if kind == "shared" else _Broadcasts([failed], [])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Timed out waiting"):
            work.wait()


# ------------------------------------------------------------------------------------------------ losses


@pytest.mark.parametrize("what", ["all_gather", "reduce_scatter"])
def test_who_has_sent_and_left_is_missed_in_a_reduction_only(what: str) -> None:
    ranks = Ranks(2)
    ranks.gather([torch.ones(1), torch.zeros(1)])  # the first: a gather ahead that nobody needs
    later, message = ranks[1].begin(what, 4), ranks[0].begin(what, 4)
    message.put(torch.ones(1))
    message.send(4)
    ranks.pop(0)._close()
    if what == "reduce_scatter":
        with pytest.raises(RuntimeError, match="Connection closed by peer: rank 0"):
            later.send(4)
        return
    later.send(4)
    later.copy(0, into := torch.zeros(1))
    assert into.item() == 1
    with pytest.raises(RuntimeError, match="Connection closed by peer: rank 0"):
        ranks[0].begin("all_gather", 4).send(4)


def test_a_broken_exchange_holds_no_memory() -> None:
    before, ranks = memory_files(), Ranks(2)
    for rank, message in enumerate(ranks.gather([torch.ones(9), torch.ones(9)])):
        message.copy(1 - rank, torch.empty(9))
        message.end()
    del message
    for exchange in ranks:
        exchange._break("as a forked process does")
    assert memory_files() == before


def test_a_rank_that_is_gone_is_named_and_what_it_sent_can_be_read() -> None:
    ranks = Ranks(3)
    messages = ranks.gather([torch.full((4,), float(rank)) for rank in range(3)])
    messages[1].copy(0, torch.empty(4))
    ended = ranks.pop(2)
    del messages[2], ended
    gc.collect()
    messages[0].copy(2, into := torch.empty(4))
    assert into.tolist() == [2.0] * 4
    # Rank 0 waits for rank 1, which would wait for rank 2.
    late = ranks[0].begin("all_gather", 4)
    with pytest.raises(RuntimeError, match=r"Connection closed by peer: rank 2 ended or gave up before .* all_gather"):
        late.copy(1, torch.empty(1))


def test_the_others_learn_at_once_that_a_rank_has_given_up(pair: Ranks) -> None:
    pair[0]._break("something happened")
    message = pair[1].begin("reduce_scatter", 4)
    with pytest.raises(RuntimeError, match=r"Connection closed by peer: rank 0 .* reduce_scatter"):
        message.send({0: (0, 4)})


def test_a_rank_that_does_not_come_is_named() -> None:
    ranks = Ranks(2, seconds=0.001)
    message = ranks[0].begin("all_reduce", 4)
    message.send(4)
    with pytest.raises(RuntimeError, match=r"Timed out waiting 1ms for rank 1 in all_reduce"):
        message.view(1, torch.empty(1))


def test_a_rank_that_never_reads_does_not_block_for_ever() -> None:
    ranks = Ranks(2, seconds=0.001)

    def flood() -> None:
        for _ in range(10_000):
            ranks[0].begin("all_gather", 0).send(0)

    with pytest.raises(RuntimeError, match="Timed out waiting for rank 1 to read"):
        flood()


def test_a_forked_process_holds_no_connection(pair: Ranks) -> None:
    ends, begins = os.pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            os.close(begins)
            os.read(ends, 1)  # until the parent has closed its end
        os._exit(0)
    try:
        pair[0]._close()
        with pytest.raises(RuntimeError, match="Connection closed by peer: rank 0"):
            pair[1].begin("all_gather", 4).copy(0, torch.empty(1))
    finally:
        os.close(ends)
        os.close(begins)
        os.waitpid(child, 0)


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
    settings = {"auto_wrap_policy": {nn.Linear}, "find_unused_parameters": case == "unused", **settings}
    model = fsshard.wrap(Net(complex_ones=case == "complex"), backend="fsdp2", **settings)
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
        found += [f"{case} {text}" for text in differences(trained(case, OVER_TCP), trained(case, {}))]
    return found


@pytest.mark.parametrize(("size", "cases"), [(2, ["plain", "unused", "no_sync", "complex", "failed"]), (3, ["plain"])])
def test_the_numbers_are_those_that_go_over_tcp(ranks: RankPool, size: int, cases: list[str]) -> None:
    assert ranks.run(job_alike, size, cases) == [[]] * size


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


def job_fallback(lacking: str) -> list[bool]:
    """Whether the ranks got an exchange, where one of them lacks something."""
    group = dist.group.WORLD
    assert group is not None
    alone = dist.get_rank() == 1
    fake = {
        "system": lambda: mock.patch.object(same_host, "can_share", return_value=False),
        "host": lambda: mock.patch.object(same_host, "_host", return_value="another"),
        "memory": lambda: mock.patch("os.memfd_create", side_effect=PermissionError),
        "way": lambda: mock.patch.object(same_host, "_connect", side_effect=OSError),
        "answer": lambda: mock.patch.object(same_host, "_accept", side_effect=OSError),
        "all": lambda: mock.patch.object(
            same_host, "can_share" if alone else "_host", return_value=""
        ),  # no /proc there
        "nothing": contextlib.nullcontext,
    }[lacking]
    with fake() if alone or lacking in ("answer", "all") else contextlib.nullcontext():
        first = same_host.exchange_of(group)
        again = same_host.exchange_of(group)
    return [first is not None, again is first]


@pytest.mark.parametrize("lacking", ["system", "host", "memory", "way", "answer", "all", "nothing"])
def test_all_ranks_agree_to_do_without(ranks: RankPool, lacking: str) -> None:
    assert ranks.run(job_fallback, 2, lacking) == [[lacking == "nothing", True]] * 2


def job_settings() -> tuple[list[int], str]:
    left, before = [], memory_files()
    for settings in (OVER_TCP, {"fast_collectives": False}):
        model = fsshard.wrap(Net(), backend="fsdp2", **settings)
        model(data(0)).sum().backward()
        left.append(memory_files() - before)
    try:
        fsshard.wrap(Net(), backend="fsdp2", shared_memory="no")
    except ConfigurationError as error:
        return left, str(error)
    return left, ""


def test_the_settings(ranks: RankPool) -> None:
    assert ranks.run(job_settings, 2) == [([0, 0], "shared_memory='no': expected a bool")] * 2


def test_without_a_descriptor_for_the_socket_there_is_none() -> None:
    with mock.patch("socket.socket", side_effect=OSError(24, "Too many open files")):
        assert same_host._listener() is None


def job_killed(backend: str) -> None:
    model = fsshard.wrap(Net(), backend=backend)
    for _ in range(
        4
    ):  # the fourth forward begins by comparing steps, where the loss of a rank would show first; the fifth does not
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
