"""compare() and record(): train one recipe under several engines, each on its own ranks, and report the differences."""

from __future__ import annotations

import contextlib
import math
import pickle
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fsshard.backends import backend_class, backend_names
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
from fsshard.parity.bounds import ORDERS, NotComparable
from fsshard.parity.checking import REFERENCE, check_samples_apart, observe, observe_perturbed, rerun
from fsshard.parity.comparing import (
    all_batches,
    cell_of,
    check_deterministic,
    compare_traces,
    first_output,
    freedom,
    merged,
    needs_bounds,
)
from fsshard.parity.engine import EngineSpec, backend_of, engine_name
from fsshard.parity.render import ParityReport
from fsshard.parity.report import Cell, first_divergence
from fsshard.parity.trace import (
    DETAILS,
    INITIAL,
    RankTrace,
    Trace,
    changes,
    commit_of,
    merged_tensors,
    read_tensors,
    told,
)
from fsshard.parity.training import Bare, Job
from fsshard.recipes.recipe import RecipeLike, check_mesh, data_ranks, mesh_text, resolve, splits

BACKENDS = ("fairscale", "fsdp", "fsdp2", "ddp")
"""The backends that are compared unless others are named."""
USERS_MISTAKES = (ConfigurationError, MissingExtra, ModelError, OptimizerError)
"""Raised on the ranks; raised again as they are, since the rank's traceback would tell the user nothing. On a mesh the
cell says so: the same recipe may be trained on another one."""
REFUSALS = (UnsupportedByBackend, MissingExtra, NotComparable)
"""Raised where an engine has no such thing, or a comparison no meaning: the cell says so."""
Progress = Callable[[float, float, str], None]


def compare(
    recipe: RecipeLike,
    *,
    backends: Sequence[EngineSpec] | None = None,
    world_sizes: Iterable[int] | None = None,
    steps: int | None = None,
    reference: str | None = None,
    against: Trace | None = None,
    mesh: Mapping[str, int] | Sequence[Mapping[str, int]] | None = None,
    timeout: float = 120.0,
    pool: RankPool | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> ParityReport:
    """Train ``recipe`` under every backend from the same seed and weights, and compare each with the reference.

    The verdict on each backend and world size is ``exact`` (every loss, gradient, weight, optimizer state and buffer
    of every step equal to the last bit; the two zeros are equal, and so are two NaN), ``bound`` (differences that
    rounding explains) or ``different``: docs/proof.md. The reference itself is run twice: a recipe that does not do the
    same thing twice is told so, before anything is compared. Its numbers lie in the system's folder for temporary files
    (``TMPDIR``) meanwhile: per step the gradients, weights and optimizer state.

    With ``against`` every backend is compared with a training that was recorded before, under another torch, on another
    machine or at another number of ranks. With ``mesh`` the model is divided by ``recipe.split``, and every
    backend on every mesh is compared with one process, which has nothing of fsshard in it.

    Args:
        recipe: a :class:`~fsshard.parity.Recipe`, an object like one, a function that returns one, or
            ``"module:attribute"``. It must be picklable; functions are pickled by name.
        backends: names of backends, dicts of :func:`fsshard.wrap`'s arguments with ``"backend"`` among them, or
            subclasses of :class:`~fsshard.parity.Engine`. ``"none"`` is one process on the joined batches of all ranks.
            None: fairscale, fsdp, fsdp2 and ddp, or the recorded one.
        world_sizes: numbers of ranks; each is a comparison of its own. None: 1 and 2, the recorded one, or the mesh's.
        steps: optimizer steps per run. None: 10, or as many as are recorded.
        reference: ``"ddp"``, or ``"none"``, one process on the joined batch. None: ``"ddp"``; with ``mesh`` the other.
        against: a recorded training, of :func:`fsshard.parity.record` or ``Trace.load``, in place of a reference.
        mesh: sizes of a mesh by name, ``{"data": 2, "tp": 2}``, or several such; a cell for each mesh and backend.
        timeout: seconds that a run may take.
        pool: ranks to run on; by default they are started, and ended at the end.
        device: ``"cpu"`` (gloo), or ``"cuda"`` (nccl, one device per rank); a pool given must be of that kind.
        progress: called with (done, total, what is running).

    Returns:
        A report, with warnings where agreement means little. A backend that refuses the recipe, or on which a rank
        fails or hangs, has a cell that reports it; where it is the reference, all cells of that world size do.

    Raises:
        RecipeError: the recipe is incomplete, not deterministic, or gives the engines different batches.
        ConfigurationError: an argument has no meaning. ModelError, OptimizerError: nor has the recipe's model, or its
            optimizer.
    """
    if mesh is not None and against is not None:
        raise ConfigurationError("mesh= and against=: a recorded training has no mesh; leave one of them out")
    if against is not None:
        backends = [against.backend] if backends is None else backends
        world_sizes = [against.world_size] if world_sizes is None else world_sizes
        steps = against.steps if steps is None else steps
    backends, steps = BACKENDS if backends is None else backends, 10 if steps is None else steps
    judge = reference or ("ddp" if mesh is None else "none")
    sizes = _checked(backends, (1, 2) if world_sizes is None else world_sizes, steps, judge)
    if against is not None and steps > against.steps:
        raise ConfigurationError(f"steps={steps}: {_named(against)} has {against.steps}; ask for at most as many")
    places: list[tuple[int, dict[str, int] | None]] = [(size, None) for size in sizes]
    if mesh is not None:
        meshes = _checked_meshes(mesh, recipe, backends, None if world_sizes is None else sizes, reference)
        places = [(data_ranks(each), each) for each in meshes]
    engine = Bare if mesh is not None else judge
    name = engine_name(engine) if against is None else _named(against)
    report = ParityReport(recipe=_transportable(recipe), reference=name, steps=steps)
    job = Job(source=recipe, engine=engine, steps=steps, world_size=1, device=device)
    with _running(pool, device, timeout, progress) as runner:
        if against is None:
            _compare_with_reference(runner, job, backends, places, report)
        else:
            runner.total = len(backends) * len(sizes)
            for size in sizes:
                kept = _Record(runner, against, recipe, report)
                report.cells += [_cell(runner, kept, replace(job, engine=spec, world_size=size)) for spec in backends]
    return report


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
            these themselves, held in memory once; a comparison then names the element that differs most). For bounds,
            ``"tensors"`` runs each step's forward and backward once more, where ranks may add in another order.
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
    _transportable(recipe)
    job = Job(source=recipe, engine=backend, steps=steps, world_size=world_size, device=device)
    with _running(pool, device, timeout, progress) as runner:
        runner.total = 2
        trace = _observed(runner, job, recipe, detail, "recording")
        again = _observed(runner, job, recipe, detail, "again")
    cell = cell_of(compare_traces(trace, again), trace.parameters)
    check_deterministic(_at(job, cell), trace.parameters, "recorded")
    return trace


