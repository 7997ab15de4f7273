"""Measures the cost before the first step: fsshard's import beside torch's, and wrapping 250 to 1,000 layers.

    python benchmarks/start.py [--rounds 15] [--nprocs 2] [--layers 250 500 1000] [--engines ddp fsdp fsdp2 fairscale]
        [--parameters 1000 3000 10000] [--profile N]

Imports are measured in fresh processes that import torch, then fsshard, then ask for launch, wrap and build_optimizer,
whose rooms are imported at that moment: the CPU time after all over that after torch, the median over rounds. Bytecode
is cached, as it is for installed packages. Once as it is, once with Python's garbage collector off: after ``import
torch`` (2.13, Python 3.11) a full collection is due within some 10,000 allocations, which takes longer than all of
fsshard's own import and hits whatever comes next.

Wrapping is measured in ranks, with the optimizer, by rank 0's CPU time: by hand against the engine itself, and through
fsshard; the least of repetitions that go through all sizes and both sides in turn: all do the same work, and what other
programs of the machine add is never negative. Every layer has a real and a complex
weight and is a unit. Linear in layers means a ratio of 2 for twice as many. The collector is off here too: a full
collection falls into the time of some sizes and not of others.

Before that plan() with recomputation, wrap(), save() and load() of a trained model of 500 to 5,000 modules, with two
parameters each, on one process, in CPU time, all sizes in turn: each at most linear, so that the microseconds per
parameter stay about the same. Beside load() stands torch.load() of the same state, which goes into no model.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from benchmarks.overhead import by_hand
from benchmarks.pairs import interval, profiled

ROOT = Path(__file__).resolve().parent.parent

IMPORTS = """
import gc, json, sys, time
if "off" in sys.argv:
    gc.disable()
seen = [time.process_time()]
import torch
seen.append(time.process_time())
import fsshard
seen.append(time.process_time())
fsshard.launch, fsshard.wrap, fsshard.build_optimizer
seen.append(time.process_time())
print(json.dumps(seen))
"""


def import_times(rounds: int) -> dict[str, list[list[float]]]:
    """With the collector ``"on"`` and ``"off"``, per round: CPU seconds at the start, after torch, fsshard, wrap."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        found: dict[str, list[list[float]]] = {"on": [], "off": []}
        for number in range(rounds + 1):
            for collector, times in found.items():
                done = subprocess.run(
                    [sys.executable, "-c", IMPORTS, collector],
                    capture_output=True,
                    text=True,
                    check=True,
                    env=environment,
                )
                if number:  # the first one compiles
                    times.append(json.loads(done.stdout))
    return found


def report_imports(rounds: int) -> None:
    """A table with a row for each state of the collector."""
    head = ["collector", "processes", "import torch, ms of CPU time", "fsshard on top, ms", "both / torch"]
    head += ["wrap on top, ms", "all / torch"]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for collector, times in import_times(rounds).items():
        steps = [1e3 * statistics.median(each[n + 1] - each[n] for each in times) for n in range(3)]
        both, whole = (interval([(each[n] - each[0]) / (each[1] - each[0]) for each in times]) for n in (2, 3))
        cells = [collector, str(rounds), f"{steps[0]:.0f}", f"{steps[1]:.0f}", str(both), f"{steps[2]:.0f}", str(whole)]
        print("| " + " | ".join(cells) + " |", flush=True)
    print()


