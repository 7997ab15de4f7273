"""``fsshard export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["command"]


def command(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint.")],
    file: Annotated[Path, typer.Argument(help="The file, or the directory for hf and dcp, to write.")],
    format: Annotated[
        str | None, typer.Option(help="safetensors, torch, dcp or hf; by default as FILE's suffix says.")
    ] = None,
    optimizer: Annotated[
        bool, typer.Option("--optimizer", help="The optimizer's state as well (torch and dcp).")
    ] = False,
    max_shard_bytes: Annotated[
        int, typer.Option(min=1, help="Above it a model is divided into several safetensors files.")
    ] = 5_000_000_000,
    config: Annotated[Path | None, typer.Option(help="The config.json of an hf directory.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
) -> None:
    """Write the weights of CHECKPOINT to FILE, whole and under their own names, for other programs to read."""
    from fsshard.checkpoint.interop.exporting import export as write

    for path in write(
        checkpoint,
        file,
        format,
        optimizer=optimizer,
        max_shard_bytes=max_shard_bytes,
        config=config,
        overwrite=overwrite,
    ):
        print(path)
