"""Finds what else differs between two recorded scripts: hints at the cause of different weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fsshard.parity.scripts.facts import COPY
from fsshard.parity.scripts.store import Record, ScriptTrace

APART = 1e-4
"""Relative difference of two norms of gradients, taken in float32, that rounding does not explain."""
SAME = 1e-12
"""Relative difference of two settings that a schedule's own arithmetic, in float64, explains."""
FAIRSCALE = "ShardedDataParallel"
HOW = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings that say by which kernels an optimizer computes, and not what."""
Ranks = Sequence[Record]
Tell = Callable[[Ranks, Ranks], str]
"""Returns in words what is different between the ranks of two scripts in one step; "" for nothing."""


def causes(old: ScriptTrace, new: ScriptTrace, steps: Sequence[int], *, same: bool = False) -> list[str]:
    """Return in a sentence each what is not the same in ``steps``, at the first of them, most telling first.

    ``same`` says that the weights are, after each step: then samples, gradients and random numbers tell nothing.
    """
    compared: list[Tell] = [*DECIDING, _groups, _backwards]
    fairscale = [one for one in (old, new) if any(m.engine == FAIRSCALE for m in one.ranks[0].models)]
    found = [] if same else [*_models(old, new), *_ranks_apart(old, new, steps)]
    if not same:
        # FairScale leaves a rank its own gradient of what another rank updates
        gradients = [] if fairscale else [_clipping(old, new)]
        compared = [_samples, _computed, *compared, _states, *gradients, _broadcast]
    told = [one for tell in [*compared, _losses] if (one := first(tell, old, new, steps))]
    # What came first explains the rest; of one step what is nearest to the cause, in the order of the list above.
    found += [f"step {step}: {said}" for step, said in sorted(told, key=lambda one: one[0])]
    if not same and len(fairscale) == 1 and len(steps) > 1:  # right as long as there was no step before
        found.append(
            f"{fairscale[0].folder.name} runs under FairScale's ShardedDataParallel, which under today's torch reduces "
            "the gradients of the step before once more after optimizer.zero_grad(): docs/fairscale.md, row 1"
        )
    drawn = None if same else first(_random, old, new, steps)
    return [*found, *([f"step {drawn[0]}: {drawn[1]}"] if drawn else [])]


def first(tell: Tell, old: ScriptTrace, new: ScriptTrace, steps: Sequence[int]) -> tuple[int, str] | None:
    """Return the first step of which ``tell`` says anything, and what it says."""
    for step in steps:
        if said := tell([rank.steps[step] for rank in old.ranks], [rank.steps[step] for rank in new.ranks]):
            return step, said
    return None


def _models(old: ScriptTrace, new: ScriptTrace) -> Iterator[str]:
    """Compare the models as the first forward found them."""
    before, now = old.initial, new.initial
    for names, others, side in ((before, now, "old"), (now, before, "new")):
        only = [name for name in names if name not in others]
        if only:
            yield f"parameters of the {side} script alone: {_few(only)}"
    both = [name for name in before if name in now]
    for what, word in (("dtype", "dtypes"), ("shape", "shapes")):
        other = [name for name in both if getattr(before[name], what) != getattr(now[name], what)]
        if other:
            sides = f"{getattr(before[other[0]], what)} -> {getattr(now[other[0]], what)}"
            yield f"initial weights have other {word}: {sides}, {_few(other)}"
    apart = [name for name in both if before[name].digest != now[name].digest]
    if apart:
        yield f"{len(apart)} of {len(both)} initial weights differ (another seed?): {_few(apart)}"
    models = [one.ranks[0].models for one in (old, new)]
    if any(record.facts for one in (old, new) for record in one.ranks[0].steps.values()):
        return  # which have the layers by their paths
    layers = [Counter({n: k for one in side for n, k in one.layers.items()}) for side in models]
    if counts := _counts(*layers):
        yield f"layers: {counts}"


def _counts(before: Counter[str], now: Counter[str]) -> str:
    return _few([f"{n} {before[n]} -> {now[n]}" for n in before | now if before[n] != now[n]])


def _ranks_apart(old: ScriptTrace, new: ScriptTrace, steps: Sequence[int]) -> list[str]:
    """Return of which script the ranks hold different weights, unless those of both do."""
    found = [next(ranks_apart(one, steps), "") for one in (old, new)]
    return [said for said in found if said] if not all(found) else []


def ranks_apart(one: ScriptTrace, steps: Sequence[int]) -> Iterator[str]:
    """Compare the ranks of one script with each other."""
    for step in steps:
        first, *others = [rank.steps[step].weights for rank in one.ranks]
        for rank, weights in enumerate(others, 1):
            apart = [name for name in first if name in weights and weights[name].digest != first[name].digest]
            if apart:
                side = f"ranks 0 and {rank} of {one.folder.name}"
                yield f"step {step}: {side} hold different weights: are gradients not averaged? {_few(apart)}"
                return


def _samples(old: Sequence[Record], new: Sequence[Record]) -> str:
    """Compare what models were given: rank by rank, and as one set."""
    digests = [[[sample.digest for sample in record.samples] for record in side] for side in (old, new)]
    if digests[0] == digests[1]:
        return ""
    sides = [[sample for record in side for sample in record.samples] for side in (old, new)]
    counts = [sum(sample.rows for sample in side) for side in sides]
    totals = [sum(int(sample.total, 16) for sample in side) % 2**128 for side in sides]
    if totals[0] == totals[1] and all(sample.rows for side in sides for sample in side):
        divided = [[len(of_rank) for of_rank in side] for side in digests]  # among ranks and batches
        return "the ranks were given the same samples in another order" if divided[0] == divided[1] else ""
    rank = next((rank for rank, (a, b) in enumerate(zip(*digests, strict=False)) if a != b), 0)
    arguments = [side[rank].samples[0].arguments if side[rank].samples else {} for side in (old, new)]
    if said := _arguments(*arguments):
        return f"rank {rank} was given {said}; the other arguments are equal"
    if counts[0] != counts[1]:
        return f"the ranks were given {counts[1]} samples, by the old script {counts[0]}"
    if any(record.losses for record in old) and not _losses(old, new):
        return ""  # Lightning's forward takes the targets, too
    return f"rank {rank} was given other samples (another sampler, seed or preparation of data?)"


def _arguments(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return which arguments of a forward differ, if others do not."""
    both = [name for name in before if name in now]
    apart = [name for name in both if before[name] != now[name]]
    if len(apart) == len(both):
        return ""
    said = [f"another argument {name}" for name in apart]
    said += [f"no argument {name}" for name in before if name not in now]
    return _few(said + [f"an argument {name} more" for name in now if name not in before])


