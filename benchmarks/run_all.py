"""Run all benchmarks, one after the other, and write what they print to docs/maintainers/benchmarks.md.

    python benchmarks/run_all.py [--only overhead peers ...] [--page docs/maintainers/benchmarks.md] [--list]

``make bench`` does it with everything installed that the benchmarks compare with. About 36 minutes on two idle cores;
nothing else should run meanwhile. With ``--only`` the other sections of the page stay as they are, which takes the
versions that they were measured with; each names its CPU. The exit code is 1 if a benchmark fails or misses its target.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import goals, page

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 15.0
"""Minutes after which a benchmark is stopped."""


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One command and its section.

    Attributes:
        name: for ``--only``.
        title: the section's.
        command: arguments of python, from the root of the repository.
        shows: what the table says.
        target: what it should say, or nothing.
        minutes: about how long it takes on two idle cores.
    """

    name: str
    title: str
    command: str
    shows: str
    target: str = ""
    minutes: float = 1.0


BENCHMARKS: tuple[Benchmark, ...] = (
    Benchmark(
        name="overhead",
        title="Step time of the wrapper",
        command="benchmarks/overhead.py --models tfno48 t5 --rounds 14 --starts 4",
        shows="fsshard with its speed-ups switched off, against the same torch API written by hand.",
        target="at most 1.03 for every engine",
        minutes=5,
    ),
    Benchmark(
        name="speed",
        title="Step time with the speed-ups",
        command="benchmarks/overhead.py --fast --models tfno gpt-short gpt --engines ddp fsdp2 --rounds 7 --starts 2 "
        "--profile 6",
        shows="fsshard with its speed-ups, against the raw engines as they come, and the time of the same training on "
        "every rank by itself (`alone`), which is what no communication at all would reach. `gpt` has 18 million "
        "parameters and 8 x 128 tokens per step, `gpt-short` 4 x 64: with fewer tokens, more of the step is "
        "communication.",
        target="ddp at most 1.00; fsdp2 at most 0.65 on tfno and 0.75 on gpt-short (`alone` is above that on gpt)",
        minutes=7,
    ),
    Benchmark(
        name="fixed",
        title="Fixed cost of a step",
        command="benchmarks/overhead.py --fast --models fixed --engines ddp fsdp2 fsdp fairscale --rounds 10 "
        "--profile 6",
        shows="1,000 parameters of at most eight numbers in one unit: what a step costs for each parameter, whatever "
        "its size. Most of it is the loop of torch's Adam over the parameters, on both sides.",
        target="CPU time of ddp at most 0.95, fsdp2 0.50, fsdp and fairscale 1.05",
        minutes=0.5,
    ),
    Benchmark(
        name="whole-matrices",
        title="Muon over whole matrices",
        command="benchmarks/whole_matrices.py",
        shows="The step of Muon by owners (`whole=True`), against torch's Muon on DTensors and against AdamW.",
        target="two collectives, the bytes of the weights on two ranks, half the CPU time of torch's Muon",
        minutes=0.5,
    ),
    Benchmark(
        name="peers",
        title="Step time compared with Accelerate and Lightning Fabric",
        command="benchmarks/peers.py --models tfno gpt-short --rounds 15 --profile 8",
        shows="What these can run on CPU ranks; below the table, what they cannot.",
        target="below 1.00",
        minutes=1.5,
    ),
    Benchmark(
        name="fsdp2-over-ddp",
        title="FSDP2 compared with DDP on small models",
        command="benchmarks/fsdp2_over_ddp.py --rounds 25",
        shows="The price of sharding a model that would fit without it, and how much of that can be saved.",
        minutes=1,
    ),
    Benchmark(
        name="complex",
        title="Flattened complex weights",
        command="benchmarks/complex_cost.py",
        shows="DDP over pairs of reals, compared with DDP over the native complex weights.",
        target="at most 1.01",
        minutes=1.5,
    ),
    Benchmark(
        name="start",
        title="Import and wrap time",
        command="benchmarks/start.py --rounds 9 --profile 10",
        shows="Importing fsshard, compared with torch alone, stages by the number of parameters, and wrapping models "
        "of up to 1,000 layers, each a unit. Where the engine's own wrapping is short, as DDP's is, ours is several "
        "times as long: each unit is planned, named and checked, whatever the engine.",
        target="import at most 1.05; twice the layers take twice as long; as many microseconds per parameter",
        minutes=2,
    ),
    Benchmark(
        name="scale",
        title="Checkpoints of many ranks",
        command="benchmarks/scale.py",
        shows="What a save and a load of 1,024 parameters under Adam need on up to 1,024 ranks that are made up; with "
        "--dcp, ten minutes, the planner of torch.distributed.checkpoint beside it.",
        target="plan and index in under 10 s and 200 MiB, an index below 5 MB",
        minutes=0.5,
    ),
    Benchmark(
        name="domain",
        title="Fields that are split over ranks",
        command="benchmarks/domain.py --rounds 20 --profile 8",
        shows="Activations kept and bytes sent by a rank, as counts; the time of a step on 1 x 2 ranks (data x domain) "
        "compared with 2 x 1; a large 3-D operator, simulated.",
        target="kept, times ranks, at most 1.05; sent at most 1.05 of the formula; time at most 1.25",
        minutes=0.5,
    ),
    Benchmark(
        name="fronts",
        title="Lightning, Accelerate and Hugging Face's Trainer",
        command="benchmarks/fronts.py --rounds 20 --profile 8",
        shows="A step through each front over fsshard, compared with the same front over its own DDP.",
        target="with ddp at most 1.05",
        minutes=1,
    ),
    Benchmark(
        name="meshes",
        title="Models that were split before",
        command="benchmarks/meshes.py --rounds 40",
        shows="Tensor parallelism by torch's own DTensors under FSDP2, and parameters that ranks share, each against "
        "the same written by hand.",
        target="at most 1.05",
        minutes=0.5,
    ),
    Benchmark(
        name="wire",
        title="Bytes that FSDP2 sends over gloo",
        command="benchmarks/wire_bytes.py",
        shows="As the operating system counts them, with gloo's collectives and with ours.",
        target="at most 1.05 of the bound",
        minutes=0.5,
    ),
    Benchmark(
        name="checkpoint",
        title="Checkpoints",
        command="benchmarks/checkpoint.py",
        shows="Saving and loading, compared with torch.distributed.checkpoint and torch.save, and how long an "
        "asynchronous save holds up training. A dozen runs of this command on several machines gave 0.58 to 0.71 for "
        "save / DCP, 0.44 to 0.52 for load elsewhere / DCP and 0.13 to 0.23 for async blocks / blocking, in which "
        "memory is compared with the disk.",
        target="in the last lines",
        minutes=1.5,
    ),
    Benchmark(
        name="tutorial-memory",
        title="The memory table of the FSDP tutorial",
        command="benchmarks/tfno_memory.py",
        shows="The tutorial's TFNO with 469 million numbers in its weights, simulated for every engine at 4 ranks. The "
        "tutorial says GB and means GiB (6.554 GiB are 7.037 GB); how many samples a rank had when it measured it does "
        "not say, and up to 32 they do not matter: the peaks lie where no activations are.",
        minutes=1,
    ),
    Benchmark(
        name="tuned",
        title="The tuned plan and the usual ones",
        command="benchmarks/tuned.py",
        shows="What `fsshard.tune` finds for the tutorial's TFNO and for T5-base at 4 ranks, by simulation.",
        target="no plan needs less than the tuned one; TFNO at most 0.33 of ddp in the table above",
        minutes=2.5,
    ),
    Benchmark(
        name="estimates",
        title="Estimates and real runs",
        command="benchmarks/estimate_vs_real.py",
        shows="Memory and traffic of a step as `fsshard estimate` says, and as traced in real ranks.",
        target="peak within 3% or inside the interval, payloads within 1%",
        minutes=2.5,
    ),
    Benchmark(
        name="plan-order",
        title="The order of plans by predicted time",
        command="benchmarks/plan_order.py",
        shows="Two dozen plans of one model on two ranks: predicted time with constants measured on the same ranks, "
        "its five terms, and the CPU time of a step.",
        target="rank correlation at least 0.9",
        minutes=2,
    ),
    Benchmark(
        name="nodes",
        title="The order of plans over nodes",
        command="benchmarks/nodes.py --ranks 2",
        shows="Plans of one model on two network namespaces with a cable of 50 Mbit/s between them (root): predicted "
        "time by what is sent over which link, and the clock's.",
        target="nine of ten pairs that are a tenth apart in the right order",
        minutes=3,
    ),
    Benchmark(
        name="darcy-seeds",
        title="Errors with weights sent in half the bytes",
        command="benchmarks/darcy_seeds.py",
        shows="Relative L2 errors of the demo's TFNO on Darcy flow from five seeds, in float32 and with "
        "`Precision(send=...)`.",
        target="changes within the standard deviation over seeds",
        minutes=2,
    ),
    Benchmark(
        name="eight-models",
        title="Eight models of others",
        command="benchmarks/eight_models.py --limit 1",
        shows="Plans that `fsshard.tune` finds for models that are not among the recipes, followed on two ranks; their "
        "peaks against live storages, counted by hand.",
        target="peak within 2% or inside the interval, nothing that is advised raises",
        minutes=4.5,
    ),
    Benchmark(
        name="activations",
        title="Activations kept for backward",
        command="benchmarks/activation_memory.py",
        shows="Bytes that a forward keeps for its backward, with and without activation checkpointing.",
        minutes=0.5,
    ),
    Benchmark(
        name="state-dict",
        title="Memory of a whole state dict",
        command="benchmarks/state_dict_memory.py",
        shows="The peak while it is assembled, against its bound.",
        target="one copy on rank 0, one unit on the others",
        minutes=0.5,
    ),
    Benchmark(
        name="fairscale",
        title="fsshard.compat compared with the real FairScale",
        command="benchmarks/fairscale_cost.py --rounds 25",
        shows="`fsshard.compat.fairscale` against FairScale 0.4.13.",
        target="in the column of bounds",
        minutes=1,
    ),
    Benchmark(
        name="compile",
        title="Compiled units with complex weights",
        command="benchmarks/compile.py --rounds 15 --models spectral tfno",
        shows="Graph breaks and step times under torch.compile, native and flattened.",
        minutes=1,
    ),
    Benchmark(
        name="trace",
        title="The cost of fsshard trace",
        command="benchmarks/trace_cost.py --rounds 4 --engines ddp fsdp2",
        shows="Steps of 20M parameters, recorded with weights at every tenth step, over those that are not.",
        target="at most 1.15 times the CPU time",
        minutes=1,
    ),
    Benchmark(
        name="pool",
        title="The pool of ranks",
        command="benchmarks/parity_pool.py",
        shows="20 parity tests on one pool, and with a pool for each.",
        target="at least 5 times less",
        minutes=1,
    ),
)


