"""A rank of a job of any size in one process, on tensors without memory: what torch 2.13's fakes cannot do alone.

:func:`fake_ranks` makes collectives return at once and send nothing; :class:`Fakes` is the fake mode of a simulation.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsshard.complex_params.slots import parameter_slots
from fsshard.nested import map_tensors
from fsshard.torch_private.autograd import current_graph_task_id
from fsshard.torch_private.c10d import collectives_replaced, fake_store, forget_meshes
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
from fsshard.torch_private.tensors import storage_key

FILL = torch.ops.aten.fill_.Scalar
RNN_LAYER = torch.ops.aten.mkldnn_rnn_layer.default
# Tensors of up to so many elements that are made of Python numbers keep these, so that they can be read again.
KNOWN_NUMBERS = 2**16


@contextlib.contextmanager
def fake_ranks(rank: int, world_size: int, backend: str = "fake") -> Iterator[None]:
    """Be rank ``rank`` of ``world_size`` ranks, of which the others do exactly what this one does, over ``backend``.

    The process must have no process group yet; it has none afterwards.
    """
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=fake_store())
    functions = {
        "all_gather_object": _all_gather_object,
        "broadcast_object_list": lambda *_, **__: None,
        "all_reduce": _finished(dist.all_reduce),
        "get_backend": lambda *_: backend,
    }
    try:
        with collectives_replaced(functions):
            yield
    finally:
        dist.destroy_process_group()
        forget_meshes()


def _all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    # The fake group would unpickle memory that nobody has written.
    object_list[:] = [obj] * len(object_list)


class GlooBuffers(TorchDispatchMode):
    """Takes the memory that gloo takes: its reduce_scatter is an all_reduce of a copy of what goes in (torch 2.13)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _copy = torch.empty_like(args[1]) if func.name() == "c10d::_reduce_scatter_base_" else None
        return func(*args, **(kwargs or {}))


class UsedParameters(TorchDispatchMode):
    """Remembers which parameters DDP has seen a gradient of, which it reads from memory under find_unused_parameters.

    Its map is one int32 per parameter, written and read one by one in a backward (torch 2.13).
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._written: dict[tuple[int, int], int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (FILL, LOCAL_SCALAR_DENSE) and args[0].dtype is torch.int32:
            tensor = args[0]
            storage = storage_key(tensor.untyped_storage())
            place = tensor.storage_offset()
            if func is FILL:
                for number in range(place, place + tensor.numel()):
                    self._written[storage, number] = args[1]
            elif current_graph_task_id() != -1:
                return self._written.get((storage, place), 0)
        return func(*args, **(kwargs or {}))


class _Done(torch.futures.Future[Any]):
    """A collective that is over, and its own future. The fake group's own has a future that is None (torch 2.13)."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.set_result([tensor])

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> _Done:
        return self


