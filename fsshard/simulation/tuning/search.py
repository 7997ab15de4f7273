"""The search: from a fixed set of usual plans to finer ones, each judged by a simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from fsshard.backends import backend_class
from fsshard.backends.facts import Tunable
from fsshard.errors import FsshardError
from fsshard.planning.plan import Plan
from fsshard.simulation.estimating import estimate_of, job_of, mesh_shape
from fsshard.simulation.result import Estimate
from fsshard.simulation.simulation import Job
from fsshard.simulation.tuning.result import Tried
from fsshard.simulation.tuning.search_space import (
    DEFAULT,
    Candidate,
    Choice,
    ModelProfile,
    Settings,
    classes,
    plan_of,
    profile_of,
    recomputations,
    units,
    written,
)
from fsshard.simulation.worker import Simulator, SimulatorDied, run_job

__all__ = ["Judge", "Search"]

Progress = Callable[[int, str], None]

WORLDS_AHEAD = 3
"""How often the ranks are doubled to find out how many would do."""

PATIENCE, LESS = 2, 0.99
"""Finer units are tried until so many have not brought the peak down to this share of what it was."""

WORK, FEWEST, MOST = 24_000, 12, 40
"""How many plans are simulated if nobody says: so many operators' worth of forwards, within limits. Not so many
seconds' worth: the same search finds the same everywhere."""


