"""Convert between a stored tensor and the user's: complex numbers as pairs of reals, other forms, memory order."""

from __future__ import annotations

import enum
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fsshard.complex_params.layouts import DTensorLayout

SUFFIX = "__real"
"""Suffix of the stored parameter: ``w`` is kept as ``w__real``."""


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the halves of a complex ``dtype``; a real one itself."""
    return dtype.to_real()


def complex_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the complex dtype of pairs of a real ``dtype``: complex64 for all but float64."""
    return torch.complex128 if dtype == torch.float64 else torch.complex64


def is_dtensor(value: object) -> bool:
    # No DTensor can exist before its module does.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


class Form(enum.Enum):
    """The numbers that a stored tensor is made of."""

    PLAIN = "stored as it is"
    COMPLEX = "complex of shape S, stored as real of shape (*S, 2)"
    COMPLEX_SCALAR = "0-dim complex, stored as real of shape (1, 2)"
    SCALAR = "0-dim real, stored with shape (1,)"
    RENAMED = "real (*S, 2) for the user too (tltorch Complex*), stored under another name"


@dataclass(frozen=True)
class Kind:
    """The relation of a stored tensor to the one that the user sees."""

    form: Form
    # Dim i of what is stored is the user's dim order[i], so that what is stored is contiguous where the user's tensor
    # is not; empty where the dims are in the user's order.
    order: tuple[int, ...] = ()
    # Of what modules see as a DTensor, while this rank stores its part; the user's tensor is that part here.
    layout: DTensorLayout | None = None
    # The shape, as stored, of what is stored as a list of its numbers.
    listed: torch.Size | None = None

    PLAIN: ClassVar[Kind]
    COMPLEX: ClassVar[Kind]
    COMPLEX_SCALAR: ClassVar[Kind]
    SCALAR: ClassVar[Kind]
    RENAMED: ClassVar[Kind]

    @cached_property
    def is_complex(self) -> bool:
        """Return whether the user sees a complex number."""
        return self.form is Form.COMPLEX or self.form is Form.COMPLEX_SCALAR

    @cached_property
    def is_plain(self) -> bool:
        """Return whether a parameter is stored as it is."""
        return self == Kind.PLAIN

    @cached_property
    def way_back(self) -> tuple[int, ...]:
        """``permute(*way_back)`` puts the dims of what is stored, pairs as one number, into the user's order."""
        return tuple(self.order.index(dim) for dim in range(len(self.order)))

    def to_user(self, stored: Any) -> Any:
        """Return the user's tensor over the memory of ``stored``, or a copy where its layout cannot be viewed.

        ``stored`` is in whatever state an engine has put it: of a DTensor the user's DTensor is returned, and a flat
        shard, whose memory may not be read at any time, as it is.
        """
        if is_dtensor(stored):
            return self._to_users_dtensor(stored)
        if self.form is Form.SCALAR:
            if stored.numel() == 1:
                return stored.reshape(())
            return stored
        if self.is_complex:
            if stored.dim() < 2:
                # A flat shard of FSDP1 at rest.
                return stored
            stored = _as_complex(stored)
            if self.form is Form.COMPLEX_SCALAR:
                return stored.squeeze(0)
        if self.listed is not None:
            stored = stored.view(self.listed)
        if stored.dim() == len(self.order):
            return self.turn_back(stored)
        return stored

    def _to_users_dtensor(self, stored: Any) -> Any:
        """Return an engine's DTensor as the user's, over the same memory, without communication."""
        from torch.distributed.tensor import DTensor, Shard

        if not self.is_complex and not self.order:
            # A 0-dim value has no dimension to shard: it stays as FSDP2 holds it.
            return stored
        # From the local shard: DTensor's own operators communicate where dim 0 is 1 or goes away (torch 2.13).
        local = stored.to_local()
        shape = stored.shape
        if self.is_complex:
            local = _as_complex(local)
            shape = shape[:-1]
        placements = stored.placements
        stride = torch.empty(shape, device="meta").stride()
        # Otherwise it is a list of numbers.
        if len(self.order) == len(shape):
            of_user = []
            for placed in placements:
                of_user.append(Shard(self.order[placed.dim]) if isinstance(placed, Shard) else placed)
            placements = of_user
            stride = self.turn_back(torch.empty(shape, device="meta")).stride()
            local = self.turn_back(local)
            shape = torch.Size([shape[dim] for dim in self.way_back])
        return DTensor.from_local(local, stored.device_mesh, placements, run_check=False, shape=shape, stride=stride)

    def shown(self, stored: Any) -> Any:
        """Return what modules show of ``stored``: as :meth:`to_user`, and the DTensor where it came as one."""
        value = self.to_user(stored)
        if self.layout is None or is_dtensor(value) or value.dim() != len(self.layout.shape):
            # At rest under FSDP, whose shards are what the engine holds.
            return value
        return self.layout.as_dtensor(value)

    def turn_back(self, value: Tensor) -> Tensor:
        """Return ``value``, whose dims are as stored, with its dims in the user's order."""
        if self.order:
            return value.permute(self.way_back)
        return value

    def to_stored(self, value: Tensor) -> Tensor:
        """Return the stored tensor over the memory of the user's ``value`` if that has its layout, else a copy."""
        if self.form is Form.SCALAR:
            return value.reshape(1)
        if not self.is_complex:
            return value.permute(self.order).contiguous() if self.order else value
        if not value.is_complex():
            value = value.to(complex_dtype(value.dtype))
        value = value.resolve_conj()
        if self.order:
            value = value.permute(self.order)
        real = torch.view_as_real(value)
        if self.form is Form.COMPLEX_SCALAR:
            real = real.unsqueeze(0)
        return real.contiguous()

    def user_shape(self, stored: torch.Size) -> torch.Size:
        """Return the shape that the user sees."""
        if self.form in (Form.COMPLEX_SCALAR, Form.SCALAR):
            return torch.Size(())
        shape = stored[:-1] if self.form is Form.COMPLEX else stored
        if self.order:
            return torch.Size([shape[dim] for dim in self.way_back])
        return shape

    def user_dtype(self, stored: torch.dtype) -> torch.dtype:
        """Return the dtype that the user sees."""
        if self.is_complex:
            return complex_dtype(stored)
        return stored


