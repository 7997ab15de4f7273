"""The dtypes that a checkpoint can hold, and how each is stored in a safetensors file."""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

import torch

__all__ = ["BY_FILE_NAME", "BY_NAME", "STORED", "Stored", "dtype_name"]


class Stored(NamedTuple):
    """The form in which elements of a dtype lie in a file.

    Attributes:
        name: what the file's header calls it.
        dtype: what the file's header means by that; the dtype itself unless ``lanes`` is 2.
        lanes: 2 where an element is stored as real and imaginary part, in one more, last dimension of size 2.
    """

    name: str
    dtype: torch.dtype
    lanes: int = 1


_NATIVE = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}

# safetensors 0.8 knows neither of the last two ("unknown variant `C128`"), so they lie as pairs of reals.
STORED = MappingProxyType(
    {
        **{dtype: Stored(name, dtype) for name, dtype in _NATIVE.items()},
        torch.complex32: Stored("F16", torch.float16, 2),
        torch.complex128: Stored("F64", torch.float64, 2),
    }
)
"""Every dtype a checkpoint can hold. Quantized and sub-byte dtypes are none of them."""

BY_FILE_NAME = MappingProxyType(_NATIVE)
"""A file's name of a dtype -> the dtype."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"complex64"`` for ``torch.complex64``, as the index writes it."""
    return str(dtype).removeprefix("torch.")


BY_NAME = MappingProxyType({dtype_name(dtype): dtype for dtype in STORED})
"""The index's name of a dtype -> the dtype."""
