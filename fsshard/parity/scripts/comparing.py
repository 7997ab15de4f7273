"""Compares two recorded scripts: is it the same training, and if not, what was different before the weights were?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fsshard.errors import ConfigurationError
from fsshard.parity.comparing import cell_of, compare_traces
from fsshard.parity.plain import plain
from fsshard.parity.render import ParityReport
from fsshard.parity.report import Cell, Divergence, StepReport, difference
from fsshard.parity.scripts.causes import averages, causes, first, ranks_apart
from fsshard.parity.scripts.names import align_names
from fsshard.parity.scripts.step_causes import FACTS, changes, digests, losses
from fsshard.parity.scripts.store import Record, ScriptTrace, Sketches, read_tensor, tensor_file
from fsshard.parity.trace import INITIAL, RankTrace, Step, Texts, Trace
from fsshard.parity.trace import changes as changes_of_environment
from fsshard.planning.text import counted

# Quantities whose numbers make the verdict, beside the facts of step_causes.py.
DECIDING = ("initial weight", "weight", "state", "buffer")
HINT = (
    "hint: if this may be rounding alone, such as sums in another order, record the old script again with fsshard "
    "trace --repeat 8; its extra runs, rounded at random, bound what rounding changes"
)
# The largest distance among fewer runs says too little about the next one's.
LEAST_REPEATS = 4
ByQuantity = dict[str, Sketches]
MOST_RENAMED = 4  # lines of names that moved


@dataclass(kw_only=True)
class ScriptReport:
    """The result of :func:`compare_scripts`."""

    sentence: str  # for a pull request
    verdict: str  # "exact", "bound" or "different"
    steps: list[int]  # numbers of those that were compared
    causes: list[str]  # what else differs, up to the first step whose weights do; of a same training what does in vain
    renamed: Texts  # parameters of the old script -> their names in the new one
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
        lines = [self.sentence]
        cell = self.report.cells[0]
        when = "before that" if cell.verdict == "different" else "also different"
        for cause in self.causes:
            lines.append(f"{when}: {cause}")
        moved = [f"renamed: {old} is {new} now" for old, new in self.renamed.items()]
        lines += moved[:MOST_RENAMED]
        more = len(moved) - MOST_RENAMED
        # All of them are in to_json().
        if more > 0:
            lines.append(f"renamed: {more} more")
        for change in self.report.changes:
            lines.append(f"environment: {change}")
        lines += filter(None, [self.looked_at, self.hint])
        return "\n".join(lines)


@dataclass(kw_only=True)
class Pair:
    """Two records, and the steps that both have."""

    old: ScriptTrace
    new: ScriptTrace
    steps: list[int]
    weighed: list[int]  # of those the ones at which both have weights

    @property
    def last(self) -> tuple[Record, Record]:
        """Return rank 0's records of the last step at which both have weights."""
        number = self.weighed[-1]
        return self.old.at(number)[0], self.new.at(number)[0]

    @property
    def same_ranks(self) -> bool:
        """Return whether both were recorded on as many ranks."""
        return len(self.old.ranks) == len(self.new.ranks)


