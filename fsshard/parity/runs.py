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
from dataclasses import dataclass, field, replace
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
from fsshard.planning.text import counted, is_count
from fsshard.recipes.recipe import RecipeLike, Sizes, check_mesh, data_ranks, mesh_text, resolve, splits

# The backends that are compared unless others are named.
BACKENDS = ("fairscale", "fsdp", "fsdp2", "ddp")
# Raised on the ranks; raised again as they are, since the rank's traceback would tell the user nothing. On a mesh the
# cell says so: the same recipe may be trained on another one.
USERS_MISTAKES = (ConfigurationError, MissingExtra, ModelError, OptimizerError)
# Raised where an engine has no such thing, or a comparison no meaning: the cell says so.
REFUSALS = (UnsupportedByBackend, MissingExtra, NotComparable)
Progress = Callable[[float, float, str], None]
# Ranks of data, and the mesh that has them, if there is one.
Place = tuple[int, dict[str, int] | None]


def compare(
    recipe: RecipeLike,
    *,
    backends: Sequence[EngineSpec] | None = None,
    world_sizes: Iterable[int] | None = None,
    steps: int | None = None,
    reference: str | None = None,
    against: Trace | None = None,
    mesh: Sizes | Sequence[Sizes] | None = None,
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
        # What is not asked for is as it was recorded.
        if backends is None:
            backends = [against.backend]
        if world_sizes is None:
            world_sizes = [against.world_size]
        if steps is None:
            steps = against.steps
    if backends is None:
        backends = BACKENDS
    if steps is None:
        steps = 10
    judge: EngineSpec = reference or ("ddp" if mesh is None else "none")
    sizes_asked = (1, 2) if world_sizes is None else world_sizes
    sizes = _checked(backends, sizes_asked, steps, judge)
    if against is not None and steps > against.steps:
        raise ConfigurationError(f"steps={steps}: {_named(against)} has {against.steps}; ask for at most as many")
    places: list[Place] = [(size, None) for size in sizes]
    if mesh is not None:
        judge = Bare
        meshes = _checked_meshes(mesh, recipe, backends, None if world_sizes is None else sizes, reference)
        places = [(data_ranks(each), each) for each in meshes]
    report = ParityReport(
        recipe=_transportable(recipe),
        reference=engine_name(judge) if against is None else _named(against),
        steps=steps,
    )
    job = Job(
        source=recipe,
        engine=judge,
        steps=steps,
        world_size=1,
        device=device,
    )
    with _running(pool, device, timeout, progress) as runner:
        if against is None:
            _compare_with_reference(runner, job, backends, places, report)
        else:
            runner.total = len(backends) * len(sizes)
            for size in sizes:
                comparison = _Record(runner, against, recipe, report)
                for spec in backends:
                    candidate = replace(job, engine=spec, world_size=size)
                    report.cells.append(_cell(runner, comparison, candidate))
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


def _checked(
    backends: Sequence[EngineSpec],
    world_sizes: Iterable[int],
    steps: int,
    reference: str,
) -> list[int]:
    """Raise for what has no meaning; return the numbers of ranks, each once."""
    if isinstance(backends, (str, Mapping)) or not isinstance(backends, Iterable) or not backends:
        raise ConfigurationError(f"backends={backends!r}: expected a list of backends, for example ['fsdp2', 'ddp']")
    names = list(map(engine_name, backends))
    for spec, name in zip(backends, names, strict=True):
        backend = backend_of(spec)
        if backend:
            # It raises for a name that is no backend's.
            backend_class(backend, 2)
        elif name in backend_names():
            # The report would show the one as the other.
            raise ConfigurationError(f"engine {spec.__name__} is named {name!r}, like a backend; give it another name")
    if reference not in backend_names() or not backend_class(reference).facts.is_reference:
        raise ConfigurationError(
            f"reference={reference!r}: expected 'ddp' or 'none' (one process on the joined batch); to compare other "
            "engines, list them in backends"
        )
    sizes = list(world_sizes) if isinstance(world_sizes, Iterable) else [world_sizes]
    _check_numbers(f"world_sizes={world_sizes!r}", sizes)
    _check_numbers(f"steps={steps!r}", [steps])
    return list(dict.fromkeys(sizes))


def _check_numbers(argument: str, numbers: list[int]) -> None:
    if not numbers or not all(map(is_count, numbers)):
        raise ConfigurationError(f"{argument}: expected positive integers, for example [1, 2] and 10")


def _checked_meshes(
    mesh: Any,
    recipe: RecipeLike,
    backends: Sequence[EngineSpec],
    world_sizes: list[int] | None,
    reference: str | None,
) -> list[dict[str, int]]:
    """Raise for what has no meaning together with a mesh; return the meshes that ``mesh`` means, each once."""
    meshes_asked = [mesh]
    if isinstance(mesh, Iterable) and not isinstance(mesh, Mapping):
        meshes_asked = list(mesh)
    if not meshes_asked:
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
    meshes = {mesh_text(sizes): sizes for sizes in map(check_mesh, meshes_asked)}
    for text, sizes in meshes.items():
        ranks = math.prod(sizes.values())
        if world_sizes is not None and world_sizes != [ranks]:
            raise ConfigurationError(f"world_sizes={world_sizes}: mesh {text} has {ranks} ranks; leave world_sizes out")
        dims = splits(sizes)
        if dims and resolve(recipe).split is None:
            raise RecipeError(
                f"mesh {text}: the recipe does not say how its model is divided over {', '.join(dims)}; give "
                'it a function split(model, mesh) that divides the model and returns {"device_mesh": mesh["data"], '
                "...}, or compare on a mesh of data alone"
            )
    return list(meshes.values())


# -------------------------------------------------------------------------------------------------------------- runs


def _in_one_process(spec: EngineSpec) -> bool:
    """Return whether an engine trains on the joined batches of all ranks in one process."""
    backend = backend_of(spec)
    if not backend:
        return spec is Bare
    return backend_class(backend).facts.one_process


@dataclass
class _Runner:
    """Runs jobs on a pool, and tells the progress over all of them; a run counts as one."""

    ranks: RankPool
    timeout: float
    progress: Progress | None
    total: int = 0  # runs that are expected altogether
    done: int = 0

    def run(
        self,
        function: Callable[..., Any],
        job: Job,
        *arguments: Any,
        text: str = "",
    ) -> list[Any]:
        """Return the results of ``function(job, *arguments)`` of each rank; a user's mistake is raised as it is."""
        count = job.processes or job.world_size
        where = counted(count, "rank")
        if job.engine is Bare:
            where = f"the samples of {where}"
        if _in_one_process(job.engine):
            count = 1
        if job.mesh is not None:
            count = math.prod(job.mesh.values())
            where = mesh_text(job.mesh)
        title = f"{engine_name(job.engine)} on {where}"
        if text:
            title += f" ({text})"

        def show(rank: int, part: float) -> None:
            # All ranks tell how far they are; one is enough.
            if rank == 0 and self.progress is not None:
                total = float(self.total)
                self.progress(min(self.done + min(part, 1.0), total), total, title)

        show(0, 0.0)
        try:
            results = self.ranks.run(function, count, job, *arguments, timeout=self.timeout, on_message=show)
        except RankFailed as error:
            if isinstance(error.cause, USERS_MISTAKES):
                # The rank's traceback would tell the user nothing.
                raise error.cause from None
            raise
        self.done += 1
        show(0, 0.0)
        return results


@contextlib.contextmanager
def _running(
    pool: RankPool | None,
    device: str,
    timeout: float,
    progress: Progress | None,
) -> Iterator[_Runner]:
    """Yield a runner on ``pool``, or on ranks that are started for it, and ended at the end."""
    if pool is not None:
        yield _Runner(pool, timeout, progress)
        return
    with contextlib.closing(RankPool(device=device)) as ranks:
        yield _Runner(ranks, timeout, progress)


# Runs a job, shown with a text, and compares it.
Compared = Callable[[Job, str], Cell]


def _cell(runner: _Runner, compared: Compared, job: Job) -> Cell:
    """Return the verdict on one run."""
    start = time.perf_counter()
    refusals = REFUSALS if job.mesh is None else USERS_MISTAKES
    try:
        cell = compared(job, "")
        if cell.verdict == "different":
            # It is run once more, to tell a race from a fault.
            runner.total += 1
            cell.reproducible = _is_reproducible(compared, job, cell)
    except RecipeError:
        # The recipe is at fault, whatever the engine.
        raise
    except refusals as error:
        cell = _refused(error)
    except RankFailed as error:
        cell = _failed(error)
        if job.mesh is not None and isinstance(error.cause, (GradientError, RankMismatch)):
            # fsshard itself has refused it, and says why.
            cell.reason = str(error.cause)
            cell.traceback = ""
    cell.seconds = time.perf_counter() - start
    return _at(job, cell)


def _is_reproducible(compared: Compared, job: Job, cell: Cell) -> bool:
    try:
        again = compared(job, "again")
    except FsshardError:
        return False
    return [step.differences for step in again.steps] == [step.differences for step in cell.steps]


def _at(job: Job, cell: Cell) -> Cell:
    """Return the cell, with its place in the report."""
    place: dict[str, Any] = {"world_size": job.world_size, "mesh": ""}
    if job.mesh is not None:
        place = {"world_size": math.prod(job.mesh.values()), "mesh": mesh_text(job.mesh)}
    return replace(cell, backend=engine_name(job.engine), **place)


def _refused(error: Exception) -> Cell:
    return Cell(backend="", world_size=0, verdict="refused", reason=str(error))


def _failed(error: RankFailed, prefix: str = "") -> Cell:
    reason = prefix + str(error).partition("\n\n")[0]
    return Cell(backend="", world_size=0, verdict="failed", reason=reason, traceback=error.traceback)


# ----------------------------------------------------------------------------------------------------- a reference


def _compare_with_reference(
    runner: _Runner,
    reference: Job,
    backends: Sequence[EngineSpec],
    places: Sequence[Place],
    report: ParityReport,
) -> None:
    """Compare ``backends`` at each of ``places`` with ``reference`` on as many ranks of data."""
    sizes = dict.fromkeys(size for size, _ in places)
    same = [spec in (reference.engine, {"backend": reference.engine}) for spec in backends]
    runner.total = 2 * len(sizes) + same.count(False) * len(places)
    cells = {}
    # Only the numbers of one reference are on disk at a time.
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="fsshard-parity-") as folder:
            job = replace(reference, world_size=size, folder=folder)
            judge = _run_reference(runner, job, report)
            for place, (ranks, mesh) in enumerate(places):
                if ranks != size:
                    continue
                for number, spec in enumerate(backends):
                    candidate = replace(job, engine=spec, mesh=mesh)
                    if isinstance(judge, Cell):
                        cell = _at(candidate, judge)
                    elif same[number]:
                        cell = judge.again
                    else:
                        cell = _cell(runner, judge, candidate)
                    # The report has the cells in the order asked for, whatever ran first.
                    cells[place, number] = cell
    report.cells = [cells[key] for key in sorted(cells)]


