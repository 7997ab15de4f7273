"""``fsshard parity``."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fsshard.cli import golden as golden_runs
from fsshard.cli import record as recording
from fsshard.cli.exit_codes import BAD_INPUT
from fsshard.cli.options import (
    DEFAULT_BACKENDS,
    Progress,
    backend_names,
    check_recipe,
    meshes,
    naming_recipe,
    world_sizes,
)
from fsshard.cli.output import held_output, progress_bar, write_json
from fsshard.cli.parity_request import ParityRequest, check_backends_and_json, exit_code
from fsshard.errors import ConfigurationError, FsshardError

if TYPE_CHECKING:
    from fsshard.parity import ParityReport

__all__ = ["command", "picture_files"]

DEFAULT_WORLD_SIZES = ("1", "2")
NAMES = {"world_size": "--world-size", "json_file": "--json", "picture": "--plot"}
"""Options by the names of their parameters, where these are not the same."""


def command(
    context: typer.Context,
    recipes: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE]...", help="module:attribute, importable from the current folder."),
    ] = None,
    backends: Annotated[str | None, typer.Option(help="Comma list of backends.", show_default=DEFAULT_BACKENDS)] = None,
    world_size: Annotated[
        list[str] | None,
        typer.Option(help="Numbers of ranks: repeat it, or give a comma list.", show_default="1,2"),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps per run.")] = 10,
    reference: Annotated[str, typer.Option(help="The reference: ddp, or none (one process, joined batches).")] = "ddp",
    mesh: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=SIZE,...", help="Divide the model as RECIPE's split says, for example data=2,tp=2; repeat it."
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds that one run may take.")] = 120.0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON; - is stdout.")
    ] = None,
    picture: Annotated[
        str | None, typer.Option("--plot", metavar="FILE", help="Draw the report: .png, .svg or .pdf.")
    ] = None,
    record: Annotated[
        str | None, typer.Option(metavar="FILE", help="Train RECIPE under one backend, and keep what every step gave.")
    ] = None,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="With --record: keep all tensors too, in a safetensors file beside FILE.")
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Compare with a recorded training: of another torch, machine, commit."),
    ] = None,
    golden: Annotated[
        bool, typer.Option("--golden", help="Check the golden runs of this installation instead of a RECIPE.")
    ] = False,
    progress: Progress = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="One line per recipe, and its warnings.")] = False,
) -> None:
    """Train RECIPE under several backends and compare them, step by step, to the last bit.

    The exit code is 0 only if all agree; 1 if something differs, failed or was refused; 2 for bad input.
    """
    request = ParityRequest(
        recipes=list(dict.fromkeys(recipes or ())),
        backends=backend_names("--backends", backends),
        world_sizes=world_sizes(world_size or DEFAULT_WORLD_SIZES),
        options={"steps": steps, "reference": reference, "timeout": timeout, "device": device},
        json_file=json_file,
        picture=picture,
        progress=False if quiet else progress,
        quiet=quiet,
        given=frozenset(
            NAMES.get(name, f"--{name}")
            for name in context.params
            if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
        ),
        record=record,
        tensors=tensors,
        against=against,
        meshes=meshes(mesh or ()),
    )
    runs = golden_runs.run if golden else recording.run if record is not None else _run_parity
    raise typer.Exit(runs(request))


def _run_parity(request: ParityRequest) -> int:
    _check(request)
    results = _compare_all(request)
    for name, result in results.items():
        _show(request, name, result)
    if request.json_file is not None:
        texts = [_json(name, result) for name, result in results.items()]
        write_json(request.json_file, texts[0] if len(request.recipes) == 1 else f"[{','.join(texts)}]")
    pictures = picture_files(request.picture, request.recipes)
    for name, result in results.items():
        if pictures and not isinstance(result, BaseException):
            result.plot(pictures[name])
    return max((exit_code(result) for result in results.values()), default=BAD_INPUT)


def _check(request: ParityRequest) -> None:
    """Raise for whatever is wrong with the options, before minutes are spent on the runs."""
    from fsshard.parity.render import check_picture

    if not request.recipes:
        raise ConfigurationError("expected a RECIPE, for example: fsshard parity tfno (or --golden)")
    request.refuse("--tensors", "says what --record keeps; give --record too")
    if request.against is not None:
        request.refuse("--reference", "has no meaning beside --against, whose training is the reference")
        if len(request.recipes) > 1:
            raise ConfigurationError(f"--against {request.against} holds one training; give one RECIPE")
        request.refuse("--mesh", "has no meaning beside --against: what was recorded has no mesh")
    check_backends_and_json(request)
    for file in picture_files(request.picture, request.recipes).values():
        check_picture(file)


def _compare_all(request: ParityRequest) -> dict[str, ParityReport | BaseException]:
    """Recipe -> its report, or what stopped the comparison. One bad recipe does not lose the others' results."""
    from fsshard.launching.pool import RankPool
    from fsshard.parity import compare

    asked = _asked(request)
    results: dict[str, ParityReport | BaseException] = {}
    with ExitStack() as stack:
        stderr = stack.enter_context(held_output(show=not request.quiet))
        for name in request.recipes:
            check_recipe(name)
        bar = stack.enter_context(progress_bar(request.progress, stderr))
        pool = stack.enter_context(RankPool(device=request.options["device"]))
        for name in request.recipes:
            try:
                results[name] = compare(
                    name,
                    pool=pool,
                    progress=bar(name),
                    **asked,
                )
            except (FsshardError, KeyboardInterrupt) as error:
                results[name] = error
                if isinstance(error, KeyboardInterrupt):
                    break
    return results


