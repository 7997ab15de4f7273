"""compare(): trains one recipe under several engines, each on its own ranks, and reports what differs where."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fsshard.backends import backend_class, backend_names
from fsshard.errors import ConfigurationError, MissingExtra, RankFailed, UnsupportedByBackend
from fsshard.launching.pool import RankPool
from fsshard.parity.against import compare_with
from fsshard.parity.caveats import caveats
from fsshard.parity.engine import EngineSpec, backend_of, engine_name
from fsshard.parity.findings import Cell
from fsshard.parity.mesh_comparison import checked_meshes, compare_on_meshes
from fsshard.parity.recipe import RecipeLike
from fsshard.parity.recorded import Trace
from fsshard.parity.report import ParityReport
from fsshard.parity.rounding import NotComparable
from fsshard.parity.running import Meter, Progress, Runner, World, failed, in_one_process, transportable
from fsshard.parity.training import Job

__all__ = ["BACKENDS", "compare"]

BACKENDS = ("fairscale", "fsdp", "fsdp2", "ddp")
"""Those that are compared unless others are named."""


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
    another torch, on another machine or at another number of ranks (see :mod:`fsshard.parity.against`).

    With ``mesh`` the model is divided as ``recipe.split`` says, and every backend on every mesh is compared with one
    process, which has nothing of fsshard in it (see :mod:`fsshard.parity.mesh_comparison`).

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
    how: dict[str, Any] = {"timeout": timeout, "pool": pool, "device": device, "progress": progress}
    if mesh is not None:
        if against is not None:
            raise ConfigurationError("mesh= and against=: what was recorded has no mesh; leave one of them out")
        backends, steps = BACKENDS if backends is None else backends, 10 if steps is None else steps
        _checked(backends, [1], steps, "none", None)
        meshes = checked_meshes(mesh, recipe, backends, world_sizes, reference, pool)
        return compare_on_meshes(recipe, meshes, backends=backends, steps=steps, **how)
    reference = "ddp" if reference is None else reference
    if against is not None:
        backends = [against.backend] if backends is None else backends
        steps = against.steps if steps is None else steps
        sizes = _checked(backends, [against.world_size] if world_sizes is None else world_sizes, steps, reference, pool)
        return compare_with(against, recipe, backends=backends, world_sizes=sizes, steps=steps, **how)
    backends, steps = BACKENDS if backends is None else backends, 10 if steps is None else steps
    sizes = _checked(backends, (1, 2) if world_sizes is None else world_sizes, steps, reference, pool)
    return _compare_with_reference(recipe, backends, sizes, steps, reference, **how)


def _compare_with_reference(
    recipe: RecipeLike,
    backends: Sequence[EngineSpec],
    sizes: Sequence[int],
    steps: int,
    reference: str,
    *,
    timeout: float,
    pool: RankPool | None,
    device: str,
    progress: Progress | None,
) -> ParityReport:
    name = transportable(recipe)
    report = ParityReport(recipe=name, reference=reference, steps=steps)
    runs = sum(2 + sum(not _is_reference(spec, reference) for spec in backends) for _ in sizes)
    meter = Meter(progress, runs)
    with contextlib.ExitStack() as stack:
        ranks = pool if pool is not None else stack.enter_context(contextlib.closing(RankPool(device=device)))
        for size in sizes:
            joined = in_one_process(reference) and size > 1
            with tempfile.TemporaryDirectory(prefix="fsshard-parity-") as folder:
                job = Job(
                    source=recipe,
                    engine=reference,
                    steps=steps,
                    world_size=size,
                    folder=folder,
                    reference_joined=joined,
                    device=device,
                )
                try:
                    report.cells += _cells(Runner(ranks, timeout, meter), job, backends)
                    report.warnings += [text for text in caveats(job) if text not in report.warnings]
                except RankFailed as error:  # of the reference: what the other sizes gave is kept
                    report.cells += [failed(spec, size, error, f"the reference {reference!r}: ") for spec in backends]
    return report


def _checked(
    backends: Sequence[EngineSpec], world_sizes: Iterable[int], steps: int, reference: str, pool: RankPool | None
) -> list[int]:
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
    if pool is not None and max(sizes) > pool.most_ranks:
        raise ConfigurationError(f"world_sizes={sizes!r}: the pool has at most {pool.most_ranks} ranks")
    return list(dict.fromkeys(sizes))


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_reference(spec: EngineSpec, reference: str) -> bool:
    return bool(spec == reference or spec == {"backend": reference})


def _cells(runner: Runner, reference: Job, backends: Sequence[EngineSpec]) -> list[Cell]:
    """Return the cells of ``backends`` at one world size, in their order."""
    world = World(runner, reference)
    return [
        world.again if _is_reference(spec, reference.engine) else _candidate(world, replace(reference, engine=spec))
        for spec in backends
    ]


def _candidate(world: World, job: Job) -> Cell:
    try:
        cell = world.cell(job)
    except (UnsupportedByBackend, MissingExtra, NotComparable) as error:
        name, size = engine_name(job.engine), job.world_size
        return Cell(backend=name, world_size=size, verdict="refused", reason=str(error))
    except RankFailed as error:
        return failed(job.engine, job.world_size, error)
    if cell.verdict == "different":
        cell.reason = _hint(cell)
    return cell


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
