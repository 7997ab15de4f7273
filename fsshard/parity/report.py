"""The result of a comparison: numbers and verdicts, as plain data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from fsshard.errors import ParityError
from fsshard.parity import render
from fsshard.parity.findings import Findings
from fsshard.parity.plain import plain, read_as

__all__ = ["ParityReport"]


@dataclass(kw_only=True)
class ParityReport(Findings):
    """The result of :func:`fsshard.parity.compare`, and ways to show it.

    Its attributes are those of :class:`~fsshard.parity.findings.Findings`.
    """

    def raise_if_different(self) -> None:
        """Raise :class:`~fsshard.errors.ParityError`, with this report as its text, unless :attr:`ok`."""
        if not self.ok:
            raise ParityError(str(self))

    def __str__(self) -> str:
        return render.text(self)

    def table(self) -> render.Table:
        """A rich table for the terminal.

        Raises:
            MissingExtra: rich is not installed.
        """
        return render.table(self)

    def plot(self, path: str | Path) -> None:
        """Write a picture: loss curves, and below how far loss and weights are from the reference's at each step.

        Args:
            path: its suffix tells the kind: ``.png``, ``.svg`` or ``.pdf``.

        Raises:
            ConfigurationError: another suffix, or no such folder.
            MissingExtra: matplotlib is not installed.
        """
        render.plot(self, path)

    def to_json(self) -> str:
        """The whole report; :meth:`from_json` reads it back.

        JSON has no infinity and no NaN; they are written as the strings ``"inf"``, ``"-inf"`` and ``"nan"``.
        """
        return json.dumps(plain(self, str), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> ParityReport:
        """The report that :meth:`to_json` wrote.

        Raises:
            ConfigurationError: something else is in the text; says which field.
        """
        report: ParityReport = read_as(cls, json.loads(text))
        return report
