"""What became of each of another library's tests, as lines of JSON."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any


class Record:
    """Writes to the file that ``FSSHARD_JUDGED_RECORD`` names. What processes do that a test forks is the test's."""

    def __init__(self) -> None:
        self._failed: str | None = None

    @property
    def _used(self) -> Path:
        """Is there where the test that runs has made what is judged."""
        return Path(os.environ["FSSHARD_JUDGED_RECORD"] + ".used")

    def watch(self, owner: Any, name: str) -> None:
        """Note from now on that a test has called this, and that it returned."""
        own = getattr(owner, name)

        @functools.wraps(own)
        def noted(*args: Any, **given: Any) -> Any:
            found = own(*args, **given)
            self._used.touch()
            return found

        setattr(owner, name, noted)

    def note(self, name: str, report: Any, call: Any) -> None:
        """Of a phase of a test; after its last one, the line is written."""
        if report.when == "setup":
            self._failed = None
            self._used.unlink(missing_ok=True)
        if report.failed and self._failed is None:
            self._failed = f"{call.excinfo.typename}: {call.excinfo.value}"
        if report.when == "call" or (report.when == "setup" and not report.passed):
            self._outcome = "skipped" if report.skipped else "passed"
        if report.when != "teardown":
            return
        line = {
            "test": name,
            "outcome": "failed" if self._failed is not None else self._outcome,
            "used": self._used.exists(),
            "why": (self._failed or "")[-2000:],
        }
        with Path(os.environ["FSSHARD_JUDGED_RECORD"]).open("a") as file:
            file.write(json.dumps(line) + "\n")
