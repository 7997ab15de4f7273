"""A pytest plugin that puts our Accelerator over an engine into Accelerate's tests; see :mod:`.run`.

``-p tests.compat.judges.accelerate`` with ``FSSHARD_JUDGED`` naming an engine, or ``theirs``: Accelerate's own, with
DDP, in a job of one rank; tests that fork ranks have as many as they fork.
"""

from __future__ import annotations

from typing import Any

import accelerate
import pytest
import torch

import fsshard.compat.accelerate

from .record import ENGINE, RECORD, find_theirs, pytest_runtest_makereport  # noqa: F401


class Accelerator(fsshard.compat.accelerate.Accelerator):
    """With the arguments of Accelerate's."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, fsshard={"backend": ENGINE}, **given)


def pytest_configure(config: pytest.Config) -> None:
    """Substitute, before a test module is imported."""
    find_theirs()
    torch.set_num_threads(1)
    if ENGINE == "theirs":
        return
    RECORD.watch(fsshard, "wrap")
    accelerate.Accelerator = accelerate.accelerator.Accelerator = Accelerator