# --------------------------------------------------------------------------------------------------------- arguments


def _transportable(recipe: RecipeLike) -> str:
    """Return the recipe's name, once it is known to be one and to reach the ranks."""
    try:
        pickle.dumps(recipe)
    except Exception as error:
        raise RecipeError(
            f"the recipe cannot be sent to the ranks ({error}); use functions at the top level of a module, or pass a "
            "function at the top level of a module that returns the recipe; then its lambdas need not be sent"
        ) from error
    return resolve(recipe).name


def _checked(backends: Sequence[EngineSpec], world_sizes: Iterable[int], steps: int, reference: str) -> list[int]:
    """Raise for what has no meaning; return the numbers of ranks, each once."""
    if isinstance(backends, (str, Mapping)) or not isinstance(backends, Iterable) or not backends:
        raise ConfigurationError(f"backends={backends!r}: expected a list of backends, for example ['fsdp2', 'ddp']")
    names = [engine_name(spec) for spec in backends]
    for spec, name in zip(backends, names, strict=True):
        if backend_of(spec):
            backend_class(backend_of(spec), 2)  # raises for a name that is none
        elif name in backend_names():  # the report would show the one as the other
            raise ConfigurationError(f"engine {spec.__name__} is named {name!r}, like a backend; give it another name")
    if reference not in backend_names() or not backend_class(reference).facts.is_reference:
        raise ConfigurationError(
            f"reference={reference!r}: expected 'ddp' or 'none' (one process on the joined batch); to compare other "
            "engines, list them in backends"
        )
    sizes = list(world_sizes) if isinstance(world_sizes, Iterable) else [world_sizes]
    for said, numbers in ((f"world_sizes={world_sizes!r}", sizes), (f"steps={steps!r}", [steps])):
        if not numbers or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in numbers):
            raise ConfigurationError(f"{said}: expected positive integers, for example [1, 2] and 10")
    return list(dict.fromkeys(sizes))


