"""Says in words what is different in one step of two scripts.

Each function is given the records of all ranks, of the old script and of the new one; "" says that nothing differs.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fsshard.parity.scripts.facts import COPY
from fsshard.parity.scripts.store import Record, Samples, Sketches

Ranks = Sequence[Record]
Tell = Callable[[Ranks, Ranks], str]
Arguments = Mapping[str, Any]
Texts = Mapping[str, str]
Names = list[str]
# A setting, and its values: "old -> new".
Change = tuple[str, str]

# Relative difference of two settings that a schedule's own arithmetic, in float64, explains.
SAME = 1e-12
# Relative difference of two losses that another order of their sums explains.
SAME_LOSS = 1e-6
# Difference from 1 of the mean of losses' ratios, each of them rounded in float32, if the mean is 1.
SAME_MEAN = 1e-5
# Difference from 1 of one of these ratios that is more than rounding.
UNEQUAL = 1e-3
# Settings that say by which kernels an optimizer computes, and not what.
KERNELS = frozenset({"foreach", "fused", "capturable", "differentiable"})


# --------------------------------------------------------------------------------------------------------------- words


def few(names: Iterable[Any], most: int = 4) -> str:
    """Return the first names in words, and how many more there are."""
    words = [*map(str, names)]
    text = ", ".join(words[:most])
    if len(words) > most:
        text += f" and {len(words) - most} more"
    return text


def alone(what: str, old: Collection[str], new: Collection[str]) -> Names:
    """Return in words, which begin with ``what``, the names that one script has alone."""
    sentences = []
    of_old = few([name for name in old if name not in new])
    of_new = few([name for name in new if name not in old])
    if of_old:
        sentences.append(f"{what} the old script alone: {of_old}")
    if of_new:
        sentences.append(f"{what} the new script alone: {of_new}")
    return sentences


def arrow(what: str, old: Any, new: Any) -> str:
    """Return in words what was, and what is now; "" if that is the same."""
    if old == new:
        return ""
    return f"{what} {old} -> {new}"


def changed_counts(old: Counter[str], new: Counter[str]) -> str:
    """Return in words of which kinds there is another number."""
    words = []
    for kind in old | new:
        before = old[kind]
        now = new[kind]
        if before != now:
            words.append(f"{kind} {before} -> {now}")
    return few(words)


def changes(old: Arguments, new: Arguments) -> Texts:
    """Return what both have by the same name and that differs: "old value -> new value" by name."""
    changed = {}
    for name, value in old.items():
        now = new.get(name, value)
        if value != now:
            changed[name] = f"{value} -> {now}"
    return changed


def digests(sketches: Sketches) -> Texts:
    """Return the digests by name."""
    return {name: sketch.digest for name, sketch in sketches.items()}


def per_rank(tell: Callable[[Record, Record], str]) -> Tell:
    """Decorator for what compares the records of one rank: return what it says of the first rank that differs."""

    def tell_of_ranks(old: Ranks, new: Ranks) -> str:
        for rank, records in enumerate(zip(old, new, strict=False)):
            words = tell(*records)
            if words and rank > 0:
                return f"{words} (on rank {rank})"
            if words:
                return words
        return ""

    return tell_of_ranks


# ------------------------------------------------------------------------------------------------------------- samples


def samples(old: Ranks, new: Ranks) -> str:
    """Compare what models were given: rank by rank, and as one set."""
    before = list(map(_digests, old))
    now = list(map(_digests, new))
    if before == now:
        return ""
    old_rows, old_total = _all_samples(old)
    new_rows, new_total = _all_samples(new)
    if old_total is not None and old_total == new_total:
        old_sizes = [len(record.samples) for record in old]
        new_sizes = [len(record.samples) for record in new]
        if old_sizes == new_sizes:
            return "the ranks were given the same samples in another order"
        # They are divided otherwise among ranks or batches, which is no cause.
        return ""
    rank = _first_difference(before, now)
    old_arguments = _arguments(old[rank])
    new_arguments = _arguments(new[rank])
    words = _changed_arguments(old_arguments, new_arguments)
    if words:
        return f"rank {rank} was given {words}; the other arguments are equal"
    if old_rows != new_rows:
        return f"the ranks were given {new_rows} samples, by the old script {old_rows}"
    if _has_losses(old) and not losses(old, new):
        # Lightning's forward takes the targets, too.
        return ""
    return f"rank {rank} was given other samples (another sampler, seed or preparation of data?)"


def _first_difference(old: list[Names], new: list[Names]) -> int:
    """Return the first rank of which two lists differ; 0 if one is longer, and that is all."""
    for rank, pair in enumerate(zip(old, new, strict=False)):
        before, now = pair
        if before != now:
            return rank
    return 0


def _digests(record: Record) -> Names:
    return [batch.digest for batch in record.samples]


def _all_samples(ranks: Ranks) -> tuple[int, int | None]:
    """Return how many samples the ranks were given, and the sum of their digests; None if some are not in rows."""
    rows = 0
    total = 0
    complete = True
    for batch in _batches(ranks):
        rows += batch.rows
        total += int(batch.total, 16)
        if not batch.rows:
            complete = False
    if not complete:
        return rows, None
    return rows, total % 2**128


def _batches(ranks: Ranks) -> Iterator[Samples]:
    for record in ranks:
        yield from record.samples


def _arguments(record: Record) -> Texts:
    if not record.samples:
        return {}
    return record.samples[0].arguments


def _changed_arguments(old: Texts, new: Texts) -> str:
    """Return which arguments of a forward differ, if others do not."""
    changed = changes(old, new)
    shared = old.keys() & new.keys()
    if len(changed) == len(shared):
        return ""
    words = [f"another argument {name}" for name in changed]
    for name in old:
        if name not in new:
            words.append(f"no argument {name}")
    for name in new:
        if name not in old:
            words.append(f"an argument {name} more")
    return few(words)


def computed(old: Ranks, new: Ranks) -> str:
    """Compare the dtypes and modes that models have computed in."""
    return arrow("models put out", _computed(old), _computed(new))


def _computed(ranks: Ranks) -> str:
    kinds = {batch.computed for batch in _batches(ranks)}
    return " and ".join(sorted(kinds))


# ---------------------------------------------------------------------------------------------------------- optimizers


def groups(old: Ranks, new: Ranks) -> str:
    """Compare the numbers of groups, where it is not known which parameter is in which."""
    before = old[0]
    now = new[0]
    if before.fact("member") and now.fact("member"):
        return ""
    return arrow("groups of parameters", len(before.groups), len(now.groups))


@per_rank
def settings(old: Record, new: Record) -> str:
    """Compare what the optimizers' groups say of each parameter."""
    if old.groups == new.groups and old.facts == new.facts:
        # Most steps end here.
        return ""
    before = _settings_by_name(old)
    now = _settings_by_name(new)
    shared = [name for name in before if name in now]
    changed = defaultdict(list)  # -> the parameters, or groups
    for name in shared:
        for change in _changed_settings(before[name], now[name]):
            changed[change].append(name)
    words = []
    for (key, values), names in changed.items():
        owner = _owner(names, shared, old.fact("member"))
        # The settings that they had are those of another group now, and what they have another one had.
        moved = all(before[name] in new.groups and now[name] in old.groups for name in names)
        if moved:
            owner = f"{few(names)} (moved to another group)"
        words.append(f"{key} of {owner} {values}")
    return few(words)


