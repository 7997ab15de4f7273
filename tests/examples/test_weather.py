"""Errors, learning rates, ranges and pictures of the weather example."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from examples import weather
from examples.weather_data import latitude_weights


def test_the_error_is_weighted_by_rows() -> None:
    truth = torch.zeros(1, 2, 3, 4)
    forecast = torch.zeros(1, 2, 3, 4)
    forecast[0, 0, 0] = 3.0  # wrong at a pole, which is a point
    forecast[0, 1, 1] = 3.0  # wrong at the equator
    weights = latitude_weights(torch.tensor([90.0, 0.0, -90.0]))
    assert weather.squared_error(forecast, truth, weights)[0].tolist() == pytest.approx([0, 9.0], abs=1e-5)
    assert weather.squared_error(forecast, truth, torch.ones(3, 1))[0].tolist() == pytest.approx([3.0, 3.0])


def test_the_learning_rate_warms_up_and_falls_to_zero() -> None:
    factors = [weather.learning_rate(step, warmup=4, steps=12) for step in range(13)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors[8] == pytest.approx(0.5) and factors[12] == pytest.approx(0.0, abs=1e-12)
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert weather.learning_rate(0, warmup=0, steps=5) == 1.0


def test_ranges_are_in_the_trace_and_on_the_clock(tmp_path: Path) -> None:
    ranges = weather.Ranges(torch.device("cpu"))
    batches = [torch.ones(2)] * 6
    with weather.profiler(tmp_path / "traces", "run", torch.device("cpu")) as profiler:
        for _ in ranges.each("data", batches):
            with ranges("forward"):
                torch.ones(3).sum()
            profiler.step()
    (file,) = (tmp_path / "traces").iterdir()
    names = [event.get("name") for event in json.loads(file.read_text())["traceEvents"]]
    assert names.count("forward") >= 3 and "data" in names
    assert ranges.passes == {"data": 7, "forward": 6}
    later = ranges.seconds["forward"] - ranges.first["forward"]
    assert ranges.milliseconds("forward") == pytest.approx(1000 * later / 5) and later > 0
    assert ranges.milliseconds("nothing") == 0
