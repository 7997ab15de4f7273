"""launch() and init(): who is started, what they see, and whose failure is reported."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore
from torch.distributed.rendezvous import _create_c10d_store
from torch.nn.parallel import DistributedDataParallel

from fsshard.errors import LaunchError, RankFailed, UnsupportedByBackend
from fsshard.launch import (
    Context,
    _cores,
    _Failure,
    _first_failure,
    _first_host,
    _groups,
    _is_consequence,
    _own_store_of,
    _pack_error,
    _Place,
    _Settings,
    _slurm_local_world_size,
    _slurm_place,
    _store_of_this_start,
    _tear_down,
    _torchrun_place,
    _unpack_error,
    init,
    keep_group,
    launch,
)
from fsshard.ranks import RankPool
from tests.forked import forking

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
CPU = {"CUDA_VISIBLE_DEVICES": ""}
PATIENCE = 100  # seconds; a hang becomes a failure


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
        "threads": torch.get_num_threads(),
    }


def listeners(port: int) -> list[str]:
    """The addresses on which somebody of this machine waits for connections to the port, as the kernel writes them."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return [line[1].partition(":")[0] for line in lines if line[3] == "0A" and line[1].endswith(f":{port:04X}")]


ON_LOOPBACK = "0100007F"


def nested(ctx: Context, word: str) -> tuple[int, str]:
    return ctx.rank, word


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
        if mode == "both raise":
            raise KeyError("later, and about something else") from None
        if mode == "killed":
            raise ValueError("step failed") from sys.exc_info()[1]
        raise
    return "unreachable"


def skip_one(ctx: Context) -> None:
    if ctx.rank == 0:
        dist.all_reduce(torch.ones(1))


def raise_own_error() -> None:
    raise UnsupportedByBackend("cpu_offload=True", "ddp", "use backend='fsdp'")


def raise_value_error() -> None:
    raise ValueError("boom")


MODES: dict[str, Callable[[], Any]] = {
    "raises": raise_own_error,
    "both raise": raise_value_error,
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "os._exit(0)": lambda: os._exit(0),
    "leaves with 3": lambda: sys.exit(3),
    "finishes early": lambda: sys.exit(0),
}


def leave_with_zero(ctx: Context, folder: Path) -> str:
    atexit.register((folder / f"rank{ctx.rank}").touch)
    if ctx.rank == 0:
        sys.exit(0)
    return "not rank 0's"


def return_a_lambda(ctx: Context) -> Any:
    return lambda: None


# ------------------------------------------------------------------------------------------------------------ fixtures


@pytest.fixture
def bare() -> Iterator[pytest.MonkeyPatch]:
    """No launcher in the environment and no CUDA; and no group left behind."""
    before, threads = dict(os.environ), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name in NAMES or name.startswith(("SLURM_", "TORCHELASTIC_"))]:
            patch.delenv(name)
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(torch.cuda, "device_count", lambda: 0)
        yield patch
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.set_num_threads(threads)
    # Last, and not by the patch: a variable that init() exported and the test then set goes back to what was exported.
    os.environ.clear()
    os.environ.update(before)


def environment(**values: str) -> dict[str, str]:
    """This environment without any launcher's variables, and with those given."""
    kept = {k: v for k, v in os.environ.items() if k not in NAMES and not k.startswith(("SLURM_", "TORCHELASTIC_"))}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**kept, **CPU, "PYTHONPATH": path, **values}