def _owner(names: Names, shared: Names, group_of: Texts) -> str:
    """Return in words whose setting has changed: whole groups by their numbers, else parameters by name."""
    numbers = {group_of.get(name, name) for name in names}
    in_groups = [name for name in shared if group_of.get(name) in numbers]
    if len(in_groups) > len(names):
        return few(names)
    listed = ", ".join(sorted(numbers))
    return f"group {listed}"


def _settings_by_name(record: Record) -> dict[str, Arguments]:
    """Return settings by parameter that is stepped, or by group where those are not known."""
    group_of = record.fact("member")
    by_name: dict[str, Arguments] = {}
    if not group_of:
        for number, group in enumerate(record.groups):
            by_name[str(number)] = group
        return by_name
    for name in _stepped(record):
        number = int(group_of[name])
        by_name[name] = record.groups[number]
    return by_name


def _changed_settings(old: Arguments, new: Arguments) -> Iterator[Change]:
    """Yield settings that both have and that differ: another release, or another class, has further ones."""
    shared = old.keys() & new.keys() - KERNELS
    keys = sorted(shared)
    if old.get("optimizer") != new.get("optimizer"):
        # Another class has other defaults, which say nothing.
        keys = ["optimizer", "lr"]
    for key in keys:
        if key not in shared:
            continue
        before = old[key]
        now = new[key]
        if not _equal(before, now):
            yield key, f"{before} -> {now}"


