"""Are the trainings still those of the release? Golden runs: recorded losses, and the recipes that made them.

Weights and batches come from a rule in exact integer arithmetic (no random generator, no file), so a golden run is a
small recorded training (:class:`fsshard.parity.Trace` with ``detail="losses"``), one per minor version of torch. They
were made by ``ddp`` on two ranks; every backend must reproduce them there.

On another kind of processor, or another torch, kernels add in another order, and the last digits may move. Then the
losses are judged as in every comparison with a recorded training: see :func:`fsshard.parity.compare`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from fsshard.backends import backend_class
from fsshard.errors import ConfigurationError
from fsshard.launching.pool import RankPool
from fsshard.parity.golden import recipes
from fsshard.parity.report import Cell
from fsshard.parity.runs import compare, record
from fsshard.parity.trace import Trace
from fsshard.recipes.recipe import Recipe

__all__ = ["RECIPES", "GoldenResult", "check", "file_of", "write_all"]

FOLDER = Path(__file__).parent
RECIPES: dict[str, Callable[[], Recipe]] = {
    "spectral": recipes.spectral,
    "transformer": recipes.transformer,
    "convnet": recipes.convnet,
}
"""The golden runs that come with the library; each has a file per minor version of torch beside this module."""
STEPS, WORLD_SIZE = 10, 2
WORDS = {"exact": "equal", "bound": "within rounding"}
Progress = Callable[[float, float, str], None]


@dataclass(frozen=True, kw_only=True)
class GoldenResult:
    """The answer whether one golden run came out again.

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
        """Return whether it is the same training."""
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
    if backend_class(backend).facts.one_process:
        raise ConfigurationError(
            f"golden runs of {WORLD_SIZE} ranks under backend {backend!r}: one process on the joined batch adds in "
            "another order; use a backend of several ranks, for example 'ddp'"
        )
    found = []
    with contextlib.nullcontext(pool) if pool is not None else contextlib.closing(RankPool()) as ranks:
        for number, (name, recipe) in enumerate(RECIPES.items()):
            if progress is not None:
                progress(float(number), float(len(RECIPES)), f"{name} under {backend}")
            trace = Trace.load(file_of(name))
            report = compare(recipe, against=trace, backends=[backend], pool=ranks, timeout=timeout)
            found.append(_result(name, trace, report.cells[0], report.changes))
    if progress is not None:
        progress(float(len(RECIPES)), float(len(RECIPES)), "done")
    return found


def _result(name: str, trace: Trace, cell: Cell, changes: list[str]) -> GoldenResult:
    verdict = WORDS.get(cell.verdict, "different")
    if cell.verdict == "exact":
        text = f"{trace.steps} losses of {cell.backend} on {trace.world_size} ranks equal to the last bit"
    else:
        made_on = "; ".join(changes) or "the same kind of processor"
        text = f"{cell.first_divergence or cell.reason}; made on {made_on}"
    return GoldenResult(name=name, equal=cell.verdict == "exact", verdict=verdict, text=text)


def file_of(name: str, version: str = torch.__version__) -> Path:
    """Return the golden run of a minor version of torch, or of the nearest one before it that has one, or the first."""
    minors = {_minor(path.parent.name): path for path in FOLDER.glob(f"*/{name}.json")}
    before = [minor for minor in minors if minor <= _minor(version)]
    return minors[max(before) if before else min(minors)]


def _minor(version: str) -> tuple[int, int]:
    numbers = re.findall(r"\d+", version)
    return int(numbers[0]), int(numbers[1])


def write_all() -> None:
    """Write the files of the library's own golden runs again, for the minor version of torch that is installed."""
    folder = FOLDER / "torch-{}.{}".format(*_minor(torch.__version__))
    folder.mkdir(exist_ok=True)
    with contextlib.closing(RankPool()) as ranks:
        for name, recipe in RECIPES.items():
            trace = record(recipe, steps=STEPS, world_size=WORLD_SIZE, detail="losses", pool=ranks)
            trace.commit = ""  # the file would be another after every commit
            trace.save(folder / f"{name}.json")
