"""``checkpoint_wrapper``: recomputes the activations of a module in the backward pass, without wrapping it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn

from fsshard.errors import ModelError
from fsshard.model.recomputation import RecomputedForward

from ....not_served import missing_from
from ....report import called

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
    """The state of a thread; autograd recomputes in threads of its own where the device is not the CPU."""

    is_checkpointing: bool = False
    is_recomputing: bool = False
    is_checkpointing_disabled: bool = False


thread_local = ThreadLocalCheckpointingState()


@contextmanager
def _state(**values: bool) -> Iterator[None]:
    before = {name: getattr(thread_local, name) for name in values}
    vars(thread_local).update(values)
    try:
        yield
    finally:
        vars(thread_local).update(before)


def disable_checkpointing() -> AbstractContextManager[None]:
    """Run wrapped modules as if they were not wrapped. What was checkpointed before is still recomputed."""
    return _state(is_checkpointing_disabled=True)


def enable_checkpointing() -> AbstractContextManager[None]:
    """Make :func:`is_checkpointing` true, for those who checkpoint by hand."""
    return _state(is_checkpointing=True)


def enable_recomputing() -> AbstractContextManager[None]:
    """Make :func:`is_recomputing` true, for those who checkpoint by hand."""
    return _state(is_recomputing=True)


def is_checkpointing() -> bool:
    """Return whether this is the first forward of a wrapped module."""
    return thread_local.is_checkpointing


def is_recomputing() -> bool:
    """Return whether this is the second forward, in the backward pass. A module that counts its calls looks here."""
    return thread_local.is_recomputing


def is_checkpointing_disabled() -> bool:
    """Return whether this is inside of :func:`disable_checkpointing`."""
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

    Raises:
        ModelError: this is no module.
    """
    if not isinstance(module, nn.Module):  # a function would go on as it is
        raise ModelError(f"checkpoint_wrapper: expected a torch.nn.Module, got {type(module).__name__}")
    called("fairscale.nn.checkpoint.checkpoint_wrapper", "torch.utils.checkpoint, not reentrant")
    own = module.__dict__.get("forward")
    if isinstance(own, CheckpointedForward):
        own = own.original
    module.forward = CheckpointedForward(module, own, bool(offload_to_cpu))
    return module


class CheckpointedForward(RecomputedForward):
    """Stands where a module's ``forward`` is looked up, and belongs to that module only.

    FairScale 0.4.13 holds the class's forward and a weak reference in a ``functools.partial``: a copy runs on the
    weights of the original, pickle says "cannot pickle 'weakref.ReferenceType' object", and a ``forward`` that was set
    on the instance is lost.
    """

    origin = "checkpoint_wrapper"

    def is_off(self) -> bool:
        """Tell whether gradients or checkpointing are disabled."""
        return super().is_off() or thread_local.is_checkpointing_disabled

    def around_first(self) -> AbstractContextManager[None]:
        """Make :func:`is_checkpointing` true."""
        return enable_checkpointing()

    def around_second(self) -> AbstractContextManager[None]:
        """Make :func:`is_recomputing` true."""
        # What was checkpointed inside of the first forward has to be again, or the saved tensors do not match ("A
        # different number of tensors was saved during the original forward and recomputation", torch 2.13).
        return _state(is_recomputing=True, is_checkpointing_disabled=False)
