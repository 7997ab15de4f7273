"""A search as text."""

from __future__ import annotations

from typing import Any, TypeAlias

from fsshard.planning.text import aligned, size

__all__ = ["text"]

Tried: TypeAlias = Any
TuneResult: TypeAlias = Any
"""Of fsshard.simulation.tuning.result, which shows itself by what is here."""

HEAD = ["peak", "sent", "of P", "collectives", "recomputed", "peak at", "plan"]


def text(result: TuneResult) -> str:
    """The frontier, the plans that are always tried, and the winner as code."""
    known = list(result.aliases.items())
    goal = "the least peak" if result.memory is None else f"the least traffic within {size(result.memory)}"
    ranks = f"{result.world_size} rank{'s' if result.world_size > 1 else ''}"
    rows = [_row(result, one, "") for one in result.frontier]
    others = [_row(result, one, f"{name}: ") for name, one in known]
    lines = aligned([["", *HEAD], *rows, *others])
    return "\n".join(
        [
            f"{result.name} on {ranks}: {goal}; {len(result.tried)} plans simulated; P is "
            f"{size(result.winner.estimate.parameters)}, that of all parameters",
            "",
            "the frontier: nothing else needs less without sending more, in more collectives, or computing more twice",
            *lines[: 1 + len(rows)],
            "",
            "always tried:",
            *lines[1 + len(rows) :],
            *(f"could not be: {code}: {why}" for code, why in result.failed.items()),
            "",
            "the winner (*):",
            "",
            result.code().rstrip(),
        ]
    )


def _row(result: TuneResult, one: Tried, name: str) -> list[str]:
    return [
        "*" if one is result.winner else "",
        size(one.peak),
        size(one.estimate.sent),
        f"{one.estimate.sent / one.estimate.parameters:.2f}",
        str(one.collectives),
        f"{one.recomputed} block{'' if one.recomputed == 1 else 's'}" if one.recomputed else "-",
        str(one.estimate.moment),
        f"{name}{one.candidate.code()}",
    ]
