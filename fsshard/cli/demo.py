"""``fsshard demo``: its options are read by :mod:`fsshard.demo.tfno_darcy`, which runs under torchrun too."""

from __future__ import annotations

import importlib.util

import typer

from fsshard.errors import MissingExtra

__all__ = ["SETTINGS", "command"]

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""All of the command line goes on."""

NEEDED = {"scipy": "scipy", "neuralop": "neuraloperator"}
"""Module -> its package."""


def command(context: typer.Context) -> None:
    """Train a TFNO on Darcy flow, which is solved here, under one engine or several; ``fsshard demo --help``."""
    for module, package in NEEDED.items():
        if importlib.util.find_spec(module) is None:
            raise MissingExtra(package, "examples", "the demo")
    from fsshard.demo.tfno_darcy import main

    main(context.args)
