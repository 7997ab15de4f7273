"""The search: from a fixed set of usual plans to finer ones, each judged by a simulation.

It is greedy and has no chance in it: the same model and settings give the same plans in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fsshard.backends import backend_class
from fsshard.backends.facts import Tunable
from fsshard.errors import FsshardError
from fsshard.planning.plan import Plan
from fsshard.planning.policies import resolve_checkpointing
from fsshard.simulation.tuning.evaluator import Judge
from fsshard.simulation.tuning.result import Tried
from fsshard.simulation.tuning.search_space import (
    DEFAULT,
    Candidate,
    Choice,
    Settings,
    classes,
    recomputations,
    units,
    written,
)
from fsshard.simulation.worker import SimulatorDied

__all__ = ["Search"]

PATIENCE, LESS = 2, 0.99
"""Finer units are tried until so many have not brought the peak down to this share of what it was."""

WORK, FEWEST, MOST = 24_000, 12, 40
"""How many plans are simulated if nobody says: so many operators' worth of forwards, within limits. Not so many
seconds' worth: the same search finds the same everywhere."""


@dataclass(kw_only=True)
class Search:
    """One search.

    Attributes:
        judge: of the candidates.
        fixed: arguments that are not searched.
        limit: simulations after which only those are made that always are; None: as many as the model's size allows.
        tried: what was simulated, in order.
        aliases: names of candidates that are always tried -> the plans that they turned out to be.
        failed: candidates that cannot be, and why.
    """

    judge: Judge
    fixed: Settings
    limit: int | None
    tried: list[Tried] = field(default_factory=list)
    aliases: dict[str, Tried] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    error: FsshardError | None = None

    def __post_init__(self) -> None:
        self._seen: dict[Any, Tried | None] = {}
        self._space = Tunable()  # of the backend that is searched, and whether it divides parameters
        self._divides = False
        self.profile = self.judge.profile()
        self._most = self.limit or max(FEWEST, min(MOST, WORK // self.profile.operators))
        always, others = units(self.profile)
        again = recomputations(self.profile)
        if given := self.fixed.get("auto_wrap_policy"):
            always, others = {"as given": given}, []
        if "activation_checkpointing" in self.fixed:
            again = []
        self.always, self.others, self.again = always, others, again
        self._plans = self._planned()

    def run(self, backends: list[str]) -> None:
        """Search under each backend."""
        for backend in backends:
            self._named = f"{backend}, " if len(backends) > 1 else ""
            start = Candidate(backend=backend, settings=dict(self.fixed))
            self._space = backend_class(backend, self.judge.ranks).facts.tunable
            self._divides = backend_class(backend, self.judge.ranks).facts.divides == "elements"
            if self._divides:
                self._sharded(start)
            else:
                self._replicated(start)

    # ------------------------------------------------------------------------------------------ the steps

    def _replicated(self, start: Candidate) -> None:
        """Units mean nothing there: buckets and recomputation are left."""
        first = [self._consider(start, "default")]
        for name, options in self._space.variants.items():
            if not options.keys() & start.settings.keys():
                first.append(self._consider(start.changed(**_written(options)), name))
        for one in [one for one in first if one is not None]:
            for choice in self.again if _has_activations(one) else ():
                self._consider(one.candidate.changed(activation_checkpointing=choice))

    def _sharded(self, start: Candidate) -> None:
        known = [self._consider(start.changed(auto_wrap_policy=c), name) for name, c in self.always.items()]
        found = [one for one in known if one is not None]
        if not found:
            return
        if self.judge.on_gloo and (joined := self._joined()):
            for name, units_ in self.always.items():  # as wrap() does it there, so that the winner is no worse
                if name in ("auto", "as given"):
                    self._consider(start.changed(auto_wrap_policy=units_, **joined), f"{name}, small ones joined")
        leanest = _leanest(found)
        if _has_activations(leanest):
            found += self._all(leanest.candidate.changed(activation_checkpointing=c) for c in self.again)
        leanest = self._refined(_leanest(found))
        again = leanest.candidate.settings.get("activation_checkpointing")
        kinds = [*(one.candidate for one in known if one is not None), leanest.candidate]
        kept = _written(self._space.kept_gathered)
        if kept and not {*kept, "sharding_strategy"} & self.fixed.keys():
            self._all(kind.changed(**kept) for kind in self._with(kinds, again))
        self._all(self._with(kinds, again))
        if joined := self._joined():
            lean = sorted(self.tried, key=lambda one: (one.peak, one.cost))
            mine = [one.candidate for one in lean if one.candidate.backend == start.backend]
            self._all(candidate.changed(**joined) for candidate in mine)

    def _joined(self) -> Settings:
        """The option with which small units travel together, unless it is given or there is none."""
        joining = self._space.joining
        return {} if joining is None or joining.option in self.fixed else _written({joining.option: joining.value})

    def _refined(self, leanest: Tried) -> Tried:
        """Finer units, as long as that helps."""
        failures = 0
        finer = [c for c in self.others if self._count(c) > self._count(_units_of(leanest.candidate))]
        for choice in sorted(finer, key=self._count):
            before = len(self.tried)
            one = self._consider(leanest.candidate.changed(auto_wrap_policy=choice))
            if one is None or len(self.tried) == before:
                continue
            failures += one.peak >= LESS * leanest.peak
            leanest = min(leanest, one, key=lambda found: (found.peak, found.cost))
            if failures == PATIENCE:
                break
        return leanest

    def _with(self, kinds: list[Candidate], again: Choice | None) -> Iterator[Candidate]:
        for kind in kinds:
            if "activation_checkpointing" not in self.fixed:
                kind = kind.changed(activation_checkpointing=DEFAULT)
                yield kind
            if again is not None:
                yield kind.changed(activation_checkpointing=again)

    def _all(self, candidates: Iterable[Candidate]) -> list[Tried]:
        return [one for one in [self._consider(candidate) for candidate in candidates] if one is not None]

    # ------------------------------------------------------------------------------------------ one candidate

    def _planned(self) -> dict[tuple[str, str], Plan | str]:
        """All plans at once: the model is built once for them."""
        given = self.fixed.get("activation_checkpointing")
        blocks = self.again if given is None else [] if _its_units(given) else [given]
        wanted = {("auto_wrap_policy", c.code): c for c in [*self.always.values(), *self.others]}
        found = self._asked(wanted | {("activation_checkpointing", c.code): c for c in blocks})
        by_class: dict[str, Choice] = {}
        for choice in self.others:
            planned = found["auto_wrap_policy", choice.code]
            if isinstance(planned, Plan) and not self.profile.gathered_once(planned):
                kinds = self.profile.classes_of_units(planned)
                choice = classes(kinds) if kinds else choice
            by_class[choice.code] = choice
        self.others = list(by_class.values())
        wanted = {("auto_wrap_policy", code): choice for code, choice in by_class.items()}
        return found | self._asked({key: choice for key, choice in wanted.items() if key not in found})

    def _asked(self, wanted: dict[tuple[str, str], Choice]) -> dict[tuple[str, str], Plan | str]:
        found = self.judge.plans([{name: choice.value} for (name, _), choice in wanted.items()]) if wanted else []
        return dict(zip(wanted, found, strict=True))

    def _count(self, choice: Choice) -> int:
        planned = self._plans[("auto_wrap_policy", choice.code)]
        return 0 if isinstance(planned, str) else len(planned.units)

    def _consider(self, candidate: Candidate, name: str = "") -> Tried | None:
        """Simulate it, unless an equal plan was simulated, or it would gather a module several times."""
        planned = self._plan_of(candidate)
        if isinstance(planned, str):
            self.failed[candidate.code()] = planned
            return None
        joining = self._space.joining
        if joining is not None and joining.option not in candidate.settings:
            candidate = candidate.changed(**_written({joining.option: 0}))  # whatever wrap() does by itself
        key = self._key(candidate, *planned)
        if key not in self._seen:
            if not name and len(self.tried) >= self._most:
                return None
            if not name and "auto_wrap_policy" in candidate.settings and not self.profile.gathered_once(planned[0]):
                return None
            self._seen[key] = self._simulated(candidate, name, len(planned[1]))
        found = self._seen[key]
        if name and found is not None:
            self.aliases[f"{self._named}{name}"] = found
        return found

    def _shortest(self, candidate: Candidate) -> Candidate:
        """Without the option that joins units where that means nothing: its code is no longer than it must be."""
        planned, joining = self._plan_of(candidate), self._space.joining
        if joining is None or joining.option in self.fixed or isinstance(planned, str):
            return candidate
        apart, joined = (joining.travelling(planned[0], value, self.judge.ranks) for value in (0, joining.value))
        return candidate.changed(**{joining.option: DEFAULT}) if apart == joined else candidate

    def _plan_of(self, candidate: Candidate) -> tuple[Plan, tuple[str, ...]] | str:
        again = candidate.settings.get("activation_checkpointing", DEFAULT)
        planned = self._plans.get(("auto_wrap_policy", _units_of(candidate).code))
        if planned is None:  # without units of its own
            planned = next(iter(self._plans.values()))
        if _its_units(again) and isinstance(planned, Plan):
            return planned, tuple(unit.name for unit in planned.units[1:])
        recomputed = self._plans.get(("activation_checkpointing", again.code))
        for one in (planned, recomputed):
            if isinstance(one, str):
                return one
        assert isinstance(planned, Plan)
        return planned, tuple(recomputed.recomputed) if isinstance(recomputed, Plan) else ()

    def _key(self, candidate: Candidate, planned: Plan, recomputed: tuple[str, ...]) -> Any:
        joining = self._space.joining
        others = {"auto_wrap_policy", "activation_checkpointing", "" if joining is None else joining.option}
        options = {name: choice.code for name, choice in candidate.settings.items() if name not in others}
        groups = tuple(sorted(unit.name for unit in planned.units)) if self._divides else ()
        if joining is not None:
            value = candidate.settings[joining.option].value if joining.option in candidate.settings else 0
            groups = tuple(sorted(joining.travelling(planned, value, self.judge.ranks)))
        if self._space.root_stays and len(groups) == 1:
            kept = _written(self._space.kept_gathered)
            options = {name: code for name, code in options.items() if name not in kept or kept[name].code != code}
        return candidate.backend, groups, recomputed, tuple(sorted(options.items()))

    def _simulated(self, candidate: Candidate, name: str, recomputed: int) -> Tried | None:
        try:
            estimate = self.judge.estimate(candidate)
        except SimulatorDied:  # no candidate's fault, and what was found so far would pass for the best there is
            raise
        except FsshardError as error:
            self.failed[candidate.code()] = str(error)
            self.error = self.error or error
            return None
        one = Tried(
            candidate=self._shortest(candidate),
            name=f"{self._named}{name}" if name else "",
            recomputed=recomputed,
            estimate=estimate,
        )
        self.tried.append(one)
        return one


def _units_of(candidate: Candidate) -> Choice:
    return candidate.settings.get("auto_wrap_policy", Choice("auto", '"auto"'))


def _its_units(again: Choice) -> bool:
    """Return whether the plan's own units are recomputed, whichever these are."""
    return resolve_checkpointing(again.value).policy is True


def _written(options: Mapping[str, Any]) -> dict[str, Choice]:
    return {name: written(name, value) for name, value in options.items()}


def _leanest(found: list[Tried]) -> Tried:
    return min(found, key=lambda one: (one.peak, one.cost))


def _has_activations(one: Tried) -> bool:
    """Return whether recomputation could bring the peak down: the optimizer's step has no activations."""
    return one.estimate.moment.phase != "step"
