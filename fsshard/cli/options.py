"""Options that several commands have, and how their values are read."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

from typer import Option

from fsshard.errors import ConfigurationError, FsshardError, RecipeError

DEFAULT_BACKENDS = "fairscale,fsdp,fsdp2,ddp"

Device = Annotated[str, Option(help="Device to train on: cpu or cuda.")]
Json = Annotated[str | None, Option("--json", metavar="FILE", help="Write JSON to FILE; - means stdout.")]
Picture = Annotated[str | None, Option("--plot", metavar="FILE", help="Plot the differences: .png, .svg or .pdf.")]
Progress = Annotated[bool | None, Option(help="Show a progress bar; by default only on a terminal.")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Print less, without a progress bar.")]


def backend_names(text: str) -> list[str]:
    """Return the names in a comma list; raise if there is none, or if one is no backend's."""
    from fsshard.backends import backend_class

    backends = names(text)
    if not backends:
        example = f"--backends {DEFAULT_BACKENDS}"
        raise ConfigurationError(f"--backends {text!r}: expected a comma-separated list, for example {example}")
    for name in backends:
        backend_class(name, 2)
    return backends


def world_sizes(texts: Sequence[str]) -> list[int]:
    """Return the numbers of ranks in comma lists, each once; raise ConfigurationError if one is none."""
    whole = ",".join(texts)
    parts = names(whole)
    sizes = [int(part) for part in parts if _is_number(part)]
    if not sizes or len(sizes) < len(parts) or 0 in sizes:
        raise ConfigurationError(
            f"--world-size {whole!r}: expected positive whole numbers, for example --world-size 1,2"
        )
    return list(dict.fromkeys(sizes))


def names(text: str) -> list[str]:
    """Return the parts of a comma list."""
    parts = [part.strip() for part in text.split(",")]
    return [part for part in parts if part]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def meshes(texts: Sequence[str]) -> list[dict[str, int]]:
    """Return sizes of meshes by name, each written as ``data=2,tp=2``; raise ConfigurationError for anything else."""
    example = "expected names and sizes, for example --mesh data=2,tp=2"
    parsed = []
    for text in texts:
        pairs = []
        for part in names(text):
            name, _, size = part.partition("=")
            if not name.strip() or not _is_number(size.strip()):
                raise ConfigurationError(f"--mesh {text!r}: {example}")
            pairs.append((name.strip(), int(size)))
        sizes = dict(pairs)
        if not pairs:
            raise ConfigurationError(f"--mesh {text!r}: {example}")
        if len(sizes) < len(pairs):
            raise ConfigurationError(f"--mesh {text!r}: a dimension is named twice")
        parsed.append(sizes)
    return parsed


def check_files(json_file: str | None, picture: str | Path | None = None) -> None:
    """Raise unless the files that ``--json`` (``-`` is stdout) and ``--plot`` name can be written."""
    from fsshard.pictures import check_file, check_picture

    # They are checked before the work is done, not after.
    if picture is not None:
        check_picture(picture)
    if json_file not in (None, "-"):
        check_file(str(json_file))


def check_folders(*folders: Path | None) -> None:
    """Raise unless those that are given are there."""
    for folder in folders:
        if folder is not None and not folder.is_dir():
            raise ConfigurationError(f"there is no folder {str(folder)!r}; name one that exists")


def naming_recipe(name: str, error: BaseException) -> str:
    """Return an error's text, with the recipe's name before it unless it is there already."""
    kind = "interrupted" if isinstance(error, KeyboardInterrupt) else type(error).__name__
    text = str(error) or kind
    return text if text.startswith((name, repr(name))) else f"{name}: {text}"


def check_recipe(name: str) -> None:
    """Import a recipe; raise RecipeError if ``name`` means none, with the traceback if its own code raised."""
    from fsshard.recipes.recipe import resolve

    try:
        # What it prints must not get into the JSON.
        with redirect_stdout(sys.stderr):
            resolve(name)
    except FsshardError as error:
        raise RecipeError(naming_recipe(name, error)) from error
    except ImportError as error:
        raise RecipeError(f"{name!r} cannot be imported: {error}") from error
    except Exception as error:
        lines = traceback.format_exc()
        raise RecipeError(f"{name!r} cannot be created: {type(error).__name__}: {error}\n\n{lines}") from error
