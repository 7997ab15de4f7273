"""Estimates as text: one in full, several as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsshard.backends.registry import REFERENCE
from fsshard.planning.text import aligned, ratio, size

__all__ = ["overview", "text"]

Estimate = Any
"""Of fsshard.simulation.result, which shows itself by what is here."""


def text(estimate: Estimate) -> str:
    """One estimate in full."""
    e = estimate
    ranks = f"{e.world_size} rank{'s' if e.world_size > 1 else ''}"
    mesh = f", mesh {' x '.join(map(str, e.mesh))}" if e.mesh != (e.world_size,) else ""
    peak = size(e.peak) if e.interval == (e.peak, e.peak) else f"{size(e.interval[0])} to {size(e.interval[1])}"
    lines = [
        f"{e.name}, backend {e.backend!r} on {ranks}{mesh}, for {e.device}: rank {e.rank} needs {peak}",
        f"at {e.moment}; {e.optimizer}, parameters {size(e.parameters)} in {e.units} unit{'s' if e.units > 1 else ''}",
        "",
        *aligned([["memory", "at the peak", "highest", "bound", "ratio"], *_memory(e)]),
    ]
    if e.collectives:
        lines += ["", *aligned([["per step", "number", "payload", "bound", "ratio"], *_traffic(e)])]
    return "\n".join([*lines, *(f"note: {note}" for note in e.notes)])


def _memory(e: Estimate) -> list[list[str]]:
    rows = []
    for kind, nbytes in e.by_kind.items():
        bound = e.bounds.by_kind.get(kind)
        most = e.highest[kind]
        if most or bound:
            shown = ["-", "-"] if bound is None else [size(bound), ratio(most, bound)]
            rows.append([kind, size(nbytes), size(most), *shown])
    return [*rows, ["peak", size(e.peak), size(e.peak), size(e.bounds.peak), ratio(e.peak, e.bounds.peak)]]


def _traffic(e: Estimate) -> list[list[str]]:
    rows = []
    for traffic in e.collectives:
        bound = e.bounds.payloads.get(traffic.kind)
        shown = ["-", "-"] if bound is None else [size(bound), ratio(traffic.nbytes, bound)]
        rows.append([traffic.kind, str(traffic.count), size(traffic.nbytes), *shown])
    count = sum(traffic.count for traffic in e.collectives)
    return [*rows, ["sent by a rank", str(count), size(e.sent), size(e.bounds.sent), ratio(e.sent, e.bounds.sent)]]


def overview(estimates: Sequence[Estimate]) -> str:
    """Several estimates, a line for each; ratios to DDP where it is among them at that world size."""
    references = {e.world_size: e.peak for e in estimates if e.backend == REFERENCE}
    head = [
        "backend",
        "ranks",
        "peak",
        f"of {REFERENCE}",
        "bound",
        "ratio",
        "collectives",
        "sent",
        "bound",
        "ratio",
        "peak at",
    ]
    rows = [
        [
            e.backend,
            str(e.world_size),
            size(e.peak) + ("" if e.interval == (e.peak, e.peak) else f" to {size(e.interval[1])}"),
            ratio(e.peak, references.get(e.world_size, 0)),
            size(e.bounds.peak),
            ratio(e.peak, e.bounds.peak),
            str(sum(traffic.count for traffic in e.collectives)),
            size(e.sent),
            size(e.bounds.sent),
            ratio(e.sent, e.bounds.sent),
            str(e.moment),
        ]
        for e in estimates
    ]
    return "\n".join(aligned([head, *rows]))
