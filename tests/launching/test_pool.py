"""The pool of ranks that other tests stand on, and its ranks.

Tests fsshard/launching/supervisor.py too.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import random
import signal
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import fsshard
from fsshard.comm import watchdog
from fsshard.errors import LaunchError, RankFailed, RankHung, RankMismatch, UnsupportedByBackend
from fsshard.launching import pool, pool_worker, supervisor
from fsshard.launching.pool import RankPool
from fsshard.launching.pool_worker import Order, tell
from tests.forked import ForkedPool, forking
from tests.models import batch, net
from tests.sets import often


class Pair(NamedTuple):
    left: torch.Tensor
    right: int


def rank_zero_stops() -> None:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        raise KeyError("late")
    raise ValueError("at once")


def summed(value: float, *, scale: float = 1.0) -> torch.Tensor:
    total = torch.tensor([value + dist.get_rank()]) * scale
    dist.all_reduce(total)
    return total


def surroundings() -> dict[str, Any]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "HF_HUB_OFFLINE")
    return {
        "environment": [os.environ.get(name) for name in names],
        "leftover": os.environ.get("FSSHARD_LEFTOVER"),
        "world": (dist.get_rank(), dist.get_world_size(), dist.get_backend()),
        "random": (torch.rand(1).item(), random.random()),
        "dtype": torch.get_default_dtype(),
        "device": torch.empty(0).device.type,
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.is_available(),
        "error_filter": any(entry[0] == "error" for entry in warnings.filters),
    }


def litter() -> None:
    os.environ["FSSHARD_LEFTOVER"] = "here"
    warnings.simplefilter("error")
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_num_threads(2)
    torch.manual_seed(5)


def tensors() -> dict[str, Any]:
    base = torch.arange(1000.0)
    return {
        "parameter": nn.Parameter(base[:2]),
        "pair": Pair(base[2:4], 7),
        "list": [base[0], (base[1],)],
        "complex": torch.complex(base[:1], base[1:2]),
    }


def rank_one_raises_while_the_others_wait() -> None:
    if dist.get_rank() == 1:
        raise KeyError("missing piece")
    dist.all_reduce(torch.ones(1))


def every_rank_raises() -> None:
    raise UnsupportedByBackend("cpu_offload=True", "ddp", f"use backend='fsdp' (rank {dist.get_rank()})")


def rank_one_raises_alone() -> int:
    if dist.get_rank() == 1:
        raise ValueError("only me")
    return dist.get_rank()


def raises_what_cannot_be_pickled() -> None:
    class LocalError(Exception):
        pass

    raise LocalError("of a local class")


def returns_what_cannot_be_pickled() -> Any:
    return lambda: None


ENDS: dict[str, Callable[[], None]] = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit code 0": lambda: os._exit(0),
    "SIGABRT": os.abort,  # as gloo does with a message of another collective
}


def rank_one_ends(how: str) -> None:
    if dist.get_rank() == 1:
        ENDS[how]()
    dist.all_reduce(torch.ones(1))


def rank_one_hangs() -> None:
    if dist.get_rank() == 1:
        threading.Event().wait()
    dist.all_reduce(torch.ones(1))


class Unloadable:
    """Where it was loaded once, it cannot be again."""

    def __reduce__(self) -> Any:
        return load_in_process, (os.getpid(),)


def load_in_process(process: int) -> None:
    if os.getpid() != process:
        raise ValueError("not here")


def returns_what_only_the_rank_can_load() -> Any:
    return Unloadable()


def tells_three_times(word: str) -> int:
    for number in range(3):
        tell((word, number))
    return dist.get_rank()


def tells_a_lock() -> None:
    tell(threading.Lock())


def tells_and_waits() -> None:
    tell("here")
    threading.Event().wait()


def working_folder() -> str:
    return os.getcwd()


def moves_away() -> None:
    os.chdir("/")
    sys.path.clear()


def two_layers(kind: str, group: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if kind == "ddp":
        return DistributedDataParallel(model, process_group=group)
    if kind.startswith("fsdp2"):
        from torch.distributed.fsdp import fully_shard

        mesh = DeviceMesh.from_group(group or dist.group.WORLD, "cpu")
        return fully_shard(nn.Sequential(fully_shard(model[0], mesh=mesh), model[1]), mesh=mesh)
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, process_group=group, device_id=torch.device("cpu"))


def rank_zero_waits(kind: str, group: Any = None) -> None:
    """Rank 1 skips what rank 0 does last."""
    first, ones = dist.get_rank() == 0, torch.ones(1)
    if "dp" in kind:
        model = two_layers(kind, group)
        if first or "forward" not in kind:
            loss = model(torch.ones(2, 4)).sum()
        if first:
            loss.backward()
    elif not first:
        return
    elif kind == "asynchronous":
        work = dist.all_reduce(ones, async_op=True)
        work.wait()
    else:
        dist.all_reduce(ones, group=group)


def rank_zero_loses_the_other(kind: str) -> None:
    """Rank 1 raises where rank 0 waits for it."""
    rank_zero_waits(kind)
    assert dist.get_rank() == 1
    raise ValueError("gone")


def every_rank_waits_elsewhere() -> None:
    if dist.get_rank() == 0:
        dist.all_gather([torch.ones(1), torch.ones(1)], torch.ones(1))
    else:
        dist.broadcast(torch.ones(1), src=0)


def trains_under_ddp() -> float:
    model = DistributedDataParallel(nn.Linear(3, 2), process_group=dist.new_group())
    model(torch.ones(1, 3)).sum().backward()
    globals()["still_alive"] = model  # at teardown, as in a user's main script
    grad = model.module.weight.grad
    assert grad is not None
    return float(grad.sum())


@pytest.fixture(scope="module")
def own_pool() -> Iterator[RankPool]:
    """For tests that break processes, so that the session's pool need not be started anew."""
    with ForkedPool() as pool:
        yield pool


