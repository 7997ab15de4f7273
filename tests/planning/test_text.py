"""Text that a terminal is given."""

from __future__ import annotations

from fsshard.planning.text import printable


def test_what_a_terminal_would_obey_is_spelled() -> None:
    assert printable("läst 步骤 (1/2)") == "läst 步骤 (1/2)"
    assert printable("a\x1b[31m\x07\r\n\t\x7f") == r"a\x1b[31m\x07\r\n\t\x7f"
    assert printable("\x9b31m\u202e\u2028\ud800") == r"\x9b31m\u202e\u2028\ud800"
    assert printable("two\nlines\x1b", keep="\n") == "two\nlines\\x1b"
