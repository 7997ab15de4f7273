"""Runs on a pool of ranks, shared by all comparisons: errors as the user knows them, progress over all runs."""

from __future__ import annotations

import contextlib
import math
import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from fsshard.backends import backend_class
from fsshard.errors import (
    ConfigurationError,
    FsshardError,
    GradientError,
    MissingExtra,
    ModelError,
    OptimizerError,
    RankFailed,
    RankMismatch,
    RecipeError,
    UnsupportedByBackend,
)
from fsshard.launching.pool import RankPool
from fsshard.parity.checking import rerun
from fsshard.parity.comparing import cell_of, check_deterministic, merged
from fsshard.parity.engine import EngineSpec, backend_of, engine_name
from fsshard.parity.findings import Cell
from fsshard.parity.recipe import RecipeLike, resolve
from fsshard.parity.recorder import record_reference
from fsshard.parity.rounding import NotComparable
from fsshard.parity.split_training import Bare, mesh_text
from fsshard.parity.training import Job

__all__ = [
    "Meter",
    "Progress",
    "ReferenceWorld",
    "Runner",
    "World",
    "at",
    "failed",
    "in_one_process",
    "running",
    "transportable",
]

USERS_MISTAKES = (ConfigurationError, MissingExtra, ModelError, OptimizerError)
"""Raised on the ranks; raised again as they are, since the rank's traceback would tell the user nothing."""
Progress = Callable[[float, float, str], None]


def transportable(recipe: RecipeLike) -> str:
    """The recipe's name, once it is known to be one and to reach the ranks."""
    try:
        pickle.dumps(recipe)
    except Exception as error:
        raise RecipeError(
            f"the recipe cannot be sent to the ranks ({error}); use functions at the top level of a module, or pass a "
            "function at the top level of a module that returns the recipe; then its lambdas need not be sent"
        ) from error
    return resolve(recipe).name


class Meter:
    """Progress over all runs; a run counts as one."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0.0

    @contextlib.contextmanager
    def run(self, text: str) -> Iterator[Callable[[int, float], None]]:
        """Show one run, and count it when it is over; yields what hears of its parts."""
        self._show(self._done, text)
        yield lambda rank, part: self._show(self._done + min(part, 1.0), text) if rank == 0 else None
        self._done = min(self._done + 1.0, self._total)
        self._show(self._done, text)

    def grow(self) -> None:
        """One run more than was thought."""
        self._total += 1

    def _show(self, done: float, text: str) -> None:
        if self._progress is not None:
            self._progress(done, float(self._total), text)


def in_one_process(spec: EngineSpec) -> bool:
    """Return whether an engine trains on the joined batches of all ranks in one process."""
    return spec is Bare or (bool(backend_of(spec)) and backend_class(backend_of(spec)).facts.one_process)


def _processes(job: Job) -> int:
    if job.mesh is not None:
        return math.prod(job.mesh.values())
    return 1 if in_one_process(job.engine) else job.world_size


class Runner:
    """Runs jobs on a pool."""

    def __init__(self, ranks: RankPool, timeout: float, meter: Meter) -> None:
        self._ranks, self._timeout, self.meter = ranks, timeout, meter

    def run(self, function: Callable[..., Any], job: Job, *arguments: Any, text: str = "") -> list[Any]:
        """Return what ``function(job, *arguments)`` returns on each rank of the job."""
        samples = "the samples of " if job.engine is Bare else ""
        where = (
            f"{samples}{job.world_size} rank{'s' * (job.world_size > 1)}" if job.mesh is None else mesh_text(job.mesh)
        )
        shown = f"{engine_name(job.engine)} on {where}{f' ({text})' if text else ''}"
        return self.call(function, _processes(job), job, *arguments, text=shown)

    def call(self, function: Callable[..., Any], count: int, *arguments: Any, text: str) -> list[Any]:
        """Return what a function returns on each of ``count`` ranks; what the user did wrong is raised as it is."""
        with self.meter.run(text) as hear:
            try:
                return self._ranks.run(function, count, *arguments, timeout=self._timeout, on_message=hear)
            except RankFailed as error:
                if isinstance(error.__cause__, USERS_MISTAKES):
                    raise error.__cause__ from error
                raise


@contextlib.contextmanager
def running(
    pool: RankPool | None, device: str, timeout: float, progress: Progress | None, runs: int
) -> Iterator[Runner]:
    """A runner on ``pool``, or on ranks that are started for it, and ended at the end."""
    with contextlib.ExitStack() as stack:
        ranks = pool if pool is not None else stack.enter_context(contextlib.closing(RankPool(device=device)))
        yield Runner(ranks, timeout, Meter(progress, runs))


REFUSALS = (UnsupportedByBackend, MissingExtra, NotComparable)
"""Raised where an engine has no such thing, or a comparison no meaning: the cell says so."""
REFUSALS_ON_MESHES = (ConfigurationError, MissingExtra, ModelError, OptimizerError)
"""The same recipe may be trained on another mesh."""


class World(ABC):
    """All runs that are compared with one and the same."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    @abstractmethod
    def compared(self, job: Job, text: str = "") -> Cell:
        """Run, and compare."""

    def cell(self, job: Job) -> Cell:
        """The verdict on one run; one that differs runs twice, to tell a race from a fault."""
        start = time.perf_counter()
        refusals = REFUSALS if job.mesh is None else REFUSALS_ON_MESHES
        try:
            cell = self.compared(job)
            if cell.verdict == "different":
                cell.reproducible = self._comes_again(job, cell)
                cell.reason = cell.reason or ("" if job.mesh else _hint(cell))
        except RecipeError:
            raise  # whatever the engine
        except refusals as error:
            cell = Cell(backend="", world_size=0, verdict="refused", reason=str(error))
        except RankFailed as error:
            cell = failed(error)
            if job.mesh is not None and isinstance(error.__cause__, (GradientError, RankMismatch)):
                cell.reason, cell.traceback = str(error.__cause__), ""  # found by fsshard, and told in its words
        return at(job, replace(cell, seconds=time.perf_counter() - start))

    def _comes_again(self, job: Job, cell: Cell) -> bool:
        self.runner.meter.grow()
        try:
            steps = self.compared(job, "again").steps
        except (RankFailed, FsshardError):
            return False
        return [step.differences for step in steps] == [step.differences for step in cell.steps]


