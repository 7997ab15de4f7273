"""Samples per second and utilisation of a running training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fsshard
from fsshard.errors import ConfigurationError
from fsshard.simulation import throughput
from fsshard.simulation.result import Estimate
from tests.forked import forking


@pytest.fixture(scope="module")
def forecast() -> Estimate:
    with forking():
        return fsshard.estimate(nn.Linear(8, 8), batch=torch.ones(4, 8), backend="ddp", world_size=3)


def test_the_last_steps_count(forecast: Estimate, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 100.0, 101.0, 103.0])
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: next(clock))
    speed = fsshard.Throughput(forecast, steps=2)
    for _ in range(4):
        speed.step()
    report = speed.report()
    assert (report.steps, report.seconds) == (2, 1.5)
    assert report.samples_per_second == 12 / 1.5 and report.predicted == forecast.seconds
    assert report.utilisation == forecast.best_seconds / 1.5 > 0
    assert str(report).startswith("8 samples/s, MFU 0.0%: 1.5 s a step, on average over 2, predicted ")


def test_it_measures_a_training(forecast: Estimate) -> None:
    speed = fsshard.Throughput(forecast)
    model = nn.Linear(8, 8)
    for _ in range(3):
        model(torch.ones(4, 8)).sum().backward()
        speed.step()
    report = speed.report()
    assert report.steps == 2 and report.samples_per_second == pytest.approx(12 / report.seconds)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"forecast": [1]}, r"Throughput\(list\): expected fsshard\.estimate\(model, batch"),
        ({"steps": 0}, "steps=0: expected a positive number of steps"),
        ({"steps": True}, "steps=True: expected"),
    ],
)
def test_bad_input(forecast: Estimate, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        fsshard.Throughput(**{"forecast": forecast, **arguments})


def test_a_report_needs_two_steps(forecast: Estimate) -> None:
    speed = fsshard.Throughput(forecast)
    speed.step()
    with pytest.raises(ConfigurationError, match="fewer than two steps have ended: call step"):
        speed.report()
