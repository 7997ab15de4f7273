"""A pytest plugin that puts ours over an engine into the tests of Accelerate, or of transformers; see :mod:`.run`.

``-p tests.compat.judges.hugging_face`` with ``FSSHARD_JUDGED`` naming an engine, or ``theirs``: their own, with DDP.
One process is one rank of a job of one, so that there is something to put the model under; tests that fork ranks have
as many as they fork.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch

import fsshard.compat.accelerate
import fsshard.compat.transformers

from .record import ENGINE, RECORD, find_theirs, pytest_runtest_makereport, stand_in  # noqa: F401


def over_an_engine(kind: Any) -> Any:
    """A subclass with the arguments of their own."""

    def make(self: Any, *args: Any, **given: Any) -> None:
        kind.__init__(self, *args, fsshard={"backend": ENGINE}, **given)

    return type(kind.__name__, (kind,), {"__init__": make})


def pytest_configure(config: pytest.Config) -> None:
    """Substitute, before a test module is imported."""
    find_theirs()
    torch.set_num_threads(1)
    trainers = Path(os.environ["FSSHARD_JUDGED_CHECKOUT"], "tests/trainer").is_dir()
    if trainers:
        stand_in("transformers", "tests/trainer")
    if ENGINE == "theirs":
        return
    RECORD.watch(fsshard, "wrap")
    if not trainers:
        accelerate.Accelerator = accelerate.accelerator.Accelerator = over_an_engine(
            fsshard.compat.accelerate.Accelerator
        )
        return
    # transformers puts another module into the place of its own while it is imported: not the one that is known here
    for kind in (fsshard.compat.transformers.Trainer, fsshard.compat.transformers.Seq2SeqTrainer):
        ours = over_an_engine(kind)
        for name in ("transformers", "transformers.trainer", "transformers.trainer_seq2seq"):
            setattr(importlib.import_module(name), kind.__name__, ours)
