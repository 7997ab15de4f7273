"""What fsshard costs before the first step: its import beside torch's, and wrapping models of 250 to 1,000 layers.

    python benchmarks/start.py [--rounds 15] [--nprocs 2] [--layers 250 500 1000] [--engines ddp fsdp fsdp2 fairscale]

Imports are measured in fresh processes that import torch and then fsshard: the CPU time after both over that after
torch, the median over rounds. Bytecode is cached, as it is for installed packages.

Wrapping is measured in ranks, as rank 0's CPU time and wall clock, medians over repetitions that go through all sizes
in turn. Every layer has a real and a complex weight and is a unit. Linear in layers means a ratio of 2 for twice as
many.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard

ROOT = Path(__file__).resolve().parent.parent

IMPORTS = """
import json, time
seen = [time.process_time()]
import torch
seen.append(time.process_time())
import fsshard
[getattr(fsshard, name) for name in fsshard.__all__]
seen.append(time.process_time())
print(json.dumps(seen))
"""


def import_times(rounds: int) -> list[list[float]]:
    """Per round the CPU seconds at the start, after torch, and after fsshard with all its public names."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        found = []
        for number in range(rounds + 1):
            done = subprocess.run(
                [sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True, env=environment
            )
            if number:  # the first one compiles
                found.append(json.loads(done.stdout))
    return found


def report_imports(rounds: int) -> None:
    """Two rows."""
    times = import_times(rounds)
    print(f"import torch: {statistics.median(mid - start for start, mid, _ in times):.2f} s of CPU time")
    ratios = [(end - start) / (mid - start) for start, mid, end in times]
    spent = statistics.median(end - mid for _, mid, end in times)
    low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
    print(f"import fsshard: {1e3 * spent:.0f} ms more, ratio {middle:.3f} [{low:.3f}, {high:.3f}], {rounds} processes")


class Layer(nn.Module):
    """A real and a complex weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.eye(8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x).to(torch.complex64) @ self.weight).real


def wrap_time(engine: str, layers: int) -> tuple[float, float]:
    """(CPU, wall-clock) seconds of wrapping. Collective."""
    model = nn.Sequential(*(Layer() for _ in range(layers)))
    gc.collect()
    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    wrapped = fsshard.wrap(model, backend=engine, auto_wrap_policy={Layer})
    if engine == "fairscale":  # which shards when the optimizer is built
        fsshard.build_optimizer(wrapped, torch.optim.Adam, lr=1e-3)
    return time.process_time() - cpu, time.perf_counter() - wall


def work(ctx: fsshard.Context, args: argparse.Namespace) -> None:
    """A row per engine, printed by rank 0."""
    for engine in args.engines:
        if (engine == "none") != (ctx.world_size == 1):
            continue
        wrap_time(engine, 2)  # imports
        found: dict[int, list[tuple[float, float]]] = {layers: [] for layers in args.layers}
        for _ in range(args.repeat):
            for layers in args.layers:
                found[layers].append(wrap_time(engine, layers))
        cpu = [statistics.median(time[0] for time in found[layers]) for layers in args.layers]
        wall = [statistics.median(time[1] for time in found[layers]) for layers in args.layers]
        ratios = [f"{after / before:.2f}" for before, after in itertools.pairwise(cpu)]
        if ctx.rank == 0:
            shown = "  ".join(f"{1e3 * a:>7.0f} ({1e3 * b:.0f})" for a, b in zip(cpu, wall, strict=True))
            print(f"{engine:<10} {shown}   ratios {', '.join(ratios)}", flush=True)


def main() -> None:
    """Imports, then wraps on one process and on several."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="processes that import")
    parser.add_argument("--nprocs", type=int, default=2)
    parser.add_argument("--layers", type=int, nargs="+", default=[250, 500, 1000])
    parser.add_argument("--repeat", type=int, default=3, help="wraps of each size")
    engines = ["none", "ddp", "fsdp", "fsdp2", "fairscale"]
    parser.add_argument("--engines", nargs="+", choices=engines, default=engines)
    args = parser.parse_args()
    if args.rounds:
        report_imports(args.rounds)
    sizes = ", ".join(map(str, args.layers))
    print(f"\nwrapping {sizes} layers: ms of CPU time (wall clock), and ratios of CPU time from size to size")
    for nprocs in (1, args.nprocs):
        if any((engine == "none") == (nprocs == 1) for engine in args.engines):
            fsshard.launch(work, nprocs, (args,), threads=1)


if __name__ == "__main__":
    main()
