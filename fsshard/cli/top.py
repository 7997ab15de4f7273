"""``fsshard`` without a subcommand, and the options before one."""

from __future__ import annotations

from typing import Annotated

import typer

import fsshard
from fsshard.cli.exit_codes import AGREED, BAD_INPUT

__all__ = ["command"]


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"fsshard {fsshard.__version__}")
        raise typer.Exit(AGREED)


def command(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(BAD_INPUT)
