"""Constants of machines: what they make of a step's work, and files of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from fsshard.errors import ConfigurationError
from fsshard.simulation.collectives import GroupTraffic, Traffic
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


def sent_by(members: tuple[int, ...], kind: str, count: int) -> Traffic:
    """Return the traffic of a group that sends four bytes."""
    by_group = {members: GroupTraffic(count, 4.0)}
    return Traffic(kind=kind, count=count, nbytes=9, sent=4, by_group=by_group)


def test_the_five_terms() -> None:
    work = Work(flops={"float32": 30, "bfloat16": 40, "float64": 20}, written=15, operators=6)
    traffic = [sent_by((0, 1), "all_gather", 1), sent_by((0, 1), "reduce_scatter", 2)]
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


NODES = dataclasses.replace(UNIT, device="cuda", per_node=4, sent=8.0, between=1.0, hop=0.25, hop_between=3.0)
"""Nodes of four ranks; a link of one byte a second for each rank between them."""


@pytest.mark.parametrize(
    ("kind", "members", "bandwidth", "latency"),
    [
        # Within a node: a ring of four has three hops, all of them inside.
        ("all_gather", (0, 1, 2, 3), 8, 2 + 3 * 0.25),
        # Two whole nodes: rings over four links at once; seven hops, one of them between nodes.
        ("all_gather", tuple(range(8)), 4, 2 + 6 * 0.25 + 3),
        # Replicas, a rank of each node: each has its own link alone, and all hops are between nodes.
        ("all_gather", (1, 5, 9, 13), 1, 2 + 3 * 3),
        # Many members a node: the links inside are the narrowest.
        ("reduce_scatter", tuple(range(8)), 4, 2 + 6 * 0.25 + 3),
        # A ring there and back, 2 x 3 x 3, is slower than a tree of four nodes, 2 x 2 x 3.
        ("all_reduce", (1, 5, 9, 13), 1, 2 + 2 * 2 * 3),
        # An even exchange of eight sends 4/7 of it to the other node, by the rank's own link.
        ("all_to_all", tuple(range(8)), 1 / (4 / 7 + 3 / 7 / 8), 2 + 3),
        ("all_to_all", (0, 1), 8, 2 + 0.25),
        # One rank, or a group of which nothing is known.
        ("broadcast", (0,), 8, 2),
        ("broadcast", (), 8, 2),
    ],
)
def test_links_of_nodes(kind: str, members: tuple[int, ...], bandwidth: float, latency: float) -> None:
    assert NODES.bandwidth(kind, members) == pytest.approx(bandwidth)
    assert NODES.latency(kind, members) == pytest.approx(latency)
    terms = NODES.terms(Work(flops={}, written=0, operators=0), [sent_by(members, kind, 3)])
    assert terms["sent"] == pytest.approx(4 / bandwidth) and terms["collectives"] == pytest.approx(3 * latency)


def test_numbers_of_nodes_are_checked_and_have_defaults() -> None:
    assert UNIT.bandwidth("all_gather", tuple(range(100))) == UNIT.sent
    assert dataclasses.replace(NODES, between=0.0).bandwidth("all_gather", (0, 4)) == NODES.sent
    gloo = dataclasses.replace(NODES, device="cpu")
    assert gloo.bandwidth("broadcast", (0, 4)) == 1 and NODES.bandwidth("broadcast", tuple(range(8))) == 4
    # Of seven messages four always leave, one of two and one of four on average.
    outside = (4 + 2 / 2 + 1 / 4) / 7
    assert gloo.bandwidth("broadcast", tuple(range(8))) == pytest.approx(1 / (outside + (1 - outside) / 8))
    assert "and 1e-09 GB/s to other nodes, of 4 ranks each" in str(NODES) and "nodes" not in str(UNIT)
    with pytest.raises(ConfigurationError, match=r"between=-1\): expected a number, 0 for none"):
        dataclasses.replace(NODES, between=-1)
