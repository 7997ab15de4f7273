"""How a backend describes itself, for rooms that must not know which backend it is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from fsshard.planning.plan import Plan

__all__ = ["OWN_FILES", "Joining", "Summary", "Tunable"]

OWN_FILES = frozenset({"load_checkpoint", "push_to_hub", "save_checkpoint", "save_pretrained"})
"""Methods by which models of neuraloperator and transformers read and write themselves, on one rank as a rule: on
shards they write half of the numbers under FSDP1, without an error, and wait forever under FSDP2."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Its row in the README's table.

    Attributes:
        engine: whose engine it is, in Markdown.
        keeps: what each rank keeps.
        note: what a user should know before choosing it.
    """

    engine: str
    keeps: str
    note: str


@dataclass(frozen=True, kw_only=True)
class Joining:
    """The option by which small units travel together.

    Attributes:
        option: its name; of the value 0 nothing is joined.
        value: what is worth trying.
        travelling: (plan, value, ranks) -> names of the units that travel by themselves then.
    """

    option: str
    value: int
    travelling: Callable[[Plan, int, int], Collection[str]]


@dataclass(frozen=True, kw_only=True)
class Tunable:
    """What ``tune`` may try under the backend, besides units and recomputation.

    Attributes:
        variants: name -> options that are tried beside the defaults, always. Of backends that divide no parameters.
        kept_gathered: options with which units stay gathered from the forward to the backward; none: it has no such.
        root_stays: whether the root unit does so by itself, so that they say nothing where it is the only unit.
        joining: how small units travel together; None: it has no such option.
    """

    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    kept_gathered: Mapping[str, Any] = field(default_factory=dict)
    root_stays: bool = False
    joining: Joining | None = None
