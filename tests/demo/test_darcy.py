"""Darcy flow: the equation, the samples, the cache, the files of others and the picture."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fsshard.cli.app import main
from fsshard.demo import common, darcy

OFFICIAL = Path(os.environ.get("FSSHARD_DARCY_DIR") or Path(__file__).parents[3] / "shared" / "data" / "darcy")
SMALL: dict[str, Any] = {"n_train": 3, "n_test": 2, "resolution": 32, "progress": False}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test may read or write the user's cache."""
    for variable in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.setenv(variable, str(tmp_path / "cache"))


@pytest.fixture
def official() -> Path:
    """The folder with neuraloperator's files."""
    missing = [n for n in ("train_16", "test_16", "test_32") if not (OFFICIAL / f"darcy_{n}.pt").is_file()]
    if missing:
        pytest.skip(f"neuraloperator's Darcy files {missing} are not in {OFFICIAL} (set FSSHARD_DARCY_DIR)")
    return OFFICIAL


def checkerboard(n: int, seed: int = 0) -> np.ndarray:
    """A two-material field with no symmetry at all."""
    return np.where(np.random.default_rng(seed).random((n, n)) > 0.5, *darcy.PERMEABILITY)


# The equation -----------------------------------------------------------------------------------------------------


def dense_system(a: np.ndarray) -> np.ndarray:
    """The finite-volume matrix, cell by cell and neighbour by neighbour."""
    n = len(a)
    matrix = np.zeros((n * n, n * n))
    for i in range(n):
        for j in range(n):
            me = i * n + j
            for p, q in ((i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)):
                if 0 <= p < n and 0 <= q < n:
                    conductance = 1 / (0.5 / a[i, j] + 0.5 / a[p, q])  # two half cells in series
                    matrix[me, p * n + q] -= conductance
                else:
                    conductance = 1 / (0.5 / a[i, j])  # one half cell, then the boundary
                matrix[me, me] += conductance
    return matrix


@pytest.mark.parametrize("n", [1, 2, 13])
def test_two_coefficients_agree_with_a_dense_solve(n: int) -> None:
    a = checkerboard(n)
    expected = np.linalg.solve(dense_system(a), np.full(n * n, darcy.FORCING / n**2)).reshape(n, n)
    # A residual of 1e-10 costs the solution at most the condition number, here below 1e4; in fact far less.
    np.testing.assert_allclose(darcy.solve_darcy(a), expected, rtol=1e-7)


def test_the_official_pressures_come_out_of_the_official_inputs(official: Path) -> None:
    """Nothing is fitted: the equation, its two coefficients, the forcing and the points are those of the files.

    The files were solved on 512 x 512 cells and hold every 16th of them, so that the exact place of the interface
    between the materials is lost. Data of our own, solved at 512 and put through the same loss, come back with 3.4 %
    on average; a wrong mean on the faces alone makes this 3.1 %.
    """
    x, y = darcy.load(official).tests[32]
    n = 128
    centres, points = (np.arange(n) + 0.5) / n, darcy.POINTS
    spread = np.stack([np.interp(centres, points, unit) for unit in np.eye(len(points))], axis=1)
    errors = []
    for picture, truth in zip(x[:, 0].double().numpy(), y[:, 0].double().numpy(), strict=True):
        ground = np.where(spread @ picture @ spread.T > 0.5, darcy.PERMEABILITY[1], darcy.PERMEABILITY[0])
        solved = darcy._at_points(darcy.solve_darcy(ground))
        errors.append(np.linalg.norm(solved - truth) / np.linalg.norm(truth))
    assert len(errors) == 50
    assert np.mean(errors) < 0.03
    assert np.max(errors) < 0.06


# The samples ------------------------------------------------------------------------------------------------------


def test_a_random_field_is_smooth_and_has_mean_zero() -> None:
    fields = [darcy.gaussian_random_field(64, np.random.default_rng(seed)) for seed in range(5)]
    for field in fields:
        assert field.shape == (64, 64)
        assert abs(field.mean()) < 1e-12
        assert np.abs(np.diff(field, axis=0)).max() < np.ptp(field) / 4


def test_samples_depend_on_the_seed_and_on_nothing_else() -> None:
    x, y = darcy.generate(6, 32, seed=3, progress=False)
    assert x.shape == y.shape == (6, 32, 32) and (x.dtype, y.dtype) == (np.bool_, np.float32)
    again_x, again_y = darcy.generate(4, 32, seed=3, progress=False)
    assert np.array_equal(again_x, x[:4]) and np.array_equal(again_y, y[:4])
    other_x, _ = darcy.generate(6, 32, seed=4, progress=False)
    assert not any(np.array_equal(other_x[k], x[k]) for k in range(6))
    assert len({sample.tobytes() for sample in x}) == 6


