"""The state of a unit of ``fully_shard`` (FSDP2), its groups of parameters, and its parameters.

A unit is a module that ``fully_shard`` has been given, its state an ``FSDPState``, a group an ``FSDPParamGroup``, and a
part an ``FSDPParam``, torch's record of one parameter. Nothing here imports torch.distributed.fsdp before it is used.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from torch import Tensor, nn

from fsshard.torch_private.registry import Area

AREA = Area("fsdp2", otherwise="backend 'fsdp2'")
_ROOT = "torch.distributed.fsdp._fully_shard"
groups_of: Callable[[Any], list[Any]] = AREA.reader(
    f"{_ROOT}._fsdp_state:FSDPState._fsdp_param_groups", use="what a unit gathers together, of its state"
)


def state_of(unit: Any) -> Any:
    """Return the state of a unit."""
    from torch.distributed.fsdp import fully_shard

    # As its own unit._get_fsdp_state(), in a quarter of the calls.
    found: Any = fully_shard
    return found.state(unit)


def param_groups(unit: Any) -> list[Any]:
    """Return what a unit gathers together."""
    return groups_of(state_of(unit))


_SEEN = AREA.take(
    "torch.distributed._composable_state:_module_state_mapping",
    use="taking a module out of the units, so that it can be one again",
    otherwise="a model that was handed back cannot be wrapped again",
)

CLASSES = AREA.later(
    f"{_ROOT}._fully_shard:cls_to_fsdp_cls",
    use="the classes of units: ours where torch's has another layout than the user's; some of torch's know a mesh",
    otherwise='"object layout differs" from fully_shard, of units whose class inherits from typing.Generic first',
)


def prepare_class(kind: type, make: Callable[[type, dict[str, Any]], type]) -> None:
    """Let ``fully_shard`` turn modules of a class into what ``make(FSDPModule, members)`` gives."""
    from torch.distributed.fsdp import FSDPModule

    if kind not in CLASSES.value:
        CLASSES.value[kind] = make(FSDPModule, {"__deepcopy__": _no_copy})


def _no_copy(*_: Any) -> NoReturn:
    raise AssertionError("a unit of fully_shard cannot be copied; use its state dict")


def forget_unit(module: nn.Module) -> None:
    """Let ``fully_shard`` take a module for one that it has not seen."""
    _SEEN.pop(module, None)


# ------------------------------------------------------------------------------------------------ parts

UNSHARDED_PARAM = AREA.attribute(
    f"{_ROOT}._fsdp_param:FSDPParam._unsharded_param",
    use="the whole parameter that a forward sees; made by the first gather",
)
sharded_data: Callable[[Any], Tensor] = AREA.reader(
    f"{_ROOT}._fsdp_param:FSDPParam._sharded_param_data", use="the memory of a shard, padding and all"
)
place_of: Callable[[Any], Any] = AREA.reader(
    f"{_ROOT}._fsdp_param:FSDPParam._module_info", use="where a part lies in the model: .module and .param_name"
)

_SPEC = AREA.attribute(f"{_ROOT}._fsdp_param:FSDPParam._sharding_spec", use="tells DTensors how a parameter is cut")


def make_gradients(part: Any, kind: Any) -> None:
    """Let the gradients of a parameter be DTensors of the class ``kind``."""
    torchs = type(part).to_sharded_dtensor
    known = weakref.ref(part)

    def to_shard(tensor: Tensor) -> Any:
        owner = known()
        spec = getattr(owner, _SPEC)
        # From torch 2.15 on one of another dtype has a spec of its own.
        if tensor.dtype != spec.tensor_meta.dtype:
            return torchs(owner, tensor)
        # Its __init__ does nothing, in six calls.
        return kind.__new__(kind, tensor, spec, requires_grad=tensor.requires_grad)

    part.to_sharded_dtensor = to_shard


# ------------------------------------------------------------------------------------------------ gathers

_CUT = AREA.later(f"{_ROOT}._fsdp_param:_chunk_with_empty", use="cuts a parameter for all ranks")


def cut_by(cut: Callable[[Tensor, int, int], list[Tensor]]) -> AbstractContextManager[None]:
    """Let FSDP2 cut parameters, within, by ``cut``, which takes one, the number of ranks, and the dimension."""
    return _CUT.replaced_by(cut)


# ------------------------------------------------------------------------------------------------ forward and backward

_CONTEXT = AREA.attribute(
    f"{_ROOT}._fsdp_state:FSDPState._state_ctx", use="what the units of a model share: whose forward runs"
)
_TRAINING = AREA.attribute(
    f"{_ROOT}._fsdp_param_group:FSDPParamGroup._training_state", use="what a unit is in the middle of"
)
_PRE_BACKWARD = AREA.attribute(
    f"{_ROOT}._fsdp_state:FSDPState._pre_backward", use="the hook that gathers a unit for its backward"
)
_REGISTER = AREA.attribute(f"{_ROOT}._fsdp_state:FSDPState._register_pre_backward_hook", use="gives outputs that hook")
_AT_END = AREA.attribute(
    f"{_ROOT}._fsdp_state:FSDPState._register_root_post_backward_final_callback",
    use="lets the end of a backward reduce what has come",
)
pre_backward: Callable[[Any], Callable[[Tensor], Tensor]] = AREA.reader(
    f"{_ROOT}._fsdp_state:FSDPState._pre_backward", use="the hook that gathers a unit for its backward"
)


def forward_root_of(state: Any) -> Any:
    """The state of the model whose forward runs; None outside of one."""
    return getattr(state, _CONTEXT).iter_forward_root


def broken_off(state: Any) -> bool:
    """Return whether an exception has ended the last backward through a model; asked outside of one."""
    return bool(getattr(state, _CONTEXT).post_backward_final_callback_queued)


# Where no_sync leaves sums in the dtype of reductions (torch 2.13). From 2.15 on they are in the .grad of the whole
# parameter; this is a property of the class then, which shows them and cannot be set.
_ACCUMULATED = "unsharded_accumulated_grad"


def accumulated(part: Any) -> list[Tensor]:
    """Return the whole gradients of a parameter that are still to be reduced, each once."""
    whole = getattr(part, UNSHARDED_PARAM, None)
    gradients = (vars(part).get(_ACCUMULATED), None if whole is None else whole.grad)
    return [gradient for gradient in gradients if gradient is not None]


def drop_accumulated(part: Any) -> None:
    """Drop the whole gradients of a parameter that are still to be reduced."""
    if _ACCUMULATED in vars(part):
        setattr(part, _ACCUMULATED, None)
    whole = getattr(part, UNSHARDED_PARAM, None)
    if whole is not None:
        whole.grad = None


def abandon_forward(unit: Any) -> None:
    """Let a unit be idle that a forward has left by an exception.

    Not torch's own ``reset_iter_state``, which waits for gathers under way.
    """
    state = state_of(unit)
    getattr(state, _CONTEXT).iter_forward_root = None
    for one in (state, *groups_of(state)):
        training = getattr(one, _TRAINING)
        if training == type(training).FORWARD:
            setattr(one, _TRAINING, type(training).IDLE)


def forward_goes_on(state: Any) -> None:
    """Take a forward that ends for one that runs, though a forward of the same model has ended within it.

    FSDP2 is idle by then, and would put away at the end of the outer one what is to stay gathered (torch 2.13).
    """
    for one in (state, *groups_of(state)):
        training = getattr(one, _TRAINING)
        if training == type(training).IDLE:
            setattr(one, _TRAINING, type(training).FORWARD)


def reduce_at_end_of_backward(root: Any, group: Any) -> None:
    """Let the end of this backward reduce what has come to the parameters of a group.

    Args:
        root: the state of the model.
        group: is taken for one whose backward runs.
    """
    getattr(root, _AT_END)()
    states = type(getattr(group, _TRAINING))
    setattr(group, _TRAINING, states.PRE_BACKWARD)


def replace_pre_backward(state: Any, hook: Callable[[Tensor], Tensor]) -> None:
    """Run ``hook`` from now on where a backward pass reaches a unit."""
    setattr(state, _PRE_BACKWARD, hook)


def hook_outputs_by(state: Any, make: Callable[[Callable[[Any], Any]], Callable[[Any], Any]]) -> None:
    """Hook outputs of a unit from now on with what ``make`` returns for torch's own function."""
    setattr(state, _REGISTER, make(getattr(state, _REGISTER)))
