"""Exit codes, and where the output of commands goes: JSON, progress bars, and what ranks print meanwhile."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TextIO

AGREED = 0
DIFFERENT = 1
BAD_INPUT = 2
# 128 and the signal's number, as shells have it.
INTERRUPTED = 130
TERMINATED = 143

ProgressCallback = Callable[[float, float, str], None]


def exit_code(ok: bool) -> int:
    """Return the exit code of a command whose result is right, or not."""
    return AGREED if ok else DIFFERENT


def text_stream(json_file: str | None) -> TextIO:
    """Return where text goes: not to stdout if the JSON goes there."""
    return sys.stderr if json_file == "-" else sys.stdout


def write_json(file: str, text: str) -> None:
    """Write to a file, or to stdout if it is ``-``."""
    if file == "-":
        print(text)
    else:
        Path(file).write_text(text + "\n", encoding="utf-8")


def write_files(result: Any, json_file: str | None, picture: str | None = None) -> None:
    """Write a result to the files that a command was given for it."""
    if json_file is not None:
        write_json(json_file, result.to_json())
    if picture is not None:
        result.plot(picture)


@contextmanager
def held_output(show: bool) -> Iterator[TextIO]:
    """Hold back what this process and its ranks print meanwhile, and show it on stderr afterwards, each line once.

    Warnings of torch, one per rank and run, would tear the progress bar to pieces, and whatever a recipe prints would
    end up in the JSON. Without ``show`` it is shown only if something is raised. Yields the true stderr.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with ExitStack() as stack:
        file = stack.enter_context(tempfile.TemporaryFile())
        terminal = stack.enter_context(_true_stderr())
        saved = {number: os.dup(number) for number in (1, 2)}
        # The descriptors are redirected, and not Python's streams, since ranks are processes.
        for number in saved:
            os.dup2(file.fileno(), number)
        try:
            # sys.stdout need not lead to descriptor 1: notebooks and test runners have streams of their own.
            with os.fdopen(os.dup(file.fileno()), "w", buffering=1, encoding="utf-8", errors="replace") as stream:
                with redirect_stdout(stream), redirect_stderr(stream):
                    yield terminal
        except BaseException:
            show = True
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, copy in saved.items():
                os.dup2(copy, number)
                os.close(copy)
            file.seek(0)
            if show:
                lines = file.read().decode(errors="replace").splitlines()
                for line in dict.fromkeys(line.rstrip() for line in lines if line.strip()):
                    print(line, file=sys.stderr)


@contextmanager
def _true_stderr() -> Iterator[TextIO]:
    """Yield a stream to where stderr leads now, whatever becomes of descriptor 2."""
    try:
        direct = sys.stderr.fileno() == 2
    except (OSError, AttributeError):
        direct = False
    if not direct:
        yield sys.stderr
        return
    with os.fdopen(os.dup(2), "w", encoding=sys.stderr.encoding, errors="backslashreplace") as copy:
        yield copy


@contextmanager
def progress_bar(wanted: bool | None, stderr: TextIO) -> Iterator[Callable[[str], ProgressCallback]]:
    """Yield ``name -> progress callback`` with a bar per name, where bars are ``wanted`` (None: on a terminal)."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    if wanted is None:
        wanted = stderr.isatty()
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[text]}", markup=False),
    )
    # Output is held back on the descriptors; rich must not hold back sys.stdout once more.
    console = Console(file=stderr, force_terminal=True)
    with Progress(
        *columns,
        console=console,
        redirect_stdout=False,
        redirect_stderr=False,
        transient=True,
        disable=not wanted,
    ) as bars:

        def bar(name: str) -> ProgressCallback:
            task = bars.add_task(name, total=None, text="")
            return lambda done, total, text: bars.update(task, completed=done, total=total, text=text)

        yield bar
