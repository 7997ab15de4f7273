"""Constants of machines: what they make of a step's work, and files of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from fsshard.errors import ConfigurationError
from fsshard.simulation.collectives import Traffic
from fsshard.simulation.machine import MACHINES, Machine, machine_of, to_json
from fsshard.simulation.work import Work

UNIT = Machine(
    name="unit",
    device="cpu",
    flops={"float32": 10.0, "bfloat16": 40.0},
    written=5.0,
    operator=0.5,
    sent=4.0,
    collective=2.0,
    host=2.0,
    source="made up",
)


def test_the_five_terms() -> None:
    work = Work(flops={"float32": 30, "bfloat16": 40, "float64": 20}, written=15, operators=6)
    traffic = [Traffic(kind=kind, count=n, nbytes=9, sent=4) for n, kind in ((1, "all_gather"), (2, "reduce_scatter"))]
    found = UNIT.terms(work, traffic)
    # A dtype of which nothing is known is as fast as float32; gloo's reduce_scatter sends everything twice.
    assert found == {"flops": 3 + 1 + 2, "written": 3, "operators": 3, "sent": 1 + 2, "collectives": 6}
    away = UNIT.terms(dataclasses.replace(work, offloaded=20), [])
    assert away["offloaded"] == 20  # out and back
    assert UNIT.terms(dataclasses.replace(work, shards=7), [])["offloaded"] == 7  # to the device and back
    assert dataclasses.replace(UNIT, device="cuda").terms(work, traffic)["sent"] == 2


def test_a_machine_by_name_by_file_and_by_itself(tmp_path: Path) -> None:
    assert machine_of(None, "cuda") is MACHINES["h100"] and machine_of(None, "cpu") is MACHINES["cpu"]
    assert machine_of("a100", "cuda").name == "a100" and machine_of(UNIT, "cpu") is UNIT
    file = tmp_path / "machine.json"
    file.write_text(to_json([UNIT, MACHINES["h200"]]))
    assert machine_of(str(file), "cpu") == UNIT and machine_of(file, "cuda") == MACHINES["h200"]
    assert all(one.source and one.name == name for name, one in MACHINES.items())


@pytest.mark.parametrize(
    ("machine", "device", "said"),
    [
        ("h100", "cpu", "'h100' is for cuda, not for device='cpu'; pass device='cuda', .*: known are cpu, a100"),
        ("no_such", "cpu", r"machine='no_such': No such file.*fsshard doctor --measure machine\.json"),
        (7, "cpu", "machine=7: expected a name, a file or a Machine"),
        (None, "tpu", "device='tpu': expected 'cpu' or 'cuda'"),
    ],
)
def test_what_is_no_machine(machine: Any, device: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        machine_of(machine, device)


@pytest.mark.parametrize(
    "text", ["[]", "{", "7", '{"machines": []}', '{"machines": [{"name": "x"}]}', "0.0", "NaN", '"1e9"']
)
def test_a_file_that_is_none_of_ours(tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.json"
    changed = to_json([UNIT]).replace('"sent": 4.0', f'"sent": {text}')
    file.write_text(changed if text in ("0.0", "NaN", '"1e9"') else text)
    with pytest.raises(ConfigurationError, match=r"x\.json' is not a file of constants"):
        machine_of(file, "cpu")


def test_constants_are_checked_when_they_are_given() -> None:
    said = "expected a dict in which 'float32' is"
    for changed, text in (
        ({"flops": {"bfloat16": 1e9}}, said),
        ({"flops": 1e9}, said),
        ({"sent": 0}, r"sent=0\): exp"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            dataclasses.replace(UNIT, **changed)
    with pytest.raises(ConfigurationError, match=r"flops\['float64'\]='1e9'\): expected a number above zero"):
        dataclasses.replace(UNIT, flops={"float32": 1, "float64": "1e9"})


def test_a_machine_of_another_device_says_which() -> None:
    """As the error advises."""
    device = "cuda"
    with pytest.raises(ConfigurationError, match=f"pass device={device!r}, or another machine: "):
        machine_of("h100", "cpu")
    assert machine_of("h100", device).device == device