class ReferenceWorld(World):
    """Runs that are compared with a reference, which is recorded, and run once more, at the start.

    Attributes:
        again: the reference's second run.

    Raises:
        RecipeError: the second run differs from the first.
    """

    def __init__(self, runner: Runner, reference: Job) -> None:
        super().__init__(runner)
        self._parameters: list[str] = runner.run(record_reference, reference, text="reference")[0]
        self.again = self.compared(reference, "reference, again")
        check_deterministic(self.again, self._parameters, "compared")

    def compared(self, job: Job, text: str = "") -> Cell:
        start = time.perf_counter()
        steps = merged(self.runner.run(rerun, job, text=text))
        cell = cell_of(engine_name(job.engine), job.world_size, steps, self._parameters)
        return replace(cell, seconds=time.perf_counter() - start)


def at(job: Job, cell: Cell) -> Cell:
    """The cell, with its place in the report."""
    size, mesh = (job.world_size, "") if job.mesh is None else (math.prod(job.mesh.values()), mesh_text(job.mesh))
    return replace(cell, backend=engine_name(job.engine), world_size=size, mesh=mesh)


def failed(error: RankFailed, prefix: str = "") -> Cell:
    """A cell that says how a rank failed."""
    reason = prefix + str(error).partition("\n\n")[0]
    return Cell(backend="", world_size=0, verdict="failed", reason=reason, traceback=error.traceback)


def _hint(cell: Cell) -> str:
    """A guess at the cause of a difference, where the numbers suggest one."""
    if not cell.reproducible:
        return "a second run of this backend differed again: the backend itself is not deterministic (a race?)"
    first = cell.first_divergence
    if first is None or first.quantity != "gradient":
        return ""
    step = cell.steps[first.step]
    ratio = step.norm / step.reference_norm if step.reference_norm else 0.0
    for factor, cause in ((cell.world_size, "summed over ranks"), (1 / cell.world_size, "averaged twice")):
        if cell.world_size > 1 and abs(ratio / factor - 1) < 1e-3:
            return f"all gradients together are {ratio:.4g} times the reference's: {cause}?"
    return ""