class Judge:
    """Asks the process that simulates about candidates.

    Args:
        asked: what is trained, and where: arguments of :func:`~fsshard.simulation.estimating.job_of` but for the
            backend and the settings.
        simulator: the process.
        progress: called with each simulation's number and text.
    """

    def __init__(self, asked: Mapping[str, Any], simulator: Simulator, progress: Progress | None = None) -> None:
        self._asked, self._simulator, self._progress = asked, simulator, progress
        self._done = 0

    @property
    def ranks(self) -> int:
        """Return the number of ranks that share a unit."""
        return mesh_shape(self._asked["device_mesh"], self._asked["world_size"])[-1]

    @property
    def on_gloo(self) -> bool:
        """Return whether ``wrap`` joins small units by itself."""
        return self._asked["device"] == "cpu" and self.ranks > 1

    def job(self, backend: Any, settings: Mapping[str, Any], **changed: Any) -> Job:
        """Return one simulation, checked, with some arguments changed."""
        asked = {**self._asked, **changed}
        plain = {name: value for name, value in settings.items() if name not in ("mixed_precision", "cpu_offload")}
        if "mixed_precision" in settings:
            asked["changes"] = {**asked["changes"], "precision": settings["mixed_precision"]}
        return job_of(**asked, backend=backend, settings=plain)

    def profile(self) -> ModelProfile:
        """Return what the search has to know of the model."""
        self._tell("the model")
        profile: ModelProfile = self._answer(profile_of, self.job("none", {}, cpu_offload=False))
        return profile

    def plan(self, **settings: Any) -> Plan | str:
        """Return the plan for settings of wrap(), or what is wrong with them."""
        planned: Plan | str = self._answer(plan_of, self.job("none", {}, cpu_offload=False), settings)
        return planned

    def estimate(self, candidate: Candidate) -> Estimate:
        """Simulate what the candidate needs and sends."""
        self._tell(candidate.code())
        estimate = self._estimate(candidate.backend, candidate.arguments())
        self._done += 1
        return estimate

    def ways_down(self, leanest: Tried, bound: int) -> Iterator[tuple[str, int]]:
        """Yield what lowers the peak, and to how many bytes: more ranks until they do, a narrower dtype, offloading."""
        asked, candidate = self._asked, leanest.candidate
        chosen, arguments = backend_class(candidate.backend, self.ranks), candidate.arguments()
        tried: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        if "mixed_precision" not in arguments:
            tried.append(("mixed_precision='bf16'", {**arguments, "mixed_precision": "bf16"}, {}))
        if chosen.facts.divides == "elements" and asked["device"] == "cuda" and not asked["cpu_offload"]:
            tried.append(("cpu_offload=True", arguments, {"cpu_offload": True}))
        for text, settings, changed in tried:
            try:
                yield text, self._estimate(candidate.backend, settings, **changed).interval[1]
            except SimulatorDied:
                raise
            except FsshardError:  # not under this backend, or not with this model: no way
                continue
        if chosen.facts.divides == "nothing" or asked["device_mesh"] is not None:
            return
        for power in range(1, WORLDS_AHEAD + 1):
            ranks = asked["world_size"] * 2**power
            peak = self._estimate(candidate.backend, arguments, world_size=ranks).interval[1]
            if peak <= bound or power == WORLDS_AHEAD:
                yield f"world_size={ranks}", peak
                return

    def _estimate(self, backend: str, arguments: Mapping[str, Any], **changed: Any) -> Estimate:
        job = self.job(backend, arguments, **changed)
        return estimate_of({**self._asked, **changed}["world_size"], job, self._answer(run_job, job))

    def _tell(self, text: str) -> None:
        if self._progress is not None:
            self._progress(self._done, text)

    def _answer(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._simulator.ask(function, *arguments)


class Search:
    """A greedy search from usual plans to finer ones, with no chance in it.

    Args:
        judge: of the candidates.
        fixed: arguments that are not searched.
        limit: simulations after which only those are made that always are; None: as many as the model's size allows.
    """

    def __init__(self, judge: Judge, fixed: Settings, limit: int | None) -> None:
        self.judge, self.fixed = judge, fixed
        self.tried: list[Tried] = []  # in order
        self.aliases: dict[str, Tried] = {}  # names of candidates that are always tried -> what they turned out to be
        self.failed: dict[str, str] = {}  # candidates that cannot be, and why
        self.error: FsshardError | None = None  # the first one of a simulation
        self._seen: dict[Any, Tried | None] = {}
        self._plans: dict[tuple[str, str], Plan | str] = {}
        self._space = Tunable()  # of the backend that is searched, and whether it divides parameters
        self._divides = False
        self.profile = judge.profile()
        self._most = limit or max(FEWEST, min(MOST, WORK // self.profile.operators))
        always, others = units(self.profile)
        again = recomputations(self.profile)
        if given := fixed.get("auto_wrap_policy"):
            always, others = {"as given": given}, []
        if "activation_checkpointing" in fixed:
            again = []
        self.always, self.others, self.again = always, self._unrepeated(others), again

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
        # Units mean nothing there: buckets and recomputation are left.
        first = [(start, "default")]
        for name, options in self._space.variants.items():
            if not options.keys() & start.settings.keys():
                first.append((start.changed(**_written(options)), name))
        for one in self._all(first):
            for choice in self.again if _has_activations(one) else ():
                self._consider(one.candidate.changed(activation_checkpointing=choice))

    def _sharded(self, start: Candidate) -> None:
        usual = self._all((start.changed(auto_wrap_policy=c), name) for name, c in self.always.items())
        if not usual:
            return
        joined = self._joined()
        for name in {"auto", "as given"} & self.always.keys() if joined and self.judge.on_gloo else ():
            # As wrap() does it there by itself, so that the winner is no worse.
            self._consider(start.changed(auto_wrap_policy=self.always[name], **joined), f"{name}, small ones joined")
        leanest, recomputing = _leanest(usual), list[Tried]()
        if _has_activations(leanest):
            recomputing = self._all((leanest.candidate.changed(activation_checkpointing=c), "") for c in self.again)
        leanest = self._refined(_leanest([*usual, *recomputing]))
        again = leanest.candidate.settings.get("activation_checkpointing")
        kinds = [*(one.candidate for one in usual), leanest.candidate]
        kept = _written(self._space.kept_gathered)
        if kept and not {*kept, "sharding_strategy"} & self.fixed.keys():
            self._all((kind.changed(**kept), "") for kind in self._with(kinds, again))
        self._all((kind, "") for kind in self._with(kinds, again))
        if joined:
            lean = sorted(self.tried, key=lambda one: (one.peak, one.cost))
            mine = [one.candidate for one in lean if one.candidate.backend == start.backend]
            self._all((candidate.changed(**joined), "") for candidate in mine)

    def _joined(self) -> Settings:
        """Return the option with which small units travel together, unless it is given or there is none."""
        joining = self._space.joining
        return {} if joining is None or joining.option in self.fixed else _written({joining.option: joining.value})

    def _refined(self, leanest: Tried) -> Tried:
        """Try finer units, as long as that helps."""
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

    def _all(self, candidates: Iterable[tuple[Candidate, str]]) -> list[Tried]:
        return [one for one in [self._consider(candidate, name) for candidate, name in candidates] if one is not None]

    # ------------------------------------------------------------------------------------------ one candidate

    def _unrepeated(self, choices: list[Choice]) -> list[Choice]:
        """Replace units of which a step calls some more than once by the classes of the others."""
        by_class: dict[str, Choice] = {}
        for choice in choices:
            planned = self._planned(choice)
            if isinstance(planned, Plan) and not self.profile.gathered_once(planned):
                kinds = self.profile.classes_of_units(planned)
                choice = classes(kinds) if kinds else choice
            by_class[choice.code] = choice
        return list(by_class.values())

    def _planned(self, units_: Choice, again: Choice = DEFAULT) -> Plan | str:
        """Return the plan of these units and recomputed blocks, or what is wrong with them."""
        key = units_.code, again.code
        if key not in self._plans:
            self._plans[key] = self.judge.plan(auto_wrap_policy=units_.value, activation_checkpointing=again.value)
        return self._plans[key]

    def _count(self, choice: Choice) -> int:
        planned = self._planned(choice)
        return 0 if isinstance(planned, str) else len(planned.units)

    def _consider(self, candidate: Candidate, name: str = "") -> Tried | None:
        """Simulate it, unless an equal plan was simulated, or it would gather a module several times."""
        planned = self._planned(_units_of(candidate), candidate.settings.get("activation_checkpointing", DEFAULT))
        if isinstance(planned, str):
            self.failed[candidate.code()] = planned
            return None
        joining = self._space.joining
        if joining is not None and joining.option not in candidate.settings:
            candidate = candidate.changed(**_written({joining.option: 0}))  # whatever wrap() does by itself
        key = self._key(candidate, planned)
        if key not in self._seen:
            if not name and len(self.tried) >= self._most:
                return None
            if not name and "auto_wrap_policy" in candidate.settings and not self.profile.gathered_once(planned):
                return None
            self._seen[key] = self._simulated(candidate, name, planned)
        found = self._seen[key]
        if name and found is not None:
            self.aliases[f"{self._named}{name}"] = found
        return found

    def _shortest(self, candidate: Candidate, planned: Plan) -> Candidate:
        """Leave out the option that joins units where that means nothing: the code is no longer than it must be."""
        joining = self._space.joining
        if joining is None or joining.option in self.fixed:
            return candidate
        apart, joined = (joining.travelling(planned, value, self.judge.ranks) for value in (0, joining.value))
        return candidate.changed(**{joining.option: DEFAULT}) if apart == joined else candidate

    def _key(self, candidate: Candidate, planned: Plan) -> Any:
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
        return candidate.backend, groups, tuple(planned.recomputed), tuple(sorted(options.items()))

    def _simulated(self, candidate: Candidate, name: str, planned: Plan) -> Tried | None:
        try:
            estimate = self.judge.estimate(candidate)
        except SimulatorDied:  # no candidate's fault, and what was found so far would pass for the best there is
            raise
        except FsshardError as error:
            self.failed[candidate.code()] = str(error)
            self.error = self.error or error
            return None
        one = Tried(
            candidate=self._shortest(candidate, planned),
            name=f"{self._named}{name}" if name else "",
            recomputed=len(planned.recomputed),
            estimate=estimate,
        )
        self.tried.append(one)
        return one


def _units_of(candidate: Candidate) -> Choice:
    return candidate.settings.get("auto_wrap_policy", Choice("auto", '"auto"'))


def _written(options: Mapping[str, Any]) -> dict[str, Choice]:
    return {name: written(name, value) for name, value in options.items()}


def _leanest(found: list[Tried]) -> Tried:
    return min(found, key=lambda one: (one.peak, one.cost))


def _has_activations(one: Tried) -> bool:
    """Return whether recomputation could bring the peak down: the optimizer's step has no activations."""
    return one.estimate.moment.phase != "step"
