"""``fsshard import``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["command"]


def command(
    source: Annotated[
        Path, typer.Argument(help="Safetensors, a Hugging Face or DCP directory, a .pt, a neuraloperator folder.")
    ],
    destination: Annotated[Path, typer.Argument(help="The checkpoint to write.")],
    trust_pickle: Annotated[
        bool, typer.Option("--trust-pickle", help="Run whatever code is in SOURCE: only if you know who wrote it.")
    ] = False,
    optimizer: Annotated[bool, typer.Option(help="Take optimizer states along.")] = True,
) -> None:
    """Convert another program's checkpoint for fsshard.load."""
    from fsshard.checkpoint.interop.importing import import_checkpoint

    print(import_checkpoint(source, destination, trust_pickle=trust_pickle, optimizer=optimizer))
