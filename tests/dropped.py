"""Models that are dropped, whatever they were in the middle of, and what is left of them then."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import batch

PASSES = ("none", "no gradient", "forward", "whole", "broken")


class Breaks(torch.autograd.Function):
    """An error in the middle of a backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ZeroDivisionError


def run_pass(model: Any, kind: str) -> None:
    """None at all, a forward that asks for no gradient or gets no backward, both, or a backward that breaks off."""
    if kind == "broken":
        model.middle[0].register_forward_hook(lambda module, inputs, output: Breaks.apply(output))
    with torch.set_grad_enabled(kind != "no gradient"):
        loss = model(batch(0)).sum() if kind != "none" else None
    if loss is not None and kind in ("whole", "broken"):
        with pytest.raises(ZeroDivisionError) if kind == "broken" else contextlib.nullcontext():
            loss.backward()


class Known:
    """Which objects are still there."""

    def __init__(self, **objects: Any) -> None:
        self._objects = {name: weakref.ref(known) for name, known in objects.items()}

    def left(self) -> list[str]:
        for _ in range(6):  # what the end of one object lets go can be found by the next
            torch.ones((), requires_grad=True).backward()  # until then torch keeps what a broken one has left undone
            gc.collect()
            if not (left := [name for name, known in self._objects.items() if known() is not None]):
                break
        return left
