"""What ``fsshard parity`` was asked for, with recipes, to record or with ``--golden``, and its exit codes."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from fsshard.cli.exit_codes import AGREED, BAD_INPUT, DIFFERENT, INTERRUPTED
from fsshard.cli.options import check_json_file
from fsshard.errors import ConfigurationError, MissingExtra

if TYPE_CHECKING:
    from fsshard.parity import ParityReport

__all__ = ["ParityRequest", "check_backends_and_json", "exit_code"]


@dataclass(kw_only=True)
class ParityRequest:
    """The request that ``fsshard parity`` was given.

    Attributes:
        progress: whether to show a bar; None means if stderr is a terminal.
        options: of ``compare``, passed on as they are.
        given: options that are in the command line, as they are written there.
        record: file to keep one training in, with its ``tensors`` or without.
        against: file with the training to compare with.
        meshes: sizes of each mesh by name.
    """

    recipes: list[str]
    backends: list[str] | None
    world_sizes: list[int]
    options: dict[str, Any] = field(default_factory=dict)
    json_file: str | None
    picture: str | None
    progress: bool | None
    quiet: bool
    given: frozenset[str] = frozenset()
    record: str | None = None
    tensors: bool = False
    against: str | None = None
    meshes: list[dict[str, int]] = field(default_factory=list)

    def refuse(self, option: str, why: str) -> None:
        """Raise if an option is given that means nothing here."""
        if option in self.given:
            raise ConfigurationError(f"{option} {why}")

    @property
    def out(self) -> TextIO:
        """Return where the tables go: not to stdout if the JSON goes there."""
        return sys.stderr if self.json_file == "-" else sys.stdout


def check_backends_and_json(request: ParityRequest) -> None:
    """Raise unless every backend is known and the JSON file can be written."""
    from fsshard.backends import backend_class

    for name in request.backends or ():
        backend_class(name, 2)
    check_json_file(request.json_file)


def exit_code(result: ParityReport | BaseException) -> int:
    """Return the exit status of a report, or of what stopped the comparison."""
    if isinstance(result, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(result, BaseException):
        return BAD_INPUT if isinstance(result, (ConfigurationError, MissingExtra)) else DIFFERENT
    return AGREED if result.ok else DIFFERENT
