"""Tensors without memory: the fake mode of a simulation, and how a model and a batch are converted to it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fsshard.complex_params.slots import parameter_slots
from fsshard.nested import map_leaves
from fsshard.torch_private.dispatch import LOCAL_SCALAR_DENSE, TorchDispatchMode
from fsshard.torch_private.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    copied_by,
    swapped_by,
    unset_fake_temporarily,
)
from fsshard.torch_private.patching import replaced

__all__ = ["Fakes"]

KNOWN_NUMBERS = 2**16
"""Tensors of up to so many elements that are made of Python numbers keep these, so that they can be read again."""


RNN_LAYER = torch.ops.aten.mkldnn_rnn_layer.default


class Fakes(FakeTensorMode):
    """torch's fake mode, in which small constants stay known: FairScale's flags of which gradients are there."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._workspaces: dict[Any, int] = {}
        self._depth = 0
        self._around = contextlib.ExitStack()

    def __enter__(self) -> Any:
        if not self._depth:
            self._around.enter_context(copied_by(_deepcopy_fake))
            self._around.enter_context(warnings.catch_warnings())
            # torch's FSDP1 and ours compare addresses; those of fake tensors are all 0, and nobody goes there.
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        self._depth += 1
        return super().__enter__()

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        self._depth -= 1
        if not self._depth:
            self._around.close()

    def may_turn_const(self, t: Tensor) -> bool:
        usual = super().may_turn_const(t)
        return usual or (type(t) is Tensor and t.numel() <= KNOWN_NUMBERS and not t.is_meta and not t.is_sparse)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        freed = _freed_storage(args[0]) if func.is_view and args else None
        found: Any = super().dispatch(func, types, args, kwargs or {})
        if freed is not None and freed.nbytes():
            # torch 2.13 gives a view that it remembers its memory by set_(), which grows what FSDP2 has let go of; to
            # ask for the autograd node of a parameter (get_gradient_edge) is to make a view.
            freed.resize_(0)
        if func is RNN_LAYER:  # what it keeps for its backward has no size in torch's fake operator (2.13)
            *outputs, workspace = found
            return (*outputs, self._rnn_workspace(args, workspace))
        return found

    def _rnn_workspace(self, args: Any, empty: Tensor) -> Tensor:
        """Return one as large as that of the true operator, which runs on numbers, once for each kind of layer."""
        key = tuple((tuple(a.shape), a.dtype) if isinstance(a, Tensor) else repr(a) for a in args)
        if key not in self._workspaces:
            with self.left():
                real = [torch.zeros(a.shape, dtype=a.dtype) if isinstance(a, Tensor) else a for a in args]
                self._workspaces[key] = RNN_LAYER(*real)[3].untyped_storage().nbytes()
        with self:
            return torch.empty(self._workspaces[key], dtype=empty.dtype)

    def of(self, value: Any) -> Any:
        """``value``, however nested, with fake tensors in place of real ones."""
        return map_leaves(lambda leaf: self.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, value)

    @contextlib.contextmanager
    def left(self) -> Iterator[None]:
        """Make real tensors in between."""
        with unset_fake_temporarily():
            yield

    def built(self, build: Callable[[], nn.Module]) -> nn.Module:
        """The model that ``build`` makes, without memory."""
        try:
            # torch's trunc_normal_ asks whether numbers are out of bounds
            with _Answers(bool=False), swapped_by(_converted):
                return build()
        except (DataDependentOutputException, DynamicOutputShapeException):
            pass  # the model's constructor computes with numbers, so it gets them, once
        with self.left():
            module = build()
        made: dict[int, nn.Parameter] = {}
        for slot in list(parameter_slots(module)):
            old = slot.parameter
            if id(old) not in made:
                made[id(old)] = nn.Parameter(self.from_tensor(old.detach()), old.requires_grad)
            slot.owner._parameters[slot.stored] = made[id(old)]
        return module

    @contextlib.contextmanager
    def wrapping(self, model: nn.Module) -> Iterator[None]:
        """Let ``model`` be wrapped.

        wrap() looks for NaN in the weights, and whether ranks along mesh dimensions hold the same: a fake tensor that
        is asked whether something is wrong says no, and its bits add up to 0 on all ranks. And it moves the model to
        its device, where a fake one is: nn.Module would swap parameters, which fails for those that something refers
        to weakly (torch 2.13: "Cannot swap t1 because it has weakref associated with it").
        """
        with replaced(model, "to", lambda *_, **__: model), _Answers(bool=False, int64=0):
            yield


def _freed_storage(tensor: Any) -> torch.UntypedStorage | None:
    """Its storage, if its memory has been given back."""
    if not isinstance(tensor, FakeTensor):
        return None
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a sparse tensor
        return None
    return storage if not storage.nbytes() and tensor.numel() else None


def _deepcopy_fake(tensor: Any, memo: dict[int, Any]) -> Any:
    """``copy.deepcopy`` of a fake tensor.

    torch's own gives it another storage than its views have, of which the process can die, and for one that knows its
    number ends in "Attempted to set the storage of a tensor on device "meta" to a storage on different device" (2.13).
    """
    if id(tensor) not in memo:
        new: Any = torch.empty_like(tensor.detach())
        if tensor.constant is not None:
            with tensor.fake_mode.left():
                new.constant = tensor.constant.clone()
        known = set(new.__dict__)
        is_parameter = isinstance(tensor, nn.Parameter)
        new = nn.Parameter(new, tensor.requires_grad) if is_parameter else new.requires_grad_(tensor.requires_grad)
        new.__dict__.update({name: value for name, value in tensor.__dict__.items() if name not in known})
        memo[id(tensor)] = new
    return memo[id(tensor)]


def _converted(tensor: Any, new: Any) -> None:
    """Do what ``module.to(dtype)`` does to a parameter.

    torch 2.13 swaps fake ones, which fails for a parameter that something refers to weakly, as its fake mode does
    ("_apply(): Couldn't swap Linear.weight").
    """
    tensor.data = new.detach()


class _Answers(TorchDispatchMode):
    """Answers for tensors of some dtypes that are asked for their number."""

    def __init__(self, **answers: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._answers = {getattr(torch, dtype): answer for dtype, answer in answers.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is LOCAL_SCALAR_DENSE and args[0].dtype in self._answers:
            return self._answers[args[0].dtype]
        return func(*args, **(kwargs or {}))
