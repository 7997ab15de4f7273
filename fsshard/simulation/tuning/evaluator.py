"""Asks the process that simulates what a search has to know."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fsshard.backends import backend_class
from fsshard.errors import FsshardError
from fsshard.planning.plan import Plan
from fsshard.simulation.estimating import estimate_of, job_of, mesh_shape
from fsshard.simulation.result import Estimate
from fsshard.simulation.simulation import Job
from fsshard.simulation.tuning.profile import ModelProfile, plans_of, profile_of
from fsshard.simulation.tuning.result import Tried
from fsshard.simulation.tuning.search_space import Candidate
from fsshard.simulation.worker import Simulator, SimulatorDied, run_job

__all__ = ["Judge"]

Progress = Callable[[int, str], None]

WORLDS_AHEAD = 3
"""How often the ranks are doubled to find out how many would do."""


class Judge:
    """Answers, from a process of its own.

    Args:
        asked: what is trained, and where: arguments of :func:`~fsshard.simulation.estimating.job_of` but for the
            backend and the settings.
        simulator: the process.
        progress: told of each simulation.
    """

    def __init__(self, asked: Mapping[str, Any], simulator: Simulator, progress: Progress | None = None) -> None:
        self._asked, self._simulator, self._progress = asked, simulator, progress
        self._done = 0

    @property
    def ranks(self) -> int:
        """Number of ranks that share a unit."""
        return mesh_shape(self._asked["device_mesh"], self._asked["world_size"])[-1]

    @property
    def on_gloo(self) -> bool:
        """True where ``wrap`` joins small units by itself."""
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
        found: ModelProfile = self._answer(profile_of, self._plain_job())
        return found

    def plans(self, changes: list[dict[str, Any]]) -> list[Plan | str]:
        """Return, for settings of wrap(), the plan for each, or what is wrong with them."""
        found: list[Plan | str] = self._answer(plans_of, self._plain_job(), changes)
        return found

    def _plain_job(self) -> Job:
        """The training without an engine."""
        return self.job("none", {}, cpu_offload=False)

    def estimate(self, candidate: Candidate) -> Estimate:
        """Simulate what the candidate needs and sends."""
        self._tell(candidate.code())
        found = self._estimate(candidate.backend, candidate.arguments())
        self._done += 1
        return found

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
