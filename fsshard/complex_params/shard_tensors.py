"""Shards that users may touch outside of forwards: what is done with them is what the whole would get, or raises.

torch's own DTensors (2.13) are silently wrong in three ways here: rows that are taken by an index are copies, so that
writing to them is lost; random numbers on a CPU are the same on every rank; and ``.data = ...`` changes an object that
nobody reads. And they know no plain tensor beside them, though a mask of the whole shape has one meaning.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fsshard.errors import FsshardError, ModelError
from fsshard.torch_private.dispatch import schema_of
from fsshard.torch_private.tensors import DATA, LOCAL_TENSOR, local_tensor

WHOLE = (
    "on every rank write within `with torch.no_grad(), model.full_parameters(writeback=True):`, or take "
    "value.full_tensor() and compute with that"
)
MIXED = (
    "of a weight or gradient of which this rank holds a part only, a DTensor. A plain tensor of the whole shape is "
    "taken by its part in what is done number by number (p.grad.mul_(mask), p.data * mask); a penalty, or a part of "
    "the model, is computed within the forward of the wrapped model (fsshard.register_forward_method(model, name)); "
    f"for all else {WHOLE}"
)
UNKNOWN_TO_DTENSORS = ("got mixed torch.Tensor and DTensor", "sharding strategy")
"""Parts of the messages of torch 2.13 about operators that a DTensor does not know, or not beside a plain tensor."""
FILLS = frozenset((
    "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_",
))  # fmt: skip
"""Functions that write random numbers over whatever there was."""
NEW_ONES = frozenset(("rand_like", "randn_like", "randint_like"))
"""Functions that make random numbers of a tensor's shape."""
COPIES_NUMBERS = frozenset(("copy_", "masked_fill_", "masked_fill"))
"""Functions that work number by number, beside those that torch marks as such."""


def assign(tensor: Any, value: Any) -> None:
    """Copy ``value``, a tensor like ``tensor`` or (of a DTensor) the whole plain one, into the memory of ``tensor``."""
    # torch would let ``tensor`` have other memory: a view of the engine's would be none any more, and of a DTensor
    # nothing but the outer tensor changes, which nobody reads (2.13): lost silently, by vector_to_parameters too.
    if isinstance(value, Tensor) and value.shape == getattr(tensor, "whole_shape", None):
        value = value.reshape(-1)
    if not isinstance(value, Tensor) or value.shape != tensor.shape or value.is_complex() != tensor.is_complex():
        got = f"a {type(value).__name__}"
        if isinstance(value, Tensor):
            got = f"{value.dtype} {tuple(value.shape)}"
        raise FsshardError(
            f".data = ... of a parameter of the model, or of its gradient: expected {tensor.dtype} "
            f"{tuple(tensor.shape)} to copy into the engine's memory, got {got}; change the model before fsshard.wrap"
        )
    with torch.no_grad():
        if hasattr(tensor, LOCAL_TENSOR):
            local_tensor(tensor).copy_(_part_like(tensor, value.detach()))
        else:
            DATA.__get__(tensor).copy_(value.detach())


def _part_like(tensor: Any, value: Any) -> Tensor:
    """Return this rank's part of ``value``, which is whole, or a DTensor, divided as ``tensor`` is."""
    if not hasattr(value, LOCAL_TENSOR):
        from torch.distributed.tensor import DTensor

        value = DTensor.from_local(value, tensor.device_mesh, run_check=False)
    part: Tensor = value.redistribute(placements=tensor.placements).to_local()
    return part


def _like(tensor: Any, whole: Tensor) -> Any:
    """Return this rank's part of a whole plain tensor as a DTensor that is divided as ``tensor`` is."""
    from torch.distributed.tensor import DTensor

    part = _part_like(tensor, whole)
    shape = whole.shape
    stride = whole.stride()
    return DTensor.from_local(part, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride)


# ------------------------------------------------------------------------------------------------ DTensors


def _data_of(tensor: Any) -> Any:
    data = DATA.__get__(tensor)
    data.__class__ = shard_tensor()
    return data


def _set_item(tensor: Any, index: Any, value: Any) -> None:
    """Assign to all elements, or to those of a mask; raise for others: torch indexes rows into a copy (2.13)."""
    is_mask = isinstance(index, Tensor) and index.dtype == torch.bool and index.shape == tensor.shape
    if is_mask and not (isinstance(value, Tensor) and value.dim()):
        tensor.masked_fill_(index, value)
        return
    if index is not Ellipsis and not (isinstance(index, slice) and index == slice(None)):
        raise FsshardError(
            f"p[{index!r}] = ... of a parameter of the model or of its gradient, which is sharded row by row: it would "
            "be written to a copy; multiply with a mask of the whole shape (p.grad.mul_(mask)), or write to weights "
            "within `with torch.no_grad(), model.full_parameters(writeback=True):`, alike on every rank"
        )
    tensor.copy_(value)


