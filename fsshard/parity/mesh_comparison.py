"""Is a divided model the same training as the whole one? Backends on meshes, compared with one process.

The judge is the recipe's own model and optimizer on one process, on the samples of all ranks. Dividing a model changes
the order of sums everywhere (in contractions over tensor-parallel ranks, in the loss and in the gradients of what ranks
share), and forward and backward carry these roundings on, so that no bound can be had from the gradients alone. It is
measured as for a recorded training: the step runs :data:`~fsshard.parity.rounding.DRAWS` more times on one
process, with every operation rounded otherwise (:mod:`fsshard.parity.perturbed`), and
:func:`~fsshard.parity.bounds.measured_bound` says how far beyond these another order may get. Every step begins with
the weights and the optimizer's state of the one process, and what the optimizer makes of the gradients is held to the
last bit against one process again, so that nothing builds up over steps.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fsshard.errors import (
    ConfigurationError,
    GradientError,
    MissingExtra,
    ModelError,
    OptimizerError,
    RankFailed,
    RankMismatch,
    RecipeError,
)
from fsshard.launching.pool import RankPool
from fsshard.parity.caveats import caveats
from fsshard.parity.engine import EngineSpec, engine_name
from fsshard.parity.findings import Cell
from fsshard.parity.recipe import RecipeLike, resolve
from fsshard.parity.report import ParityReport
from fsshard.parity.rounding import NotComparable
from fsshard.parity.running import Meter, Progress, Runner, World, failed, in_one_process, transportable
from fsshard.parity.split_training import Bare, check_mesh, data_ranks, mesh_text, splits
from fsshard.parity.training import Job

__all__ = ["checked_meshes", "compare_on_meshes"]

Mesh = Mapping[str, int]


def checked_meshes(
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
    ranks = _ranks(sizes)
    if asked is not None and asked != [ranks]:
        raise ConfigurationError(
            f"world_sizes={asked!r}: mesh={sizes} has {ranks} rank{'s' * (ranks > 1)}; leave world_sizes out, or give "
            "a mesh of that many"
        )
    if pool is not None and ranks > pool.most_ranks:
        raise ConfigurationError(f"mesh={sizes}: it has {ranks} ranks, and the pool at most {pool.most_ranks}")


def _ranks(sizes: Mesh) -> int:
    return math.prod(sizes.values())


def compare_on_meshes(
    recipe: RecipeLike,
    meshes: Sequence[Mesh],
    *,
    backends: Sequence[EngineSpec],
    steps: int,
    timeout: float,
    pool: RankPool | None,
    device: str,
    progress: Progress | None,
) -> ParityReport:
    """What :func:`fsshard.parity.compare` does with meshes; its arguments are explained there."""
    report = ParityReport(recipe=transportable(recipe), reference=Bare.name, steps=steps)
    references, jobs = dict.fromkeys(map(data_ranks, meshes)), dict[int, Job]()
    meter = Meter(progress, len(meshes) * len(backends) + 2 * len(references))
    with contextlib.ExitStack() as stack:
        ranks = pool if pool is not None else stack.enter_context(contextlib.closing(RankPool(device=device)))
        runner, judges = Runner(ranks, timeout, meter), dict[int, World | Cell]()
        for sizes in meshes:
            data = data_ranks(sizes)
            if data not in judges:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fsshard-parity-"))
                job = Job(source=recipe, engine=Bare, steps=steps, world_size=data, folder=folder, device=device)
                jobs[data] = replace(job, reference_joined=True)
                judges[data] = _judge(runner, jobs[data])
                if isinstance(judges[data], World):
                    report.warnings += [text for text in caveats(jobs[data]) if text not in report.warnings]
            for spec in backends:
                report.cells.append(_cell(judges[data], replace(jobs[data], engine=spec, mesh=dict(sizes))))
    return report


def _judge(runner: Runner, reference: Job) -> World | Cell:
    """Return one process on the samples of so many ranks of data; where it cannot be, what all cells say."""
    try:
        return World(runner, reference)
    except NotComparable as error:
        return Cell(backend="", world_size=0, verdict="refused", reason=str(error))
    except RankFailed as error:
        return failed("", 0, error, f"the reference, {Bare.name}: ")


def _cell(judge: World | Cell, job: Job) -> Cell:
    """Return the verdict on one backend on one mesh."""
    try:
        cell = judge.cell(job) if isinstance(judge, World) else replace(judge)
    except RecipeError:
        raise  # whatever the mesh
    except (ConfigurationError, MissingExtra, ModelError, OptimizerError) as error:
        cell = Cell(backend="", world_size=0, verdict="refused", reason=str(error))
    except RankFailed as error:
        cell = failed(job.engine, 0, error)
        if isinstance(error.__cause__, (GradientError, RankMismatch)):  # found by fsshard, and told in its words
            cell.reason, cell.traceback = str(error.__cause__), ""
    assert job.mesh is not None
    cell.backend, cell.world_size, cell.mesh = engine_name(job.engine), _ranks(job.mesh), mesh_text(job.mesh)
    return cell