def test_a_sample_is_the_cell_of_the_grid_that_was_solved_on() -> None:
    x, y = darcy.generate(1, 128, seed=5, progress=False)
    rng = np.random.default_rng(np.random.SeedSequence(5).spawn(1)[0])
    field = darcy.gaussian_random_field(128, rng) > 0
    assert np.array_equal(x[0], field[::4, ::4])
    solved = darcy.solve_darcy(np.where(field, 18.0, 1.0))
    # The point lies 3/8 of a cell before the centre of its cell.
    share = 5 / 8
    inner = share * solved[4::4] + (1 - share) * solved[3:-1:4]
    inner = share * inner[:, 4::4] + (1 - share) * inner[:, 3:-1:4]
    np.testing.assert_allclose(y[0, 1:, 1:], inner, rtol=1e-6)


def test_samples_look_like_the_official_ones() -> None:
    """The bounds are the official mean (of 1000), give or take what the model is off and what 100 samples scatter.

    Official, 16 x 16: neighbours that differ 0.133, share of ones 0.499, mean pressure 0.386, its deviation 0.340,
    mean of the highest pressures 1.158. Ours over 1000 samples: 0.140, 0.502, 0.396, 0.353, 1.199. One sample scatters
    by 0.036, 0.05, 0.073, - and 0.27, so means of 100 by a tenth of that; three of these are granted on each side,
    which is far narrower than what another ``tau`` would do to the neighbours (0.102 at 3).
    """
    x, y = (field[:, ::2, ::2] for field in darcy.generate(100, 64, seed=0, progress=False))
    differ = (np.mean(x[:, 1:] != x[:, :-1]) + np.mean(x[:, :, 1:] != x[:, :, :-1])) / 2
    assert differ == pytest.approx(0.137, abs=0.015)
    assert x.mean() == pytest.approx(0.5, abs=0.015)
    assert y.mean() == pytest.approx(0.39, abs=0.03)
    assert y.std() == pytest.approx(0.347, abs=0.03)
    assert y.max(axis=(1, 2)).mean() == pytest.approx(1.18, abs=0.1)
    assert y.min() > 0


# Loading and the cache --------------------------------------------------------------------------------------------


def equal(one: darcy.DarcyData, other: darcy.DarcyData) -> bool:
    pairs = [(one.train_x, other.train_x), (one.train_y, other.train_y)]
    pairs += [pair for side in (16, 32) for pair in zip(one.tests[side], other.tests[side], strict=True)]
    return all(torch.equal(a, b) for a, b in pairs)


def forbid_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(*_: object, **__: object) -> None:
        raise AssertionError("generate was called")

    monkeypatch.setattr(darcy, "generate", generate)


def cached_file() -> Path:
    (file,) = common.cache_dir("darcy").iterdir()
    return file


def test_load_keeps_inputs_and_pressures_together_as_float_pictures_of_both_sizes() -> None:
    data = darcy.load(**SMALL)
    pictures = [torch.from_numpy(part).float()[:, None] for part in darcy.generate(5, 32, progress=False)]
    assert list(data.tests) == [16, 32]
    for fine, coarse, train, whole in zip(
        data.tests[32], data.tests[16], (data.train_x, data.train_y), pictures, strict=True
    ):
        assert torch.equal(fine, whole[:2]) and torch.equal(coarse, fine[..., ::2, ::2])
        assert torch.equal(train, whole[2:, :, ::2, ::2])
        assert fine.is_contiguous() and coarse.is_contiguous()


def test_the_tests_do_not_move_with_the_amount_of_training() -> None:
    few, many = darcy.load(**SMALL), darcy.load(**{**SMALL, "n_train": 5})
    assert torch.equal(few.tests[32][1], many.tests[32][1])
    assert torch.equal(few.train_y, many.train_y[:3])


def test_the_second_load_reads_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = darcy.load(**SMALL)
    assert cached_file().parent == tmp_path / "cache" / "fsshard" / "darcy"
    forbid_generate(monkeypatch)
    assert equal(first, darcy.load(**SMALL))
    for change in ({"resolution": 33}, {"n_train": 4}, {"n_test": 3}):
        with pytest.raises(AssertionError, match="generate was called"):
            darcy.load(**{**SMALL, **change})


def test_loads_at_the_same_time_leave_one_whole_file(monkeypatch: pytest.MonkeyPatch) -> None:
    both_missed = threading.Barrier(2)
    generate = darcy.generate

    def together(*args: Any, **kwargs: Any) -> Any:
        both_missed.wait(timeout=60)
        return generate(*args, **kwargs)

    monkeypatch.setattr(darcy, "generate", together)
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: darcy.load(**SMALL), range(2))
    forbid_generate(monkeypatch)
    assert cached_file().stat().st_size > 1000
    assert equal(one, other)
    assert equal(one, darcy.load(**SMALL))


def truncate(content: bytes) -> bytes:
    return content[:-100]


@pytest.mark.parametrize("damage", [truncate, lambda _: b""])
def test_a_damaged_cache_is_made_again(damage: Any, caplog: pytest.LogCaptureFixture) -> None:
    first = darcy.load(**SMALL)
    file = cached_file()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    with caplog.at_level(logging.WARNING):
        assert equal(first, darcy.load(**SMALL))
    assert f"the cached Darcy data in {file} are damaged and will be made again" in caplog.text
    assert cached_file().read_bytes() == whole


