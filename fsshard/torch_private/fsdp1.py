"""The state of a unit of ``FullyShardedDataParallel`` (FSDP1): its handle, and its flat parameter.

A unit is an FSDP1 module, its handle a ``FlatParamHandle``, which is None where other units have all of its parameters,
and the flat parameter a ``FlatParameter``, one tensor of all. Nothing here imports torch.distributed.fsdp before it is
used.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from operator import methodcaller
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fsshard.torch_private.registry import Area

AREA = Area("fsdp1", otherwise="backend 'fsdp', and FairScale's FullyShardedDataParallel")
_UNIT = "torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel."
_RUNTIME = "torch.distributed.fsdp._runtime_utils:"
_FLAT = "torch.distributed.fsdp._flat_param:FlatParameter."
_HANDLE = "torch.distributed.fsdp._flat_param:FlatParamHandle."

# ------------------------------------------------------------------------------------------------ units

handle_of: Callable[[Any], Any] = AREA.reader(f"{_UNIT}_handle", use="of a unit its handle, or None")
wrapped_by: Callable[[Any], nn.Module] = AREA.reader(f"{_UNIT}_fsdp_wrapped_module", use="of a unit what it wraps")
WRAPPED = AREA.attribute(
    f"{_UNIT}_fsdp_wrapped_module",
    use="the name under which a unit holds what it wraps: in module trees, and in names of parameters",
)
_FAIRSCALE = "FairScale's FullyShardedDataParallel"
FLAT_NAME = "_flat_param"  # how state dicts name a unit's flat parameter, where use_orig_params is off
_BEFORE = AREA.attribute(
    "torch.distributed.fsdp._init_utils:_gradient_predivide_factor",
    use="what gradients are divided by before their reduction",
    otherwise=_FAIRSCALE,
)
_AFTER = AREA.attribute(
    "torch.distributed.fsdp._init_utils:_gradient_postdivide_factor",
    use="what gradients are divided by after their reduction",
    otherwise=_FAIRSCALE,
)
reduces_gradients: Callable[[Any], bool] = AREA.reader(f"{_UNIT}_sync_gradients", use="whether no_sync() is not active")


_REDUCE = AREA.attribute(
    f"{_RUNTIME}_comm_hook",
    use="what reduces a unit's gradient in place of FSDP1; register_comm_hook() makes a root of the model at once",
)


def divide_factors(unit: Any) -> tuple[float, float]:
    """Return what gradients are divided by, before and after their reduction."""
    return float(getattr(unit, _BEFORE)), float(getattr(unit, _AFTER))


def set_divide_factors(unit: Any, before: float | None = None, after: float | None = None) -> None:
    """Set one of them, or both."""
    for name, factor in ((_BEFORE, before), (_AFTER, after)):
        if factor is not None:
            setattr(unit, name, factor)


def reduce_by(unit: Any, reduce: Callable[[Tensor, Tensor], None]) -> None:
    """Let ``reduce(gradient, output)`` fill ``output`` with this rank's part of the mean over the ranks."""
    setattr(unit, _REDUCE, lambda state, gradient, output: reduce(gradient, output))


# ------------------------------------------------------------------------------------------------ flat parameters

offsets_of: Callable[[Any], list[tuple[int, int]]] = methodcaller("_get_flat_param_offsets")
AREA.attribute(f"{_HANDLE}_get_flat_param_offsets", use="of a handle: where parameters and padding begin and end")
params_of: Callable[[Any], list[nn.Parameter]] = AREA.reader(
    f"{_FLAT}_params", use="of a flat parameter those that are in it, under use_orig_params"
)
tensors_of: Callable[[Any], list[Any]] = AREA.reader(
    f"{_FLAT}_tensors", use="the views of it that a forward shows in their place"
)
infos_of: Callable[[Any], Sequence[Any]] = AREA.reader(
    f"{_FLAT}_param_infos", use="of each its name, the module that holds it, and that module's name"
)
shared_infos_of: Callable[[Any], Sequence[Any]] = AREA.reader(
    f"{_FLAT}_shared_param_infos", use="the other places of tied ones"
)
shard_infos_of: Callable[[Any], Sequence[Any]] = AREA.reader(
    f"{_FLAT}_shard_param_infos", use="which of them this rank holds a part of"
)
shapes_of: Callable[[Any], Sequence[torch.Size]] = AREA.reader(f"{_FLAT}_shapes", use="their shapes")
is_padding: Callable[[Any], Sequence[bool]] = AREA.reader(
    f"{_FLAT}_is_padding_mask", use="of each piece whether it is padding between parameters"
)
sharded_size: Callable[[Any], torch.Size] = AREA.reader(
    f"{_FLAT}_sharded_size", use="the size of one rank's shard, padded"
)
_SAVED = AREA.attribute(
    f"{_FLAT}_saved_grad_shard", use="a gradient that a backward is added to, put aside while it runs"
)


