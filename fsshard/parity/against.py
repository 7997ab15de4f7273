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

import shutil
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fsshard.errors import ConfigurationError
from fsshard.launching.pool import RankPool
from fsshard.parity.bounds import ORDERS
from fsshard.parity.comparing import cell_of, check_deterministic
from fsshard.parity.engine import EngineSpec, engine_name
from fsshard.parity.environment import changes, commit_of, told
from fsshard.parity.findings import Cell, first_divergence
from fsshard.parity.recipe import RecipeLike, resolve
from fsshard.parity.recorded import DETAILS, RankTrace, Trace
from fsshard.parity.recorder import Observed, observe, observe_perturbed
from fsshard.parity.report import ParityReport
from fsshard.parity.rounding import BatchFacts, at_world_size, check_regrouping, recorded_batches
from fsshard.parity.running import Progress, Runner, World, in_one_process, running, transportable
from fsshard.parity.trace import merged_tensors
from fsshard.parity.trace_comparison import compare_traces, first_output, freedom, needs_bounds
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
    job = Job(source=recipe, engine=backend, steps=steps, world_size=world_size, device=device)
    with running(pool, device, timeout, progress, runs=2) as runner:
        trace = _observed(runner, job, recipe, detail, "recording")
        again = _observed(runner, job, recipe, detail, "again")
    cell = cell_of(engine_name(backend), world_size, compare_traces(trace, again), trace.parameters)
    check_deterministic(cell, trace.parameters, "recorded")
    return trace


def _observed(runner: Runner, job: Job, recipe: RecipeLike, detail: str, text: str) -> Trace:
    """Train, and return the record of it; its tensors lie in a temporary folder until it is saved."""
    folder = tempfile.mkdtemp(prefix="fsshard-parity-") if detail == "tensors" else ""
    try:
        seen: list[Observed] = runner.run(observe, replace(job, folder=folder), detail, text=text)
        resolved = resolve(recipe)
        trace = Trace(
            recipe=told(resolved),
            environment=seen[0].environment,
            commit=commit_of(resolved),
            backend=engine_name(job.engine),
            world_size=job.world_size,
            device=job.device,
            detail=detail,
            parameters=seen[0].parameters,
            ranks=[one.trace for one in seen],
            tensors=merged_tensors(Path(folder)) if folder else None,
        )
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if folder:
        weakref.finalize(trace, shutil.rmtree, folder, ignore_errors=True)
    return trace


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
    """Return what :func:`fsshard.parity.compare` does with a recorded training; its arguments are explained there."""
    if steps > trace.steps:
        raise ConfigurationError(f"steps={steps}: {_named(trace)} has {trace.steps}; ask for as many or fewer")
    report = ParityReport(recipe=transportable(recipe), reference=_named(trace), steps=steps)
    with running(pool, device, timeout, progress, runs=len(backends) * len(world_sizes)) as runner:
        for size in world_sizes:
            world = _RecordWorld(runner, trace, recipe, report)
            job = Job(source=recipe, engine="", steps=steps, world_size=size, device=device)
            report.cells += [world.cell(replace(job, engine=spec)) for spec in backends]
    return report


def _named(trace: Trace) -> str:
    where = f"recorded in {trace.file}" if trace.file is not None else "recorded"
    ranks = f"{trace.world_size} rank{'s' * (trace.world_size > 1)}"
    return f"{trace.backend} on {ranks} with torch {trace.environment.get('torch', '?')}, {where}"


class _RecordWorld(World):
    """All engines at one number of ranks, compared with a recorded training."""

    def __init__(self, runner: Runner, trace: Trace, recipe: RecipeLike, report: ParityReport) -> None:
        super().__init__(runner)
        self._trace, self._recipe, self._report = trace, recipe, report
        self._draws: dict[bool, list[list[RankTrace]]] = {}
        self._batches: list[BatchFacts] | None = None

    def compared(self, job: Job, text: str = "") -> Cell:
        before, size = self._trace, job.world_size
        job, same = self._divided(job)
        batches = None if same else self._recorded_batches(job)
        now = _observed(self.runner, job, self._recipe, before.detail, text or "against the record")
        self._note_changes(now)
        exactly = same and freedom(before, now) == "nothing"
        steps = compare_traces(before, now, batches=batches, exactly=exactly)
        if needs_bounds(steps) and not exactly:
            steps = compare_traces(before, now, batches=batches, draws=self._drawn(job))
        cell = cell_of(engine_name(job.engine), size, steps, before.parameters)
        said = (_first_bits(cell, before.parameters), first_output(before, now) if same else "")
        cell.reason = "; ".join(part for part in said if part and cell.verdict != "exact")
        return cell

    def _divided(self, job: Job) -> tuple[Job, bool]:
        """The run as it is to be, and whether its processes train on the batches that the recorded ones did."""
        recorded, processes = self._trace.world_size, len(self._trace.ranks)
        if in_one_process(job.engine):  # on the joined batches of as many ranks as were recorded
            return replace(job, world_size=recorded), processes == 1
        if job.world_size == recorded:
            return job, processes == recorded
        return replace(job, source=at_world_size(job.source, recorded)), False

    def _recorded_batches(self, job: Job) -> list[BatchFacts]:
        """The recorded ranks' batches, once it is known that other ranks train the same on them."""
        if self._batches is None:
            given = self._recipe, self._trace.world_size
            self.runner.meter.grow()
            self.runner.call(check_regrouping, 1, *given, job.device, text="other ranks?")
            self.runner.meter.grow()
            self._batches = self.runner.call(recorded_batches, 1, *given, job.steps, text="batches")[0]
        return self._batches

    def _drawn(self, job: Job) -> list[list[RankTrace]]:
        """The ranks' traces of one training as it is, then of each draw; the same for all engines of one kind."""
        one_process = in_one_process(job.engine)
        if one_process not in self._draws:
            self.runner.meter.grow()
            job = replace(job, engine=job.engine if one_process else PERTURBED_ENGINE)
            ranks = self.runner.run(observe_perturbed, job, ORDERS, text="rounded otherwise")
            self._draws[one_process] = [list(draw) for draw in zip(*ranks, strict=True)]
        return self._draws[one_process]

    def _note_changes(self, now: Trace) -> None:
        before = self._trace
        found = changes(before.environment, now.environment)
        found += [f"recipe.{text}" for text in changes(before.recipe, now.recipe)]
        found += changes({"commit": before.commit}, {"commit": now.commit})
        self._report.changes += [text for text in found if text not in self._report.changes]


def _first_bits(cell: Cell, parameters: list[str]) -> str:
    """Return where the first bits differ, if before the place that is named, and how many tensors differ there."""
    first = first_divergence(cell.steps, parameters)
    if first is None:
        return ""
    named = cell.steps[first.step].differences[first.quantity]
    unequal = [name for name, d in named.items() if d.verdict != "exact"]
    count = f"{len(unequal)} of {len(named)} differ there" if len(named) > 1 else ""
    place = "" if first == cell.first_divergence else f"the first bits that differ: {first}"
    return "; ".join(text for text in (place, count) if text)
