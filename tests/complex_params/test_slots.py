"""Slots: the names that users know, before and after."""

from __future__ import annotations

import pytest

from fsshard import tensorfy
from fsshard.complex_params.slots import parameter_slots
from tests.zoo import COMPLEX, ZOO

pytestmark = pytest.mark.filterwarnings("ignore:Complex modules are a new feature under active development")


@pytest.mark.parametrize("name", COMPLEX)
def test_slots_say_what_is_complex_before_and_after(name: str) -> None:
    native, flat = ZOO[name].build(), tensorfy(ZOO[name].build())
    assert [s.is_complex for s in parameter_slots(native)] == [s.is_complex for s in parameter_slots(flat)]
    for before, after in zip(parameter_slots(native), parameter_slots(flat), strict=True):
        assert after.kind.user_shape(after.parameter.shape) == before.parameter.shape
        assert after.kind.user_dtype(after.parameter.dtype) == before.parameter.dtype