def _run_reference(runner: _Runner, job: Job, report: ParityReport) -> _Reference | Cell:
    """Return the reference, or, where it has failed, the cell of all that would be compared with it."""
    try:
        reference = _Reference(runner, job)
    except NotComparable as error:
        if job.engine is not Bare:
            raise
        return _refused(error)
    except RankFailed as error:
        # Results at other numbers of ranks are kept.
        name = f", {Bare.name}" if job.engine is Bare else f" {job.engine!r}"
        return _failed(error, f"the reference{name}: ")
    _add_new(report.warnings, _caveats(job, reference.ranks))
    return reference


def _add_new(texts: list[str], more: list[str]) -> None:
    texts += [text for text in more if text not in texts]


class _Reference:
    """A training that runs first, and once more to see if it does the same; others are compared with it.

    Attributes:
        ranks: its steps, rank by rank.
        again: its second run.
    """

    def __init__(self, runner: _Runner, job: Job) -> None:
        # The engines are compared with the numbers of this run, which lie in the job's folder.
        observations = runner.run(observe, job, REFERENCE, text="reference")
        self._runner = runner
        _, self._parameters, _ = observations[0]
        self.ranks = [trace for trace, _, _ in observations]
        start = time.perf_counter()
        self.again = _at(job, self(job, "reference, again"))
        self.again.seconds = time.perf_counter() - start
        check_deterministic(self.again, self._parameters, "compared")

    def __call__(self, job: Job, text: str) -> Cell:
        """Run a job, and compare it with the reference."""
        steps_of_ranks = self._runner.run(rerun, job, self.ranks, text=text)
        return cell_of(merged(steps_of_ranks), self._parameters)


