"""Blocks whose activations the host keeps until the backward pass, without computing anything again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fsshard.complex_params.flattened import stored_in
from fsshard.model.host_copies import Kept, is_worth_leaving, offloader_of
from fsshard.model.recomputation import RecomputedForward
from fsshard.planning.plan import OFFLOADING
from fsshard.torch_private.compiling import disable_dynamo
from fsshard.torch_private.tensors import LOCAL_TENSOR, storage_key


class OffloadedForward(RecomputedForward):
    """Stands where a block's ``forward`` is looked up: what it saves for the backward pass goes to host memory."""

    origin = OFFLOADING

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; where gradients are enabled, what it saves leaves the device."""
        return self.forward(*args, **kwargs) if self.is_off() else _offloading(self, args, kwargs)


@disable_dynamo  # hooks on saved tensors break a graph in any case
def _offloading(owner: OffloadedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    module = owner.module

    def pack(tensor: Tensor) -> Tensor | Kept:
        if not is_worth_leaving(tensor) or storage_key(tensor.untyped_storage()) in _weights(module):
            return tensor
        return offloader_of(tensor.device).keep(tensor)

    with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
        return owner.forward(*args, **kwargs)


def _unpack(kept: Tensor | Kept) -> Tensor:
    return offloader_of(kept.held.device).fetch(kept) if isinstance(kept, Kept) else kept


def _weights(module: nn.Module) -> set[int]:
    """Return the memory of the module's parameters and buffers as they are now: whole ones, where units are gathered.

    Asked for at every large tensor, since units inside of the block are gathered while its forward runs. More than half
    of the bytes that a block saves are gathered weights; an engine frees and gathers these anyway.
    """
    found = set()
    for part in module.modules():
        for name, stored in (*stored_in(part).items(), *part._buffers.items()):
            shown = part.__dict__.get(name, stored)  # FSDP1 shows views of its flat parameter there
            if isinstance(shown, Tensor):
                found.add(storage_key(getattr(shown, LOCAL_TENSOR, shown).untyped_storage()))
    return found