@dataclass(frozen=True)
class Result:
    """The outcome of a command.

    Attributes:
        output: what it printed.
        failure: why it counts as failed, or nothing.
        seconds: how long it took.
    """

    output: str
    failure: str
    seconds: float


def run(benchmark: Benchmark, root: Path = ROOT, limit: float = 60 * LIMIT) -> Result:
    """Run a benchmark, passing on what it prints while it runs."""
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, *shlex.split(benchmark.command)],
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,  # so that its ranks can be ended with it
        )
        late = threading.Event()
        timer = threading.Timer(limit, lambda: (late.set(), _end(process)))
        timer.start()
        lines = []
        try:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                print(f"    {line}", end="", flush=True)
            code = process.wait()
        finally:
            timer.cancel()
            _end(process)
        errors.seek(0)
        output, told = "".join(lines), errors.read()
    failure = f"stopped after {limit / 60:g} minutes" if late.is_set() else _failure(code, output, told)
    return Result(page.without_paths(output, root), page.without_paths(failure, root), time.monotonic() - start)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _failure(code: int, output: str, told: str) -> str:
    """The last line: of the traceback, else of what was printed."""
    if not code:
        return ""
    texts = (told, output) if "Traceback (most recent call last)" in told or not output.strip() else (output, told)
    lines = [line.strip() for text in texts for line in text.strip().splitlines()[-1:]]
    return f"exit code {code}" + (f": {lines[0]}" if lines else "")


