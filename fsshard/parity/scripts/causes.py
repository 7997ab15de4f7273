"""Finds what else differs between two recorded scripts: hints at the cause of different weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fsshard.parity.scripts.store import Record, ScriptTrace

APART = 1e-4
"""Relative difference of two norms of gradients, taken in float32, that rounding does not explain."""
FAIRSCALE = "ShardedDataParallel"
Tell = Callable[[Sequence[Record], Sequence[Record]], str]
"""Returns in words what is different between the ranks of two scripts in one step; "" for nothing."""


def causes(old: ScriptTrace, new: ScriptTrace, steps: Sequence[int], *, same: bool = False) -> Iterator[str]:
    """Yield in a sentence each what is not the same in ``steps``, at the first of them, most telling first.

    ``same`` says that the weights are, after each step: then samples, gradients and random numbers tell nothing.
    """
    compared = [_computed, _groups, _skipped, _backwards, _losses]
    fairscale = [one for one in (old, new) if any(m.engine == FAIRSCALE for m in one.ranks[0].models)]
    if not same:
        yield from _models(old, new)
        yield from ranks_apart(old, steps)
        yield from ranks_apart(new, steps)
        # FairScale leaves a rank its own gradient of what another rank updates
        compared = [_samples, *compared, *([] if fairscale else [_gradients])]
    for tell in compared:
        yield from _first(tell, old, new, steps)
    if not same and len(fairscale) == 1 and len(steps) > 1:  # right as long as there was no step before
        yield (
            f"{fairscale[0].folder.name} runs under FairScale's ShardedDataParallel, which under today's torch reduces "
            "the gradients of the step before once more after optimizer.zero_grad(): docs/fairscale.md, row 1"
        )
    if not same:
        yield from _first(_random, old, new, steps)


def _first(tell: Tell, old: ScriptTrace, new: ScriptTrace, steps: Sequence[int]) -> Iterator[str]:
    """Yield what ``tell`` says of the first step of which it says anything."""
    for step in steps:
        if said := tell([rank.steps[step] for rank in old.ranks], [rank.steps[step] for rank in new.ranks]):
            yield f"step {step}: {said}"
            return


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
    layers = [Counter({n: k for one in side.ranks[0].models for n, k in one.layers.items()}) for side in (old, new)]
    other = [f"{n} {layers[0][n]} -> {layers[1][n]}" for n in layers[0] | layers[1] if layers[0][n] != layers[1][n]]
    if other:
        yield f"layers: {_few(other)}"


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
    if counts[0] != counts[1]:
        return f"the ranks were given {counts[1]} samples, by the old script {counts[0]}"
    if any(record.losses for record in old) and not _losses(old, new):
        return ""  # Lightning's forward takes the targets, too
    rank = next((rank for rank, (a, b) in enumerate(zip(*digests, strict=False)) if a != b), 0)
    return f"rank {rank} was given other samples (another sampler, seed or preparation of data?)"


def _computed(old: Sequence[Record], new: Sequence[Record]) -> str:
    sides = [sorted({sample.computed for record in side for sample in record.samples}) for side in (old, new)]
    return "" if sides[0] == sides[1] else f"models put out {' and '.join(sides[0])} -> {' and '.join(sides[1])}"


def _groups(old: Sequence[Record], new: Sequence[Record]) -> str:
    """Compare what the groups of both optimizers say: another release, or another class, has further keys."""
    said = []
    for number, (before, now) in enumerate(zip(old[0].groups, new[0].groups, strict=False)):
        for key in before.keys() & now.keys():
            if before[key] != now[key]:
                said.append(f"{key} of group {number} {before[key]} -> {now[key]}")
    if len(old[0].groups) != len(new[0].groups):
        said.append(f"groups of parameters {len(old[0].groups)} -> {len(new[0].groups)}")
    return _few(sorted(said))


def _skipped(old: Sequence[Record], new: Sequence[Record]) -> str:
    sides = ["left out by the scaler" if side[0].skipped else "made" for side in (old, new)]
    return "" if sides[0] == sides[1] else f"the step was {sides[0]} -> {sides[1]}"


def _backwards(old: Sequence[Record], new: Sequence[Record]) -> str:
    counts = [len(side[0].losses) for side in (old, new)]
    return "" if counts[0] == counts[1] else f"backward passes {counts[0]} -> {counts[1]}"


def _gradients(old: Sequence[Record], new: Sequence[Record]) -> str:
    """Compare norms of gradients as the optimizer has left them."""
    before, now = (_norms(side) for side in (old, new))
    ratios = {name: now[name] / before[name] for name in before if before[name] and now.get(name)}
    apart = [name for name, ratio in ratios.items() if abs(ratio - 1) > APART]
    if not apart:
        return ""
    if len(apart) == len(ratios) and max(ratios.values()) - min(ratios.values()) < APART * max(ratios.values()):
        return f"all gradients are {ratios[apart[0]]:.4g} times as large: a sum in place of a mean, or a scale?"
    worst = max(apart, key=lambda name: abs(math.log(ratios[name])))
    return f"{len(apart)} of {len(ratios)} gradients have another norm, {worst} {ratios[worst]:.4g} times the old one"


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


def _losses(old: Sequence[Record], new: Sequence[Record]) -> str:
    means = [sum(sum(record.losses) for record in side) / len(side) for side in (old, new)]
    apart = not math.isclose(*means, rel_tol=1e-6) and all(map(math.isfinite, means))  # unless ranks add otherwise
    return f"loss {means[0]!r} -> {means[1]!r}" if apart else ""


def _random(old: Sequence[Record], new: Sequence[Record]) -> str:
    apart = len(old) == len(new) and any(a.random != b.random for a, b in zip(old, new, strict=True))
    return "other random numbers have been drawn (dropout, shuffling or augmentation in one of the two?)" * apart


def _few(names: Sequence[Any], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more
