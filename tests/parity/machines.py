"""Engines agree to the last bit: under every code path of the math libraries that this CPU can be told to take.

    python -m tests.parity.machines                           # prints the table of this machine
    python -m tests.parity.machines --table docs/data/parity.md    # make machines

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
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn

import fsshard.parity
from fsshard.errors import FsshardError, MissingExtra
from fsshard.launching.pool import RankPool
from fsshard.launching.pool_worker import environment_of
from fsshard.parity.sketch import digest
from fsshard.parity.trace import environment
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
SETTINGS = (
    Setting({}),
    Setting({"ATEN_CPU_CAPABILITY": "default"}),
    Setting({"ATEN_CPU_CAPABILITY": "avx2"}, ("avx2", "fma")),
    Setting({"ATEN_CPU_CAPABILITY": "avx512"}, AVX512),
    Setting({"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}, ("sse4_2",)),
    Setting({"MKL_ENABLE_INSTRUCTIONS": "AVX2"}, ("avx2",)),
    Setting({"MKL_ENABLE_INSTRUCTIONS": "AVX512"}, AVX512),
    Setting({"MKL_CBWR": "COMPATIBLE"}),
    Setting({"ONEDNN_MAX_CPU_ISA": "SSE41"}, ("sse4_1",)),
    Setting({"ONEDNN_MAX_CPU_ISA": "AVX2"}, ("avx2",)),
    Setting({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, AVX512),
    LOWEST,
)


def cpu_flags(path: str = "/proc/cpuinfo") -> frozenset[str]:
    """Return this CPU's flags as Linux tells them; elsewhere none, so that no instruction is risked."""
    text = Path(path).read_text() if Path(path).exists() else ""
    (flags,) = re.findall(r"^flags\s*: (.*)$", text, re.MULTILINE)[:1] or [""]
    return frozenset(flags.split())


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


class Probe(NamedTuple):
    """Results of kernels.

    Attributes:
        digests: kind of kernel -> digest of its results, of the same numbers on every machine.
        by_strides: whether a complex product differs between a transposed matrix and its numbers stored row by row.
    """

    digests: dict[str, str]
    by_strides: bool

    def changed(self, other: Probe) -> list[str]:
        """The kinds of kernels that round otherwise than in ``other``."""
        return [kind for kind, found in self.digests.items() if found != other.digests[kind]]


def uniform(name: str, *shape: int) -> Tensor:
    """Return numbers in [-1, 1) from a name: the same bits on every machine, as numpy promises of RandomState."""
    numbers = np.random.RandomState(zlib.crc32(name.encode())).random_sample(shape)
    return torch.from_numpy(2 * numbers - 1).float()


def probe() -> Probe:
    """Try this process's kernels."""
    x = uniform("probe", 65, 4099)
    flat = x.flatten()
    real, numbers = flat[: 67 * 129].view(67, 129), torch.view_as_complex(flat[: 67 * 129 * 2].view(67, 129, 2))
    spectrum = torch.fft.rfft2(x[:5, :480].view(5, 24, 20))
    convolved = []
    # Few channels, and as many as fill a vector of AVX-512: oneDNN's kernels for these are others.
    for image, weight in (
        (x[0, :2312].view(2, 4, 17, 17), x[1, :288].view(8, 4, 3, 3)),
        (x[2, :4096].view(4, 16, 8, 8), x[3, :2304].view(16, 16, 3, 3)),
    ):
        given = [part.clone().requires_grad_() for part in (image, weight)]
        out = nn.functional.conv2d(given[0], given[1], padding=1)
        convolved += [out, *torch.autograd.grad(out.square().sum(), given)]
    batched = torch.bmm(x[:7, :377].view(7, 13, 29), x[7:14, :319].view(7, 29, 11))
    kernels = {
        "functions": [x.exp(), x.tanh(), x.softmax(1)],
        "sums": [x.sum(), x.sum(1), x.var(0), nn.functional.layer_norm(x, x.shape[1:])],
        "products": [real @ real.T, numbers @ numbers.T, batched],
        "FFTs": [spectrum, torch.fft.irfft2(spectrum)],
        "convolutions": convolved,
    }
    by_strides = not torch.equal(numbers @ numbers.T, numbers @ numbers.T.contiguous())
    return Probe({kind: digest(results) for kind, results in kernels.items()}, by_strides)


# --------------------------------------------------------------------------------------------------- what is compared


class Wide(nn.Module):
    """Tensors that torch splits between threads (from 32768 elements on), at places within a vector of the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(181, 367, dtype=torch.complex64) / 16)
        self.last = nn.Linear(367, 181)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((x.to(self.weight.dtype) @ self.weight).abs()).tanh()


def wide(optimizer: str) -> Recipe:
    """:class:`Wide`, with clipping."""
    choice = matrix.OPTIMIZERS[optimizer]
    return Recipe(
        build=Wide,
        batches=lambda rank, _, number: (uniform(f"x{rank}.{number}", 93, 181), uniform(f"y{rank}.{number}", 93, 181)),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        optimizer=choice.load(),
        hyper=choice.hyper,
        clip=0.01,
        name=f"wide-{optimizer}",
    )


def threaded(threads: int, make: Callable[..., Recipe], *args: str) -> Recipe:
    """The recipe that ``make`` gives, to be trained with this many threads; the caller's process keeps its own."""
    if dist.is_initialized():
        torch.set_num_threads(threads)
    return make(*args)


