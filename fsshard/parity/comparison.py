"""compare(): trains one recipe under several engines, each on its own ranks, and reports what differs where."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fsshard.backends import backend_class, backend_names
from fsshard.errors import ConfigurationError, RankFailed, RecipeError
from fsshard.launching.pool import RankPool
from fsshard.parity.against import compare_with
from fsshard.parity.caveats import caveats
from fsshard.parity.engine import EngineSpec, backend_of, engine_name
from fsshard.parity.findings import Cell
from fsshard.parity.recipe import RecipeLike, resolve
from fsshard.parity.recorded import Trace
from fsshard.parity.report import ParityReport
from fsshard.parity.rounding import NotComparable
from fsshard.parity.running import (
    Progress,
    ReferenceWorld,
    Runner,
    World,
    at,
    failed,
    in_one_process,
    running,
    transportable,
)
from fsshard.parity.split_training import Bare, check_mesh, data_ranks, mesh_text, splits
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
    process, which has nothing of fsshard in it (see :mod:`fsshard.parity.rounding`).

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
    sizes = _checked(backends, asked, steps, judge, None if mesh is not None else pool)
    how: dict[str, Any] = {"timeout": timeout, "pool": pool, "device": device, "progress": progress}
    if against is not None:
        return compare_with(against, recipe, backends=backends, world_sizes=sizes, steps=steps, **how)
    places: list[tuple[int, dict[str, int] | None]] = [(size, None) for size in sizes]
    if mesh is not None:
        meshes = _checked_meshes(mesh, recipe, backends, world_sizes, reference, pool)
        places = [(data_ranks(each), each) for each in meshes]
    engine = Bare if mesh is not None else judge
    job = Job(source=recipe, engine=engine, steps=steps, world_size=1, device=device)
    return _compare_with_reference(job, backends, places, **how)


def _compare_with_reference(
    reference: Job,
    backends: Sequence[EngineSpec],
    places: Sequence[tuple[int, dict[str, int] | None]],
    *,
    timeout: float,
    pool: RankPool | None,
    device: str,
    progress: Progress | None,
) -> ParityReport:
    """Compare ``backends`` at each of ``places``, (ranks of data, mesh), with ``reference`` on as many of them."""
    name = engine_name(reference.engine)
    report = ParityReport(recipe=transportable(reference.source), reference=name, steps=reference.steps)
    sizes, cells = list(dict.fromkeys(size for size, _ in places)), dict[tuple[int, int], Cell]()
    others = sum(not _is(spec, reference.engine) for spec in backends)
    with running(pool, device, timeout, progress, runs=2 * len(sizes) + others * len(places)) as runner:
        for size in sizes:  # the numbers of one reference are on disk at a time
            with tempfile.TemporaryDirectory(prefix="fsshard-parity-") as folder:
                joined = in_one_process(reference.engine) and (size > 1 or reference.engine is Bare)
                job = replace(reference, world_size=size, folder=folder, reference_joined=joined)
                judge = _judge(runner, job)
                if isinstance(judge, World):
                    report.warnings += [text for text in caveats(job) if text not in report.warnings]
                for place, (ranks, mesh) in enumerate(places):
                    for number, spec in enumerate(backends if ranks == size else ()):
                        candidate = replace(job, engine=spec, mesh=mesh)
                        cells[place, number] = _cell(judge, candidate, again=_is(spec, reference.engine))
    report.cells = [cells[key] for key in sorted(cells)]
    return report


def _judge(runner: Runner, reference: Job) -> ReferenceWorld | Cell:
    """Return the reference, twice run; where it cannot be, what all cells say."""
    try:
        return ReferenceWorld(runner, reference)
    except NotComparable as error:
        if reference.engine is not Bare:
            raise
        return Cell(backend="", world_size=0, verdict="refused", reason=str(error))
    except RankFailed as error:  # what other numbers of ranks give is kept
        name = f", {Bare.name}" if reference.engine is Bare else f" {reference.engine!r}"
        return failed(error, f"the reference{name}: ")


def _cell(judge: ReferenceWorld | Cell, job: Job, again: bool) -> Cell:
    if isinstance(judge, Cell):
        return at(job, judge)
    return judge.again if again else judge.cell(job)


def _is(spec: EngineSpec, reference: EngineSpec) -> bool:
    return bool(spec == reference or spec == {"backend": reference})


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


def _checked_meshes(
    mesh: Any,
    recipe: RecipeLike,
    backends: Sequence[EngineSpec],
    world_sizes: Iterable[int] | None,
    reference: str | None,
    pool: RankPool | None,
) -> list[dict[str, int]]:
    """The meshes that ``mesh`` means, each once.

    Raises:
        RecipeError: the recipe does not say how its model is divided.
        ConfigurationError: a mesh, or what goes with it, has no meaning.
    """
    given = [mesh] if isinstance(mesh, Mapping) or not isinstance(mesh, Iterable) else list(mesh)
    if not given:
        raise ConfigurationError('mesh=[]: expected one mesh or several, for example {"data": 2, "tp": 2}')
    found = [check_mesh(each) for each in given]
    if reference is not None and not in_one_process(reference):
        raise ConfigurationError(
            f"reference={reference!r}: what runs on a mesh is compared with one process; leave reference out"
        )
    own = [spec for spec in backends if isinstance(spec, type)]
    if own:
        raise ConfigurationError(
            f"backends holds {own[0].__name__}: an engine of your own cannot be given a mesh; name backends of fsshard"
        )
    asked = None if world_sizes is None else list(world_sizes if isinstance(world_sizes, Iterable) else [world_sizes])
    for sizes in found:
        _check_ranks(sizes, asked, pool)
        if splits(sizes) and resolve(recipe).split is None:
            raise RecipeError(
                f"mesh={sizes}: the recipe does not say how its model is divided over {', '.join(splits(sizes))}; give "
                'it a function split(model, mesh) that divides the model and returns {"device_mesh": mesh["data"], '
                "...}, or compare on a mesh of data alone"
            )
    return list({mesh_text(sizes): sizes for sizes in found}.values())


def _check_ranks(sizes: dict[str, int], asked: list[int] | None, pool: RankPool | None) -> None:
    ranks = math.prod(sizes.values())
    if asked is not None and asked != [ranks]:
        raise ConfigurationError(
            f"world_sizes={asked!r}: mesh={sizes} has {ranks} rank{'s' * (ranks > 1)}; leave world_sizes out, or give "
            "a mesh of that many"
        )
    if pool is not None and ranks > pool.most_ranks:
        raise ConfigurationError(f"mesh={sizes}: it has {ranks} ranks, and the pool at most {pool.most_ranks}")