def pids(ranks: RankPool) -> list[int]:
    return [each.process.pid for each in ranks._supervisor._ranks.values()]


def test_each_job_gets_a_group_of_the_size_it_asked_for(ranks: RankPool) -> None:
    for world_size in (1, 3, 2):
        results = ranks.run(summed, world_size, 1.0, scale=2.0)
        expected = 2.0 * (world_size + sum(range(world_size)))
        assert [result.item() for result in results] == [expected] * world_size


def test_a_job_finds_what_a_new_process_would_find(ranks: RankPool) -> None:
    first = ranks.run(surroundings, 2)
    ranks.run(litter, 2)
    assert ranks.run(surroundings, 2) == first
    for rank, found in enumerate(first):
        assert found["environment"] == [str(rank), str(rank), "2", "2", "127.0.0.1", "1", "1"]
        assert found["leftover"] is None and found["world"] == (rank, 2, "gloo")
        assert found["dtype"] is torch.float32 and found["threads"] == 1
        assert not found["cuda"] and not found["error_filter"]


def test_tensors_come_back_as_copies_of_their_own(ranks: RankPool) -> None:
    for result in ranks.run(tensors, 2):
        parameter, pair = result["parameter"], result["pair"]
        assert type(parameter) is torch.Tensor and not parameter.requires_grad
        assert parameter.untyped_storage().nbytes() == 8  # not the thousand numbers it was a view of
        assert isinstance(pair, Pair) and (pair.left.tolist(), pair.right) == ([2.0, 3.0], 7)
        assert result["list"][1][0].item() == 1.0 and result["complex"].dtype is torch.complex64
        assert not any(tensor.is_shared() for tensor in (parameter, pair.left, result["complex"]))


def test_a_ddp_model_that_outlives_its_job_does_not_lock_up_the_worker(ranks: RankPool) -> None:
    ranks.run(trains_under_ddp, 2)
    workers = pids(ranks)
    for _ in range(25):
        assert ranks.run(trains_under_ddp, 2) == [6.0, 6.0]
    assert pids(ranks) == workers


