"""The parity matrix: every model x world size x variant x optimizer, each under every backend.

python -m tests.parity.matrix --table docs/data/parity.md          # a subset in which every pair of values occurs
python -m tests.parity.matrix --all --table docs/data/parity.md    # six hours on two cores
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.metadata
import itertools
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

import fsshard.parity
from fsshard import recipes
from fsshard.errors import FsshardError, MissingExtra
from fsshard.launching.pool import RankPool
from fsshard.recipes.recipe import Recipe
from tests.parity import page, variants

# ------------------------------------------------------------------------------------------------ the tables

MODELS = (
    *("mlp", "fno", "tfno", "tfno_cp", "tfno_tt", "uno", "sfno", "gino", "t5", "vit", "convnet", "dropout"),
    *("burgers", "distilled"),
)
"""Names of functions in fsshard/recipes, or of :data:`OWN`."""
OWN = {"burgers": variants.burgers, "distilled": variants.distilled, "t5": variants.t5}

BACKENDS = ("fairscale", "fsdp", "fsdp2", "ddp", "none")
WORLD_SIZES = (1, 2, 4, 8)

VARIANTS: dict[str, Callable[[Recipe], dict[str, Any]]] = {
    "plain": lambda recipe: {},
    "accumulate": lambda recipe: {"accumulate": 3},
    "clip": lambda recipe: {"clip": (0.01, 2.0)},
    "two_groups": lambda recipe: {"param_groups": functools.partial(variants.two_groups, recipe.hyper["lr"])},
    "frozen_part": lambda recipe: {"build": functools.partial(variants.build_frozen, recipe.build)},
    "lora": lambda recipe: {"build": functools.partial(variants.build_adapted, recipe.build)},
    "activation_checkpointing": lambda recipe: {"activation_checkpointing": variants.checkpointed(recipe)},
    "offload": lambda recipe: {
        "build": functools.partial(variants.build_offloaded, recipe.build, variants.checkpointed(recipe)),
        "loss": functools.partial(variants.offloaded_loss, recipe.loss),
    },
    "join": lambda recipe: {
        "batches": functools.partial(variants.batches_that_end, recipe.batches),
        "join": functools.partial(variants.join_those_that_count, recipe),
        "loss": functools.partial(variants.joined_loss, recipe.loss),
    },
    "ema": lambda recipe: {"loss": functools.partial(variants.averaged_loss, recipe.loss)},
    "term_gradients": lambda recipe: {"loss": functools.partial(variants.balanced_loss, recipe.loss)},
    "token_mean": lambda recipe: {"loss": functools.partial(variants.loss_over_tokens, recipe.loss)},
    "send": lambda recipe: {"precision": fsshard.Precision(send=torch.bfloat16)},
    "bf16": lambda recipe: {"precision": "bf16"},
    "fp16": lambda recipe: {"precision": "fp16"},
}
"""Name -> what it changes in a recipe that has its optimizer already."""


class OptimizerChoice(NamedTuple):
    """An optimizer class by its path, so that listing it imports nothing, and its arguments."""

    path: str
    hyper: Mapping[str, Any]

    def load(self) -> Any:
        """Return the class, or raise MissingExtra if its package is not installed."""
        module, _, name = self.path.rpartition(".")
        try:
            return getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as error:
            raise MissingExtra("neuraloperator", "neuralop", f"the optimizer {self.path}") from error


RATES = {"Adadelta": 1.0, "Adagrad": 1e-2, "Adam": 5e-3, "AdamW": 5e-3, "NAdam": 5e-3, "RAdam": 5e-3, "RMSprop": 1e-3}
OPTIMIZERS = {
    "SGD": OptimizerChoice("torch.optim.SGD", {"lr": 1e-2, "momentum": 0.9}),
    **{name: OptimizerChoice(f"torch.optim.{name}", {"lr": rate}) for name, rate in RATES.items()},
    "SOAP_whole": OptimizerChoice("tests.optimizers.SOAP", {"lr": 5e-3, "whole": True}),
    "Muon_modes": OptimizerChoice("tests.optimizers.MyMuon", {"lr": 1e-3, "whole": True, "see": "modes"}),
    "neuralop_AdamW": OptimizerChoice("neuralop.training.AdamW", {"lr": 5e-3, "weight_decay": 1e-2}),
    "GaLore_whole": OptimizerChoice(
        "tests.galore.GaLore", {"lr": 5e-3, "galore_rank": 2, "galore_update_proj_gap": 2, "whole": True}
    ),
}

NO_BOUND = "not run: a projector is compared as one object, and within rounding it is another"
NO_COUNTS = "not run: ranks count unlike numbers of tokens, and one process has none of them"
REFUSALS = {
    ("token_mean", "none"): NO_COUNTS,
    ("send", "none"): "mixed precision",
    ("send", "fsdp"): "backend 'fsdp' cannot honour Precision(send=torch.bfloat16)",
    ("convnet", "none"): "the model or its loss mixes samples",
    ("dropout", "none"): "the model draws random numbers",
    ("term_gradients", "none"): "the model or its loss mixes samples",
    ("bf16", "none"): "mixed precision",
    ("fp16", "none"): "mixed precision",
}
"""(variant or model, backend) -> how the reason begins for which it is refused at more than one rank."""


def expected_refusal(combination: Combination, backend: str) -> str:
    """How the reason begins for which a cell is refused at more than one rank; "" where it must not be."""
    model, _, variant, optimizer = combination
    found = next(filter(None, (REFUSALS.get((value, backend)) for value in (variant, model))), "")
    if not found and backend == "none" and variant in ("accumulate", "join") and optimizer == "Muon_modes":
        # The one comparison within rounding, which repeats the optimizer's step on one process, on weights as they are.
        return "see="
    if not found and backend == "none" and variant in ("accumulate", "join") and optimizer == "GaLore_whole":
        return NO_BOUND
    return found


KNOWN_WARNINGS = (
    "`torch.distributed.",  # FSDP of torch 2.13 calls functions that torch 2.13 deprecates
)
"""Beginnings of warnings that would come again in every run."""


class Combination(NamedTuple):
    """The subject of one comparison of all backends."""

    model: str
    world_size: int
    variant: str
    optimizer: str

    def __str__(self) -> str:
        return f"{self.model}-{self.world_size}-{self.variant}-{self.optimizer}"


def everything() -> list[Combination]:
    """The whole product."""
    return [Combination(*row) for row in itertools.product(MODELS, WORLD_SIZES, VARIANTS, OPTIMIZERS)]


def covering() -> list[Combination]:
    """A subset in which every pair of values of two factors occurs; two ranks where the pairs leave the choice.

    On two ranks sums have one order only, so there nothing but equality passes. Four ranks take longest.
    """
    # A Latin square: each model meets each variant once, and in turn each optimizer; and so does each variant, by steps
    # of 5 and 3 among the models.
    names, optimizers = tuple(VARIANTS), tuple(OPTIMIZERS)
    places = itertools.product(range(len(MODELS)), range(max(len(names), len(optimizers))))
    rows = [(MODELS[i], names[(5 * i + j) % len(names)], optimizers[(3 * i + j) % len(optimizers)]) for i, j in places]
    sizes = dict.fromkeys(rows, 2)
    for size in (size for size in WORLD_SIZES if size != 2):
        sizes |= dict.fromkeys(fewest([row for row in rows if sizes[row] == 2]), size)
    return [Combination(model, sizes[model, variant, choice], variant, choice) for model, variant, choice in rows]


@functools.cache
def often() -> frozenset[Combination]:
    """Return what every commit runs: each value on two ranks, a row on one; ``test_any_ranks.py`` takes more."""
    rows = covering()
    alone = next(row for row in rows if row.world_size == 1)
    return frozenset([*fewest([row for row in rows if row.world_size == 2]), alone])


def fewest(rows: Sequence[tuple[Any, ...]], together: int = 1) -> list[tuple[Any, ...]]:
    """Choose a few of the rows, greedily, among which every value of every factor occurs that occurs at all.

    Of rows that do as well the one with more unlike values is taken: an engine's files go to another engine.

    Args:
        rows: of equal length, without repeated ones.
        together: 2 for every pair of values of two factors.
    """
    parts = {row: set(itertools.combinations(enumerate(row), together)) for row in rows}
    missing, found = set().union(*parts.values()), []
    while missing:
        row = max(rows, key=lambda row: (len(missing & parts[row]), len({*row})))
        missing -= parts[row]
        found.append(row)
    return found


# ------------------------------------------------------------------------------------------------ the recipes


def recipe_for(model: str, variant: str, optimizer: str) -> Recipe:
    """The recipe of a combination.

    Raises:
        MissingExtra: it needs a package that is not installed.
    """
    choice = OPTIMIZERS[optimizer]
    base = OWN[model]() if model in OWN else getattr(recipes, model)()
    recipe = replace(base, optimizer=choice.load(), hyper=choice.hyper, name=f"{model}-{variant}-{optimizer}")
    return replace(recipe, **VARIANTS[variant](recipe))


def quiet_recipe_for(model: str, variant: str, optimizer: str) -> Recipe:
    """:func:`recipe_for`, with an end to the known warnings in the process that calls it."""
    for beginning in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=re.escape(beginning))
    return recipe_for(model, variant, optimizer)


# ------------------------------------------------------------------------------------------------ running


class Result(NamedTuple):
    """One cell of the matrix: a combination under one backend.

    Attributes:
        verdict: ``"exact"``, ``"bound"``, ``"refused"``, ``"different"`` or ``"failed"``.
        detail: why it was refused or failed, or where it differs first.
    """

    combination: Combination
    backend: str
    verdict: str
    detail: str = ""

    @property
    def is_fault(self) -> bool:
        """Return whether it must not be."""
        return self.verdict in ("different", "failed")

    def __str__(self) -> str:
        return f"{self.combination} under {self.backend}"

    def at(self, column: str) -> Any:
        """Return its place in a column: a field of the combination, or the backend."""
        return self.backend if column == "backend" else getattr(self.combination, column)


def run(combination: Combination, pool: Any, *, steps: int, backends: Sequence[str] = BACKENDS) -> list[Result]:
    """Compare backends on one combination; one result for each."""
    model, size, variant, optimizer = combination
    source = functools.partial(quiet_recipe_for, model, variant, optimizer)
    reason = expected_refusal(combination, "none")
    if size > 1 and reason in (NO_BOUND, NO_COUNTS) and "none" in backends:
        others = [backend for backend in backends if backend != "none"]
        results = run(combination, pool, steps=steps, backends=others)
        return [*results, Result(combination, "none", "refused", reason)]
    try:
        report = fsshard.parity.compare(source, backends=backends, world_sizes=[size], steps=steps, pool=pool)
    except MissingExtra as error:
        return [Result(combination, backend, "refused", str(error)) for backend in backends]
    except FsshardError as error:  # the reference itself
        return [Result(combination, backend, "failed", f"{type(error).__name__}: {error}") for backend in backends]
    return [Result(combination, cell.backend, cell.verdict, _detail(cell)) for cell in report]


def _detail(cell: Any) -> str:
    parts = [str(cell.first_divergence or ""), cell.reason]
    if cell.verdict == "failed":
        parts.append(cell.traceback)
    return "\n".join(part for part in parts if part) if cell.verdict != "exact" else ""


def run_all(combinations: Sequence[Combination], console: Console, pool: Any, *, steps: int) -> list[Result]:
    """Run one after the other, with a line for each; faults are told at once."""
    results = []
    for number, combination in enumerate(combinations, 1):
        found = run(combination, pool, steps=steps)
        console.print(f"{number} of {len(combinations)}: {combination}", markup=False)
        for result in found:
            if result.is_fault:
                console.print(f"{result}: {result.verdict}: {result.detail}", markup=False)
        results += found
    return results


# ------------------------------------------------------------------------------------------------ the table

VERDICTS = ("exact", "bound", "refused", "different", "failed")


def table(results: Sequence[Result], rows: Sequence[str], columns: str, reasons: list[str]) -> str:
    """Return counts of verdicts by the fields ``rows`` down and the field ``columns`` across, in Markdown.

    Each reason for a refusal stands in ``reasons`` once, where a footnote of that number tells it.
    """
    order = [*MODELS, *WORLD_SIZES, *VARIANTS, *OPTIMIZERS, *BACKENDS]
    cells = {}
    for result in results:
        row = cells.setdefault(tuple(result.at(row) for row in rows), {})
        row.setdefault(result.at(columns), []).append(result)
    across = sorted({head for row in cells.values() for head in row}, key=order.index)
    heads = [("1 rank" if head == 1 else f"{head} ranks") if columns == "world_size" else head for head in across]
    lines = [[*(row.replace("_", " ") for row in rows), *heads]]
    for key in sorted(cells, key=lambda key: [order.index(part) for part in key]):
        lines.append([*key, *(count(cells[key].get(head, []), reasons) for head in across)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    body = ["| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines]
    return "\n".join([body[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *body[1:]])


def count(results: Sequence[Result], reasons: list[str]) -> str:
    """Return ``"52 exact, 2 refused [1]"``."""
    marks = set()
    for result in results:
        if result.verdict == "refused":
            text, c = " ".join(result.detail.split()), result.combination
            # without the numbers of this one run
            reason = text[max(0, text.find(expected_refusal(c, result.backend))) :]
            reasons += [reason] if reason not in reasons else []
            marks.add(reasons.index(reason) + 1)
    found, told = Counter(result.verdict for result in results), "".join(f" [{number}]" for number in sorted(marks))
    return ", ".join(f"{found[v]} {v}{told if v == 'refused' else ''}" for v in VERDICTS if found[v])


def document(results: Sequence[Result], command: str, *, steps: int, pairs: bool) -> str:
    """A part of docs/data/parity.md: with ``pairs`` the results are those of :func:`covering`."""
    reasons, versions = list[str](), []
    for package in ("fsshard", "torch", "fairscale", "neuraloperator", "torch-harmonics", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    combinations = len({result.combination for result in results})
    total = f"{combinations} trainings of {steps} steps, each under every backend: {len(results)} runs."
    explained = [total]
    if pairs:
        explained = [f"{total} Every two values of model, number of ranks, variant and optimizer meet in one of them."]
    parts = [
        "## Every pair" if pairs else "## Every combination",
        "Made by\n\n```\n" + command + "\n```",
        f"With {', '.join(versions)}.",
        *explained,
        "## By model, backend and number of ranks",
        table(results, ["model", "backend"], "world_size", reasons),
        "## By optimizer",
        table(results, ["optimizer"], "backend", reasons),
        "## By variant",
        table(results, ["variant"], "backend", reasons),
    ]
    bad = [result for result in results if result.is_fault]
    if bad:
        listed = [f"- {r}: {r.verdict}: {r.detail.partition(chr(10))[0]}" for r in bad]
        parts += ["## Faults", "\n".join(listed)]
    if reasons:
        parts += ["## Footnotes", "\n".join(f"{i}. {reason}" for i, reason in enumerate(reasons, 1))]
    return "\n\n".join(f"#{part}" if part[:4] in ("## B", "## F") else part for part in parts) + "\n"


# ------------------------------------------------------------------------------------------------ the command


def main(given: Sequence[str] | None = None) -> int:
    """Run, print, write; 0 only when nothing is different or failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity.matrix", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--all", action="store_true", help="every combination, not the covering subset")
    parser.add_argument("--table", type=Path, metavar="FILE.md", help="write the tables here")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps per run (default 2)")
    options = parser.parse_args(given)
    console = Console()
    with RankPool() as pool:
        results = run_all(everything() if options.all else covering(), console, pool, steps=options.steps)
    command = "python -m tests.parity.matrix " + " ".join(sys.argv[1:] if given is None else given)
    text = document(results, command, steps=options.steps, pairs=not options.all)
    console.print(text, markup=False, soft_wrap=True)
    if options.table is not None:
        page.write_part(options.table, "matrix" if options.all else "pairs", text)
    return int(any(result.is_fault for result in results))


if __name__ == "__main__":
    from tests.parity import matrix  # under its own name, by which the ranks find its functions

    sys.exit(matrix.main())