def _checked_meshes(
    mesh: Any, recipe: RecipeLike, backends: Sequence[EngineSpec], world_sizes: list[int] | None, reference: str | None
) -> list[dict[str, int]]:
    """Raise for what has no meaning together with a mesh; return the meshes that ``mesh`` means, each once."""
    given = [mesh] if isinstance(mesh, Mapping) or not isinstance(mesh, Iterable) else list(mesh)
    if not given:
        raise ConfigurationError('mesh=[]: expected one mesh or several, for example {"data": 2, "tp": 2}')
    if reference is not None and not _in_one_process(reference):
        raise ConfigurationError(
            f"reference={reference!r}: what runs on a mesh is compared with one process; leave reference out"
        )
    own = [spec.__name__ for spec in backends if isinstance(spec, type)]
    if own:
        raise ConfigurationError(
            f"backends holds {own[0]}: an engine of your own cannot be given a mesh; name backends of fsshard"
        )
    meshes = {mesh_text(sizes): sizes for sizes in map(check_mesh, given)}
    for text, sizes in meshes.items():
        ranks = math.prod(sizes.values())
        if world_sizes is not None and world_sizes != [ranks]:
            raise ConfigurationError(f"world_sizes={world_sizes}: mesh {text} has {ranks} ranks; leave world_sizes out")
        if splits(sizes) and resolve(recipe).split is None:
            raise RecipeError(
                f"mesh {text}: the recipe does not say how its model is divided over {', '.join(splits(sizes))}; give "
                'it a function split(model, mesh) that divides the model and returns {"device_mesh": mesh["data"], '
                "...}, or compare on a mesh of data alone"
            )
    return list(meshes.values())


# -------------------------------------------------------------------------------------------------------------- runs


def _in_one_process(spec: EngineSpec) -> bool:
    """Return whether an engine trains on the joined batches of all ranks in one process."""
    return spec is Bare or (bool(backend_of(spec)) and backend_class(backend_of(spec)).facts.one_process)


class _Runner:
    """Runs jobs on a pool, and tells the progress over all of them; a run counts as one.

    Attributes:
        total: runs that are expected altogether.
    """

    def __init__(self, ranks: RankPool, timeout: float, progress: Progress | None) -> None:
        self._ranks, self._timeout, self._progress = ranks, timeout, progress
        self.total, self._done = 0, 0.0

    def run(self, function: Callable[..., Any], job: Job, *arguments: Any, text: str = "") -> list[Any]:
        """Return the results of ``function(job, *arguments)`` of each rank; a user's mistake is raised as it is."""
        samples = "the samples of " if job.engine is Bare else ""
        named = job.processes or job.world_size
        count = 1 if _in_one_process(job.engine) else named
        where = f"{samples}{named} rank{'s' * (named > 1)}"
        if job.mesh is not None:
            count, where = math.prod(job.mesh.values()), mesh_text(job.mesh)
        shown = f"{engine_name(job.engine)} on {where}{f' ({text})' if text else ''}"

        def show(done: float) -> None:
            if self._progress is not None:
                self._progress(min(self._done + done, float(self.total)), float(self.total), shown)

        def hear(rank: int, part: float) -> None:
            if rank == 0:
                show(min(part, 1.0))

        show(0.0)
        try:
            found = self._ranks.run(function, count, job, *arguments, timeout=self._timeout, on_message=hear)
        except RankFailed as error:
            if isinstance(error.__cause__, USERS_MISTAKES):
                raise error.__cause__ from error
            raise
        self._done += 1.0
        show(0.0)
        return found


@contextlib.contextmanager
def _running(pool: RankPool | None, device: str, timeout: float, progress: Progress | None) -> Iterator[_Runner]:
    """Yield a runner on ``pool``, or on ranks that are started for it, and ended at the end."""
    with contextlib.nullcontext(pool) if pool is not None else contextlib.closing(RankPool(device=device)) as ranks:
        yield _Runner(ranks, timeout, progress)


Compared = Callable[[Job, str], Cell]
"""Runs a job, shown with a text, and compares it."""


