"""Ranks that come together, stay away, fail and die."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore, TCPStore

from fsshard.comm import agreement as module
from fsshard.comm import stores
from fsshard.comm.agreement import Channel, batches, described_tensor, exchange, fingerprint
from fsshard.errors import CheckpointError, CorruptCheckpoint, FsshardError, StateDictError
from tests.on_ranks import on_ranks

SAVE = "save('ckpt/last')"
ANSWER = 2.0  # seconds for one answer of the store, which some cases wait in vain for; a busy machine needs 0.5


def refusal(call: Callable[[], Any]) -> Any:
    """Kind, message and failures of what the call raises; its result if it raises nothing."""
    try:
        return call()
    except FsshardError as error:
        return type(error).__name__, str(error), getattr(error, "failures", None)


def met(group: Any = None, what: str = SAVE) -> Channel:
    channel = Channel.of(group or dist.group.WORLD)
    channel.arrive(what, 20)
    return channel


# ------------------------------------------------------------------------------------------------ alone


@pytest.mark.parametrize("group", [None, mock.Mock(**{"rank.return_value": 0, "size.return_value": 1})])
def test_one_that_is_alone_communicates_nothing(group: Any) -> None:
    channel = Channel(group)
    channel.arrive(SAVE, 0.0)
    assert (channel.rank, channel.size) == (0, 1)
    assert channel.gather({"a": (1, None)}) == [{"a": [1, None]}] and exchange(channel, lambda: 3) == [3]
    with pytest.raises(CheckpointError, match="rank 0: TypeError: Object of type set"):
        channel.gather({1})
    with pytest.raises(KeyError):
        exchange(channel, lambda: {}["gone"])


# ------------------------------------------------------------------------------------------------ talking

ODD = ["", "ä\udc80\u2028", float("inf"), 2**70, -0.0, [], {}, None, True]


@on_ranks(3)
def test_what_is_told_arrives_as_json_over_a_group_that_is_made_once() -> None:
    channel, rank = met(), dist.get_rank()
    never = dict.fromkeys(("dumps", "loads", "Unpickler"), mock.Mock(side_effect=AssertionError("pickle")))
    with mock.patch.multiple(pickle, **never), torch.device("meta"), torch.inference_mode():  # the user's own settings
        found = [channel.gather(ODD), channel.gather("x" * (rank * 300_000)), channel.gather({"rank": rank})]
    assert found[0] == [ODD] * 3 and [len(text) for text in found[1]] == [0, 300_000, 600_000]
    channel.arrive("save('another')", 20)
    first = channel._gloo
    again = met()
    told = [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    assert found[2] == told
    assert again is channel and again._gloo is first
    assert len(dist.distributed_c10d._world.pg_map) == 1


def job_unsaid() -> Any:
    channel = met()
    value = torch.ones(1) if dist.get_rank() == 1 else "fine"
    told = [refusal(lambda: channel.gather(value)), refusal(lambda: exchange(channel, lambda: value))]
    return *told, channel.gather(1)


def test_what_json_cannot_say_on_one_rank_is_an_error_on_all(ranks: Any) -> None:
    here, there = ranks.run(job_unsaid, 2)
    assert here == there and here[2] == [1, 1]
    for kind, message, failures in here[:2]:
        assert kind == "CheckpointError" and message.startswith(f"{SAVE}: values that cannot be sent to")
        assert list(failures) == [1] and "Tensor is not JSON serializable" in failures[1]


def job_groups() -> Any:
    """Subgroups of unequal numbers per rank, and a slice of a mesh."""
    rank = dist.get_rank()
    pair = dist.new_group([1, 2])
    alone = dist.new_group([2])
    mesh = dist.init_device_mesh("cpu", (3, 1), mesh_dim_names=("data", "model"))
    found = [met(mesh.get_group("data")).gather(rank), Channel.of(mesh.get_group("model")).gather(rank)]
    if rank == 2:
        found.append(met(alone).gather(rank))
    if rank:
        channel = met(pair)
        found += [channel.gather(rank), refusal(lambda: exchange(channel, lambda: [][0] if rank == 2 else 0))]
    return found


def test_subgroups_and_meshes(ranks: Any) -> None:
    zero, one, two = ranks.run(job_groups, 3)
    assert zero == [[0, 1, 2], [0]] and one[:3] == [[0, 1, 2], [1], [1, 2]] and two[:4] == [[0, 1, 2], [2], [2], [1, 2]]
    assert one[3] == two[4]
    kind, message, failures = one[3]
    assert kind == "CheckpointError" and failures == {1: "IndexError: list index out of range"}
    assert message.startswith(f"{SAVE} failed (of the group of global ranks 1, 2)\n  rank 1: IndexError")


@on_ranks()
def test_a_writer_thread_does_not_disturb_training() -> None:
    """A writer talks while the main thread trains; the numbers of both come out right."""
    channel, rank, said = met(), dist.get_rank(), []

    def write() -> None:
        for step in range(30):
            said.append(exchange(channel, lambda step=step: [rank, step]) == [[0, step], [1, step]])

    writer = threading.Thread(target=write)
    writer.start()
    sums = []
    for step in range(60):
        number = torch.tensor([float(step + rank)])
        dist.all_reduce(number)
        sums.append(number.item() == 2 * step + 1)
    writer.join()
    assert len(said) == 30
    assert all(said)
    assert all(sums)


@on_ranks()
def test_a_meeting_goes_with_its_group() -> None:
    """The gloo group goes with the group it serves, and the next group is not confused by old notes."""
    found = []
    for _ in range(2):
        group = dist.new_group([0, 1])
        channel = met(group)
        found.append(channel.gather(dist.get_rank()))
        gloo = weakref.ref(channel)
        dist.destroy_process_group(group)
        del group, channel
        gc.collect()
        found.append(gloo() is None)
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()  # and the world anew on the same store
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)
    assert [*found, met().gather("new")] == [[0, 1], True, [0, 1], True, ["new", "new"]]


# ------------------------------------------------------------------------------------------------ absent, or elsewhere


def job_absent(late: bool) -> Any:
    """Ranks 0 and 1 of 3 come; rank 2 comes when they have given up, if at all; then all meet."""
    channel, rank = Channel.of(dist.group.WORLD), dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    if rank == 2:
        store.wait(["refused"])
        found = refusal(lambda: channel.arrive(SAVE, 20)) if late else None
    else:
        found = refusal(lambda: channel.arrive(SAVE, 0.2))
        store.set("refused", "1")
    again = refusal(lambda: met(what="save('next')").gather(rank)) if late else None
    if again:
        dist.barrier()  # each removes its own
    return found, again, channel._watchdog.store.get(f"{place_of(channel, 0)}/{rank}") is not None


def place_of(channel: Channel, number: int) -> str:
    """Prefix of the keys of a meeting of the channel's group."""
    return f"meet/Channel/{channel._group().group_name}.1/{number}"


