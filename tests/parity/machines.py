"""Engines agree to the last bit: under every code path of the math libraries that this CPU can be told to take.

    python -m tests.parity.machines                           # prints the table of this machine
    python -m tests.parity.machines --table docs/parity.md    # make machines

ATen, MKL and oneDNN choose their kernels by the CPU, once, when they are loaded; environment variables make them choose
as on a lesser one. So each setting has ranks of its own. Kernels then add in other orders, and each setting trains
other last digits; what must not change is that all engines train the same ones.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import itertools
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn

import fsshard.parity
from fsshard.errors import FsshardError, MissingExtra
from fsshard.launching.pool import RankPool
from fsshard.launching.pool_worker import environment_of
from fsshard.parity import golden
from fsshard.parity.environment import environment
from fsshard.parity.golden.recipes import uniform
from fsshard.parity.sketch import digest
from fsshard.recipes.recipe import Recipe
from tests.complex_params import training as complex_training
from tests.parity import matrix, page, test_bare
from tests.parity.trainings import RECIPES, TRAININGS
from tests.training_runs import DISTRIBUTED
from tests.zoo import COMPLEX, ZOO

# ---------------------------------------------------------------------------------------------------- the settings

AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
THREADS = (1, 2)
"""Per rank."""


class Setting(NamedTuple):
    """The code paths that libraries are told to take: variables of the environment, before torch is loaded.

    Without the flags of the CPU that it needs the kernels would be illegal instructions, or not be taken.
    """

    variables: Mapping[str, str]
    needs: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.variables.items()) or "none"


LOWEST = Setting(
    {
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "MKL_CBWR": "COMPATIBLE",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
    }
)
"""A CPU that has none of the newer instructions would do so; one that can do more is furthest from it."""
ONE_BY_ONE: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("ATEN_CPU_CAPABILITY", "default", ()),
    ("ATEN_CPU_CAPABILITY", "avx2", ("avx2", "fma")),
    ("ATEN_CPU_CAPABILITY", "avx512", AVX512),
    ("MKL_ENABLE_INSTRUCTIONS", "SSE4_2", ("sse4_2",)),
    ("MKL_ENABLE_INSTRUCTIONS", "AVX2", ("avx2",)),
    ("MKL_ENABLE_INSTRUCTIONS", "AVX512", AVX512),
    ("MKL_CBWR", "COMPATIBLE", ()),
    ("ONEDNN_MAX_CPU_ISA", "SSE41", ("sse4_1",)),
    ("ONEDNN_MAX_CPU_ISA", "AVX2", ("avx2",)),
    ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE", AVX512),
)
SETTINGS = (Setting({}), *(Setting({name: value}, needs) for name, value, needs in ONE_BY_ONE), LOWEST)


class Cpu(NamedTuple):
    """This machine's."""

    name: str
    flags: frozenset[str]

    def lacks(self, setting: Setting) -> list[str]:
        """What a setting needs and this CPU has not."""
        return [flag for flag in setting.needs if flag not in self.flags]


def this_cpu(path: str = "/proc/cpuinfo") -> Cpu:
    """Return its name and flags as Linux tells them; elsewhere no flags, so that no instruction is risked."""
    text = Path(path).read_text() if Path(path).exists() else ""
    (flags,) = re.findall(r"^flags\s*: (.*)$", text, re.MULTILINE)[:1] or [""]
    return Cpu(environment()["processor"], frozenset(flags.split()))


@contextlib.contextmanager
def ranks_under(setting: Setting) -> Iterator[RankPool]:
    """Two ranks whose libraries take a setting's code paths; no other process that starts meanwhile does."""
    with RankPool() as pool:
        # Two ranks with two threads each are more than many machines have cores; threads that spin then take minutes.
        with environment_of({"OMP_WAIT_POLICY": "PASSIVE", **setting.variables}):
            pool.run(with_threads, 2, 1, torch.get_num_threads)  # they start here
        yield pool


def with_threads(threads: int, job: Callable[..., Any], *args: Any) -> Any:
    """A job for the pool, whose ranks have one thread each unless they are told."""
    warnings.simplefilter("ignore")  # what these trainings warn of is other tests' matter
    torch.set_num_threads(threads)
    return job(*args)


# ----------------------------------------------------------------------------------------------- what a setting changes


def _functions(x: Tensor) -> list[Tensor]:
    return [x.exp(), x.tanh(), x.softmax(1)]


