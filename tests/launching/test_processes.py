"""launch() and init(): who is started, what they see, and whose failure is reported."""

from __future__ import annotations

import atexit
import functools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsshard.errors import LaunchError, RankFailed, UnsupportedByBackend
from fsshard.launching import processes
from fsshard.launching.context import Context, cores, init
from fsshard.launching.processes import launch
from tests.forked import forking
from tests.launching.launched import NAMES, ON_LOOPBACK, PATIENCE, environment, listeners, nested, script
from tests.sets import often

# --------------------------------------------------------------------------------------------- what launched ranks run


def report(ctx: Context, *args: Any) -> dict[str, Any]:
    total = torch.tensor([float(ctx.rank + 1)])
    dist.all_reduce(total)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=20))
    store.set(f"seen/{ctx.rank}", b"yes")
    store.wait(["seen/0", "seen/1"])
    return {
        "context": ctx,
        "again": init(),
        "nested": launch(nested, args=("inner",)),
        "args": args,
        "total": total,
        "environment": {name: os.environ[name] for name in NAMES},
        "listens": listeners(port),
    }


def misbehave(ctx: Context, mode: str) -> Any:
    """Rank 1 does what the mode says, while rank 0 waits for it in a collective."""
    dist.all_reduce(torch.ones(1))
    if ctx.rank == 1:
        MODES[mode]()
    if mode == "leaves with 3":
        threading.Event().wait()  # hears of nothing, and has to be ended
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        if mode == "killed":
            raise ValueError("step failed") from sys.exc_info()[1]
        raise
    return "unreachable"


def skip_one(ctx: Context) -> None:
    if ctx.rank == 0:
        dist.all_reduce(torch.ones(1))


def raise_own_error() -> None:
    raise UnsupportedByBackend("cpu_offload=True", "ddp", "use backend='fsdp'")


def abort_here() -> None:
    os.abort()  # as gloo does with a message of another collective


MODES: dict[str, Callable[[], Any]] = {
    "raises": raise_own_error,
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "aborts": abort_here,
    "leaves with 3": lambda: sys.exit(3),
    "finishes early": lambda: sys.exit(0),
    "makes a group": lambda: dist.init_process_group("gloo"),
}


def leave_with_zero(ctx: Context, folder: Path) -> str:
    atexit.register((folder / f"rank{ctx.rank}").touch)
    if ctx.rank == 0:
        sys.exit(0)
    return "not rank 0's"


class ToldToLeave(Exception):
    pass


def leave_when_told(ctx: Context, parent: int, stays: bool) -> str:
    """Rank 0 tells the parent to end, as a scheduler does."""

    def leave(number: int, frame: Any) -> None:
        if not stays:
            raise ToldToLeave

    signal.signal(signal.SIGTERM, leave)
    try:
        dist.barrier()
        if ctx.rank == 0:
            os.kill(parent, signal.SIGTERM)
        threading.Event().wait()
    except ToldToLeave:
        return "saved"
    return "unreachable"


# ------------------------------------------------------------------------------------------------------ spawned ranks


pytestmark = pytest.mark.usefixtures("forked")


def test_rank_0_result_context_and_environment(bare: pytest.MonkeyPatch) -> None:
    found = launch(report, 2, ("a", torch.ones(2)), process_group_backend="gloo")
    assert found["again"] == found["context"] == Context(0, 0, 2, 2, torch.device("cpu"), "gloo")
    assert found["nested"] == (0, "inner") and found["total"].item() == 3.0
    assert found["args"][0] == "a" and found["args"][1].tolist() == [1.0, 1.0]
    port = found["environment"].pop("MASTER_PORT")
    assert 0 < int(port) < 2**16
    expected = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    assert found["environment"] == expected
    assert found["listens"] == [ON_LOOPBACK]
    assert "RANK" not in os.environ and not dist.is_initialized()  # the parent is no rank


FAILURES: dict[str, tuple[str, type]] = {
    "raises": ("UnsupportedByBackend: backend 'ddp' cannot.*in raise_own_error", UnsupportedByBackend),
    "killed": ("SIGKILL", type(None)),  # not what it did to the other
    "aborts": (
        r"SIGABRT: .*`if rank == 0`.*drop_last.*it was at .*in abort_here: os.abort\(\).*"
        r"in misbehave: dist.all_reduce\(torch.ones\(1\)\).*Fatal Python error: Aborted",
        type(None),
    ),
    "leaves with 3": ("SystemExit: 3", SystemExit),  # and the other, which is stuck, is ended
    "finishes early": (r"SystemExit: sys\.exit\(0\) was called there.*rank 0 waited in all_reduce, at ", RuntimeError),
    "makes a group": (r"LaunchError: expected one process group.*remove that line", LaunchError),
}


