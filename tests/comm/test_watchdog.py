"""Who is missing, on the ranks that are left: killed, stuck, gone early, or waiting in another call."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsshard
from fsshard.comm import watchdog
from fsshard.errors import CheckpointError, RankFailed, RankMismatch
from fsshard.torch_private.c10d import set_timeout
from tests.comm.test_channel import Deaths
from tests.models import take_step, with_sgd
from tests.on_ranks import on_ranks
from tests.sets import often

BACKENDS = ("ddp", "fsdp", "fsdp2", "fairscale")


def trained(backend: str) -> tuple[fsshard.ShardedModule, fsshard.ShardedOptimizer]:
    model, optimizer = with_sgd(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), backend=backend)
    step(model, optimizer)
    return model, optimizer


def step(model: fsshard.ShardedModule, optimizer: fsshard.ShardedOptimizer) -> None:
    model(torch.ones(2, 4)).sum().backward()
    take_step(optimizer)


def refused(work: Callable[[], Any]) -> str:
    try:
        return str(work())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def train_until_death(ctx: fsshard.Context, backend: str, how: str) -> None:
    model, optimizer = trained(backend)
    if ctx.rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exits":
            sys.exit(0)
        raise ValueError("boom")
    step(model, optimizer)


def job_dies(backend: str, how: str) -> str:
    return refused(lambda: fsshard.launch(train_until_death, args=(backend, how)))


ENDS = {
    "killed": "has ended: its process is gone",
    "exits": "left with sys.exit(0)",
    "raises": "ended with ValueError: boom",
}


@pytest.mark.parametrize(
    ("backend", "how"),
    often([*((b, "killed") for b in BACKENDS), ("fairscale", "exits"), ("fairscale", "raises")], ("fsdp2", "killed")),
)
def test_a_rank_that_ends_is_named_with_its_reason(forks: Any, tmp_path: Path, backend: str, how: str) -> None:
    """As under torchrun: launch() finds the job that this process is in."""
    said, died = Deaths(forks, tmp_path).run(job_dies, 2, backend, how)
    assert how != "killed" or died == -signal.SIGKILL
    assert said.startswith("RankMismatch: ") and f": rank 1 {ENDS[how]} (" in said, said


def call_until_death(ctx: fsshard.Context, call: str, folder: str) -> None:
    """Rank 1 is killed before a call of all ranks that this one makes, with its own time limit of minutes."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))  # fsdp gathers the last unit again in its backward
    units = {"auto_wrap_policy": {nn.Linear}} if call == "gather of fsdp" else {}
    model, optimizer = with_sgd(layers, backend=call.rpartition(" of ")[2] if " of " in call else "ddp", **units)
    fsshard.save(f"{folder}/old", model, optimizer)
    loss = model(torch.ones(2, 4)).sum()
    if ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    {
        "backward of fsdp2": loss.backward,
        "backward of fsdp": loss.backward,
        "gather of fsdp": loss.backward,
        "build_optimizer": lambda: fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1),
        "optimizer.state_dict": optimizer.state_dict,
        "save": lambda: fsshard.save(f"{folder}/new", model, optimizer),
        "load": lambda: fsshard.load(f"{folder}/old", model, optimizer),
        "export": lambda: fsshard.export(model, f"{folder}/new.pt"),
    }[call]()


def job_calls(call: str, folder: str) -> str:
    return refused(lambda: fsshard.launch(call_until_death, args=(call, folder)))


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        ("backward of fsdp2", "RankMismatch: FSDP2's gradient reduction, in backward: "),
        ("backward of fsdp", "RankMismatch: FSDP's gradient reduction, in backward: "),
        pytest.param("gather of fsdp", "RankMismatch: FSDP's gather, in backward: ", marks=pytest.mark.long),
        pytest.param("build_optimizer", "RankMismatch: build_optimizer: ", marks=pytest.mark.long),
        pytest.param("optimizer.state_dict", "RankMismatch: optimizer.state_dict(): ", marks=pytest.mark.long),
        ("save", "CheckpointError: all 2 ranks must call fsshard.save("),
        pytest.param("load", "CheckpointError: all 2 ranks must call fsshard.load(", marks=pytest.mark.long),
        pytest.param("export", "CheckpointError: all 2 ranks must call fsshard.export(", marks=pytest.mark.long),
    ],
)
def test_who_does_not_come_to_a_rare_call_is_named(forks: Any, tmp_path: Path, call: str, kind: str) -> None:
    said, died = Deaths(forks, tmp_path).run(job_calls, 2, call, str(tmp_path))
    assert died == -signal.SIGKILL
    assert said.startswith(kind) and re.search("rank 1:? has ended: its process is gone", said), said


