"""Compares two recorded scripts: is it the same training, and if not, what was different before the weights were?"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsshard.errors import ConfigurationError
from fsshard.parity.comparing import cell_of, compare_traces
from fsshard.parity.plain import plain
from fsshard.parity.render import ParityReport
from fsshard.parity.report import Cell, Difference, StepReport, difference
from fsshard.parity.scripts.causes import DECIDING as FACTS
from fsshard.parity.scripts.causes import LOSSES, averages, causes, first, ranks_apart
from fsshard.parity.scripts.facts import COPY
from fsshard.parity.scripts.store import ScriptTrace, in_model, read_tensor, tensor_file
from fsshard.parity.sketch import Sketch
from fsshard.parity.trace import INITIAL, RankTrace, Step, Trace, changes

DECIDING = ("initial weight", "weight", "state", "buffer")
"""Quantities whose numbers make the verdict, beside what :mod:`fsshard.parity.scripts.causes` calls deciding."""
HINT = (
    "hint: if this may be rounding alone, as of sums in another order, runs of the old script that are rounded "
    "otherwise bound it; record it with fsshard trace --repeat 8"
)
LEAST_REPEATS = 4  # the largest distance among fewer runs says too little about the next one's


@dataclass(kw_only=True)
class ScriptReport:
    """The result of :func:`compare_scripts`."""

    sentence: str  # for a pull request
    verdict: str  # "exact", "bound" or "different"
    steps: list[int]  # numbers of those that were compared
    causes: list[str]  # what else differs, up to the first step whose weights do; of a same training what does in vain
    renamed: dict[str, str]  # parameters of the old script -> their names in the new one
    report: ParityReport  # all differences, as of any comparison
    looked_at: str = ""  # what the verdict is over, and what it is not
    hint: str = ""  # how to find out whether it is rounding, if nothing else is known to differ

    @property
    def ok(self) -> bool:
        """Return whether it is the same training."""
        return self.verdict in ("exact", "bound")

    def to_json(self) -> str:
        """Write all of it."""
        return json.dumps({**plain(self, str), "ok": self.ok}, indent=1, allow_nan=False)

    def __str__(self) -> str:
        moved = [f"renamed: {old} is {new} now" for old, new in self.renamed.items()]
        moved[4:] = [f"renamed: {len(moved) - 4} more"] if len(moved) > 4 else []  # all are in to_json()
        word = "before that" if self.report.cells[0].verdict == "different" else "also different"
        found = [f"{word}: {cause}" for cause in self.causes]
        changed = [f"environment: {change}" for change in self.report.changes]
        return "\n".join([self.sentence, *found, *moved, *changed, *filter(None, [self.looked_at, self.hint])])


def compare_scripts(
    old: str | Path, new: str | Path, *, repeats: Sequence[str | Path] = (), exactly: bool = False
) -> ScriptReport:
    """Compare two folders of ``fsshard trace``.

    Args:
        old: the record of the script that is right.
        new: the other one's, which may have other names of parameters, and another number of ranks.
        repeats: further records of the old script, beside those of ``fsshard trace --repeat``; how far they are from
            it is what rounding may do.
        exactly: nothing may round, whatever repeats there are.

    Raises:
        TraceError: a folder is no record.
        ConfigurationError: there are too few repeats, or no step that both have recorded.
    """
    before, now = ScriptTrace.load(old), ScriptTrace.load(new)
    draws = [] if exactly else [*before.repeats, *map(ScriptTrace.load, repeats)]
    if 0 < len(draws) < LEAST_REPEATS:
        raise ConfigurationError(
            f"expected at least {LEAST_REPEATS} repeats of the old script, got {len(draws)}; record them: fsshard "
            "trace --repeat 8"
        )
    steps = [number for number in before.steps if number in now.steps]
    weighed = [n for n in steps if all(one.ranks[0].steps[n].weights for one in (before, now))]
    if not weighed:
        raise ConfigurationError(
            f"{before.folder} and {now.folder} have no step in common at which weights are recorded; record both with "
            "the same --steps and --every"
        )
    for draw in draws:
        if not before.recorded(steps) <= draw.recorded(steps):
            raise ConfigurationError(
                f"{draw.folder} is no repeat of {before.folder}, which has other ranks, steps or quantities; record "
                "both on as many ranks, with the same --steps, --every and --state"
            )

    def first_and_last(one: ScriptTrace) -> Sides:
        last = one.ranks[0].steps[weighed[-1]].weights
        return {name: (first, last.get(name, first)) for name, first in one.initial.items()}

    called = [*now.initial]
    _rename(now, _in_the_order_of(before, now))
    theirs = {other: name for name, other in matched_names(first_and_last(before), first_and_last(now)).items()}
    _rename(now, _moving(theirs))
    renamed = {name: other for name, other in zip(now.initial, called, strict=True) if name != other}
    cell = _compared(before, now, draws, steps, renamed)
    found = _report(before, now, steps, weighed, cell, renamed, rounds=bool(draws))
    found.looked_at = _looked_at(before, now, weighed)
    if not (found.ok or draws or exactly or found.causes) and found.report.cells[0].first_divergence is not None:
        found.hint = HINT
    return found


def _compared(
    before: ScriptTrace, now: ScriptTrace, draws: Sequence[ScriptTrace], steps: list[int], renamed: Mapping[str, str]
) -> Cell:
    """Return the verdict on all steps, by the comparator of recorded trainings."""
    regrouped = len(before.ranks) != len(now.ranks)
    sides = [before, now, *([before, *draws] if draws else [])]
    old, new, *drawn = (_as_trace(one, (before, now), steps) for one in sides)
    found = compare_traces(old, new, regrouped=regrouped, draws=[one.ranks for one in drawn], exactly=not draws)
    cell = cell_of([_without(step, lambda quantity, d: quantity not in DECIDING) for step in found], old.parameters)
    # thousands of parameters in thousands of steps are equal
    cell.steps = [_without(step, lambda quantity, d: d.verdict == "exact") for step in found]
    cell.backend, cell.world_size = now.folder.name, len(now.ranks)
    first = cell.first_divergence
    if first is not None:
        number = INITIAL if first.quantity == "initial weight" else steps[first.step]
        named = ((before, first.name), (now, renamed.get(first.name, first.name)))
        files = [tensor_file(one.folder, number, name) for one, name in named]
        if all(file.is_file() for file in files):
            exact = difference(*map(read_tensor, files), rank=first.rank)
            first = replace(first, difference=replace(exact, verdict=first.difference.verdict))
        cell.first_divergence = replace(first, step=steps[first.step])
    return cell


def _without(step: StepReport, drops: Callable[[str, Difference], bool]) -> StepReport:
    kept = {q: {name: d for name, d in of.items() if not drops(q, d)} for q, of in step.differences.items()}
    return replace(step, differences=kept)


def _as_trace(one: ScriptTrace, sides: Sequence[ScriptTrace], steps: list[int]) -> Trace:
    """Return the steps as those of a recorded training, with what both sides have recorded."""
    header, ranks = one.ranks[0].header, [RankTrace(initial=rank.initial) for rank in one.ranks]
    for number in steps:
        both = [side.ranks[0].steps[number].sketches for side in sides]
        for rank, trace in zip(one.ranks, ranks, strict=True):
            record = rank.steps[number]
            sketches = {q: record.sketches[q] for q in both[0] if all(side.get(q) for side in both)}
            if "buffer" in sketches:  # one that a forward makes, or an engine keeps otherwise, decides nothing
                shared = both[0]["buffer"].keys() & both[1]["buffer"]
                sketches["buffer"] = {name: each for name, each in sketches["buffer"].items() if name in shared}
            trace.steps.append(Step(batches=[], loss=sum(record.losses), norm=0.0, sketches=sketches))
    told: dict[str, Any] = {name: getattr(header, name) for name in ("environment", "commit", "device", "world_size")}
    return Trace(**told, recipe={}, backend=one.folder.name, detail="digests", parameters=[*one.initial], ranks=ranks)


# --------------------------------------------------------------------------------------------------------------- names

Sides = Mapping[str, tuple[Sketch, Sketch]]
"""Name -> a parameter before the first step, and after the last."""


def matched_names(old: Sides, new: Sides) -> dict[str, str]:
    """Return the names of the old script's parameters in the new one.

    By name, but in modules of which a parameter begins with other bits than that of the same name; the others by equal
    bits before the first step and after the last, then before the first, in the models' order where several are equal
    (biases of zeros); then by name; and what is left by shape, if no two have the same.
    """
    both = [name for name in old if name in new]
    other = {name.rpartition(".")[0] for name in both if old[name][0].digest != new[name][0].digest}
    found = {name: name for name in both if name.rpartition(".")[0] not in other}
    for depth in (2, 1, 0):
        if not depth:
            left = [name for name in both if name not in found and name not in found.values()]
            found |= {name: name for name in left}
        alike: list[dict[Any, list[str]]] = [{}, {}]
        for side, taken, kinds in ((old, found.keys(), alike[0]), (new, {*found.values()}, alike[1])):
            for name, sketches in side.items():
                if name not in taken:
                    kinds.setdefault((sketches[0].shape, *(one.digest for one in sketches[:depth])), []).append(name)
        for kind, names in alike[0].items():
            others = alike[1].get(kind, [])
            if {*names} == {*others}:
                others = names
            if len(names) == len(others) and (depth or len(names) == 1):
                found |= zip(names, others, strict=True)
    return {name: found[name] for name in old if name in found}


def _moving(theirs: Mapping[str, str]) -> Callable[[str], str]:
    """Return how names of parameters, buffers and modules move, if the new script's parameters are called so."""
    modules: dict[str, str] = {}
    for name, other in theirs.items():
        paths = [["", *one.split(".")[:-1]] for one in (name, other)]  # the model itself has no name
        while len(paths[0]) and len(paths[1]):
            modules.setdefault(".".join(paths[0][1:]), ".".join(paths[1][1:]))
            if paths[0].pop() != paths[1].pop():
                break

    def moved(name: str) -> str:
        if name.startswith(COPY):
            return name
        above, below = name, ""
        while above and above not in modules:
            above, _, last = above.rpartition(".")
            below = f".{last}{below}"
        return theirs.get(name) or (modules.get(above, above) + below).removeprefix(".")

    return moved


