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
from fsshard.launching.pool import MOST_RANKS, RankPool
from fsshard.parity.bounds import ORDERS, BatchFacts, NotComparable, at_world_size, recorded_batches
from fsshard.parity.checking import rerun
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
from fsshard.parity.environment import changes, commit_of, told
from fsshard.parity.recorder import REFERENCE, Observed, observe, observe_perturbed
from fsshard.parity.render import ParityReport
from fsshard.parity.report import Cell, first_divergence
from fsshard.parity.trace import DETAILS, INITIAL, RankTrace, Shelf, Trace, merged_tensors
from fsshard.parity.training import Bare, Job
from fsshard.recipes.recipe import RecipeLike, check_mesh, data_ranks, mesh_text, resolve, splits

__all__ = ["BACKENDS", "compare", "record"]

BACKENDS = ("fairscale", "fsdp", "fsdp2", "ddp")
"""The backends that are compared unless others are named."""
PERTURBED_ENGINE = "ddp"
"""Trains the draws: whatever engine is compared, rounding errors of its kernels grow alike."""
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
    of every step equal to the last bit; the two zeros are equal, and so are two NaN), ``bound`` (differences that the
    order of sums explains, see :mod:`fsshard.parity.bounds`) or ``different``. The reference itself is run twice: a
    recipe that does not do the same thing twice is told so, before anything is compared.

    With ``against`` there is no reference: every backend is compared with a training that was recorded before, under
    another torch, on another machine or at another number of ranks. Both run freely from the same seed; where anything
    but the engine has changed, ``bound`` is as far as rounding carries this very training, which is measured.

    With ``mesh`` the model is divided as ``recipe.split`` says, and every backend on every mesh is compared with one
    process, which has nothing of fsshard in it.

    The reference's numbers lie on disk meanwhile, in the system's folder for temporary files (``TMPDIR``): per step
    the gradients, weights and optimizer state, so with Adam four times the model for each of ``steps``, once for all
    ranks.

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
        fails or hangs, has a cell that says so; where it is the reference, all cells of that world size do.

    Raises:
        RecipeError: the recipe is incomplete, not deterministic, or gives the engines different batches.
        ConfigurationError: an argument has no meaning. ModelError, OptimizerError: nor has the recipe's model, or its
            optimizer.
    """
    if mesh is not None and against is not None:
        raise ConfigurationError("mesh= and against=: what was recorded has no mesh; leave one of them out")
    if against is not None:
        backends = [against.backend] if backends is None else backends
        world_sizes = [against.world_size] if world_sizes is None else world_sizes
        steps = against.steps if steps is None else steps
    backends, steps = BACKENDS if backends is None else backends, 10 if steps is None else steps
    judge = reference or ("ddp" if mesh is None else "none")
    asked = [1] if mesh is not None else (1, 2) if world_sizes is None else world_sizes
    most = MOST_RANKS if pool is None else pool.most_ranks
    sizes = _checked(backends, asked, steps, judge, most)
    if against is not None and steps > against.steps:
        raise ConfigurationError(f"steps={steps}: {_named(against)} has {against.steps}; ask for as many or fewer")
    places: list[tuple[int, dict[str, int] | None]] = [(size, None) for size in sizes]
    if mesh is not None:
        meshes = _checked_meshes(mesh, recipe, backends, world_sizes, reference, most)
        places = [(data_ranks(each), each) for each in meshes]
    engine = Bare if mesh is not None else judge
    name = engine_name(engine) if against is None else _named(against)
    report = ParityReport(recipe=_transportable(recipe), reference=name, steps=steps)
    job = Job(source=recipe, engine=engine, steps=steps, world_size=1, device=device)
    with _running(pool, device, timeout, progress) as runner:
        if against is None:
            _compare_with_reference(runner, job, backends, places, report)
        else:
            runner.plan(len(backends) * len(sizes))
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
    _transportable(recipe)
    job = Job(source=recipe, engine=backend, steps=steps, world_size=world_size, device=device)
    with _running(pool, device, timeout, progress) as runner:
        runner.plan(2)
        trace = _observed(runner, job, recipe, detail, "recording")
        again = _observed(runner, job, recipe, detail, "again")
    cell = cell_of(engine_name(backend), world_size, compare_traces(trace, again), trace.parameters)
    check_deterministic(cell, trace.parameters, "recorded")
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


def _checked(
    backends: Sequence[EngineSpec], world_sizes: Iterable[int], steps: int, reference: str, most_ranks: int
) -> list[int]:
    """Raise for what has no meaning; return the numbers of ranks, each once."""
    if isinstance(backends, (str, Mapping)) or not isinstance(backends, Iterable) or not backends:
        raise ConfigurationError(f"backends={backends!r}: expected a list of backends, for example ['fsdp2', 'ddp']")
    names = [engine_name(spec) for spec in backends]
    for spec, name in zip(backends, names, strict=True):
        if backend_of(spec):
            backend_class(backend_of(spec), 2)  # raises for a name that is none
        elif name in backend_names():
            raise ConfigurationError(f"engine {spec.__name__} is named {name!r}, like a backend; give it another name")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigurationError(f"backends names {', '.join(twice)} twice")
    if reference not in backend_names() or not backend_class(reference).facts.is_reference:
        raise ConfigurationError(
            f"reference={reference!r}: expected 'ddp' or 'none' (one process on the joined batch); to compare other "
            "engines, list them in backends"
        )
    sizes = list(world_sizes) if isinstance(world_sizes, Iterable) else [world_sizes]
    if not sizes or not all(_positive(size) for size in sizes):
        raise ConfigurationError(f"world_sizes={world_sizes!r}: expected positive integers, for example [1, 2]")
    if not _positive(steps):
        raise ConfigurationError(f"steps={steps!r}: expected a positive integer")
    if max(sizes) > most_ranks:  # it would refuse them only after the smaller ones have run
        raise ConfigurationError(f"world_sizes={sizes!r}: the pool has at most {most_ranks} ranks")
    return list(dict.fromkeys(sizes))


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _checked_meshes(
    mesh: Any,
    recipe: RecipeLike,
    backends: Sequence[EngineSpec],
    world_sizes: Iterable[int] | None,
    reference: str | None,
    most_ranks: int,
) -> list[dict[str, int]]:
    """Raise for what has no meaning beside a mesh; return the meshes that ``mesh`` means, each once."""
    given = [mesh] if isinstance(mesh, Mapping) or not isinstance(mesh, Iterable) else list(mesh)
    if not given:
        raise ConfigurationError('mesh=[]: expected one mesh or several, for example {"data": 2, "tp": 2}')
    meshes = [check_mesh(each) for each in given]
    if reference is not None and not _in_one_process(reference):
        raise ConfigurationError(
            f"reference={reference!r}: what runs on a mesh is compared with one process; leave reference out"
        )
    own = [spec for spec in backends if isinstance(spec, type)]
    if own:
        raise ConfigurationError(
            f"backends holds {own[0].__name__}: an engine of your own cannot be given a mesh; name backends of fsshard"
        )
    asked = None if world_sizes is None else list(world_sizes if isinstance(world_sizes, Iterable) else [world_sizes])
    for sizes in meshes:
        ranks = math.prod(sizes.values())
        if asked is not None and asked != [ranks]:
            raise ConfigurationError(
                f"world_sizes={asked!r}: mesh={sizes} has {ranks} rank{'s' * (ranks > 1)}; leave world_sizes out, or "
                "give a mesh of that many"
            )
        if ranks > most_ranks:
            raise ConfigurationError(f"mesh={sizes}: it has {ranks} ranks, and the pool at most {most_ranks}")
        if splits(sizes) and resolve(recipe).split is None:
            raise RecipeError(
                f"mesh={sizes}: the recipe does not say how its model is divided over {', '.join(splits(sizes))}; give "
                'it a function split(model, mesh) that divides the model and returns {"device_mesh": mesh["data"], '
                "...}, or compare on a mesh of data alone"
            )
    return list({mesh_text(sizes): sizes for sizes in meshes}.values())


# -------------------------------------------------------------------------------------------------------------- runs


def _in_one_process(spec: EngineSpec) -> bool:
    """Return whether an engine trains on the joined batches of all ranks in one process."""
    return spec is Bare or (bool(backend_of(spec)) and backend_class(backend_of(spec)).facts.one_process)


class _Runner:
    """Runs jobs on a pool, and tells the progress over all of them; a run counts as one."""

    def __init__(self, ranks: RankPool, timeout: float, progress: Progress | None) -> None:
        self._ranks, self._timeout, self._progress = ranks, timeout, progress
        self._total, self._done = 0, 0.0

    def plan(self, runs: int) -> None:
        """Expect so many runs more."""
        self._total += runs

    def run(self, function: Callable[..., Any], job: Job, *arguments: Any, text: str = "") -> list[Any]:
        """Return the results of ``function(job, *arguments)``, one of each rank of the job."""
        samples = "the samples of " if job.engine is Bare else ""
        count = 1 if _in_one_process(job.engine) else job.world_size
        where = f"{samples}{job.world_size} rank{'s' * (job.world_size > 1)}"
        if job.mesh is not None:
            count, where = math.prod(job.mesh.values()), mesh_text(job.mesh)
        shown = f"{engine_name(job.engine)} on {where}{f' ({text})' if text else ''}"
        return self.call(function, count, job, *arguments, text=shown)

    def call(self, function: Callable[..., Any], count: int, *arguments: Any, text: str) -> list[Any]:
        """Return the results of a function, one of each rank; what the user did wrong is raised as it is."""

        def hear(rank: int, part: float) -> None:
            if rank == 0:
                self._show(self._done + min(part, 1.0), text)

        self._show(self._done, text)
        try:
            found = self._ranks.run(function, count, *arguments, timeout=self._timeout, on_message=hear)
        except RankFailed as error:
            if isinstance(error.__cause__, USERS_MISTAKES):
                raise error.__cause__ from error
            raise
        self._done = min(self._done + 1.0, float(self._total))
        self._show(self._done, text)
        return found

    def _show(self, done: float, text: str) -> None:
        if self._progress is not None:
            self._progress(done, float(self._total), text)


@contextlib.contextmanager
def _running(pool: RankPool | None, device: str, timeout: float, progress: Progress | None) -> Iterator[_Runner]:
    """Yield a runner on ``pool``, or on ranks that are started for it, and ended at the end."""
    with contextlib.ExitStack() as stack:
        ranks = pool if pool is not None else stack.enter_context(contextlib.closing(RankPool(device=device)))
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
            cell.reproducible = _comes_again(runner, compared, job, cell)
            cell.reason = cell.reason or ("" if job.mesh else _hint(cell))
    except RecipeError:
        raise  # whatever the engine
    except refusals as error:
        cell = Cell(backend="", world_size=0, verdict="refused", reason=str(error))
    except RankFailed as error:
        cell = _failed(error)
        if job.mesh is not None and isinstance(error.__cause__, (GradientError, RankMismatch)):
            cell.reason, cell.traceback = str(error.__cause__), ""  # found by fsshard, and told in its words
    return _at(job, replace(cell, seconds=time.perf_counter() - start))


def _comes_again(runner: _Runner, compared: Compared, job: Job, cell: Cell) -> bool:
    runner.plan(1)
    try:
        steps = compared(job, "again").steps
    except (RankFailed, FsshardError):
        return False
    return [step.differences for step in steps] == [step.differences for step in cell.steps]


def _at(job: Job, cell: Cell) -> Cell:
    """Return the cell, with its place in the report."""
    size, mesh = (job.world_size, "") if job.mesh is None else (math.prod(job.mesh.values()), mesh_text(job.mesh))
    return replace(cell, backend=engine_name(job.engine), world_size=size, mesh=mesh)


def _failed(error: RankFailed, prefix: str = "") -> Cell:
    reason = prefix + str(error).partition("\n\n")[0]
    return Cell(backend="", world_size=0, verdict="failed", reason=reason, traceback=error.traceback)


def _hint(cell: Cell) -> str:
    """Guess the cause of a difference, where the numbers suggest one."""
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
    runner.plan(2 * len(sizes) + same.count(False) * len(places))
    for size in sizes:  # the numbers of one reference are on disk at a time
        with tempfile.TemporaryDirectory(prefix="fsshard-parity-") as folder:
            joined = _in_one_process(reference.engine) and (size > 1 or reference.engine is Bare)
            job = replace(reference, world_size=size, folder=folder, reference_joined=joined)
            judge = _judge(runner, job)
            if isinstance(judge, _Reference):
                report.warnings += [text for text in _caveats(job, judge.ranks) if text not in report.warnings]
            for place, (ranks, mesh) in enumerate(places):
                for number, spec in enumerate(backends if ranks == size else ()):
                    candidate = replace(job, engine=spec, mesh=mesh)
                    if isinstance(judge, Cell):
                        cells[place, number] = _at(candidate, judge)
                    else:
                        cells[place, number] = judge.again if same[number] else _cell(runner, judge, candidate)
    report.cells = [cells[key] for key in sorted(cells)]


def _judge(runner: _Runner, job: Job) -> _Reference | Cell:
    """Return the reference, twice run; where it cannot be, the cell of all engines."""
    try:
        return _Reference(runner, job)
    except NotComparable as error:
        if job.engine is not Bare:
            raise
        return Cell(backend="", world_size=0, verdict="refused", reason=str(error))
    except RankFailed as error:  # results at other numbers of ranks are kept
        name = f", {Bare.name}" if job.engine is Bare else f" {job.engine!r}"
        return _failed(error, f"the reference{name}: ")


class _Reference:
    """A training that runs first, and once more to see if it does the same; others are compared with it.

    Attributes:
        ranks: its steps, rank by rank.
        again: its second run.
    """

    def __init__(self, runner: _Runner, job: Job) -> None:
        seen: list[Observed] = runner.run(observe, job, REFERENCE, text="reference")
        self._runner, self._parameters = runner, seen[0].parameters
        self.ranks = [one.trace for one in seen]
        self.again = self(job, "reference, again")
        check_deterministic(self.again, self._parameters, "compared")

    def __call__(self, job: Job, text: str) -> Cell:
        """Run a job, and compare it with the reference."""
        start = time.perf_counter()
        steps = merged(self._runner.run(rerun, job, self.ranks, text=text))
        cell = cell_of(engine_name(job.engine), job.world_size, steps, self._parameters)
        return replace(cell, seconds=time.perf_counter() - start)


def _caveats(job: Job, ranks: list[RankTrace]) -> list[str]:
    """Say why agreement with this reference proves little, one sentence each."""
    # Engines that all do nothing agree: a recipe may let pass faults that it was meant to find.
    found = []
    infinite = [
        f"the loss is {rank.steps[step].loss} at step {step} on rank {number} under the reference: from there on "
        "everything is NaN or infinite under every engine, so agreement proves nothing"
        for step in range(job.steps)
        for number, rank in enumerate(ranks)
        if not math.isfinite(rank.steps[step].loss)
    ]
    found += infinite[:1]
    batches: dict[tuple[int, int], set[str]] = {}
    for step in range(job.steps):
        for (micro, _), (digest, _) in all_batches(ranks, step).items():
            batches.setdefault((step, micro), set()).add(digest)
    if job.world_size > 1 and all(len(digests) == 1 for digests in batches.values()):
        found.append(
            "all ranks get the same batches, so an engine that reduces no gradient would agree, too; make "
            "recipe.batches depend on the rank"
        )
    before, after = Shelf(job.folder, INITIAL, "weight", 0), Shelf(job.folder, job.steps - 1, "weight", 0)
    if all(torch.equal(value, after[name]) for name, value in before.items() if name in after):
        steps = f"{job.steps} step{'s' * (job.steps > 1)}"
        found.append(f"no weight changed in {steps} (a learning rate of zero?), so the optimizers were not tested")
    return found


# ------------------------------------------------------------------------------------------------ a recorded training


def _observed(runner: _Runner, job: Job, recipe: RecipeLike, detail: str, text: str) -> Trace:
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
        self._batches: list[BatchFacts] | None = None

    def __call__(self, job: Job, text: str) -> Cell:
        """Run a job, and compare it with the record."""
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
        cell.reason = "; ".join(text for text in said if text and cell.verdict != "exact")
        return cell

    def _divided(self, job: Job) -> tuple[Job, bool]:
        """Return the run as it is to be, and whether its processes train on the batches that the recorded ones did."""
        recorded, processes = self._trace.world_size, len(self._trace.ranks)
        if _in_one_process(job.engine):  # on the joined batches of as many ranks as were recorded
            return replace(job, world_size=recorded), processes == 1
        if job.world_size == recorded:
            return job, processes == recorded
        return replace(job, source=at_world_size(job.source, recorded)), False

    def _recorded_batches(self, job: Job) -> list[BatchFacts]:
        """Return the recorded ranks' batches, once it is known that other ranks train the same on them."""
        if self._batches is None:
            self.runner.plan(1)
            given = self._recipe, self._trace.world_size, job.steps, job.device
            self._batches = self.runner.call(recorded_batches, 1, *given, text="other ranks?")[0]
        return self._batches

    def _drawn(self, job: Job) -> list[list[RankTrace]]:
        """Return one training as it is, then each draw, as their ranks saw them; the same for all engines of a kind."""
        one_process = _in_one_process(job.engine)
        if one_process not in self._draws:
            self.runner.plan(1)
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
