"""tune(): finds the plan that fits, by simulation, before the launch.

The search goes from a fixed set of usual plans to finer ones, each judged by a simulation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fsshard.backends import backend_class
from fsshard.backends.facts import Tunable
from fsshard.errors import ConfigurationError, DoesNotFit, FsshardError
from fsshard.planning.plan import Plan
from fsshard.planning.text import is_count, size
from fsshard.recipes.recipe import Arguments, Recipe, resolve
from fsshard.simulation.estimating import (
    data_shape,
    estimate_of,
    job_of,
    mesh_shape,
    optimizer_settings,
    recipe_source,
    whole_mesh,
)
from fsshard.simulation.machine import Machine, machine_of
from fsshard.simulation.result import Estimate
from fsshard.simulation.simulation import Job, Settings
from fsshard.simulation.tuning.arrangements import arrangements
from fsshard.simulation.tuning.result import Tried, TuneResult, best
from fsshard.simulation.tuning.search_space import (
    PLAIN,
    Candidate,
    code_of,
    offloadings,
    plan_of,
    profile_of,
    recomputations,
    units,
)
from fsshard.simulation.worker import Simulator, SimulatorDied, run_job

# How often the ranks are doubled to find out how many would do.
WORLDS_AHEAD = 3
# Finer units are tried until so many have not brought the peak down to this share of it.
PATIENCE = 2
LESS = 0.99
# How many plans are simulated if nobody says: so many operators' worth of forwards, within limits. Not so many
# seconds' worth: the same search finds the same everywhere.
WORK = 24_000
FEWEST = 12
MOST = 40


def tune(
    subject: Any,
    *,
    backend: Any = "auto",
    world_size: int,
    batch: Any = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer: Any = None,
    memory: int | str | None = None,
    auto_wrap_policy: object = ...,
    mixed_precision: object = ...,
    activation_checkpointing: object = ...,
    accumulation: int | None = None,
    cpu_offload: bool = False,
    average: bool = False,
    device_mesh: Any = None,
    meshes: Any = None,
    device: str = "cpu",
    machine: Any = None,
    real: bool = False,
    limit: int | None = None,
    progress: Callable[[int, str], None] | None = None,
    **settings: Any,
) -> TuneResult:
    """Search for the fastest plan among those that fit into ``memory``, or for the one that needs least.

    Every plan that is considered is simulated as :func:`fsshard.estimate` does it, in a process of its own. What is
    searched, and which plan wins, is in docs/tuning.md; what is given here is not searched. The search uses no random
    numbers: the same question has the same answer.

    Args:
        subject: a bare module (give ``batch`` too), or a recipe as for ``fsshard.parity.compare``, or its name. The
            units and recomputed blocks that a recipe names are ignored here.
        backend: a backend's name, or several, of which the best one is taken.
        world_size: ranks of the job.
        batch: of a module: one rank's arguments of its forward.
        loss: ``(model, batch) -> scalar``; by default as for :func:`fsshard.estimate`.
        optimizer: a class, a ``functools.partial`` of one, or an optimizer.
        memory: bytes that a rank may need, such as ``40 * 2**30`` or ``"40GiB"``: the least predicted time is looked
            for, then the least traffic, then the fewest collectives, then the least peak. None: the least peak is.
        auto_wrap_policy: as for :func:`fsshard.wrap`.
        mixed_precision: as for :func:`fsshard.wrap`; never searched.
        activation_checkpointing: as for :func:`fsshard.wrap`; False: recompute nothing.
        accumulation: backward passes per step.
        cpu_offload: as for :func:`fsshard.estimate`.
        average: as for :func:`fsshard.estimate`.
        device_mesh: as for :func:`fsshard.estimate`.
        meshes: arrangements of the ranks on which the best plans are tried, too: names of dimensions, of which all
            sizes in all orders are taken, such as ``("replicate", "shard")``, or ``("data", "tp")`` for a recipe with
            a ``split``; or a list of sizes by name. Ranks of the last dimension are neighbours.
        device: ``"cpu"`` or ``"cuda"``: which device it is for.
        machine: whose constants times are predicted by, as for :func:`fsshard.estimate`.
        real: as for :func:`fsshard.estimate`.
        limit: the number of simulations after which only plans are tried that always are. None: between 12 and 40, by
            the number of operators in a forward.
        progress: called with how many plans have been simulated and what the next one is.
        **settings: of :func:`fsshard.wrap`: a backend's options.

    Returns:
        A :class:`~fsshard.simulation.tuning.result.TuneResult`: ``fsshard.wrap(model, **result.settings)`` uses the
        winner.

    Raises:
        ConfigurationError: an argument has no meaning.
        DoesNotFit: no plan that was found fits ``memory``.
        ModelError: the step depends on the values of tensors, or fails.
        RecipeError: ``subject`` is not a recipe.
    """
    backends = list(backend) if isinstance(backend, (list, tuple)) else [backend]
    if not backends:
        raise ConfigurationError("backend=[]: expected a backend's name, or several")
    bound = _bytes(memory)
    if limit is not None and not is_count(limit):
        raise ConfigurationError(f"limit={limit!r}: expected a positive number of simulations")
    if meshes is not None and device_mesh is not None:
        raise ConfigurationError(
            "meshes= and device_mesh=: a mesh that is given is not searched; leave out one of them"
        )
    others = [] if meshes is None else arrangements(meshes, world_size)
    if isinstance(subject, Plan):
        raise ConfigurationError("a plan is what tune() looks for; pass the model, or a recipe")
    source = recipe_source(subject, batch, loss, real)
    recipe = resolve(source)
    changes = {"activation_checkpointing": None, **optimizer_settings(optimizer)}
    if accumulation is not None:
        changes["accumulate"] = accumulation
    wanted = {
        "cpu_offload": cpu_offload or ...,
        "auto_wrap_policy": auto_wrap_policy,
        "mixed_precision": mixed_precision,
        **settings,
        # False means that nothing is recomputed.
        "activation_checkpointing": activation_checkpointing or None,
    }
    fixed = _fixed(recipe, wanted)
    asked = {
        "source": source,
        "changes": changes,
        "world_size": world_size,
        "device_mesh": device_mesh,
        "device": device,
        "cpu_offload": cpu_offload,
        "average": average,
        "real": real,
    }
    constants = machine_of(machine, device)
    with Simulator("fsshard.tune", quiet=True) as simulator:
        search = Search(asked, simulator, fixed, constants, limit, progress)
        # A backend such as "auto" is known by name from here on.
        names = [search.job(name, {}).backend for name in backends]
        search.run(list(dict.fromkeys(names)))
        search.rearrange(others, best(search.tried, bound))
        winner = best(search.tried, bound)
        if winner is None:
            raise _nothing(search, bound)
    return TuneResult(
        name=recipe.name,
        world_size=world_size,
        memory=bound,
        winner=winner,
        tried=tuple(search.tried),
        aliases=search.aliases,
        failed=search.failed,
    )


def _fixed(recipe: Recipe, wanted: Arguments) -> Settings:
    """Return the arguments of wrap() that are not searched; what is asked for wins over the recipe's settings."""
    fixed = {name: value for name, value in recipe.settings.items() if name not in PLAIN}
    if recipe.precision is not None:
        fixed["mixed_precision"] = recipe.precision
    fixed |= {name: value for name, value in wanted.items() if value is not ...}
    return fixed


