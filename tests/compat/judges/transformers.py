"""A pytest plugin that puts our Trainers over an engine into Hugging Face's tests; see :mod:`.run`.

``-p tests.compat.judges.transformers`` with ``FSSHARD_JUDGED`` naming an engine, or ``theirs``: Hugging Face's own
Trainer, with DDP. One process is one rank of a job of one, so that there is something to put the model under.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

import fsshard.compat.transformers

from .record import ENGINE, RECORD, find_theirs, pytest_runtest_makereport, stand_in  # noqa: F401


class Trainer(fsshard.compat.transformers.Trainer):
    """With the arguments of Hugging Face's."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, fsshard={"backend": ENGINE}, **given)


class Seq2SeqTrainer(fsshard.compat.transformers.Seq2SeqTrainer):
    """Likewise."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, fsshard={"backend": ENGINE}, **given)


def pytest_configure(config: pytest.Config) -> None:
    """Substitute, before a test module is imported."""
    find_theirs()
    stand_in("transformers", "tests/trainer")
    torch.set_num_threads(1)
    if ENGINE == "theirs":
        return
    RECORD.watch(fsshard, "wrap")
    # transformers puts another module into the place of its own while it is imported: not the one that is known here
    for name in ("transformers", "transformers.trainer", "transformers.trainer_seq2seq"):
        module = importlib.import_module(name)
        setattr(module, "Trainer", Trainer)  # noqa: B010
        setattr(module, "Seq2SeqTrainer", Seq2SeqTrainer)  # noqa: B010