def _sums(x: Tensor) -> list[Tensor]:
    return [x.sum(), x.sum(1), x.var(0), nn.functional.layer_norm(x, x.shape[1:])]


def _factors(x: Tensor) -> tuple[Tensor, Tensor]:
    """A real and a complex matrix."""
    flat = x.flatten()
    return flat[: 67 * 129].view(67, 129), torch.view_as_complex(flat[: 67 * 129 * 2].view(67, 129, 2))


def _products(x: Tensor) -> list[Tensor]:
    real, numbers = _factors(x)
    return [real @ real.T, numbers @ numbers.T, torch.bmm(x[:7, :377].view(7, 13, 29), x[7:14, :319].view(7, 29, 11))]


def _ffts(x: Tensor) -> list[Tensor]:
    spectrum = torch.fft.rfft2(x[:5, :480].view(5, 24, 20))
    return [spectrum, torch.fft.irfft2(spectrum)]


def _convolutions(x: Tensor) -> list[Tensor]:
    """Of few channels, and of as many as fill a vector of AVX-512: oneDNN's kernels for these are others."""
    found = []
    for image, weight in (
        (x[0, :2312].view(2, 4, 17, 17), x[1, :288].view(8, 4, 3, 3)),
        (x[2, :4096].view(4, 16, 8, 8), x[3, :2304].view(16, 16, 3, 3)),
    ):
        given = [part.clone().requires_grad_() for part in (image, weight)]
        out = nn.functional.conv2d(given[0], given[1], padding=1)
        found += [out, *torch.autograd.grad(out.square().sum(), given)]
    return found


KERNELS: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "functions": _functions,
    "sums": _sums,
    "products": _products,
    "FFTs": _ffts,
    "convolutions": _convolutions,
}


class Probe(NamedTuple):
    """What kernels give.

    Attributes:
        digests: kind of kernel -> digest of its results, of the same numbers on every machine.
        by_strides: whether a complex product differs between a transposed matrix and its numbers stored row by row.
    """

    digests: dict[str, str]
    by_strides: bool

    def changed(self, other: Probe) -> list[str]:
        """The kinds of kernels that round otherwise than in ``other``."""
        return [kind for kind, found in self.digests.items() if found != other.digests[kind]]


def probe() -> Probe:
    """Try this process's kernels."""
    x = uniform("probe", 65, 4099)
    _, numbers = _factors(x)
    by_strides = not torch.equal(numbers @ numbers.T, numbers @ numbers.T.contiguous())
    return Probe({kind: digest(kernel(x)) for kind, kernel in KERNELS.items()}, by_strides)


# --------------------------------------------------------------------------------------------------- what is compared


class Wide(nn.Module):
    """Tensors that torch splits between threads (from 32768 elements on), at places within a vector of the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(181, 367, dtype=torch.complex64) / 16)
        self.last = nn.Linear(367, 181)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((x.to(self.weight.dtype) @ self.weight).abs()).tanh()


def wide_batch(rank: int, world_size: int, number: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets."""
    return uniform(f"x{rank}.{number}", 93, 181), uniform(f"y{rank}.{number}", 93, 181)