def held_by(flat: Any) -> dict[str, list[Tensor]]:
    """Map kinds of memory to tensors that FSDP1 keeps on a flat parameter; freed ones are among them."""
    found: dict[str, list[Tensor]] = {"parameters": [], "gathered units": [], "gradients": []}
    for name, value in vars(flat).items():
        if isinstance(value, Tensor):
            # In another dtype the shard of a computation is a part of what is gathered, as the whole is (torch 2.13).
            kind = "gradients" if "grad" in name else "parameters" if "local_shard" in name else "gathered units"
            found[kind].append(value)
    if flat.grad is not None:
        found["gradients"].append(flat.grad)
    return found


def show(flat: Any, index: int, tensor: Tensor) -> None:
    """Let FSDP1 know what is shown in place of a parameter: it compares by identity what it finds later."""
    tensors_of(flat)[index] = tensor


# ------------------------------------------------------------------------------------------------ forward and backward

_reshard = AREA.later(f"{_RUNTIME}_reshard", use="frees what was gathered")
_pre = AREA.later(f"{_RUNTIME}_pre_backward_hook", use="gathers a unit for its backward")
_post = AREA.later(f"{_RUNTIME}_post_backward_hook", use="reduces a unit's gradient")
_init = AREA.later(f"{_RUNTIME}_lazy_init", use="finds the root, at the first forward")
_TRAINING = AREA.attribute(f"{_HANDLE}_training_state", use="what a handle is in the middle of")
_NEEDS = AREA.attribute(f"{_HANDLE}_needs_pre_backward_unshard", use="whether a backward is to gather the unit")
_PREFETCHED = AREA.attribute(f"{_HANDLE}_prefetched", use="whether a gather was begun ahead")
_RAN = AREA.attribute(f"{_RUNTIME}_ran_pre_backward_hook", use="whether this backward has gathered")
HOOK_STATE = AREA.attribute(
    f"{_FLAT}_post_backward_hook_state", use="the node of the gradient's arrival, with the hook on it"
)


def reshard(unit: Any, handle: Any) -> None:
    """Free what was gathered of a unit."""
    _reshard.value(unit, handle, True)


def drop_whole(unit: Any, handle: Any) -> None:
    """Free a unit that a forward has left whole.

    FSDP1 keeps the root, and without resharding every unit, for a backward; where none comes, the next forward would
    compute with it, whatever has been written to the shards since (torch 2.13).
    """
    if handle.uses_sharded_strategy and is_root(unit) is not None and not handle.needs_unshard():
        _reshard.value(unit, handle, True)


def is_recomputing(handle: Any) -> bool:
    """Return whether the forward that runs is one of a backward."""
    return handle is not None and getattr(handle, _TRAINING).name == "BACKWARD_PRE"


def training_state_of(handle: Any) -> str:
    """Return a handle's training state: ``"IDLE"``, ``"FORWARD"``, ``"BACKWARD_PRE"``, ``"BACKWARD_POST"``, ..."""
    return str(getattr(handle, _TRAINING).name)


def pre_backward_hook() -> Callable[..., Any]:
    """``(unit, unit, handle, gradient)``: gathers a unit for its backward."""
    found: Callable[..., Any] = _pre.value
    return found


