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
import hashlib
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from scipy.fft import dstn, idctn, idstn  # type: ignore[import-untyped, unused-ignore]

from fsshard.demo import common

if TYPE_CHECKING:
    import torch
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORCING = 50.0
"""The right-hand side of the equation."""

PERMEABILITY = (1.0, 18.0)
"""The coefficient ``a`` where ``x`` is 0 and where it is 1."""

ALPHA, TAU = 2.0, 5.0
"""Smoothness and inverse correlation length of the Gaussian random field behind ``x``."""

RESIDUAL = 1e-10
"""Relative residual at which the solver stops; the files hold float32, which knows no more than 6e-8."""

FORMAT = 1
"""Part of the cache's file name: raise it with any change to the numbers that :func:`generate` returns."""

_MAX_ITERATIONS = 2000
_MOST_WORKERS = 4
_FINE = 32
_COARSE = 16

Array = npt.NDArray[np.float64]
Arrays = dict[str, npt.NDArray[Any]]
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
    tests: dict[int, tuple[torch.Tensor, torch.Tensor]]


# The equation -----------------------------------------------------------------------------------------------------


def solve_darcy(a: npt.ArrayLike, forcing: float = FORCING) -> Array:
    """Solve ``-div(a grad y) = forcing`` on the unit square with ``y = 0`` on its boundary.

    Finite volumes on ``n x n`` cells, the unknowns in the cells' centres, harmonic means of ``a`` on the faces
    between them: second order where ``a`` is constant, and exact in the flux through every cell. The system is solved
    by conjugate gradients, preconditioned with the Poisson equation, which the fast sine transform inverts; the
    number of steps grows with the root of ``max(a) / min(a)`` (about 50 for 18) and not with ``n``.

    Args:
        a: the coefficient in the cells, ``(n, n)``, positive.
        forcing: the constant right-hand side.

    Returns:
        The pressure in the cells' centres ``((i + 0.5) / n, (j + 0.5) / n)``, ``(n, n)``.

    Raises:
        ValueError: ``a`` is not square, or not positive and finite everywhere.
        RuntimeError: no convergence, which takes a ratio of coefficients beyond any that this example makes.
    """
    coefficient = np.asarray(a, dtype=np.float64)
    if coefficient.ndim != 2 or coefficient.shape[0] != coefficient.shape[1] or not coefficient.size:
        raise ValueError(f"a must be a square field (n, n), got shape {coefficient.shape}")
    if not (np.isfinite(coefficient).all() and (coefficient > 0).all()):
        raise ValueError("a must be positive and finite in every cell")
    n = coefficient.shape[0]
    rhs = np.full((n, n), forcing / n**2)
    return _conjugate_gradients(_flow_operator(coefficient), _poisson_inverse(n), rhs)


def _flow_operator(a: Array) -> Callable[[Array], Array]:
    """Return the function that maps the pressure in all cells to what flows out of each."""
    down = 2 * a[:-1] * a[1:] / (a[:-1] + a[1:])
    across = 2 * a[:, :-1] * a[:, 1:] / (a[:, :-1] + a[:, 1:])
    diagonal = np.zeros_like(a)
    for edge in (0, -1):  # the boundary is half a cell away from the outermost centres
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


def _poisson_inverse(n: int) -> Callable[[Array], Array]:
    """Return the inverse of :func:`_flow_operator` for ``a = 1``: sines of half cells diagonalise it (DST-II)."""
    line = 4 * np.sin(np.pi * np.arange(1, n + 1) / (2 * n)) ** 2
    eigenvalues = line[:, None] + line

    def apply(r: Array) -> Array:
        result: Array = idstn(dstn(r, type=2) / eigenvalues, type=2, overwrite_x=True)
        return result

    return apply


def _dot(u: Array, v: Array) -> float:
    # Without BLAS, whose own threads would fight with ours and reorder the sum.
    return float((u * v).sum())


def _conjugate_gradients(operator: Callable[[Array], Array], inverse: Callable[[Array], Array], rhs: Array) -> Array:
    solution, residual = np.zeros_like(rhs), rhs.copy()
    target = RESIDUAL**2 * _dot(rhs, rhs)
    direction = correction = inverse(residual)
    energy = _dot(residual, correction)
    for _ in range(_MAX_ITERATIONS):
        if _dot(residual, residual) <= target:
            return solution
        image = operator(direction)
        step = energy / _dot(direction, image)
        solution += step * direction
        residual -= step * image
        correction = inverse(residual)
        previous, energy = energy, _dot(residual, correction)
        direction = correction + (energy / previous) * direction
    raise RuntimeError(f"the solver has not converged in {_MAX_ITERATIONS} steps: max(a) / min(a) is too large")


