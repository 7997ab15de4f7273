"""Darcy flow: pressure of water seeping through a two-material square, solved here and now, nothing downloaded.

The task is the one of neuraloperator's small Darcy files, whose convention is kept to the letter, so that a model
trained on one may be tested on the other:

* ``-div(a grad y) = 50`` on the unit square, ``y = 0`` on its boundary;
* the input ``x`` is a picture of zeros and ones: ``a = 1`` where ``x == 0`` and ``a = 18`` where ``x == 1``;
* point ``(i, j)`` of a 32 x 32 picture is the centre of cell ``(16 i, 16 j)`` of a 512 x 512 grid, which is the
  point ``((16 i + 0.5) / 512, (16 j + 0.5) / 512)``; a 16 x 16 picture is every second point of the 32 x 32 one.

``x`` is the sign of a Gaussian random field. The field is drawn with cosine modes and the covariance
``(-Laplacian + tau^2)^(-alpha)`` of Li et al., *Fourier Neural Operator for Parametric Partial Differential
Equations* (2021), appendix on data; ``tau = 5`` is the whole number whose pictures look most like the files'.

    data = darcy.load()                      # ten seconds the first time, then read from the user's cache
    x, y = data.tests[32]                    # (50, 1, 32, 32) each, float32

Call :func:`load` before the ranks are launched: they then all read what one process has made.
"""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.numpy import load as parse
from safetensors.numpy import save_file
from scipy.fft import dstn, idctn, idstn  # type: ignore[import-untyped, unused-ignore]

from fsshard.demo import common
from fsshard.errors import ConfigurationError
from fsshard.launching.context import cores

FORCING = 50.0
"""The right-hand side of the equation."""

PERMEABILITY = (1.0, 18.0)
"""The coefficient ``a`` where ``x`` is 0 and where it is 1."""

ALPHA = 2.0
"""Smoothness of the Gaussian random field behind ``x``."""

TAU = 5.0
"""Inverse correlation length of that field."""

RESIDUAL = 1e-10
"""Relative residual at which the solver stops; the files hold float32, which knows no more than 6e-8."""

FORMAT = 1
"""Part of the cache's file name: raise it with any change to the numbers that :func:`generate` returns."""

_MAX_ITERATIONS = 2000
_MOST_WORKERS = 4
_FINE = 32
_COARSE = 16

