"""The elastic example under torchrun: ranks are killed and a link is cut, and the losses are the undisturbed ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import fsshard
from examples import elastic
from fsshard.launching.pool import RankPool

EXAMPLE = Path(elastic.__file__)
OPTIONS = ["--save-every", "4", "--n-train", "16", "--batch-size", "4"]
FEW = ["--steps", "20"]
LONGEST = 300.0  # seconds, on a machine that is busy with other things; 15 where it is not


def job_undisturbed(folder: str, cache: str, options: list[str]) -> None:
    os.environ["XDG_CACHE_HOME"] = cache
    args = elastic.parser().parse_args(["--folder", folder, *OPTIONS, *options])
    elastic.job(fsshard.init(), args)


def undisturbed(ranks: RankPool, cache: Path, folder: Path, options: list[str], world_size: int = 2) -> list[str]:
    """The losses of ranks that nobody disturbs."""
    ranks.run(job_undisturbed, world_size, str(folder), str(cache), options)
    return (folder / "losses.txt").read_text().splitlines()


@contextmanager
def torchrun(
    folder: Path,
    cache: Path,
    launcher: list[str],
    options: list[str],
    prefix: list[str] | None = None,
    interface: str = "lo",
) -> Iterator[subprocess.Popen[str]]:
    """A launcher with its ranks, all of which are ended in the end; its output goes to a file beside."""
    command = [*(prefix or []), sys.executable, "-m", "torch.distributed.run", "--monitor-interval", "0.1", *launcher]
    # Over several hosts a rank that starts again finds the addresses of the former lives' ranks in the launcher's store
    # (torch 2.13), cannot connect to them, and costs one more restart. A store of the ranks' own has another price: its
    # port is chosen long before a rank listens there, and others can take it meanwhile.
    own_store = {} if interface == "lo" else {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(cache),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": interface,
        **own_store,
    }
    with open(folder / f"log-{interface}", "w") as log:
        process = subprocess.Popen(
            [*command, str(EXAMPLE), "--folder", str(folder), *OPTIONS, *options],
            env=environment, stdout=log, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)  # which it hands on to its ranks
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def logs(folder: Path) -> str:
    """Return what the launchers and the ranks have written."""
    return "\n".join(file.read_text() for file in sorted(folder.glob("log-*")))


@pytest.mark.long
def test_a_rank_that_is_killed(ranks: RankPool, cache: Path, tmp_path: Path) -> None:
    losses = undisturbed(ranks, cache, tmp_path / "undisturbed", FEW)
    assert len(losses) == len(set(losses)) == 20
    launcher = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    with torchrun(tmp_path, cache, launcher, [*FEW, "--kill", "1:8"]) as process:
        assert process.wait(LONGEST) == 0, logs(tmp_path)
    assert (tmp_path / "losses.txt").read_text().splitlines() == losses
    assert "goes on from step-00000" in logs(tmp_path), "from a checkpoint, not from the beginning"
