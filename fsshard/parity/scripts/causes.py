"""Finds what else differs between two recorded scripts: hints at the cause of different weights.

What is compared within a step is in step_causes.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from fsshard.parity.scripts.facts import COPY
from fsshard.parity.scripts.gradient_norms import compare_gradients
from fsshard.parity.scripts.step_causes import (
    FACTS,
    Tell,
    alone,
    backwards,
    broadcast,
    changes,
    computed,
    digests,
    few,
    groups,
    losses,
    means,
    random,
    samples,
    states,
)
from fsshard.parity.scripts.store import ScriptTrace

FAIRSCALE = "ShardedDataParallel"
Steps = Sequence[int]
# Name of a copy of the weights -> its digests.
Copies = dict[str, set[str]]


def causes(old: ScriptTrace, new: ScriptTrace, steps: Steps, *, same: bool = False) -> list[str]:
    """Return in a sentence each what is not the same in ``steps``, at the first of them, most telling first.

    ``same`` says that the weights are, after each step: then samples, gradients and random numbers tell nothing.
    """
    if same:
        return _by_step([*FACTS, groups, backwards, losses], old, new, steps)
    compared = [samples, computed, means, *FACTS, groups, backwards, states]
    fairscale = [one for one in (old, new) if _is_fairscale(one)]
    if not fairscale:
        # FairScale leaves a rank its own gradient of what another rank updates.
        compared.append(compare_gradients(old, new))
    compared += [broadcast, losses]
    apart = [ranks_apart(one, steps) for one in (old, new)]
    sentences = _models(old, new)
    if not all(apart):
        sentences += filter(None, apart)
    sentences += _by_step(compared, old, new, steps)
    # Its gradients are right as long as there was no step before.
    if len(fairscale) == 1 and len(steps) > 1:
        sentences.append(
            f"{fairscale[0].name} runs under FairScale's ShardedDataParallel, which under today's torch reduces "
            "the gradients of the step before once more after optimizer.zero_grad(): "
            "docs/data/fairscale-faults.md, row 1"
        )
    sentences += _by_step([random], old, new, steps)
    # Where ranks differ in both scripts, as of experts or local SGD, that explains no difference between the scripts.
    return sentences or [words for words in apart if words]


def first(tell: Tell, old: ScriptTrace, new: ScriptTrace, steps: Steps) -> tuple[int, str]:
    """Return the first step of which ``tell`` says anything, and what it says; "" if there is none."""
    for step in steps:
        words = tell(old.at(step), new.at(step))
        if words:
            return step, words
    return 0, ""


def _by_step(
    compared: Sequence[Tell],
    old: ScriptTrace,
    new: ScriptTrace,
    steps: Steps,
) -> list[str]:
    """Return what ``compared`` say: what came first explains the rest; of one step in their order."""
    firsts = [first(tell, old, new, steps) for tell in compared]
    firsts.sort(key=lambda step_and_words: step_and_words[0])
    return [f"step {step}: {words}" for step, words in firsts if words]


def _is_fairscale(one: ScriptTrace) -> bool:
    return any(model.engine == FAIRSCALE for model in one.ranks[0].models)


def _models(old: ScriptTrace, new: ScriptTrace) -> list[str]:
    """Compare the models as the first forward found them."""
    differences = alone("parameters of", old.initial, new.initial)
    for attribute in ("dtype", "shape"):
        changed = changes(_of_weights(old, attribute), _of_weights(new, attribute))
        if changed:
            values = next(iter(changed.values()))
            differences.append(f"initial weights have other {attribute}s: {values}, {few(changed)}")
    changed = changes(digests(old.initial), digests(new.initial))
    if changed:
        shared = old.initial.keys() & new.initial.keys()
        count = f"{len(changed)} of {len(shared)}"
        differences.append(f"{count} initial weights differ (another seed?): {few(changed)}")
    return differences


def _of_weights(one: ScriptTrace, attribute: str) -> dict[str, Any]:
    """Return an attribute of the initial weights by name."""
    values = {}
    for name, sketch in one.initial.items():
        values[name] = getattr(sketch, attribute)
    return values


def ranks_apart(one: ScriptTrace, steps: Steps) -> str:
    """Return the first step after which ranks of one script hold different weights, and which; "" if they never do."""
    for step in steps:
        weights = [digests(record.weights) for record in one.at(step)]
        for rank, weights_of_rank in enumerate(weights):
            changed = changes(weights[0], weights_of_rank)
            if changed:
                ranks = f"ranks 0 and {rank} of {one.name}"
                return f"step {step}: {ranks} hold different weights: are gradients not averaged? {few(changed)}"
    return ""


def averages(old: ScriptTrace, new: ScriptTrace) -> str:
    """Return which copies of the weights one script has alone, and changes: an average does, a snapshot does not."""
    before = _copies(old)
    now = _copies(new)
    words = "script alone has an average, or another copy, of the weights"
    only = _changing_alone(before, now)
    if only:
        return f"the old {words}: {few(only, 2)}"
    only = _changing_alone(now, before)
    if only:
        return f"the new {words}: {few(only, 2)}"
    return ""


def _changing_alone(copies: Copies, others: Copies) -> list[str]:
    """Return the copies that the other script has not, but snapshots."""
    return [name for name in copies if name not in others and len(copies[name]) > 1]


def _copies(one: ScriptTrace) -> Copies:
    """Return the digests that each copy of the weights has had."""
    copies = defaultdict(set)
    for record in one.ranks[0].steps.values():
        for name, sketch in record.buffers.items():
            if name.startswith(COPY):
                copies[name].add(sketch.digest)
    return copies