def _computed(old: Sequence[Record], new: Sequence[Record]) -> str:
    sides = [sorted({sample.computed for record in side for sample in record.samples}) for side in (old, new)]
    return "" if sides[0] == sides[1] else f"models put out {' and '.join(sides[0])} -> {' and '.join(sides[1])}"


def _groups(old: Ranks, new: Ranks) -> str:
    """Compare the numbers of groups, where it is not known which parameter is in which."""
    counts = [len(side[0].groups) for side in (old, new)]
    known = all(side[0].facts.get("member") for side in (old, new))
    return "" if known or counts[0] == counts[1] else f"groups of parameters {counts[0]} -> {counts[1]}"


def _of_any_rank(tell: Callable[[Record, Record], str]) -> Tell:
    """Return what says what ``tell`` does of the first rank of which it says anything."""

    def told(old: Ranks, new: Ranks) -> str:
        for rank, (before, now) in enumerate(zip(old, new, strict=False)):
            if said := tell(before, now):
                return f"{said} (on rank {rank})" if rank else said
        return ""

    return told


@_of_any_rank
def _settings(old: Record, new: Record) -> str:
    """Compare what the optimizers' groups say of each parameter."""
    if (old.groups, old.facts) == (new.groups, new.facts):
        return ""
    apart: dict[str, list[str]] = {}  # what differs -> parameters, or groups where these are not known
    before, now = (_by_parameter(side) for side in (old, new))
    for name in [name for name in before if name in now]:
        for said in _differences(before[name], now[name]):
            apart.setdefault(said, []).append(name)
    members = old.facts.get("member", {})
    told = []
    for said, names in apart.items():
        numbers = {members.get(name, name) for name in names}
        whole = [name for name, number in members.items() if number in numbers and name in before and name in now]
        key, _, change = said.partition(" ")
        of = f"group {', '.join(sorted(numbers))}" if len(whole) <= len(names) else _few(names)
        if all(before[name] in new.groups and before[name] != now[name] in old.groups for name in names):
            of = f"{_few(names)} (moved to another group)"
        told.append(f"{key} of {of} {change}")
    return _few(told)


