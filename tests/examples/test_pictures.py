"""Pictures of the examples, of numbers that are given: parity_strip.py, same_bits_picture.py, who_holds_what.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from examples import parity_strip, same_bits, same_bits_picture, who_holds_what
from fsshard.pictures import draw_picture

LOSSES = [0.5 - step / 200 for step in range(60)]
HELD = SimpleNamespace(highest=dict.fromkeys(who_holds_what.KINDS, 2**24))
PAINTERS: dict[str, Any] = {
    "strip": lambda figure: parity_strip.paint(figure, [("fsdp2", ["exact", "different"])]),
    "curve": lambda figure: same_bits_picture.paint(figure, same_bits.MOVES, LOSSES, LOSSES),
    "bars": lambda figure: who_holds_what.paint(figure, {"ddp": HELD}),
}


@pytest.mark.parametrize("name", PAINTERS)
def test_the_same_numbers_give_the_same_file(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    for file in ("one.svg", "two.svg"):
        draw_picture(tmp_path / file, (9, 3), PAINTERS[name])
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes() != b""
