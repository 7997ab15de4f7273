"""Rotating shallow water on a doubly periodic plane: weather-like fields, solved here and now, nothing downloaded.

One layer of fluid of mean depth 1 on a plane that turns: depth anomaly ``h`` and velocities ``u``, ``v`` obey

    h_t = -((1 + h) u)_x - ((1 + h) v)_y
    u_t =  (f + zeta) v - (c^2 h + (u^2 + v^2) / 2)_x      with the vorticity  zeta = v_x - u_y
    v_t = -(f + zeta) u - (c^2 h + (u^2 + v^2) / 2)_y

which is the vector-invariant form of the equations in G. K. Vallis, *Atmospheric and Oceanic Fluid Dynamics* (2017),
chapter 3. It has what makes weather hard to forecast: vortices that carry each other about, fast gravity waves on top,
and small scales that grow out of large ones. It is no real atmosphere: no sphere, no heat, no mountains.

    runs = shallow_water.load(n_runs=16, n_steps=64)     # (16, 64, 3, 32, 64) float32, then read from the user's cache

Lengths are in units of the plane's height, times in units of what a gravity wave takes to cross it.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.fft import irfft2, rfft2  # type: ignore[import-untyped, unused-ignore]

from fsshard.demo import common

__all__ = ["CHANNELS", "FORMAT", "INTERVAL", "Solver", "cache_dir", "generate", "load"]

CHANNELS = ("h", "u", "v")
"""Depth anomaly and the two velocities, in this order along the axis of channels."""

INTERVAL = 0.1
"""Time between two snapshots."""

CORIOLIS = 4.0
"""``f``: the plane turns once in ``4 pi / f``; vortices are about ``1 / f`` wide, a quarter of the plane's height."""

WIND = 0.25
"""Root mean square of ``u`` at the start, as a part of the gravity waves' speed, which is 1."""

SPIN_UP = 1.0
"""Time that passes before the first snapshot, in which the flow forgets how it was drawn."""

DAMPING = 20.0
"""Rate at which hyperviscosity damps the smallest scale that there is."""

FORMAT = 1
"""Part of the cache's file name: raise it with any change to the numbers that :func:`generate` returns."""

_MOST_WORKERS = 4

Spectrum = npt.NDArray[np.complex128]
Fields = npt.NDArray[np.float64]
log = logging.getLogger(__name__)


class Solver:
    """Pseudo-spectral in space, fourth-order Runge-Kutta in time.

    Derivatives are products with wave numbers, products are taken on the grid, and what they make above two thirds of
    the largest wave number is cut (Orszag's rule), for it would come back as something else. Energy that arrives at the
    smallest scales is taken out by a hyperviscosity ``-nu Laplacian^2``. The mean of ``h`` stays, to the bit.

    Args:
        shape: rows and columns of the grid; its cells are squares and its height is 1.

    Raises:
        ValueError: fewer than 8 rows or columns, or an odd number of them.
    """

    def __init__(self, shape: tuple[int, int]) -> None:
        if min(shape) < 8 or any(side % 2 for side in shape):
            raise ValueError(f"shape must be two even numbers from 8, got {shape}")
        self.shape = shape
        rows, columns = shape
        width = columns / rows
        x = 2 * np.pi * np.fft.rfftfreq(columns, width / columns)[None]
        y = 2 * np.pi * np.fft.fftfreq(rows, 1 / rows)[:, None]
        self.ix, self.iy, self.k2 = 1j * x, 1j * y, x**2 + y**2
        self.kept = (np.abs(x) < 2 / 3 * np.pi * rows) & (np.abs(y) < 2 / 3 * np.pi * rows)
        self.viscosity = DAMPING * (self.k2 / self.k2[self.kept].max()) ** 2
        # A gravity wave on the fastest wind may cross less than half a cell in one step.
        self.longest_step = 0.4 / rows / (1 + 4 * WIND)

    def balanced(self, rng: np.random.Generator) -> Spectrum:
        """A random start without gravity waves: wind along the isobars, two waves to a height (geostrophic balance)."""
        wave = 2 * np.pi * 2
        noise = rng.standard_normal((2, *self.k2.shape))
        stream = (noise[0] + 1j * noise[1]) * np.exp(-(((np.sqrt(self.k2) - wave) / (0.35 * wave)) ** 2))
        stream[0, 0] = 0
        stream *= self.kept  # the tendency never fills what is cut
        stream *= WIND / np.sqrt(np.mean(self.on_grid(-self.iy * stream) ** 2))
        return np.stack([CORIOLIS * stream, -self.iy * stream, self.ix * stream])

    def on_grid(self, spectrum: Spectrum) -> Fields:
        """Values on the grid, ``(..., rows, columns)``."""
        fields: Fields = irfft2(spectrum, self.shape)
        return fields

    def tendency(self, state: Spectrum) -> Spectrum:
        """Time derivative of ``state``, both ``(3, rows, columns // 2 + 1)``."""
        h, u, v, zeta = self.on_grid(np.stack([*state, self.ix * state[2] - self.iy * state[1]]))
        turning = CORIOLIS + zeta
        products = [(1 + h) * u, (1 + h) * v, turning * v, turning * u, h + (u**2 + v**2) / 2]
        east, north, to_u, to_v, pressure = rfft2(np.stack(products)) * self.kept
        change = np.stack([-self.ix * east - self.iy * north, to_u - self.ix * pressure, -to_v - self.iy * pressure])
        result: Spectrum = change - self.viscosity * state
        return result

    def advance(self, state: Spectrum, time: float) -> Spectrum:
        """``state`` after ``time``, in as many steps as it takes."""
        steps = int(np.ceil(time / self.longest_step))
        dt = time / steps
        for _ in range(steps):
            first = self.tendency(state)
            second = self.tendency(state + dt / 2 * first)
            third = self.tendency(state + dt / 2 * second)
            fourth = self.tendency(state + dt * third)
            state = state + dt / 6 * (first + 2 * second + 2 * third + fourth)
        return state