@pytest.mark.parametrize("late", [True, False])
def test_who_does_not_come_is_named_on_all_that_came(ranks: Any, late: bool) -> None:
    zero, one, two = ranks.run(job_absent, 3, late)
    message = f"all 3 ranks must call {SAVE}, " + "not under `if rank == 0:`" + "; nothing was done"
    message += "\n  rank 2: did not come within 0.2 s"
    assert zero[0] == one[0] == ("CheckpointError", message, {2: "did not come within 0.2 s"})
    assert two[0] == (zero[0] if late else None)
    assert zero[1] == one[1] == two[1] == ([0, 1, 2] if late else None)
    if late:
        assert not any((zero[2], one[2], two[2])), "notes of the first are removed"


def job_elsewhere() -> Any:
    channel, rank = Channel.of(dist.group.WORLD), dist.get_rank()
    return refusal(lambda: channel.arrive(f"save('step-{rank}')", 20)), met().gather(rank)


def test_ranks_that_call_different_things_are_told(ranks: Any) -> None:
    here, there = ranks.run(job_elsewhere, 2)
    assert here == there and here[1] == [0, 1]
    assert here[0][2] == {0: "called save('step-0')", 1: "called save('step-1')"}


# ------------------------------------------------------------------------------------------------ failing works


class Odd(CheckpointError):
    """An error of a module that the other ranks may not have."""