def test_a_rank_that_raises_is_named_and_frees_the_others(ranks: RankPool) -> None:
    ranks.run(summed, 2, 0.0)
    workers = pids(ranks)
    with pytest.raises(RankFailed, match=r"^rank 1 failed with KeyError: 'missing piece'") as caught:
        ranks.run(rank_one_raises_while_the_others_wait, 3)
    error = caught.value
    assert not isinstance(error, RankHung)
    assert (error.rank, error.cause_type) == (1, "KeyError")
    assert "rank_one_raises_while_the_others_wait" in error.traceback and error.traceback in str(error)
    assert isinstance(error.cause, KeyError)
    assert list(error.others) == [0, 2]
    for text in error.others.values():
        assert text.startswith(
            "lost its connection to another rank while it waited in all_reduce, at "
        ) and text in str(error)
        assert "gloo" not in text
    # The pool goes on with the same processes.
    assert ranks.run(summed, 2, 0.0)[0].item() == 1.0
    assert pids(ranks)[: len(workers)] == workers


def test_a_job_begins_when_all_ranks_are_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose job raises at once would leave one behind that has not connected to it yet."""
    store, order, events = dist.HashStore(), Order(0, 2, b"", 60.0, (), None, b""), list[str]()

    def connects_late(*_: Any, rank: int, **settings: Any) -> None:
        if rank == 0:
            store.wait(["connected/1"], timedelta(seconds=30))
            events.append("rank 0 is connected")

    def begin(rank: int) -> None:
        pool_worker._join(rank, "cpu", store, order)
        events.append("a job begins")

    monkeypatch.setattr(dist, "init_process_group", connects_late)
    monkeypatch.setattr(pool_worker, "set_timeout", lambda _: None)
    threads = [threading.Thread(target=begin, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert events == ["rank 0 is connected", "a job begins", "a job begins"]


def test_errors_that_are_expected(ranks: RankPool) -> None:
    for rank, error in enumerate(ranks.run_expecting_errors(every_rank_raises, 2)):
        assert isinstance(error, UnsupportedByBackend)
        assert error.setting == "cpu_offload=True" and f"(rank {rank})" in str(error)
    quiet, raised = ranks.run_expecting_errors(rank_one_raises_alone, 2)
    assert quiet is None and isinstance(raised, ValueError)


def job_puts_handlers_back() -> None:
    """As Lightning's Trainer does at its end."""
    signal.signal(signal.SIGUSR1, signal.getsignal(signal.SIGUSR1))


def job_asked_for_its_stack() -> bool:
    os.kill(os.getpid(), signal.SIGUSR1)
    return True


def test_a_rank_can_be_asked_for_its_stack_after_a_library_has_put_handlers_back(ranks: RankPool) -> None:
    ranks.run(job_puts_handlers_back, 1)
    assert ranks.run(job_asked_for_its_stack, 1) == [True]


def test_what_cannot_be_pickled_is_reported_as_text(ranks: RankPool) -> None:
    with pytest.raises(RankFailed, match="LocalError: of a local class") as caught:
        ranks.run(raises_what_cannot_be_pickled, 1)
    assert caught.value.cause is None
    (represented,) = ranks.run_expecting_errors(raises_what_cannot_be_pickled, 1)
    assert isinstance(represented, RankFailed) and represented.cause_type == "LocalError"
    with pytest.raises(RankFailed, match="rank 0 returned a function that cannot be pickled"):
        ranks.run(returns_what_cannot_be_pickled, 1)
    with pytest.raises(RankFailed, match="rank 0 failed with LaunchError: what the rank sent cannot be unpickled"):
        ranks.run(returns_what_only_the_rank_can_load, 1)
    assert ranks.run(summed, 1, 2.0)[0].item() == 2.0