POINTS = (np.arange(_FINE) * (512 // _FINE) + 0.5) / 512
"""The points of a 32 x 32 picture on ``[0, 1]``, along either axis."""

Array = npt.NDArray[np.float64]
Arrays = dict[str, npt.NDArray[Any]]
Operator = Callable[[Array], Array]
Pair = tuple[torch.Tensor, torch.Tensor]
Pictures = tuple[npt.NDArray[np.bool_], npt.NDArray[np.float32]]
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DarcyData:
    """Pictures to learn from and pictures to be tested on; every tensor is float32, ``(N, 1, height, width)``.

    Attributes:
        train_x: the inputs, zeros and ones, 16 x 16.
        train_y: the pressures, 16 x 16.
        tests: ``{16: (x, y), 32: (x, y)}``, the same unseen samples at the training and at twice that resolution.
    """

    train_x: torch.Tensor
    train_y: torch.Tensor
    tests: dict[int, Pair]


# The equation -----------------------------------------------------------------------------------------------------


def solve_darcy(a: npt.ArrayLike) -> Array:
    """Solve ``-div(a grad y) = FORCING`` on the unit square with ``y = 0`` on its boundary.

    Finite volumes on ``n x n`` cells, the unknowns in the cells' centres ``((i + 0.5) / n, (j + 0.5) / n)``, harmonic
    means of ``a`` on the faces between them: second order where ``a`` is constant, and exact in the flux through every
    cell. The system is solved by conjugate gradients, preconditioned with the Poisson equation, which the fast sine
    transform inverts; the number of steps grows with the root of ``max(a) / min(a)`` (about 50 for 18), not with ``n``.

    Args:
        a: the coefficient in the cells, ``(n, n)``, positive. The pressure is returned in the same shape.
    """
    coefficient = np.asarray(a, dtype=np.float64)
    n = len(coefficient)
    # What flows out of a cell is what is forced into it.
    operator = _flow_operator(coefficient)
    inverse = _poisson_inverse(n)
    forced = FORCING / n**2
    rhs = np.full((n, n), forced)
    return _conjugate_gradients(operator, inverse, rhs)


def _flow_operator(a: Array) -> Operator:
    """Return the function that maps the pressure in all cells to what flows out of each."""
    upper = a[:-1]
    lower = a[1:]
    down = 2 * upper * lower / (upper + lower)
    left = a[:, :-1]
    right = a[:, 1:]
    across = 2 * left * right / (left + right)
    diagonal = np.zeros_like(a)
    # The boundary is half a cell away from the outermost centres.
    for edge in (0, -1):
        diagonal[edge] += 2 * a[edge]
        diagonal[:, edge] += 2 * a[:, edge]
    diagonal[:-1] += down
    diagonal[1:] += down
    diagonal[:, :-1] += across
    diagonal[:, 1:] += across

    def apply(y: Array) -> Array:
        out = diagonal * y
        out[:-1] -= down * y[1:]
        out[1:] -= down * y[:-1]
        out[:, :-1] -= across * y[:, 1:]
        out[:, 1:] -= across * y[:, :-1]
        return out

    return apply


def _poisson_inverse(n: int) -> Operator:
    """Return the inverse of :func:`_flow_operator` for ``a = 1``: sines of half cells diagonalise it (DST-II)."""
    angles = np.pi * np.arange(1, n + 1) / (2 * n)
    line = 4 * np.sin(angles) ** 2
    eigenvalues = line[:, None] + line

    def apply(r: Array) -> Array:
        spectrum = dstn(r, type=2) / eigenvalues
        result: Array = idstn(spectrum, type=2, overwrite_x=True)
        return result

    return apply


def _dot(u: Array, v: Array) -> float:
    # Without BLAS, whose own threads would fight with ours and reorder the sum.
    products = u * v
    return float(products.sum())


def _conjugate_gradients(operator: Operator, inverse: Operator, rhs: Array) -> Array:
    solution = np.zeros_like(rhs)
    residual = rhs.copy()
    # Squares are compared, which takes no root in each step.
    target = RESIDUAL**2 * _dot(rhs, rhs)
    direction = inverse(residual)
    energy = _dot(residual, direction)
    for _ in range(_MAX_ITERATIONS):
        if _dot(residual, residual) <= target:
            return solution
        image = operator(direction)
        step = energy / _dot(direction, image)
        solution += step * direction
        residual -= step * image
        correction = inverse(residual)
        previous = energy
        energy = _dot(residual, correction)
        ratio = energy / previous
        direction = correction + ratio * direction
    raise RuntimeError(f"the solver has not converged in {_MAX_ITERATIONS} steps: max(a) / min(a) is too large")


# Its input and its pictures ---------------------------------------------------------------------------------------


def gaussian_random_field(n: int, rng: np.random.Generator) -> Array:
    """Draw a smooth random field with mean zero on ``n x n`` cell centres of the unit square.

    Its covariance is ``(-Laplacian + TAU^2)^(-ALPHA)`` with zero-flux boundaries (cosine modes), up to a factor
    that the sign of the field does not see. The constant mode is left out, so each field's own mean is zero.
    """
    modes = np.arange(n)
    rows = modes[:, None]
    squares = rows**2 + modes**2
    weights = (np.pi**2 * squares + TAU**2) ** (-ALPHA / 2)
    weights[0, 0] = 0.0
    scale = n * TAU ** (ALPHA - 1)
    coefficients = scale * weights * rng.standard_normal((n, n))
    field: Array = idctn(coefficients, norm="ortho")
    return field


def _at_points(y: Array) -> Array:
    """Interpolate the pressure at the 32 x 32 points of a picture: bilinear between centres, zero on the boundary."""
    n = len(y)
    centres = (np.arange(n) + 0.5) / n
    nodes = np.concatenate(([0.0], centres, [1.0]))
    upper = np.searchsorted(nodes, POINTS)
    lower = upper - 1
    widths = nodes[upper] - nodes[lower]
    share = (POINTS - nodes[lower]) / widths
    rest = 1 - share
    padded = np.pad(y, 1)
    above = padded[lower] * rest[:, None]
    rows = above + padded[upper] * share[:, None]
    left = rows[:, lower] * rest
    values: Array = left + rows[:, upper] * share
    return values


def _sample(resolution: int, seed: np.random.SeedSequence) -> tuple[Any, Any]:
    """Return a pair of 32 x 32 pictures, which depends on the arguments alone."""
    generator = np.random.default_rng(seed)
    high = gaussian_random_field(resolution, generator) > 0
    low_value, high_value = PERMEABILITY
    # The equation is solved on the fine grid; the picture has some of its points.
    y = solve_darcy(np.where(high, high_value, low_value))
    # The cell that a point lies in is the one nearest to it.
    cells = (POINTS * resolution).astype(int)
    x = high[np.ix_(cells, cells)]
    return x, _at_points(y).astype(np.float32)


def generate(
    n_samples: int,
    resolution: int = 128,
    seed: int = 0,
    *,
    progress: bool = True,
) -> Pictures:
    """Draw ``n_samples`` inputs and solve for their pressures, several at a time.

    Sample ``k`` depends on the seed, ``k`` and the resolution alone; more samples never change it.

    Args:
        n_samples: how many.
        resolution: cells per side of the grid that is solved on, at least 32.
        seed: any whole number from 0.
        progress: show a bar on standard error.

    Returns:
        ``x``, bool, and ``y``, float32, both ``(n_samples, 32, 32)``.
    """
    from rich.console import Console
    from rich.progress import track

    seeds = np.random.SeedSequence(seed).spawn(n_samples)
    # Threads, since numpy and scipy let go of the interpreter; more than four would wait for it.
    workers = min(cores(), _MOST_WORKERS)
    pool = ThreadPoolExecutor(workers)
    try:
        results = pool.map(functools.partial(_sample, resolution), seeds)
        shown = track(
            results,
            f"Solving Darcy flow at {resolution} x {resolution}",
            total=n_samples,
            console=Console(stderr=True),
            disable=not progress,
        )
        x, y = zip(*shown, strict=True)
    finally:
        # Without cancel_futures an interrupt would wait for all the samples.
        pool.shutdown(cancel_futures=True)
    return np.stack(x), np.stack(y)


# Loading ----------------------------------------------------------------------------------------------------------


def load(
    data_dir: str | os.PathLike[str] | None = None,
    *,
    n_train: int = 1000,
    n_test: int = 50,
    resolution: int = 128,
    progress: bool = True,
) -> DarcyData:
    """Return the data: solved once and kept in the user's cache, or read from neuraloperator's own files.

    Processes that call it together each solve for themselves; the file appears in one piece.

    Args:
        data_dir: a folder with ``darcy_train_16.pt``, ``darcy_test_16.pt`` and ``darcy_test_32.pt``; the arguments
            after ``n_test`` then have no meaning.
        n_train: how many samples to train on (the files hold 1000).
        n_test: how many to test on (the files hold 50). They do not change with ``n_train``.
        resolution: cells per side of the grid that is solved on.
        progress: show a bar while solving.

    Raises:
        FileNotFoundError: ``data_dir`` lacks one of its files.
        ConfigurationError: a file in ``data_dir`` does not hold what it should.
    """
    if data_dir is not None:
        return _load_files(Path(data_dir), n_train, n_test)
    name = f"darcy-v{FORMAT}-cells{resolution}-seed0-train{n_train}-test{n_test}.safetensors"
    file = common.cache_dir("darcy") / name
    arrays = _read_cache(file)
    if arrays is None:
        count = n_test + n_train
        # The tests come first, so that n_train does not move them.
        x, y = generate(count, resolution, progress=progress)
        step = _FINE // _COARSE
        arrays = {
            "test_x": x[:n_test],
            "test_y": y[:n_test],
            "train_x": x[n_test:, ::step, ::step],
            "train_y": y[n_test:, ::step, ::step],
        }
        for kind, array in arrays.items():
            arrays[kind] = np.ascontiguousarray(array)
        _write_cache(file, arrays)
    return _as_pictures(arrays)


def _as_pictures(arrays: Arrays) -> DarcyData:
    def images(name: str, step: int = 1) -> torch.Tensor:
        pictures = arrays[name][:, None, ::step, ::step]
        numbers = pictures.astype(np.float32, order="C")
        return torch.from_numpy(numbers)

    tests = {}
    for side in (_COARSE, _FINE):
        step = _FINE // side
        tests[side] = (images("test_x", step), images("test_y", step))
    return DarcyData(train_x=images("train_x"), train_y=images("train_y"), tests=tests)


def _write_cache(file: Path, arrays: Arrays) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        common.replace_file(file, functools.partial(save_file, arrays))
    except OSError as error:
        # A cache that cannot be written costs time, not the run.
        log.warning("cannot keep the Darcy data in %s, the next run will solve for them again: %s", file, error)


def _read_cache(file: Path) -> Arrays | None:
    """Return the cached arrays, or None where there are none or the file is not whole."""
    try:
        return parse(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError) as error:
        log.warning("the cached Darcy data in %s are damaged and will be made again: %s", file, error)
        return None


def _load_files(folder: Path, n_train: int, n_test: int) -> DarcyData:
    """Read neuraloperator's own files."""

    def read(part: str, side: int, count: int) -> Pair:
        file = folder / f"darcy_{part}_{side}.pt"
        try:
            content = torch.load(file, map_location="cpu", weights_only=True)
            x = content["x"][:count, None].to(torch.float32)
            y = content["y"][:count, None].to(torch.float32)
            if not x.shape == y.shape == (count, 1, side, side):
                raise ValueError(f"tensors of shapes {tuple(x.shape)} and {tuple(y.shape)}")
        except FileNotFoundError as error:
            raise FileNotFoundError(f"no file {file}; expected a data_dir with {', '.join(OFFICIAL)}") from error
        except Exception as error:
            # torch raises RuntimeError, UnpicklingError, EOFError and more over a bad file.
            expected = f"a dict with tensors x and y of one shape (N, {side}, {side}), N at least {count}"
            problem = f"{type(error).__name__}: {error}"
            raise ConfigurationError(f"{file}: expected {expected}, got {problem}") from error
        return x, y

    x, y = read("train", _COARSE, n_train)
    tests = {}
    for side in (_COARSE, _FINE):
        tests[side] = read("test", side, n_test)
    return DarcyData(train_x=x, train_y=y, tests=tests)


# neuraloperator's own files -----------------------------------------------------------------------------------------

REQUIREMENT = "neuraloperator==0.3.0"
WITHIN = "neuralop/datasets/data"
OFFICIAL = ("darcy_train_16.pt", "darcy_test_16.pt", "darcy_test_32.pt")


def official_files() -> Path:
    """Return neuraloperator's own files, for the ``data_dir`` of :func:`load`.

    They are in its wheel of version 0.3.0 (4 MB, BSD licence), which ``pip download`` fetches the first time, and are
    kept in ``~/.cache/fsshard/darcy-official``.

    Raises:
        FileNotFoundError: pip cannot fetch the wheel.
    """
    folder = common.cache_dir("darcy-official")
    missing = [name for name in OFFICIAL if not (folder / name).is_file()]
    if not missing:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as there:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", there, REQUIREMENT]
        process = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
        wheels = list(Path(there).glob("*.whl"))
        if process.returncode or not wheels:
            last_line = process.stderr.strip().rpartition("\n")[2]
            why = last_line or f"exit code {process.returncode}"
            raise FileNotFoundError(
                f"pip cannot fetch {REQUIREMENT}, whose wheel has the Darcy files ({why}); on another machine, run "
                f"pip download --no-deps {REQUIREMENT}, unzip it, and pass --data-dir .../{WITHIN}; or leave out "
                "--data official: the data are solved here then"
            )
        with zipfile.ZipFile(wheels[0]) as packed:
            for name in OFFICIAL:
                content = packed.read(f"{WITHIN}/{name}")
                write = functools.partial(Path.write_bytes, data=content)
                common.replace_file(folder / name, write)
    return folder
