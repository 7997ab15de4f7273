"""Blocks whose activations the host keeps until the backward pass, without computing anything again."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, nn

from fsshard.complex_params.flattened import stored_in
from fsshard.model.host_copies import HostCopy, is_worth_leaving, to_device, to_host
from fsshard.model.recomputation import RecomputedForward
from fsshard.planning.plan import OFFLOADING
from fsshard.torch_private.compiling import disable_dynamo
from fsshard.torch_private.tensors import LOCAL_TENSOR, storage_key


class OffloadedForward(RecomputedForward):
    """Stands where a block's ``forward`` is looked up: what it saves for the backward pass goes to host memory."""

    origin = OFFLOADING

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; where gradients are enabled, what it saves leaves the device."""
        if self.is_off():
            return self.forward(*args, **kwargs)
        return _offloading(self, args, kwargs)


@disable_dynamo  # hooks on saved tensors break a graph in any case
def _offloading(owner: OffloadedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    weights = _Weights(owner.module)

    def pack(tensor: Tensor) -> Tensor | HostCopy:
        if not is_worth_leaving(tensor) or weights.hold(tensor):
            return tensor
        return to_host(tensor)

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            return owner.forward(*args, **kwargs)
    finally:
        weights.forget()  # the graph keeps pack


def _unpack(saved: Tensor | HostCopy) -> Tensor:
    if isinstance(saved, HostCopy):
        return to_device(saved)
    return saved


class _Weights:
    """The memory of a module's parameters and buffers as they are now: whole ones, where units are gathered.

    Asked for at every large tensor, since units inside of the block are gathered while its forward runs. More than half
    of the bytes that a block saves are gathered weights; an engine frees and gathers these anyway.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = []
        for part in module.modules():
            for stored in (stored_in(part), part._buffers):
                self._places += [(part.__dict__, stored, name) for name in stored]
        self.forget()

    def forget(self) -> None:
        """Let go of the tensors."""
        self._tensors: list[Any] = [None] * len(self._places)
        self._memory: set[int] = set()

    def hold(self, tensor: Tensor) -> bool:
        """Return whether the tensor lies in the memory of one of them."""
        # FSDP1 shows views of its flat parameter in the module's dict. torch.jit's dicts have no get().
        tensors = [
            shown[name] if name in shown else stored[name] if name in stored else None  # noqa: SIM401
            for shown, stored, name in self._places
        ]
        if any(map(operator.is_not, tensors, self._tensors)):  # a unit has been gathered, or freed
            self._tensors = tensors
            parts = (getattr(one, LOCAL_TENSOR, one) for one in tensors if isinstance(one, Tensor))
            self._memory = {storage_key(part.untyped_storage()) for part in parts}
        return storage_key(tensor.untyped_storage()) in self._memory
