"""The result of a comparison: numbers and verdicts, as plain data."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsshard.errors import ParityError
from fsshard.parity import render
from fsshard.parity.findings import Cell, Difference, Divergence, Findings, StepReport

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
        return json.dumps(_writable(asdict(self)), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> ParityReport:
        """The report that :meth:`to_json` wrote."""
        data: dict[str, Any] = json.loads(text)
        return cls(**{**data, "cells": [_cell(cell) for cell in data["cells"]]})


def _cell(data: dict[str, Any]) -> Cell:
    first = data["first_divergence"]
    if first is not None:
        first = Divergence(**{**first, "difference": _difference(first["difference"])})
    return Cell(**{**data, "first_divergence": first, "steps": [_step(step) for step in data["steps"]]})


def _step(data: dict[str, Any]) -> StepReport:
    found = {q: {n: _difference(d) for n, d in named.items()} for q, named in data["differences"].items()}
    numbers = {name: float(data[name]) for name in ("loss", "reference_loss", "norm", "reference_norm")}
    return StepReport(**{**data, **numbers, "differences": found})


def _difference(data: dict[str, Any]) -> Difference:
    numbers = {name: float(data[name]) for name in ("max_abs", "ulps", "apart", "bound")}
    return Difference(**{**data, **numbers, "index": tuple(data["index"])})


def _writable(value: Any) -> Any:
    """``value`` with the numbers that JSON does not know as strings."""
    if isinstance(value, dict):
        return {key: _writable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_writable(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
