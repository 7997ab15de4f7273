"""Tensors without memory, for simulations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from fsshard.torch_private.patching import replaced
from fsshard.torch_private.registry import Area

AREA = Area("fake_tensors", otherwise="estimates but by real=True")

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
    )
else:
    FakeTensor = AREA.take("torch._subclasses.fake_tensor:FakeTensor", use="a tensor without memory")
    FakeTensorMode = AREA.take("torch._subclasses.fake_tensor:FakeTensorMode", use="lets operators make such tensors")
    DataDependentOutputException = AREA.take(
        "torch._subclasses.fake_tensor:DataDependentOutputException",
        use="raised where numbers are read, of which there are none",
    )
    DynamicOutputShapeException = AREA.take(
        "torch._subclasses.fake_tensor:DynamicOutputShapeException", use="raised where a shape depends on numbers"
    )
unset_fake_temporarily: Callable[[], AbstractContextManager[Any]] = AREA.take(
    "torch._subclasses.fake_tensor:unset_fake_temporarily", use="makes real tensors in between"
)


def copied_by(copy: Callable[[Any, dict[int, Any]], Any]) -> AbstractContextManager[None]:
    """Let ``copy`` be ``copy.deepcopy`` of fake tensors, within."""
    return replaced(FakeTensor, "__deepcopy__", copy)


@contextlib.contextmanager
def swapped_by(swap: Callable[[Any, Any], None]) -> Iterator[None]:
    """Let ``module.to(dtype)`` do ``swap`` to a parameter, within."""
    with replaced(torch.utils, "swap_tensors", swap):
        yield
