"""``fsshard tune``."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from typing import Annotated, Any

import typer

from fsshard.cli.options import Progress, backend_names, check_json_file, check_recipe
from fsshard.cli.output import progress_bar, write_json

__all__ = ["command"]


def command(
    recipe: Annotated[str, typer.Argument(help="module:attribute, importable from the current folder.")],
    world_size: Annotated[int, typer.Option(min=1, help="Number of ranks.")] = 2,
    memory: Annotated[
        str | None,
        typer.Option(help=("Memory that a rank may use, such as 40GiB; without it the smallest peak is searched.")),
    ] = None,
    backends: Annotated[str, typer.Option(help="Comma list of backends.")] = "fsdp2",
    device: Annotated[str, typer.Option(help="The target device: cpu or cuda.")] = "cpu",
    mixed_precision: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; else the recipe's.")] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Simulations after which no further plan is tried.", show_default="12 to 40"),
    ] = None,
    real: Annotated[bool, typer.Option("--real", help="Run on real tensors, as one rank.")] = False,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write all plans as JSON; - is stdout.")
    ] = None,
    picture: Annotated[
        str | None, typer.Option("--plot", metavar="FILE", help="Draw peak against traffic: .png, .svg or .pdf.")
    ] = None,
    progress: Progress = None,
) -> None:
    """Find the plan of RECIPE that sends the fewest bytes and fits, by simulation; print it as code to paste.

    The exit code is 0; 2 for bad input, which includes a bound that no plan fits.
    """
    check_recipe(recipe)
    arguments: dict[str, Any] = {"memory": memory, "device": device, "real": real, "limit": limit}
    if mixed_precision is not None:
        arguments["mixed_precision"] = mixed_precision
    from fsshard.parity.render import check_picture
    from fsshard.simulation.tuning.tuning import tune

    names = backend_names("--backends", backends) or []
    if picture is not None:
        check_picture(picture)
    check_json_file(json_file)
    with progress_bar(progress, sys.stderr) as bar:
        shown = bar(recipe)
        tell = None if shown is None else lambda done, text: shown(done, limit or done + 1, text)
        with redirect_stdout(sys.stderr):  # what the recipe prints
            found = tune(recipe, backend=names, world_size=world_size, progress=tell, **arguments)
    print(found, file=sys.stderr if json_file == "-" else sys.stdout)
    if json_file is not None:
        write_json(json_file, found.to_json())
    if picture is not None:
        found.plot(picture)
