"""What torch's words in a forward mean to who wraps a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsshard.errors import ConfigurationError, FsshardError, ModelError, PrecisionError, UnsupportedByBackend
from fsshard.sharded.forward_errors import explain_forward_error

TORCH_SAYS = {
    "torch.func transforms don't yet support saved tensor hooks. Please open an issue": ConfigurationError,
    "forward() returned a view, but the jvp is not returning a view": UnsupportedByBackend,
    "mat1 and mat2 must have the same dtype, but got Float and BFloat16": PrecisionError,
    "aten.mm.default got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor": ModelError,
    "Output 0 of _UnitInputsBackward is a view and is being modified inplace.": FsshardError,
}


def backend(param: torch.dtype | None) -> Any:
    return SimpleNamespace(
        name="fsdp2",
        facts=SimpleNamespace(has_dtensors=True),
        settings=SimpleNamespace(precision=SimpleNamespace(param=param)),
    )


@pytest.mark.parametrize("text", TORCH_SAYS)
def test_each_is_explained_by_its_kind(text: str) -> None:
    found = explain_forward_error(RuntimeError(text), backend(torch.bfloat16))
    assert type(found) is TORCH_SAYS[text]


def test_dtypes_that_differ_in_full_precision_are_the_models_own_affair() -> None:
    said = RuntimeError("mat1 and mat2 must have the same dtype, but got Float and Double")
    assert explain_forward_error(said, backend(None)) is None
    assert explain_forward_error(RuntimeError("out of memory"), backend(torch.bfloat16)) is None
