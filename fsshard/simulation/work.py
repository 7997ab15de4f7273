"""Counts what a step computes: floating-point operations, bytes that operators write, and the operators themselves."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from fsshard.checkpoint.format.tensors_file import dtype_name
from fsshard.nested import tensors
from fsshard.torch_private.dispatch import schema_of
from fsshard.torch_private.tensors import LOCAL_TENSOR

# Complex dtype -> the one of the real numbers that are multiplied.
REAL = {torch.complex128: torch.float64, torch.complex64: torch.float32, torch.complex32: torch.float16}
# A complex multiplication and addition is four real ones; torch's formulas count it as one (torch 2.13).
COMPLEX_PRODUCTS = 4
# Operators that take the host as long as recomputing a block does besides its own: random numbers that are kept and
# restored, torch's checkpoint (1.2 ms where an operator takes 9.6 us). About as long as the hooks and copies of an
# offloaded block take (0.7 ms for a layer of a transformer in its forward alone).
RECOMPUTATION = 125
# Beginnings of the names of operators that hand out memory and leave it as it is.
UNWRITTEN = ("empty", "new_empty")
# What, or of which dtype -> how many, or how many bytes.
Amounts = Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Work:
    """The computation of one rank in a training step.

    Attributes:
        flops: floating-point operations of matrix products, convolutions, attention and Fourier transforms, by the name
            of the real dtype in which they are done.
        written: bytes that operators write, views left out.
        operators: how many are called, below autograd; collectives left out, and for each recomputed or offloaded
            block :data:`RECOMPUTATION` more.
        offloaded: bytes of activations that are copied to host memory, and back.
        shards: bytes of this rank's shards that ``cpu_offload`` copies to the device; as many of gradients come back.
        uncounted: names of operators whose flops are missing, since there is no formula for them.
        forward: flops of the forward passes alone, without blocks that are computed again.
    """

    flops: Amounts
    written: int
    operators: int
    offloaded: int = 0
    shards: int = 0
    uncounted: tuple[str, ...] = ()
    forward: Amounts = field(default_factory=dict)


class WorkCounter:
    """Adds up the operators that it is told of."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start at zero."""
        self._flops: Counter[str] = Counter()
        self._forward: Counter[str] = Counter()
        self._written = 0
        self._operators = 0
        self._offloaded = 0
        self._uncounted: set[str] = set()

    def add(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,
        phase: str = "forward",
    ) -> None:
        """Count one call of an operator, which is no collective."""
        self._operators += 1
        # A simulation's host memory is the meta device.
        if func.name() == "aten::_to_copy" and result.is_meta:
            self._offloaded += _nbytes(result)
            return
        traits = _traits(func)
        if traits.writes:
            # A foreach operator returns nothing: what it writes are the lists that it was given.
            changed = [args[place] for place in traits.mutated if place < len(args)]
            self._written += _nbytes(result) or _nbytes(changed)
        formula = traits.formula
        if formula is not None:
            tensor = next(tensors(args))
            dtype = REAL.get(tensor.dtype, tensor.dtype)
            flops = int(formula(*args, **kwargs, out_val=result))
            if tensor.is_complex() and formula is not _fft:
                flops *= COMPLEX_PRODUCTS
            name = dtype_name(dtype)
            self._flops[name] += flops
            if phase == "forward":
                self._forward[name] += flops
        elif traits.name.startswith(UNKNOWN) and _nbytes(args) >= LARGE:
            self._uncounted.add(traits.name)

    def work(self) -> Work:
        """Return the sums."""
        return Work(
            flops=dict(self._flops),
            written=self._written,
            operators=self._operators,
            offloaded=self._offloaded,
            uncounted=tuple(sorted(self._uncounted)),
            forward=dict(self._forward),
        )


@dataclass(frozen=True)
class _Traits:
    name: str  # without namespace and overload
    writes: bool
    mutated: tuple[int, ...]  # places of the arguments that it changes
    formula: Callable[..., Any] | None  # of its flops


@functools.cache
def _traits(func: Any) -> _Traits:
    schema = schema_of(func)
    mutated = []
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            mutated.append(place)
    # A view returns an alias of what it was given and changes nothing.
    is_view = not mutated and any(value.alias_info is not None for value in schema.returns)
    name = schema.name.partition("::")[2]
    packet = ON_CPU.get(name, func.overloadpacket)
    return _Traits(
        name=name,
        writes=not is_view and not name.startswith(UNWRITTEN),
        mutated=tuple(mutated),
        formula=OWN.get(name) or flop_registry.get(packet),
    )


def _nbytes(value: Any) -> int:
    nbytes = 0
    for tensor in tensors(value):
        local = getattr(tensor, LOCAL_TENSOR, tensor)
        nbytes += local.numel() * local.element_size()
    return nbytes


def _fft(input: Tensor, dims: list[int], *_: Any, out_val: Tensor, **__: Any) -> float:
    """Return 5 n log2(n) per complex transform of n points, half of it per real one: the convention of FFTW."""
    larger = max(input, out_val, key=Tensor.numel)
    points = math.prod(max(input.shape[dim], out_val.shape[dim]) for dim in dims)
    both_complex = input.is_complex() and out_val.is_complex()
    factor = 5.0 if both_complex else 2.5
    return factor * larger.numel() * math.log2(max(points, 2))


def _vectors(*tensors: Any, out_val: Tensor, **_: Any) -> int:
    """Return the flops of a matrix or a vector times a vector: the last two tensors."""
    matrix: Tensor = tensors[-2]
    return 2 * matrix.numel()


def _lstm(input: Tensor, weight: Tensor, recurrent: Tensor, *_: Any, **__: Any) -> int:
    """Return the flops of the products of one layer in one direction, whatever dimension is that of time."""
    vectors = input.numel() // input.shape[-1]
    return 2 * vectors * (weight.numel() + recurrent.numel())


def _lstm_backward(*args: Any, **kwargs: Any) -> int:
    # There are products for the inputs and for the weights.
    return 2 * _lstm(*args, **kwargs)


# Names of operators of which torch has no formula (torch 2.13).
OWN: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("_fft_r2c", "_fft_c2r", "_fft_c2c"), _fft),
    **dict.fromkeys(("mv", "addmv", "addmv_", "dot", "vdot"), _vectors),
    "mkldnn_rnn_layer": _lstm,
    "mkldnn_rnn_layer_backward": _lstm_backward,
}
# Beginnings of names of operators that compute more than they write, of which nobody has a formula.
UNKNOWN = ("linalg_", "_linalg_", "cholesky", "lu_", "triangular_solve", "_cdist", "_trilinear", "_cudnn_rnn")
# Bytes of arguments from which on an estimate says so.
LARGE = 2**14
_ATTENTION = "_scaled_dot_product_flash_attention"
# Names of the CPU's attention -> the GPU's, whose formula and arguments in front are the same.
ON_CPU = {
    f"{_ATTENTION}_for_cpu": getattr(torch.ops.aten, _ATTENTION),
    f"{_ATTENTION}_for_cpu_backward": getattr(torch.ops.aten, f"{_ATTENTION}_backward"),
}