def _in_the_order_of(old: ScriptTrace, new: ScriptTrace) -> Callable[[str], str]:
    """Return how the new script's parameters are named if it calls those models first that the old one does."""
    sides = [[model.weights for model in one.ranks[0].models] for one in (new, old)]
    pairs, places = itertools.product(*(range(len(side)) for side in sides)), dict[int, int]()
    # Pairs of models that have most in common first; of those with as much the first ones.
    for place, other in sorted(pairs, key=lambda pair: _common(sides[0][pair[0]], sides[1][pair[1]]), reverse=True):
        if place not in places and other not in places.values():
            places[place] = other
    free = (number for number in itertools.count() if number not in places.values())
    order = [places[place] if place in places else next(free) for place in range(len(sides[0]))]

    def renamed(name: str) -> str:
        place = next((k for k in range(1, len(order)) if name.startswith(in_model(k, ""))), 0)
        return in_model(order[place], name.removeprefix(in_model(place, "")))

    return renamed


def _common(one: Mapping[str, Sketch], other: Mapping[str, Sketch]) -> list[int]:
    """Return how many parameters of the same name have equal bits, and how many the same shape."""
    pairs = [(one[name], other[name]) for name in one if name in other]
    return [sum(a.digest == b.digest for a, b in pairs), sum(a.shape == b.shape for a, b in pairs)]


