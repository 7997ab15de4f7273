"""``fsshard trace`` and ``fsshard compare``: two scripts that know nothing of each other, or of fsshard."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from fsshard.cli import options, output
from fsshard.cli.options import Json, Picture, Quiet
from fsshard.errors import ConfigurationError
from fsshard.planning.text import counted


def trace(
    folder: Annotated[Path, Argument(metavar="FOLDER", help="Folder for the record, which must not exist yet.")],
    command: Annotated[list[str], Argument(metavar="-- COMMAND...", help="The command that starts the training.")],
    every: Annotated[int, Option(min=1, help="Record weights at every N-th step.")] = 1,
    steps: Annotated[str, Option(metavar="FIRST:STOP", help="Record these steps only.")] = ":",
    tensors: Annotated[
        str, Option(metavar="every=N", help="Also keep full weights at every N-th step; 0: never.")
    ] = "every=0",
    state: Annotated[bool, Option("--state", help="Also record and compare the optimizers' state.")] = False,
    repeat: Annotated[int, Option(min=0, help="Extra runs, rounded at random: what rounding may change.")] = 0,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace an existing record.")] = False,
    quiet: Quiet = False,
) -> None:
    """Run COMMAND, unchanged, and record its training: losses, samples, learning rates and weights of each step.

    The exit code is that of COMMAND, or 1 if it trained nothing.
    """
    from fsshard.parity.scripts.command import run
    from fsshard.parity.scripts.recorder import Settings
    from fsshard.parity.scripts.store import ScriptTrace

    start, stop = _numbers("--steps", steps, r"(\d*):(\d*)", "FIRST:STOP, for example 0:50")
    (interval,) = _numbers("--tensors", tensors, r"every=(\d+)", "every=N, for example every=100")
    first = int(start or 0)
    last = int(stop) if stop else None
    if last is not None and first >= last:
        raise ConfigurationError(f"--steps {steps!r}: expected FIRST before STOP, for example 0:50")
    settings = Settings(
        every=every,
        first=first,
        last=last,
        tensors=int(interval),
        state=state,
    )
    # A folder without a record is never removed.
    if overwrite and list(folder.glob("rank*.jsonl")):
        shutil.rmtree(folder)
    code = run(command, folder, settings, repeat=repeat)
    if not list(folder.glob("rank*.jsonl")):
        why = f"no process of {sys.executable} made a step whose module was called with gradients"
        print(f"fsshard: nothing is recorded: {why}", file=sys.stderr)
        raise Exit(code or output.DIFFERENT)
    record = ScriptTrace.load(folder)
    if not quiet:
        ranks = counted(len(record.ranks), "rank")
        print(f"{len(record.steps)} steps on {ranks}: {folder}", file=sys.stderr)
    raise Exit(code)


def compare(
    old: Annotated[Path, Argument(help="The record of the reference script: a folder of fsshard trace.")],
    new: Annotated[Path, Argument(help="The record of the other script.")],
    repeat: Annotated[
        list[Path] | None,
        Option(metavar="FOLDER", help="Another record of the reference script; may be repeated."),
    ] = None,
    exactly: Annotated[bool, Option("--exactly", help="Allow no rounding, even with repeated runs.")] = False,
    json_file: Json = None,
    picture: Picture = None,
    quiet: Quiet = False,
) -> None:
    """Report whether two recorded scripts trained the same, and what differed first.

    Exit code: 0 if they did; 1 if not; 2 for invalid input. The first line of the output fits into a pull request.
    """
    from fsshard.parity.scripts.comparing import compare_scripts

    options.check_files(json_file, picture)
    report = compare_scripts(old, new, repeats=repeat or (), exactly=exactly)
    print(report.sentence if quiet else report, file=output.text_stream(json_file))
    output.write_files(report, json_file)
    if picture is not None:
        report.report.plot(picture)
    raise Exit(output.exit_code(report.ok))


def _numbers(option: str, text: str, pattern: str, example: str) -> list[str]:
    """Return the numbers in an option's text, "" for one that is left out."""
    match = re.fullmatch(pattern, text)
    if match is None:
        raise ConfigurationError(f"{option} {text!r}: expected {example}")
    return [*match.groups()]
