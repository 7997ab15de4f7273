"""Options that several commands have, and how their values are read."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Annotated

import typer

from fsshard.errors import ConfigurationError, FsshardError, RecipeError

__all__ = [
    "DEFAULT_BACKENDS",
    "Progress",
    "backend_names",
    "check_json_file",
    "check_recipe",
    "meshes",
    "naming_recipe",
    "world_sizes",
]

DEFAULT_BACKENDS = "fairscale,fsdp,fsdp2,ddp"

Progress = Annotated[bool | None, typer.Option(help="A progress bar on stderr; by default if that is a terminal.")]


def backend_names(option: str, text: str | None) -> list[str] | None:
    """The names in a comma list; None where the option is not given.

    Raises:
        ConfigurationError: there is no name in it.
    """
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigurationError(f"{option} {text!r}: expected a comma list, for example {option} {DEFAULT_BACKENDS}")
    return names


def world_sizes(texts: Sequence[str]) -> list[int]:
    """The numbers of ranks in comma lists, each once.

    Raises:
        ConfigurationError: one is no positive whole number.
    """
    parts = [part.strip() for text in texts for part in text.split(",") if part.strip()]
    if not parts or not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigurationError(
            f"--world-size {','.join(texts)!r}: expected positive whole numbers, for example --world-size 1,2"
        )
    return list(dict.fromkeys(map(int, parts)))


def meshes(texts: Sequence[str]) -> list[dict[str, int]]:
    """Sizes of meshes by name, each written as ``data=2,tp=2``.

    Raises:
        ConfigurationError: one is written otherwise, or names a dimension twice.
    """
    found = []
    for text in texts:
        parts = [part.strip().partition("=") for part in text.split(",") if part.strip()]
        names = [name.strip() for name, _, _ in parts]
        sizes = [size.strip() for _, _, size in parts]
        if not parts or not all(names) or not all(size.isascii() and size.isdigit() for size in sizes):
            raise ConfigurationError(f"--mesh {text!r}: expected names and sizes, for example --mesh data=2,tp=2")
        if len(set(names)) < len(names):
            raise ConfigurationError(f"--mesh {text!r}: a dimension is named twice")
        found.append(dict(zip(names, map(int, sizes), strict=True)))
    return found


def check_json_file(file: str | None) -> None:
    """Raise unless the file that ``--json`` names can be written; ``-`` is stdout."""
    from fsshard.parity.render import check_file

    if file not in (None, "-"):
        check_file(str(file))


def naming_recipe(name: str, error: BaseException) -> str:
    """An error's text, with the recipe's name before it unless it is there already."""
    text = str(error) or ("interrupted" if isinstance(error, KeyboardInterrupt) else type(error).__name__)
    return text if text.startswith((name, repr(name))) else f"{name}: {text}"


def check_recipe(name: str) -> None:
    """Import a recipe, with what its own code raises put into words.

    Raises:
        RecipeError: ``name`` means none. With the traceback, where the fault is inside of the recipe's module.
    """
    from fsshard.parity.recipe import resolve

    try:
        with redirect_stdout(sys.stderr):  # what it prints must not get into the JSON
            resolve(name)
    except FsshardError as error:
        raise RecipeError(naming_recipe(name, error)) from error
    except ImportError as error:
        raise RecipeError(f"{name!r} cannot be imported: {error}") from error
    except Exception as error:
        lines = traceback.format_exc()
        raise RecipeError(f"{name!r} cannot be made: {type(error).__name__}: {error}\n\n{lines}") from error