def _nothing(search: Search, bound: int | None) -> FsshardError:
    """Return the error for when no plan fits, or when none can be simulated."""
    leanest = best(search.tried, None)
    if leanest is None or bound is None:
        return search.error or ConfigurationError(f"no plan is possible: {'; '.join(search.failed.values())}")
    ways = [f"{text}: {size(peak)}" for text, peak in search.ways_down(leanest, bound) if peak < leanest.peak]
    by_kind = leanest.estimate.by_kind
    activations = by_kind["activations"] + by_kind["inputs"]
    if activations:
        ways.append(f"a smaller batch, with which {size(activations)} of it shrink in proportion")
    return DoesNotFit(
        f"memory={size(bound)}: none of {len(search.tried)} simulated plans fits; the smallest peak is "
        f"{size(leanest.peak)} per rank, at {leanest.estimate.moment}, with {leanest.candidate.code()}. What would "
        f"bring it down: {'; '.join(ways) or 'a smaller model'}",
        leanest.peak,
    )


def _bytes(memory: Any) -> int | None:
    """Return ``"40GiB"`` in bytes; without the ``i`` the units are powers of 1000."""
    if memory is None:
        return None
    nbytes = 0
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([kmgt]?)(i?)b?\s*", str(memory), re.IGNORECASE)
    if match is not None:
        number, prefix, binary = match.groups()
        base = 1024 if binary else 1000
        power = " kmgt".index(prefix.lower() or " ")
        nbytes = int(float(number) * base**power)
    if not nbytes:
        raise ConfigurationError(f"memory={memory!r}: expected a positive number of bytes, or a text such as '40GiB'")
    return nbytes


