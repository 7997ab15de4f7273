"""How a stored tensor relates to the user's: complex numbers as pairs of reals, other forms, memory order."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn

from fsshard.complex_params.layouts import DTensorLayout

__all__ = ["Form", "Kind", "complex_dtype", "is_odd", "kind_for", "order_in_memory", "real_dtype", "viewable"]

SUFFIX = "__real"
"""Suffix of the stored parameter: ``w`` is kept as ``w__real``."""

_REAL_OF = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the halves of a complex ``dtype``; a real one itself."""
    return _REAL_OF.get(dtype, dtype)


def complex_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the complex dtype of pairs of a real ``dtype``: complex64 for all but float64."""
    return torch.complex128 if dtype == torch.float64 else torch.complex64


class Form(enum.Enum):
    """The numbers that a stored tensor is made of."""

    PLAIN = "stored as it is"
    COMPLEX = "complex of shape S, stored as real of shape (*S, 2)"
    COMPLEX_SCALAR = "0-dim complex, stored as real of shape (1, 2)"
    SCALAR = "0-dim real, stored with shape (1,)"
    RENAMED = "real (*S, 2) for the user too (tltorch Complex*), stored under another name"


@dataclass(frozen=True)
class Kind:
    """The relation of a stored tensor to the one that the user sees.

    Attributes:
        form: what it is made of.
        order: dim ``i`` of what is stored is the user's dim ``order[i]``, so that what is stored is contiguous where
            the user's tensor is not; empty where the dims are in the user's order.
        layout: of what modules see as a DTensor, while this rank stores its part; the user's tensor is that part here.
    """

    form: Form
    order: tuple[int, ...] = ()
    layout: DTensorLayout | None = None

    PLAIN: ClassVar[Kind]
    COMPLEX: ClassVar[Kind]
    COMPLEX_SCALAR: ClassVar[Kind]
    SCALAR: ClassVar[Kind]
    RENAMED: ClassVar[Kind]

    @cached_property
    def is_complex(self) -> bool:
        """Return whether the user sees a complex number."""
        return self.form in (Form.COMPLEX, Form.COMPLEX_SCALAR)

    @cached_property
    def way_back(self) -> tuple[int, ...]:
        """``permute(*way_back)`` puts the dims of what is stored, pairs as one number, into the user's order."""
        return tuple(self.order.index(dim) for dim in range(len(self.order)))

    def to_user(self, stored: Tensor) -> Tensor:
        """Return the user's tensor over the memory of ``stored``; a copy only where the layout cannot be viewed."""
        if self.form is Form.SCALAR:
            return stored.reshape(())
        if self.is_complex:
            number = torch.view_as_complex(viewable(stored))
            return number[0] if self.form is Form.COMPLEX_SCALAR else self.turn_back(number)
        return self.turn_back(stored)

    def turn_back(self, value: Tensor) -> Tensor:
        """Return ``value``, whose dims are as stored, with its dims in the user's order."""
        return value.permute(self.way_back) if self.order else value

    def to_stored(self, value: Tensor) -> Tensor:
        """Return the stored tensor over the memory of the user's ``value`` if that has its layout, else a copy."""
        if self.form is Form.SCALAR:
            return value.reshape(1)
        if self.is_complex:
            number = value if value.is_complex() else value.to(complex_dtype(value.dtype))
            number = number.resolve_conj()
            real = torch.view_as_real(number.permute(self.order) if self.order else number)
            return (real.unsqueeze(0) if self.form is Form.COMPLEX_SCALAR else real).contiguous()
        return value.permute(self.order).contiguous() if self.order else value

    def user_shape(self, stored: torch.Size) -> torch.Size:
        """Return the shape that the user sees."""
        if self.form in (Form.COMPLEX_SCALAR, Form.SCALAR):
            return torch.Size(())
        shape = stored[:-1] if self.form is Form.COMPLEX else stored
        return torch.Size([shape[dim] for dim in self.way_back]) if self.order else shape

    def user_dtype(self, stored: torch.dtype) -> torch.dtype:
        """Return the dtype that the user sees."""
        return complex_dtype(stored) if self.is_complex else stored


for _form in Form:
    setattr(Kind, _form.name, Kind(_form))


def order_in_memory(tensor: Tensor) -> tuple[int, ...]:
    """Return the dims of ``tensor`` from the outermost in memory to the innermost; empty if that is their own order.

    Kernels look at strides, those of dims of size 1 included: a matrix whose columns lie one after the other is
    multiplied in another order of sums than the same numbers row by row (MKL with AVX-512, torch 2.13).
    """
    sizes, strides = tensor.shape, tensor.stride()
    dims = range(tensor.dim())
    order = tuple(sorted(dims, key=lambda dim: (-strides[dim], -sizes[dim])))
    if order == tuple(dims) or tensor.numel() == 0:
        return ()
    if not tensor.is_contiguous():
        return order
    # Only dims of size 1 are at another place: to be kept where it gives back the very strides.
    turned = Kind(Form.PLAIN, order).turn_back(torch.empty([sizes[dim] for dim in order], device="meta"))
    return order if turned.stride() == strides else ()


def viewable(stored: Tensor) -> Tensor:
    """Return ``stored`` itself if ``view_as_complex`` accepts its layout, else a contiguous copy.

    ``view_as_complex`` wants an even storage offset and even strides ("Tensor must have a storage_offset divisible
    by 2"); a packed buffer of an engine can break both.
    """
    return stored.clone(memory_format=torch.contiguous_format) if is_odd(stored) else stored


def is_odd(stored: Tensor) -> bool:
    """Return whether ``view_as_complex`` refuses the layout."""
    *others, last = stored.stride()
    if last != 1 or stored.storage_offset() & 1:
        return True
    for stride in others:  # noqa: SIM110  at each access of a weight: a generator takes five times as long
        if stride & 1:
            return True
    return False


def kind_for(parameter: nn.Parameter, scalars: bool, in_order: bool) -> Kind:
    if not parameter.dim():
        return Kind.COMPLEX_SCALAR if parameter.is_complex() else Kind.SCALAR if scalars else Kind.PLAIN
    if parameter.is_complex():
        return Kind(Form.COMPLEX, order_in_memory(parameter))
    return Kind(Form.PLAIN, order_in_memory(parameter)) if in_order else Kind.PLAIN