WORKS: dict[str, list[Callable[[], Any]]] = {
    "same": [lambda: _raise(CorruptCheckpoint("x is cut short"))] * 2,
    "kind": [lambda: _raise(CorruptCheckpoint("x")), lambda: _raise(CorruptCheckpoint("y"))],
    "kinds": [lambda: _raise(CorruptCheckpoint("x")), lambda: _raise(OSError(28, "No space left", "y"))],
    "one": [
        lambda: 0,
        lambda: _raise(StateDictError("model", ["a"], ["b"], {"c": (torch.Size([2]), torch.Size([3]))})),
    ],
    "odd": [lambda: 0, lambda: _raise(Odd("strange", {5: "other"}))],
}


def _raise(error: Exception) -> None:
    raise error


def job_fails() -> Any:
    channel, found = met(), {}
    for name, works in WORKS.items():
        try:
            exchange(channel, works[dist.get_rank()])
        except FsshardError as error:
            attributes = {k: v for k, v in vars(error).items() if k != "failures"}
            found[name] = type(error), str(error), error.failures if hasattr(error, "failures") else None, attributes
    return found, exchange(channel, lambda: "on")


def test_a_failure_anywhere_is_one_everywhere(ranks: Any) -> None:
    (here, on), (there, _) = ranks.run(job_fails, 2)
    assert on == ["on", "on"]
    assert here["same"][:3] == there["same"][:3] == (CorruptCheckpoint, "x is cut short", {})
    assert here["kind"][0] is there["kind"][0] is CorruptCheckpoint and here["kind"][2] == {0: "x", 1: "y"}
    text = f"{SAVE} failed\n  rank 0: x\n  rank 1: OSError: [Errno 28] No space left: 'y'"
    assert here["kinds"][:2] == there["kinds"][:2] == (CheckpointError, text)
    assert here["one"][0] is there["one"][0] is StateDictError
    assert here["one"][3]["missing"] == there["one"][3]["missing"] == ["a"] and "expected torch.Size" in here["one"][1]
    odd = f"{SAVE} failed\n  rank 1: Odd: strange\n  rank 5: other"
    assert here["odd"][:3] == (CheckpointError, odd, {1: mock.ANY})


# ------------------------------------------------------------------------------------------------ ranks that die