def _finished(all_reduce: Any) -> Any:
    def all_reduce_at_once(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Control flow over small facts (which gradients are there) goes on: with equal ranks, MAX changes nothing.
        # Fake tensors know such values, and would forget them when an operator writes.
        constant = getattr(tensor, "constant", None)
        all_reduce(tensor, *args, **kwargs)
        if constant is not None:
            tensor.constant = constant  # type: ignore[attr-defined]
        return _Done(tensor) if kwargs.get("async_op") else None

    return all_reduce_at_once


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
        if super().may_turn_const(t):
            return True
        return type(t) is Tensor and t.numel() <= KNOWN_NUMBERS and not t.is_meta and not t.is_sparse

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        freed = None
        if func.is_view and args and isinstance(args[0], FakeTensor):
            storage = storage_of(args[0])
            if storage is not None and not storage.nbytes() and args[0].numel():
                freed = storage
        result: Any = super().dispatch(func, types, args, kwargs or {})
        if freed is not None and freed.nbytes():
            # torch 2.13 gives a view that it remembers its memory by set_(), which grows what FSDP2 has let go of; to
            # ask for the autograd node of a parameter (get_gradient_edge) is to make a view.
            freed.resize_(0)
        # What it keeps for its backward has no size in torch's fake operator (2.13).
        if func is RNN_LAYER:
            *outputs, workspace = result
            return (*outputs, self._rnn_workspace(args, workspace))
        return result

    def _rnn_workspace(self, args: Any, empty: Tensor) -> Tensor:
        """Return a workspace as large as the true operator's, which runs on numbers, once for each kind of layer."""
        kinds = []
        for value in args:
            kinds.append((value.shape, value.dtype) if isinstance(value, Tensor) else repr(value))
        key = tuple(kinds)
        if key not in self._workspaces:
            with self.left():
                zeros = map_tensors(lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype), args)
                self._workspaces[key] = RNN_LAYER(*zeros)[3].untyped_storage().nbytes()
        with self:
            return torch.empty(self._workspaces[key], dtype=empty.dtype)

    def of(self, value: Any) -> Any:
        """Put fake tensors in place of real ones in ``value``, however nested."""
        return map_tensors(self.from_tensor, value)

    # A context in which tensors are real.
    left = staticmethod(unset_fake_temporarily)

    def built(self, build: Callable[[], nn.Module]) -> nn.Module:
        """Build a model without memory."""
        try:
            # torch's trunc_normal_ asks whether numbers are out of bounds
            with _Answers(bool=False), swapped_by(_converted):
                return build()
        except (DataDependentOutputException, DynamicOutputShapeException):
            # The model's constructor computes with numbers, so it gets them, once.
            pass
        with self.left():
            module = build()
        fakes = {}
        for slot in list(parameter_slots(module)):
            real = slot.parameter
            if id(real) not in fakes:
                fakes[id(real)] = nn.Parameter(self.from_tensor(real.detach()), real.requires_grad)
            slot.owner._parameters[slot.stored] = fakes[id(real)]
        return module

    @contextlib.contextmanager
    def wrapping(self, model: nn.Module) -> Iterator[None]:
        """Let ``model`` be wrapped."""
        # wrap() looks for NaN in the weights, and whether ranks along mesh dimensions hold the same: a fake tensor that
        # is asked whether something is wrong says no, and its bits add up to 0 on all ranks. And it moves the model to
        # its device, where a fake one is: nn.Module would swap parameters, which fails for those that something refers
        # to weakly (torch 2.13: "Cannot swap t1 because it has weakref associated with it").
        with replaced(model, "to", lambda *_, **__: model), _Answers(bool=False, int64=0):
            yield


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the tensor's storage; None if it has none of its own: a sparse tensor, a functional wrapper."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def _deepcopy_fake(tensor: Any, memo: dict[int, Any]) -> Any:
    """Do as ``copy.deepcopy`` does with a tensor."""
    # torch's own gives a fake one another storage than its views have, of which the process can die, and for one that
    # knows its number ends in "Attempted to set the storage of a tensor on device "meta" to a storage on different
    # device" (2.13).
    if id(tensor) in memo:
        return memo[id(tensor)]
    new: Any = torch.empty_like(tensor.detach())
    if tensor.constant is not None:
        with tensor.fake_mode.left():
            new.constant = tensor.constant.clone()
    own_names = set(new.__dict__)
    if isinstance(tensor, nn.Parameter):
        new = nn.Parameter(new, tensor.requires_grad)
    else:
        new.requires_grad_(tensor.requires_grad)
    for name, value in tensor.__dict__.items():
        if name not in own_names:
            new.__dict__[name] = value
    memo[id(tensor)] = new
    return new


def _converted(tensor: Any, new: Any) -> None:
    """Do what ``module.to(dtype)`` does to a parameter."""
    # torch 2.13 swaps fake ones, which fails for a parameter that something refers to weakly, as its fake mode does
    # ("_apply(): Couldn't swap Linear.weight").
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
