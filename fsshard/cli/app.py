"""The command ``fsshard``.

    fsshard parity tfno --backends fairscale,fsdp,fsdp2,ddp --world-size 2

Exit codes: 0, all is well; 1, something differs, was refused or failed; 2, invalid input (no such recipe, an unknown
backend, a bad option, a missing package), reported in one line; 130, interrupted; 143, terminated.

typer and rich come with the extra ``cli``; without them ``--version`` works, and ``--help`` lists the commands.
"""

from __future__ import annotations

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
from fsshard.planning.text import printable

if TYPE_CHECKING:
    import typer

LAYOUT = "\n\t"  # control characters that errors may have
ABOUT = "One interface over FairScale, FSDP, FSDP2 and DDP, and the proof that they train the same."

COMMANDS = {
    "parity": "parity:command",
    "inspect": "commands:inspect",
    "export": "commands:export",
    "import": "commands:import_",
    "estimate": "commands:estimate",
    "tune": "commands:tune",
    "doctor": "doctor:command",
    "demo": "commands:demo",
    "trace": "scripts:trace",
    "compare": "scripts:compare",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        arguments: without the program's name; those of the process by default.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["--version"]:
        print(f"fsshard {fsshard.__version__}")
        return AGREED
    try:
        with _termination_raises():
            code = application()(args=words, prog_name="fsshard", standalone_mode=False)
        return code if isinstance(code, int) else AGREED
    except CorruptCheckpoint as error:
        _complain(error)
        return DIFFERENT
    except MissingExtra as error:
        if not {"-h", "--help"}.isdisjoint(words) or not words:
            commands = f"Commands: {', '.join(COMMANDS)}"
            print("Usage: fsshard [OPTIONS] COMMAND [ARGS]...", ABOUT, commands, error, sep="\n\n")
            return AGREED if words else BAD_INPUT
        return _complain(error)
    except (FsshardError, OSError) as error:  # an OSError: a file that cannot be written
        return _complain(error)
    except Exception as error:
        if not hasattr(error, "format_message"):
            # typer makes this of Ctrl-C.
            if type(error).__name__ == "Abort":
                return INTERRUPTED
            raise
        # typer's (or, before 0.25, click's) word for a bad option; their own output is a box of several lines.
        return _complain(error.format_message())


@contextmanager
def _termination_raises() -> Iterator[None]:
    """Make SIGTERM an exception, so that folders of temporary files go and ranks end as on any other way out."""
    before = signal.getsignal(signal.SIGTERM)
    # A handler that is None was not set by Python, which cannot restore it.
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return

    def end(number: int, frame: object) -> None:
        # A second one must not interrupt the clearing up.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(TERMINATED)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _complain(error: object) -> int:
    print(f"fsshard: {printable(str(error), keep=LAYOUT)}", file=sys.stderr)
    return BAD_INPUT


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
    for name, place in COMMANDS.items():
        module, _, function = place.partition(":")
        app.command(name)(getattr(import_module(f"fsshard.cli.{module}"), function))
    return app
