"""What a search asks of the process that simulates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fsshard.backends import backend_class
from fsshard.errors import ConfigurationError, FsshardError
from fsshard.parity.recipe import Recipe, resolve
from fsshard.planning.plan import Plan
from fsshard.simulation.estimating import estimate_of, job_of, mesh_shape, optimizer_settings, recipe_source
from fsshard.simulation.result import Estimate
from fsshard.simulation.simulation import Job
from fsshard.simulation.tuning.profile import ModelProfile, plans_of, profile_of
from fsshard.simulation.tuning.result import Tried
from fsshard.simulation.tuning.search_space import SEARCHED, Candidate, Settings, written
from fsshard.simulation.worker import Simulator, SimulatorDied, run_job

__all__ = ["Judge", "Question"]

Progress = Callable[[int, str], None]

WORLDS_AHEAD = 3
"""How often the ranks are doubled to find out how many would do."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What :func:`fsshard.tune` was asked, without what it searches; the attributes are its arguments."""

    subject: Any
    batch: Any
    loss: Any
    optimizer: Any
    accumulation: int | None
    world_size: Any
    device_mesh: Any
    device: str
    cpu_offload: bool
    real: bool

    def __post_init__(self) -> None:
        if isinstance(self.subject, Plan):
            raise ConfigurationError("a plan is what tune() looks for; pass the model, or a recipe")

    @functools.cached_property
    def recipe(self) -> Recipe:
        """What is trained."""
        return resolve(self._source)

    @functools.cached_property
    def _source(self) -> Any:
        return recipe_source(self.subject, self.batch, self.loss, self.real)

    def backends(self, asked: Any) -> list[str]:
        """Names of the backends to search under, checked with everything else.

        Raises:
            UnknownBackend: one is none.
            ConfigurationError: there are none, or the world size, the mesh or the device has no meaning.
        """
        names = list(asked) if isinstance(asked, (list, tuple)) else [asked]
        if not names:
            raise ConfigurationError("backend=[]: expected a backend's name, or several")
        return list(dict.fromkeys(self.job(name, {}).backend for name in names))

    def own_settings(self) -> Settings:
        """What the recipe says of wrap(), and is not searched."""
        found = {name: written(name, value) for name, value in self.recipe.settings.items() if name not in SEARCHED}
        if self.recipe.precision is not None:
            found["mixed_precision"] = written("mixed_precision", self.recipe.precision)
        if self.cpu_offload:
            found["cpu_offload"] = written("cpu_offload", True)
        return found

    def job(self, backend: str, settings: Mapping[str, Any]) -> Job:
        """One simulation."""
        changes: dict[str, Any] = {"activation_checkpointing": None, **optimizer_settings(self.optimizer)}
        if self.accumulation is not None:
            changes["accumulate"] = self.accumulation
        plain = {name: value for name, value in settings.items() if name not in ("mixed_precision", "cpu_offload")}
        if "mixed_precision" in settings:
            changes["precision"] = settings["mixed_precision"]
        where = (self.device_mesh, self.device, self.cpu_offload, self.real)
        return job_of(self._source, changes, backend, self.world_size, *where, plain)


class Judge:
    """Answers, from a process of its own.

    Args:
        question: what is trained, and where.
        simulator: the process.
        progress: told of each simulation.
    """

    def __init__(self, question: Question, simulator: Simulator, progress: Progress | None = None) -> None:
        self._question, self._simulator, self._progress = question, simulator, progress
        self._done = 0

    @functools.cached_property
    def ranks(self) -> int:
        """How many share a unit."""
        return mesh_shape(self._question.device_mesh, self._question.world_size)[-1]

    @property
    def on_gloo(self) -> bool:
        """Whether wrap() joins small units by itself there."""
        return self._question.device == "cpu" and self.ranks > 1

    def profile(self) -> ModelProfile:
        """What the search has to know of the model."""
        self._tell("the model")
        found: ModelProfile = self._answer(profile_of, self._plain_job())
        return found

    def plans(self, changes: list[dict[str, Any]]) -> list[Plan | str]:
        """Settings of wrap() -> the plan for each, or what is wrong with them."""
        found: list[Plan | str] = self._answer(plans_of, self._plain_job(), changes)
        return found

    def _plain_job(self) -> Job:
        """The training without an engine."""
        return replace(self._question, cpu_offload=False).job("none", {})

    def estimate(self, candidate: Candidate) -> Estimate:
        """What the candidate needs and sends."""
        self._tell(candidate.code())
        found = self._estimate(self._question, candidate.backend, candidate.arguments())
        self._done += 1
        return found

    def ways_down(self, leanest: Tried, bound: int) -> Iterator[tuple[str, int]]:
        """What would lower the peak, and to how many bytes: more ranks, until they do; a narrower dtype; offloading."""
        question, candidate = self._question, leanest.candidate
        chosen, arguments = backend_class(candidate.backend, self.ranks), candidate.arguments()
        tried: list[tuple[str, Question, dict[str, Any]]] = []
        if "mixed_precision" not in arguments:
            tried.append(("mixed_precision='bf16'", question, {**arguments, "mixed_precision": "bf16"}))
        if chosen.facts.divides == "elements" and question.device == "cuda" and not question.cpu_offload:
            tried.append(("cpu_offload=True", replace(question, cpu_offload=True), arguments))
        for text, changed, settings in tried:
            try:
                yield text, self._estimate(changed, candidate.backend, settings).interval[1]
            except SimulatorDied:
                raise
            except FsshardError:  # not under this backend, or not with this model: no way
                continue
        if chosen.facts.divides == "nothing" or question.device_mesh is not None:
            return
        for power in range(1, WORLDS_AHEAD + 1):
            ranks = question.world_size * 2**power
            changed = replace(question, world_size=ranks)
            peak = self._estimate(changed, candidate.backend, arguments).interval[1]
            if peak <= bound or power == WORLDS_AHEAD:
                yield f"world_size={ranks}", peak
                return

    def _estimate(self, question: Question, backend: str, arguments: Mapping[str, Any]) -> Estimate:
        job = question.job(backend, arguments)
        return estimate_of(question.world_size, job, self._answer(run_job, job))

    def _tell(self, text: str) -> None:
        if self._progress is not None:
            self._progress(self._done, text)

    def _answer(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._simulator.ask(function, *arguments)
