"""The elastic example over two hosts: one host's ranks are killed, later the cable is cut, and the losses are the same.

    python -m pytest tests/examples/two_hosts.py

The hosts are two network namespaces of this machine. The test takes a minute or two, since a collective has to give up
and every life imports its libraries anew, and so it is not among those that ``pytest`` collects by itself.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from fsshard.launching.pool import RankPool
from tests.examples.test_elastic import LONGEST, logs, torchrun, undisturbed

MANY = ["--steps", "60"]
FAILED = "failed (exitcode:"  # what torchrun says of a rank


class Hosts:
    """Two network namespaces, joined by a cable. They vanish with the processes that hold them.

    Raises:
        PermissionError: no right to make them.
    """

    ADDRESSES = ("10.213.7.1", "10.213.7.2")

    def __init__(self, until: ExitStack, folder: Path) -> None:
        if not shutil.which("unshare") or not shutil.which("nsenter") or not shutil.which("ip"):
            raise PermissionError("unshare, nsenter or ip is not installed")
        # c10d (torch 2.13) looks up the name of who connects, and would wait ten seconds for a server out of reach;
        # nobody serves names here, and that is heard at once.
        (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")
        self.holders = [self._hold(until, folder / "resolv.conf") for _ in self.ADDRESSES]
        first, second = (holder.pid for holder in self.holders)
        run(
            ["ip", "link", "add", "cable0", "netns", str(first), "type", "veth", "peer", "cable1", "netns", str(second)]
        )
        for host, address in enumerate(self.ADDRESSES):
            run([*self.inside(host), "ip", "addr", "add", f"{address}/24", "dev", f"cable{host}"])
            run([*self.inside(host), "ip", "link", "set", "lo", "up"])
            run([*self.inside(host), "ip", "link", "set", f"cable{host}", "up"])

    def _hold(self, until: ExitStack, names: Path) -> subprocess.Popen[str]:
        """A process in namespaces of its own, until its input ends."""
        shell = [
            "unshare",
            "--net",
            "--mount",
            "sh",
            "-c",
            f"mount --bind '{names}' /etc/resolv.conf && echo ready; read _",
        ]
        holder = subprocess.Popen(
            shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        until.enter_context(holder)
        if not holder.stdout or holder.stdout.readline() != "ready\n":
            raise PermissionError(holder.stderr.read() if holder.stderr else "")
        return holder

    def inside(self, host: int) -> list[str]:
        """Return the words to put before a command."""
        return ["nsenter", "--net", "--mount", "-t", str(self.holders[host].pid), "--"]

    def namespaces(self, host: int) -> list[str]:
        """The files of its network and of what is mounted there."""
        return [f"/proc/{self.holders[host].pid}/ns/{kind}" for kind in ("net", "mnt")]

    def link(self, state: str) -> None:
        """``"down"`` or ``"up"``; nothing is told to either end of a connection."""
        run([*self.inside(1), "ip", "link", "set", "cable1", state])


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise PermissionError(f"{' '.join(command)}: {done.stderr}")


@contextmanager
def job_over(
    hosts: Hosts, folder: Path, cache: Path, options: list[str], per_host: int = 1
) -> Iterator[list[subprocess.Popen[str]]]:
    """A launcher on each host, with so many ranks each; the first one keeps the rendezvous."""
    conf = "join_timeout=120,keep_alive_interval=1,keep_alive_max_attempt=60,read_timeout=60"
    with ExitStack() as until_done:
        found = []
        for host in range(len(hosts.ADDRESSES)):
            launcher = ["--nnodes", "2", "--nproc-per-node", str(per_host), "--max-restarts", "5", "--rdzv-id", "test"]
            launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts.ADDRESSES[0]}:29400"]
            launcher += ["--rdzv-conf", f"{conf},is_host={int(host == 0)}", "--local-addr", hosts.ADDRESSES[host]]
            context = torchrun(folder, cache, launcher, options, hosts.inside(host), f"cable{host}")
            found.append(until_done.enter_context(context))
        yield found


def test_two_hosts_and_a_cable(ranks: RankPool, cache: Path, tmp_path: Path) -> None:
    """All ranks of one host are killed; later the cable between them is out, for longer than a collective waits."""
    losses = undisturbed(ranks, cache, tmp_path / "undisturbed", MANY)
    with ExitStack() as until_done:
        try:
            hosts = Hosts(until_done, tmp_path)
        except PermissionError as error:
            pytest.skip(f"no right to make network namespaces here: {error}")
        options = [*MANY, "--kill", "1:7", "--timeout", "8"]
        with job_over(hosts, tmp_path, cache, options) as processes:
            until(processes, tmp_path, lambda: (tmp_path / "step-000012").exists())
            told = logs(tmp_path).count(FAILED)
            hosts.link("down")
            until(processes, tmp_path, lambda: logs(tmp_path).count(FAILED) > told)  # a collective has given up
            hosts.link("up")
            for process in processes:
                assert process.wait(LONGEST) == 0, logs(tmp_path)
    assert (tmp_path / "losses.txt").read_text().splitlines() == losses
    assert logs(tmp_path).count("goes on from step-0000") >= 2, "after the kill, and after the cut"


def test_two_hosts_of_four_ranks(ranks: RankPool, cache: Path, tmp_path: Path) -> None:
    """One of eight ranks is killed: all of both hosts start again from a checkpoint, and the losses are the same."""
    few = ["--steps", "12", "--batch-size", "16"]
    losses = undisturbed(ranks, cache, tmp_path / "undisturbed", few, world_size=8)
    with ExitStack() as until_done:
        try:
            hosts = Hosts(until_done, tmp_path)
        except PermissionError as error:
            pytest.skip(f"no right to make network namespaces here: {error}")
        with job_over(hosts, tmp_path, cache, [*few, "--kill", "5:7"], per_host=4) as processes:
            for process in processes:
                assert process.wait(LONGEST) == 0, logs(tmp_path)
    assert (tmp_path / "losses.txt").read_text().splitlines() == losses and len(losses) == 12
    assert "goes on from step-000004" in logs(tmp_path), "from a checkpoint, not from the beginning"


def until(processes: list[subprocess.Popen[str]], folder: Path, come: Callable[[], bool]) -> None:
    """Wait for what neither launcher tells but in files."""
    deadline = time.monotonic() + LONGEST
    while not come():
        running = all(process.poll() is None for process in processes)
        assert running and time.monotonic() < deadline, logs(folder)
        with suppress(subprocess.TimeoutExpired):
            processes[0].wait(0.02)