def _rename(trace: ScriptTrace, renamed: Callable[[str], str]) -> None:
    def all_of(named: Mapping[str, Any]) -> dict[str, Any]:
        parts = ((name.partition(": "), one) for name, one in named.items())  # of a state "parameter: key"
        return {renamed(name) + colon + key: one for (name, colon, key), one in parts}

    for rank in trace.ranks:
        rank.initial = all_of(rank.initial)
        for record in rank.steps.values():
            record.gradients = all_of(record.gradients)
            record.sketches = {quantity: all_of(one) for quantity, one in record.sketches.items()}
            record.facts = {kind: all_of(one) for kind, one in record.facts.items()}


# -------------------------------------------------------------------------------------------------------------- report


def _report(
    before: ScriptTrace,
    now: ScriptTrace,
    steps: list[int],
    weighed: list[int],
    cell: Cell,
    renamed: dict[str, str],
    *,
    rounds: bool,
) -> ScriptReport:
    parting, sides = cell.first_divergence, f"{before.folder.name} and {now.folder.name}"
    sizes = [*dict.fromkeys(len(one.ranks) for one in (before, now))]
    sides_on = f"{sides} on {' and '.join(map(str, sizes))} rank{'s' * (sizes != [1])}"
    count = f"{len(weighed)} step{'s' * (len(weighed) != 1)}"
    verdict, until = cell.verdict, max(steps)
    if verdict == "different" and parting is not None:
        sentence, until = f"NOT the same training: {sides_on} part at {parting}.", parting.step
    elif missing := _missing(before, now, weighed) or _unlike(before, now, steps, cell if rounds else None):
        verdict, sentence = "different", f"NOT shown to be the same training: {missing}; {count} agree."
    else:
        if len(weighed) < len(steps):
            count = f"{len(weighed)} of {len(steps)} steps; nothing is shown of weights after step {weighed[-1]}"
        how = "to the last bit" if verdict == "exact" else "within what rounding does to the old script"
        states = all(one.ranks[0].steps[weighed[-1]].sketches.get("state") for one in (before, now))
        what, parameters = "weights and optimizer states" if states else "weights", f"{len(before.initial)} parameters"
        sentence = f"The same training: {sides_on} have equal {what} {how}, {parameters} in {count}."
    report = ParityReport(recipe=now.folder.name, reference=before.folder.name, steps=len(steps), cells=[cell])
    report.changes = changes(before.ranks[0].header.environment, now.ranks[0].header.environment)
    told = causes(before, now, [n for n in steps if n <= until], same=cell.verdict != "different")
    return ScriptReport(sentence=sentence, verdict=verdict, steps=steps, causes=told, renamed=renamed, report=report)