def _caveats(job: Job, ranks: list[RankTrace]) -> list[str]:
    """Say why agreement with this reference proves little, one sentence each."""
    # Engines that all do nothing agree: a recipe may let pass faults that it was meant to find.
    caveats: list[str] = []
    alike = job.world_size > 1
    for step in range(job.steps):
        for rank, trace in enumerate(ranks):
            loss = trace.steps[step].loss
            if not caveats and not math.isfinite(loss):
                caveats.append(
                    f"the loss is {loss} at step {step} on rank {rank} under the reference: from "
                    "there on everything is NaN or infinite under every engine, so agreement proves nothing"
                )
        digests: dict[int, str] = {}
        for (micro, _), (digest, _) in all_batches(ranks, step).items():
            if digests.setdefault(micro, digest) != digest:
                alike = False
    if alike:
        caveats.append(
            "all ranks get the same batches, so an engine that reduces no gradient would agree, too; make "
            "recipe.batches depend on the rank"
        )
    before = read_tensors(job.folder, INITIAL, "weight", 0)
    after = read_tensors(job.folder, job.steps - 1, "weight", 0)
    common = before.keys() & after.keys()
    if all(torch.equal(before[name], after[name]) for name in common):
        steps = counted(job.steps, "step")
        caveats.append(f"no weight changed in {steps} (a learning rate of zero?), so the optimizers were not tested")
    return caveats


