"""Finds the parameters of one script among those of another one, which may call them otherwise."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from fsshard.parity.scripts.facts import COPY
from fsshard.parity.scripts.store import ScriptTrace, Sketches, in_model
from fsshard.parity.sketch import Sketch

# Name -> a parameter before the first step, and after the last.
Sides = Mapping[str, tuple[Sketch, Sketch]]
Kinds = dict[Any, list[str]]
Rename = Callable[[str], str]
Names = dict[str, str]
Named = dict[str, Any]


def align_names(old: ScriptTrace, new: ScriptTrace, last: int) -> Names:
    """Give what ``new`` has recorded the names of the old script; return the new one's names of what moved.

    Args:
        old: the record that stays as it is.
        new: the one whose names are changed in place.
        last: the last step at which both have weights.
    """
    names = [*new.initial]
    renamed_models = _models_in_order(old, new)
    _rename(new, renamed_models)
    old_sides = _first_and_last(old, last)
    new_sides = _first_and_last(new, last)
    matched = matched_names(old_sides, new_sides)
    old_name = {other: name for name, other in matched.items()}
    moved = _moving(old_name)
    _rename(new, moved)
    renamed = {}
    for name, other in zip(new.initial, names, strict=True):
        if name != other:
            renamed[name] = other
    return renamed


def _first_and_last(one: ScriptTrace, last: int) -> Sides:
    weights = one.at(last)[0].weights
    sides = {}
    for name, initial in one.initial.items():
        sides[name] = (initial, weights.get(name, initial))
    return sides


def matched_names(old: Sides, new: Sides) -> Names:
    """Return the names of the old script's parameters in the new one.

    By name, but in modules of which a parameter begins with other bits than that of the same name; the others by equal
    bits before the first step and after the last, then before the first, in the models' order where several are equal
    (biases of zeros); then by name; and what is left by shape, if no two have the same.
    """
    shared = [name for name in old if name in new]
    other_modules = set()
    for name in shared:
        before, _ = old[name]
        now, _ = new[name]
        if before.digest != now.digest:
            other_modules.add(_module(name))
    matches = {}
    for name in shared:
        if _module(name) not in other_modules:
            matches[name] = name
    _match_alike(old, new, matches, 2)
    _match_alike(old, new, matches, 1)
    matched = {*matches, *matches.values()}
    for name in shared:
        if name not in matched:
            matches[name] = name
    _match_alike(old, new, matches, 0)
    return {name: matches[name] for name in old if name in matches}


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _match_alike(
    old: Sides,
    new: Sides,
    matches: Names,
    depth: int,
) -> None:
    """Match parameters that are not matched yet, by their shapes and the first ``depth`` digests."""
    of_old = _alike(old, {*matches}, depth)
    of_new = _alike(new, {*matches.values()}, depth)
    for kind, names in of_old.items():
        others = of_new.get(kind, [])
        if len(names) != len(others):
            continue
        if depth == 0 and len(names) > 1:
            continue
        # Of several that are alike each is matched with the one of its own name.
        if {*names} == {*others}:
            others = names
        pairs = zip(names, others, strict=True)
        matches.update(pairs)


def _alike(sides: Sides, without: set[str], depth: int) -> Kinds:
    """Return the names by what is alike."""
    kinds = defaultdict(list)
    for name, sketches in sides.items():
        if name in without:
            continue
        initial = sketches[0]
        digests = [sketch.digest for sketch in sketches]
        kind = (initial.shape, *digests[:depth])
        kinds[kind].append(name)
    return kinds


def _moving(old_name: Mapping[str, str]) -> Rename:
    """Return how names of parameters, buffers and modules move, if the new script's parameters do so."""
    modules: Names = {}
    for name, other in old_name.items():
        _note_modules(name, other, modules)

    def moved(name: str) -> str:
        if name.startswith(COPY):
            # It is a copy, such as an average of the weights.
            return name
        if name in old_name:
            return old_name[name]
        # The nearest module above whose name is known, and what is below it as it is called.
        above = name
        below = ""
        while above and above not in modules:
            above, _, last = above.rpartition(".")
            below = f".{last}{below}"
        path = modules.get(above, above) + below
        return path.removeprefix(".")

    return moved


def _note_modules(name: str, other: str, modules: Names) -> None:
    """Note the old names of the modules that a parameter is in, up to the first that is called otherwise."""
    name = _module(name)
    other = _module(other)
    modules.setdefault(name, other)
    # The model itself has no name.
    while name or other:
        name, _, last = name.rpartition(".")
        other, _, other_last = other.rpartition(".")
        if last != other_last:
            return
        modules.setdefault(name, other)


def _models_in_order(old: ScriptTrace, new: ScriptTrace) -> Rename:
    """Return how the new script's parameters are named if it calls those models first that the old one does."""
    place_of = _places(old, new)

    def renamed(name: str) -> str:
        for place, other_place in place_of.items():
            prefix = in_model(place, "")
            if prefix and name.startswith(prefix):
                own_name = name.removeprefix(prefix)
                return in_model(other_place, own_name)
        return in_model(place_of[0], name)

    return renamed


def _places(old: ScriptTrace, new: ScriptTrace) -> dict[int, int]:
    """Return the places of the new script's models among the old one's: first those that have most in common."""
    pairs = []
    for place, model in enumerate(new.ranks[0].models):
        for other_place, other in enumerate(old.ranks[0].models):
            common = _common(model.weights, other.weights)
            pairs.append((common, place, other_place))
    # Of those with as much in common the first ones stay first.
    pairs.sort(key=lambda pair: pair[0], reverse=True)
    place_of: dict[int, int] = {}
    for _, place, other_place in pairs:
        if place in place_of:
            continue
        if other_place not in place_of.values():
            place_of[place] = other_place
    # Models that the old script has not got come after its own.
    unused = len(old.ranks[0].models)
    for place, _ in enumerate(new.ranks[0].models):
        if place not in place_of:
            place_of[place] = unused
            unused += 1
    return place_of


def _common(one: Sketches, other: Sketches) -> tuple[int, int]:
    """Return how many parameters of the same name have equal bits, and how many the same shape."""
    bits = 0
    shapes = 0
    for name in one.keys() & other.keys():
        sketch = one[name]
        other_sketch = other[name]
        bits += sketch.digest == other_sketch.digest
        shapes += sketch.shape == other_sketch.shape
    return bits, shapes


def _rename(trace: ScriptTrace, renamed: Rename) -> None:
    for rank in trace.ranks:
        rank.initial = _renamed(rank.initial, renamed)
        for record in rank.steps.values():
            record.gradients = _renamed(record.gradients, renamed)
            for kind, named in record.sketches.items():
                record.sketches[kind] = _renamed(named, renamed)
            for kind, texts in record.facts.items():
                record.facts[kind] = _renamed(texts, renamed)


def _renamed(values: Named, renamed: Rename) -> Named:
    new_values = {}
    for full_name, value in values.items():
        # The name of a state is "parameter: key".
        name, colon, key = full_name.partition(": ")
        new_name = renamed(name)
        new_values[f"{new_name}{colon}{key}"] = value
    return new_values
