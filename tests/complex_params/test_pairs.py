"""Kinds of storage: there and back, and which dtypes belong together."""

from __future__ import annotations

import pytest
import torch

from fsshard.complex_params.pairs import (
    Form,
    Kind,
    complex_dtype,
    is_odd,
    kind_for,
    order_in_memory,
    real_dtype,
    viewable,
)


@pytest.mark.parametrize(("seen", "half"), [(torch.complex64, torch.float32), (torch.complex128, torch.float64)])
def test_dtypes_of_numbers_and_halves(seen: torch.dtype, half: torch.dtype) -> None:
    assert real_dtype(seen) is half is torch.view_as_real(torch.ones(1, dtype=seen)).dtype
    assert complex_dtype(half) is seen
    assert real_dtype(torch.bfloat16) is torch.bfloat16 and complex_dtype(torch.bfloat16) is torch.complex64


VALUES = {
    "complex": torch.randn(3, 4, dtype=torch.complex64),
    "complex, transposed": torch.randn(3, 4, dtype=torch.complex128).t(),
    "complex, 0-dim": torch.tensor(1 + 2j),
    "real, 0-dim": torch.tensor(3.0),
    "real, channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "real": torch.randn(3, 4),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_there_and_back(value: torch.Tensor) -> None:
    kind = kind_for(torch.nn.Parameter(value), scalars=True, in_order=True)
    stored = kind.to_stored(value)
    assert stored.is_contiguous() and stored.dim() > 0 and not stored.is_complex()
    assert stored.data_ptr() == value.data_ptr()
    seen = kind.to_user(stored)
    assert torch.equal(seen, value) and seen.stride() == value.stride() and seen.data_ptr() == value.data_ptr()
    assert kind.user_shape(stored.shape) == value.shape
    assert kind.user_dtype(stored.dtype) is value.dtype


def test_what_is_not_asked_for_stays_plain() -> None:
    assert kind_for(torch.nn.Parameter(torch.tensor(3.0)), scalars=False, in_order=False) == Kind.PLAIN
    assert kind_for(torch.nn.Parameter(torch.randn(3, 4).t()), scalars=False, in_order=False) == Kind.PLAIN
    assert kind_for(torch.nn.Parameter(torch.randn(3, 4).t()), scalars=False, in_order=True) == Kind(Form.PLAIN, (1, 0))


def test_the_order_in_memory_is_empty_where_it_is_the_dims_own() -> None:
    assert order_in_memory(torch.empty(2, 3)) == ()
    assert order_in_memory(torch.empty(2, 3).t()) == (1, 0)
    assert order_in_memory(torch.empty(0, 3).t()) == ()


def test_odd_offsets_and_strides_are_copied_to_be_viewed() -> None:
    even, odd = torch.arange(8.0)[2:].view(3, 2), torch.arange(7.0)[1:].view(3, 2)
    assert not is_odd(even) and viewable(even) is even
    assert is_odd(odd)
    with pytest.raises(RuntimeError, match="storage_offset divisible by 2"):
        torch.view_as_complex(odd)
    assert torch.equal(torch.view_as_complex(viewable(odd)), torch.complex(odd[:, 0], odd[:, 1]))