def _by_parameter(record: Record) -> dict[str, dict[str, Any]]:
    """Return settings by parameter that is stepped, or by group where those are not known."""
    members = record.facts.get("member")
    if not members:
        return {str(number): group for number, group in enumerate(record.groups)}
    stepped = _stepped(record)
    return {name: record.groups[int(number)] for name, number in members.items() if name in stepped}


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return settings that both have and that differ: another release, or another class, has further ones."""
    found = []
    for key in sorted(before.keys() & now.keys() - HOW, key=lambda key: (key != "optimizer", key)):
        if not _equal(before[key], now[key]):
            found.append(f"{key} {before[key]} -> {now[key]}")
    if found and found[0].startswith("optimizer "):  # another class has other defaults
        return [said for said in found if said.startswith(("optimizer ", "lr "))]
    return found


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=SAME) or repr(one) == repr(other)
    return bool(one == other)


def _stepped(record: Record) -> set[str]:
    """Return the parameters that optimizers step; a frozen one is not, though a group may have it."""
    trained = record.facts.get("trained", {})
    return {name for name in record.facts.get("member", {}) if trained.get(name) != "frozen"}


@_of_any_rank
def _members(old: Record, new: Record) -> str:
    """Compare which parameters are stepped."""
    if not (old.facts.get("member") and new.facts.get("member")):
        return ""
    before, now = _stepped(old), _stepped(new)
    said = []
    for names, record, side in ((before - now, new, "new"), (now - before, old, "old")):
        frozen = {name for name in names if record.facts.get("trained", {}).get(name) == "frozen"}
        for those, why in ((frozen, "frozen"), (names - frozen, "in no group of an optimizer")):
            if those:
                are = "is" if len(those) == 1 else "are"
                said.append(f"{_few(sorted(those))} {are} {why} in the {side} script")
    return "; ".join(said)


def _fact(kind: str, words: str) -> Tell:
    """Return what compares a kind of fact by names that both scripts have."""

    @_of_any_rank
    def tell(old: Record, new: Record) -> str:
        before, now = old.facts.get(kind, {}), new.facts.get(kind, {})
        apart: dict[str, list[str]] = {}
        for name in before.keys() & now.keys():
            if before[name] != now[name] and before[name] and now[name]:
                apart.setdefault(f"{before[name]} -> {now[name]}", []).append(name or "the model itself")
        return _few([f"{words} of {_few(sorted(names))} {change}" for change, names in apart.items()])

    return tell


@_of_any_rank
def _layers(old: Record, new: Record) -> str:
    """Compare the layers by their paths, those of other paths by their number."""
    before, now = old.facts.get("layer", {}), new.facts.get("layer", {})
    if not before or not now:
        return ""
    apart = [name for name in before if before[name] != now.get(name)]
    others = [name for name in now if before.get(name) != now[name]]
    counts = _counts(Counter(before[name] for name in apart), Counter(now[name] for name in others))
    moved = [f"{before[name]} -> {now[name]}" for name in apart if name in now]
    return f"layers: {counts or _few(moved)}" if counts or moved else ""


@_of_any_rank
def _buffers(old: Record, new: Record) -> str:
    """Compare which buffers there are; see :func:`averages` for copies of the weights."""
    if not (old.weights and new.weights):
        return ""
    said = []
    for one, other, side in ((old, new, "old"), (new, old, "new")):
        names = one.sketches.get("buffer", {}).keys() - other.sketches.get("buffer", {})
        if only := sorted(name for name in names if not name.startswith(COPY)):
            said.append(f"buffers of the {side} script alone: {_few(only)}")
    return "; ".join(said)


def averages(old: ScriptTrace, new: ScriptTrace) -> str:
    """Return which copies of the weights one script has alone, and changes: an average does, a snapshot does not."""
    digests: list[dict[str, set[str]]] = [{}, {}]
    for one, found in zip((old, new), digests, strict=True):
        for record in one.ranks[0].steps.values():
            for name, sketch in record.sketches.get("buffer", {}).items():
                found.setdefault(name, set()).add(sketch.digest)
    for named, others, side in ((digests[0], digests[1], "old"), (digests[1], digests[0], "new")):
        only = [name for name in named if name.startswith(COPY) and name not in others and len(named[name]) > 1]
        if only:
            return f"the {side} script alone has an average, or another copy, of the weights: {_few(only, 2)}"
    return ""


def _states(old: Ranks, new: Ranks) -> str:
    """Compare of which parameters the optimizer has a state before its step; each rank may have that of some."""
    sides = []
    for side in (old, new):
        known = {name for record in side for name in record.facts.get("state", {})}
        with_state = {name for record in side for name, one in record.facts.get("state", {}).items() if one}
        sides.append((known, with_state))
    (known, before), (also_known, now) = sides
    for had, has, name in ((before, now, "new"), (now, before, "old")):
        # Another class has another state, or none.
        if lost := sorted(known & also_known & had - has if _kinds(old[0]) == _kinds(new[0]) else ()):
            return f"the {name} script has lost the optimizer's state of {_few(lost)}, or never had it"
    return ""


def _kinds(record: Record) -> set[Any]:
    return {group.get("optimizer") for group in record.groups}


def _broadcast(old: Ranks, new: Ranks) -> str:
    """Look for buffers that are not broadcast: they differ on other ranks than rank 0 alone."""
    apart = []
    for a, b in zip(old, new, strict=False):
        before, now = (side.sketches.get("buffer", {}) for side in (a, b))
        both = before.keys() & now.keys()
        apart.append(sorted(name for name in both if before[name].digest != now[name].digest))
    if len(old) != len(new) or apart[0] or not any(apart):
        return ""
    rank, names = next((rank, names) for rank, names in enumerate(apart) if names)
    return f"buffers of rank {rank} alone differ (broadcast_buffers=False in one of the two?): {_few(names)}"


@_of_any_rank
def _skipped(old: Record, new: Record) -> str:
    sides = ["left out by the scaler" if side.skipped else "made" for side in (old, new)]
    return "" if sides[0] == sides[1] else f"the step was {sides[0]} -> {sides[1]}"


def _backwards(old: Sequence[Record], new: Sequence[Record]) -> str:
    counts = [len(side[0].losses) for side in (old, new)]
    return "" if counts[0] == counts[1] else f"backward passes {counts[0]} -> {counts[1]}"


def _gradients(old: Ranks, new: Ranks) -> str:
    """Compare norms of gradients as the optimizer has left them."""
    # One of zeros tells as little as none.
    before, now = ({name: norm for name, norm in _norms(side).items() if norm} for side in (old, new))
    for names, side in ((before.keys() - now, "old"), (now.keys() - before, "new")):
        both = sorted(name for name in names if name in old[0].weights and name in new[0].weights)
        if both and before and now:
            return f"gradients in the {side} script alone: {_few(both)}"
    ratios = {name: now[name] / before[name] for name in before if name in now}
    apart = [name for name, ratio in ratios.items() if abs(ratio - 1) > APART]
    if not apart:
        return ""
    if len(apart) == len(ratios) and max(ratios.values()) - min(ratios.values()) < APART * max(ratios.values()):
        ratio = ratios[apart[0]]
        # By the number of ranks, samples or batches, or the scale of a scaler.
        factor = max(ratio, 1 / ratio)
        why = ": a sum in place of a mean, or a scale?" if abs(factor - round(factor)) < APART * factor else ""
        return f"all gradients are {ratio:.4g} times as large{why}"
    worst = max(apart, key=lambda name: abs(math.log(ratios[name])))
    return f"{len(apart)} of {len(ratios)} gradients have another norm, {worst} {ratios[worst]:.4g} times the old one"


def _clipping(old: ScriptTrace, new: ScriptTrace) -> Tell:
    """Return what compares the norms to which gradients are clipped, and if those are the same the gradients."""
    limits = [_limit(one) for one in (old, new)]
    words = [f"{limit:.4g}" if limit else "nothing" for limit in limits]
    said = f"gradients are clipped to a norm of {words[0]} -> {words[1]}" if words[0] != words[1] else ""
    return lambda before, now: _gradients(before, now) and (said or _gradients(before, now))


def _limit(one: ScriptTrace) -> float:
    """Return the norm of all gradients that is the largest, if several steps have it; 0.0 if they are not clipped."""
    norms = []
    for step in one.steps:
        norms.append(math.hypot(*_norms([rank.steps[step] for rank in one.ranks]).values()))
    *_, second, largest = [0.0, 0.0, *sorted(norms)]
    return largest if math.isclose(second, largest, rel_tol=APART / 10) else 0.0


def _norms(side: Sequence[Record]) -> dict[str, float]:
    """Return norms of whole gradients by the ranks' parts, or by equal copies."""
    found = {}
    for name, sketch in side[0].weights.items():
        parts = [record.gradients[name] for record in side if name in record.gradients]
        elements = math.prod(sketch.shape)
        if parts and elements:
            copies = max(1, round(sum(count for _, count in parts) / elements))
            found[name] = math.sqrt(sum(square for square, _ in parts) / copies)
    return found