def _equal(one: Any, other: Any) -> bool:
    if repr(one) == repr(other):
        # Texts are equal for NaN, too.
        return True
    if isinstance(one, float) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=SAME)
    return bool(one == other)


def _stepped(record: Record) -> Names:
    """Return the parameters that optimizers step; a frozen one is not, though a group may have it."""
    trained = record.fact("trained")
    return [name for name in record.fact("member") if trained.get(name) != "frozen"]


@per_rank
def members(old: Record, new: Record) -> str:
    """Compare which parameters are stepped."""
    if not old.fact("member") or not new.fact("member"):
        return ""
    before = {*_stepped(old)}
    now = {*_stepped(new)}
    words = [*_not_stepped(before - now, new, "new")]
    words += _not_stepped(now - before, old, "old")
    return "; ".join(words)


def _not_stepped(names: set[str], record: Record, side: str) -> Iterator[str]:
    """Yield in words why no optimizer steps some parameters."""
    reasons = defaultdict(list)
    trained = record.fact("trained")
    for name in sorted(names):
        reason = "in no group of an optimizer"
        if trained.get(name) == "frozen":
            reason = "frozen"
        reasons[reason].append(name)
    for reason, unstepped in sorted(reasons.items()):
        verb = "is" if len(unstepped) == 1 else "are"
        yield f"{few(unstepped)} {verb} {reason} in the {side} script"


def states(old: Ranks, new: Ranks) -> str:
    """Compare of which parameters the optimizer has a state before its step; each rank may have that of some."""
    if _classes(old[0]) != _classes(new[0]):
        # Another class has another state, or none.
        return ""
    before = _states(old)
    now = _states(new)
    words = "script has lost the optimizer's state of"
    lost = _lost(before, now)
    if lost:
        return f"the new {words} {few(lost)}, or never had it"
    lost = _lost(now, before)
    if lost:
        return f"the old {words} {few(lost)}, or never had it"
    return ""


def _states(ranks: Ranks) -> dict[str, str]:
    """Return by parameter "there" if any rank has a state of it."""
    states: dict[str, str] = {}
    for record in ranks:
        for name, state in record.fact("state").items():
            states[name] = states.get(name) or state
    return states


def _lost(states: Texts, others: Texts) -> Names:
    """Return of what there are states, and none in the other script, which has the parameter."""
    return sorted(name for name, state in states.items() if state and others.get(name) == "")


def _classes(record: Record) -> set[Any]:
    return {group.get("optimizer") for group in record.groups}


@per_rank
def skipped(old: Record, new: Record) -> str:
    """Compare whether a scaler has left out the step."""
    before = "left out by the scaler" if old.skipped else "made"
    now = "left out by the scaler" if new.skipped else "made"
    return arrow("the step was", before, now)


# ------------------------------------------------------------------------------------------------- modules and buffers


def compare_fact(kind: str, words: str) -> Tell:
    """Return what compares a kind of fact by names that both scripts have."""

    @per_rank
    def tell(old: Record, new: Record) -> str:
        before = _known(old.fact(kind))
        now = _known(new.fact(kind))
        names_of_change = defaultdict(list)
        for name, change in changes(before, now).items():
            names_of_change[change].append(name or "the model itself")
        sentences = []
        for change, names in names_of_change.items():
            names.sort()
            sentences.append(f"{words} of {few(names)} {change}")
        return few(sentences)

    return tell


def _known(facts: Texts) -> Texts:
    """Return facts but those that nothing is known of, such as the dtype of an output without tensors."""
    return {name: fact for name, fact in facts.items() if fact}


@per_rank
def layers(old: Record, new: Record) -> str:
    """Compare the layers by their paths, those of other paths by their number."""
    before = old.fact("layer")
    now = new.fact("layer")
    if not before or not now:
        return ""
    of_old = _kinds_unlike(before, now)
    of_new = _kinds_unlike(now, before)
    words = changed_counts(of_old, of_new)
    # Of each kind there are as many, at other paths.
    if not words:
        moved = changes(before, now)
        words = few(moved.values())
    return words and f"layers: {words}"


def _kinds_unlike(layers: Texts, others: Texts) -> Counter[str]:
    """Count the kinds of layers that are another kind, or nothing, at the same path of the other script."""
    kinds: Counter[str] = Counter()
    for path, kind in layers.items():
        if others.get(path) != kind:
            kinds[kind] += 1
    return kinds