def _asked(request: ParityRequest) -> dict[str, Any]:
    """Arguments of ``compare``. Beside a recorded training, what is not given is as it was recorded."""
    backends = request.backends or DEFAULT_BACKENDS.split(",")
    asked = {"backends": backends, "world_sizes": request.world_sizes, **request.options}
    if request.meshes:  # it says how many ranks, and what the reference is
        options = {"world_sizes": "--world-size", "reference": "--reference"}
        asked |= {name: None for name, option in options.items() if option not in request.given}
        return {**asked, "mesh": request.meshes}
    if request.against is None:
        return asked
    from fsshard.parity import Trace

    options = {"backends": "--backends", "world_sizes": "--world-size", "steps": "--steps"}
    asked |= {name: None for name, option in options.items() if option not in request.given}
    return {**asked, "against": Trace.load(request.against)}


def _json(name: str, result: ParityReport | BaseException) -> str:
    if isinstance(result, BaseException):
        return json.dumps({"recipe": name, "ok": False, "error": str(result) or "interrupted"}, indent=1)
    return result.to_json()


def _show(request: ParityRequest, name: str, result: ParityReport | BaseException) -> None:
    """Print a report as its stream deserves, and an error as one line."""
    if isinstance(result, BaseException):
        print(f"fsshard: {naming_recipe(name, result)}", file=sys.stderr)
        return
    from rich.console import Console

    from fsshard.parity.render import details, head, summary

    console = Console(file=request.out)
    if request.quiet:
        print(f"{result.recipe}: {summary(result)}", file=request.out)
        for warning in result.warnings:
            print(f"fsshard: {result.recipe}: {warning}", file=sys.stderr)
    elif not console.is_terminal:  # a log: no frames that are cut at 80 columns
        print(f"{result}\n", file=request.out)
    else:
        console.print(result.table() if result.cells else head(result), markup=False, highlight=False)
        for paragraph in details(result):
            console.print(f"{paragraph}\n", markup=False, highlight=False)
        console.print(
            f"{summary(result)}\n", style="bold green" if result.ok else "bold red", markup=False, highlight=False
        )


def picture_files(file: str | None, recipes: list[str]) -> dict[str, Path]:
    """Recipe -> file. With several recipes each has its name in it: ``parity-tfno.png``."""
    if file is None:
        return {}
    path = Path(file)
    if len(recipes) == 1:
        return {recipes[0]: path}
    short = [recipe.partition(":")[2] for recipe in recipes]
    names = short if len(set(short)) == len(short) else [recipe.replace(":", ".") for recipe in recipes]
    return {
        recipe: path.with_name(f"{path.stem}-{name}{path.suffix}") for recipe, name in zip(recipes, names, strict=True)
    }
