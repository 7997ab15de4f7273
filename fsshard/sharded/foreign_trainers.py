"""Warns when another library's trainer would misuse a wrapped model.

They are known by the name of the module that asks, so that none of them is imported here.
"""

from __future__ import annotations

import warnings
from types import FrameType
from typing import Any

from fsshard.errors import ConfigurationError

__all__ = ["check_trainer"]

NEURALOP = "neuralop.training.trainer"
OURS = "fsshard.compat.neuralop"


def check_trainer(caller: FrameType, world_size: int) -> None:
    """Look at who moves the model to its device, which a trainer does once before it trains.

    neuraloperator 2.0.0's ``Trainer`` sums its loss over this rank's part of the batch, and engines average gradients
    over the ranks: the training gets 1 / world_size of the gradient that one process has, without a word. Our own
    Trainer, which is its subclass, weighs the loss.

    Raises:
        ConfigurationError: neuraloperator's ``Trainer(use_distributed=True)`` would put the model into DDP again.
    """
    if world_size == 1 or caller.f_globals.get("__name__") != NEURALOP or caller.f_code.co_name != "train":
        return
    trainer: Any = caller.f_locals.get("self")
    if any(kind.__module__.startswith(OURS) for kind in type(trainer).__mro__):
        return
    instead = f"use its subclass: from {OURS} import Trainer"
    if getattr(trainer, "use_distributed", False):
        raise ConfigurationError(
            "neuralop.Trainer(use_distributed=True) puts a model that fsshard.wrap returned into DDP again; "
            f"{instead}, or pass use_distributed=False"
        )
    loss = caller.f_locals.get("training_loss")
    if getattr(loss, "reduction", None) == "mean":  # the average of averages over equal parts is right
        return
    warnings.warn(
        f"neuralop.Trainer sums the loss over this rank's samples, while gradients are averaged over {world_size} "
        f"ranks: it trains with 1/{world_size} of the gradient that one process has with the same global batch, and "
        f"the loss that it reports is this rank's. Instead, {instead}",
        stacklevel=4,
    )