class Layer(nn.Module):
    """A real and a complex weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.eye(8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x).to(torch.complex64) @ self.weight).real


def by_fsshard(model: nn.Module, engine: str) -> Any:
    wrapped = fsshard.wrap(model, backend=engine, auto_wrap_policy={Layer})
    return wrapped, fsshard.build_optimizer(wrapped, torch.optim.Adam, lr=1e-3)


def by_torch(model: nn.Module, engine: str) -> Any:
    return by_hand(model, engine, tuple(map(str, range(len(list(model.children()))))), fast=False)


def wrap_time(wrap: Callable[[nn.Module, str], Any], engine: str, layers: int) -> float:
    """Seconds of CPU time. Collective."""
    model = nn.Sequential(*(Layer() for _ in range(layers)))
    gc.collect()
    gc.disable()
    dist.barrier()
    start = time.process_time()
    held = wrap(model, engine)
    taken = time.process_time() - start
    gc.enable()
    del held
    return taken


def work(ctx: fsshard.Context, args: argparse.Namespace) -> list[str]:
    """A row per engine and size, printed by rank 0; rows of profiles at the largest size."""
    sides, profiles = (by_torch, by_fsshard), list[str]()
    for engine in args.engines:
        if (engine == "none") != (ctx.world_size == 1):
            continue
        found: dict[tuple[Any, int], list[float]] = {(side, layers): [] for layers in args.layers for side in sides}
        for side in sides:
            wrap_time(side, engine, 2)  # imports
        for _ in range(args.repeat):
            for side, layers in found:
                found[side, layers].append(wrap_time(side, engine, layers))
        if ctx.rank == 0:
            report_wraps(engine, [[min(found[side, layers]) for side in sides] for layers in args.layers], args)
        if args.profile:
            models = [nn.Sequential(*(Layer() for _ in range(args.layers[-1]))) for _ in sides]
            steps = [functools.partial(_wrap_one, side, models, engine) for side in sides]
            gc.disable()
            profiles += [
                "",
                f"{args.layers[-1]} layers under {engine}, by hand and fsshard: ms under cProfile",
            ]
            profiles += profiled(steps, 1, args.profile)
            gc.enable()
    return profiles


def _wrap_one(side: Callable[[nn.Module, str], Any], models: list[nn.Module], engine: str, _: int) -> None:
    side(models.pop(), engine)


def report_wraps(engine: str, times: list[list[float]], args: argparse.Namespace) -> None:
    """A row per size: milliseconds of both sides, and how often those of the size before."""
    before: list[float] | None = None
    for layers, (raw, ours) in zip(args.layers, times, strict=True):
        growth = [f"{now / then:.2f}" for now, then in zip((raw, ours), before, strict=True)] if before else ["", ""]
        cells = [engine, str(layers), f"{1e3 * raw:.0f}", f"{1e3 * ours:.0f}", f"{ours / raw:.2f}", *growth]
        print("| " + " | ".join(cells) + " |", flush=True)
        before = [raw, ours]


def stages(ctx: fsshard.Context, args: argparse.Namespace) -> None:
    """A row per number of parameters: microseconds of CPU time per parameter for each stage."""
    stage_times(8)  # imports
    rounds = [{parameters: stage_times(parameters) for parameters in args.parameters} for _ in range(args.repeat)]
    for parameters in args.parameters:
        least = [min(column) for column in zip(*(each[parameters] for each in rounds), strict=True)]
        cells = [f"{1e6 * seconds / parameters:.1f}" for seconds in least] + [f"{least[-2] / least[-1]:.2f}"]
        print("| " + " | ".join([str(parameters), *cells]) + " |", flush=True)


def stage_times(parameters: int) -> list[float]:
    """Seconds of CPU time of plan, wrap, save and load, and of torch.load of the same state."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(parameters // 2)))
    taken: list[float] = []

    def timed(work: Callable[[], Any]) -> Any:
        gc.collect()
        gc.disable()
        start = time.process_time()
        result = work()
        taken.append(time.process_time() - start)
        gc.enable()
        return result

    timed(lambda: fsshard.plan(model, auto_wrap_policy={nn.Linear}, activation_checkpointing={nn.Linear}))
    wrapped = timed(lambda: fsshard.wrap(model, backend="none", auto_wrap_policy={nn.Linear}))
    optimizer = fsshard.build_optimizer(wrapped, torch.optim.Adam, lr=1e-3)
    sum(parameter.square().sum() for parameter in model.parameters()).backward()
    optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        timed(lambda: fsshard.save(Path(folder, "last"), wrapped, optimizer))
        timed(lambda: fsshard.load(Path(folder, "last"), wrapped, optimizer))
        torch.save([wrapped.state_dict(), optimizer.state_dict()], Path(folder, "state.pt"))
        timed(lambda: torch.load(Path(folder, "state.pt")))
    return taken


def main() -> None:
    """Imports, then wraps on one process and on several."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="processes that import")
    parser.add_argument("--nprocs", type=int, default=2)
    parser.add_argument("--layers", type=int, nargs="+", default=[250, 500, 1000])
    parser.add_argument("--repeat", type=int, default=5, help="wraps of each size")
    engines = ["none", "ddp", "fsdp", "fsdp2", "fairscale"]
    parser.add_argument("--engines", nargs="*", choices=engines, default=engines)
    parser.add_argument("--parameters", type=int, nargs="*", default=[1000, 3000, 10000])
    parser.add_argument(
        "--profile", type=int, default=0, metavar="N", help="list N functions that take more time with ours"
    )
    args = parser.parse_args()
    if args.rounds:
        report_imports(args.rounds)
    if args.parameters:
        head = [
            "parameters",
            "plan, us per parameter",
            "wrap, us",
            "save, us",
            "load, us",
            "torch.load, us",
            "load / torch.load",
        ]
        print("| " + " | ".join(head) + " |\n|" + "---|" * len(head), flush=True)
        fsshard.launch(stages, 1, (args,), threads=1, timeout=600)
        print()
    if not args.engines:
        return
    head = ["engine", "layers", "by hand, ms of CPU time", "fsshard, ms", "ratio", "by hand / size before", "fsshard"]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head), flush=True)
    profiles: list[str] = []
    for nprocs in (1, args.nprocs):
        if any((engine == "none") == (nprocs == 1) for engine in args.engines):
            profiles += fsshard.launch(work, nprocs, (args,), threads=1, timeout=600)
    if profiles:
        print("\n".join(profiles))


if __name__ == "__main__":
    main()