# ------------------------------------------------------------------------------------------------ a recorded training


def _observed(
    runner: _Runner,
    job: Job,
    recipe: RecipeLike,
    detail: str,
    text: str,
) -> Trace:
    """Train, and return the record of it; its tensors lie in a temporary folder until it is saved."""
    # The trace keeps this folder until it is saved, so that no context manager can end it here.
    folder = tempfile.mkdtemp(prefix="fsshard-parity-") if detail == "tensors" else ""
    try:
        observations = runner.run(observe, replace(job, folder=folder), detail, text=text)
        _, parameters, environment = observations[0]
        resolved = resolve(recipe)
        trace = Trace(
            recipe=told(resolved),
            environment=environment,
            commit=commit_of(resolved),
            backend=engine_name(job.engine),
            world_size=job.world_size,
            device=job.device,
            detail=detail,
            parameters=parameters,
            ranks=[ranks_trace for ranks_trace, _, _ in observations],
            tensors=merged_tensors(folder) if folder else None,
        )
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if folder:
        weakref.finalize(trace, shutil.rmtree, folder, ignore_errors=True)
    return trace


def _named(trace: Trace) -> str:
    where = "recorded" if trace.file is None else f"recorded in {trace.file}"
    ranks = counted(trace.world_size, "rank")
    torchs = trace.environment.get("torch", "?")
    return f"{trace.backend} on {ranks} with torch {torchs}, {where}"


