"""Two hosts whose cable is cut, during a save and between two: the job ends, and goes on from a whole checkpoint.

The hosts are network namespaces; without the right to make them this is skipped. ``make hosts`` runs the elastic
example on such hosts, for minutes.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import threading
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from fsshard.checkpoint import saving
from fsshard.launching.pool import RankPool
from tests.examples.two_hosts import Hosts
from tests.models import take_step, with_adam

STEPS, EVERY = 12, 4
COLLECTIVE = 4.0  # seconds until a collective gives up
LONGEST = 200.0  # seconds on a machine that is busy with other things; 8 where it is not


def trained(ctx: fsshard.Context, folder: Path, cut: Any = None) -> dict[str, Tensor]:
    """From the latest checkpoint to the end; ``cut(step)`` is called before each step."""
    torch.manual_seed(0)
    model, optimizer = with_adam(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), backend="fsdp2")
    found, first = fsshard.latest(folder), 0
    if found is not None:
        first = fsshard.load(found, model, optimizer).state["step"]
    for step in range(first, STEPS):
        if cut is not None:
            cut(step)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + ctx.rank))
        model(x).square().mean().backward()
        take_step(optimizer)
        if (step + 1) % EVERY == 0:
            fsshard.save(folder / f"step-{step + 1}", model, optimizer, block=False, step=step + 1)
    return model.state_dict()


class Scissors:
    """Cuts the cable before one step, after the save before it has ended or while it goes on."""

    def __init__(self, when: str, folder: Path, pipe: Any) -> None:
        self.when, self.folder, self.pipe = when, folder, pipe
        self.write, self.is_cut = saving.write, threading.Event()

    def __call__(self, step: int) -> None:
        if step == 6 and self.when == "between":
            fsshard.wait_for_saves()
            dist.barrier()
            self.cut()
        if step == 9 and self.when == "during":
            self.is_cut.wait()

    def cut(self) -> None:
        self.pipe.send("cut")
        assert self.pipe.recv() == "done"
        self.is_cut.set()

    def written(self, path: Path, *args: Any, **kwargs: Any) -> Any:
        """In the thread that saves: its files are written, the ranks have not told each other yet."""
        info = self.write(path, *args, **kwargs)
        if path.parent.name.startswith(".step-8"):
            self.cut()
        return info


def mortal(host: int, namespaces: list[str], when: str, folder: Path, pipe: Any) -> None:
    """A rank on its host."""
    for kind, name in zip((0x40000000, 0x00020000), namespaces, strict=True):  # CLONE_NEWNET, CLONE_NEWNS
        with open(name) as file:
            assert ctypes.CDLL(None, use_errno=True).setns(file.fileno(), kind) == 0, os.strerror(ctypes.get_errno())
    torch.set_num_threads(1)
    here = {"RANK": host, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 29511}
    os.environ |= {name: str(value) for name, value in here.items()}
    os.environ |= {"MASTER_ADDR": Hosts.ADDRESSES[0], "GLOO_SOCKET_IFNAME": f"cable{host}"}
    scissors = Scissors(when, folder, pipe)
    during = mock.patch.object(saving, "write", scissors.written if when == "during" else saving.write)
    try:
        with during:
            weights = fsshard.launch(trained, args=(folder, scissors), timeout=COLLECTIVE)
        pipe.send({name: value.tolist() for name, value in weights.items()})
    except Exception:
        pipe.send(f"failed: {traceback.format_exc()}")


@contextmanager
def job_over(hosts: Hosts, when: str, folder: Path) -> Iterator[tuple[list[Any], list[Any]]]:
    """A process per host, and a pipe to each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "fsshard.wrapping", "torch.distributed.fsdp", __name__])
    pipes = [context.Pipe() for _ in hosts.holders]
    processes = [
        context.Process(target=mortal, args=(host, hosts.namespaces(host), when, folder, pipes[host][1]))
        for host in range(len(pipes))
    ]
    for process in processes:
        process.start()
    for _, there in pipes:
        there.close()
    try:
        yield processes, [here for here, _ in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def heard(pipe: Any) -> Any:
    assert pipe.poll(LONGEST), "a rank neither ends nor says anything"
    return pipe.recv()


def job_undisturbed(folder: str) -> dict[str, Any]:
    return {name: value.tolist() for name, value in trained(fsshard.init(), Path(folder)).items()}


@pytest.mark.long
def test_the_cable_is_cut_and_the_job_goes_on(ranks: RankPool, tmp_path: Path) -> None:
    """Both cuts beside each other: what takes the time is waiting for collectives to give up."""
    with ExitStack() as until_done:
        hosts, jobs = {}, {}
        for when in ("during", "between"):
            (folder := tmp_path / when).mkdir()
            try:
                hosts[when] = Hosts(until_done, folder)
            except PermissionError as error:
                pytest.skip(f"no right to make network namespaces here: {error}")
            jobs[when] = until_done.enter_context(job_over(hosts[when], when, folder / "run"))
        undisturbed = ranks.run(job_undisturbed, 2, str(tmp_path / "undisturbed"))
        for when, (_, pipes) in jobs.items():
            assert [heard(pipe) for pipe in pipes] == ["cut", "cut"]
            hosts[when].link("down")
            for pipe in pipes:
                pipe.send("done")
        for when, (processes, pipes) in jobs.items():
            for process, pipe in zip(processes, pipes, strict=True):
                assert "failed: " in heard(pipe), when
                process.join(LONGEST)
                assert process.exitcode == 0, f"{when}: a rank does not end"
            assert fsshard.latest(tmp_path / when / "run") == tmp_path / when / "run" / "step-4"
            hosts[when].link("up")
            jobs[when] = until_done.enter_context(job_over(hosts[when], "", tmp_path / when / "run"))
        for when, (_, pipes) in jobs.items():
            assert [heard(pipe) for pipe in pipes] == undisturbed, when
