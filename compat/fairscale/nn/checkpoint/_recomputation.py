"""One checkpointed call: its first forward, and the second one from what was kept of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = ["Recomputation"]

Context = Callable[[], AbstractContextManager[None]]


class Recomputation:
    """What :func:`torch.utils.checkpoint.checkpoint` calls, first in the forward and then in the backward pass.

    The first call gets the caller's arguments themselves, containers included. The second gets new containers with
    what was in them at the start, so that what a module does to a list or a dict it does once. Every tensor in them is
    an argument of its own for torch, keyword arguments too: torch 2.13 keeps those in a closure, where it sees neither
    their device (random numbers of the GPU are then not restored) nor a change in place.

    Attributes:
        kept: the arguments to hand to ``checkpoint`` with this object.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        offload_to_cpu: bool,
        first: Context,
        second: Context,
    ) -> None:
        self._module, self._forward = module, forward
        self._contexts = first, second
        self._given: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._changed: list[Buffer] = []
        leaves, self._structure = tree_flatten((args, kwargs))
        self._homes = [home(leaf) if offload_to_cpu else None for leaf in leaves]
        kept = [leaf if place is None else to_cpu(leaf) for leaf, place in zip(leaves, self._homes, strict=True)]
        self.kept = kept + _device_marks(module, leaves)

    def __call__(self, *kept: Any) -> Any:
        """Run the module."""
        if self._given is not None:
            (args, kwargs), self._given = self._given, None
            self.kept = []  # torch has them now, and lets them go when the backward pass is over
            return self._run_first(args, kwargs)
        leaves = [leaf if place is None else place.bring(leaf) for leaf, place in zip(kept, self._homes, strict=False)]
        args, kwargs = tree_unflatten(leaves, self._structure)
        with self._contexts[1](), _put_back(self._changed):
            return self._forward(*args, **kwargs)

    def _run_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        buffers = _buffers(self._module)
        with self._contexts[0]():
            result = self._forward(*args, **kwargs)
        self._changed = [buffer for buffer in buffers if buffer.is_changed()]
        return result


# ------------------------------------------------------------------------------------------------ arguments


class Home(NamedTuple):
    """Where an offloaded tensor was."""

    device: torch.device
    requires_grad: bool

    def bring(self, kept: Tensor) -> Tensor:
        """The tensor, on its device again; no leaf, for the module may change it in place."""
        return kept.detach().requires_grad_(self.requires_grad).to(self.device, non_blocking=True)


def home(leaf: Any) -> Home | None:
    """Where a tensor is that can be offloaded, None for all else."""
    if isinstance(leaf, Tensor) and leaf.device.type not in ("cpu", "meta"):
        return Home(leaf.device, leaf.requires_grad)
    return None


def to_cpu(tensor: Tensor) -> Tensor:
    """A copy in (pinned) memory of the CPU, without the graph that would keep the tensor itself."""
    return tensor.detach().to("cpu", non_blocking=True)


def _device_marks(module: nn.Module, leaves: list[Any]) -> list[Tensor]:
    """Empty tensors on every device of the call: torch restores random numbers of the devices of its arguments only."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    tensors += [parameter for parameter in (next(module.parameters(), None),) if parameter is not None]
    devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
    return [torch.empty(0, device=device) for device in devices]


# ------------------------------------------------------------------------------------------------ buffers


class Buffer(NamedTuple):
    """A buffer before the first forward."""

    owner: nn.Module
    name: str
    tensor: Tensor
    version: int | None
    value: Tensor

    def is_changed(self) -> bool:
        """Whether the forward wrote into it, or put another tensor in its place."""
        if self.owner._buffers.get(self.name) is not self.tensor or self.version is None:
            return True
        # torch 2.13's batch_norm and instance_norm write into running_mean and running_var without raising _version;
        # other kernels for normalization have taken over these names.
        return self.version != self.tensor._version or (self.owner.training and self.name.startswith("running_"))


def _buffers(module: nn.Module) -> list[Buffer]:
    """All buffers, with copies of their values.

    A second forward would update statistics twice; and what is computed from them (a power iteration, a codebook)
    would differ from the first. FairScale covers batch normalization only, and so does this for a layer with the
    attribute ``disable_patch_batchnorm``, whose user asked for two updates.
    """
    copies: dict[int, Tensor] = {}
    found = []
    for owner in module.modules():
        if hasattr(owner, "disable_patch_batchnorm"):
            continue
        for name, tensor in owner._buffers.items():
            if tensor is not None:
                version = None if tensor.is_inference() else tensor._version
                value = copies.setdefault(id(tensor), tensor.detach().clone())
                found.append(Buffer(owner, name, tensor, version, value))
    return found


@contextmanager
def _put_back(changed: list[Buffer]) -> Iterator[None]:
    """Let the module see, and write into, copies of what its buffers were; its own stay as they are."""
    now = [buffer.owner._buffers.get(buffer.name) for buffer in changed]
    copies = {id(buffer.tensor): buffer.value.clone() for buffer in changed}
    for buffer in changed:
        buffer.owner._buffers[buffer.name] = copies[id(buffer.tensor)]
    try:
        yield
    finally:  # torch ends a recomputation early by an exception
        for buffer, tensor in zip(changed, now, strict=True):
            buffer.owner._buffers[buffer.name] = tensor