def short_of_time(work: Callable[[], Any], limit: float = 1.0, words: float = watchdog.LAST_WORDS) -> str:
    """Refuse ``work`` after ``limit`` seconds, and ``words`` more for the ranks that are left to say where they are."""
    set_timeout(timedelta(seconds=limit))
    with mock.patch.object(watchdog, "LAST_WORDS", words):
        return refused(work)


def job_stuck(backend: str) -> str:
    """Rank 1 is at other work for as long as rank 0 waits."""
    model, optimizer = trained(backend)
    step(model, optimizer)  # the second forward compares the ranks' inputs
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["given up"])
        return ""
    said = short_of_time(lambda: step(model, optimizer), limit=0.3, words=0.3)
    store.set("given up", "1")
    return said


@pytest.mark.parametrize("backend", ["fsdp2", "fairscale"])
def test_a_rank_that_is_stuck_is_named(ranks: Any, backend: str) -> None:
    said, _ = ranks.run(job_stuck, 2, backend)
    what = (
        "the forward of a wrapped model" if backend == "fsdp2" else "the gradient reduction of FairScale, in backward"
    )
    assert said.startswith(f"RankMismatch: {what}: rank 1 did not take part and does not answer"), said
    assert (
        "if it needs more than 0.3 s" in said and "pass a longer timeout= to fsshard.launch or fsshard.init" in said
    ), said


def job_one_wraps() -> None:
    if dist.get_rank() == 1:
        raise ValueError("boom")
    with mock.patch.object(watchdog, "LAST_WORDS", 0.3):
        fsshard.wrap(nn.Linear(2, 2), backend="ddp")


def test_a_rank_that_does_not_come_to_wrap_is_named(ranks: Any) -> None:
    error, _ = ranks.run_expecting_errors(job_one_wraps, 2)
    assert isinstance(error, RankMismatch) and str(error).startswith("fsshard.wrap(): rank 1 did not take part"), error


@on_ranks()
def test_ranks_that_took_different_paths_are_told_so() -> None:
    """Both ranks are in the same call, in collectives that do not belong together."""
    watchdog.join()
    groups = [dist.new_group(timeout=timedelta(seconds=1)) for _ in range(2)]

    def work() -> None:
        with watchdog.taking_part(dist.group.WORLD, "the forward"):
            dist.all_reduce(torch.ones(1), group=groups[dist.get_rank()])

    said = refused(work)
    assert "in different collectives: they took different paths" in said, said


def job_state_dict_on_one(backend: str) -> str:
    options = {"merge_below": 0} if backend == "fsdp2" else {}
    model = fsshard.wrap(nn.Linear(4, 4), backend=backend, **options)
    fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    if dist.get_rank() == 0:
        return short_of_time(model.state_dict)
    return short_of_time(lambda: model(torch.ones(2, 4)).sum().backward())


def test_a_state_dict_on_one_rank_names_the_other(ranks: Any) -> None:
    here, there = ranks.run(job_state_dict_on_one, 2, "fsdp2")
    assert here.startswith("RankMismatch: state_dict(): rank 1 waits in the forward of a wrapped model instead"), here
    assert there.startswith("RankMismatch: the forward of a wrapped model: rank 0 waits in state_dict() instead"), there


