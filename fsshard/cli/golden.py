"""``fsshard parity --golden``."""

from __future__ import annotations

import importlib
import json
import sys
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING

from fsshard.cli.exit_codes import AGREED, DIFFERENT
from fsshard.cli.output import held_output, progress_bar, write_json
from fsshard.cli.parity_request import ParityRequest, check_backends_and_json, exit_code
from fsshard.errors import ConfigurationError, FsshardError

if TYPE_CHECKING:
    from fsshard.parity.golden import GoldenResult

__all__ = ["run"]

GOLDEN_BACKENDS = ("ddp", "fsdp2")
OF_RECIPES = ("--world-size", "--mesh", "--steps", "--reference", "--device", "--record", "--tensors", "--against")


def run(request: ParityRequest) -> int:
    """Check the golden runs, print what they gave and return the exit code."""
    if request.recipes:
        raise ConfigurationError(f"--golden has recipes of its own; leave out {', '.join(request.recipes)}")
    misplaced = [option for option in OF_RECIPES if option in request.given]
    if misplaced:
        raise ConfigurationError(
            f"golden runs have steps, ranks and a device of their own; leave out {', '.join(misplaced)}"
        )
    if request.picture is not None:
        raise ConfigurationError("--golden draws nothing; leave out --plot")
    check_backends_and_json(request)
    results = _golden_results(request)
    entries = []
    for backend, found in results.items():
        if isinstance(found, BaseException):
            said = str(found).strip().partition("\n")[0] or "interrupted"
            print(f"fsshard: golden runs under {backend}: {said}", file=sys.stderr)
            entries.append({"backend": backend, "ok": False, "error": said})
            continue
        for result in found:
            if not (request.quiet and result.ok):
                said = f": {result.text}" if result.text else ""
                print(f"{result.name} under {backend}: {result.verdict}{said}", file=request.out)
            entries.append({"backend": backend, **asdict(result), "ok": result.ok})
    if request.json_file is not None:
        write_json(request.json_file, json.dumps(entries))
    return max((_golden_code(found) for found in results.values()), default=DIFFERENT)


def _golden_results(request: ParityRequest) -> dict[str, list[GoldenResult] | BaseException]:
    """Backend -> what its golden runs gave, or what stopped them."""
    check = importlib.import_module("fsshard.parity.golden").check
    results: dict[str, list[GoldenResult] | BaseException] = {}
    with ExitStack() as stack:
        stderr = stack.enter_context(held_output(show=not request.quiet))
        bar = stack.enter_context(progress_bar(request.progress, stderr))
        for backend in dict.fromkeys(request.backends or GOLDEN_BACKENDS):
            shown = bar(f"golden, {backend}")
            try:
                results[backend] = check(backend=backend, timeout=request.options["timeout"], progress=shown)
            except (FsshardError, KeyboardInterrupt) as error:
                results[backend] = error
                if isinstance(error, KeyboardInterrupt):
                    break
    return results


def _golden_code(found: list[GoldenResult] | BaseException) -> int:
    if isinstance(found, BaseException):
        return exit_code(found)
    return AGREED if found and all(result.ok for result in found) else DIFFERENT