def _cell(runner: _Runner, compared: Compared, job: Job) -> Cell:
    """Return the verdict on one run."""
    start, refusals = time.perf_counter(), REFUSALS if job.mesh is None else USERS_MISTAKES
    try:
        cell = compared(job, "")
        if cell.verdict == "different":
            # once more, to tell a race from a fault
            runner.total += 1
            try:
                cell.reproducible = [s.differences for s in compared(job, "again").steps] == [
                    s.differences for s in cell.steps
                ]
            except FsshardError:
                cell.reproducible = False
    except RecipeError:
        raise  # whatever the engine
    except refusals as error:
        cell = Cell(backend="", world_size=0, verdict="refused", reason=str(error))
    except RankFailed as error:
        cell = _failed(error)
        if job.mesh is not None and isinstance(error.__cause__, (GradientError, RankMismatch)):
            cell.reason, cell.traceback = str(error.__cause__), ""  # found by fsshard, and told in its words
    return _at(job, replace(cell, seconds=time.perf_counter() - start))


def _at(job: Job, cell: Cell) -> Cell:
    """Return the cell, with its place in the report."""
    size, mesh = (job.world_size, "") if job.mesh is None else (math.prod(job.mesh.values()), mesh_text(job.mesh))
    return replace(cell, backend=engine_name(job.engine), world_size=size, mesh=mesh)


def _failed(error: RankFailed, prefix: str = "") -> Cell:
    reason = prefix + str(error).partition("\n\n")[0]
    return Cell(backend="", world_size=0, verdict="failed", reason=reason, traceback=error.traceback)


# ----------------------------------------------------------------------------------------------------- a reference


def _compare_with_reference(
    runner: _Runner,
    reference: Job,
    backends: Sequence[EngineSpec],
    places: Sequence[tuple[int, dict[str, int] | None]],
    report: ParityReport,
) -> None:
    """Compare ``backends`` at each of ``places``, (ranks of data, mesh), with ``reference`` on as many of them."""
    sizes, cells = list(dict.fromkeys(size for size, _ in places)), dict[tuple[int, int], Cell]()
    same = [spec == reference.engine or spec == {"backend": reference.engine} for spec in backends]
    runner.total = 2 * len(sizes) + same.count(False) * len(places)
    for size in sizes:  # the numbers of one reference are on disk at a time
        with tempfile.TemporaryDirectory(prefix="fsshard-parity-") as folder:
            job = replace(reference, world_size=size, folder=folder)
            judge: _Reference | Cell
            try:
                judge = _Reference(runner, job)
                report.warnings += [text for text in _caveats(job, judge.ranks) if text not in report.warnings]
            except NotComparable as error:
                if job.engine is not Bare:
                    raise
                judge = Cell(backend="", world_size=0, verdict="refused", reason=str(error))
            except RankFailed as error:  # results at other numbers of ranks are kept
                name = f", {Bare.name}" if job.engine is Bare else f" {job.engine!r}"
                judge = _failed(error, f"the reference{name}: ")
            for place, (ranks, mesh) in enumerate(places):
                for number, spec in enumerate(backends if ranks == size else ()):
                    candidate = replace(job, engine=spec, mesh=mesh)
                    if isinstance(judge, Cell):
                        cells[place, number] = _at(candidate, judge)
                    else:
                        cells[place, number] = judge.again if same[number] else _cell(runner, judge, candidate)
    report.cells = [cells[key] for key in sorted(cells)]


class _Reference:
    """A training that runs first, and once more to see if it does the same; others are compared with it.

    Attributes:
        ranks: its steps, rank by rank.
        again: its second run.
    """

    def __init__(self, runner: _Runner, job: Job) -> None:
        seen = runner.run(observe, job, REFERENCE, text="reference")
        self._runner, self._parameters, self.ranks = runner, seen[0][1], [trace for trace, _, _ in seen]
        start = time.perf_counter()
        self.again = _at(job, replace(self(job, "reference, again"), seconds=time.perf_counter() - start))
        check_deterministic(self.again, self._parameters, "compared")

    def __call__(self, job: Job, text: str) -> Cell:
        """Run a job, and compare it with the reference."""
        return cell_of(merged(self._runner.run(rerun, job, self.ranks, text=text)), self._parameters)


def _caveats(job: Job, ranks: list[RankTrace]) -> list[str]:
    """Say why agreement with this reference proves little, one sentence each."""
    # Engines that all do nothing agree: a recipe may let pass faults that it was meant to find.
    found, alike = list[str](), job.world_size > 1
    for step in range(job.steps):
        for number, rank in enumerate(ranks):
            if not found and not math.isfinite(rank.steps[step].loss):
                found.append(
                    f"the loss is {rank.steps[step].loss} at step {step} on rank {number} under the reference: from "
                    "there on everything is NaN or infinite under every engine, so agreement proves nothing"
                )
        batches = {(micro, digest) for (micro, _), (digest, _) in all_batches(ranks, step).items()}
        alike = alike and len(batches) == len({micro for micro, _ in batches})
    if alike:
        found.append(
            "all ranks get the same batches, so an engine that reduces no gradient would agree, too; make "
            "recipe.batches depend on the rank"
        )
    before, after = (read_tensors(job.folder, step, "weight", 0) for step in (INITIAL, job.steps - 1))
    if all(torch.equal(value, after[name]) for name, value in before.items() if name in after):
        steps = f"{job.steps} step{'s' * (job.steps > 1)}"
        found.append(f"no weight changed in {steps} (a learning rate of zero?), so the optimizers were not tested")
    return found