KEEPS: dict[str, Callable[[fsshard.ShardedModule], Any]] = {
    "state_dict": fsshard.ShardedModule.state_dict,
    "full_parameters": lambda model: model.full_parameters().__enter__(),
    "save": lambda model: fsshard.save("never", model),
}


def job_keeps_on_rank_0(backend: str, call: str = "state_dict") -> None:
    """The idiom of DDP, while rank 1 goes on training."""
    with mock.patch.multiple(watchdog, INTERVAL=0.1, FIRST_QUESTION=0.2, NEXT_QUESTION=0.4, LAST_WORDS=0.3):
        model, optimizer = trained(backend)
        if dist.get_rank() == 0:
            KEEPS[call](model)
        for _ in range(3):
            step(model, optimizer)


@pytest.mark.parametrize("backend", [b if b == "fsdp2" else pytest.param(b, marks=pytest.mark.long) for b in BACKENDS])
def test_a_state_dict_on_rank_0_alone_is_no_abort(ranks: Any, backend: str) -> None:
    """Gloo ends a process that gets another collective's data: SIGABRT without a line of the user's (torch 2.13)."""
    with pytest.raises(RankFailed) as caught:
        ranks.run(job_keeps_on_rank_0, 2, backend)
    said = str(caught.value)
    assert said.startswith("rank 0 failed with RankMismatch: state_dict(): rank 1 waits in "), said
    assert "in step: model(torch.ones(2, 4)).sum().backward()" in said, said
    assert "All ranks must call state_dict() equally often: is it under `if rank == 0`" in said, said


def test_other_rare_calls_on_rank_0_alone_name_the_other_soon(ranks: Any) -> None:
    with pytest.raises(RankFailed, match=r"^rank 0 failed with RankMismatch: full_parameters\(\): rank 1 waits in "):
        ranks.run(job_keeps_on_rank_0, 2, "fsdp2", "full_parameters")
    told = r"(?s)^rank 0 failed with CheckpointError: all 2 ranks must call .*rank 1: waits in .*in step: model\(torch"
    with pytest.raises(RankFailed, match=told):
        ranks.run(job_keeps_on_rank_0, 2, "fsdp2", "save")


LOOKS = ("location_of_this_rank", "_group_of_call", "collectives", "all_groups")


def job_looks_that_fail() -> bool:
    """Return whether rank 1 answers, where its first looks at what others change meanwhile raise."""
    failed = Counter[str]()

    def failing(name: str) -> Any:
        real = getattr(watchdog, name)

        def look(*given: Any) -> Any:
            failed[name] += 1
            if failed[name] > 2:
                return real(*given)
            raise (RuntimeError if failed[name] == 1 else AttributeError)("it has changed meanwhile")

        return look

    with mock.patch.multiple(watchdog, INTERVAL=0.05, QUIET=0.1, **{name: failing(name) for name in LOOKS}):
        watch, seen = watchdog.Watchdog.made(), dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 0:
            watch.store.add("asked", 1)
            answered = watch.store.awaited(["at/1"], 60.0)
            seen.set("looked", "")
            return answered
        seen.wait(["looked"])
        return watch._thread.is_alive() and {name for name in LOOKS if failed[name] > 2} == set(LOOKS)


def test_a_look_that_fails_is_made_again(ranks: Any) -> None:
    assert ranks.run(job_looks_that_fail, 2) == [True, True]


@on_ranks(3)
def test_a_rank_that_waits_for_a_late_one_is_not_stuck() -> None:
    """Its stack says that it waits in a backward, and not for whom.

    Rank 2 is late, rank 1 waits for it alone, and rank 0 for both, until it has asked often where they are.
    """
    with mock.patch.multiple(watchdog, INTERVAL=0.05, FIRST_QUESTION=0.1, NEXT_QUESTION=0.2):
        watch, seen, rank = watchdog.Watchdog.made(), dist.distributed_c10d._get_default_store(), dist.get_rank()
        world, pair, places, found = dist.group.WORLD, dist.new_group([1, 2]), watch.places, list[int]()
        assert world is not None

        def counted(number: int) -> Any:
            told = places(number)
            found.extend([number] if {0, 1} <= {rank for rank, place in told.items() if place.with_ranks} else [])
            if len(found) == 8:  # four were enough, if all stood still in vain
                seen.set("looked", "")
            return told

        if rank:
            model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2), process_group=pair)
            loss = model(torch.ones(1, 2)).sum()
            if rank == 2:
                seen.wait(["looked"])
            loss.backward()
        with mock.patch.object(watch, "places", counted):
            watchdog.wait(dist.all_reduce(torch.ones(3), async_op=True), world, "the sum", 60.0, on_cpu=True)


