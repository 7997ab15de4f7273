"""``fsshard inspect``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fsshard.cli.exit_codes import AGREED, DIFFERENT
from fsshard.cli.options import Progress, check_json_file
from fsshard.cli.output import progress_bar, write_json

__all__ = ["command"]

LOG_WIDTH = 1000


def command(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a directory of them.")],
    verify: Annotated[bool, typer.Option("--verify", help="Compare checksums: reads every byte.")] = False,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write all of it as JSON; - is stdout.")
    ] = None,
    progress: Progress = None,
) -> None:
    """Print what CHECKPOINT holds, where it comes from, and whether it is complete.

    The exit code is 1 if it is not: the file and the tensors in it are named.
    """
    raise typer.Exit(_run(checkpoint, verify, json_file, progress))


def _run(path: Path, verify: bool, json_file: str | None, progress: bool | None) -> int:
    from rich.console import Console

    from fsshard.checkpoint.inspecting import inspect

    check_json_file(json_file)
    with progress_bar(progress if verify else False, sys.stderr) as bar:
        shown = bar("checksums")
        found = inspect(path, verify=verify, progress=None if shown is None else lambda done, of: shown(done, of, ""))
    if json_file is not None:
        write_json(json_file, found.to_json())
    out = sys.stderr if json_file == "-" else sys.stdout
    console = Console(file=out, emoji=False)
    if not console.is_terminal:  # a log: no lines that are cut at 80 columns
        console = Console(file=out, width=LOG_WIDTH, emoji=False)
    for part in found.render():
        console.print(part, markup=False, highlight=False, soft_wrap=isinstance(part, str))
    return AGREED if found.ok else DIFFERENT
