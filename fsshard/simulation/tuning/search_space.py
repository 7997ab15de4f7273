"""Lists what the search chooses from: values of wrap()'s arguments, each with the code that writes it."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch

from fsshard.planning.policies import Checkpointing, Precision
from fsshard.simulation.tuning.profile import ModelProfile, ModuleFacts

__all__ = ["DEFAULT", "SEARCHED", "Candidate", "Choice", "Settings", "classes", "recomputations", "units", "written"]

SEARCHED = ("auto_wrap_policy", "activation_checkpointing")
"""Arguments of which a plan is made."""

COARSEST, STEP = 8, 8
"""Sizes of units that are tried: the parameters' bytes over 8, over 64 and so on, and at last any module that owns
parameters."""

SHARE = 0.25
"""Classes are tried that hold at least this share of the parameters (or, to be recomputed, of the activations)."""

LEAST = 0.01
"""A module that keeps less than this share of the activations is not worth computing again."""

CLASSES = 3
"""At most so many of them."""


@dataclass(frozen=True)
class Choice:
    """A value of one argument.

    Attributes:
        value: as :func:`fsshard.wrap` takes it.
        code: the expression that gives it.
        imports: statements that the expression needs.
    """

    value: Any
    code: str
    imports: tuple[str, ...] = ()


Settings = Mapping[str, Choice]
"""Argument -> value, without the backend."""

DEFAULT = Choice(None, "None")
"""No choice: what wrap() does by itself."""


def written(name: str, value: object) -> Choice:
    """``value`` as a user gave it for the argument ``name``; what has no expression is referred to by that name."""
    found = _expression(value)
    return Choice(value, name if found is None else found, _imports(value) if found is not None else ())


def _expression(value: object) -> str | None:
    if isinstance(value, (bool, int, float, str, type(None), torch.dtype)):
        return f'"{value}"' if isinstance(value, str) and value.isprintable() and '"' not in value else repr(value)
    if isinstance(value, enum.Enum):
        return f'"{value.name}"' if type(value).__name__ == "ShardingStrategy" else None
    if isinstance(value, (Precision, Checkpointing)) and is_dataclass(value):
        parts = {f.name: _expression(getattr(value, f.name)) for f in fields(value)}
        if all(part is not None for part in parts.values()):
            return f"fsshard.{type(value).__name__}({', '.join(f'{key}={part}' for key, part in parts.items())})"
    if isinstance(value, (set, frozenset, list, tuple)) and all(isinstance(item, (str, type)) for item in value):
        names = sorted({item if isinstance(item, str) else item.__name__ for item in value})
        return f"{{{', '.join(map(_quoted, names))}}}" if names else None
    return None


def _imports(value: object) -> tuple[str, ...]:
    return ("import torch",) if "torch." in (_expression(value) or "") else ()


def _quoted(text: str) -> str:
    return f'"{text}"'


def classes(names: frozenset[str]) -> Choice:
    """The modules of these classes."""
    return Choice(set(names), f"{{{', '.join(map(_quoted, sorted(names)))}}}")


# ------------------------------------------------------------------------------------------------ units


def units(profile: ModelProfile) -> tuple[dict[str, Choice], list[Choice]]:
    """Return what ``auto_wrap_policy`` can be: those that are always tried, by name, and others, from coarse to fine.

    Where a size would pick modules that a step calls more than once, which would be gathered each time, the search
    takes the classes of the other ones instead. ``"transformer layers"`` are the units that torch's
    ``transformer_auto_wrap_policy`` gives for these classes.
    """
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

    always = {
        "auto": Choice("auto", '"auto"'),
        "one unit": Choice(None, "None"),
        "torch's size-based": Choice(
            size_based_auto_wrap_policy,
            "size_based_auto_wrap_policy",
            ("from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy",),
        ),
    }
    if profile.layers:
        always["transformer layers"] = classes(profile.layers)
    others = [classes(frozenset({name})) for name in _repeated(profile, lambda facts: facts.nbytes, profile.nbytes)]
    return always, others + [Choice(size, f"{size}") for size in _sizes(profile)]


def _sizes(profile: ModelProfile) -> Iterator[int]:
    size, smallest = profile.nbytes // COARSEST, min(facts.own for facts in profile.modules if facts.own)
    while size > smallest:
        yield size
        size //= STEP
    yield 1


def _repeated(profile: ModelProfile, weight: Any, total: int) -> list[str]:
    """Classes of several modules that are called once and together weigh much; the largest modules first."""
    by_class: dict[str, list[ModuleFacts]] = {}
    for facts in profile.modules[1:]:
        if facts.nbytes and not facts.container:
            by_class.setdefault(facts.kind, []).append(facts)
    found = {
        name: max(map(weight, group))
        for name, group in by_class.items()
        if len(group) > 1
        and all(profile.once(facts) for facts in group)
        and sum(map(weight, group)) >= max(1, SHARE * total)
    }
    return sorted(found, key=lambda name: (-found[name], name))[:CLASSES]


# ------------------------------------------------------------------------------------------------ recomputation


def recomputations(profile: ModelProfile) -> list[Choice]:
    """Return what ``activation_checkpointing`` can be but nothing: classes of blocks that keep many activations.

    First the classes that together keep most of it in pieces: from the root down, the first modules that keep at most
    :data:`SHARE` of it.
    """
    pieces = frozenset(_pieces(profile))
    repeated = [frozenset({name}) for name in _repeated(profile, lambda facts: facts.saved, profile.saved)]
    return [classes(names) for names in dict.fromkeys([pieces, *repeated]) if names]


def _pieces(profile: ModelProfile) -> Iterator[str]:
    taken: list[str] = []
    for facts in profile.modules[1:]:
        if any(facts.name.startswith(f"{name}.") for name in taken) or facts.container or not facts.saved:
            continue
        if profile.once(facts) and LEAST * profile.saved <= facts.saved <= SHARE * profile.saved:
            taken.append(facts.name)
            yield facts.kind


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A way to call wrap().

    Attributes:
        backend: its name.
        settings: its other arguments.
    """

    backend: str
    settings: Settings = field(default_factory=dict)

    def changed(self, **settings: Choice) -> Candidate:
        """With some arguments replaced; :data:`DEFAULT` is left out."""
        kept = {**self.settings, **settings}
        return Candidate(backend=self.backend, settings={k: c for k, c in kept.items() if c is not DEFAULT})

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of wrap(), without the backend."""
        return {name: choice.value for name, choice in self.settings.items()}

    def code(self, *, lines: bool = False) -> str:
        """The arguments as they are written."""
        given = [f'backend="{self.backend}"', *(f"{name}={choice.code}" for name, choice in self.settings.items())]
        return "".join(f"    {text},\n" for text in given) if lines else ", ".join(given)

    def imports(self) -> list[str]:
        """Return what the code needs, ``fsshard`` included."""
        needed = {line for choice in self.settings.values() for line in choice.imports}
        return sorted({*needed, "import fsshard"}, key=lambda line: (line.startswith("from"), line))
