"""Checks that launchers' variables are read right, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsshard.errors import LaunchError
from fsshard.launching.context import first_host, init, slurm_local_world_size, slurm_rank, torchrun_rank
from fsshard.launching.processes import launch
from tests.launching.launched import nested


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ("RANK=0", "RANK=0 is set but WORLD_SIZE is not"),
        ("WORLD_SIZE=4", "WORLD_SIZE=4 is set but RANK is not"),
        ("RANK=one WORLD_SIZE=2", "RANK='one': expected an integer"),
        ("RANK=2 WORLD_SIZE=2 MASTER_ADDR=x MASTER_PORT=9", "RANK=2: expected .* WORLD_SIZE=2"),
        ("RANK=0 WORLD_SIZE=0", "RANK=0: expected .* WORLD_SIZE=0"),
        ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=1 MASTER_ADDR=x MASTER_PORT=9", "LOCAL_RANK=1: expected"),
        ("RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=3 MASTER_ADDR=x MASTER_PORT=9", "LOCAL_WORLD_SIZE=3 is more than"),
        ("RANK=0 WORLD_SIZE=2 MASTER_PORT=9", "MASTER_ADDR is not set"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=x", "got it without MASTER_PORT"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=x MASTER_PORT=http", "MASTER_PORT='http': expected an integer"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=x MASTER_PORT=70000", "MASTER_PORT=70000: expected a port"),
        ("SLURM_PROCID=0 SLURM_STEP_ID=x", "SLURM_STEP_ID='x': expected an integer"),
        ("SLURM_PROCID=0 SLURM_STEP_ID=0", "SLURM_NTASKS is not"),
        ("SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_NTASKS=2", "export MASTER_ADDR"),
        ("SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_STEP_NODELIST=n", "got it without SLURM_JOB_ID"),
        ("SLURM_PROCID=2 SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_STEP_NODELIST=n SLURM_JOB_ID=7", "RANK=2: expected"),
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


def slurm(**changes: str) -> Any:
    return slurm_rank({name: value for name, value in {**SLURM, **changes}.items() if value})


def test_local_numbers_that_a_script_leaves_out() -> None:
    place = torchrun_rank({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "x", "MASTER_PORT": "9"})
    if not torch.cuda.is_available():
        assert (place.local_rank, place.local_world_size) == (1, 4)
    values = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "x", "MASTER_PORT": "9"}
    place = torchrun_rank(values)
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
    place = slurm()
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (5, 7, 1, 3)
    assert place.address == "node01"  # srun may have been typed on a login node, where no rank runs
    assert place.port == 10000 + (123456 + 2 * 1009) % 20000 != slurm(SLURM_STEP_ID="3").port
    assert slurm(SLURM_NNODES="1").address == "127.0.0.1"  # nobody else has to reach it
    assert slurm(SLURM_STEP_NODELIST="").address == "10.0.0.9"
    place = slurm(MASTER_ADDR="chosen", MASTER_PORT="4242", WORLD_SIZE="7")
    assert (place.address, place.port) == ("chosen", 4242)
    assert torchrun_rank({**SLURM, "WORLD_SIZE": "7"}) is None  # exported by a batch script


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
    [("node[01-04,07],x", "node01"), ("single", "single"), ("a-b[3]-c,d", "a-b3-c"), ("r[1-2]n[05-06]", "r1n05")],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


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
    assert slurm_local_world_size(variables, 11) == expected
