"""Compares the norms of gradients, as the optimizers have left them, and to which norm they are clipped."""

from __future__ import annotations

import math

from fsshard.parity.scripts.step_causes import Ranks, Tell, alone
from fsshard.parity.scripts.store import ScriptTrace

# Relative difference of two norms of gradients, taken in float32, that rounding does not explain.
APART = 1e-4
Norms = dict[str, float]


def compare_gradients(old: ScriptTrace, new: ScriptTrace) -> Tell:
    """Return what compares the norms to which gradients are clipped, and if those are the same the gradients."""
    before = _limit(old)
    now = _limit(new)

    def tell(old_ranks: Ranks, new_ranks: Ranks) -> str:
        words = _gradients(old_ranks, new_ranks)
        if words and before != now:
            return f"gradients are clipped to a norm of {before} -> {now}"
        return words

    return tell


def _limit(one: ScriptTrace) -> str:
    """Return the norm of all gradients that is the largest, if several steps have it; "nothing" if not clipped."""
    norms = []
    for step in one.steps:
        of_parameters = _norms(one.at(step))
        norms.append(math.hypot(*of_parameters.values()))
    *_, second, largest = [0.0, 0.0, *sorted(norms)]
    if largest > 0 and math.isclose(second, largest, rel_tol=APART / 10):
        return f"{largest:.4g}"
    return "nothing"


def _norms(ranks: Ranks) -> Norms:
    """Return norms of whole gradients by the ranks' parts, or by equal copies; of those that are not zero."""
    norms = {}
    for name, sketch in ranks[0].weights.items():
        square = 0.0
        elements = 0
        for record in ranks:
            of_rank = record.gradients.get(name, (0.0, 0))
            square += of_rank[0]
            elements += of_rank[1]
        if square == 0:
            # A gradient of zeros tells as little as none.
            continue
        copies = max(1, round(elements / math.prod(sketch.shape)))
        norms[name] = math.sqrt(square / copies)
    return norms


def _gradients(old: Ranks, new: Ranks) -> str:
    before = _norms(old)
    now = _norms(new)
    if before and now:
        shared = old[0].weights.keys() & new[0].weights.keys()
        with_old = sorted(shared & before.keys())
        with_new = sorted(shared & now.keys())
        only = alone("gradients in", with_old, with_new)
        if only:
            return only[0]
    ratios = {}
    changed = {}
    for name in before.keys() & now.keys():
        ratio = now[name] / before[name]
        ratios[name] = ratio
        if abs(ratio - 1) > APART:
            changed[name] = abs(math.log(ratio))
    if not changed:
        return ""
    largest = max(ratios.values())
    smallest = min(ratios.values())
    span = largest - smallest
    if len(changed) == len(ratios) and span < APART * largest:
        return _all_by(largest)
    worst = max(changed, key=changed.__getitem__)
    words = f"{worst} {ratios[worst]:.4g} times the old one"
    count = f"{len(changed)} of {len(ratios)}"
    return f"{count} gradients have another norm, {words}"


def _all_by(ratio: float) -> str:
    """Return in words that all gradients are ``ratio`` times as large."""
    words = f"all gradients are {ratio:.4g} times as large"
    # By the number of ranks, samples or batches, or the scale of a scaler.
    factor = max(ratio, 1 / ratio)
    if abs(factor - round(factor)) < APART * factor:
        words += ": a sum in place of a mean, or a scale?"
    return words
