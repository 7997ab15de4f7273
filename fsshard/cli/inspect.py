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
    from fsshard.checkpoint.inspecting import inspect

    check_json_file(json_file)
    with progress_bar(progress if verify else False, sys.stderr) as bar:
        shown = bar("checksums")
        found = inspect(path, verify=verify, progress=None if shown is None else lambda done, of: shown(done, of, ""))
    if json_file is not None:
        write_json(json_file, found.to_json())
    out = sys.stderr if json_file == "-" else sys.stdout
    for line in found.render():
        print(line, file=out)
    return AGREED if found.ok else DIFFERENT
