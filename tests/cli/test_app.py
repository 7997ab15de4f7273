"""The program: its commands, its version, its end, and what it says without the packages that it needs.

Tests fsshard/checkpoint/format/version.py too.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

import fsshard
import fsshard.parity
from fsshard.cli import app as cli
from fsshard.parity import ParityReport


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"fsshard {fsshard.__version__}\n"


def test_without_a_command_it_helps(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "parity" in capsys.readouterr().out
    assert cli.main(["parity", "--help"]) == 0
    assert "--world-size" in capsys.readouterr().out


def test_without_typer_or_rich(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """No other module of the library may import them (import-linter), so that these alone need be imported anew."""
    monkeypatch.setattr(fsshard, "cli", fsshard.cli)  # put back afterwards
    for name in [name for name in sys.modules if name.startswith("fsshard.cli")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.setitem(sys.modules, "rich", None)
    fresh = importlib.import_module("fsshard.cli.app")
    assert fresh is not cli and fresh.main(["parity", "x:y"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "'rich'" in err and "pip install 'fsshard[cli]'" in err
    assert "(in a clone of the repository: pip install '.[cli]')" in err
    assert fresh.main(["--version"]) == 0 and capsys.readouterr().out == f"fsshard {fsshard.__version__}\n"
    for arguments, code in ((["--help"], 0), (["parity", "-h"], 0), ([], 2)):
        assert fresh.main(arguments) == code
        out, err = capsys.readouterr()
        assert "parity, inspect, export, import" in out and "pip install 'fsshard[cli]'" in out and err == ""


def test_terminated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Folders of temporary files go, and the handler that was there comes back."""

    def compare(recipe: str, **options: Any) -> ParityReport:
        with tempfile.TemporaryDirectory(dir=tmp_path):
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(60)  # the handler runs at once
        raise AssertionError("not ended")

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(fsshard.parity, "compare", compare)
    with pytest.raises(SystemExit, match="143"):
        cli.main(["parity", "tests.cli.test_parity:tiny"])
    assert signal.getsignal(signal.SIGTERM) is before and list(tmp_path.iterdir()) == []
