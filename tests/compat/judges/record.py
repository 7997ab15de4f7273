"""What became of each of another library's tests, as lines of JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Record:
    """Writes to the file that ``FSSHARD_JUDGED_RECORD`` names."""

    def __init__(self) -> None:
        self.used = False
        """Whether the test that runs has made what is judged."""
        self._failed: str | None = None

    def note(self, name: str, report: Any, call: Any) -> None:
        """Of a phase of a test; after its last one, the line is written."""
        if report.when == "setup":
            self._failed, self.used = None, False
        if report.failed and self._failed is None:
            self._failed = f"{call.excinfo.typename}: {call.excinfo.value}"
        if report.when == "call" or (report.when == "setup" and not report.passed):
            self._outcome = "skipped" if report.skipped else "passed"
        if report.when != "teardown":
            return
        line = {
            "test": name,
            "outcome": "failed" if self._failed is not None else self._outcome,
            "used": self.used,
            "why": (self._failed or "")[-2000:],
        }
        with Path(os.environ["FSSHARD_JUDGED_RECORD"]).open("a") as file:
            file.write(json.dumps(line) + "\n")
