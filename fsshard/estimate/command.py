"""What ``fsshard estimate`` does with its arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from fsshard.backends import backend_class

__all__ = ["SWEEP", "run"]

SWEEP = tuple(4**power for power in range(7))
"""World sizes of the picture."""


def run(
    recipe: str,
    backends: Sequence[str],
    world_sizes: Sequence[int],
    arguments: Mapping[str, Any],
    *,
    json_file: str | None,
    picture: str | None,
    quiet: bool,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Estimate, print, write and draw.

    Args:
        recipe: its name.
        backends: what to estimate under.
        world_sizes: for how many ranks.
        arguments: others of :func:`fsshard.estimate`.
        json_file: where to write all as JSON; ``-`` is stdout, and what is printed goes to stderr then.
        picture: what to draw the estimates in, those of :data:`SWEEP` with them.
        quiet: print the table only.
        progress: called with how many simulations are done, and how many there are.
    """
    from fsshard.estimate.estimating import estimate
    from fsshard.estimate.pictures import plot
    from fsshard.estimate.render import overview
    from fsshard.parity.render import check_file, check_picture

    for name in backends:
        backend_class(name, 2)
    if picture is not None:
        check_picture(picture)
    if json_file not in (None, "-"):
        check_file(str(json_file))
    sizes = list(dict.fromkeys([*world_sizes, *(SWEEP if picture is not None else ())]))
    with redirect_stdout(sys.stderr):  # what the recipe prints
        found = estimate(recipe, backend=list(backends), world_size=sizes, progress=progress, **arguments)
    asked = [one for one in found if one.world_size in world_sizes]
    out = sys.stderr if json_file == "-" else sys.stdout
    if not quiet:
        print("\n\n".join(map(str, asked)), end="\n\n", file=out)
    print(overview(asked), file=out)
    if json_file is not None:
        text = f"[{','.join(one.to_json() for one in asked)}]"
        print(text) if json_file == "-" else Path(json_file).write_text(f"{text}\n", encoding="utf-8")
    if picture is not None:
        plot(found, picture, world_sizes[0])
