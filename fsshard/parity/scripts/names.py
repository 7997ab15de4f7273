"""Finds the parameters of one script among those of another one, which may call them otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fsshard.parity.scripts.facts import COPY
from fsshard.parity.scripts.store import ScriptTrace, in_model
from fsshard.parity.sketch import Sketch

Sides = Mapping[str, tuple[Sketch, Sketch]]
"""Name -> a parameter before the first step, and after the last."""
Rename = Callable[[str], str]


def align_names(old: ScriptTrace, new: ScriptTrace, last: int) -> dict[str, str]:
    """Give what ``new`` has recorded the names of the old script; return the new one's names of what moved.

    Args:
        old: the record that stays as it is.
        new: the one whose names are changed in place.
        last: the last step at which both have weights.
    """
    names = [*new.initial]
    _rename(new, _models_in_order(old, new))
    matched = matched_names(_first_and_last(old, last), _first_and_last(new, last))
    _rename(new, _moving({other: name for name, other in matched.items()}))
    pairs = zip(new.initial, names, strict=True)
    return {name: other for name, other in pairs if name != other}


def _first_and_last(one: ScriptTrace, last: int) -> Sides:
    weights = one.at(last)[0].weights
    return {name: (initial, weights.get(name, initial)) for name, initial in one.initial.items()}


def matched_names(old: Sides, new: Sides) -> dict[str, str]:
    """Return the names of the old script's parameters in the new one.

    By name, but in modules of which a parameter begins with other bits than that of the same name; the others by equal
    bits before the first step and after the last, then before the first, in the models' order where several are equal
    (biases of zeros); then by name; and what is left by shape, if no two have the same.
    """
    shared = [name for name in old if name in new]
    other_bits = [name for name in shared if old[name][0].digest != new[name][0].digest]
    other_modules = {*map(_module, other_bits)}
    found = {name: name for name in shared if _module(name) not in other_modules}
    _match_alike(old, new, found, 2)
    _match_alike(old, new, found, 1)
    matched = {*found, *found.values()}
    for name in shared:
        if name not in matched:
            found[name] = name
    _match_alike(old, new, found, 0)
    return {name: found[name] for name in old if name in found}


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _match_alike(old: Sides, new: Sides, found: dict[str, str], depth: int) -> None:
    """Match parameters that are not found yet, by their shapes and the first ``depth`` digests."""
    of_new = _alike(new, {*found.values()}, depth)
    for kind, names in _alike(old, {*found}, depth).items():
        others = of_new.get(kind, [])
        if {*names} == {*others}:
            others = names
        if len(names) != len(others):
            continue
        if depth > 0 or len(names) == 1:
            found.update(zip(names, others, strict=True))


def _alike(sides: Sides, without: set[str], depth: int) -> dict[Any, list[str]]:
    """Return the names by what is alike."""
    kinds: dict[Any, list[str]] = {}
    for name, sketches in sides.items():
        if name in without:
            continue
        digests_so_far = [sketch.digest for sketch in sketches[:depth]]
        kind = (sketches[0].shape, *digests_so_far)
        kinds.setdefault(kind, []).append(name)
    return kinds


def _moving(old_name: Mapping[str, str]) -> Rename:
    """Return how names of parameters, buffers and modules move, if the new script's parameters do so."""
    modules: dict[str, str] = {}
    for name, other in old_name.items():
        _note_modules(name, other, modules)

    def moved(name: str) -> str:
        if name.startswith(COPY):
            return name
        if name in old_name:
            return old_name[name]
        # The nearest module above whose name is known, and what is below it as it is called.
        above = name
        below = ""
        while above and above not in modules:
            above, _, last = above.rpartition(".")
            below = f".{last}{below}"
        return (modules.get(above, above) + below).removeprefix(".")

    return moved


def _note_modules(name: str, other: str, modules: dict[str, str]) -> None:
    """Note the old names of the modules that a parameter is in, up to the first that is called otherwise."""
    name = _module(name)
    other = _module(other)
    modules.setdefault(name, other)
    while name and name.rpartition(".")[2] == other.rpartition(".")[2]:
        name = _module(name)
        other = _module(other)
        modules.setdefault(name, other)


def _models_in_order(old: ScriptTrace, new: ScriptTrace) -> Rename:
    """Return how the new script's parameters are named if it calls those models first that the old one does."""
    place_of = _places(old, new)
    order = [place for _, place in sorted(place_of.items())]

    def renamed(name: str) -> str:
        for place in range(1, len(order)):
            prefix = in_model(place, "")
            if name.startswith(prefix):
                return in_model(order[place], name.removeprefix(prefix))
        return in_model(order[0], name)

    return renamed


def _places(old: ScriptTrace, new: ScriptTrace) -> dict[int, int]:
    """Return the places of the new script's models among the old one's: first those that have most in common."""
    pairs = []
    for place, model in enumerate(new.ranks[0].models):
        for other_place, other in enumerate(old.ranks[0].models):
            pairs.append((_common(model.weights, other.weights), place, other_place))
    pairs.sort(key=lambda pair: pair[0], reverse=True)  # of those with as much in common the first ones stay first
    place_of: dict[int, int] = {}
    for _, place, other_place in pairs:
        if place not in place_of and other_place not in place_of.values():
            place_of[place] = other_place
    # Models that the old script has not got come after its own.
    unused = len(old.ranks[0].models)
    for place in range(len(new.ranks[0].models)):
        if place not in place_of:
            place_of[place] = unused
            unused += 1
    return place_of


def _common(one: Mapping[str, Sketch], other: Mapping[str, Sketch]) -> tuple[int, int]:
    """Return how many parameters of the same name have equal bits, and how many the same shape."""
    bits = 0
    shapes = 0
    for name in one.keys() & other.keys():
        bits += one[name].digest == other[name].digest
        shapes += one[name].shape == other[name].shape
    return bits, shapes


def _rename(trace: ScriptTrace, renamed: Rename) -> None:
    for rank in trace.ranks:
        rank.initial = _renamed(rank.initial, renamed)
        for record in rank.steps.values():
            record.gradients = _renamed(record.gradients, renamed)
            for quantity, sketches in record.sketches.items():
                record.sketches[quantity] = _renamed(sketches, renamed)
            record.facts = {kind: _renamed(facts, renamed) for kind, facts in record.facts.items()}


def _renamed(values: Mapping[str, Any], renamed: Rename) -> dict[str, Any]:
    found = {}
    for full_name, value in values.items():
        name, colon, key = full_name.partition(": ")  # of a state "parameter: key"
        found[renamed(name) + colon + key] = value
    return found