def job_dies_before_save() -> None:
    model, _ = trained("ddp")
    if dist.get_rank() == 1:
        raise ValueError("boom")
    fsshard.save("never", model)


def test_a_save_does_not_wait_for_a_rank_that_has_ended(ranks: Any) -> None:
    error, _ = ranks.run_expecting_errors(job_dies_before_save, 2)
    assert isinstance(error, CheckpointError) and error.failures == {1: "ended with ValueError: boom"}, error


def job_three() -> str:
    """Ranks 0 and 1 wait, 2 is elsewhere; 1 comes a little later than 0."""
    watchdog.join()
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    if rank == 2:
        store.wait(["0", "1"])
        return ""

    def work() -> None:
        with watchdog.taking_part(dist.group.WORLD, "the sum"):
            dist.all_reduce(torch.ones(1))

    said = short_of_time(work, words=1.0)
    store.set(str(rank), "1")
    return said


def job_old_wait() -> str:
    """Rank 0 loses rank 1, and goes on; then rank 1 loses rank 0."""
    watchdog.join()
    watch = watchdog.Watchdog.of_job()
    with mock.patch.object(watchdog, "LAST_WORDS", 0.1):
        if dist.get_rank() == 0:
            told = watch.missing("the first", (0, 1), 1.0)
            with watchdog.taking_part(dist.group.WORLD, "the second"):
                dist.barrier()
            return told
        dist.barrier()
        return watch.missing("the third", (0, 1), 1.0)


def test_an_old_wait_is_not_told_as_the_present_one(ranks: Any) -> None:
    first, third = ranks.run(job_old_wait, 2)
    assert first.startswith("rank 1 did not take part") and third.startswith("rank 0 did not take part"), third


def test_who_waits_is_not_named(ranks: Any) -> None:
    for said in ranks.run(job_three, 3)[:2]:
        assert said.startswith("RankMismatch: the sum: rank 2 did not take part"), said


def test_what_is_no_lost_rank_passes() -> None:
    with pytest.raises(ValueError, match="boom"), watchdog.taking_part(None, "it"):
        raise ValueError("boom")
    lost = RuntimeError("Connection closed by peer [127.0.0.1]:1")
    with pytest.raises(RuntimeError) as caught, watchdog.taking_part(None, "it"):
        raise lost
    assert caught.value is lost
    assert watchdog.speaks_of_a_lost_rank(lost) and not watchdog.speaks_of_a_lost_rank(RankMismatch(str(lost)))


UNCAUGHT = """
import os, signal, sys, torch, fsshard
ctx = fsshard.init(timeout=60)
model = fsshard.wrap(torch.nn.Linear(2, 2), backend="ddp")
if ctx.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
model(torch.ones(1, 2)).sum().backward()
"""


@pytest.mark.long
def test_an_uncaught_error_is_followed_by_the_name(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(UNCAUGHT)
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "CUDA_VISIBLE_DEVICES": ""}
    processes = []
    for rank in ("0", "1"):
        mine = {**environment, "RANK": rank, "LOCAL_RANK": rank}
        command = [sys.executable, str(tmp_path / "train.py")]
        processes.append(subprocess.Popen(command, env=mine, stderr=subprocess.PIPE, text=True))
    said = [process.communicate(timeout=100)[1] for process in processes]
    assert processes[1].returncode == -signal.SIGKILL and processes[0].returncode == 1
    assert "fsshard: a collective in backward: rank 1 has ended: its process is gone" in said[0], said[0]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
