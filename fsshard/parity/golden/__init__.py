"""Are the losses still those of the release? Golden runs: losses kept as text, and the recipes that made them.

Weights and batches come from a rule in exact integer arithmetic (no random generator, no file), so a golden run is a
few numbers in a text file. They were made by ``ddp`` on two ranks; every backend must reproduce them there.

On another kind of processor kernels add in another order, and the last digits may move. Then the losses are judged by
the spread of the same run with the samples of each rank's batch in other orders (:mod:`fsshard.parity.bounds`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsshard.backends import backend_class
from fsshard.errors import ConfigurationError, FsshardError, RecipeError
from fsshard.launching.pool import RankPool
from fsshard.launching.pool_worker import tell
from fsshard.parity.bounds import ORDERS, measured_bound
from fsshard.parity.golden import recipes
from fsshard.parity.joined import reordered, samples_of
from fsshard.parity.recipe import Recipe, RecipeLike, resolve
from fsshard.parity.training import Job, Training

__all__ = ["RECIPES", "GoldenResult", "check", "check_file", "write_file"]

FOLDER = Path(__file__).parent
RECIPES: dict[str, Callable[[], Recipe]] = {
    "spectral": recipes.spectral,
    "transformer": recipes.transformer,
    "convnet": recipes.convnet,
}
"""The golden runs that come with the library; each has its losses in a text file beside this module."""
STEPS, WORLD_SIZE = 10, 2
Progress = Callable[[float, float, str], None]


@dataclass(frozen=True, kw_only=True)
class GoldenResult:
    """Whether one golden run came out again.

    Attributes:
        name: of the recipe.
        equal: to the last bit.
        verdict: ``"equal"``, ``"within rounding"`` (another processor, or another version of torch) or ``"different"``.
        text: one line that says so, with the first step that differs.
    """

    name: str
    equal: bool
    verdict: str
    text: str

    @property
    def ok(self) -> bool:
        """Whether it is the same training."""
        return self.verdict != "different"


def check(
    backend: str = "ddp", *, pool: RankPool | None = None, timeout: float = 120.0, progress: Progress | None = None
) -> list[GoldenResult]:
    """Run the library's golden recipes on two ranks and compare their losses with the files.

    Args:
        backend: which backend trains them.
        pool: ranks to run on; None starts two.
        timeout: seconds per run.
        progress: called with (done, total, what is running).
    """
    found = []
    with _ranks(pool) as ranks:
        for number, (name, recipe) in enumerate(RECIPES.items()):
            if progress is not None:
                progress(float(number), float(len(RECIPES)), f"{name} under {backend}")
            found.append(check_file(recipe, FOLDER / f"{name}.txt", backend=backend, pool=ranks, timeout=timeout))
    if progress is not None:
        progress(float(len(RECIPES)), float(len(RECIPES)), "done")
    return found


def check_file(
    recipe: RecipeLike, path: Path | str, *, backend: str = "ddp", pool: RankPool | None = None, timeout: float = 120.0
) -> GoldenResult:
    """Run ``recipe`` as the file says and compare the losses.

    Args:
        recipe: as for :func:`fsshard.parity.compare`.
        path: what :func:`write_file` wrote.
        backend: which backend trains it.
        pool: ranks to run on; None starts them.
        timeout: seconds per run.

    Raises:
        RecipeError: the file is no golden run.
    """
    golden = _read(Path(path))
    name = resolve(recipe).name
    if golden.world_size > 1 and backend_class(backend).one_process:
        raise ConfigurationError(
            f"a golden run of {golden.world_size} ranks under backend {backend!r}: one process on the joined batch "
            "adds in another order; use a backend of several ranks, for example 'ddp'"
        )
    with _ranks(pool) as ranks:
        run = functools.partial(_run, ranks, recipe, backend, golden.world_size, len(golden.losses), timeout)
        losses = run(None)
        wrong = [step for step, (want, got) in enumerate(zip(golden.losses, losses, strict=True)) if want != got]
        if not wrong:
            text = f"{len(losses)} losses of {backend} on {golden.world_size} ranks equal to the last bit"
            return GoldenResult(name=name, equal=True, verdict="equal", text=text)
        bounds = _bounds(losses, [run(order) for order in range(ORDERS)])
    beyond = [step for step in wrong if abs(golden.losses[step] - losses[step]) > bounds[step]]
    first = (beyond or wrong)[0]
    values = f"step {first}: expected {golden.losses[first]!r}, got {losses[first]!r}"
    ground = "the same kind of processor" if golden.ground == _ground() else f"{golden.ground}, here {_ground()}"
    verdict = "different" if beyond else "within rounding"
    text = f"{values} (rounding explains {bounds[first]:.2g}); made on {ground}"
    return GoldenResult(name=name, equal=False, verdict=verdict, text=text)


def write_file(
    recipe: RecipeLike,
    path: Path | str,
    *,
    backend: str = "ddp",
    steps: int = STEPS,
    world_size: int = WORLD_SIZE,
    pool: RankPool | None = None,
    timeout: float = 120.0,
) -> None:
    """Run ``recipe`` and write its losses as a golden run.

    Args:
        recipe: as for :func:`fsshard.parity.compare`.
        path: a text file.
        backend: which backend trains it.
        steps: optimizer steps.
        world_size: number of ranks.
        pool: ranks to run on; None starts them.
        timeout: seconds per run.
    """
    with _ranks(pool) as ranks:
        losses = _run(ranks, recipe, backend, world_size, steps, timeout, None)
    lines = [f"# golden run of {resolve(recipe).name}: mean loss over ranks, a line per step"]
    lines += [f"# world_size = {world_size}", f"# made on = {_ground()}"]
    Path(path).write_text("\n".join([*lines, *map(repr, losses), ""]))


def _ground() -> str:
    """What the last digits may depend on."""
    return f"torch {torch.__version__.partition('+')[0]}, {torch.backends.cpu.get_cpu_capability()}"


@contextlib.contextmanager
def _ranks(pool: RankPool | None) -> Iterator[RankPool]:
    if pool is not None:
        yield pool
        return
    with contextlib.closing(RankPool()) as made:
        yield made


@dataclass(frozen=True)
class _Golden:
    world_size: int
    ground: str
    losses: list[float]


def _read(path: Path) -> _Golden:
    try:
        lines = path.read_text().splitlines()
        facts = dict(line[2:].split(" = ", 1) for line in lines if line.startswith("# ") and " = " in line)
        losses = [float(line) for line in lines if line and not line.startswith("#")]
        return _Golden(int(facts["world_size"]), facts["made on"], losses)
    except (OSError, UnicodeDecodeError, ValueError, KeyError) as error:
        raise RecipeError(
            f"{path} holds no golden run ({type(error).__name__}: {error}); write one with "
            "fsshard.parity.golden.write_file(recipe, path)"
        ) from error


def _run(
    ranks: RankPool, recipe: RecipeLike, backend: str, world_size: int, steps: int, timeout: float, order: int | None
) -> list[float]:
    job = Job(source=recipe, engine=backend, steps=steps, world_size=world_size, folder="")
    per_rank = ranks.run(_losses, world_size, job, order, timeout=timeout)
    return [sum(losses) / world_size for losses in zip(*per_rank, strict=True)]


def _losses(job: Job, order: int | None) -> list[float]:
    """This rank's losses; ``order`` shuffles the samples of every batch."""
    if order is not None:
        job = dataclasses.replace(job, source=_shuffled(resolve(job.source), order))
    run, found = Training(job), []
    for step in range(job.steps):
        found.append(run.losses(run.batches(step)))
        run.clip()
        run.finish()
        tell((step + 1) / job.steps)
    return found


def _shuffled(recipe: Recipe, order: int) -> Recipe:
    def batches(rank: int, world_size: int, number: int) -> Any:
        batch = recipe.batches(rank, world_size, number)
        generator = torch.Generator().manual_seed(1000 * order + number + 1)
        return reordered(batch, torch.randperm(samples_of(batch), generator=generator).tolist())

    return dataclasses.replace(recipe, batches=batches)


def _bounds(losses: list[float], others: list[list[float]]) -> list[float]:
    """Per step what rounding may make of the loss, from runs that differ by rounding alone."""
    spreads = [max(abs(other[step] - loss) for other in others) for step, loss in enumerate(losses)]
    return [
        measured_bound(spread, abs(loss), 1, len(others), torch.float32)
        for spread, loss in zip(spreads, losses, strict=True)
    ]


def write_all() -> None:
    """Write the files of the library's own golden runs again."""
    with _ranks(None) as ranks:
        for name, recipe in RECIPES.items():
            write_file(recipe, FOLDER / f"{name}.txt", pool=ranks)
    results = check()
    if not all(result.equal for result in results):
        raise FsshardError("a golden run does not come out twice")