for _form in Form:
    setattr(Kind, _form.name, Kind(_form))


def _as_complex(pairs: Tensor) -> Tensor:
    if pairs.dtype in (torch.bfloat16, torch.float16):
        # view_as_complex refuses bfloat16 and makes complex32 of float16.
        pairs = pairs.float()
    try:
        # Tried, not asked: a guard may watch who asks a shard for its shape or strides.
        return torch.view_as_complex(pairs)
    except RuntimeError:
        # It begins at an odd place.
        # FSDP1 frees the storage of a resharded parameter (torch 2.13): copying from it is a segmentation fault.
        if type(pairs) in (Tensor, nn.Parameter) and pairs.numel() and not pairs.untyped_storage().nbytes():
            raise
        return torch.view_as_complex(viewable(pairs))


def order_in_memory(tensor: Tensor) -> tuple[int, ...]:
    """Return the dims of ``tensor`` from the outermost in memory to the innermost; empty if that is their own order.

    Kernels look at strides, those of dims of size 1 included: a matrix whose columns lie one after the other is
    multiplied in another order of sums than the same numbers row by row (MKL with AVX-512, torch 2.13).
    """
    sizes = tensor.shape
    if len(sizes) < 2 or (1 not in sizes and tensor.is_contiguous()):
        return ()
    strides = tensor.stride()
    places = list(zip(strides, sizes, strict=True))
    if places == sorted(places, reverse=True) or tensor.numel() == 0:
        return ()
    order = tuple(sorted(range(len(sizes)), key=lambda dim: (-strides[dim], -sizes[dim])))
    if not tensor.is_contiguous():
        return order
    # Only dims of size 1 are at another place: to be kept where it gives back the very strides.
    turned = Kind(Form.PLAIN, order).turn_back(torch.empty([sizes[dim] for dim in order], device="meta"))
    return order if turned.stride() == strides else ()


def laid(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """Return ``tensor`` with its dims in memory as :func:`order_in_memory` says; for an empty order itself."""
    if not order:
        return tensor
    back = [list(order).index(dim) for dim in range(tensor.dim())]
    return tensor.permute(*order).contiguous().permute(back)


def viewable(stored: Tensor) -> Tensor:
    """Return ``stored`` itself if ``view_as_complex`` accepts its layout, else a contiguous copy.

    ``view_as_complex`` wants an even storage offset and even strides ("Tensor must have a storage_offset divisible
    by 2"); a packed buffer of an engine can break both.
    """
    if is_odd(stored):
        return stored.clone(memory_format=torch.contiguous_format)
    return stored


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
        if parameter.is_complex():
            return Kind.COMPLEX_SCALAR
        return Kind.SCALAR if scalars else Kind.PLAIN
    if not parameter.is_complex() and not in_order:
        return Kind.PLAIN
    kind = Kind.COMPLEX if parameter.is_complex() else Kind.PLAIN
    order = order_in_memory(parameter)
    if order:
        return Kind(kind.form, order)
    return kind