# Its input and its pictures ---------------------------------------------------------------------------------------


def gaussian_random_field(n: int, rng: np.random.Generator, tau: float = TAU) -> Array:
    """Draw a smooth random field with mean zero on ``n x n`` cell centres of the unit square.

    Its covariance is ``(-Laplacian + tau^2)^(-ALPHA)`` with zero-flux boundaries (cosine modes), up to a factor
    that the sign of the field does not see. The constant mode is left out, so each field's own mean is zero.
    """
    modes = np.arange(n)
    weights = (np.pi**2 * (modes[:, None] ** 2 + modes**2) + tau**2) ** (-ALPHA / 2)
    weights[0, 0] = 0.0
    field: Array = idctn(n * tau ** (ALPHA - 1) * weights * rng.standard_normal((n, n)), norm="ortho")
    return field


def file_points(side: int = _FINE) -> Array:
    """Return where the ``side`` points of a picture lie on ``[0, 1]``, along either axis; ``side`` divides 512."""
    return (np.arange(side) * (512 // side) + 0.5) / 512


def _at_points(y: Array) -> Array:
    """Interpolate the pressure at the 32 x 32 points of a picture: bilinear between centres, zero on the boundary."""
    n = len(y)
    nodes = np.concatenate(([0.0], (np.arange(n) + 0.5) / n, [1.0]))
    points = file_points()
    upper = np.searchsorted(nodes, points)
    share = (points - nodes[upper - 1]) / (nodes[upper] - nodes[upper - 1])
    padded = np.pad(y, 1)
    rows = padded[upper - 1] * (1 - share)[:, None] + padded[upper] * share[:, None]
    values: Array = rows[:, upper - 1] * (1 - share) + rows[:, upper] * share
    return values


def _sample(resolution: int, seed: np.random.SeedSequence) -> tuple[Any, Any]:
    """Return a pair of 32 x 32 pictures, which depends on the arguments alone."""
    field = gaussian_random_field(resolution, np.random.default_rng(seed)) > 0
    y = solve_darcy(np.where(field, PERMEABILITY[1], PERMEABILITY[0]))
    cells = (file_points() * resolution).astype(int)  # the cell that a point lies in is the one nearest to it
    return field[np.ix_(cells, cells)], _at_points(y).astype(np.float32)


def generate(
    n_samples: int,
    resolution: int = 128,
    seed: int = 0,
    workers: int | None = None,
    *,
    progress: bool = True,
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float32]]:
    """Draw ``n_samples`` inputs and solve for their pressures, several at a time.

    Sample ``k`` depends on the seed, ``k`` and the resolution, and on nothing else: more workers or more samples
    never change it. The workers are threads: nearly all the time is spent inside numpy and scipy, which let go
    of the interpreter, and threads start at once where processes first import everything anew.

    Args:
        n_samples: how many.
        resolution: cells per side of the grid that is solved on, at least 32.
        seed: any whole number from 0.
        workers: threads; when not given, as many as there are cores, but no more than four: each step is so short
            that further threads would mostly wait for the interpreter.
        progress: show a bar on standard error.

    Returns:
        ``x``, bool, and ``y``, float32, both ``(n_samples, 32, 32)``.

    Raises:
        ValueError: ``resolution`` is below 32.
    """
    if resolution < _FINE:
        raise ValueError(f"resolution must be at least {_FINE}, got {resolution}")
    if workers is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        workers = min(cores, _MOST_WORKERS)
    from rich.console import Console
    from rich.progress import track

    seeds = np.random.SeedSequence(seed).spawn(n_samples)
    pool = ThreadPoolExecutor(workers)
    try:
        results = pool.map(functools.partial(_sample, resolution), seeds)
        label, console = f"Solving Darcy flow at {resolution} x {resolution}", Console(stderr=True)
        pairs = list(track(results, label, total=n_samples, console=console, disable=not progress))
    finally:
        pool.shutdown(cancel_futures=True)  # without it an interrupt would wait for all the samples
    return np.stack([x for x, _ in pairs]), np.stack([y for _, y in pairs])


# Loading ----------------------------------------------------------------------------------------------------------


def load(
    data_dir: str | os.PathLike[str] | None = None,
    *,
    n_train: int = 1000,
    n_test: int = 50,
    resolution: int = 128,
    seed: int = 0,
    cache: bool = True,
    progress: bool = True,
) -> DarcyData:
    """Return the data: solved once and kept in the user's cache, or read from neuraloperator's own files.

    Call it in the parent, before the ranks are launched. Processes that call it together are safe too: each solves
    for itself, the results are the same, and the file appears in one piece.

    Args:
        data_dir: a folder with ``darcy_train_16.pt``, ``darcy_test_16.pt`` and ``darcy_test_32.pt``; the arguments
            after ``n_test`` then have no meaning.
        n_train: how many samples to train on (the files hold 1000).
        n_test: how many to test on (the files hold 50). They do not change with ``n_train``.
        resolution: cells per side of the grid that is solved on.
        seed: of all the samples.
        cache: read and write the user's cache, see :func:`cache_dir`.
        progress: show a bar while solving.

    Raises:
        FileNotFoundError: ``data_dir`` lacks one of its files.
        ValueError: a file in ``data_dir`` does not hold what it should, or an argument is out of its range.
    """
    for name, value in (("n_train", n_train), ("n_test", n_test)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if data_dir is not None:
        return _load_files(Path(data_dir), n_train, n_test)
    stem = f"darcy-v{FORMAT}-cells{resolution}-seed{seed}-train{n_train}-test{n_test}"
    file = cache_dir() / f"{stem}.safetensors"
    arrays = _read_cache(file) if cache else None
    if arrays is None:
        # The tests come first, so that n_train does not move them.
        x, y = generate(n_test + n_train, resolution, seed, progress=progress)
        coarse = np.s_[n_test:, :: _FINE // _COARSE, :: _FINE // _COARSE]
        arrays = {"test_x": x[:n_test], "test_y": y[:n_test], "train_x": x[coarse], "train_y": y[coarse]}
        arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        if cache:
            _write_cache(file, arrays)
    return _assemble(arrays)


def cache_dir() -> Path:
    """Return the folder of the solved data, see :func:`fsshard.demo.common.cache_dir`."""
    return common.cache_dir("darcy")


def _assemble(arrays: Arrays) -> DarcyData:
    import torch

    def images(name: str, step: int = 1) -> torch.Tensor:
        return torch.from_numpy(arrays[name][:, None, ::step, ::step].astype(np.float32, order="C"))

    tests = {side: (images("test_x", _FINE // side), images("test_y", _FINE // side)) for side in (_COARSE, _FINE)}
    return DarcyData(train_x=images("train_x"), train_y=images("train_y"), tests=tests)


def _digest(arrays: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.uint8]:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(name.encode())
        digest.update(arrays[name].tobytes())
    return np.frombuffer(digest.digest(), dtype=np.uint8)


def _write_cache(file: Path, arrays: Arrays) -> None:
    """Keep the arrays and their digest; a cache that cannot be written costs time, not the run."""
    from safetensors.numpy import save

    content = save({**arrays, "sha256": _digest(arrays)})
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        common.replace_file(file, lambda temporary: temporary.write_bytes(content))
    except OSError as error:
        log.warning("cannot keep the Darcy data in %s, the next run will solve for them again: %s", file, error)
    else:
        log.info("kept the Darcy data in %s", file)


def _read_cache(file: Path) -> Arrays | None:
    """Return the cached arrays, or None where there are none or the file is not whole."""
    from safetensors import SafetensorError
    from safetensors.numpy import load as parse

    try:
        arrays: Arrays = parse(file.read_bytes())
        digest = arrays.pop("sha256")
        if not np.array_equal(digest, _digest(arrays)):
            raise ValueError("its bytes have changed since they were written")
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        log.warning("the cached Darcy data in %s are damaged and will be made again: %s", file, error)
        return None
    return arrays


def _load_files(folder: Path, n_train: int, n_test: int) -> DarcyData:
    parts = {("train", _COARSE): n_train, ("test", _COARSE): n_test, ("test", _FINE): n_test}
    files = {part: folder / f"darcy_{part[0]}_{part[1]}.pt" for part in parts}
    for file in files.values():
        if not file.is_file():
            names = ", ".join(each.name for each in files.values())
            raise FileNotFoundError(f"{file} does not exist; data_dir must hold neuraloperator's {names}")
    read = {(part, side): _load_file(files[part, side], side, f"n_{part}", n) for (part, side), n in parts.items()}
    x, y = read["train", _COARSE]
    return DarcyData(train_x=x, train_y=y, tests={side: read["test", side] for side in (_COARSE, _FINE)})


def _load_file(file: Path, side: int, argument: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    expected = f"a dict with tensors x and y of one shape (N, {side}, {side})"
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises RuntimeError, UnpicklingError, EOFError and more over a bad file
        raise ValueError(f"{file} cannot be read; expected {expected}: {error}") from error
    held = content if isinstance(content, dict) else {"object": content}
    shapes = {name: tuple(getattr(value, "shape", ())) for name, value in held.items()}
    if "x" not in shapes or shapes["x"] != shapes.get("y") or shapes["x"][1:] != (side, side):
        raise ValueError(f"{file} holds tensors of shapes {shapes}; expected {expected}")
    x, y = content["x"], content["y"]
    if len(x) < count:
        raise ValueError(f"{file} holds {len(x)} samples, fewer than {argument}={count}")
    return x[:count, None].to(torch.float32), y[:count, None].to(torch.float32)


# neuraloperator's own files -----------------------------------------------------------------------------------------

REQUIREMENT = "neuraloperator==0.3.0"
WITHIN = "neuralop/datasets/data"
SHA256 = {
    "darcy_train_16.pt": "0be662acdb1dab7dfd1a1da0b140e97f75cc94f98a14edcf768abe6968b3b418",
    "darcy_test_16.pt": "d2b19af9d4a6ae04ba2de54b8ecccc8b89766472faf6ce7f506c0b2a60f69a4c",
    "darcy_test_32.pt": "bcbd10622373e94df84a17fcdb72ac4317d76e024c2499d21fd1fd34d0742cfd",
}


def official_files() -> Path:
    """Return neuraloperator's own files, for the ``data_dir`` of :func:`load`.

    They are in its wheel of version 0.3.0 (4 MB, BSD licence), which ``pip download`` fetches the first time, and are
    kept in ``~/.cache/fsshard/darcy-official``.

    Raises:
        FileNotFoundError: pip cannot fetch the wheel, or what it fetched is not what was published.
    """
    folder = common.cache_dir("darcy-official")
    if all(_whole(folder / name, digest) for name, digest in SHA256.items()):
        return folder
    with tempfile.TemporaryDirectory() as there:
        wheel = _fetched(Path(there))
        with zipfile.ZipFile(wheel) as packed:
            contents = {name: packed.read(f"{WITHIN}/{name}") for name in SHA256}
    damaged = [name for name, content in contents.items() if hashlib.sha256(content).hexdigest() != SHA256[name]]
    if damaged:
        raise FileNotFoundError(f"{wheel.name} has another {damaged[0]} than the wheel that was published")
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        common.replace_file(folder / name, functools.partial(Path.write_bytes, data=content))
    log.info("kept neuraloperator's Darcy files in %s", folder)
    return folder


def _whole(file: Path, digest: str) -> bool:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest() == digest
    except OSError:
        return False


def _fetched(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), REQUIREMENT]
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    found = sorted(folder.glob("*.whl"))
    if done.returncode or not found:
        said = (done.stderr or "").strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        raise FileNotFoundError(
            f"pip cannot fetch {REQUIREMENT}, whose wheel has the Darcy files ({said}); on another machine, run "
            f"pip download --no-deps {REQUIREMENT}, unzip it, and pass --data-dir .../{WITHIN}; or leave out --data "
            "official: the data are solved here then"
        )
    return found[0]


# The picture ------------------------------------------------------------------------------------------------------


def picture(
    path: str | os.PathLike[str],
    x: torch.Tensor,
    y: torch.Tensor,
    predictions: Mapping[str, torch.Tensor],
) -> None:
    """Draw a row per sample: the input, the truth, each prediction, and how far the predictions are off.

    The last column is the distance to the truth; of several predictions, the largest one at each point. In the
    corner of each prediction stands its relative L2 error.

    Args:
        path: where the picture goes; its suffix says the format. It appears in one piece.
        x: the inputs, ``(N, H, W)`` or ``(N, 1, H, W)``; a handful of samples, each becomes a row.
        y: the true pressures, same shape.
        predictions: a column per entry, named by its key; same shape.

    Raises:
        ValueError: no prediction, no sample, or shapes that do not fit.
    """
    inputs, truth = _panels("x", x), _panels("y", y)
    guesses = {name: _panels(f"predictions[{name!r}]", guess) for name, guess in predictions.items()}
    if not guesses or not len(truth):
        raise ValueError("picture needs at least one sample and one prediction")
    for name, panels in {"x": inputs, **guesses}.items():
        if panels.shape != truth.shape:
            raise ValueError(f"{name} has shape {panels.shape}, y has {truth.shape}; they must be the same")
    file = Path(path)
    figure = _draw(inputs, truth, guesses)
    file.parent.mkdir(parents=True, exist_ok=True)
    common.replace_file(file, lambda temporary: figure.savefig(temporary, dpi=160))


def _panels(name: str, tensor: torch.Tensor) -> Array:
    array: Array = tensor.detach().cpu().double().numpy()
    if array.ndim == 4 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 3:
        raise ValueError(f"{name} must be (N, H, W) or (N, 1, H, W), got {tuple(tensor.shape)}")
    return array


def _draw(inputs: Array, truth: Array, guesses: Mapping[str, Array]) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.figure import Figure

    errors = np.max([np.abs(guess - truth) for guess in guesses.values()], axis=0)
    only = next(iter(guesses)) if len(guesses) == 1 else None
    pressure = {"cmap": "viridis", "vmin": 0.0, "vmax": _top(truth)}
    material: dict[str, Any] = {"cmap": ListedColormap(["#e8d9b5", "#7d5a3c"]), "norm": BoundaryNorm([0, 0.5, 1], 2)}
    columns: list[tuple[str, Array, dict[str, Any]]] = [("input $x$", inputs, material), ("truth $y$", truth, pressure)]
    columns += [(name, guess, pressure) for name, guess in guesses.items()]
    heading = f"|{only} $-$ $y$|" if only else "largest |error|"
    columns.append((heading, errors, {"cmap": "magma", "vmin": 0.0, "vmax": _top(errors)}))

    rows = len(truth)
    figure = Figure(figsize=(1.75 * len(columns), 1.68 * rows + 0.75), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, len(columns), squeeze=False)
    for column, (title, panels, style) in enumerate(columns):
        axes[0, column].set_title(title, fontsize=10)
        for row in range(rows):
            axes[row, column].imshow(panels[row], interpolation="nearest", **style)
            axes[row, column].set(xticks=[], yticks=[])
            if title in guesses:
                _note_error(axes[row, column], panels[row], truth[row])
    _colour_bars(figure, axes)
    return figure


def _top(panels: Array) -> float:
    """Return the upper end of a colour scale, also where a prediction is not finite or all is zero."""
    return float(np.max(panels, initial=0.0, where=np.isfinite(panels))) or 1.0


def _note_error(ax: Axes, guess: Array, truth: Array) -> None:
    error = np.linalg.norm(guess - truth) / np.linalg.norm(truth)
    box = {"boxstyle": "round,pad=0.2", "facecolor": "black", "alpha": 0.45, "linewidth": 0}
    ax.text(0.96, 0.05, f"{error:.1%}", transform=ax.transAxes, ha="right", color="white", fontsize=7, bbox=box)


def _colour_bars(figure: Figure, axes: Any) -> None:
    """Draw three small bars below: the materials, the pressure under all its columns, the error."""
    from matplotlib.ticker import MaxNLocator

    shape: dict[str, Any] = {"location": "bottom", "pad": 0.02}
    width = axes.shape[1] - 2
    bars = [
        figure.colorbar(axes[0, 0].images[0], ax=axes[:, 0], shrink=0.85, aspect=14, ticks=[0.25, 0.75], **shape),
        figure.colorbar(axes[0, 1].images[0], ax=axes[:, 1:-1], shrink=0.96, aspect=17 * width, **shape),
        figure.colorbar(axes[0, -1].images[0], ax=axes[:, -1], shrink=0.85, aspect=14, ticks=MaxNLocator(3), **shape),
    ]
    bars[0].set_ticklabels([f"$a = {value:g}$" for value in PERMEABILITY])
    for bar in bars:
        bar.outline.set_linewidth(0)  # type: ignore[operator, unused-ignore]
        bar.minorticks_off()
        bar.ax.tick_params(labelsize=7, length=0 if bar is bars[0] else 2)