@dataclass
class _Record:
    """A recorded training that all engines at one number of ranks are compared with."""

    runner: _Runner
    trace: Trace
    recipe: RecipeLike
    report: ParityReport
    draws: dict[bool, list[list[RankTrace]]] = field(default_factory=dict)  # of one process, or of several
    checked: bool = False

    def __call__(self, job: Job, text: str) -> Cell:
        """Run a job, and compare it with the record."""
        before = self.trace
        # Processes train on the batches of the recorded ones, or on the same samples, divided otherwise: one process
        # on the joined batches of all ranks.
        one_process = _in_one_process(job.engine)
        aligned = one_process or job.world_size == before.world_size
        processes = 1 if one_process else job.world_size
        same = aligned and len(before.ranks) == processes
        job = replace(job, world_size=before.world_size, processes=0 if aligned else processes)
        if not same and not self.checked:
            self.runner.total += 1
            self.runner.run(check_samples_apart, replace(job, engine=Bare, processes=0), text="other ranks?")
            self.checked = True
        now = _observed(self.runner, job, self.recipe, before.detail, text or "against the record")
        self._note_changes(now)
        may_round = freedom(before, now) if same else "everything"
        exactly = may_round == "nothing"
        steps = compare_traces(before, now, regrouped=not same, exactly=exactly)
        if needs_bounds(steps) and not exactly:
            resets = bool(before.ranks[0].rounding) and bool(backend_of(job.engine))
            if may_round == "sum over ranks" and resets:
                # With the record's tensors each step starts as it did then, and the bound is the sum's alone.
                self.runner.total += 1
                job = replace(job, folder=str(before.tensors))
                steps = merged(self.runner.run(rerun, job, before.ranks, text="step by step"))
            else:
                draws = self._drawn(job, one_process)
                steps = compare_traces(before, now, regrouped=not same, draws=draws)
        cell = cell_of(steps, before.parameters)
        if cell.verdict != "exact":
            texts = [_first_bits(cell, before.parameters)]
            if same:
                texts.append(first_output(before, now))
            cell.reason = "; ".join(filter(None, texts))
        return cell

    def _drawn(self, job: Job, one_process: bool) -> list[list[RankTrace]]:
        """Return one training as it is, then each draw, as their ranks saw them; the same for all engines of a kind."""
        if one_process not in self.draws:
            self.runner.total += 1
            if not one_process:
                # Under any engine rounding grows alike.
                job = replace(job, engine="ddp")
            ranks = self.runner.run(observe_perturbed, job, ORDERS, text="rounded otherwise")
            self.draws[one_process] = list(map(list, zip(*ranks, strict=True)))
        return self.draws[one_process]

    def _note_changes(self, now: Trace) -> None:
        before = self.trace
        texts = changes(before.environment, now.environment)
        texts += [f"recipe.{text}" for text in changes(before.recipe, now.recipe)]
        texts += changes({"commit": before.commit}, {"commit": now.commit})
        _add_new(self.report.changes, texts)


def _first_bits(cell: Cell, parameters: list[str]) -> str:
    """Return where the first bits differ, if before the place that is named, and how many tensors differ there."""
    first = first_divergence(cell.steps, parameters)
    if first is None:
        return ""
    texts = []
    if first != cell.first_divergence:
        texts.append(f"the first bits that differ: {first}")
    verdicts = [item.verdict for item in cell.steps[first.step].differences[first.quantity].values()]
    if len(verdicts) > 1:
        unequal = len(verdicts) - verdicts.count("exact")
        texts.append(f"{unequal} of {len(verdicts)} differ there")
    return "; ".join(texts)