def post_backward_hook(unit: Any) -> None:
    """Reduce the gradient of a unit's flat parameter."""
    handle = handle_of(unit)
    _post.value(unit, handle, handle.flat_param)


def reduce_unheard(unit: Any) -> None:
    """Before a backward ends, reduce a unit's gradient if FSDP1 has not heard of its arrival.

    FSDP1 hooks the node where the gradient of a flat parameter arrives, once for all forwards until a backward ends.
    In mixed precision or with offloading each forward has a node of its own: after a forward without backward, as
    ``generate`` and an evaluation with gradients are, the next gradients would be lost, silently (torch 2.13).
    """
    handle = handle_of(unit)
    if handle is not None and handle.flat_param.grad is not None and training_state_of(handle) == "BACKWARD_PRE":
        post_backward_hook(unit)


def needs_pre_backward_unshard(handle: Any) -> None:
    """Let the next backward through a unit gather it."""
    setattr(handle, _NEEDS, True)


def be_idle(unit: Any) -> None:
    """Let a unit be in the middle of nothing."""
    for one, name in ((unit, "training_state"), (handle_of(unit), _TRAINING)):
        if one is not None:  # a unit without parameters has no handle
            setattr(one, name, type(getattr(one, name)).IDLE)


def pass_without_gradients_ends(unit: Any, handle: Any) -> None:
    """Let a unit be as it was before a pass that added to no gradient, with its memory as it is."""
    be_idle(unit)
    if handle is not None:
        _reshard.value(unit, handle, False)
        setattr(handle, _RAN, False)
        setattr(handle, _NEEDS, True)  # the next pass shows the whole again, and gathers it where it is gone


def accumulator_of(flat: Any) -> Any:
    """Return where the gradient of a flat parameter arrives, after a forward; None where it takes none."""
    state = flat.__dict__.get(HOOK_STATE)
    return state[0] if state is not None and len(state) == 2 else None  # one item where frozen


def lazy_init(unit: Any) -> None:
    """Let a unit be the root, and those inside of it know."""
    _init.value(unit, unit)


is_root: Callable[[Any], bool | None] = AREA.reader(
    "torch.distributed.fsdp._common_utils:_is_root",
    use="whether a unit is the outermost; None before the first forward",
)
reset_lazy_init: Callable[[Any], None] = methodcaller("_reset_lazy_init")
AREA.attribute(
    f"{_UNIT}_reset_lazy_init",
    use="lets a unit that was used by itself be a part of a larger model",
    otherwise=_FAIRSCALE,
)
AREA.attribute(  # overridden by backends/fsdp1.py and compat/fairscale/nn/data_parallel/_fsdp_engine.py
    f"{_RUNTIME}_post_backward_callback_queued",
    use="is asked where the first pass through a root begins, and set to False last thing at the end of a backward",
    otherwise="backend 'fsdp': derivatives; FairScale's FullyShardedDataParallel: a second backward after two forwards",
)


def abandon(unit: Any) -> None:
    """Let a unit be idle that an exception has left whole and in the middle of what it did (torch 2.13).

    A broken backward's gradients go, and those that it was to be added to: FSDP1 has put them aside, where no
    ``zero_grad`` finds them, and would add them to the next.
    """
    be_idle(unit)
    handle = handle_of(unit)
    if handle is None:
        return
    setattr(handle, _PREFETCHED, False)
    setattr(handle, _RAN, False)
    flat = handle.flat_param
    aside = flat.__dict__.pop(_SAVED, None)
    if aside is not None or (flat.grad is not None and flat.grad.shape != sharded_size(flat)):
        flat.grad = None
    _reshard.value(unit, handle, handle.uses_sharded_strategy)
    let_go(flat)


_SHOW = AREA.attribute(f"{_HANDLE}_use_sharded_views", use="gives modules the parameters in place of views")


