"""A pytest plugin that puts our Accelerator over an engine into Accelerate's tests; see :mod:`.run`.

``-p tests.compat.judges.accelerate`` with ``FSSHARD_JUDGED`` naming an engine, or ``theirs``: Accelerate's own, with
DDP, in a job of one rank; tests that fork ranks have as many as they fork.
"""

from __future__ import annotations

import os
from typing import Any

import accelerate
import pytest
import torch

import fsshard.compat.accelerate

from . import find_theirs
from .record import Record

ENGINE = os.environ.get("FSSHARD_JUDGED", "theirs")
RECORD = Record()


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


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Any:
    """One line per test."""
    outcome = yield
    RECORD.note(item.nodeid, outcome.get_result(), call)
