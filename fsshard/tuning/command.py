"""What ``fsshard tune`` does with its arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

__all__ = ["run"]


def run(
    recipe: str,
    backends: Sequence[str],
    arguments: Mapping[str, Any],
    *,
    json_file: str | None,
    picture: str | None,
    progress: Callable[[int, str], None] | None,
) -> None:
    """Search, print, write and draw.

    Args:
        recipe: its name.
        backends: what to search under.
        arguments: others of :func:`fsshard.tune`.
        json_file: where to write all as JSON; ``-`` is stdout, and what is printed goes to stderr then.
        picture: what to draw the plans in.
        progress: called with how many plans have been simulated and what the next one is.
    """
    from fsshard.parity.render import check_file, check_picture
    from fsshard.tuning.tuning import tune

    if picture is not None:
        check_picture(picture)
    if json_file not in (None, "-"):
        check_file(str(json_file))
    with redirect_stdout(sys.stderr):  # what the recipe prints
        found = tune(recipe, backend=list(backends), progress=progress, **arguments)
    print(found, file=sys.stderr if json_file == "-" else sys.stdout)
    if json_file is not None:
        text = found.to_json()
        print(text) if json_file == "-" else Path(json_file).write_text(f"{text}\n", encoding="utf-8")
    if picture is not None:
        found.plot(picture)
