"""Is it still the same training? Records one, and compares a training of today with a recorded one.

The recorded training may be of another torch, another machine, another number of ranks, another engine or another
commit. Both run freely from the same seed, step after step, and the first place where they part is told. The verdict is

* ``exact``: every digest is the same, from the initial weights to the last step;
* ``bound``: no difference is larger than rounding makes it in this very training. That is measured: the training runs
  :data:`~fsshard.parity.bounds.ORDERS` times more, with every operation rounded otherwise
  (:mod:`fsshard.parity.perturbed`), and :func:`~fsshard.parity.bounds.measured_bound` says how far beyond the largest
  of these draws another may reach. Learning rates, batches and random states have no bound;
* ``different``: anything else, from the first step, quantity, parameter and rank that is beyond its bound.

At another number of ranks the recorded ranks' batches are joined and divided anew, so the same samples are trained on;
what is compared then is what all ranks share: the mean loss, gradients, weights and the optimizer's state.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsshard.errors import ConfigurationError, FsshardError, MissingExtra, RankFailed, RecipeError, UnsupportedByBackend
from fsshard.launching.pool import RankPool
from fsshard.parity.bounds import ORDERS
from fsshard.parity.engine import EngineSpec, engine_name
from fsshard.parity.environment import changes, commit_of, told
from fsshard.parity.findings import Cell, first_divergence, worst_verdict
from fsshard.parity.observing import (
    BatchFacts,
    Observed,
    at_world_size,
    check_regrouping,
    observe,
    observe_perturbed,
    recorded_batches,
)
from fsshard.parity.recipe import RecipeLike, resolve
from fsshard.parity.recorded import DETAILS, RankTrace, Trace
from fsshard.parity.report import ParityReport
from fsshard.parity.rounding import NotComparable
from fsshard.parity.running import Meter, Progress, Runner, failed, in_one_process, transportable
from fsshard.parity.trace_comparison import compare_traces, first_output, first_unequal, needs_bounds
from fsshard.parity.trace_tensors import merged
from fsshard.parity.training import Job

__all__ = ["compare_with", "record"]

PERTURBED_ENGINE = "ddp"
"""Trains the draws: whatever engine is compared, rounding errors of its kernels grow alike."""


def record(
    recipe: RecipeLike,
    *,
    backend: EngineSpec = "ddp",
    world_size: int = 2,
    steps: int = 10,
    detail: str = "digests",
    timeout: float = 120.0,
    pool: RankPool | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Trace:
    """Train ``recipe`` and return what every step gave, for ``compare(recipe, against=trace)`` elsewhere.

    It is trained twice: a recipe that does not do the same thing twice cannot be compared with anything.

    Args:
        recipe: as for :func:`fsshard.parity.compare`.
        backend: what trains it: a backend's name, or a dict of :func:`fsshard.wrap`'s arguments.
        world_size: number of ranks.
        steps: optimizer steps.
        detail: ``"losses"`` (with norms, learning rates and digests of batches), ``"digests"`` (and of every gradient,
            weight, optimizer state and buffer a digest and some numbers, about 400 bytes each) or ``"tensors"`` (and
            these themselves, held in memory once; a comparison then names the element that differs most).
        timeout: seconds that a run may take.
        pool: ranks to run on; by default they are started, and ended at the end.
        device: ``"cpu"`` or ``"cuda"``.
        progress: called with (done, total, what is running).

    Returns:
        The trace; ``trace.save(path)`` keeps it.

    Raises:
        RecipeError: the recipe is incomplete, or not deterministic.
        ConfigurationError: an argument has no meaning.
    """
    if detail not in DETAILS:
        raise ConfigurationError(f"detail={detail!r}: expected one of {', '.join(DETAILS)}")
    if isinstance(backend, type):
        raise ConfigurationError(
            f"backend={backend!r}: expected a backend's name, or a dict with 'backend' among its keys"
        )
    transportable(recipe)
    with _runner(pool, device, timeout, Meter(progress, 2)) as runner:
        trace = _observed(runner, _Run(recipe, backend, world_size, steps, device), detail)
        again = _observed(runner, _Run(recipe, backend, world_size, steps, device), detail, text="again")
    unequal = first_unequal(compare_traces(trace, again), trace.parameters)
    if unequal is not None:
        raise RecipeError(
            f"the recipe is not deterministic: two runs under {engine_name(backend)!r} at world size {world_size} "
            f"differ, first at {unequal}. Nothing was recorded. Seed whatever is drawn outside of torch's, numpy's and "
            "random's global generators, and avoid operations without a deterministic form"
        )
    return trace


@dataclass(frozen=True)
class _Run:
    """One training: of what, by what, on how many ranks; ``recorded``: whose batches are divided anew, or None."""

    recipe: RecipeLike
    backend: EngineSpec
    world_size: int
    steps: int
    device: str
    recorded: int | None = None

    def job(self, folder: str = "") -> Job:
        """As it is sent to the ranks."""
        source = self.recipe if self.recorded is None else at_world_size(self.recipe, self.recorded)
        return Job(
            source=source,
            engine=self.backend,
            steps=self.steps,
            world_size=self.world_size,
            folder=folder,
            device=self.device,
        )


@contextlib.contextmanager
def _runner(pool: RankPool | None, device: str, timeout: float, meter: Meter) -> Any:
    with contextlib.ExitStack() as stack:
        ranks = pool if pool is not None else stack.enter_context(contextlib.closing(RankPool(device=device)))
        yield Runner(ranks, timeout, meter)


def _observed(runner: Runner, run: _Run, detail: str, text: str = "recording") -> Trace:
    folder = tempfile.mkdtemp(prefix="fsshard-parity-") if detail == "tensors" else ""
    try:
        seen: list[Observed] = runner.run(observe, run.job(folder), detail, text=text)
        trace = _trace(run, detail, seen, merged(Path(folder)) if folder else None)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if folder:  # until it is saved
        weakref.finalize(trace, shutil.rmtree, folder, ignore_errors=True)
    return trace


def _trace(run: _Run, detail: str, seen: list[Observed], tensors: Path | None) -> Trace:
    recipe = resolve(run.recipe)
    return Trace(
        recipe=told(recipe),
        environment=seen[0].environment,
        commit=commit_of(recipe),
        backend=engine_name(run.backend),
        world_size=run.world_size,
        device=run.device,
        detail=detail,
        parameters=seen[0].parameters,
        ranks=[one.trace for one in seen],
        tensors=tensors,
    )


# ---------------------------------------------------------------------------------------------------- comparing


def compare_with(
    trace: Trace,
    recipe: RecipeLike,
    *,
    backends: Sequence[EngineSpec],
    world_sizes: Sequence[int],
    steps: int,
    timeout: float,
    pool: RankPool | None,
    device: str,
    progress: Progress | None,
) -> ParityReport:
    """What :func:`fsshard.parity.compare` does with a recorded training; its arguments are explained there."""
    if steps > trace.steps:
        raise ConfigurationError(f"steps={steps}: {_named(trace)} has {trace.steps}; ask for as many or fewer")
    name = transportable(recipe)
    report = ParityReport(recipe=name, reference=_named(trace), steps=steps)
    with _runner(pool, device, timeout, Meter(progress, len(backends) * len(world_sizes))) as runner:
        for size in world_sizes:
            world = _World(runner, trace, _Run(recipe, "", size, steps, device), report)
            report.cells += [world.cell(spec) for spec in backends]
    return report


def _named(trace: Trace) -> str:
    where = f"recorded in {trace.file}" if trace.file is not None else "recorded"
    ranks = f"{trace.world_size} rank{'s' * (trace.world_size > 1)}"
    return f"{trace.backend} on {ranks} with torch {trace.environment.get('torch', '?')}, {where}"


class _World:
    """All backends at one number of ranks."""

    def __init__(self, runner: Runner, trace: Trace, run: _Run, report: ParityReport) -> None:
        self._runner, self._trace, self._run, self._report = runner, trace, run, report
        self._draws: dict[bool, list[list[RankTrace]]] = {}
        self._batches: list[BatchFacts] | None = None

    def cell(self, spec: EngineSpec) -> Cell:
        """The verdict on one backend."""
        start, size = time.perf_counter(), self._run.world_size
        try:
            cell = self._compared(spec)
        except (UnsupportedByBackend, MissingExtra, NotComparable) as error:
            cell = Cell(backend=engine_name(spec), world_size=size, verdict="refused", reason=str(error))
        except RankFailed as error:
            cell = failed(spec, size, error)
        cell.seconds = time.perf_counter() - start
        return cell

    def _compared(self, spec: EngineSpec) -> Cell:
        run, same = self._of(spec)
        if not same:
            self._check_regrouping()
        now = _observed(self._runner, run, self._trace.detail, text="against the record")
        self._note_changes(now)
        batches = None if same else self._recorded_batches()
        steps = compare_traces(self._trace, now, batches=batches)
        if needs_bounds(steps):
            steps = compare_traces(self._trace, now, batches=batches, draws=self._drawn(run))
        cell = Cell(
            backend=engine_name(spec), world_size=self._run.world_size, steps=steps, verdict=worst_verdict(steps)
        )
        if cell.verdict != "exact":
            cell.first_divergence = first_divergence(cell, self._trace.parameters)
            said = (_first_bits(cell, self._trace.parameters), first_output(self._trace, now) if same else "")
            cell.reason = "; ".join(text for text in said if text)
        if cell.verdict == "different":
            cell.reproducible = self._same_again(run, now)
        return cell

    def _of(self, spec: EngineSpec) -> tuple[_Run, bool]:
        """The run, and whether its processes train on the batches that the recorded ones did."""
        recorded = self._trace.world_size
        if in_one_process(spec):  # on the joined batches of as many ranks as were recorded
            return replace(self._run, backend=spec, world_size=recorded), len(self._trace.ranks) == 1
        if self._run.world_size == recorded:
            return replace(self._run, backend=spec), len(self._trace.ranks) == recorded
        return replace(self._run, backend=spec, recorded=recorded), False

    def _check_regrouping(self) -> None:
        run = self._run
        self._runner.meter.grow()
        self._runner.call(check_regrouping, 1, run.recipe, self._trace.world_size, run.device, text="other ranks?")

    def _recorded_batches(self) -> list[BatchFacts]:
        if self._batches is None:
            self._runner.meter.grow()
            given = self._run.recipe, self._trace.world_size, self._run.steps
            self._batches = self._runner.call(recorded_batches, 1, *given, text="batches")[0]
        return self._batches

    def _drawn(self, run: _Run) -> list[list[RankTrace]]:
        """The ranks' traces of one training as it is, then of each draw; the same for all engines of one kind."""
        one_process = in_one_process(run.backend)
        if one_process not in self._draws:
            self._runner.meter.grow()
            engine = run.backend if one_process else PERTURBED_ENGINE
            job = replace(run, backend=engine).job()
            ranks = self._runner.run(observe_perturbed, job, ORDERS, text="rounded otherwise")
            self._draws[one_process] = [list(draw) for draw in zip(*ranks, strict=True)]
        return self._draws[one_process]

    def _note_changes(self, now: Trace) -> None:
        before = self._trace
        found = changes(before.environment, now.environment)
        found += [f"recipe.{text}" for text in changes(before.recipe, now.recipe)]
        found += changes({"commit": before.commit}, {"commit": now.commit})
        self._report.changes += [text for text in found if text not in self._report.changes]

    def _same_again(self, run: _Run, now: Trace) -> bool:
        """Does a run that differs at least agree with itself?"""
        self._runner.meter.grow()
        try:
            again = _observed(self._runner, run, "digests" if now.detail == "tensors" else now.detail, text="again")
        except (RankFailed, FsshardError):
            return False
        return worst_verdict(compare_traces(now, again)) == "exact"


def _first_bits(cell: Cell, parameters: list[str]) -> str:
    """Where the first bits differ, if that is before the place that is named; and how many tensors differ there."""
    first = first_unequal(cell.steps, parameters)
    if first is None:
        return ""
    named = cell.steps[first.step].differences[first.quantity]
    unequal = [name for name, d in named.items() if d.verdict != "exact"]
    count = f"{len(unequal)} of {len(named)} differ there" if len(named) > 1 else ""
    place = "" if first == cell.first_divergence else f"the first bits that differ: {first}"
    return "; ".join(text for text in (place, count) if text)