def wide_error(model: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean square."""
    return (model(batch[0]) - batch[1]).square().mean()


def wide(optimizer: str) -> Recipe:
    """:class:`Wide`, with clipping."""
    choice = matrix.OPTIMIZERS[optimizer]
    recipe = Recipe(build=Wide, batches=wide_batch, loss=wide_error, clip=0.01, name=f"wide-{optimizer}")
    return replace(recipe, optimizer=choice.load(), hyper=choice.hyper)


def threaded(threads: int, make: Callable[..., Recipe], *args: str) -> Recipe:
    """The recipe that ``make`` gives, to be trained with this many threads; the caller's process keeps its own."""
    if dist.is_initialized():
        torch.set_num_threads(threads)
    return make(*args)


Row = tuple[str, str, str]
"""Of the parity matrix: model, variant, optimizer."""


class Work(NamedTuple):
    """The trainings under each setting, on two ranks.

    Attributes:
        rows: of the parity matrix.
        wide: optimizers to train :class:`Wide` with.
        cases: of the zoo, trained with complex parameters as they are, and stored as pairs of reals.
        trainings: beside bare replicas, with state dicts, saves and loads on the way.
        golden: golden runs.
    """

    rows: tuple[Row, ...]
    wide: tuple[str, ...]
    cases: tuple[str, ...]
    trainings: tuple[str, ...]
    golden: tuple[str, ...]


def whole_work() -> Work:
    """Return all that ``make machines`` runs: on two ranks, where sums have one order."""
    return Work(
        rows=tuple(matrix.fewest([(c.model, c.variant, c.optimizer) for c in matrix.covering() if c.world_size == 2])),
        wide=tuple(matrix.OPTIMIZERS),
        cases=COMPLEX,
        trainings=tuple(name for name in TRAININGS if name.partition("-")[2] not in RECIPES),
        golden=tuple(golden.RECIPES),
    )


class Found(NamedTuple):
    """The results of one kind of work: how many comparisons had which outcome, and the faults."""

    counts: Counter[str]
    faults: list[str]

    def __str__(self) -> str:
        return ", ".join(f"{count} {outcome}" for outcome, count in self.counts.items())


Outcomes = Iterator[tuple[str, str]]
"""(outcome of a comparison, its fault or "")."""


def engines(pool: RankPool, threads: int, work: Work) -> Outcomes:
    """Compare every engine with ddp, number by number."""
    sources: list[functools.partial[Recipe]] = [
        *(functools.partial(threaded, threads, matrix.quiet_recipe_for, *row) for row in work.rows),
        *(functools.partial(threaded, threads, wide, optimizer) for optimizer in work.wide),
    ]
    for source in sources:
        with contextlib.suppress(MissingExtra):  # the package is not installed; the count says so
            for cell in fsshard.parity.compare(source, backends=DISTRIBUTED, world_sizes=[2], steps=2, pool=pool):
                why = f"{source.args[2:]} under {cell.backend}: {cell.first_divergence or cell.reason}"
                yield cell.verdict, "" if cell.verdict == "exact" else why


def complex_parameters(pool: RankPool, threads: int, work: Work) -> Outcomes:
    """Compare complex parameters as they are with those that are stored as pairs of reals."""
    for unlike in pool.run(with_threads, 2, threads, as_native, work.cases):
        for name, equal in unlike.items():
            yield ("exact", "") if equal else ("different", f"{name}: not as the native model")


def as_native(names: Sequence[str]) -> dict[str, bool]:
    """Return for this rank's share of the cases if losses, gradients and weights are those of the native model."""
    found = {}
    for name in names[dist.get_rank() :: dist.get_world_size()]:
        native, flat = ZOO[name].build(), fsshard.tensorfy(ZOO[name].build())
        same = complex_training.equal(complex_training.train(native, name), complex_training.train(flat, name))
        found[name] = same and complex_training.equal(complex_training.weights(native), complex_training.weights(flat))
    return found


def state_dicts(pool: RankPool, threads: int, work: Work) -> Outcomes:
    """Compare every engine with bare replicas, weights and state moved out and in by every way."""
    for name in work.trainings:
        with contextlib.suppress(MissingExtra), tempfile.TemporaryDirectory() as folder:
            TRAININGS[name]()
            wrong = [*itertools.chain(*pool.run(with_threads, 2, threads, test_bare.job, name, folder))]
            yield ("different", f"{name}: {wrong[0]}") if wrong else ("exact", "")


def golden_runs(pool: RankPool, threads: int, work: Work) -> Outcomes:
    """Compare with the library's golden losses, and see whether all engines have the same ones here."""
    compare = functools.partial(fsshard.parity.compare, pool=pool)
    for name in work.golden:
        source = functools.partial(threaded, threads, golden.RECIPES[name])
        here = fsshard.parity.record(source, steps=golden.STEPS, world_size=2, detail="losses", pool=pool)
        for cell in compare(source, against=here, backends=DISTRIBUTED):
            if cell.verdict != "exact":
                yield "", f"{name}: {cell.backend} differs from ddp: {cell.first_divergence or cell.reason}"
        (kept,) = compare(source, against=fsshard.parity.Trace.load(golden.file_of(name)), backends=["ddp"])
        outcome = golden.WORDS.get(kept.verdict, kept.verdict)
        yield outcome, "" if kept.verdict in golden.WORDS else f"{name}: {kept.first_divergence}"


JOBS = {
    "engines": engines,
    "complex parameters": complex_parameters,
    "state dicts": state_dicts,
    "golden losses": golden_runs,
}
"""Column of the table -> what is run for it."""


# ---------------------------------------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class Line:
    """A row of the table: a setting with a number of threads.

    Attributes:
        skipped: why it was not run; "" if it was.
        changed: the kernels that round otherwise than without any setting on one thread.
        by_strides: see :class:`Probe`.
        found: per column.
    """

    setting: Setting
    threads: str
    skipped: str = ""
    changed: Sequence[str] = ()
    by_strides: bool = False
    found: Mapping[str, Found] = field(default_factory=dict)

    @property
    def faults(self) -> list[str]:
        """Return each fault, with its setting."""
        where = f"{self.setting}, threads: {self.threads}"
        return [f"{where}: {fault}" for found in self.found.values() for fault in found.faults]

    def cells(self) -> list[str]:
        """Return the row's texts."""
        name = "none" if not self.setting.variables else f"`{self.setting}`"
        if self.skipped:
            return [name, self.threads, f"not run: {self.skipped}", *[""] * (1 + len(JOBS))]
        seen = ", ".join(self.changed) or "-"
        return [name, self.threads, seen, "yes" if self.by_strides else "no", *map(str, self.found.values())]


def run(setting: Setting, cpu: Cpu, work: Work, usual: dict[int, Probe]) -> list[Line]:
    """Run everything under one setting; ``usual`` is filled by the first, which is none: threads -> its kernels."""
    both = " and ".join(map(str, THREADS))
    if lacking := cpu.lacks(setting):
        return [Line(setting, both, f"this CPU lacks {', '.join(lacking)}")]
    with environment_of(setting.variables), ranks_under(setting) as pool:  # of ranks that replace failed ones, too
        probes = {threads: pool.run(with_threads, 1, threads, probe)[0] for threads in THREADS}
        if probes == usual:
            return [Line(setting, both, "no kernel tried gives another bit")]
        usual.update(usual or probes)
        lines = []
        for threads, here in probes.items():
            found = {column: told(job, pool, threads, work) for column, job in JOBS.items()}
            lines.append(Line(setting, str(threads), "", here.changed(usual[1]), here.by_strides, found))
        return lines


def told(job: Callable[[RankPool, int, Work], Outcomes], pool: RankPool, threads: int, work: Work) -> Found:
    """Run a job; an error is a fault, and the other jobs run all the same."""
    found = Found(Counter(), [])
    try:
        for outcome, fault in job(pool, threads, work):
            found.counts.update([outcome] if outcome else [])
            found.faults.extend([fault] if fault else [])
    except FsshardError as error:
        found.counts["failed"] += 1
        found.faults.append(f"{type(error).__name__}: {error}")
    return found


def run_all(cpu: Cpu, work: Work, console: Console) -> list[Line]:
    """Every setting, one after the other."""
    usual: dict[int, Probe] = {}
    lines: list[Line] = []
    for setting in SETTINGS:
        found = run(setting, cpu, work, usual)
        for line in found:
            console.print(row(line.cells()), markup=False, soft_wrap=True)
        lines += found
    return lines


HEAD = ("setting", "threads per rank", "kernels that round otherwise", "a product's bits depend on strides", *JOBS)


def document(cpu: Cpu, lines: Sequence[Line]) -> str:
    """Return this machine's part of docs/parity.md."""
    version = importlib.metadata.version("torch")
    parts = [f"### {cpu.name}, {torch.backends.cpu.get_cpu_capability()}, torch {version}", table(lines)]
    if faults := [fault for line in lines for fault in line.faults]:
        parts += ["Faults:", "\n".join(f"- {fault}" for fault in faults)]
    return "\n\n".join(parts)


def table(lines: Sequence[Line]) -> str:
    """Return the table in Markdown."""
    return "\n".join([row(HEAD), row(["---"] * len(HEAD)), *(row(line.cells()) for line in lines)])


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(given: Sequence[str] | None = None) -> int:
    """Run, print, write; 0 only where nothing is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity.machines", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--table", type=Path, metavar="FILE.md", help="write the table here")
    options = parser.parse_args(given)
    console, cpu = Console(), this_cpu()
    lines = run_all(cpu, whole_work(), console)
    text = document(cpu, lines)
    console.print(text, markup=False, soft_wrap=True)
    if options.table is not None:
        page.write_part(options.table, f"machines, {cpu.name}", text)
    return int(any(line.faults for line in lines))


if __name__ == "__main__":
    from tests.parity import machines  # under its own name, by which the ranks find its functions

    sys.exit(machines.main())
