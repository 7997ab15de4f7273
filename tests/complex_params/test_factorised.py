"""Factorised weights of tltorch: sliced, indexed and replaced as natively."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fsshard import tensorfy
from tests.complex_params.training import equal, gradients
from tests.zoo import ZOO, number

pytestmark = pytest.mark.filterwarnings("ignore:Complex modules are a new feature under active development")


def factor_list(name: str) -> tuple[Any, Any]:
    native, flat = ZOO[name].build(), tensorfy(ZOO[name].build())
    return native.fno_blocks.convs[0].weight, flat.fno_blocks.convs[0].weight


@pytest.mark.parametrize("name", ["tfno_tucker", "tfno_cp", "tfno_tt", "fno_complex_tucker", "fno_complex_tt"])
def test_factor_lists_can_be_sliced(name: str) -> None:
    native, flat = factor_list(name)
    for one, other in zip(native.factors[1:], flat.factors[1:], strict=True):
        assert one.is_complex() and torch.equal(one, other)
    assert len(flat.factors) == len(native.factors)


@pytest.mark.parametrize("name", ["tfno_tucker", "tfno_cp", "fno_complex_tucker"])
def test_indexing_a_factorized_tensor_builds_its_own_class_and_keeps_gradients(name: str) -> None:
    native, flat = factor_list(name)
    grads = []
    for weight in (native, flat):
        part = weight[:2, 1:3]
        assert type(part) is type(native)  # nothing in it is flattened, so nothing of it goes through properties
        assert part.shape == (2, 2, *native.shape[2:])
        dense = part.to_tensor()
        dense.abs().square().sum().backward()
        grads.append((dense.detach(), list(gradients(weight).values())))
    assert any(g is not None and g.abs().sum() > 0 for g in grads[0][1])
    assert equal(list(grads[0]), list(grads[1]))


def test_a_tltorch_parameter_can_be_replaced() -> None:
    native, flat = factor_list("fno_complex_tucker")
    new = number(*native.core.shape)
    native.core = nn.Parameter(new.detach().clone())
    flat.core = nn.Parameter(new.detach().clone())
    assert torch.equal(flat.core, native.core)
    assert torch.equal(flat.core, new)
    assert equal(dict(native.state_dict()), dict(flat.state_dict()))