@per_rank
def buffers(old: Record, new: Record) -> str:
    """Compare which buffers there are, but copies of the weights, which are compared over all steps."""
    if not old.weights or not new.weights:
        return ""
    words = alone("buffers of", _buffers(old), _buffers(new))
    return "; ".join(words)


def _buffers(record: Record) -> Names:
    names = sorted(record.buffers)
    return [name for name in names if not name.startswith(COPY)]


def broadcast(old: Ranks, new: Ranks) -> str:
    """Look for buffers that are not broadcast: they differ on other ranks than rank 0 alone."""
    if len(old) != len(new):
        return ""
    for rank, record in enumerate(old):
        before = digests(record.buffers)
        now = digests(new[rank].buffers)
        changed = sorted(changes(before, now))
        if changed and rank == 0:
            return ""
        if changed:
            why = "broadcast_buffers=False in one of the two?"
            return f"buffers of rank {rank} alone differ ({why}): {few(changed)}"
    return ""


# ----------------------------------------------------------------------------------------------- losses, random numbers


def backwards(old: Ranks, new: Ranks) -> str:
    """Compare the numbers of backward passes."""
    before = old[0].losses
    now = new[0].losses
    return arrow("backward passes", len(before), len(now))


def losses(old: Ranks, new: Ranks) -> str:
    """Compare sums of a step's losses, of each rank or, on another number of ranks, their means."""
    if not _has_losses(old) or not _has_losses(new):
        # One of them calls no backward that is known of.
        return ""
    before = [sum(record.losses) for record in old]
    now = [sum(record.losses) for record in new]
    if len(old) != len(new):
        before = [sum(before) / len(old)]
        now = [sum(now) / len(new)]
    for one, other in zip(before, now, strict=True):
        both_nan = math.isnan(one) and math.isnan(other)
        if both_nan or math.isclose(one, other, rel_tol=SAME_LOSS):
            continue
        return f"loss {one!r} -> {other!r}"
    return ""


def means(old: Ranks, new: Ranks) -> str:
    """Look for losses that one script weighs by what each rank or micro-batch has, such as tokens, and the other not.

    A mean over all tokens weighs the mean of each part by its share of the tokens, and those weights are 1 on average.
    """
    if list(map(_digests, old)) != list(map(_digests, new)):
        return ""
    before = _losses(old)
    now = _losses(new)
    if len(before) != len(now):
        return ""
    side = "new"
    weights = _weights(now, before)
    if not weights:
        side = "old"
        weights = _weights(before, now)
    if not weights:
        return ""
    return (
        f"the {side} script alone weighs the losses of ranks or micro-batches, by {few(weights)}, which is 1 on "
        "average: a mean over all tokens (points, pixels), where the other has a mean of means"
    )


def _losses(ranks: Ranks) -> list[float]:
    losses = []
    for record in ranks:
        losses += record.losses
    return losses


def _weights(weighted: Sequence[float], plain: Sequence[float]) -> Names:
    """Return in words how many times as large each loss is; none if that is not 1 on average, or is 1 for each."""
    total = 0.0
    largest = 0.0
    words = []
    for loss, unweighted in zip(weighted, plain, strict=True):
        if unweighted == 0:
            return []
        weight = loss / unweighted
        total += weight
        largest = max(largest, weight)
        words.append(f"{weight:.3g}")
    # Neither is true of NaN.
    is_mean = abs(total - len(words)) < SAME_MEAN * len(words)
    if is_mean and largest > 1 + UNEQUAL:
        return words
    return []


def _has_losses(ranks: Ranks) -> bool:
    return any(record.losses for record in ranks)


def random(old: Ranks, new: Ranks) -> str:
    """Compare the states of the random generators."""
    if len(old) != len(new):
        return ""
    why = "dropout, shuffling or augmentation in one of the two?"
    for before, now in zip(old, new, strict=True):
        if before.random != now.random:
            return f"other random numbers have been drawn ({why})"
    return ""


modes = compare_fact("mode", "mode")
counts = compare_fact("count", "number")
outputs = compare_fact("output", "dtype of the output")
# What is never different of the same training, whatever the weights are.
FACTS: tuple[Tell, ...] = (
    settings,
    members,
    counts,
    skipped,
    layers,
    modes,
    outputs,
    buffers,
)
