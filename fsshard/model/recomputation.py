"""Recomputes the activations of a module in the backward pass, without wrapping the module.

The module's ``forward`` is replaced on the instance, and nothing else: its class, attributes, parameter names and hooks
stay. An engine's hooks sit around ``forward``: they gather a unit's parameters and put the autograd node at its inputs
before the checkpoint, once, and the engine's backward hook has gathered again when the recomputation starts. A wrapper
module (torch's ``CheckpointWrapper``) would change the type and every name below it.
"""

from __future__ import annotations

import copy
import functools
import inspect
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from fsshard.errors import ModelError
from fsshard.model.host_copies import HostCopy, is_worth_leaving, to_device, to_host
from fsshard.nested import map_containers
from fsshard.planning.plan import RecomputingForward, is_fairscale_forward
from fsshard.torch_private.autograd import saved_tensors_hooks
from fsshard.torch_private.compiling import disable_dynamo
from fsshard.torch_private.tensors import lazy_clone, version_of

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class RecomputationError(ModelError, CheckpointError):
    """Activations could not be computed again as they were; the message names the block. torch's kind, too.

    Here and not with the other errors, which can be imported without torch.
    """

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(f"the activations of {what} cannot be computed again: {reason}")


def adopt_fairscale(module: nn.Module, name: str) -> None:
    """Put a forward of this file in the place of FairScale's, if ``module`` has one; its offloading is kept.

    FairScale's is reentrant: under FSDP1 it fails where its module is no unit ("too many indices for tensor of
    dimension 1", torch 2.13), and it sums gradients in another order.
    """
    forward = module.__dict__.get("forward")
    if is_fairscale_forward(forward):
        assert isinstance(forward, functools.partial)
        module.forward = RecomputedForward(module, None, bool(forward.args[2]), name=name)


