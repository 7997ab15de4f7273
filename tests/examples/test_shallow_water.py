"""The solver of shallow water: a wave that is known in closed form, and the same numbers again."""

from __future__ import annotations

from typing import Any

import numpy as np

from examples.shallow_water import CORIOLIS, Solver, generate


def test_a_small_gravity_wave_moves_as_theory_says() -> None:
    """omega^2 = f^2 + k^2: D. Gill, Atmosphere-Ocean Dynamics, section 8.2."""
    solver, height, time = Solver((16, 32)), 1e-6, 0.7
    k = 2 * np.pi / 2  # one wave on a plane that is two wide
    omega = np.sqrt(CORIOLIS**2 + k**2)
    x = np.broadcast_to(np.arange(32) * 2 / 32, (16, 32))

    def wave(t: float) -> Any:
        phase = k * x - omega * t
        return height * np.stack([np.cos(phase), omega / k * np.cos(phase), CORIOLIS / k * np.sin(phase)])

    found = solver.on_grid(solver.advance(np.fft.rfft2(wave(0)), time))
    # Left out: terms of the second order (1e-6), RK4's phase ((omega dt)^4 / 120 per step: 1e-6), viscosity (3e-4).
    assert np.abs(found - wave(time)).max() < 1e-3 * height
    assert np.abs(found - wave(0)).max() > height


def test_a_run_depends_on_the_seed_and_its_number_alone() -> None:
    two = generate(2, 3, (16, 16), workers=2, progress=False)
    assert two.shape == (2, 3, 3, 16, 16) and two.dtype == np.float32 and np.isfinite(two).all()
    assert np.array_equal(generate(1, 3, (16, 16), workers=1, progress=False), two[:1])
    assert not np.array_equal(two[0], two[1])
    assert not np.array_equal(generate(1, 3, (16, 16), seed=1, progress=False), two[:1])
    assert np.abs(two.mean((3, 4))[:, :, 0]).max() < 1e-7, "the mean depth"
