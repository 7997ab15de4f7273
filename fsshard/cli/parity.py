"""``fsshard parity``: compare engines on a recipe, or record one training (``--record``)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from typer import Argument, Exit, Option

from fsshard.cli import options as cli
from fsshard.cli import output
from fsshard.cli.options import DEFAULT_BACKENDS, Device, Json, Picture, Progress, Quiet
from fsshard.cli.output import AGREED, BAD_INPUT, DIFFERENT, INTERRUPTED
from fsshard.errors import ConfigurationError, FsshardError, MissingExtra
from fsshard.planning.text import counted

if TYPE_CHECKING:
    from fsshard.parity import ParityReport, Trace

Options = dict[str, Any]

MEANINGLESS = {
    "--record": ("--against", "--reference", "--mesh", "--json", "--plot"),
    "--against": ("--reference", "--mesh"),
}
"""Options that have no effect together with another one."""


@dataclass(kw_only=True)
class Request:
    """The request that ``fsshard parity`` was given."""

    recipes: list[str]
    options: Options  # of ``compare`` or ``record``, passed on as they are
    json_file: str | None
    picture: str | None
    progress: bool | None  # None: a bar if stderr is a terminal
    quiet: bool

    @property
    def out(self) -> TextIO:
        """Return where the tables go: not to stdout if the JSON goes there."""
        return output.text_stream(self.json_file)


def command(
    recipes: Annotated[
        list[str] | None,
        Argument(
            metavar="[RECIPE]...",
            help="A built-in recipe such as tfno, or module:attribute, importable from the current folder.",
        ),
    ] = None,
    backends: Annotated[str | None, Option(help="Comma-separated backends.", show_default=DEFAULT_BACKENDS)] = None,
    world_size: Annotated[
        list[str] | None,
        Option(help="Comma-separated numbers of ranks.", show_default="1,2"),
    ] = None,
    steps: Annotated[int | None, Option(min=1, help="Optimizer steps per run.", show_default="10")] = None,
    reference: Annotated[
        str | None,
        Option(help="Compare with ddp, or with none: one process on the joined batches.", show_default="ddp"),
    ] = None,
    mesh: Annotated[
        list[str] | None,
        Option(
            metavar="NAME=SIZE,...",
            help="Split the model with the recipe's split(), for example data=2,tp=2; may be repeated.",
        ),
    ] = None,
    timeout: Annotated[float, Option(min=1.0, help="Time limit of a run, in seconds.")] = 120.0,
    device: Device = "cpu",
    json_file: Json = None,
    picture: Picture = None,
    record: Annotated[
        str | None, Option(metavar="FILE", help="Train under one backend, and record the numbers of every step.")
    ] = None,
    tensors: Annotated[
        bool,
        Option("--tensors", help="With --record: save all tensors, too, in a safetensors file next to FILE."),
    ] = False,
    against: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help="Compare with a training recorded with --record, under another torch, machine or commit.",
        ),
    ] = None,
    progress: Progress = None,
    quiet: Quiet = False,
) -> None:
    """Train RECIPE under several backends and compare them step by step, bit by bit.

    Exit code: 0 if all agree; 1 if something differs, failed or was refused; 2 for invalid input.
    """
    # Contradictions are told before minutes are spent on runs.
    given = {
        "--record": record,
        "--against": against,
        "--reference": reference,
        "--mesh": mesh,
        "--json": json_file,
        "--plot": picture,
    }
    names = list(dict.fromkeys(recipes or ()))
    _check_together(given, names)
    if tensors and record is None:
        raise ConfigurationError("--tensors chooses what --record keeps; give --record too")
    engines = None if backends is None else cli.backend_names(backends)
    sizes = None if world_size is None else cli.world_sizes(world_size)
    request = Request(
        recipes=names,
        options={"timeout": timeout, "device": device},
        json_file=json_file,
        picture=picture,
        progress=False if quiet else progress,
        quiet=quiet,
    )
    options = request.options
    if record is not None:
        if len(engines or ()) > 1 or len(sizes or ()) > 1:
            raise ConfigurationError("--record records one training; give one backend and one world size")
        options["detail"] = "tensors" if tensors else "digests"
        if engines:
            options["backend"] = engines[0]
        if sizes:
            options["world_size"] = sizes[0]
        if steps:
            options["steps"] = steps
        raise Exit(_record(request, record))
    # What is None is as compare() has it: as it was recorded, or as the mesh says.
    options |= {"backends": engines, "world_sizes": sizes, "steps": steps, "reference": reference}
    if mesh:
        options["mesh"] = cli.meshes(mesh)
    raise Exit(_compare(request, against))


def _check_together(given: Options, recipes: list[str]) -> None:
    """Raise for options that contradict each other, and for several recipes where one is trained."""
    if not recipes:
        raise ConfigurationError("expected a RECIPE, for example: fsshard parity tfno")
    for one, others in MEANINGLESS.items():
        if given[one] is None:
            continue
        for option in others:
            if given[option] is not None:
                raise ConfigurationError(f"{option} has no effect together with {one}; leave it out")
        if len(recipes) > 1:
            raise ConfigurationError(f"{one} takes one training; give one RECIPE")


def _each(
    request: Request,
    train: Callable[[str, output.ProgressCallback], Any],
    pool: AbstractContextManager[Any] | None = None,
) -> Options:
    """Map each name to what ``train`` returned, or what stopped it: one that fails does not lose the others."""
    results = {}
    with output.held_output(show=not request.quiet) as stderr:
        for recipe in request.recipes:
            # All recipes are imported before the first of them is trained.
            cli.check_recipe(recipe)
        with output.progress_bar(request.progress, stderr) as bar, pool or nullcontext():
            for name in request.recipes:
                try:
                    results[name] = train(name, bar(name))
                except (FsshardError, KeyboardInterrupt) as error:
                    results[name] = error
                    if isinstance(error, KeyboardInterrupt):
                        break
    return results


def _exit_code(result: Any) -> int:
    """Return the exit status of a report, or of what stopped it."""
    if isinstance(result, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(result, (ConfigurationError, MissingExtra)):
        return BAD_INPUT
    if isinstance(result, BaseException):
        return DIFFERENT
    return output.exit_code(result.ok)


# ------------------------------------------------------------------------------------------------ compare


def _compare(request: Request, against: str | None) -> int:
    from fsshard.launching.pool import RankPool
    from fsshard.parity import Trace, compare

    pictures = _pictures(request)
    # No run is worth starting whose result cannot be written.
    for file in (None, *pictures.values()):
        cli.check_files(request.json_file, file)
    if against is not None:
        request.options["against"] = Trace.load(against)
    pool = RankPool(device=request.options["device"])

    def train(name: str, bar: output.ProgressCallback) -> ParityReport:
        return compare(name, pool=pool, progress=bar, **request.options)

    results = _each(request, train, pool=pool)
    for name, result in results.items():
        _show(request, name, result)
    if request.json_file is not None:
        texts = [_json(name, result) for name, result in results.items()]
        # Of several recipes it is a list, whatever has stopped some of them.
        text = texts[0] if len(request.recipes) == 1 else f"[{','.join(texts)}]"
        output.write_json(request.json_file, text)
    for name, result in results.items():
        if pictures and not isinstance(result, BaseException):
            result.plot(pictures[name])
    return max(map(_exit_code, results.values()), default=BAD_INPUT)


def _pictures(request: Request) -> dict[str, Path]:
    """Return the file of each recipe's picture; of several recipes each has its name in it."""
    if request.picture is None:
        return {}
    path = Path(request.picture)
    if len(request.recipes) == 1:
        return {request.recipes[0]: path}
    pictures = {}
    for recipe in request.recipes:
        name = recipe.replace(":", ".")
        pictures[recipe] = path.with_name(f"{path.stem}-{name}{path.suffix}")
    return pictures