def _missing(before: ScriptTrace, now: ScriptTrace, weighed: list[int]) -> str:
    """Return why equal weights do not show that it is the same training; "" if they do."""
    sides = (before, now)
    for one in sides:
        if one.ended:
            return f"the record of {one.folder.name} ended while it went on ({one.ended[0]})"
    if before.steps != now.steps:
        counts = [f"{len(one.steps)} steps ({one.steps[0]} to {one.steps[-1]})" for one in sides]
        return f"{before.folder.name} has recorded {counts[0]}, {now.folder.name} {counts[1]}"
    if uneven := _uneven(before, now):
        return uneven
    # On other numbers of ranks rank 0 speaks for all.
    apart = [next(ranks_apart(one, weighed), "") for one in sides]
    if len(before.ranks) != len(now.ranks) and bool(apart[0]) != bool(apart[1]):
        return apart[0] or apart[1]
    last = before.ranks[0].steps[weighed[-1]].weights
    if all(one.digest == last[name].digest for name, one in before.initial.items() if name in last):
        return "no step has changed a weight: does the optimizer have the model's parameters, and a learning rate?"
    return ""


def _uneven(before: ScriptTrace, now: ScriptTrace) -> str:
    """Return what differs in the steps that some ranks have alone; "" if nothing does."""
    common, sides = {*before.steps}, (before, now)
    alone = [[sorted(rank.steps.keys() - common) for rank in one.ranks] for one in sides]
    if len(alone[0]) != len(alone[1]):
        uneven = [one.folder.name for one, steps in zip(sides, alone, strict=True) if any(steps)]
        return f"the ranks of {uneven[0]} have not all recorded the same steps" if uneven else ""
    for rank, (steps, others) in enumerate(zip(*alone, strict=True)):
        if steps != others:
            counts = [len(one.ranks[rank].steps) for one in sides]
            names = [one.folder.name for one in sides]
            return f"rank {rank} has recorded {counts[0]} steps of {names[0]}, {counts[1]} of {names[1]}"
        if steps:
            old, new = (replace(one, ranks=[one.ranks[rank]], repeats=[]) for one in sides)
            parting = _compared(old, new, [], steps, {}).first_divergence
            if said := str(parting or "") or _unlike(old, new, steps, None):
                return f"in the steps that rank {rank} has alone: {said}"
    return ""


def _unlike(before: ScriptTrace, now: ScriptTrace, steps: list[int], rounded: Cell | None) -> str:
    """Return what differs although the weights do not; "" if nothing does.

    ``rounded`` has the differences of losses that may round, as weights may.
    """
    for tell in (*FACTS, *([LOSSES] if rounded is None else [])):
        if said := first(tell, before, now, steps):
            return f"step {said[0]}: {said[1]}"
    for number, step in zip(steps, rounded.steps if rounded else (), strict=False):
        for loss in step.differences.get("loss", {}).values():
            if loss.verdict == "different":
                return f"step {number}: loss {loss.expected} -> {loss.got}, more than rounding does"
    return averages(before, now)


def _looked_at(before: ScriptTrace, now: ScriptTrace, weighed: list[int]) -> str:
    """Return in a line what the verdict is over, and what it is not."""
    one = before.ranks[0]
    engines = ", ".join(dict.fromkeys(model.engine for model in one.models))
    optimizers = {str(group.get("optimizer", "?")) for record in one.steps.values() for group in record.groups}
    last = [side.ranks[0].steps[weighed[-1]] for side in (before, now)]
    buffers = len(last[0].sketches.get("buffer", {}))
    seen = f"{engines} with {len(one.initial)} parameters and {buffers} buffers, {', '.join(sorted(optimizers))}"
    unseen = ["what is in no model or optimizer", "changes after the last step"]
    if not all(record.sketches.get("state") for record in last):
        unseen.append("optimizer states (--state)")
    if len(before.ranks) != len(now.ranks):
        unseen.append("values of buffers")
    if not all(record.facts.get("member") for record in last):
        unseen.append("which parameters are stepped")
    return f"looked at: {seen}, losses, settings, modes, layers; not: {', '.join(unseen)}"
