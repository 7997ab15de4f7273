"""``fsshard parity RECIPE --record FILE``."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

from fsshard.cli.exit_codes import AGREED
from fsshard.cli.options import check_recipe, naming_recipe
from fsshard.cli.output import held_output, progress_bar
from fsshard.cli.parity_request import ParityRequest, check_backends_and_json, exit_code
from fsshard.errors import ConfigurationError, FsshardError

if TYPE_CHECKING:
    from fsshard.parity import Trace

__all__ = ["run"]

DEFAULT_BACKEND, DEFAULT_WORLD_SIZE = "ddp", 2


def run(request: ParityRequest) -> int:
    """Record one training and return the exit code."""
    _check(request)
    file = str(request.record)
    try:
        trace = _recorded(request)
        trace.save(file)
    except (FsshardError, KeyboardInterrupt) as error:
        print(f"fsshard: {naming_recipe(request.recipes[0], error)}", file=sys.stderr)
        return exit_code(error)
    for line in _said(trace, request):
        print(line)
    return AGREED


def _check(request: ParityRequest) -> None:
    """Raise for options that mean nothing here, before the training is run."""
    from fsshard.parity.render import check_file

    if len(request.recipes) != 1:
        raise ConfigurationError("--record keeps one training: give one RECIPE, for example tfno")
    for option, many in (("--backends", request.backends), ("--world-size", request.world_sizes)):
        if option in request.given and many is not None and len(many) > 1:
            raise ConfigurationError(f"--record keeps one training: give {option} one value, not {len(many)}")
    for option in ("--against", "--reference", "--mesh", "--json", "--plot"):
        request.refuse(option, "means nothing to --record, which compares nothing")
    check_backends_and_json(request)
    check_file(str(request.record))


def _recorded(request: ParityRequest) -> Trace:
    from fsshard.parity import record

    recipe, options = request.recipes[0], {k: v for k, v in request.options.items() if k != "reference"}
    with ExitStack() as stack:
        stderr = stack.enter_context(held_output(show=not request.quiet))
        check_recipe(recipe)
        bar = stack.enter_context(progress_bar(request.progress, stderr))
        return record(
            recipe,
            backend=(request.backends or [DEFAULT_BACKEND])[0],
            world_size=request.world_sizes[0] if "--world-size" in request.given else DEFAULT_WORLD_SIZE,
            detail="tensors" if request.tensors else "digests",
            progress=bar(recipe),
            **options,
        )


def _said(trace: Trace, request: ParityRequest) -> list[str]:
    """Return what was kept, and what to do with it."""
    ranks = f"{trace.world_size} rank{'s' * (trace.world_size > 1)}"
    kept = [f"{trace.steps} steps of {request.recipes[0]} under {trace.backend} on {ranks}: {trace.file}"]
    if trace.tensors is not None:
        kept.append(f"tensors: {trace.tensors}")
    if request.quiet:
        return kept
    environment = [f"  {name} {value}" for name, value in trace.environment.items()]
    return [*kept, *environment, f"compare with it: fsshard parity {request.recipes[0]} --against {trace.file}"]
