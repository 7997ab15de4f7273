"""The order of plans over two nodes with a slow link, by predicted time beside the order by the clock.

    python benchmarks/nodes.py [--ranks 2 4] [--mbit 50] [--rounds 3]

The nodes are two network namespaces of this machine; ``tc`` limits the cable between them (root is needed). The same
plans of one model train in turns on two and on four ranks a node. Predicted is by the constants that
``fsshard doctor`` would measure, with the link's rate, and with each processor shared by its ranks. The last
lines say in how many pairs of plans the faster one was predicted, of all, and of those that differ by a tenth or more.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fsshard
from benchmarks.pairs import Step
from benchmarks.plan_order import Blocks, blocks, name_of, samples, square
from fsshard.launching.pool import RankPool
from fsshard.simulation.estimating import estimate_of, job_of
from fsshard.simulation.machine import Machine
from fsshard.simulation.measuring import measured_machine
from fsshard.simulation.worker import Simulator, run_job
from tests.examples.two_hosts import Hosts, run

NODES = 2
AGREES = 0.9
"""The least share of pairs in the right order."""
APART = 1.1
LONGEST = 1200
"""Seconds that the ranks may take."""


def plans(ranks: int) -> list[dict[str, Any]]:
    """Return the settings of every plan; ``mesh`` is (replicas, shards)."""
    hybrid = {"mesh": (NODES, ranks // NODES)}
    units: dict[str, Any] = {"auto_wrap_policy": {"Sequential"}}
    found: list[dict[str, Any]] = [{"backend": name} for name in ("ddp", "fairscale")]
    for mesh in ({}, hybrid):
        found.append({"backend": "fsdp", **units, **mesh})
        found.append({"backend": "fsdp2", "auto_wrap_policy": None, **mesh})
        found.append({"backend": "fsdp2", **units, **mesh})
        found.append({"backend": "fsdp2", **units, "reshard_after_forward": False, **mesh})
        found.append({"backend": "fsdp2", **units, "activation_checkpointing": {"Sequential"}, **mesh})
    return found


def train(file: str, rounds: int) -> None:
    """Train every plan on this rank, and write the least seconds of a step by the clock."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    ctx = fsshard.init(process_group_backend="gloo", device="cpu")
    seconds = []
    for settings in plans(ctx.world_size):
        step = _step_of(settings, ctx.rank)
        times = []
        for number in range(rounds + 1):
            dist.barrier()
            start = time.perf_counter()
            step(number)
            times.append(time.perf_counter() - start)
        # The first step makes the optimizer's state.
        seconds.append(min(times[1:]))
    if ctx.rank == 0:
        Path(file).write_text(json.dumps(seconds))


def _step_of(settings: dict[str, Any], rank: int) -> Step:
    settings = dict(settings)
    mesh = settings.pop("mesh", None)
    if mesh is not None:
        settings["device_mesh"] = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = fsshard.wrap(Blocks(), **settings)
    optimizer = fsshard.build_optimizer(model, torch.optim.AdamW, lr=1e-4)
    batch = samples(rank, 1, 0)

    def step(number: int) -> None:
        square(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measured(per_node: int, mbit: int, rounds: int) -> list[float]:
    """Start the ranks on both nodes; return the seconds of each plan."""
    with ExitStack() as until_done, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        hosts = Hosts(until_done, folder)
        for host in range(NODES):
            limit = ["tc", "qdisc", "add", "dev", f"cable{host}", "root", "tbf", "rate", f"{mbit}mbit"]
            run([*hosts.inside(host), *limit, "burst", "256kb", "limit", "20mb"])
        processes = [_launched(hosts, host, per_node, folder, rounds) for host in range(NODES)]
        for process in processes:
            if process.wait(LONGEST):
                raise RuntimeError((folder / "log-0").read_text())
        seconds: list[float] = json.loads((folder / "seconds.json").read_text())
        return seconds


def _launched(hosts: Hosts, host: int, per_node: int, folder: Path, rounds: int) -> subprocess.Popen[bytes]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(NODES), "--node-rank", str(host)]
    launcher += ["--nproc-per-node", str(per_node), "--master-addr", hosts.ADDRESSES[0], "--master-port", "29500"]
    script = [__file__, "--train", str(folder / "seconds.json"), "--rounds", str(rounds)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": f"cable{host}"}
    log = (folder / f"log-{host}").open("wb")
    return subprocess.Popen([*hosts.inside(host), *launcher, *script], env=environment, stdout=log, stderr=log)


def predicted(machine: Machine, per_node: int, mbit: int) -> Iterator[float]:
    """Yield the seconds of each plan by the clock, where ranks share the cores."""
    ranks = NODES * per_node
    share = max(1.0, ranks / (os.cpu_count() or 1))
    nodes = replace(
        machine,
        flops={dtype: speed / share for dtype, speed in machine.flops.items()},
        written=machine.written / share,
        operator=machine.operator * share,
        sent=machine.sent / share,
        collective=machine.collective * share,
        per_node=per_node,
        between=mbit * 1e6 / 8 / per_node,
    )
    more: dict[str, Any] = {"source": blocks(), "changes": {}, "device": "cpu", "cpu_offload": False, "real": False}
    with Simulator("nodes", quiet=True) as simulator:
        for plan in plans(ranks):
            settings = dict(plan)
            mesh = settings.pop("mesh", None)
            job = job_of(settings.pop("backend"), ranks, mesh, settings=settings, **more)
            yield estimate_of(ranks, job, simulator.ask(run_job, job), nodes).seconds


def in_order(first: list[float], second: list[float], apart: float) -> tuple[int, int]:
    """Return how many pairs are in the same order in both, and how many there are that differ so much in ``second``."""
    right = 0
    pairs = 0
    for (a, x), (b, y) in itertools.combinations(zip(first, second, strict=True), 2):
        if max(x, y) >= apart * min(x, y):
            pairs += 1
            right += (a < b) == (x < y)
    return right, pairs


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="ranks of a node")
    parser.add_argument("--mbit", type=int, default=50, help="rate of the cable, one way")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.rounds)
        return 0
    warnings.filterwarnings("ignore")
    with RankPool() as pool:
        machine = pool.run(measured_machine, 2, "cpu", timeout=600)[0]
    print(f"a cable of {options.mbit} Mbit/s; {machine}", end="\n\n", flush=True)
    agrees = True
    for per_node in options.ranks:
        ranks = NODES * per_node
        told = list(predicted(machine, per_node, options.mbit))
        try:
            seconds = measured(per_node, options.mbit, options.rounds)
        except PermissionError as error:
            print(f"left out, for want of network namespaces: {error}")
            return 0
        print(f"{NODES} nodes of {per_node} ranks\n\n| plan | predicted ms | measured ms |\n|---|---|---|")
        for plan, guess, real in sorted(zip(plans(ranks), told, seconds, strict=True), key=lambda row: row[2]):
            print(f"| {name_of(plan)} | {1e3 * guess:.0f} | {1e3 * real:.0f} |")
        right, pairs = in_order(told, seconds, 1.0)
        clear, apart = in_order(told, seconds, APART)
        print(
            f"\nin order: {right} of {pairs} pairs; of those a tenth apart {clear} of {apart}", end="\n\n", flush=True
        )
        agrees = agrees and clear >= AGREES * apart
    print(f"at least {AGREES} of the pairs that are a tenth apart: {'yes' if agrees else 'NO'}")
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