def test_a_cache_that_cannot_be_written_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert len(darcy.load(**SMALL).train_x) == 3
    assert "cannot keep the Darcy data" in caplog.text


def test_the_cache_lies_where_the_system_keeps_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert common.cache_dir("darcy") == tmp_path / "xdg" / "fsshard" / "darcy"
    monkeypatch.setattr("sys.platform", "win32")
    assert common.cache_dir("darcy") == tmp_path / "local" / "fsshard" / "darcy"
    monkeypatch.setattr("sys.platform", "linux")
    for ignored in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert common.cache_dir("darcy") == tmp_path / ".cache" / "fsshard" / "darcy"


# Files of others --------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files laid out as neuraloperator's: five samples to train on, four to test on."""
    generator = torch.Generator().manual_seed(0)
    fine = {"x": torch.rand(4, 32, 32, generator=generator) > 0.5, "y": torch.rand(4, 32, 32, generator=generator)}
    coarse = {key: value[:, ::2, ::2].clone() for key, value in fine.items()}
    train = {"x": torch.rand(5, 16, 16, generator=generator) > 0.5, "y": torch.rand(5, 16, 16, generator=generator)}
    folder = tmp_path / "files"
    folder.mkdir()
    for name, content in {"train_16": train, "test_16": coarse, "test_32": fine}.items():
        torch.save(content, folder / f"darcy_{name}.pt")
    return folder


def test_files_are_read_and_nothing_is_solved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_generate(monkeypatch)
    data = darcy.load(folder, n_train=5, n_test=3)
    saved = torch.load(folder / "darcy_train_16.pt", weights_only=True)
    assert torch.equal(data.train_x, saved["x"].float()[:, None])
    assert data.train_x.dtype == torch.float32
    assert torch.equal(data.train_y, saved["y"][:, None])
    assert data.tests[16][0].shape == (3, 1, 16, 16)
    assert data.tests[32][0].shape == (3, 1, 32, 32)
    assert torch.equal(data.tests[16][1], data.tests[32][1][..., ::2, ::2])
    assert not common.cache_dir("darcy").exists()


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / "darcy_test_32.pt").unlink()
    with pytest.raises(FileNotFoundError, match=r"no file .*darcy_test_32\.pt; expected a data_dir with"):
        darcy.load(folder, n_train=5, n_test=3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"x": torch.ones(5, 16, 16)}, "KeyError"),
        ({"x": torch.ones(5, 8, 8), "y": torch.ones(5, 8, 8)}, r"tensors of shapes \(5, 1, 8, 8\) and"),
        ({"x": torch.ones(4, 16, 16), "y": torch.ones(4, 16, 16)}, r"tensors of shapes \(4, 1, 16, 16\) and"),
        (None, ""),  # cut off
    ],
)
def test_a_file_that_holds_something_else_is_named(folder: Path, content: object, message: str) -> None:
    file = folder / "darcy_train_16.pt"
    if content is None:
        file.write_bytes(truncate(file.read_bytes()))
    else:
        torch.save(content, file)
    with pytest.raises(ValueError, match=rf"darcy_train_16.pt: expected a dict .* at least 5, got .*{message}"):
        darcy.load(folder, n_train=5, n_test=3)


# neuraloperator's own files, fetched by pip, which is a stub ----------------------------------------------------


def pip(calls: list[list[str]], contents: dict[str, bytes], error: str = "") -> Any:
    """Does as ``pip download`` would, with a wheel of these files."""

    def run(command: list[str], **_: Any) -> Any:
        calls.append(command)
        if error:
            return SimpleNamespace(returncode=1, stderr=f"WARNING: retrying\n{error}\n")
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "neuraloperator-0.3.0-py3-none-any.whl", "w") as wheel:
            for name, content in contents.items():
                wheel.writestr(f"{darcy.WITHIN}/{name}", content)
        return SimpleNamespace(returncode=0, stderr="")

    return run


@pytest.fixture
def published() -> dict[str, bytes]:
    return {name: name.encode() for name in darcy.OFFICIAL}


def test_it_is_fetched_once(published: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(subprocess, "run", pip(calls, published))
    folder = darcy.official_files()
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == published
    (folder / "darcy_test_16.pt").unlink()
    assert darcy.official_files() == folder == darcy.official_files()
    assert len(calls) == 2 and calls[0][1:5] == ["-m", "pip", "download", "--no-deps"]
    assert (folder / "darcy_test_16.pt").read_bytes() == published["darcy_test_16.pt"]


def test_without_a_network_it_says_what_to_do(
    published: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subprocess, "run", pip([], published, "ERROR: No matching distribution found"))
    assert main(["demo", "--data", "official"]) == 2
    said = capsys.readouterr().err
    assert "(ERROR: No matching distribution found)" in said and "pip download --no-deps neuraloperator==0.3.0" in said
