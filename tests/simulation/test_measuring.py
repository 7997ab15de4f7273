"""The constants of this machine, measured on ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

from fsshard.simulation import measuring
from fsshard.simulation.machine import Machine, machine_of, to_json


def job_measured() -> Machine:
    """Measure with small products, which take seconds in half precision on many CPUs, and twice each."""
    with patch.dict(measuring.SIZES, cpu=(64, *measuring.SIZES["cpu"][1:])), patch.object(measuring, "SAMPLES", 2):
        return measuring.measured_machine("cpu")


def test_constants_are_the_same_on_every_rank_and_can_be_read_again(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks.run(job_measured, 2)
    assert first == second and "on 2 ranks" in first.source
    file = tmp_path / "machine.json"
    file.write_text(to_json([first]))
    assert machine_of(file, "cpu") == first
    # Orders of magnitude of any CPU: a product is fast, a collective costs more than an operator.
    assert 1e8 < first.flops["float32"] < 1e13 and 1e7 < first.written < 1e12 and 1e6 < first.sent < 1e12
    assert 1e-7 < first.operator < first.collective < 1.0


def test_alone_collectives_are_as_usual(ranks: Any) -> None:
    (alone,) = ranks.run(job_measured, 1)
    usual = machine_of(None, "cpu")
    assert (alone.sent, alone.collective) == (usual.sent, usual.collective) and "one rank" in alone.source
