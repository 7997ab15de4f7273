"""``checkpoint_wrapper``: the module stays itself, and its activations are computed again in the backward pass."""

from __future__ import annotations

import copy
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsshard.errors import ModelError

from ....not_served import missing_from
from ....report import called
from ._recomputation import Recomputation

__all__ = [
    "ThreadLocalCheckpointingState",
    "checkpoint_wrapper",
    "disable_checkpointing",
    "enable_checkpointing",
    "enable_recomputing",
    "is_checkpointing",
    "is_checkpointing_disabled",
    "is_recomputing",
    "thread_local",
]

__getattr__ = missing_from(__name__)


class ThreadLocalCheckpointingState(threading.local):
    """What a thread is doing; autograd recomputes in threads of its own where the device is not the CPU."""

    is_checkpointing: bool = False
    is_recomputing: bool = False
    is_checkpointing_disabled: bool = False


thread_local = ThreadLocalCheckpointingState()


@contextmanager
def _state(name: str, value: bool) -> Iterator[None]:
    before = getattr(thread_local, name)
    setattr(thread_local, name, value)
    try:
        yield
    finally:
        setattr(thread_local, name, before)


@contextmanager
def disable_checkpointing() -> Iterator[None]:
    """Run wrapped modules as if they were not wrapped. What was checkpointed before is still recomputed."""
    with _state("is_checkpointing_disabled", True):
        yield


@contextmanager
def enable_checkpointing() -> Iterator[None]:
    """Make :func:`is_checkpointing` true, for those who checkpoint by hand."""
    with _state("is_checkpointing", True):
        yield


@contextmanager
def enable_recomputing() -> Iterator[None]:
    """Make :func:`is_recomputing` true, for those who checkpoint by hand."""
    with _state("is_recomputing", True):
        yield


def is_checkpointing() -> bool:
    """Whether this is the first forward of a wrapped module."""
    return thread_local.is_checkpointing


def is_recomputing() -> bool:
    """Whether this is the second forward, in the backward pass. A module that counts its calls looks here."""
    return thread_local.is_recomputing


def is_checkpointing_disabled() -> bool:
    """Whether this is inside of :func:`disable_checkpointing`."""
    return thread_local.is_checkpointing_disabled


def checkpoint_wrapper(module: nn.Module, offload_to_cpu: bool = False) -> nn.Module:
    """Keep a module's inputs in place of its activations, and compute these again in the backward pass.

    Numbers are those of the module alone, to the last bit: outputs, gradients, buffers (statistics of batch
    normalization, power iterations of ``spectral_norm``) and random numbers. The forward runs as it is where gradients
    are disabled. Buffers are seen twice at the values of the first forward; a module that keeps a count elsewhere asks
    :func:`is_recomputing`.

    Args:
        module: changed in place: its ``forward``, nothing else. Wrapped once more it is not checkpointed twice.
        offload_to_cpu: keep the inputs in the memory of the CPU; without effect on tensors that are there.

    Returns:
        The same object.

    Raises:
        ModelError: this is no module.
    """
    if not isinstance(module, nn.Module):
        raise ModelError(f"checkpoint_wrapper: expected a torch.nn.Module, got {type(module).__name__}")
    called("fairscale.nn.checkpoint.checkpoint_wrapper", "torch.utils.checkpoint, not reentrant")
    own = module.__dict__.get("forward")
    if isinstance(own, CheckpointedForward):
        own = own.original
    module.forward = CheckpointedForward(module, own, bool(offload_to_cpu))
    return module


class CheckpointedForward:
    """Stands where a module's ``forward`` is looked up, and belongs to that module only.

    It holds the module weakly (the module holds it), and finds its new owner when the module is copied or unpickled.
    FairScale 0.4.13 holds the class's forward and a weak reference in a ``functools.partial``: a copy runs on the
    weights of the original, pickle says "cannot pickle 'weakref.ReferenceType' object", and a ``forward`` that was set
    on the instance is lost.

    Attributes:
        original: the ``forward`` that was set on the instance before, or None: the one of its class.
        offload_to_cpu: as in :func:`checkpoint_wrapper`.
    """

    def __init__(
        self, module: nn.Module | None, original: Callable[..., Any] | None = None, offload_to_cpu: bool = False
    ) -> None:
        self._module = None if module is None else weakref.ref(module)
        self.original = original
        self.offload_to_cpu = offload_to_cpu

    @property
    def module(self) -> nn.Module:
        """The owner."""
        module = None if self._module is None else self._module()
        if module is None:
            raise ModelError(
                "this forward of checkpoint_wrapper has no module: the module was freed, or its __deepcopy__ does not "
                "note the copy in its memo; call the module, or checkpoint_wrapper(copy) again"
            )
        return module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, checkpointed where gradients are enabled."""
        module = self.module
        forward = self.original or types.MethodType(type(module).forward, module)
        if not torch.is_grad_enabled() or thread_local.is_checkpointing_disabled:
            return forward(*args, **kwargs)
        # torch.compile (torch 2.13) takes torch's checkpoint into its graph, but there every buffer is updated twice
        if torch.compiler.is_compiling() and not self.offload_to_cpu and next(module.buffers(), None) is None:
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        return _checkpointed(module, forward, args, kwargs, self.offload_to_cpu)

    def __getattr__(self, name: str) -> Any:
        if name in ("__signature__", "__name__", "__qualname__"):  # transformers reads the names of the arguments
            module = self.module
            forward = self.original or types.MethodType(type(module).forward, module)
            return inspect.signature(forward) if name == "__signature__" else getattr(forward, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __deepcopy__(self, memo: dict[int, Any]) -> CheckpointedForward:
        owner = memo.get(id(self.module))  # copy.deepcopy notes the copy of a module before it copies its attributes
        twin = CheckpointedForward(owner, None, self.offload_to_cpu)
        memo[id(self)] = twin
        twin.original = copy.deepcopy(self.original, memo)
        return twin

    def __reduce__(self) -> Any:
        return CheckpointedForward, (self.module, self.original, self.offload_to_cpu)


@torch._disable_dynamo  # as torch's own second forward; both have to save the same tensors
def _checkpointed(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], offload: bool
) -> Any:
    run = Recomputation(module, forward, args, kwargs, offload, _first, _second)
    return checkpoint(run, *run.kept, use_reentrant=False)


@contextmanager
def _first() -> Iterator[None]:
    with _state("is_checkpointing", True):
        yield


@contextmanager
def _second() -> Iterator[None]:
    # What was checkpointed inside of the first forward has to be again, or the saved tensors do not match ("A
    # different number of tensors was saved during the original forward and recomputation", torch 2.13).
    with _state("is_recomputing", True), _state("is_checkpointing_disabled", False):
        yield