def section(benchmark: Benchmark, result: Result, load: float) -> str:
    """A benchmark's part of the page."""
    lines = [benchmark.shows]
    if benchmark.target:
        lines.append(f"Target: {benchmark.target}.")
    taken = f"{result.seconds:.0f} s, load average before it {load:.1f}, {page.processor()}"
    lines.append(f"`python {benchmark.command}` ({date.today().isoformat()}, {taken})")
    if result.failure:
        lines.append(f"**failed**: `{result.failure}`")
    return page.section(benchmark.name, benchmark.title, lines, result.output)


def write(path: Path, text: str) -> None:
    """Replace the page as a whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text)
    os.replace(temporary, path)


def load_average() -> float:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")


def run_all(chosen: Sequence[Benchmark], every: Sequence[Benchmark], path: Path, root: Path = ROOT) -> int:
    """Run ``chosen`` and write the page after each: the new section, and what it had of the others.

    A page of another machine or other versions is begun anew, or left alone where only some are to run.

    Args:
        chosen: what runs.
        every: all benchmarks, in the page's order.
        path: the page.
        root: where the commands run.

    Returns:
        The exit code: 0, 1 if any failed, 2 if nothing ran.
    """
    start = page.head()
    kept: dict[str, str] = {}
    if path.exists():
        before, found = page.sections_of(path.read_text())
        if before.strip() == start.strip():
            kept = found
        elif len(chosen) < len(every):
            print(f"{path} was measured on another machine or with other versions: run all, or name another page")
            return 2
    failed = []
    for number, benchmark in enumerate(chosen, 1):
        print(f"[{number}/{len(chosen)}] {benchmark.name}, about {benchmark.minutes:g} min", flush=True)
        load = load_average()
        result = run(benchmark, root)
        if result.failure:
            failed.append(benchmark.name)
            print(f"    failed: {result.failure}", flush=True)
        kept[benchmark.name] = section(benchmark, result, load)
        shown = {goals.NAME: goals.section(kept, {each.name: each.title for each in every})}
        shown |= {each.name: kept[each.name] for each in every if each.name in kept}
        write(path, page.page(start, {name: text for name, text in shown.items() if text}))
    print(f"{path} written" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [benchmark.name for benchmark in BENCHMARKS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "maintainers" / "benchmarks.md")
    parser.add_argument("--list", action="store_true", help="show what would run, and run nothing")
    options = parser.parse_args(arguments)
    chosen = [benchmark for benchmark in BENCHMARKS if not options.only or benchmark.name in options.only]
    if options.list:
        for benchmark in chosen:
            print(f"{benchmark.name:<18} {benchmark.minutes:>4g} min  python {benchmark.command}")
        print(f"{'together':<18} {sum(benchmark.minutes for benchmark in chosen):>4g} min")
        return 0
    return run_all(chosen, BENCHMARKS, options.page)


if __name__ == "__main__":
    sys.exit(main())