def compare_scripts(
    old: str | Path,
    new: str | Path,
    *,
    repeats: Sequence[str | Path] = (),
    exactly: bool = False,
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
    before = ScriptTrace.load(old)
    draws = []
    if not exactly:
        draws += before.repeats
        draws += map(ScriptTrace.load, repeats)
    if 0 < len(draws) < LEAST_REPEATS:
        raise ConfigurationError(
            f"expected at least {LEAST_REPEATS} repeats of the old script, got {len(draws)}; record them: fsshard "
            "trace --repeat 8"
        )
    pair = _pair(before, ScriptTrace.load(new))
    _check_repeats(pair, draws)
    # From here on both scripts' parameters have the old script's names.
    renamed = align_names(pair.old, pair.new, pair.weighed[-1])
    cell = _compared(pair, draws, renamed)
    report = _report(pair, cell, renamed, rounds=bool(draws))
    # Weights that are apart may be so by rounding, if nothing else is known to differ.
    unexplained = cell.first_divergence is not None and not report.causes
    if unexplained and not report.ok and not draws and not exactly:
        report.hint = HINT
    return report


def _pair(old: ScriptTrace, new: ScriptTrace) -> Pair:
    steps = [number for number in old.steps if number in new.steps]
    weighed = []
    for number in steps:
        sides = [one.at(number)[0] for one in (old, new)]
        if all(record.weights for record in sides):
            weighed.append(number)
    if not weighed:
        raise ConfigurationError(
            f"{old.folder} and {new.folder} have no step in common at which weights are recorded; record both with "
            "the same --steps and --every"
        )
    return Pair(old=old, new=new, steps=steps, weighed=weighed)


def _check_repeats(pair: Pair, draws: Sequence[ScriptTrace]) -> None:
    """Raise unless the repeats have recorded what the old script has."""
    for draw in draws:
        if not pair.old.recorded(pair.steps) <= draw.recorded(pair.steps):
            raise ConfigurationError(
                f"{draw.folder} is no repeat of {pair.old.folder}, which has other ranks, steps or quantities; record "
                "both on as many ranks, with the same --steps, --every and --state"
            )


# ------------------------------------------------------------------------------------------------------------- numbers


def _compared(pair: Pair, draws: Sequence[ScriptTrace], renamed: Texts) -> Cell:
    """Return the verdict on all steps, by the comparator of recorded trainings."""
    old = _as_trace(pair.old, pair)
    new = _as_trace(pair.new, pair)
    drawn = []
    if draws:
        # The old script's own run is one of those whose distances bound what rounding does.
        drawn.append(old.ranks)
    for draw in draws:
        trace = _as_trace(draw, pair)
        drawn.append(trace.ranks)
    reports = compare_traces(old, new, regrouped=not pair.same_ranks, draws=drawn, exactly=not draws)
    cell = cell_of(list(map(_decisive, reports)), old.parameters)
    # Thousands of parameters in thousands of steps are equal.
    cell.steps = list(map(_unequal, reports))
    cell.backend = pair.new.name
    cell.world_size = len(pair.new.ranks)
    if cell.first_divergence is not None:
        cell.first_divergence = _in_script(cell.first_divergence, pair, renamed)
    return cell


def _decisive(report: StepReport) -> StepReport:
    """Return the report with the quantities that make the verdict alone."""
    decisive = {}
    for quantity, differences in report.differences.items():
        if quantity in DECIDING:
            decisive[quantity] = differences
    return replace(report, differences=decisive)


def _unequal(report: StepReport) -> StepReport:
    """Return the report with what is not equal alone."""
    unequal = {}
    for quantity, differences in report.differences.items():
        unequal[quantity] = {name: each for name, each in differences.items() if each.verdict != "exact"}
    return replace(report, differences=unequal)


def _in_script(parting: Divergence, pair: Pair, renamed: Texts) -> Divergence:
    """Return it by the script's own number of the step, and with the elements, where tensors are kept."""
    step = pair.steps[parting.step]
    kept_at = INITIAL if parting.quantity == "initial weight" else step
    new_name = renamed.get(parting.name, parting.name)
    old_file = tensor_file(pair.old.folder, kept_at, parting.name)
    new_file = tensor_file(pair.new.folder, kept_at, new_name)
    if not old_file.is_file() or not new_file.is_file():
        return replace(parting, step=step)
    expected = read_tensor(old_file)
    got = read_tensor(new_file)
    exact = difference(expected, got, rank=parting.rank)
    exact = replace(exact, verdict=parting.difference.verdict)
    return replace(parting, step=step, difference=exact)


def _as_trace(one: ScriptTrace, pair: Pair) -> Trace:
    """Return the steps as those of a recorded training, with what both sides have recorded."""
    header = one.ranks[0].header
    ranks = [RankTrace(initial=rank.initial) for rank in one.ranks]
    for number in pair.steps:
        for record, trace in zip(one.at(number), ranks, strict=True):
            sketches = _shared_sketches(record.sketches, pair, number)
            step = Step(batches=[], loss=sum(record.losses), norm=0.0, sketches=sketches)
            trace.steps.append(step)
    return Trace(
        environment=header.environment,
        commit=header.commit,
        device=header.device,
        world_size=header.world_size,
        recipe={},
        backend=one.name,
        detail="digests",
        parameters=[*one.initial],
        ranks=ranks,
    )


def _shared_sketches(sketches: ByQuantity, pair: Pair, number: int) -> ByQuantity:
    """Return those of quantities that rank 0 of both scripts has recorded."""
    old = pair.old.at(number)[0]
    new = pair.new.at(number)[0]
    shared = {}
    for quantity, of_old in old.sketches.items():
        of_new = new.sketches.get(quantity)
        if not of_old or not of_new:
            continue
        names = {*sketches[quantity]}
        # A buffer that a forward makes, or that an engine keeps otherwise, decides nothing.
        if quantity == "buffer":
            names &= of_old.keys() & of_new.keys()
        shared[quantity] = {name: sketch for name, sketch in sketches[quantity].items() if name in names}
    return shared


# -------------------------------------------------------------------------------------------------------------- report


def _report(pair: Pair, cell: Cell, renamed: Texts, *, rounds: bool) -> ScriptReport:
    report = ParityReport(
        recipe=pair.new.name,
        reference=pair.old.name,
        steps=len(pair.steps),
        cells=[cell],
    )
    old_header = pair.old.ranks[0].header
    new_header = pair.new.ranks[0].header
    report.changes = changes_of_environment(old_header.environment, new_header.environment)
    verdict, sentence = _verdict(pair, cell, rounds)
    compared = pair.steps
    parting = cell.first_divergence
    if cell.verdict == "different" and parting is not None:
        compared = [number for number in compared if number <= parting.step]
    return ScriptReport(
        sentence=sentence,
        verdict=verdict,
        steps=pair.steps,
        causes=causes(pair.old, pair.new, compared, same=cell.verdict != "different"),
        renamed=renamed,
        report=report,
        looked_at=_looked_at(pair),
    )


def _verdict(pair: Pair, cell: Cell, rounds: bool) -> tuple[str, str]:
    """Return the verdict, and the sentence for it."""
    names = f"{pair.old.name} and {pair.new.name} on {_ranks(pair)}"
    parting = cell.first_divergence
    if cell.verdict == "different" and parting is not None:
        return "different", f"NOT the same training: {names} part at {parting}."
    rounded = cell if rounds else None
    missing = _missing(pair) or _unlike(pair, rounded)
    count = counted(len(pair.weighed), "step")
    if missing:
        return "different", f"NOT shown to be the same training: {missing}; {count} agree."
    if len(pair.weighed) < len(pair.steps):
        after = f"nothing is shown of weights after step {pair.weighed[-1]}"
        count = f"{len(pair.weighed)} of {len(pair.steps)} steps"
        count = f"{count}; {after}"
    what = "weights"
    if _have_states(pair):
        what = "weights and optimizer states"
    how = "within what rounding does to the old script"
    if cell.verdict == "exact":
        how = "to the last bit"
    size = f"{len(pair.old.initial)} parameters"
    return cell.verdict, f"The same training: {names} have equal {what} {how}, {size} in {count}."


def _have_states(pair: Pair) -> bool:
    return all(record.sketches.get("state") for record in pair.last)


def _ranks(pair: Pair) -> str:
    size = len(pair.old.ranks)
    if pair.same_ranks:
        return counted(size, "rank")
    return f"{size} and {len(pair.new.ranks)} ranks"


def _missing(pair: Pair) -> str:
    """Return why equal weights do not show that it is the same training; "" if they do."""
    old = pair.old
    new = pair.new
    for one in (old, new):
        if one.ended:
            return f"the record of {one.name} ended while it went on ({one.ended[0]})"
    if old.steps != new.steps:
        return f"{old.name} has recorded {_steps(old)}, {new.name} {_steps(new)}"
    uneven = _uneven(pair)
    if uneven:
        return uneven
    if not pair.same_ranks:
        # Rank 0 speaks for all.
        apart = [ranks_apart(one, pair.weighed) for one in (old, new)]
        if any(apart) and not all(apart):
            return "".join(apart)
    last = digests(pair.last[0].weights)
    if not changes(digests(old.initial), last):
        return "no step has changed a weight: does the optimizer have the model's parameters, and a learning rate?"
    return ""


def _steps(one: ScriptTrace) -> str:
    steps = one.steps
    return f"{len(steps)} steps ({steps[0]} to {steps[-1]})"


def _uneven(pair: Pair) -> str:
    """Return what differs in the steps that some ranks have alone; "" if nothing does."""
    if pair.same_ranks:
        for rank in range(len(pair.old.ranks)):
            words = _uneven_on(pair, rank)
            if words:
                return words
        return ""
    for one in (pair.old, pair.new):
        steps = {*one.steps}
        lengths = {len(rank.steps) for rank in one.ranks}
        if lengths != {len(steps)}:
            return f"the ranks of {one.name} have not all recorded the same steps"
    return ""


def _steps_alone(one: ScriptTrace, rank: int) -> list[int]:
    """Return the steps that a rank has and not all others do."""
    return sorted(one.ranks[rank].steps.keys() - {*one.steps})


def _uneven_on(pair: Pair, rank: int) -> str:
    old = _rank_alone(pair.old, rank)
    new = _rank_alone(pair.new, rank)
    steps = _steps_alone(pair.old, rank)
    if steps != _steps_alone(pair.new, rank):
        counts = f"{len(old.steps)} steps of {old.name}, {len(new.steps)} of {new.name}"
        return f"rank {rank} has recorded {counts}"
    if not steps:
        return ""
    alone = Pair(old=old, new=new, steps=steps, weighed=steps)
    cell = _compared(alone, [], {})
    words = str(cell.first_divergence)
    if cell.first_divergence is None:
        words = _unlike(alone, None)
    if not words:
        return ""
    return f"in the steps that rank {rank} has alone: {words}"


def _rank_alone(one: ScriptTrace, rank: int) -> ScriptTrace:
    return replace(one, ranks=[one.ranks[rank]], repeats=[])


def _unlike(pair: Pair, rounded: Cell | None) -> str:
    """Return what differs although the weights do not; "" if nothing does.

    ``rounded`` has the differences of losses that may round, as weights may.
    """
    compared = FACTS if rounded else (*FACTS, losses)
    for tell in compared:
        step, words = first(tell, pair.old, pair.new, pair.steps)
        if words:
            return f"step {step}: {words}"
    if rounded:
        words = _unlike_loss(pair, rounded)
        if words:
            return words
    return averages(pair.old, pair.new)


def _unlike_loss(pair: Pair, rounded: Cell) -> str:
    """Return of which step the loss differs by more than rounding; "" if none does."""
    for number, step in zip(pair.steps, rounded.steps, strict=False):
        losses_of_step = step.differences.get("loss", {})
        for loss in losses_of_step.values():
            if loss.verdict == "different":
                values = f"{loss.expected} -> {loss.got}"
                return f"step {number}: loss {values}, more than rounding does"
    return ""


def _looked_at(pair: Pair) -> str:
    """Return in a line what the verdict is over, and what it is not."""
    # A verdict says what it is not about, lest it be taken for more.
    unseen = ["what is in no model or optimizer", "changes after the last step"]
    if not _have_states(pair):
        unseen.append("optimizer states (--state)")
    if not pair.same_ranks:
        unseen.append("values of buffers")
    if not all(record.fact("member") for record in pair.last):
        unseen.append("which parameters are stepped")
    rank = pair.old.ranks[0]
    engines = [model.engine for model in rank.models]
    optimizers = set()
    for record in rank.steps.values():
        for group in record.groups:
            optimizers.add(str(group.get("optimizer", "?")))
    buffers = len(pair.last[0].buffers)
    model = f"{_listed(engines)} with {len(rank.initial)} parameters and {buffers} buffers"
    optimizer = _listed(sorted(optimizers))
    return f"compared: {model}, {optimizer}, losses, settings, modes, layers; not compared: {_listed(unseen)}"


def _listed(words: list[str]) -> str:
    return ", ".join(dict.fromkeys(words))
