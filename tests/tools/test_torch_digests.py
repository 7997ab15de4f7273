"""Checks that what we stand on in torch is as it was when somebody read it, or names the lines to read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsshard.torch_private import registry
from fsshard.torch_private.registry import Area
from tools import torch_behaviour
from tools.torch_behaviour import counted_on
from tools.torch_digests import Change, Record, compare, ground, unsigned, users_of


def test_what_we_stand_on_is_as_recorded() -> None:
    found = compare()
    told = (
        "read these lines, mend what is affected, then `python -m tools.torch_digests --record`, and say "
        "behind each digest that has changed what it means here"
    )
    assert not found.changes, f"{told}:\n{found}"
    assert found.parts > 900


def test_what_a_new_torch_has_changed_was_read() -> None:
    assert Record.read().unread() == [], "say in torch_digests.json, behind the digest, what the change means here"


def test_every_name_stands_on_something() -> None:
    stood = {(area, file) for area, file, _ in ground()}
    floating = {one.name for one in registry.everything() if one.present and (one.area, one.source) not in stood}
    assert floating <= {entry.name for entry in unsigned()}
    whys = {name for one in ground().values() for name in one.names}
    assert [one.name for one in counted_on() if one.why not in whys] == []


TORCH = """
class Unit:
    def gather(self):
        self._whole = 1

    def free(self):
        del self._whole

    def other(self):
        return 2

def reduce(x):
    return x / 2
"""
FILE = "torch/made_up.py"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a torch of which an area stands on an attribute, and on a function that it does not use."""
    monkeypatch.setattr(registry, "_known", {})
    monkeypatch.setattr(torch_behaviour, "COUNTED_ON", {"flying": {"torch.made_up:reduce": "the mean"}})
    area = Area("flying")
    area.attribute("torch.made_up:Unit._whole", source=FILE, use="wings", otherwise="no flying")
    write(tmp_path, TORCH)
    return tmp_path


def write(site: Path, text: str) -> None:
    (site / "torch").mkdir(exist_ok=True)
    (site / FILE).write_text(text)


def recorded(*versions: str, site: Path) -> Record:
    record = Record({}, {})
    for version in versions:
        record = record.noting(version, ground(site))
    return record


def test_an_attribute_stands_on_all_that_mentions_it(site: Path) -> None:
    assert {key[2]: (one.lines, one.names) for key, one in ground(site).items()} == {
        "Unit.gather": ("3-4", ("Unit._whole",)),
        "Unit.free": ("6-7", ("Unit._whole",)),
        "reduce": ("12-13", ("the mean",)),
    }


def test_what_has_changed_is_named_with_its_lines_and_what_rests_on_it(site: Path) -> None:
    record = recorded("2.13.0", site=site)
    assert compare("2.13.0", record, site).changes == ()
    write(site, "# a comment\n" + TORCH.replace("    def gather", "\n    def gather"))
    assert compare("2.13.0", record, site).changes == (), "lines that move and comments do not count"
    write(
        site,
        TORCH.replace("x / 2", "x / 3").replace("return 2", "return self._whole").replace("del self._whole", "pass"),
    )
    found = compare("2.13.0", record, site)
    assert found.changes == (
        Change("flying", FILE, "Unit.free", "gone"),
        Change("flying", FILE, "Unit.other", "new", "9-10", ("Unit._whole",)),
        Change("flying", FILE, "reduce", "changed", "12-13", ("the mean",)),
    )
    assert "3 of 4 parts of torch 2.13.0 are not as recorded with torch 2.13.0" in str(found)
    assert "torch/made_up.py:12-13: reduce changed: the mean" in str(found)
    (site / FILE).unlink()
    assert [change.kind for change in compare("2.13.0", record, site).changes] == ["gone"] * 3


def test_a_digest_that_stays_is_recorded_once_and_notes_are_kept(site: Path, tmp_path: Path) -> None:
    record = recorded("2.13.0+cpu", "2.14.1", site=site)
    write(site, TORCH.replace("x / 2", "x / 3"))
    record = record.noting("2.15.0", ground(site))
    key = ("flying", FILE, "reduce")
    assert list(record.said[key]) == ["2.13", "2.15"] and list(record.said["flying", FILE, "Unit.free"]) == ["2.13"]
    assert record.unread() == [f"{FILE}, reduce, 2.15"]
    record.said[key]["2.15"] += " thirds: harmless"
    record.write(path := tmp_path / "digests.json")
    assert json.loads(path.read_text())["torch"] == {"2.13": "2.13.0", "2.14": "2.14.1", "2.15": "2.15.0"}
    again = Record.read(path)
    assert again == record and again.unread() == []
    assert again.noting("2.15.0", ground(site)) == again
    write(site, TORCH)
    assert again.noting("2.14.1", ground(site)) == again
    assert compare("2.15.0", again, site).changes[0].part == "reduce"
    restored = again.noting("2.15.0", ground(site))
    assert list(restored.said[key]) == ["2.13"], "as in the versions before"


def test_who_rests_on_an_area_is_found() -> None:
    assert "fsshard/backends/fsdp2.py" in users_of("fsdp2") and "fsshard/backends/ddp.py" not in users_of("fsdp2")
    assert users_of("fsdp2_collectives") == [
        "fsshard/comm/gloo/collectives.py",
        "fsshard/comm/narrow_gather.py",
        "fsshard/comm/unit_reduction.py",
    ]
    for area in sorted({entry.area for entry in registry.everything()}):
        assert users_of(area), f"nobody uses {area}"