class Work(NamedTuple):
    """The trainings under each setting, on two ranks.

    Attributes:
        rows: of the parity matrix: model, variant, optimizer.
        wide: optimizers to train :class:`Wide` with.
        cases: of the zoo, trained with complex parameters as they are, and stored as pairs of reals.
        trainings: beside bare replicas, with state dicts, saves and loads on the way.
    """

    rows: tuple[tuple[str, ...], ...] = ()
    wide: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    trainings: tuple[str, ...] = ()


def whole_work() -> Work:
    """Return all that ``make machines`` runs: on two ranks, where sums have one order."""
    return Work(
        rows=tuple(matrix.fewest([(c.model, c.variant, c.optimizer) for c in matrix.covering() if c.world_size == 2])),
        wide=tuple(matrix.OPTIMIZERS),
        cases=COMPLEX,
        trainings=tuple(name for name in TRAININGS if name.partition("-")[2] not in RECIPES),
    )


Outcomes = Iterator[tuple[str, str]]
"""(outcome of a comparison, its fault or "")."""


def engines(pool: RankPool, threads: int, work: Work) -> Outcomes:
    """Compare every engine with ddp, number by number."""
    sources = [
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


JOBS = {"engines": engines, "complex parameters": complex_parameters, "state dicts": state_dicts}
"""Column of the table -> what is run for it."""


def told(job: Callable[[RankPool, int, Work], Outcomes], pool: RankPool, threads: int, work: Work) -> list[Any]:
    """Run a job; an error is a fault, and the other jobs run all the same."""
    found = []
    try:
        for outcome in job(pool, threads, work):
            found.append(outcome)
    except FsshardError as error:
        found.append(("failed", f"{type(error).__name__}: {error}"))
    return found


# ---------------------------------------------------------------------------------------------------------- the table

HEAD = ("setting", "threads per rank", "kernels that round otherwise", "a product's bits depend on strides", *JOBS)


class Line(NamedTuple):
    """A row of the table, and the faults that were found for it."""

    cells: Sequence[str]
    faults: Sequence[str] = ()


def run(setting: Setting, flags: frozenset[str], work: Work, usual: dict[int, Probe]) -> list[Line]:
    """Run everything under one setting; ``usual`` is filled by the first, which is none: threads -> its kernels."""
    name = f"`{setting}`" if setting.variables else "none"

    def skipped(why: str) -> list[Line]:
        return [Line([name, " and ".join(map(str, THREADS)), f"not run: {why}", *[""] * (1 + len(JOBS))])]

    if lacking := [flag for flag in setting.needs if flag not in flags]:
        return skipped(f"this CPU lacks {', '.join(lacking)}")
    with environment_of(setting.variables), ranks_under(setting) as pool:  # of ranks that replace failed ones, too
        probes = {threads: pool.run(with_threads, 1, threads, probe)[0] for threads in THREADS}
        if probes == usual:
            return skipped("no kernel tried gives another bit")
        usual.update(usual or probes)
        lines = []
        for threads, here in probes.items():
            found = [told(job, pool, threads, work) for job in JOBS.values()]
            counts = (Counter(outcome for outcome, _ in each if outcome) for each in found)
            cells = [", ".join(f"{count} {outcome}" for outcome, count in each.items()) for each in counts]
            kernels = ", ".join(here.changed(usual[1])) or "-"
            faults = [f"{setting}, threads: {threads}: {fault}" for each in found for _, fault in each if fault]
            lines.append(Line([name, str(threads), kernels, "yes" if here.by_strides else "no", *cells], faults))
        return lines


def run_all(work: Work, console: Console) -> list[Line]:
    """Every setting, one after the other."""
    usual = {}
    lines = []
    for setting in SETTINGS:
        for line in run(setting, cpu_flags(), work, usual):
            console.print(row(line.cells), markup=False, soft_wrap=True)
            lines.append(line)
    return lines


def document(lines: Sequence[Line]) -> str:
    """Return this machine's part of docs/data/parity.md."""
    version, name = importlib.metadata.version("torch"), environment()["processor"]
    table = "\n".join([row(HEAD), row(["---"] * len(HEAD)), *(row(line.cells) for line in lines)])
    parts = [f"### {name}, {torch.backends.cpu.get_cpu_capability()}, torch {version}", table]
    if faults := [fault for line in lines for fault in line.faults]:
        parts += ["Faults:", "\n".join(f"- {fault}" for fault in faults)]
    return "\n\n".join(parts)


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(given: Sequence[str] | None = None) -> int:
    """Run, print, write; 0 only where nothing is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity.machines", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--table", type=Path, metavar="FILE.md", help="write the table here")
    options, console = parser.parse_args(given), Console()
    lines = run_all(whole_work(), console)
    text = document(lines)
    console.print(text, markup=False, soft_wrap=True)
    if options.table is not None:
        page.write_part(options.table, f"machines, {environment()['processor']}", text)
    return int(any(line.faults for line in lines))


if __name__ == "__main__":
    from tests.parity import machines  # under its own name, by which the ranks find its functions

    sys.exit(machines.main())