@dataclass
class Search:
    """A greedy search from usual plans to finer ones, with no chance in it.

    ``asked`` are the arguments of ``job_of`` but for the backend and the settings, ``fixed`` those of wrap() that are
    not searched, ``machine`` is whose constants times are predicted by.
    """

    asked: Arguments
    simulator: Simulator
    fixed: Arguments
    machine: Machine
    limit: int | None = None
    progress: Callable[[int, str], None] | None = None
    tried: list[Tried] = field(default_factory=list)  # in order
    # Names of candidates that are always tried -> what they turned out to be.
    aliases: dict[str, Tried] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # candidates that cannot be, and why
    error: FsshardError | None = None  # the first one of a simulation
    seen: dict[Any, Tried | None] = field(default_factory=dict)
    plans: dict[tuple[str, ...], Plan | str] = field(default_factory=dict)
    space: Tunable = field(default_factory=Tunable)  # of the backend that is searched
    divides: bool = False  # whether that divides parameters

    @property
    def ranks(self) -> int:
        """Return the number of ranks that share a unit."""
        return mesh_shape(self.asked["device_mesh"], self.asked["world_size"])[-1]

    def run(self, backends: list[str]) -> None:
        """Search under each backend."""
        self._tell("the model")
        self.profile = self.simulator.ask(profile_of, self.job("none", {}, cpu_offload=False))
        self._most = self.limit or max(FEWEST, min(MOST, WORK // self.profile.operators))
        self.always, others = units(self.profile)
        if "auto_wrap_policy" in self.fixed:
            self.always = {"as given": self.fixed["auto_wrap_policy"]}
            others = []
        self.others = self._unrepeated(others)
        self.again: list[Any] = []
        if "activation_checkpointing" not in self.fixed:
            choices = recomputations(self.profile)
            self.again += choices
            # Real tensors of a simulation lie on the CPU, from which nothing can be offloaded.
            if self.asked["device"] == "cuda" and not self.asked["real"]:
                self.again += offloadings(choices)
        for backend in backends:
            self._named = f"{backend}, " if len(backends) > 1 else ""
            facts = backend_class(backend, self.ranks).facts
            self.space = facts.tunable
            self.divides = facts.divides == "elements"
            start = Candidate(backend=backend, settings=self.fixed)
            if self.divides:
                self._sharded(start)
            else:
                self._replicated(start)

    def rearrange(self, meshes: list[dict[str, int]], winner: Tried | None) -> None:
        """Try each backend's fastest and leanest plan, and the winner so far, with the ranks arranged otherwise."""
        plans = [] if winner is None else [winner]
        for backend in {one.candidate.backend for one in self.tried}:
            tried = [one for one in self.tried if one.candidate.backend == backend]
            plans += [min(tried, key=lambda one: one.cost), _leanest(tried)]
        distinct = list({id(one): one for one in plans}.values())
        distinct.sort(key=self.tried.index)
        for mesh in meshes:
            for one in distinct:
                self._rearranged(one, mesh)

    def _rearranged(self, one: Tried, mesh: dict[str, int]) -> None:
        shape = data_shape(mesh)
        if shape[-1] == self.asked["world_size"]:
            # That is one row, as before.
            return
        candidate = replace(one.candidate, mesh=mesh)
        self._tell(candidate.code())
        if math.prod(shape) == self.asked["world_size"]:
            changed: Settings = {"device_mesh": shape}
        else:
            sizes = whole_mesh(mesh, self.asked["source"], 1, None)
            changed = {"device_mesh": shape, "whole_mesh": sizes}
        try:
            estimate = self._estimate(candidate.backend, candidate.settings, **changed)
        except SimulatorDied:
            raise
        except FsshardError as error:
            self.failed[candidate.code()] = str(error)
            return
        self.tried.append(replace(one, candidate=candidate, name="", estimate=estimate))

    # ------------------------------------------------------------------------------------------ the simulations

    def job(self, backend: Any, settings: Arguments, **changed: Any) -> Job:
        """Return one simulation, checked, with some arguments changed."""
        asked = {**self.asked, **changed}
        if "mixed_precision" in settings:
            asked["changes"] = {**asked["changes"], "precision": settings["mixed_precision"]}
        others = {name: value for name, value in settings.items() if name not in ("mixed_precision", "cpu_offload")}
        return job_of(backend, **asked, settings=others)

    def ways_down(self, leanest: Tried, bound: int) -> Iterator[tuple[str, int]]:
        """Yield what lowers the peak, and to how many bytes: more ranks until they do, a narrower dtype, offloading."""
        asked = self.asked
        backend = leanest.candidate.backend
        settings = leanest.candidate.settings
        divides = backend_class(backend, self.ranks).facts.divides
        # Each with other settings, and other arguments of the job.
        ways: dict[str, tuple[Arguments, Settings]] = {}
        if "mixed_precision" not in settings:
            ways["mixed_precision='bf16'"] = ({**settings, "mixed_precision": "bf16"}, {})
        if divides == "elements" and asked["device"] == "cuda" and not asked["cpu_offload"]:
            ways["cpu_offload=True"] = (settings, {"cpu_offload": True})
        for text, (changed_settings, changed) in ways.items():
            try:
                estimate = self._estimate(backend, changed_settings, **changed)
            except SimulatorDied:
                raise
            except FsshardError:
                # This backend, or this model, does not allow it, so it is no way down.
                continue
            yield text, estimate.interval[1]
        if divides == "nothing" or asked["device_mesh"] is not None:
            return
        for power in range(1, WORLDS_AHEAD + 1):
            ranks = asked["world_size"] * 2**power
            peak = self._estimate(backend, settings, world_size=ranks).interval[1]
            if peak <= bound or power == WORLDS_AHEAD:
                yield f"world_size={ranks}", peak
                return

    def _estimate(self, backend: str, settings: Arguments, **changed: Any) -> Estimate:
        job = self.job(backend, settings, **changed)
        measured = self.simulator.ask(run_job, job)
        asked = {**self.asked, **changed}
        return estimate_of(asked["world_size"], job, measured, self.machine)

    def _tell(self, text: str) -> None:
        if self.progress is not None:
            self.progress(len(self.tried), text)

    def _replicated(self, start: Candidate) -> None:
        # Units mean nothing there: buckets and recomputation are left.
        candidates = {"default": start}
        for name, options in self.space.variants.items():
            if not options.keys() & start.settings.keys():
                candidates[name] = start.changed(**options)
        usual = [self._consider(candidate, name) for name, candidate in candidates.items()]
        for one in usual:
            if one is not None and _has_activations(one):
                self._recompute(one)

    def _sharded(self, start: Candidate) -> None:
        # The usual plans are always simulated, whatever the limit is.
        usual = []
        for name, policy in self.always.items():
            usual += self._try([start.changed(auto_wrap_policy=policy)], name)
        if not usual:
            return
        joining = self.space.joining
        joined = {}
        if joining is not None and joining.option not in self.fixed:
            # Small units travel together then.
            joined[joining.option] = joining.value
        # On the CPU wrap() joins small units by itself.
        if joined and self.asked["device"] == "cpu" and self.ranks > 1:
            for name in ("auto", "as given"):
                if name in self.always:
                    candidate = start.changed(auto_wrap_policy=self.always[name], **joined)
                    self._consider(candidate, f"{name}, small ones joined")
        leanest = _leanest(usual)
        if _has_activations(leanest):
            leanest = _leanest([*usual, *self._recompute(leanest)])
        # Recomputation is chosen first, since finer units help little while activations are the peak.
        leanest = self._refined(leanest)
        recomputed = leanest.candidate.settings.get("activation_checkpointing")
        bases = [one.candidate for one in (*usual, leanest)]
        candidates = list(self._with(bases, recomputed))
        kept = self.space.kept_gathered
        if kept and not {*kept, "sharding_strategy"} & self.fixed.keys():
            self._try([candidate.changed(**kept) for candidate in candidates])
        self._try(candidates)
        if joined:
            leanest_first = sorted(self.tried, key=_weight)
            candidates = [one.candidate for one in leanest_first if one.candidate.backend == start.backend]
            self._try([candidate.changed(**joined) for candidate in candidates])

    def _recompute(self, one: Tried) -> list[Tried]:
        return self._try([one.candidate.changed(activation_checkpointing=choice) for choice in self.again])

    def _refined(self, leanest: Tried) -> Tried:
        """Try finer units, as long as that helps."""
        failures = 0
        coarsest = self._count(leanest.candidate.settings.get("auto_wrap_policy", "auto"))
        finer = [choice for choice in self.others if self._count(choice) > coarsest]
        for choice in sorted(finer, key=self._count):
            before = len(self.tried)
            one = self._consider(leanest.candidate.changed(auto_wrap_policy=choice))
            if one is None or len(self.tried) == before:
                continue
            failures += one.peak >= LESS * leanest.peak
            leanest = _leanest([leanest, one])
            if failures == PATIENCE:
                break
        return leanest

    def _with(self, candidates: list[Candidate], recomputed: Any) -> Iterator[Candidate]:
        """Yield each candidate without recomputation, and with this one."""
        for candidate in candidates:
            if "activation_checkpointing" not in self.fixed:
                candidate = candidate.changed(activation_checkpointing=...)
                yield candidate
            if recomputed is not None:
                yield candidate.changed(activation_checkpointing=recomputed)

    def _try(self, candidates: list[Candidate], name: str = "") -> list[Tried]:
        """Simulate all of them; return those that can be."""
        tried = [self._consider(candidate, name) for candidate in candidates]
        return [one for one in tried if one is not None]

    def _unrepeated(self, choices: list[Any]) -> list[Any]:
        """Replace units of which a step calls some more than once by the classes of the others."""
        by_code = {}
        for choice in choices:
            planned = self._planned(choice)
            if isinstance(planned, Plan) and not self.profile.gathered_once(planned):
                choice = self.profile.classes_of_units(planned) or choice
            by_code[code_of("auto_wrap_policy", choice)] = choice
        return list(by_code.values())

    def _planned(self, policy: Any, recomputed: Any = None) -> Plan | str:
        """Return the plan of these units and recomputed blocks, or what is wrong with them."""
        settings = {"auto_wrap_policy": policy, "activation_checkpointing": recomputed}
        key = tuple(code_of(name, value) for name, value in settings.items())
        if key not in self.plans:
            job = self.job("none", {}, cpu_offload=False)
            self.plans[key] = self.simulator.ask(plan_of, job, settings)
        return self.plans[key]

    def _count(self, policy: Any) -> int:
        planned = self._planned(policy)
        return 0 if isinstance(planned, str) else len(planned.units)

    def _consider(self, candidate: Candidate, name: str = "") -> Tried | None:
        """Simulate it, unless an equal plan was simulated, or it would gather a module several times."""
        settings = candidate.settings
        planned = self._planned(settings.get("auto_wrap_policy", "auto"), settings.get("activation_checkpointing"))
        if isinstance(planned, str):
            self.failed[candidate.code()] = planned
            return None
        joining = self.space.joining
        if joining is not None and joining.option not in settings:
            # What is simulated must not depend on what wrap() does by itself.
            candidate = candidate.changed(**{joining.option: 0})
        key = self._key(candidate, planned)
        # A plan that differs in words alone is not simulated again.
        if key not in self.seen:
            if not name and len(self.tried) >= self._most:
                return None
            if not name and "auto_wrap_policy" in settings and not self.profile.gathered_once(planned):
                return None
            self.seen[key] = self._simulated(candidate, name, planned)
        one = self.seen[key]
        if name and one is not None:
            self.aliases[f"{self._named}{name}"] = one
        return one

    def _key(self, candidate: Candidate, planned: Plan) -> Any:
        """Return what equal plans have in common."""
        options = {name: code_of(name, value) for name, value in candidate.settings.items()}
        options.pop("auto_wrap_policy", None)
        options.pop("activation_checkpointing", None)
        groups = []
        if self.divides:
            groups = sorted(unit.name for unit in planned.units)
        joining = self.space.joining
        if joining is not None:
            options.pop(joining.option, None)
            groups = sorted(joining.travelling(planned, candidate.settings[joining.option], self.ranks))
        if self.space.root_stays and len(groups) == 1:
            # Whether the only unit is kept gathered then makes no difference.
            for name, value in self.space.kept_gathered.items():
                if options.get(name) == code_of(name, value):
                    del options[name]
        choice = candidate.settings.get("activation_checkpointing")
        return (
            candidate.backend,
            tuple(groups),
            tuple(planned.recomputed),
            getattr(choice, "offload_to_cpu", False),
            tuple(planned.offloaded),
            tuple(sorted(options.items())),
        )

    def _simulated(self, candidate: Candidate, name: str, planned: Plan) -> Tried | None:
        self._tell(candidate.code())
        try:
            estimate = self._estimate(candidate.backend, candidate.settings)
        except SimulatorDied:
            # It is no candidate's fault, and what was found so far would pass for the best there is.
            raise
        except FsshardError as error:
            self.failed[candidate.code()] = str(error)
            self.error = self.error or error
            return None
        joining = self.space.joining
        if joining is not None and joining.option not in self.fixed:
            apart = joining.travelling(planned, 0, self.ranks)
            joined = joining.travelling(planned, joining.value, self.ranks)
            # The option means nothing here: the code is no longer than it must be.
            if apart == joined:
                candidate = candidate.changed(**{joining.option: ...})
        one = Tried(
            candidate=candidate,
            name=f"{self._named}{name}" if name else "",
            estimate=estimate,
            recomputed=len(planned.recomputed),
            offloaded=len(planned.offloaded),
        )
        self.tried.append(one)
        return one


def _leanest(tried: list[Tried]) -> Tried:
    return min(tried, key=_weight)


def _weight(one: Tried) -> tuple[Any, ...]:
    return one.peak, one.cost


def _has_activations(one: Tried) -> bool:
    """Return whether recomputation could bring the peak down: the optimizer's step has no activations."""
    return one.estimate.moment.phase != "step"