# ------------------------------------------------------------------------------------------------ a recorded training


def _observed(runner: _Runner, job: Job, recipe: RecipeLike, detail: str, text: str) -> Trace:
    """Train, and return the record of it; its tensors lie in a temporary folder until it is saved."""
    folder = tempfile.mkdtemp(prefix="fsshard-parity-") if detail == "tensors" else ""
    try:
        seen = runner.run(observe, replace(job, folder=folder), detail, text=text)
        resolved, (_, parameters, environment) = resolve(recipe), seen[0]
        trace = Trace(
            recipe=told(resolved),
            environment=environment,
            commit=commit_of(resolved),
            backend=engine_name(job.engine),
            world_size=job.world_size,
            device=job.device,
            detail=detail,
            parameters=parameters,
            ranks=[one for one, _, _ in seen],
            tensors=merged_tensors(folder) if folder else None,
        )
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if folder:
        weakref.finalize(trace, shutil.rmtree, folder, ignore_errors=True)
    return trace


def _named(trace: Trace) -> str:
    where = f"recorded in {trace.file}" if trace.file is not None else "recorded"
    ranks = f"{trace.world_size} rank{'s' * (trace.world_size > 1)}"
    return f"{trace.backend} on {ranks} with torch {trace.environment.get('torch', '?')}, {where}"


class _Record:
    """A recorded training that all engines at one number of ranks are compared with."""

    def __init__(self, runner: _Runner, trace: Trace, recipe: RecipeLike, report: ParityReport) -> None:
        self.runner, self._trace, self._recipe, self._report = runner, trace, recipe, report
        self._draws: dict[bool, list[list[RankTrace]]] = {}
        self._checked = False

    def __call__(self, job: Job, text: str) -> Cell:
        """Run a job, and compare it with the record."""
        before, size, recorded = self._trace, job.world_size, self._trace.world_size
        # Processes train on the batches of the recorded ones, or on the same samples, divided otherwise: one process
        # on the joined batches of all ranks.
        one_process = _in_one_process(job.engine)
        same = len(before.ranks) == (1 if one_process else size) and (one_process or size == recorded)
        job = replace(job, world_size=recorded, processes=0 if one_process or size == recorded else size)
        if not same:
            self._check_samples_apart(job)
        now = _observed(self.runner, job, self._recipe, before.detail, text or "against the record")
        self._note_changes(now)
        may_round = freedom(before, now) if same else "everything"
        steps = compare_traces(before, now, regrouped=not same, exactly=may_round == "nothing")
        beside = bool(before.ranks[0].rounding) and bool(backend_of(job.engine))  # its weights can be reset
        if needs_bounds(steps) and may_round == "sum over ranks" and beside:
            # With the record's tensors each step starts as it did then, and the bound is the sum's alone.
            self.runner.total += 1
            job = replace(job, folder=str(before.tensors))
            steps = merged(self.runner.run(rerun, job, before.ranks, text="step by step"))
        elif needs_bounds(steps) and may_round != "nothing":
            steps = compare_traces(before, now, regrouped=not same, draws=self._drawn(job, one_process))
        cell = cell_of(steps, before.parameters)
        said = (_first_bits(cell, before.parameters), first_output(before, now) if same else "")
        cell.reason = "; ".join(text for text in said if text and cell.verdict != "exact")
        return cell

    def _check_samples_apart(self, job: Job) -> None:
        if not self._checked:
            self.runner.total += 1
            self.runner.run(check_samples_apart, replace(job, engine=Bare, processes=0), text="other ranks?")
            self._checked = True

    def _drawn(self, job: Job, one_process: bool) -> list[list[RankTrace]]:
        """Return one training as it is, then each draw, as their ranks saw them; the same for all engines of a kind."""
        if one_process not in self._draws:
            self.runner.total += 1
            job = replace(job, engine=job.engine if one_process else "ddp")  # under any engine rounding grows alike
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
