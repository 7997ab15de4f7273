"""Values of options, and where output goes: held back, shown once, and JSON to a file or to stdout.

Tests fsshard/cli/options.py and fsshard/cli/output.py.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest

from fsshard.cli.options import backend_names, meshes, world_sizes
from fsshard.cli.output import held_output, progress_bar, write_json
from fsshard.errors import ConfigurationError


def test_json_goes_to_a_file_or_to_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(str(tmp_path / "it.json"), "[1]")
    assert (tmp_path / "it.json").read_text() == "[1]\n"
    write_json("-", "[2]")
    assert capsys.readouterr().out == "[2]\n"


@pytest.mark.parametrize(("show", "expected"), [(True, ["from a rank", "printed"]), (False, [])])
def test_what_is_printed_meanwhile_is_shown_afterwards_each_line_once(
    show: bool, expected: list[str], capfd: Any
) -> None:
    with held_output(show=show) as stderr:
        os.write(1, b"from a rank\n")
        os.write(2, b"from a rank\n")
        print("printed")
        stderr.write("to the terminal\n")
        stderr.flush()
    out, err = capfd.readouterr()
    assert out == "" and [line for line in err.splitlines() if line != "to the terminal"] == expected
    assert "to the terminal" in err


def test_an_error_shows_what_was_held_back(capfd: Any) -> None:
    with pytest.raises(ValueError, match="broken"):
        talk_and_fail()
    assert "the reason" in capfd.readouterr().err


def talk_and_fail() -> None:
    with held_output(show=False):
        print("the reason")
        raise ValueError("broken")


def test_a_bar_where_one_is_wanted_or_there_is_a_terminal() -> None:
    stream = io.StringIO()
    with progress_bar(None, stream) as bar:
        bar("no terminal")(1.0, 4.0, "a quarter")
    assert stream.getvalue() == ""
    with progress_bar(True, stream) as bar:
        bar("work")(1.0, 4.0, "a quarter")
    assert "work" in stream.getvalue()


def test_lists_are_split_stripped_and_told_apart() -> None:
    assert backend_names(" fsdp2, ddp,") == ["fsdp2", "ddp"]
    assert world_sizes(["1,2", "2", "8 "]) == [1, 2, 8]


def test_sizes_that_are_none() -> None:
    for text in ("", "0", "two", "1,-2", "1.5", "²"):
        with pytest.raises(ConfigurationError, match="expected positive whole numbers"):
            world_sizes([text])


def test_meshes() -> None:
    assert meshes([]) == []
    assert meshes(["data=2, tp=2,", "data=4"]) == [{"data": 2, "tp": 2}, {"data": 4}]
    for text in ["", "data", "=2", "data=", "data=two", "data=-1", "2x2"]:
        with pytest.raises(ConfigurationError, match="expected names and sizes, for example --mesh data=2,tp=2"):
            meshes([text])
    with pytest.raises(ConfigurationError, match="named twice"):
        meshes(["data=2,data=2"])