class RecomputedForward(RecomputingForward):
    """Stands where a module's ``forward`` is looked up; copied or unpickled with it, it belongs to the copy.

    Attributes:
        original: the ``forward`` that was set on the instance before, or None: the one of its class.
        offload_to_cpu: keep the inputs in the memory of the CPU; without effect on tensors that are there.
        preserve_rng_state: recompute with the random numbers of the first forward.
        name: of the module in its model, for errors.
    """

    origin = "checkpoint_blocks"
    """Name who put it there."""

    def __init__(
        self,
        module: nn.Module | None,
        original: Callable[..., Any] | None = None,
        offload_to_cpu: bool = False,
        preserve_rng_state: bool = True,
        name: str = "",
    ) -> None:
        self._module = None if module is None else weakref.ref(module)
        self.original = original
        self.offload_to_cpu = offload_to_cpu
        self.preserve_rng_state = preserve_rng_state
        self.name = name

    @property
    def module(self) -> nn.Module:
        """The owner."""
        module = None if self._module is None else self._module()
        if module is None:
            raise ModelError(
                f"this forward of {self.origin} has no module: the module was freed, or its __deepcopy__ does not note "
                f"the copy in its memo; call the module, or apply {self.origin} to the copy again"
            )
        return module

    @property
    def forward(self) -> Callable[..., Any]:
        """Return what is recomputed: the ``forward`` of before, or that of the class."""
        module = self.module
        return self.original or types.MethodType(type(module).forward, module)

    def is_off(self) -> bool:
        """Return whether to run the forward as it is."""
        return not torch.is_grad_enabled()

    def around_first(self) -> AbstractContextManager[Any]:
        """Entered around the first forward."""
        return nullcontext()

    def around_second(self) -> AbstractContextManager[Any]:
        """Entered around the second forward, in the backward pass."""
        return nullcontext()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, checkpointed where gradients are enabled."""
        if self.is_off():
            return self.forward(*args, **kwargs)
        # torch.compile (torch 2.13) takes torch's checkpoint into its graph, but there every buffer is updated twice
        if torch.compiler.is_compiling() and not self.offload_to_cpu and next(self.module.buffers(), None) is None:
            keep = self.preserve_rng_state
            return checkpoint(self.forward, *args, use_reentrant=False, preserve_rng_state=keep, **kwargs)
        return _checkpointed(self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "__signature__":  # transformers reads the names of the arguments
            return inspect.signature(self.forward)
        if name in ("__name__", "__qualname__"):
            return getattr(self.forward, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __deepcopy__(self, memo: dict[int, Any]) -> RecomputedForward:
        owner = memo.get(id(self.module))  # copy.deepcopy notes the copy of a module before it copies its attributes
        twin = type(self)(owner, None, *self._settings())
        memo[id(self)] = twin
        twin.original = copy.deepcopy(self.original, memo)
        return twin

    def __reduce__(self) -> Any:
        return type(self), (self.module, self.original, *self._settings())

    def _settings(self) -> tuple[bool, bool, str]:
        return self.offload_to_cpu, self.preserve_rng_state, self.name


@disable_dynamo  # as torch's own second forward; both have to save the same tensors
def _checkpointed(owner: RecomputedForward, args: Args, kwargs: Kwargs) -> Any:
    run = _Recomputation(owner, args, kwargs)
    return checkpoint(run, *run.kept, use_reentrant=False, preserve_rng_state=owner.preserve_rng_state)


class _Recomputation:
    """Is called by :func:`torch.utils.checkpoint.checkpoint`, in the forward and again in the backward pass.

    The first call gets the caller's arguments themselves, containers included. The second gets new containers with
    what was in them at the start, so that what a module does to a list or a dict it does once.
    """

    # Every tensor is an argument of its own for checkpoint, keyword arguments too: torch 2.13 keeps those in a closure,
    # where it sees neither their device (random numbers of the GPU are then not restored) nor a change in place.
    kept: list[Any]

    def __init__(self, owner: RecomputedForward, args: Args, kwargs: Kwargs) -> None:
        self._module = owner.module
        self._forward = owner.forward
        kind = type(self._module).__name__
        self._what = f"block {owner.name!r} ({kind})" if owner.name else f"a {kind}"
        self._contexts = owner.around_first, owner.around_second
        self._given: tuple[Args, Kwargs] | None = (args, kwargs)
        self._changed: list[_Buffer] = []
        self._random = _random_states() if owner.preserve_rng_state else None
        leaves: list[Any] = []
        self._structure = map_containers(leaves.append, (args, kwargs), "plain")
        # What is kept of offloaded tensors has no graph, which would keep the tensors themselves.
        self._away = [
            (to_host(leaf), leaf.requires_grad) if owner.offload_to_cpu and is_worth_leaving(leaf) else None
            for leaf in leaves
        ]
        kept = [leaf if away is None else None for leaf, away in zip(leaves, self._away, strict=True)]
        self.kept = kept + _device_marks(self._module, leaves)

    def __call__(self, *kept: Any) -> Any:
        """Run the module."""
        if self._given is not None:
            (args, kwargs) = self._given
            self._given = None
            self.kept = []  # torch has them now, and lets them go when the backward pass is over
            return self._run_first(args, kwargs)
        leaves = (leaf if away is None else _fetched(*away) for leaf, away in zip(kept, self._away, strict=False))
        args, kwargs = map_containers(lambda _: next(leaves), self._structure, "plain")
        drawing = nullcontext() if self._random is None else _drawing_from(self._random)
        with self._contexts[1](), _put_back(self._changed), drawing:
            return self._forward(*args, **kwargs)

    def _run_first(self, args: Args, kwargs: Kwargs) -> Any:
        caches = _check_arguments(self._what, args, kwargs)
        with _noting(self._module, self._changed), self._contexts[0](), _naming(self._what):
            result = self._forward(*args, **kwargs)
        for cache, length in caches:  # the second forward would add all keys and values again, without an error
            if cache.get_seq_length() != length:
                raise RecomputationError(
                    self._what,
                    f"its forward fills a {type(cache).__name__}, so that it cannot be run again; call the model with "
                    "use_cache=False, or leave the block out of activation_checkpointing",
                )
        if self._random == _random_states():  # the first forward has drawn none
            self._random = None
        return result


# ------------------------------------------------------------------------------------------------ errors


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Let what fails in the recomputation of the tensors that are saved, within, say which block it was."""
    # torch 2.13 recomputes, and compares with the first forward, where a saved tensor is unpacked; its error tells
    # shapes only. There is no public way to get at the hooks that its checkpoint has just put in place.
    hooks = saved_tensors_hooks(False)
    if hooks is None:
        yield
        return
    pack, unpack = hooks

    def named_unpack(held: Any) -> Any:
        try:
            return unpack(held)
        except RecomputationError:
            raise  # of a block inside of this one
        except CheckpointError as error:
            raise RecomputationError(what, str(error)) from error
        except Exception as error:
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"while the activations of {what} were computed again, in the backward pass")
            raise

    with torch.autograd.graph.saved_tensors_hooks(pack, named_unpack):
        yield


def _check_arguments(what: str, args: Args, kwargs: Kwargs) -> list[tuple[Any, int]]:
    """Raise for an iterator, which a second forward would find empty; return caches with their lengths.

    Other objects are handed to the second forward as the first has left them, as torch's checkpoint does.
    """
    caches = []
    leaves: list[Any] = []
    map_containers(leaves.append, (args, kwargs), "plain")
    for leaf in leaves:
        if isinstance(leaf, Iterator):
            raise RecomputationError(
                what,
                f"an argument is an iterator (a {type(leaf).__name__}), which can be read only once; pass a list, or "
                "leave the block out of activation_checkpointing",
            )
        if hasattr(leaf, "get_seq_length"):  # transformers' Cache
            caches.append((leaf, leaf.get_seq_length()))
    return caches