REFUSED: dict[str, Callable[[RankPool], Any]] = {
    "cannot be sent to the ranks": lambda pool: pool.run(summed, 1, threading.Lock()),
    r"world_size: expected 1\.\.4 \(RankPool\(most_ranks=\.\.\.\)\), got 5": lambda _: RankPool(4).run(summed, 5, 0.0),
    "most_ranks: expected a positive integer or None, got 0": lambda _: RankPool(most_ranks=0),
    "device: expected 'cpu' or 'cuda', got 'tpu'": lambda _: RankPool(device="tpu"),
    "world_size=2 with device='cuda' needs as many CUDA devices.* shows 1; ask": (
        lambda _: RankPool(device="cuda").run(summed, 2, 0.0)
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_refused(ranks: RankPool, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(LaunchError, match=text):
        REFUSED[text](ranks)


# Messages -----------------------------------------------------------------------------------------------------------


def test_ranks_tell_the_caller_while_they_work(ranks: RankPool) -> None:
    told = []
    results = ranks.run(tells_three_times, 2, "step", on_message=lambda rank, value: told.append((rank, value)))
    assert results == [0, 1]
    for rank in (0, 1):
        assert [value for teller, value in told if teller == rank] == [("step", number) for number in range(3)]
    assert ranks.run(tells_three_times, 2, "unheard") == [0, 1]
    tell(threading.Lock())  # outside a job it does nothing
    with pytest.raises(RankFailed, match=r"(?s)rank 0 failed with \w+: .*pickle.*tells_a_lock"):
        ranks.run(tells_a_lock, 1)


@pytest.mark.long
def test_a_listener_that_raises_ends_the_job(own_pool: RankPool) -> None:
    def listener(rank: int, value: Any) -> None:
        raise ZeroDivisionError(f"{rank}")

    with pytest.raises(ZeroDivisionError, match="0"):
        own_pool.run(tells_and_waits, 1, on_message=listener)
    assert own_pool.run(summed, 1, 2.0)[0].item() == 2.0


# Surroundings -------------------------------------------------------------------------------------------------------


def test_ranks_import_and_read_what_the_caller_can(
    ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = ranks.run(working_folder, 1)
    (tmp_path / "module_that_only_this_test_has.py").write_text("def answer(): return 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    answer = importlib.import_module("module_that_only_this_test_has").answer
    assert ranks.run(answer, 2) == [42, 42]
    assert ranks.run(working_folder, 1) == [str(tmp_path)]
    ranks.run(moves_away, 1)
    assert ranks.run(working_folder, 1) == [str(tmp_path)]
    monkeypatch.undo()
    assert ranks.run(working_folder, 1) == before


def test_a_jobs_module_is_imported_before_there_is_a_group(
    ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a script: what keeps ``dist.group.WORLD`` as a default (FairScale's modules) keeps no job's group."""
    text = "import torch.distributed as dist\ndef default(group=dist.group.WORLD): return group is None\n"
    (tmp_path / "module_with_a_group_as_default.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    default = importlib.import_module("module_with_a_group_as_default").default
    assert ranks.run(default, 2) == [True, True]


_taken: list[object] = []


def take(value: object) -> None:
    _taken.append(value)


def taken(*_: Any) -> list[object]:
    return list(_taken)


def test_what_a_process_hands_on_reaches_its_ranks(own_pool: RankPool) -> None:
    with mock.patch.dict(supervisor.handed), forking():
        for value in ("old", "news"):  # what is handed on last counts
            supervisor.handed["a"] = take, value
        assert own_pool.run(taken, 1) == [["news"]]
        supervisor.handed["a"] = take, "more"  # to those that are there already
        assert own_pool.run(taken, 1) == [["news", "more"]]
        assert fsshard.launch(taken, nprocs=2) == ["more"]


def test_a_job_that_the_ranks_cannot_import(ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("module_without_a_file")
    exec("def answer(): return 42", vars(module))
    monkeypatch.setitem(sys.modules, "module_without_a_file", module)
    with pytest.raises(RankFailed, match=r"cannot import the job: No module named 'module_without_a_file'; its module"):
        ranks.run(module.answer, 1)


def test_no_ranks_while_a_main_script_is_being_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(LaunchError, match='put the call under `if __name__ == "__main__":`'):
        RankPool().run(summed, 1, 0.0)
    monkeypatch.setattr(multiprocessing.current_process(), "name", f"{supervisor.RANK}1")
    with pytest.raises(SystemExit, match=str(supervisor.UNGUARDED)):
        RankPool().run(summed, 1, 0.0)


# Deaths and hangs ---------------------------------------------------------------------------------------------------


def test_the_pool_recovers_from_ranks_that_die(own_pool: RankPool) -> None:
    for how in ENDS:
        with pytest.raises(RankFailed, match=f"^rank 1 failed with {how}") as caught:
            own_pool.run(rank_one_ends, 2, how)
        assert "while it waited in all_reduce" in caught.value.others[0]
    assert "`if rank == 0`" in str(caught.value) and "in rank_one_ends: ENDS[how]()" in str(caught.value)
    assert own_pool.run(summed, 2, 0.0)[1].item() == 1.0
    own_pool.close()
    assert own_pool.run(summed, 1, 3.0)[0].item() == 3.0


def test_a_rank_without_time_of_the_machine_does_not_hang(own_pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot say where it is, and reports later; SIGSTOP does to it what a crowded machine does."""
    asked = []

    def unheard(rank: int) -> str:
        asked.append(rank)
        os.kill(own_pool._supervisor._ranks[rank].process.pid, signal.SIGCONT)  # from here on it runs again
        return ""

    monkeypatch.setattr(own_pool._supervisor, "stack", unheard)
    monkeypatch.setattr(pool, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(pool, "STALLED_SECONDS", 60.0)
    stopped, raised = own_pool.run_expecting_errors(rank_zero_stops, 2)
    assert isinstance(stopped, KeyError) and isinstance(raised, ValueError)
    assert asked == [0] * len(asked) and asked


WAITS = {
    "all_reduce": "all_reduce",
    "asynchronous": "an earlier collective",
    "ddp": "a collective in backward",
    "fsdp forward": "all_gather",
    "fsdp": "reduce_scatter_tensor (in backward)",
    "fsdp2 forward": "all_gather_into_tensor",
    "fsdp2": "all_gather_into_tensor (in backward)",
}


@pytest.mark.parametrize("kind", [kind for kind in WAITS if kind != "fsdp"])
def test_what_a_rank_waits_in_is_named(ranks: RankPool, kind: str) -> None:
    """Where the other fails, so that no time has to pass."""
    with pytest.raises(RankFailed, match="rank 1 failed with ValueError: gone") as caught:
        ranks.run(rank_zero_loses_the_other, 2, kind)
    assert not isinstance(caught.value, RankHung)
    waited = f"waited {'for' if kind == 'asynchronous' else 'in'} {WAITS[kind]}, at "
    assert caught.value.others[0].startswith(f"lost its connection to another rank while it {waited}")


def test_a_rank_that_waits_in_vain_is_named_with_its_collective(ranks: RankPool) -> None:
    """Here the collective gives up by itself, long before the job's time is over."""
    with pytest.raises(RankHung) as caught:
        ranks.run(rank_zero_waits, 2, "fsdp", timeout=4)
    error, waits, told = caught.value, WAITS["fsdp"], str(caught.value)
    assert (error.rank, error.collective) == (0, waits)
    assert told.startswith(f"rank 1 never came to {waits}: it had finished; rank 0 waited in {waits}, at ")
    assert ", and timed out. Look for a collective that ranks do not " in told and "Timed out waiting" in told
    assert error.others == {1: "had finished"} and isinstance(error.cause, RuntimeError)


def test_the_ranks_that_were_waited_for_are_told_too(own_pool: RankPool) -> None:
    with pytest.raises(RankHung) as caught:
        own_pool.run(rank_one_hangs, 2, timeout=4)
    assert (caught.value.rank, caught.value.collective) == (0, "all_reduce")
    assert caught.value.others[1].endswith("in rank_one_hangs: threading.Event().wait()")
    assert str(caught.value).startswith(f"rank 1 never came to all_reduce: it {caught.value.others[1]}; rank 0 wait")
    assert own_pool.run(summed, 2, 0.0)[1].item() == 1.0


def rank_zero_gives_up() -> str:
    """Rank 1 keeps its connections, and comes never."""
    watchdog.join()
    group = dist.group.WORLD
    if dist.get_rank() == 0:
        work = dist.all_gather([torch.empty(1), torch.empty(1)], torch.ones(1), async_op=True)
        with pytest.raises(RankMismatch) as caught:
            watchdog.wait(work, group, "it", 0.1, on_cpu=True)
        assert [thread.name for thread in threading.enumerate()].count("fsshard-pending") == 1  # holds what is pending
        return str(caught.value)
    return ""


def test_a_rank_that_gives_up_locks_up_no_later_job(ranks: RankPool) -> None:
    """A group that is freed with a gather pending waits for the lock that who frees it holds (pytorch #56297)."""
    workers = pids(ranks)
    assert ranks.run(rank_zero_gives_up, 2)[0] == "it: rank 1 computes, or does not answer (0.1 s have passed)"
    for _ in range(4):
        ranks.run(summed, 2, 0.0)
    assert pids(ranks)[: len(workers)] == workers


def test_two_collectives_that_do_not_match(ranks: RankPool) -> None:
    with pytest.raises(RankHung) as caught:
        ranks.run(every_rank_waits_elsewhere, 2, timeout=4)
    names = {0: "all_gather", 1: "broadcast"}
    (other,) = caught.value.others
    assert caught.value.collective == names[caught.value.rank]
    assert str(caught.value).startswith(f"rank {other} never came to ")
    assert f"it waited in {names[other]}, at" in str(caught.value).partition("\n")[0]


def job_train_once(backend: str) -> None:
    model = fsshard.wrap(net(), backend=backend)
    optimizer = fsshard.build_optimizer(model, torch.optim.Adam, lr=0.1)
    model(batch(0)).square().mean().backward()
    optimizer.step()
    model(batch(0))  # and a forward without backward


def job_threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")
@pytest.mark.parametrize("backend", often(["ddp", "fsdp", "fsdp2", "fairscale"], "fsdp2", "fairscale"))
def test_a_job_leaves_no_threads_behind(ranks: Any, backend: str) -> None:
    """A model that is not freed keeps its process group, three threads each; hours of jobs would choke the machine."""
    for world_size in (1, 2):
        counts = []
        for _ in range(2):
            for _ in range(3):  # the pool keeps the last two groups, see fsshard.launch
                ranks.run(job_train_once, world_size, backend)
            ranks.run(job_threads, world_size)  # threads of groups that the pool keeps no longer are ending meanwhile
            counts.append(ranks.run(job_threads, world_size))
        assert all(later <= before for before, later in zip(*counts, strict=True))


def job_on_a_mesh(size: int, before: int) -> float:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    for _ in range(before):
        dist.new_group()  # so that the mesh's groups have other names than in another world
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tp"))["tp"]
    held = torch.nn.Parameter(distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]))
    assert held.detach().device_mesh.get_group().size() == 2
    return float((held * 2).sum().full_tensor())


def test_meshes_of_a_world_that_is_gone_are_forgotten(ranks: Any) -> None:
    """DTensor remembers meshes, and takes one for another of the same ranks, whose groups are gone (torch 2.13)."""
    for size, before in ((4, 3), (2, 0), (4, 0), (2, 2)):
        assert ranks.run(job_on_a_mesh, size, size, before) == [12.0] * size


def job_on_meshes_of_a_name(name: str) -> None:
    """A complex parameter that is a DTensor, sharded by FSDP2: classes of ours and of torch's know the mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=(f"data{name}", f"tp{name}"))
    model = nn.Linear(4, 4, bias=False, dtype=torch.complex64)
    value = distribute_tensor(model.weight.detach(), mesh[f"tp{name}"], [Replicate()])
    value = value.redistribute(placements=[Shard(0)])
    model.weight = nn.Parameter(value)
    fsshard.wrap(model, backend="fsdp2", device_mesh=mesh[f"data{name}"])


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")
def test_meshes_that_are_remembered_keep_no_threads(ranks: Any) -> None:
    """Each process group has a thread of gloo's that wakes up every 10 ms; caches of torch's keep each kind of mesh."""
    counts = []
    for round_ in range(2):
        for number in range(3):
            ranks.run(job_on_meshes_of_a_name, 2, f"{round_}{number}")
        for _ in range(2):
            ranks.run(job_threads, 2)
        counts.append(ranks.run(job_threads, 2))
    assert counts[0] == counts[1]