@pytest.mark.parametrize("mode", FAILURES)
def test_the_failure_that_no_other_one_caused(bare: pytest.MonkeyPatch, mode: str) -> None:
    told, cause = FAILURES[mode]
    if mode == "leaves with 3":  # the other one is not going to say anything
        bare.setattr(processes, "GRACE_SECONDS", 0.3)
    with pytest.raises(RankFailed, match=f"(?s)^rank 1 failed with {told}") as caught:
        launch(misbehave, 2, (mode,), timeout=5)
    assert caught.value.rank == 1 and isinstance(caught.value.cause, cause)
    assert caught.value.__cause__ is None  # else its message would be printed a third time
    if mode == "raises":
        assert getattr(caught.value.cause, "alternative", "") == "use backend='fsdp'"


def test_a_rank_that_skips_a_collective_is_pointed_at(bare: pytest.MonkeyPatch) -> None:
    told = r"^rank 1 failed with an early return: its function had returned while rank 0"
    with pytest.raises(RankFailed, match=told):
        launch(skip_one, 2, timeout=5)


def test_sys_exit_0_finishes_and_exit_functions_run(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert launch(leave_with_zero, 2, (tmp_path,)) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0", "rank1"]


def test_sigterm_reaches_the_ranks_which_save_and_leave(bare: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert launch(leave_when_told, 2, (os.getpid(), False)) == "saved"
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_rank_that_stays_beyond_the_grace_is_killed(bare: pytest.MonkeyPatch) -> None:
    bare.setattr(processes, "GRACE_SECONDS", 0.3)
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with pytest.raises(RankFailed, match=r"rank 0 failed with SIGKILL: it had not ended 0 s \(grace=\)"):
            launch(leave_when_told, 2, (os.getpid(), True), grace=0)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]


alive: list[nn.Module] = []


def train_and_outlive_the_group(ctx: Context, destroy_here: bool) -> str:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3)))
    for _ in range(5):
        model(torch.rand(64, 2)).abs().sum().backward()
    if destroy_here:
        dist.destroy_process_group()  # as scripts do; the model dies just after, and must not take the group with it
    else:
        alive.append(model)
    return "done"


@pytest.mark.long
@pytest.mark.parametrize("destroy_here", [True, False])
def test_models_alive_at_teardown_do_not_hang(
    bare: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, destroy_here: bool
) -> None:
    with forking(forks=False):  # the end of an interpreter has a part in it
        assert launch(train_and_outlive_the_group, 2, (destroy_here,)) == "done"
    assert "ended with code" not in caplog.text  # nor does a rank abort while its interpreter finalizes


INTERRUPTED_SCRIPT = """
import os, threading, torch
from fsshard.launching.processes import launch

def wait(ctx):
    os.write(1, b"%d %d\\n" % (os.getpid(), torch.get_num_threads()))  # one write, so that ranks do not mix their lines
    threading.Event().wait()

if __name__ == "__main__":
    launch(wait, 2)
"""