def show_frozen(handle: Any) -> None:
    """After a backward on one rank let modules have a unit's parameters again: it is frozen, or was not reached.

    FSDP1 leaves its views of them there, which ``named_parameters()`` and state dicts do not find, and the
    next forward would take them for parameters that were assigned, and write them back: its catch-all believes from the
    address that it has resharded the unit (torch 2.13).
    """
    name, module, *_ = infos_of(handle.flat_param)[0]
    if not isinstance(getattr(module, name), nn.Parameter):
        getattr(handle, _SHOW)()


def is_idle(unit: Any) -> bool:
    """Return whether a unit is in the middle of nothing."""
    return bool(unit.training_state.name == "IDLE")


def is_summoned(unit: Any) -> bool:
    """Return whether ``summon_full_params`` shows a unit's parameters whole."""
    return bool(unit.training_state.name == "SUMMON_FULL_PARAMS")


def let_go(flat: Any) -> None:
    """Undo cycles that pass through C++, where the collector cannot see them; a process group hangs on each.

    FSDP1 keeps on a flat parameter its views with their graph on one rank, and its hook in the graph after a forward
    without backward (torch 2.13).
    """
    if not vars(flat):
        return  # free_with_its_handle came first: finalizers run in any order
    shown = tensors_of(flat) or []  # None without use_orig_params
    shown[:] = [None] * len(shown)
    state = flat.__dict__.pop(HOOK_STATE, None)
    if state is not None:
        state[-1].remove()


def free_with_its_handle(flat: Any, handle: Any) -> None:
    """Undo another, once no engine is there: a flat parameter knows its modules, and they may show views of it.

    They do after a pass that broke off, and without ``use_orig_params`` always (torch 2.13).
    """
    weakref.finalize(handle, vars(flat).clear).atexit = False


def trains_now(handle: Any) -> None:
    """Let a handle train its flat parameter from here on if one of the parameters in it takes a gradient now."""
    flat = handle.flat_param
    trains = any(parameter.requires_grad for parameter in params_of(flat))
    if trains != handle.trains:
        handle.trains = flat.requires_grad = trains
        # Its hook, of a forward whose graph was dropped, is for the other case: "Invalid: _post_backward_hook_state".
        let_go(flat)


# ------------------------------------------------------------------------------------------------ whole and shards

_write_back = AREA.later(
    "torch.distributed.fsdp._unshard_param_utils:_writeback_to_local_shard",
    use="writes what was changed of a whole unit to its shards",
    otherwise=_FAIRSCALE,
)
_USE_ORIG = AREA.attribute(
    f"{_UNIT}_use_orig_params", use="is asked where parameters are shown whole, and compared between units"
)
_flat_handle = AREA.later(
    "torch.distributed.fsdp._init_utils:FlatParamHandle",
    use="makes flat parameters, and pads them",
)


def write_back(handle: Any) -> None:
    """Write the numbers of a unit that is shown whole to its shards."""
    _write_back.value(handle, False)


def claim_orig_params(unit: Any, claimed: bool) -> None:
    """Let a unit say this of ``use_orig_params`` to who asks; what runs asks the handle, which keeps the truth."""
    setattr(unit, _USE_ORIG, claimed)


class Passes(Protocol):
    """Decides, for the units that an engine of ours builds, how a pass through them goes."""

    keeps: bool  # whether the memory of gathered units stays until their gradients have come

    def gather(self, unshard: Callable[[], None]) -> None:
        """Run ``unshard``, which gathers a unit."""

    def note_derivative_pass(self, handle: Any) -> bool:
        """Return whether the pass that begins at a unit adds to no gradient, and is followed by another."""