class Deaths:
    """Runs a job on ranks of their own, whose store lives in rank 0, and collects what they tell before they die."""

    def __init__(self, context: Any, folder: Path) -> None:
        self.context, self.folder = context, folder

    def run(self, job: Callable[..., Any], size: int, *args: Any) -> list[Any]:
        pipes = [self.context.Pipe() for _ in range(size)]
        begun = time.monotonic()
        processes = [
            self.context.Process(target=mortal, args=(rank, size, str(self.folder), pipes[rank][1], job, args))
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        found = []
        for (here, there), process in zip(pipes, processes, strict=True):
            there.close()
            try:
                found.append(here.recv() if here.poll(60) else "hangs")
            except EOFError:
                process.join()
                found.append(process.exitcode)
        self.seconds = time.monotonic() - begun
        for process in processes:
            process.kill()
            process.join()
        return found


def mortal(rank: int, size: int, folder: str, pipe: Any, job: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    module.LAST_WORDS, module.LOOK_EVERY, stores.ANSWER_SECONDS = 0.6, 0.1, ANSWER
    address = FileStore(f"{folder}/address", size)  # of the store, which picks a free port
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        address.set("port", str(store.port))
    else:
        store = TCPStore("127.0.0.1", int(address.get("port")), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=40))
    pipe.send(job(*args))
    pipe.recv() if rank == 0 else None  # the store stays until all have spoken
    os._exit(0)


def job_dies(dying: int, within: str) -> Any:
    channel, rank = met(), dist.get_rank()

    def work() -> int:
        if rank == dying and within == "work":
            os.kill(os.getpid(), signal.SIGKILL)
        return rank

    found = refusal(lambda: channel.gather(rank))
    if rank == dying and within == "between":
        os.kill(os.getpid(), signal.SIGKILL)
    found = refusal(lambda: [exchange(channel, work) for _ in range(3)])
    return found, refusal(lambda: channel.gather(0)), refusal(lambda: channel.arrive("save('next')", 0.2))


@pytest.mark.parametrize(("size", "dying", "within"), [(3, 2, "work"), (2, 1, "between")])
def test_a_rank_that_is_killed_is_an_error_on_the_others(
    forks: Any, tmp_path: Path, size: int, dying: int, within: str
) -> None:
    found = Deaths(forks, tmp_path).run(job_dies, size, dying, within)
    assert found[dying] == -signal.SIGKILL
    for (kind, message, failures), apart, later in (found[rank] for rank in range(size) if rank != dying):
        assert kind == "CheckpointError" and message.startswith(f"{SAVE} lost a rank: ")
        assert list(failures) == [dying] and "has ended, hangs, or cannot be reached" in failures[dying]
        assert apart[0] == "CheckpointError" and "lost their connection" in apart[1]
        assert later[2] == {dying: "did not come within 0.2 s"}


def test_the_rank_that_holds_the_store_is_killed(forks: Any, tmp_path: Path) -> None:
    dead, (found, apart, later) = Deaths(forks, tmp_path).run(job_dies, 2, 0, "work")
    assert dead == -signal.SIGKILL
    assert found[0] == "CheckpointError" and "the store of the process group with it (rank 0" in found[1]
    assert apart[0] == later[0] == "CheckpointError" and "store of the process group cannot be reached" in later[1]


def job_stands_still(within: str) -> Any:
    """Rank 0, and the store with it, stands still, as if its network were cut: nothing ends, and nothing answers."""
    channel, rank = met(), dist.get_rank()
    if rank == 1:
        pid = int(channel._watchdog.store._store.get("pid"))
        found = [channel._watchdog.store.limit]
        if within == "a collective":
            os.kill(pid, signal.SIGSTOP)
            found.append(refusal(lambda: exchange(channel, lambda: 0)))
        else:
            channel.drop()
            store = channel._watchdog.store
            store.set(f"{place_of(channel, 1)}/0", "[\"save('next')\", true]")
            with mock.patch.object(store, "another", side_effect=_stopping(pid, store.another)):
                found.append(refusal(lambda: channel.arrive("save('next')", 0.2)))
        found.append(refusal(lambda: channel.arrive("save('next')", 20)))
        os.kill(pid, signal.SIGCONT)
        return found
    channel._watchdog.store._store.set("pid", str(os.getpid()))
    return None


def job_hurries() -> Any:
    """Rank 1 stands still, and rank 0, where the store is, waits for it at length, until it leaves the job."""
    channel, rank = met(), dist.get_rank()
    if rank == 1:
        channel._watchdog.store._store.set("pid", str(os.getpid()))
        channel._watchdog.store._store.wait(["resumed"])
        return met(what="save('next')").gather(1)
    pid = int(channel._watchdog.store._store.get("pid"))
    channel._limit = 0.3
    os.kill(pid, signal.SIGSTOP)
    channel.hurry()
    found = refusal(lambda: channel.gather(0, timeout=39))
    os.kill(pid, signal.SIGCONT)
    channel._watchdog.store._store.set("resumed", "")
    return found, met(what="save('next')").gather(0)


def test_a_rank_that_leaves_the_job_waits_no_longer_than_the_group(forks: Any, tmp_path: Path) -> None:
    (found, here), there = (deaths := Deaths(forks, tmp_path)).run(job_hurries, 2)
    assert found[0] == "CheckpointError" and "this rank is leaving the job after it waited 0.3 s" in found[1]
    assert list(found[2]) == [1] and here == there == [0, 1] and deaths.seconds < 35


def _stopping(pid: int, then: Callable[[], Any]) -> Callable[[], Any]:
    def stopped() -> Any:
        os.kill(pid, signal.SIGSTOP)
        return then()

    return stopped


@pytest.mark.parametrize("within", ["a collective", "connecting"])
def test_a_store_that_does_not_answer(forks: Any, tmp_path: Path, within: str) -> None:
    _, (limit, *found) = (deaths := Deaths(forks, tmp_path)).run(job_stands_still, 2, within)
    assert deaths.seconds < 35, "none of it took the time of the group's own limit"
    assert limit == ANSWER and len(found) == 2
    for kind, message, _ in found:
        assert kind == "CheckpointError" and "store of the process group" in message


def job_interrupted() -> Any:
    """Rank 1 is interrupted at its work, rank 2 answers too late; all meet again afterwards."""
    channel, rank, found = met(), dist.get_rank(), []
    with mock.patch.object(module, "LAST_WORDS", 0.6), mock.patch.object(module, "LOOK_EVERY", 0.1):
        if rank == 1:
            with pytest.raises(KeyboardInterrupt):
                exchange(channel, lambda: _raise(KeyboardInterrupt()))  # type: ignore[arg-type]
        else:
            found.append(refusal(lambda: exchange(channel, lambda: 0)))
        found.append(met().gather(rank))
        store = dist.distributed_c10d._get_default_store()
        if rank == 2:  # still at its work, while rank 1 waits for it and rank 0 has given up
            store.wait(["late/0", "late/1"])
        found.append(refusal(lambda: channel.gather(0, timeout=0.3 if rank == 0 else None)))
        store.set(f"late/{rank}", "1")
    return [*found, met().gather(rank)]


def test_who_lost_each_other_can_meet_again(ranks: Any) -> None:
    zero, one, two = ranks.run(job_interrupted, 3)
    for found in (zero, two):
        kind, message, failures = found.pop(0)
        assert kind == "CheckpointError" and message.startswith(f"{SAVE} lost a rank") and list(failures) == [1]
    for found in (zero, one, two):
        assert found[0] == found[2] == [0, 1, 2]
        assert found[1][0] == "CheckpointError" and found[1][1].startswith(f"{SAVE} lost a rank"), found[1]
    assert "Timed out" in zero[1][1] and "Timed out" in one[1][1] and list(zero[1][2]) == list(one[1][2]) == [2]


@on_ranks()
def test_values_of_every_dtype_are_sent() -> None:
    """Send those that gloo does not know, and tensors that are not contiguous, too."""
    unknown = [torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]
    known = sorted(module.EVERYWHERE_SENT, key=str)  # each process iterates over the set in an order of its own
    for dtype in (*known, torch.complex64, *unknown):
        values = torch.arange(6).view(2, 3).remainder(2).to(dtype)
        mine = values if dist.get_rank() == 1 else torch.zeros_like(values)
        tensors = [mine.clone(), mine.clone().T, mine.clone()[:, ::2], mine[1, 1].clone()]
        module.broadcast_tensors(tensors, dist.group.WORLD, 1)
        for found, expected in zip(tensors, [values, values.T, values[:, ::2], values[1, 1]], strict=True):
            assert torch.equal(found.to(torch.complex64), expected.to(torch.complex64)), dtype


def test_batches_have_one_kind_and_a_bound() -> None:
    assert list(batches([1, 2, 3, 9, 1], lambda size: size, 5)) == [[1, 2], [3], [9], [1]]
    assert list(batches([1, 3, 2, 4], lambda size: size, 100, kind=lambda size: size % 2)) == [[1, 3], [2, 4]]
    assert list(batches([], len, 1)) == []


# ------------------------------------------------------------------------------------------------ fingerprints


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("size", [0, 1, 7, 1024, 5000])
def test_a_fingerprint_is_of_all_bits_and_their_order(dtype: torch.dtype, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 2, (size,), generator=generator).to(dtype)
    known = int(fingerprint(values))
    assert int(fingerprint(values.clone().view(-1, 1))) == known
    strided = values.repeat_interleave(2)[::2]
    assert int(fingerprint(strided)) == known
    if dtype.is_complex:
        assert int(fingerprint(values.conj().conj())) == known
    others = {int(fingerprint(values.roll(1))), int(fingerprint(~values if dtype == torch.bool else values + 1))}
    for place in range(0, size, 97):
        changed = values.clone()
        changed[place] = 1 - changed[place].real.int()
        others.add(int(fingerprint(changed)))
    assert size < 7 or known not in others


def test_what_has_no_numbers_here_is_told_by_shape() -> None:
    assert described_tensor(torch.zeros(2, 3, device="meta")) == "float32 of shape (2, 3)"
    assert described_tensor(torch.zeros(2).to_sparse()) == "float32 of shape (2,)"
    assert described_tensor(nn.Parameter(torch.zeros(2))) == described_tensor(torch.zeros(2))
