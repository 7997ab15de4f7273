"""Windows of shallow water and of ERA5's files, their normalisation, weights of rows, errors, and who is fed what."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from examples import weather
from examples.weather_data import era5_weather, latitude_weights, make_loader, shallow_water_weather

SOLVED = {"n_train": 3, "n_validation": 2, "n_steps": 6, "shape": (8, 16), "progress": False}


def write_era5(folder: Path, rows: int = 9, channels: int = 2) -> np.ndarray:
    """Two years to train on and one to judge by, statistics of more channels than there are; the first year."""
    h5py = pytest.importorskip("h5py")
    rng = np.random.default_rng(0)
    years = {"train/1979.h5": 5, "train/1980.h5": 4, "valid/2016.h5": 6}
    fields = {year: rng.standard_normal((days, channels, rows, 8)).astype(np.float32) for year, days in years.items()}
    for year, values in fields.items():
        (folder / year).parent.mkdir(parents=True, exist_ok=True)
        with h5py.File(folder / year, "w") as file:
            file["fields"] = values
    (folder / "stats").mkdir()
    np.save(folder / "stats" / "global_means.npy", np.array([1.0, 2.0, 3.0]).reshape(1, 3, 1, 1))
    np.save(folder / "stats" / "global_stds.npy", np.array([2.0, 4.0, 8.0]).reshape(1, 3, 1, 1))
    return fields["train/1979.h5"]


# Shallow water ----------------------------------------------------------------------------------------------------


def test_fields_are_normalised_and_runs_to_judge_by_are_others(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    found = shallow_water_weather(leads=2, **SOLVED)
    assert (len(found.train), len(found.validation)) == (3 * 5, 2 * 4)
    assert found.train[0].shape == (2, 3, 8, 16) and found.validation[0].shape == (3, 3, 8, 16)
    std, mean = torch.std_mean(found.train.runs, dim=(0, 1, 3, 4))
    assert torch.allclose(std, torch.ones(3), atol=1e-5) and torch.allclose(mean, torch.zeros(3), atol=1e-5)
    assert not any(torch.equal(a, b) for a in found.train.runs for b in found.validation.runs)


# ERA5 -------------------------------------------------------------------------------------------------------------


def test_nerscs_layout(tmp_path: Path) -> None:
    first = write_era5(tmp_path)
    found = era5_weather(tmp_path, leads=3, patch=4)
    assert found.shape == (8, 8) and len(found.channels) == 2, "the row at the south pole is left out"
    assert (len(found.train), len(found.validation)) == (4 + 3, 3), "no window goes from one year to the next"
    scale = np.array([2.0, 4.0]).reshape(1, 2, 1, 1)
    expected = (first[2:4, :, :8] - np.array([1.0, 2.0]).reshape(1, 2, 1, 1)) / scale
    assert np.allclose(found.train[2].numpy(), expected, atol=1e-6)
    assert found.train[6].shape == (2, 2, 8, 8) and found.validation[2].shape == (4, 2, 8, 8)
    equator = found.row_weights.argmax()
    assert equator == 4 and found.row_weights[0] < 1e-6, "from 90 to -90 in nine rows"


# Feeding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_has_the_same_windows_on_any_number_of_data_ranks(ranks: int) -> None:
    numbers = list(range(16))
    options = {"workers": 0, "prefetch": 2, "pin": False}
    whole = make_loader(numbers, batch=8, place=(0, 1), shuffle=3, **options)
    parts = [make_loader(numbers, batch=8 // ranks, place=(r, ranks), shuffle=3, **options) for r in range(ranks)]
    steps = list(zip(*parts, strict=True))
    assert [sorted(torch.cat(step).tolist()) for step in steps] == [sorted(batch.tolist()) for batch in whole]
    first = [batch.tolist() for batch in whole]
    whole.sampler.set_epoch(1)  # type: ignore[attr-defined]
    assert [batch.tolist() for batch in whole] != first


def test_the_error_is_weighted_by_rows() -> None:
    truth = torch.zeros(1, 2, 3, 4)
    forecast = torch.zeros(1, 2, 3, 4)
    forecast[0, 0, 0] = 3.0  # wrong at a pole, which is a point
    forecast[0, 1, 1] = 3.0  # wrong at the equator
    weights = latitude_weights(torch.tensor([90.0, 0.0, -90.0]))
    assert weather.squared_error(forecast, truth, weights)[0].tolist() == pytest.approx([0, 9.0], abs=1e-5)
    assert weather.squared_error(forecast, truth, torch.ones(3, 1))[0].tolist() == pytest.approx([3.0, 3.0])
