"""Measures samples per second and model FLOPs utilisation of a running training, beside what was predicted."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from fsshard.errors import ConfigurationError
from fsshard.planning.text import duration, is_count
from fsshard.simulation.result import Estimate


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The speed of a training over some steps.

    Attributes:
        steps: how many were timed.
        seconds: of one step, on average.
        samples_per_second: of the whole job.
        utilisation: model FLOPs utilisation, as :attr:`fsshard.simulation.result.Estimate.utilisation`.
        predicted: seconds of a step by the estimate.
    """

    steps: int
    seconds: float
    samples_per_second: float
    utilisation: float
    predicted: float

    def __str__(self) -> str:
        return (
            f"{self.samples_per_second:.4g} samples/s, MFU {self.utilisation:.1%}: {duration(self.seconds)} a step, "
            f"on average over {self.steps}, predicted {duration(self.predicted)}"
        )


class Throughput:
    """Samples per second and model FLOPs utilisation (MFU) of the last steps of a running training.

    Call :meth:`step` after each step of the optimizer, and :meth:`report` now and then. All of it is local: ranks that
    train together take equally long.

    Args:
        forecast: :func:`fsshard.estimate` of the same training, which says how many samples and floating-point
            operations a step has. For a peak rate that is right, give it the ``machine`` that you train on.
        steps: how many of the last steps count.

    Raises:
        ConfigurationError: ``forecast`` is no estimate of a model, or ``steps`` no positive number.
    """

    def __init__(self, forecast: Estimate, *, steps: int = 20) -> None:
        if not isinstance(forecast, Estimate) or not forecast.best_seconds:
            raise ConfigurationError(
                f"Throughput({type(forecast).__name__}): expected fsshard.estimate(model, batch=..., world_size=...), "
                "for one backend and one number of ranks; a plan has no forward"
            )
        if not is_count(steps):
            raise ConfigurationError(f"steps={steps!r}: expected a positive number of steps")
        self._forecast = forecast
        self._ends: deque[float] = deque(maxlen=steps + 1)

    def step(self) -> None:
        """Note that a step has ended. On a GPU its work may still be queued; the queue is as long each time."""
        self._ends.append(time.perf_counter())

    def report(self) -> Speed:
        """Return the speed since the first of the last ``steps`` steps.

        Raises:
            ConfigurationError: fewer than two steps have ended.
        """
        forecast = self._forecast
        steps = len(self._ends) - 1
        if steps < 1:
            raise ConfigurationError("fewer than two steps have ended: call step() after each, then report()")
        seconds = (self._ends[-1] - self._ends[0]) / steps
        return Speed(
            steps=steps,
            seconds=seconds,
            samples_per_second=forecast.samples / seconds,
            utilisation=forecast.best_seconds / seconds,
            predicted=forecast.seconds,
        )
