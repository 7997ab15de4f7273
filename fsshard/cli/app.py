"""The command ``fsshard``.

    fsshard parity tfno --backends fairscale,fsdp,fsdp2,ddp --world-size 2

Exit codes: 0, all is well; 1, something differs, was refused or failed; 2, the question itself is wrong (no such
recipe, an unknown backend, a bad option, a missing package), told in one line; 130, interrupted; 143, terminated.

typer and rich come with the extra ``cli``; without them ``--version`` and ``--help`` answer, and the commands say so.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING

import fsshard
from fsshard.cli.output import AGREED, BAD_INPUT, DIFFERENT, INTERRUPTED, TERMINATED
from fsshard.errors import CorruptCheckpoint, FsshardError, MissingExtra
from fsshard.planning.text import aligned, printable

if TYPE_CHECKING:
    import typer

__all__ = ["application", "main"]

_LAYOUT = "\n\t"
ABOUT = "One interface over FairScale, FSDP, FSDP2 and DDP, and the proof that they train the same."

# Command -> where its function is, and what it does, in a line.
COMMANDS: dict[str, tuple[str, str]] = {
    "parity": ("parity:command", "Train RECIPE under several backends and compare them, to the last bit."),
    "inspect": ("commands:inspect", "Print what CHECKPOINT holds, and whether it is complete."),
    "export": ("commands:export", "Write the weights of CHECKPOINT to FILE for other programs."),
    "import": ("commands:import_", "Convert another program's checkpoint for fsshard.load."),
    "estimate": ("commands:estimate", "Memory and traffic of a training step of RECIPE, before it is launched."),
    "tune": ("commands:tune", "Find the plan of RECIPE that sends the fewest bytes and fits."),
    "doctor": ("doctor:command", "Try out what this machine can do."),
    "demo": ("commands:demo", "Train a TFNO on Darcy flow under one engine or several."),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        arguments: without the program's name; those of the process by default.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["--version"]:
        print(f"fsshard {fsshard.__version__}")
        return AGREED
    try:
        with _termination_raises(), _printable_log():
            code = application()(args=given, prog_name="fsshard", standalone_mode=False)
        return code if isinstance(code, int) else AGREED
    except CorruptCheckpoint as error:
        _complain(error)
        return DIFFERENT
    except MissingExtra as error:
        if given and not {"-h", "--help"} & set(given):
            return _complain(error)
        _print_help(error)
        return AGREED if given else BAD_INPUT
    except (FsshardError, OSError) as error:  # an OSError: a file that cannot be written
        return _complain(error)
    except Exception as error:
        if not hasattr(error, "format_message"):
            if type(error).__name__ == "Abort":  # what typer makes of Ctrl-C
                return INTERRUPTED
            raise
        # typer's (or, before 0.25, click's) word for a bad option; their own output is a box of several lines.
        return _complain(error.format_message())


@contextmanager
def _termination_raises() -> Iterator[None]:
    """Make SIGTERM an exception, so that folders of temporary files go and ranks end as on any other way out."""
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or before is None:  # None: not Python's to restore
        yield
        return

    def end(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not interrupt the clearing up
        raise SystemExit(TERMINATED)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _complain(error: object) -> int:
    print(f"fsshard: {printable(str(error), keep=_LAYOUT)}", file=sys.stderr)
    return BAD_INPUT


def _print_help(missing: MissingExtra) -> None:
    """Print the commands without typer."""
    rows = [[f"  {name}", text] for name, (_, text) in COMMANDS.items()]
    print("\n".join(["Usage: fsshard [--version] COMMAND ...", "", ABOUT, "", *aligned(rows), "", str(missing)]))


@contextmanager
def _printable_log() -> Iterator[None]:
    """Escape what is logged: it can have names out of files, which a terminal must not obey."""

    def spell(record: logging.LogRecord) -> bool:
        record.msg, record.args = printable(record.getMessage(), keep=_LAYOUT), ()
        return True

    logger = logging.getLogger("fsshard")
    logger.addFilter(spell)
    try:
        yield
    finally:
        logger.removeFilter(spell)


def application() -> typer.Typer:
    """Return the typer application.

    Raises:
        MissingExtra: typer or rich is not installed.
    """
    try:
        import rich  # noqa: F401
        import typer
    except ImportError as error:
        raise MissingExtra((error.name or "typer").partition(".")[0], "cli", "the command line") from error
    # Here and not above, since the modules of the commands need typer.
    from fsshard.cli import commands

    settings = {"help_option_names": ["-h", "--help"]}
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, context_settings=settings, help=ABOUT)
    app.callback(invoke_without_command=True)(commands.top)
    for name, (place, text) in COMMANDS.items():
        module, _, function = place.partition(":")
        app.command(name, short_help=text)(getattr(import_module(f"fsshard.cli.{module}"), function))
    return app