def _losses(old: Ranks, new: Ranks) -> str:
    """Compare sums of a step's losses, of each rank or, on another number of ranks, their means."""
    sides = [[sum(record.losses) for record in side] for side in (old, new)]
    if len(old) != len(new):
        sides = [[sum(side) / len(side)] for side in sides]
    if not all(any(record.losses for record in side) for side in (old, new)):
        return ""  # one of them calls no backward that is known of
    for one, other in zip(*sides, strict=True):
        # To as many digits as may differ if the loss is added otherwise.
        if not (math.isclose(one, other, rel_tol=1e-6) or one != one != other != other):
            return f"loss {one!r} -> {other!r}"
    return ""


def _random(old: Sequence[Record], new: Sequence[Record]) -> str:
    apart = len(old) == len(new) and any(a.random != b.random for a, b in zip(old, new, strict=True))
    return "other random numbers have been drawn (dropout, shuffling or augmentation in one of the two?)" * apart


def _few(names: Sequence[Any], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


modes = _fact("mode", "mode")
counts = _fact("count", "number")
outputs = _fact("output", "dtype of the output")
DECIDING: tuple[Tell, ...] = (_settings, _members, counts, _skipped, _layers, modes, outputs, _buffers)
"""What is never different of the same training, whatever the weights are."""
LOSSES: Tell = _losses
"""The same of losses, which may round where weights may."""