def script(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(text)
    return path


# ------------------------------------------------------------------------------------------------------ spawned ranks


@pytest.fixture(scope="module", autouse=True)
def _forked() -> Iterator[None]:
    with forking():
        yield


@pytest.fixture
def spawned() -> Iterator[None]:
    """For what the start and the end of an interpreter have a part in."""
    with forking(forks=False):
        yield


def test_rank_0_result_context_and_environment(bare: pytest.MonkeyPatch, spawned: None) -> None:
    bare.delenv("OMP_NUM_THREADS", raising=False)
    found = launch(report, 2, ("a", torch.ones(2)), backend="gloo")
    assert found["context"] == Context(0, 0, 2, 2, torch.device("cpu"), "gloo")
    assert found["again"] == found["context"]
    assert found["nested"] == (0, "inner")
    assert found["args"][0] == "a"
    assert found["args"][1].tolist() == [1.0, 1.0]
    assert found["total"].item() == 3.0
    port = found["environment"].pop("MASTER_PORT")
    assert 0 < int(port) < 2**16
    expected = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    assert found["environment"] == expected
    assert found["threads"] == 1
    assert found["listens"] == [ON_LOOPBACK]
    assert "RANK" not in os.environ  # the parent is no rank
    assert not dist.is_initialized()


def test_the_exception_of_the_rank_that_failed(bare: pytest.MonkeyPatch) -> None:
    with pytest.raises(RankFailed, match=r"^rank 1 failed with UnsupportedByBackend: backend 'ddp' cannot") as caught:
        launch(misbehave, 2, ("raises",))
    assert caught.value.rank == 1
    assert caught.value.cause_type == "UnsupportedByBackend"
    assert "in raise_own_error" in caught.value.traceback
    original = caught.value.__cause__
    assert isinstance(original, UnsupportedByBackend)
    assert original.alternative == "use backend='fsdp'"


def test_the_earlier_of_two_real_exceptions(bare: pytest.MonkeyPatch) -> None:
    with pytest.raises(RankFailed, match="rank 1 failed with ValueError: boom") as caught:
        launch(misbehave, 2, ("both raise",))
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_death_outranks_what_it_did_to_the_others(bare: pytest.MonkeyPatch) -> None:
    with pytest.raises(RankFailed, match="rank 1 failed with SIGKILL") as caught:
        launch(misbehave, 2, ("killed",))
    assert caught.value.traceback == ""
    assert caught.value.__cause__ is None


def test_exit_code_0_in_the_middle_is_a_death(bare: pytest.MonkeyPatch) -> None:
    with pytest.raises(RankFailed, match="rank 1 failed with exit code 0: the process exited without finishing"):
        launch(misbehave, 2, ("os._exit(0)",))


def test_sys_exit_with_a_code_fails_and_a_stuck_rank_is_ended(bare: pytest.MonkeyPatch) -> None:
    with pytest.raises(RankFailed, match="rank 1 failed with SystemExit: 3") as caught:
        launch(misbehave, 2, ("leaves with 3",))
    assert isinstance(caught.value.__cause__, SystemExit)


def test_a_rank_that_skips_a_collective_is_pointed_at(bare: pytest.MonkeyPatch) -> None:
    with pytest.raises(RankFailed, match=r"^rank 1 failed with SystemExit: sys\.exit\(0\) was called there") as caught:
        launch(misbehave, 2, ("finishes early",), timeout=5)
    assert caught.value.rank == 1
    assert "waited in all_reduce, at " in caught.value.others[0]
    assert "in misbehave: dist.all_reduce(torch.ones(1))" in caught.value.others[0]
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(
        RankFailed, match=r"^rank 1 failed with an early return: its function had returned while rank 0"
    ):
        launch(skip_one, 2, timeout=5)


def test_sys_exit_0_finishes_and_exit_functions_run(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert launch(leave_with_zero, 2, (tmp_path,)) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0", "rank1"]


def test_a_result_that_cannot_be_pickled(bare: pytest.MonkeyPatch) -> None:
    with pytest.raises(RankFailed, match="returned a function that cannot be pickled") as caught:
        launch(return_a_lambda)
    assert isinstance(caught.value.__cause__, LaunchError)


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


@pytest.mark.parametrize("destroy_here", [True, False])
def test_models_alive_at_teardown_do_not_hang(
    bare: pytest.MonkeyPatch, spawned: None, caplog: pytest.LogCaptureFixture, destroy_here: bool
) -> None:
    assert launch(train_and_outlive_the_group, 2, (destroy_here,)) == "done"
    assert "ended with code" not in caplog.text  # nor does a rank abort while its interpreter finalizes


INTERRUPTED_SCRIPT = """
import os, threading
from fsshard.launch import launch

def wait(ctx):
    os.write(1, b"%d\\n" % os.getpid())  # one write, so that ranks do not mix their lines
    threading.Event().wait()

if __name__ == "__main__":
    launch(wait, 2)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_the_parent(number: signal.Signals, tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, script(tmp_path, INTERRUPTED_SCRIPT)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert parent.stdout is not None
        ranks = [int(parent.stdout.readline()) for _ in range(2)]
        parent.send_signal(number)
        assert parent.communicate(timeout=PATIENCE)[0] == ""  # end of file: the ranks, who hold it too, are gone
        assert parent.returncode == -number
    finally:
        parent.kill()
    assert len(set(ranks)) == 2


UNGUARDED_SCRIPT = """
from fsshard.launch import launch

def work(ctx):
    pass

launch(work, 2)
"""


def test_a_script_without_the_main_guard(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, script(tmp_path, UNGUARDED_SCRIPT)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 1
    assert 'put the call under: if __name__ == "__main__":' in done.stderr
    assert "failed with exit code 1: the process exited without finishing" in done.stderr


# ---------------------------------------------------------------------------------------- asked for what cannot be had


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"nprocs": 0}, "nprocs must be a positive integer or None, got 0"),
        ({"nprocs": 2.0}, "nprocs must be a positive integer or None, got 2.0"),
        ({"nprocs": True}, "nprocs must be a positive integer or None, got True"),
        ({"nprocs": 5000}, "nprocs=5000, but this machine has .* CPU cores .* pass nprocs="),
        ({"backend": "nccl"}, "backend='nccl' needs a CUDA device"),
        ({"backend": "mpi"}, "backend must be 'gloo', 'nccl' or None, got 'mpi'"),
        ({"timeout": 0}, "timeout must be a positive number of seconds"),
        ({"timeout": timedelta(0)}, "timeout must be a positive number of seconds"),
        ({"threads": 0}, "threads must be a positive integer"),
        ({"args": "abc"}, "args must be a tuple or a list, got str"),
        ({"args": (threading.Lock(),)}, "fn or args cannot be pickled"),
    ],
)
def test_refused_before_any_process_starts(bare: pytest.MonkeyPatch, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        launch(nested, **kwargs)


def test_functions_that_ranks_could_not_import(bare: pytest.MonkeyPatch) -> None:
    def closure(ctx: Context) -> None:
        pass

    for fn in (lambda ctx: None, closure, functools.partial(closure)):
        with pytest.raises(LaunchError, match=r"cannot be pickled; .* top level of a module"):
            launch(fn, 2)
    with pytest.raises(LaunchError, match="needs a function"):
        launch("train", 2)  # type: ignore[arg-type]

    def interactive(ctx: Context) -> None:
        pass

    interactive.__module__, interactive.__qualname__ = "__main__", "interactive"
    bare.delattr(sys.modules["__main__"], "__file__")
    with pytest.raises(LaunchError, match="interactive lives in an interactive session"):
        launch(interactive, 2)


def test_more_processes_than_cuda_devices(bare: pytest.MonkeyPatch) -> None:
    bare.setattr(torch.cuda, "is_available", lambda: True)
    bare.setattr(torch.cuda, "device_count", lambda: 1)
    for backend in (None, "nccl"):
        with pytest.raises(LaunchError, match="nprocs=2, but this machine has 1 CUDA device; pass nprocs=1"):
            launch(nested, 2, backend=backend)
    with pytest.raises(LaunchError, match=f"has {_cores()} CPU cores"):
        launch(nested, 5000, backend="gloo")


# ------------------------------------------------------------------------------------------------------- one process


def test_no_launcher_makes_a_one_rank_group_and_says_so(
    bare: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.set_num_threads(2)
    with caplog.at_level(logging.INFO, logger="fsshard"):
        ctx = init()
    assert "one-rank group" in caplog.text
    assert ctx == Context(0, 0, 1, 1, torch.device("cpu"), "gloo")
    assert torch.get_num_threads() == 2
    exported = {name: os.environ[name] for name in NAMES}
    assert (exported["RANK"], exported["WORLD_SIZE"], exported["LOCAL_WORLD_SIZE"]) == ("0", "1", "1")
    assert (exported["MASTER_ADDR"], exported["MASTER_PORT"]) == ("127.0.0.1", "0")
    total = torch.ones(2)
    dist.all_reduce(total)
    assert total.tolist() == [1.0, 1.0]

    # A second call finds the group; a notebook may destroy it and begin again, or go on to spawn.
    caplog.clear()
    assert init(threads=1) == ctx
    assert torch.get_num_threads() == 1
    with pytest.raises(LaunchError, match="backend='nccl', but the process group that exists uses 'gloo'"):
        init(backend="nccl")
    with pytest.raises(LaunchError, match="nprocs=5000"):
        launch(nested, 5000)
    dist.destroy_process_group()
    assert init() == ctx
    # A script started from it inherits what was exported, and is no rank either.
    assert _torchrun_place(exported) is None
    # What is changed afterwards is somebody else's word again, all of it.
    dist.destroy_process_group()
    bare.setenv("WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match="MASTER_PORT=0 is not a port"):
        init()


def test_what_init_refuses(bare: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match="needs a CUDA device and this machine shows none"):
        init(backend="nccl")
    with pytest.raises(LaunchError, match="needs a CUDA device and this machine shows none"):
        init(device="cuda")
    with pytest.raises(LaunchError, match="nccl' moves CUDA tensors only"):
        init(backend="nccl", device="cpu")
    with pytest.raises(LaunchError, match="device must be a CPU or a CUDA device"):
        init(device="meta")
    assert not dist.is_initialized()
    assert "RANK" not in os.environ


def test_a_hand_made_environment_of_one(bare: pytest.MonkeyPatch) -> None:
    bare.setenv("RANK", "0")
    bare.setenv("WORLD_SIZE", "1")
    assert init(timeout=timedelta(seconds=30)).world_size == 1
    assert launch(nested, 1, ["here"]) == (0, "here")  # in this process: the environment says that it is a rank
    assert dist.is_initialized()  # and the group stays, as launch() did not make it
    with pytest.raises(LaunchError, match=r"launch\(nprocs=2\), but a job of WORLD_SIZE=1"):
        launch(nested, 2, ("here",))


def test_groups_are_referenced_past_their_destruction(bare: pytest.MonkeyPatch) -> None:
    init()
    world, group = dist.group.WORLD, dist.new_group()
    assert any(kept is world for kept in _groups)
    assert keep_group(group) is group
    assert any(kept is group for kept in _groups)
    another = dist.new_group()
    _tear_down()
    assert not dist.is_initialized()
    assert any(kept is another for kept in _groups)
    assert sum(kept is group for kept in _groups) == 1


def context_without_variables() -> tuple[Context, dict[str, str]]:
    for name in NAMES:
        del os.environ[name]
    return init(), {name: os.environ[name] for name in NAMES[:4]}


def test_a_group_that_somebody_else_made(ranks: RankPool) -> None:
    for rank, (ctx, exported) in enumerate(ranks.run(context_without_variables, 2)):
        assert ctx == Context(rank, rank, 2, 2, torch.device("cpu"), "gloo")
        assert list(exported.values()) == [str(rank), str(rank), "2", "2"]


# --------------------------------------------------------------------------------------------------- the environment


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ("RANK=0", "RANK=0 is set but WORLD_SIZE is not"),
        ("WORLD_SIZE=4", "WORLD_SIZE=4 is set but RANK is not"),
        ("RANK=one WORLD_SIZE=2", "RANK='one' must be an integer"),
        ("RANK=0 WORLD_SIZE=2.0", "WORLD_SIZE='2.0' must be an integer"),
        ("RANK=0 WORLD_SIZE=", "WORLD_SIZE='' must be an integer"),
        ("RANK=2 WORLD_SIZE=2 MASTER_ADDR=x MASTER_PORT=9", "RANK=2 must lie in .* WORLD_SIZE=2"),
        ("RANK=-1 WORLD_SIZE=2 MASTER_ADDR=x MASTER_PORT=9", "RANK=-1 must lie in"),
        ("RANK=0 WORLD_SIZE=0", "RANK=0 must lie in .* WORLD_SIZE=0"),
        ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=1 MASTER_ADDR=x MASTER_PORT=9", "LOCAL_RANK=1 must lie in"),
        ("RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=3 MASTER_ADDR=x MASTER_PORT=9", "LOCAL_WORLD_SIZE=3 is more than"),
        ("RANK=0 WORLD_SIZE=2 MASTER_PORT=9", "MASTER_ADDR is not set"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=x", "MASTER_PORT is not set"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=x MASTER_PORT=http", "MASTER_PORT='http' must be an integer"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=x MASTER_PORT=70000", "MASTER_PORT=70000 is not a port"),
        ("SLURM_PROCID=0 SLURM_STEP_ID=x", "SLURM_STEP_ID='x' must be an integer"),
        ("SLURM_PROCID=0 SLURM_STEP_ID=0", "SLURM_NTASKS is not"),
        ("SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_NTASKS=2", "export MASTER_ADDR"),
        ("SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_STEP_NODELIST=n", "SLURM_JOB_ID is not set"),
        ("SLURM_PROCID=2 SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_STEP_NODELIST=n SLURM_JOB_ID=7", "RANK=2 must lie in"),
        ("SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_STEP_NODELIST=[", "names no host"),
    ],
)
def test_incomplete_or_invalid_environments(bare: pytest.MonkeyPatch, variables: str, message: str) -> None:
    for variable in variables.split():
        bare.setenv(*variable.split("=", 1))
    with pytest.raises(LaunchError, match=message):
        init()
    with pytest.raises(LaunchError, match=message):
        launch(nested, args=("never",))


def test_local_numbers_that_a_script_leaves_out() -> None:
    place = _torchrun_place({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "x", "MASTER_PORT": "9"})
    assert place is not None
    if not torch.cuda.is_available():
        assert (place.local_rank, place.local_world_size) == (1, 4)
    values = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "x", "MASTER_PORT": "9"}
    place = _torchrun_place(values)
    assert place is not None
    assert (place.local_rank, place.local_world_size) == (1, 4)


SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_ID": "2",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_NODELIST": "node[01-04,07],x",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
}


def test_a_slurm_task() -> None:
    place = _slurm_place(SLURM)
    assert place is not None
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (5, 7, 1, 3)
    assert place.address == "node01"  # srun may have been typed on a login node, where no rank runs
    assert place.port == 10000 + (123456 + 2 * 1009) % 20000
    another = _slurm_place({**SLURM, "SLURM_STEP_ID": "3"})
    assert another is not None
    assert another.port != place.port

    place = _slurm_place({**SLURM, "SLURM_NNODES": "1"})
    assert place is not None
    assert place.address == "127.0.0.1"  # nobody else has to reach it
    place = _slurm_place({k: v for k, v in SLURM.items() if "NODELIST" not in k})
    assert place is not None
    assert place.address == "10.0.0.9"
    place = _slurm_place({**SLURM, "MASTER_ADDR": "chosen", "MASTER_PORT": "4242", "WORLD_SIZE": "7"})
    assert place is not None
    assert (place.address, place.port) == ("chosen", 4242)
    assert _torchrun_place({**SLURM, "WORLD_SIZE": "7"}) is None  # exported by a batch script


@pytest.mark.parametrize("step", [None, "4294967290", "4294967291"])
def test_a_bare_python_in_an_allocation_is_no_task(bare: pytest.MonkeyPatch, step: str | None) -> None:
    for name, value in SLURM.items():
        bare.setenv(name, value)
    bare.delenv("SLURM_STEP_ID")
    if step is not None:
        bare.setenv("SLURM_STEP_ID", step)  # the shells of salloc and sbatch
    assert init().world_size == 1


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node[01-04,07],x", "node01"),
        ("node[07,01-04]", "node07"),
        ("x,node[01-04]", "x"),
        ("single", "single"),
        ("a-b[3]-c,d", "a-b3-c"),
        ("r[1-2]n[05-06]", "r1n05"),
        ("gpu01.cluster.org,gpu02", "gpu01.cluster.org"),
    ],
)
def test_first_host(nodes: str, host: str) -> None:
    assert _first_host(nodes) == host


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "1"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "2"}, 3),
        ({"SLURM_STEP_NUM_NODES": "3"}, 4),
        ({}, 11),
    ],
)
def test_tasks_on_this_node(variables: dict[str, str], expected: int) -> None:
    assert _slurm_local_world_size(variables, 11) == expected


LAUNCHED_SCRIPT = """
import os, sys, torch, torch.distributed as dist
from fsshard.launch import launch

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


def test_under_torchrun(tmp_path: Path) -> None:
    done = torchrun(script(tmp_path, LAUNCHED_SCRIPT), "works")
    assert done.returncode == 0, done.stderr
    lines = sorted(line.rsplit(" ", 1)[0] for line in done.stdout.splitlines())
    assert lines == ["0 0 2 2 cpu 3.0", "1 1 2 2 cpu 3.0"]


def test_a_rank_that_torchrun_has_started_again_finds_none_of_the_former(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own does (2.13): all starts have one store."""
    launcher = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    place = _Place("torchrun", 0, 2, 0, 2, "localhost", launcher.port)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    settings, seen = _Settings.check(None, 60.0, None, None), []
    for start in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", start)
        ours = _store_of_this_start(place, settings)
        raw = _create_c10d_store("localhost", launcher.port, 0, 2, timedelta(seconds=60))
        assert ours is not None
        seen.append([ours.check(["ours"]), raw.check(["raw"])])
        ours.set("ours", "address"), raw.set("raw", "address")
    assert seen == [[False, False], [False, True]]
    assert _store_of_this_start(replace(place, local_world_size=1), settings) is None
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert _store_of_this_start(place, settings) is None


@pytest.mark.parametrize(("address", "connected"), [("localhost", ON_LOOPBACK), ("127.0.0.2", "0200007F")])
def test_ranks_of_one_host_meet_where_nobody_else_is(address: str, connected: str, bare: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings, served = _Settings.check(None, 60.0, None, None), []
    place = _Place("torchrun", 0, 2, 0, 2, address, port)
    serving = threading.Thread(target=lambda: served.append(_own_store_of(place, settings)))
    serving.start()  # it waits for all
    store = _own_store_of(replace(place, rank=1, local_rank=1), settings)
    serving.join(PATIENCE)
    assert store is not None
    assert listeners(port) == [connected]
    store.set("a", "1")
    assert served[0].get("a") == b"1"
    # As torch does where a process joins twice.
    again = _own_store_of(replace(place, world_size=1, local_world_size=1), settings)
    assert again is not None
    assert again.get("a") == b"1"
    assert _own_store_of(replace(place, address="node01"), settings) is None


def test_the_port_of_another(bare: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for name, value in {
            "RANK": 0,
            "WORLD_SIZE": 2,
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": taken.getsockname()[1],
        }.items():
            bare.setenv(name, str(value))
        with pytest.raises(dist.DistNetworkError, match="address already in use"):
            init(timeout=20)


def test_a_failure_under_torchrun_is_recorded(tmp_path: Path) -> None:
    done = torchrun(script(tmp_path, LAUNCHED_SCRIPT), "fails")
    assert done.returncode == 1
    root_cause = done.stderr.split("Root Cause", 1)[1]
    assert "ValueError: boom on rank 1" in root_cause


def test_under_slurm(tmp_path: Path) -> None:
    path = script(tmp_path, LAUNCHED_SCRIPT)
    job = str(os.getpid())  # two runs of the tests at once get two ports
    variables = {
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_NNODES": "1",
        "SLURM_JOB_ID": job,
        "SLURM_STEP_NODELIST": "localhost",
    }
    tasks = [
        subprocess.Popen(
            [sys.executable, path, "works"],
            env=environment(SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), **variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank, task in enumerate(tasks):
        out, err = task.communicate(timeout=PATIENCE)
        assert task.returncode == 0, err
        assert out.strip() == f"{rank} {rank} 2 2 cpu 3.0 {10000 + int(job) % 20000}"


# ---------------------------------------------------------------------------------------------------- whose failure


def failure(rank: int, when: float, *, consequence: bool = False) -> _Failure:
    return _Failure(rank, when, "ValueError", "boom", consequence=consequence)


def test_the_earliest_real_failure_counts() -> None:
    echo, late, early = failure(0, 1.0, consequence=True), failure(1, 3.0), failure(2, 2.0)
    assert _first_failure([echo, late, early]) is early
    assert _first_failure([failure(1, 5.0, consequence=True), echo]) is echo


def test_what_counts_as_the_echo_of_another_failure() -> None:
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")
    assert _is_consequence(lost)
    assert _is_consequence(RuntimeError("Timed out waiting 8000ms for recv operation to complete"))
    assert _is_consequence(dist.DistNetworkError("The client socket has timed out"))
    assert _is_consequence(dist.DistBackendError("NCCL error"))
    wrapped = ValueError("step failed")
    wrapped.__context__ = lost
    assert _is_consequence(wrapped)
    wrapped.__suppress_context__ = True
    assert not _is_consequence(wrapped)
    assert not _is_consequence(ConnectionResetError("Connection reset by peer"))  # a download, say
    assert not _is_consequence(RuntimeError("shape mismatch"))


class Demanding(Exception):
    """What plain pickle cannot load: its arguments are not those of __init__."""

    def __init__(self, one: int, *, two: int) -> None:
        super().__init__(f"{one} and {two}")
        self.two = two


def test_exceptions_travel() -> None:
    copy = _unpack_error(_pack_error(Demanding(1, two=2)))
    assert isinstance(copy, Demanding)
    assert (str(copy), copy.two) == ("1 and 2", 2)
    assert isinstance(_unpack_error(_pack_error(FileNotFoundError(2, "gone", "file"))), FileNotFoundError)

    class Local(Exception):
        pass

    assert _pack_error(Local()) is None
    assert _unpack_error(None) is None
