"""Runs on a pool of ranks, shared by all comparisons: errors as the user knows them, progress over all runs."""

from __future__ import annotations

import contextlib
import math
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any

from fsshard.backends import backend_class
from fsshard.errors import (
    ConfigurationError,
    FsshardError,
    MissingExtra,
    ModelError,
    OptimizerError,
    RankFailed,
    RecipeError,
)
from fsshard.launching.pool import RankPool
from fsshard.parity.checking import rerun
from fsshard.parity.engine import EngineSpec, backend_of, engine_name
from fsshard.parity.findings import Cell
from fsshard.parity.merging import check_deterministic, merged
from fsshard.parity.recipe import RecipeLike, resolve
from fsshard.parity.recording import record
from fsshard.parity.split_training import Bare, mesh_text
from fsshard.parity.training import Job

__all__ = ["Meter", "Progress", "Runner", "World", "failed", "in_one_process", "transportable"]

USERS_MISTAKES = (ConfigurationError, MissingExtra, ModelError, OptimizerError)
"""Raised on the ranks; raised again as they are, since the rank's traceback would tell the user nothing."""
Progress = Callable[[float, float, str], None]


def failed(spec: EngineSpec, size: int, error: RankFailed, prefix: str = "") -> Cell:
    reason = prefix + str(error).partition("\n\n")[0]
    return Cell(backend=engine_name(spec), world_size=size, verdict="failed", reason=reason, traceback=error.traceback)


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
    """Whether an engine trains on the joined batches of all ranks in one process."""
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
        """What ``function(job, *arguments)`` returns on each rank of the job."""
        samples = "the samples of " if job.engine is Bare else ""
        where = (
            f"{samples}{job.world_size} rank{'s' * (job.world_size > 1)}" if job.mesh is None else mesh_text(job.mesh)
        )
        shown = f"{engine_name(job.engine)} on {where}{f' ({text})' if text else ''}"
        return self.call(function, _processes(job), job, *arguments, text=shown)

    def call(self, function: Callable[..., Any], count: int, *arguments: Any, text: str) -> list[Any]:
        """What a function returns on each of ``count`` ranks; what the user did wrong is raised as it is."""
        with self.meter.run(text) as hear:
            try:
                return self._ranks.run(function, count, *arguments, timeout=self._timeout, on_message=hear)
            except RankFailed as error:
                if isinstance(error.__cause__, USERS_MISTAKES):
                    raise error.__cause__ from error
                raise


class World:
    """All runs that are compared with one reference, which is recorded, and run once more, at the start.

    Attributes:
        again: the reference's second run.

    Raises:
        RecipeError: the second run differs from the first.
    """

    def __init__(self, runner: Runner, reference: Job) -> None:
        self._runner = runner
        self._parameters: list[str] = runner.run(record, reference, text="reference")[0]
        self.again = self._cell(reference, "reference, again")
        check_deterministic(self.again, self._parameters)

    def cell(self, job: Job) -> Cell:
        """Return the verdict on one run; one that differs runs twice, to tell a race from a fault."""
        cell = self._cell(job)
        if cell.verdict == "different":
            self._runner.meter.grow()
            try:
                again = self._cell(job, "again")
            except (RankFailed, FsshardError):
                cell.reproducible = False
            else:
                cell.reproducible = [step.differences for step in again.steps] == [s.differences for s in cell.steps]
        return cell

    def _cell(self, job: Job, text: str = "") -> Cell:
        start = time.perf_counter()
        cell = merged(job, self._runner.run(rerun, job, text=text), self._parameters)
        cell.seconds = time.perf_counter() - start
        return cell
