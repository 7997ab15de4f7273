"""Repairs checkpoints that an older fsshard wrote with permuted numbers.

Before format version 2, ``backend="fsdp"`` wrote real parameters that were not contiguous (convolutions in
``channels_last``, transposed weights) in the order of their memory, as they lie in FSDP1's flat parameter
(``FlatParamHandle.flatten_tensors``, torch 2.13), and their optimizer state with them. The index does not tell which
layout they had, but the model does.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from fsshard.checkpoint.format.directory import CheckpointTarget
from fsshard.checkpoint.format.index import FORMAT_VERSION, Piece, rank_file, write_index
from fsshard.checkpoint.format.tensors_file import BY_NAME, Item, dtype_name, write
from fsshard.checkpoint.reader import Reader
from fsshard.errors import CheckpointError, StateDictError
from fsshard.model.memory_layout import Order, memory_order, packed

FILE = rank_file(0, 1)


def mend_layout(
    source: str | os.PathLike[str], destination: str | os.PathLike[str], model: nn.Module
) -> tuple[str, ...]:
    """Write a checkpoint of format 1 that ``backend="fsdp"`` wrote anew, with its parameters' elements in order.

    Copies of weights among the objects that were saved beside the model (an average of them, say) stay as they are. In
    one process; a tensor at a time is in memory.

    Args:
        source: the checkpoint's directory. It is left as it is.
        destination: the directory to write, a checkpoint of the present format.
        model: the bare model as it was handed to :func:`fsshard.wrap` then, in the memory format of then
            (``model.to(memory_format=torch.channels_last)``). Its numbers do not matter.

    Returns:
        The names of the parameters whose elements, and whose optimizer state's, were put in order.

    Raises:
        CheckpointError: the checkpoint cannot be of this kind, is not there or cannot be written.
        StateDictError: it is of another model.
    """
    with Reader.at(source) as reader:
        if not reader.index.may_be_permuted:
            raise CheckpointError(
                f"{reader.directory} is of format {reader.index.format_version}, written under "
                f"{reader.index.origin.backend!r} on {reader.index.origin.world_size} rank(s): only what format 1 has "
                "of 'fsdp' on two and more ranks can be in another order; load it as it is"
            )
        orders = _orders(reader, model)
        CheckpointTarget(destination).write_alone(partial(_write, reader, orders))
    return tuple(orders)


def _orders(reader: Reader, model: nn.Module) -> dict[str, Order]:
    """Parameter -> the order in which its dimensions lay in memory, where that is another than their own."""
    tensors = reader.index.tensors
    found: dict[str, Order] = {}
    missing, wrong = [], {}
    for name, parameter in model.named_parameters():
        info = tensors.get(f"model/{name}")
        here = (dtype_name(parameter.dtype), tuple(parameter.shape))
        if info is None:
            missing.append(name)
        elif here != (info.dtype, info.shape):
            wrong[name] = (here, (info.dtype, info.shape))
        elif not parameter.is_complex():
            if packed(parameter) is not parameter:
                raise CheckpointError(f"{name} is a slice of a larger tensor, of which FSDP1 trained other elements")
            if (order := memory_order(parameter)) is not None:
                found[name] = order
    if missing or wrong:
        raise StateDictError(f"{reader.directory}: the model", missing, (), wrong)
    return found


def _write(reader: Reader, orders: Mapping[str, Order], identity: str, partial: Path, ordinal: int) -> None:
    """All tensors into one file, and the index that goes with it."""
    index = reader.index
    items, tensors = [], {}
    parameters = {name: name.removeprefix("model/") for name in index.tensors if name.startswith("model/")}
    for optimizer in index.optimizers:
        for parameter, state in index.optimizer_tensors(optimizer).items():
            parameters |= dict.fromkeys(state.values(), parameter)
    for name, info in index.tensors.items():
        parameter = parameters.get(name, "")
        # A count of steps has another shape than what there is of every element.
        order = (
            orders[parameter]
            if parameter in orders and index.tensors[f"model/{parameter}"].shape == info.shape
            else None
        )
        items.append(Item(name, BY_NAME[info.dtype], info.shape, _reading(reader, name, order)))
        numel = torch.Size(info.shape).numel()
        tensors[name] = info._replace(pieces=(Piece(FILE, name, 0, numel),) if numel else ())
    file = write(partial / FILE, items, {"format": "pt", "checkpoint": identity})
    anew = dataclasses.replace(
        index,
        id=identity,
        ordinal=ordinal,
        saved_at=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        files={FILE: file},
        tensors=tensors,
        format_version=FORMAT_VERSION,
    )
    write_index(partial, anew)


def _reading(reader: Reader, name: str, order: Order | None) -> Callable[[], Tensor]:
    def read() -> Tensor:
        whole = reader.tensor(name)
        if order is None:
            return whole
        lying = whole.reshape([whole.shape[dim] for dim in order])  # the file's elements, in the order of the memory
        return lying.permute([order.index(dim) for dim in range(whole.dim())]).contiguous()

    return read