def _numbers_of(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ModelError(f"{name}() {MIXED}")

    return refuse


@functools.cache
def shard_tensor() -> type[Tensor]:
    """Return the class of the DTensors that an engine holds, and of all that is computed from one."""
    from torch.distributed.tensor import DTensor

    class ShardTensor(DTensor):
        # Whether it is a copy, of rows that ranks share: what is written to it reaches nobody.
        is_copy = False
        # The shape of what is held as a list of its numbers.
        whole_shape = None
        data = property(_data_of, assign)
        __setitem__ = _set_item
        numpy = _numbers_of("numpy")
        tolist = _numbers_of("tolist")

        @classmethod
        def __torch_dispatch__(  # type: ignore[override]  # torch's stubs leave out the operator
            cls,
            func: Any,
            types: Any,
            args: Any = (),
            kwargs: Any = None,
        ) -> Any:
            torchs = functools.partial(super().__torch_dispatch__, func, types)
            return _dispatched(torchs, func, args, kwargs or {})

    return ShardTensor


def _dispatched(torchs: Callable[..., Any], func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator of torch on arguments of which one is a ShardTensor.

    Args:
        torchs: runs it as torch does, given arguments and keywords.
        func: the operator.
        args: its arguments.
        kwargs: its keywords.
    """
    name = func.overloadpacket.__name__
    first = args[0] if args else None
    if schema_of(func).is_mutable and getattr(first, "is_copy", False):
        raise ModelError(
            f"{name} of rows or elements of a parameter, or of its gradient, of which this rank holds a part: they are "
            "a copy, and what is written to it would be lost; multiply with a mask of the whole shape "
            "(p.grad.mul_(mask)), or write to weights within `with torch.no_grad(), "
            "model.full_parameters(writeback=True):`, alike on every rank"
        )
    if name == "set_" and len(args) == 2:
        assign(first, args[1])
        return first
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    if is_random and hasattr(first, LOCAL_TENSOR) and local_tensor(first).device.type == "cpu":
        # torch (2.13) has a generator that each rank moves to its own part for GPUs only.
        return _drawn(func, name, args, kwargs)
    writes_to_plain = schema_of(func).is_mutable and not hasattr(first, LOCAL_TENSOR)
    if (torch.Tag.pointwise in func.tags or name in COPIES_NUMBERS) and not writes_to_plain:
        args = _with_parts(args)
    try:
        result = torchs(args, kwargs)
    except RuntimeError as error:
        if not any(text in str(error) for text in UNKNOWN_TO_DTENSORS):
            raise
        raise ModelError(f"{name} {MIXED} ({str(error).splitlines()[0]})") from error
    return _as_shards(func, first, result)


def _drawn(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Draw random numbers for the whole, as every rank does, and keep this rank's part of them."""
    first, *others = args
    if name not in FILLS | NEW_ONES or any(isinstance(other, Tensor) for other in others):
        raise ModelError(f"{name}, which draws random numbers, {MIXED}")
    local = local_tensor(first)
    # Numbers are drawn in the order of memory.
    whole = torch.empty_strided(first.shape, first.stride(), dtype=local.dtype, device=local.device)
    if name in FILLS:
        assign(first, func(whole, *others, **kwargs))
        return first
    drawn = _like(first, func(whole, *others, **kwargs))
    drawn.__class__ = shard_tensor()
    return drawn


def _with_parts(args: Any) -> list[Any]:
    """Return arguments in which plain tensors of the whole shape are DTensors, divided as the first one is."""
    model = next((arg for arg in args if hasattr(arg, LOCAL_TENSOR)), None)
    if model is None:
        return list(args)
    parts = []
    for arg in args:
        is_plain = isinstance(arg, Tensor) and not hasattr(arg, LOCAL_TENSOR) and arg.dim() > 0
        if is_plain and arg.shape == model.shape:
            arg = _like(model, arg)
        elif is_plain and arg.shape == getattr(model, "whole_shape", None):
            arg = _like(model, arg.reshape(-1))
        parts.append(arg)
    return parts


def _as_shards(func: Any, source: Any, result: Any) -> Any:
    """Let what was computed from a shard be looked after as that is; note what is a copy, where torch makes views."""
    from torch.distributed.tensor import DTensor

    results = result if isinstance(result, (list, tuple)) else (result,)
    for each in results:
        if type(each) is not DTensor:
            continue
        each.__class__ = shard_tensor()  # type: ignore[assignment]
        if func.is_view and isinstance(source, DTensor):
            was_divided = any(placement.is_shard() for placement in source.placements)
            is_divided = any(placement.is_shard() for placement in each.placements)
            if (was_divided and not is_divided) or getattr(source, "is_copy", False):
                each.is_copy = True  # type: ignore[attr-defined]
    return result


# ------------------------------------------------------------------------------------------------ flat shards


def _refuse_random(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ModelError(
            f"{name} of a parameter of which this rank holds a flat part: every rank would draw the same numbers for "
            "its part. Initialise the model before fsshard.wrap, or within `with torch.no_grad(), "
            "model.full_parameters(writeback=True):`, with one seed on every rank"
        )

    return refuse


def is_shown_by(stored: Any, other: Any) -> Any:
    """Return True for what shows this parameter to the user, so that both are one key of a dict; else compare."""
    if isinstance(other, Tensor) and other.__dict__.get("_fsshard_stored") is stored:
        return True
    return Tensor.__eq__(stored, other)


class FlatShardData(Tensor):
    """``.data`` of a :class:`FlatShard`."""

    # What is computed from it is a plain tensor.
    __torch_function__ = nn.Parameter.__torch_function__
    locals().update({name: _refuse_random(name) for name in FILLS})


def _flat_data(parameter: Any) -> Tensor:
    data: Tensor = DATA.__get__(parameter).as_subclass(FlatShardData)
    return data


class FlatShard(nn.Parameter):
    """A parameter that an engine has left a flat part of, in which random numbers would be those of all ranks."""

    data: Any = property(_flat_data, DATA.__set__)
    __hash__ = Tensor.__hash__
    __eq__ = is_shown_by
    locals().update({name: _refuse_random(name) for name in FILLS})