# ------------------------------------------------------------------------------------------------ random numbers


@contextmanager
def _drawing_from(states: tuple[Any, Any]) -> Iterator[None]:
    """Context that begins with other random numbers of Python and numpy, which torch's checkpoint leaves alone."""
    now = _random_states()
    _restore(states)
    try:
        yield
    finally:
        _restore(now)


def _random_states() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate(), None
    kind, keys, *rest = numpy.random.get_state()
    return random.getstate(), (kind, keys.tobytes(), *rest)


def _restore(states: tuple[Any, Any]) -> None:
    python, numpys = states
    random.setstate(python)
    if numpys is not None:
        numpy = sys.modules["numpy"]
        kind, keys, *rest = numpys
        numpy.random.set_state((kind, numpy.frombuffer(keys, numpy.uint32), *rest))


# ------------------------------------------------------------------------------------------------ arguments


def _fetched(saved: HostCopy, requires_grad: bool) -> Tensor:
    # No leaf, and memory of its own, for the module may change it in place.
    return to_device(saved).requires_grad_(requires_grad).clone()


def _device_marks(module: nn.Module, leaves: list[Any]) -> list[Tensor]:
    """Return empty tensors on every device of the call: torch restores random numbers of its arguments' devices."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    tensors += [parameter for parameter in (next(module.parameters(), None),) if parameter is not None]
    devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
    return [torch.empty(0, device=device) for device in devices]


# ------------------------------------------------------------------------------------------------ buffers


class _Buffer(NamedTuple):
    """A buffer before the first forward."""

    owner: nn.Module
    name: str
    tensor: Tensor
    version: int | None
    value: Tensor

    def is_changed(self) -> bool:
        """Return whether the forward wrote into it, or put another tensor in its place."""
        if self.owner._buffers.get(self.name) is not self.tensor or self.version is None:
            return True
        return self.version != version_of(self.tensor) or _is_written_unseen(self.owner, self.name)


def _is_written_unseen(owner: nn.Module, name: str) -> bool:
    # torch 2.13's batch_norm and instance_norm write into running_mean and running_var without raising _version;
    # other kernels for normalization have taken over these names.
    return owner.training and name.startswith("running_")


_constant: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
"""The buffers of a module that no first forward has changed so far."""


@contextmanager
def _noting(module: nn.Module, changed: list[_Buffer]) -> Iterator[None]:
    """Put the buffers that change within it into ``changed``, with copies of what they were."""
    # A second forward would update statistics twice; and what is computed from them (a power iteration, a codebook)
    # would differ from the first. FairScale covers batch normalization only, and so does this for a layer with the
    # attribute ``disable_patch_batchnorm``, whose user asked for two updates.
    found = list(_buffers(module))
    yield
    for buffer in found:
        names = _constant.setdefault(buffer.owner, set())
        if buffer.is_changed():
            names.discard(buffer.name)
            changed.append(buffer)
        else:
            names.add(buffer.name)


def _buffers(module: nn.Module) -> Iterator[_Buffer]:
    """Yield all buffers with their values."""
    copies = {}
    for owner in module.modules():
        if hasattr(owner, "disable_patch_batchnorm"):
            continue
        constant = _constant.get(owner, ())
        for name, tensor in owner._buffers.items():
            if tensor is None:
                continue
            version = None if tensor.is_inference() else version_of(tensor)
            if id(tensor) not in copies:
                shares = name in constant and version is not None and not _is_written_unseen(owner, name)
                copies[id(tensor)] = _share(tensor) if shares else tensor.detach().clone()
            yield _Buffer(owner, name, tensor, version, copies[id(tensor)])


def _share(tensor: Tensor) -> Tensor:
    """Return a copy that costs nothing before the tensor is written to, which is when torch makes it."""
    # For buffers that have not changed before (masks, tables of positions): a real copy of each at every forward took
    # four times as long as the blocks themselves. Not for those that do change: their memory would be another one after
    # each forward, which a CUDA graph does not follow. Some kernels (scaled_dot_product_attention reading its mask,
    # torch 2.13) ask for memory to write to where they read; then this is a copy, made late.
    is_dense = type(tensor) is Tensor and tensor.layout is torch.strided
    if is_dense and tensor.device.type in ("cpu", "cuda"):
        try:
            return lazy_clone(tensor.detach())
        except RuntimeError:  # torch.func's; memory of NumPy or of several processes ("Expected storage != nullptr")
            pass
    return tensor.detach().clone()


@contextmanager
def _put_back(changed: list[_Buffer]) -> Iterator[None]:
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