def _run(
    shape: tuple[int, int], n_steps: int, interval: float, seed: np.random.SeedSequence
) -> npt.NDArray[np.float32]:
    """One run's snapshots, ``(n_steps, 3, rows, columns)``; depends on its arguments alone."""
    solver = Solver(shape)
    state = solver.advance(solver.balanced(np.random.default_rng(seed)), SPIN_UP)
    snapshots = [solver.on_grid(state)]
    for _ in range(n_steps - 1):
        state = solver.advance(state, interval)
        snapshots.append(solver.on_grid(state))
    return np.stack(snapshots).astype(np.float32)


def generate(
    n_runs: int,
    n_steps: int,
    shape: tuple[int, int] = (32, 64),
    *,
    interval: float = INTERVAL,
    seed: int = 0,
    workers: int | None = None,
    progress: bool = True,
) -> npt.NDArray[np.float32]:
    """Solve ``n_runs`` runs from random starts, several at a time.

    Run ``k`` depends on the seed, ``k``, the shape and the interval, and on nothing else: more runs or more workers
    never change it. The workers are threads: nearly all the time is spent inside numpy and scipy.

    Args:
        n_runs: how many.
        n_steps: snapshots of each.
        shape: rows and columns of the grid.
        interval: time between two snapshots.
        seed: any whole number from 0.
        workers: threads; when not given, as many as there are cores, but no more than four.
        progress: show a bar on standard error.

    Returns:
        float32, ``(n_runs, n_steps, 3, rows, columns)``.

    Raises:
        ValueError: an argument is out of its range.
    """
    for name, value, least in (("n_runs", n_runs, 1), ("n_steps", n_steps, 2), ("seed", seed, 0)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if interval <= 0:
        raise ValueError(f"interval must be positive, got {interval}")
    Solver(shape)  # says at once if the shape is none
    workers = min(os.cpu_count() or 1, _MOST_WORKERS) if workers is None else workers
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    return _tracked(functools.partial(_run, shape, n_steps, interval), n_runs, seed, workers, progress)


def _tracked(
    run: Callable[[np.random.SeedSequence], npt.NDArray[np.float32]],
    count: int,
    seed: int,
    workers: int,
    progress: bool,
) -> npt.NDArray[np.float32]:
    from rich.console import Console
    from rich.progress import track

    pool = ThreadPoolExecutor(workers)
    try:
        results = pool.map(run, np.random.SeedSequence(seed).spawn(count))
        console = Console(stderr=True)
        return np.stack(
            list(track(results, "Solving shallow water", total=count, console=console, disable=not progress))
        )
    finally:
        pool.shutdown(cancel_futures=True)  # without it an interrupt would wait for all the runs


# The cache --------------------------------------------------------------------------------------------------------


def cache_dir() -> Path:
    """``$XDG_CACHE_HOME/fsshard/shallow_water`` or ``~/.cache/fsshard/shallow_water``; see :func:`common.cache_dir`."""
    return common.cache_dir("shallow_water")


def load(n_runs: int, n_steps: int, shape: tuple[int, int] = (32, 64), **options: Any) -> npt.NDArray[np.float32]:
    """As :func:`generate`: solved once and kept in the user's cache.

    Call it in the parent, before the ranks are launched. Processes that call it together are safe too: each solves
    for itself, the results are the same, and the file appears in one piece.

    Raises:
        ValueError: an argument is out of its range.
    """
    interval, seed = options.get("interval", INTERVAL), options.get("seed", 0)
    stem = f"v{FORMAT}-{shape[0]}x{shape[1]}-runs{n_runs}-steps{n_steps}-every{interval}-seed{seed}"
    file = cache_dir() / f"{stem}.safetensors"
    runs = _read(file, (n_runs, n_steps, len(CHANNELS), *shape))
    if runs is None:
        runs = generate(n_runs, n_steps, shape, **options)
        _write(file, runs)
    return runs


def _digest(runs: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(hashlib.sha256(runs.tobytes()).digest(), dtype=np.uint8)


def _write(file: Path, runs: npt.NDArray[np.float32]) -> None:
    """Keep the runs and their digest; a cache that cannot be written costs time, not the training."""
    from safetensors.numpy import save

    content = save({"runs": runs, "sha256": _digest(runs)})
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        common.replace_file(file, lambda temporary: temporary.write_bytes(content))
    except OSError as error:
        log.warning("cannot keep the runs in %s, the next training will solve for them again: %s", file, error)


def _read(file: Path, shape: tuple[int, ...]) -> npt.NDArray[np.float32] | None:
    """The cached runs, or None where there are none or the file is not whole."""
    from safetensors import SafetensorError
    from safetensors.numpy import load as parse

    try:
        arrays = parse(file.read_bytes())
        runs: npt.NDArray[np.float32] = arrays["runs"]
        if runs.shape != shape or not np.array_equal(arrays["sha256"], _digest(runs)):
            raise ValueError("its shape or its bytes are others than those that were written")
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        log.warning("the cached runs in %s are damaged and will be solved for again: %s", file, error)
        return None
    return runs
