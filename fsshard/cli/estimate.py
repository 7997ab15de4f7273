"""``fsshard estimate``."""

from __future__ import annotations

import math
import sys
from contextlib import redirect_stdout
from typing import Annotated, Any

import typer

from fsshard.backends import backend_class
from fsshard.cli.options import (
    DEFAULT_BACKENDS,
    Progress,
    backend_names,
    check_json_file,
    check_recipe,
    meshes,
    world_sizes,
)
from fsshard.cli.output import progress_bar, write_json
from fsshard.errors import ConfigurationError

__all__ = ["command"]

SWEEP = tuple(4**power for power in range(7))
"""World sizes of the picture."""


def command(
    recipe: Annotated[str, typer.Argument(help="module:attribute, importable from the current folder.")],
    backends: Annotated[str | None, typer.Option(help="Comma list of backends.", show_default=DEFAULT_BACKENDS)] = None,
    world_size: Annotated[
        list[str] | None, typer.Option(help="Numbers of ranks: repeat it, or give a comma list.", show_default="2")
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(metavar="NAME=SIZE,...", help="Divide the model as RECIPE's split says, for example data=4,tp=2."),
    ] = None,
    device: Annotated[str, typer.Option(help="The target device: cpu or cuda.")] = "cpu",
    mixed_precision: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; else the recipe's.")] = None,
    activation_checkpointing: Annotated[
        bool, typer.Option("--activation-checkpointing", help="Recompute blocks in the backward pass.")
    ] = False,
    accumulation: Annotated[
        int | None, typer.Option(min=1, help="Backward passes per step; else the recipe's.")
    ] = None,
    cpu_offload: Annotated[
        bool, typer.Option("--cpu-offload", help=("Keep shards in host memory; count what stays on the device."))
    ] = False,
    real: Annotated[bool, typer.Option("--real", help="Run on real tensors, as one rank.")] = False,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the estimates as JSON; - is stdout.")
    ] = None,
    picture: Annotated[
        str | None,
        typer.Option("--plot", metavar="FILE", help="Draw them, and 1 to 4096 ranks: .png, .svg or .pdf."),
    ] = None,
    progress: Progress = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="The table only, and no progress bar.")] = False,
) -> None:
    """Memory and traffic of a training step of RECIPE per rank, before it is launched and without a GPU.

    The exit code is 0; 2 for bad input, which includes a step that depends on the values of tensors.
    """
    check_recipe(recipe)
    arguments: dict[str, Any] = {"device": device, "real": real, "cpu_offload": cpu_offload}
    if mixed_precision is not None:
        arguments["mixed_precision"] = mixed_precision
    if activation_checkpointing:
        arguments["activation_checkpointing"] = True
    if accumulation is not None:
        arguments["accumulation"] = accumulation
    names = backend_names("--backends", backends) or DEFAULT_BACKENDS.split(",")
    sizes = world_sizes(world_size or ["2"])
    if mesh is not None:
        if picture is not None:
            raise ConfigurationError("--plot draws 1 to 4096 ranks of data; leave out --mesh, or --plot")
        (arguments["mesh"],) = meshes([mesh])
        sizes = sizes if world_size else [math.prod(arguments["mesh"].values())]
    from fsshard.parity.render import check_picture
    from fsshard.simulation.estimating import estimate
    from fsshard.simulation.result import overview, plot

    for name in names:
        backend_class(name, 2)
    if picture is not None:
        check_picture(picture)
    check_json_file(json_file)
    every = list(dict.fromkeys([*sizes, *(SWEEP if picture is not None else ())]))
    with progress_bar(False if quiet else progress, sys.stderr) as bar:
        shown = bar(recipe)
        tell = None if shown is None else lambda done, of: shown(done, of, "simulated")
        with redirect_stdout(sys.stderr):  # what the recipe prints
            ranks = every[0] if len(every) == 1 else every
            found = estimate(recipe, backend=names, world_size=ranks, progress=tell, **arguments)
    asked = [one for one in found if one.world_size in sizes]
    out = sys.stderr if json_file == "-" else sys.stdout
    if not quiet:
        print("\n\n".join(map(str, asked)), end="\n\n", file=out)
    print(overview(asked), file=out)
    if json_file is not None:
        write_json(json_file, f"[{','.join(one.to_json() for one in asked)}]")
    if picture is not None:
        plot(found, picture, sizes[0])