def even_shards(passes: Passes) -> AbstractContextManager[None]:
    """While units are built: pad flat parameters so that every shard has an even number of elements.

    FSDP1 pads to a multiple of the world size only, so a shard boundary can fall between the real and the imaginary
    part of a number (torch 2.13: a TFNO with shards of 321 reals), and no optimizer could see that number. Parameters
    start at multiples of four elements, so even shards cut none.

    Args:
        passes: is asked in forwards and backwards of the units that are built here.
    """
    base: Any = _flat_handle.value

    class EvenFlatParamHandle(base):  # type: ignore[misc]
        world_size: int
        turned: dict[int, tuple[int, ...]]  # of parameters that are transposed: index and strides
        trains: bool  # whether one of its parameters took a gradient in the latest forward that had a graph

        def _init_flat_param_and_metadata(self, *args: Any, **kwargs: Any) -> None:
            for name in (_SET_PARAMETER, _SET_VIEW):
                setattr(self, name, _put_parameter)
            true_size, self.world_size = self.world_size, 2 * self.world_size  # only used for padding in there
            try:
                super()._init_flat_param_and_metadata(*args, **kwargs)
            finally:
                self.world_size = true_size
            kept = params_of(self.flat_param)
            self.turned = {i: p.stride() for i, p in enumerate(kept) if not p.is_contiguous()}
            self.trains = self.flat_param.requires_grad

        def _reset_flat_param_grad_info_if_needed(self) -> None:
            # At each forward and backward FSDP1 lets the flat parameter take a gradient if one of its parameters does
            # at that moment. A reference pass (DPO freezes for it) then loses the gradients of a graph that awaits its
            # backward: "Invalid: _post_backward_hook_state" (torch 2.13).
            super()._reset_flat_param_grad_info_if_needed()
            self.flat_param.requires_grad = self.trains

        def unshard(self) -> None:
            passes.gather(super().unshard)

        def _use_sharded_grad_views(self) -> None:
            super()._use_sharded_grad_views()
            if not self.turned or self.uses_sharded_strategy:
                return
            # On one rank these are whole, and FSDP1 reads that of a transposed weight, which lies in the weight's order
            # of memory, in the order of indices: another gradient, silently (torch 2.13).
            kept = params_of(self.flat_param)
            for index, strides in self.turned.items():
                gradient = kept[index].grad
                if gradient is not None:
                    kept[index].grad = gradient.reshape(-1).as_strided(gradient.shape, strides)

        def reshard(self, free_unsharded_flat_param: bool) -> None:
            if passes.keeps:
                ends = training_state_of(self) == "BACKWARD_POST"
                if ends and not self.trains:
                    # What is frozen is let go when the gradients of its inputs have come: behind a derivative, too,
                    # whose graph the loss's backward needs. A second derivative does not come through the unit's
                    # outputs.
                    passes.note_derivative_pass(self)
                    setattr(self, _TRAINING, type(getattr(self, _TRAINING)).BACKWARD_PRE)
                    return
                free_unsharded_flat_param = free_unsharded_flat_param and ends
            super().reshard(free_unsharded_flat_param)

        def prepare_gradient_for_backward(self) -> None:
            if not passes.note_derivative_pass(self):
                super().prepare_gradient_for_backward()

    return _flat_handle.replaced_by(EvenFlatParamHandle)


_SET_PARAMETER = AREA.attribute(f"{_HANDLE}_setattr_param", use="gives a module a parameter")
_SET_VIEW = AREA.attribute(f"{_HANDLE}_setattr_tensor", use="gives a module a view of a gathered unit in its place")


def _put_parameter(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a parameter of a unit, or a view in its place, among the parameters of a module."""
    # FSDP1 puts a view into both, parameters and plain attributes (torch 2.13). torch.func.functional_call replaces the
    # first and forwards read the second, so that weights which are handed in inside of a forward are ignored, silently.
    members = vars(module)
    if type(module).__setattr__ is not nn.Module.__setattr__:
        # A class may look at what it is given; nn.Module refuses a view where it has a parameter.
        members["_parameters"].pop(name, None)
        setattr(module, name, tensor)
        members.pop(name, None)
    members["_parameters"][name] = tensor


_GRADIENTS = AREA.attribute(f"{_HANDLE}_use_sharded_grad_views", use="gives parameters their parts of the gradient")
AREA.attribute(
    f"{_HANDLE}_reset_flat_param_grad_info_if_needed",
    use="decides whether a flat parameter takes a gradient; frees that which no parameter has",
)
_METADATA = AREA.attribute(
    f"{_HANDLE}_init_flat_param_and_metadata", use="makes a flat parameter, padded for the world's size"
)