@pytest.mark.parametrize("number", often([signal.SIGINT, signal.SIGKILL, signal.SIGTERM], signal.SIGKILL))
def test_no_rank_outlives_the_parent(number: signal.Signals, bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Here ranks are spawned as a user's are: so they have one thread each, too."""
    bare.delenv("OMP_NUM_THREADS", raising=False)
    command = [sys.executable, script(tmp_path, INTERRUPTED_SCRIPT)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    parent = subprocess.Popen(command, env=environment(), **pipes)
    try:
        assert parent.stdout is not None
        ranks = [parent.stdout.readline().split() for _ in range(2)]
        parent.send_signal(number)
        assert parent.communicate(timeout=PATIENCE)[0] == ""  # end of file: the ranks, who hold it too, are gone
        assert parent.returncode == -number
    finally:
        parent.kill()
    assert ranks[0][0] != ranks[1][0] and [threads for _, threads in ranks] == ["1", "1"]


# ---------------------------------------------------------------------------------------- asked for what cannot be had


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"nprocs": 0}, "nprocs: expected a positive integer or None, got 0"),
        ({"nprocs": 5000}, "nprocs=5000, but this machine has .* CPU cores .* pass nprocs="),
        ({"process_group_backend": "nccl"}, "process_group_backend='nccl' needs a CUDA device"),
        ({"process_group_backend": "mpi"}, "process_group_backend: expected 'gloo', 'nccl' or None, got 'mpi'"),
        ({"timeout": 0}, "timeout: expected positive seconds"),
        ({"threads": 0}, "threads: expected a positive integer"),
        ({"grace": -1}, "grace: expected seconds, at least 0, got -1; leave it out for 30"),
        ({"args": "abc"}, "args: expected a tuple or a list, got str; for one argument: args="),
        ({"args": (threading.Lock(),)}, "fn or args cannot be pickled"),
    ],
)
def test_refused_before_any_process_starts(bare: pytest.MonkeyPatch, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        launch(report, **kwargs)


def test_a_script_without_a_guard_is_told_so_once(tmp_path: Path) -> None:
    text = "import fsshard\ndef train(ctx): ...\nfsshard.launch(train, 2)\n"
    command = [sys.executable, str(script(tmp_path, text))]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1 and done.stderr.count("Traceback") == 1
    told = (
        "ranks import the main script, and it starts ranks at its top level; put that call under "
        '`if __name__ == "__main__":`'
    )
    assert done.stderr.splitlines()[-1] == f"fsshard.errors.LaunchError: {told}"


def test_functions_that_ranks_could_not_import(bare: pytest.MonkeyPatch) -> None:
    def closure(ctx: Context) -> None:
        pass

    for fn in (lambda ctx: None, closure, functools.partial(closure)):
        with pytest.raises(LaunchError, match=r"cannot be pickled; .* top level of a module"):
            launch(fn, 2)
    with pytest.raises(LaunchError, match="nprocs"):  # a function in C does not tell what it takes
        launch(max, 999_999)
    with pytest.raises(LaunchError, match="fn: expected a function that"):
        launch("train", 2)

    def interactive(ctx: Context) -> None:
        pass

    interactive.__module__, interactive.__qualname__ = "__main__", "interactive"
    bare.delattr(sys.modules["__main__"], "__file__")
    with pytest.raises(LaunchError, match="interactive is defined in an interactive session"):
        launch(interactive, 2)


def test_more_processes_than_cuda_devices(bare: pytest.MonkeyPatch) -> None:
    bare.setattr(torch.cuda, "is_available", lambda: True)
    bare.setattr(torch.cuda, "device_count", lambda: 1)
    for backend in (None, "nccl"):
        with pytest.raises(LaunchError, match=r"nprocs=2, but this machine has 1 CUDA device\(s\); pass nprocs=1"):
            launch(report, 2, process_group_backend=backend)
    with pytest.raises(LaunchError, match=f"has {cores()} CPU cores"):
        launch(report, 5000, process_group_backend="gloo")


# ----------------------------------------------------------------------------------------------------- under launchers


LAUNCHED_SCRIPT = """
import os, sys, torch, torch.distributed as dist
from fsshard.launching.processes import launch

def train(ctx, mode):
    total = torch.tensor([float(ctx.rank + 1)])
    dist.all_reduce(total)
    if mode == "fails":
        if ctx.rank == 1:
            raise ValueError("boom on rank 1")
        dist.all_reduce(total)
    port = os.environ["MASTER_PORT"]
    return f"{ctx.rank} {ctx.local_rank} {ctx.world_size} {ctx.local_world_size} {ctx.device} {total.item()} {port}"

if __name__ == "__main__":
    found = launch(train, 2, (sys.argv[1],), timeout=30)
    assert not dist.is_initialized()
    os.write(1, (found + "\\n").encode())  # one write, so that ranks do not mix their lines
"""


def torchrun(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path)]
    return subprocess.run([*command, *arguments], env=environment(), capture_output=True, text=True, timeout=PATIENCE)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["works", "fails"])
def test_under_torchrun(tmp_path: Path, mode: str) -> None:
    done = torchrun(script(tmp_path, LAUNCHED_SCRIPT), mode)
    if mode == "fails":
        assert done.returncode == 1 and "ValueError: boom on rank 1" in done.stderr.split("Root Cause", 1)[1]
        return
    assert done.returncode == 0, done.stderr
    lines = sorted(line.rsplit(" ", 1)[0] for line in done.stdout.splitlines())
    assert lines == ["0 0 2 2 cpu 3.0", "1 1 2 2 cpu 3.0"]


@pytest.mark.long
def test_under_slurm(tmp_path: Path) -> None:
    path = script(tmp_path, LAUNCHED_SCRIPT)
    job = str(os.getpid())  # two runs of the tests at once get two ports
    variables = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_JOB_ID": job}
    tasks = []
    for rank in ("0", "1"):
        mine = environment(SLURM_PROCID=rank, SLURM_LOCALID=rank, SLURM_STEP_NODELIST="localhost", **variables)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        tasks.append(subprocess.Popen([sys.executable, path, "works"], env=mine, **pipes))
    for rank, task in enumerate(tasks):
        out, err = task.communicate(timeout=PATIENCE)
        assert task.returncode == 0, err
        assert out.strip() == f"{rank} {rank} 2 2 cpu 3.0 {10000 + int(job) % 20000}"