def _json(name: str, result: ParityReport | BaseException) -> str:
    if isinstance(result, BaseException):
        return json.dumps({"recipe": name, "ok": False, "error": str(result) or "interrupted"}, indent=1)
    return result.to_json()


def _show(request: Request, name: str, result: ParityReport | BaseException) -> None:
    """Print a report as its stream deserves, and an error as one line."""
    if isinstance(result, BaseException):
        print(f"fsshard: {cli.naming_recipe(name, result)}", file=sys.stderr)
        return
    from rich.console import Console
    from rich.text import Text

    from fsshard.parity.render import summary

    if request.quiet:
        print(f"{result.recipe}: {summary(result)}", file=request.out)
        for warning in result.warnings:
            print(f"fsshard: {result.recipe}: {warning}", file=sys.stderr)
        return
    text = Text(f"{result}\n")
    text.highlight_words(["DIFFERENT", "FAILED"], "bold red")
    # No line is cut at the width of a terminal or, in a log, at 80 columns.
    Console(file=request.out, soft_wrap=True).print(text)


# ------------------------------------------------------------------------------------------------ record


def _record(request: Request, file: str) -> int:
    from fsshard.parity import record
    from fsshard.pictures import check_file

    check_file(file)

    def train(name: str, bar: output.ProgressCallback) -> Trace:
        return record(name, progress=bar, **request.options)

    ((recipe, trace),) = _each(request, train).items()
    if isinstance(trace, BaseException):
        print(f"fsshard: {cli.naming_recipe(recipe, trace)}", file=sys.stderr)
        return _exit_code(trace)
    trace.save(file)
    ranks = counted(trace.world_size, "rank")
    print(f"{trace.steps} steps of {recipe} under {trace.backend} on {ranks}: {trace.file}")
    if trace.tensors is not None:
        print(f"tensors: {trace.tensors}")
    if not request.quiet:
        for name, value in trace.environment.items():
            print(f"  {name} {value}")
        print(f"compare with it: fsshard parity {recipe} --against {trace.file}")
    return AGREED
