"""Mixed precision with one meaning for all backends: units compute in a dtype, weights and optimizer in float32.

The meaning is FSDP2's, per module and not per operation as autocast's is (docs/precision.md):

FSDP1 and FSDP2 gather their parameters in a unit's dtype themselves. Under the other backends, and for FSDP1 where
parameters are whole (``full_parameters``), :func:`cast_params` casts them at the start of each forward. The casts of
what enters and leaves units are hooks of ours under every backend, since the engines' own differ (FSDP1 casts at the
root only).
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsshard.complex_params.flattened import stored_in
from fsshard.complex_params.replaced import UngatheredParameter
from fsshard.complex_params.slots import ModuleTable, ParameterSlot
from fsshard.errors import ModelError, PrecisionError
from fsshard.model.recomputation import RecomputedForward
from fsshard.nested import map_containers
from fsshard.planning.plan import Plan, Unit
from fsshard.planning.policies import Precision
from fsshard.torch_private.autograd import functorch_transforms_active
from fsshard.torch_private.modules import CHECKPOINTED
from fsshard.torch_private.tensors import version_of

# Named as in torch's FSDP tutorial, and with its meaning.
fpSixteen = Precision(param=torch.float16, reduce=torch.float16, buffer=torch.float16)
"""For ``mixed_precision=``: everything in float16, gradients that are sent and buffers included."""

bfSixteen = Precision(param=torch.bfloat16, reduce=torch.bfloat16, buffer=torch.bfloat16)
"""For ``mixed_precision=``: everything in bfloat16, gradients that are sent and buffers included."""

fp32_policy = Precision(param=torch.float32, reduce=torch.float32, buffer=torch.float32)
"""For ``mixed_precision=``: everything in float32, gradients that are sent and buffers included."""


_Casts = list[tuple[ParameterSlot, Callable[[Tensor], Tensor]]]
"""The places of one unit's parameters, each with what makes of it the tensor that its forward computes with."""
FIELDS = ("param", "reduce", "buffer", "output", "send")
COMPUTED_IN = (torch.float32, torch.bfloat16, torch.float16)


class Readiness(NamedTuple):
    """The answer whether bfloat16 can be used, with its reason; true if it can."""

    ready: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ready


def bf16_ready(device: torch.device | str | None = None) -> Readiness:
    """Return whether ``mixed_precision="bf16"`` can be used here, and why.

    Args:
        device: where the model is; None is this process's GPU if there is one, else the CPU.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = torch.device(device).type
    if kind == "cpu":
        return Readiness(True, "the CPU computes in bfloat16, in software where it has no such instructions")
    if kind != "cuda":
        return Readiness(False, f"not known for device type {kind!r}")
    if not torch.cuda.is_available():
        return Readiness(False, "torch sees no GPU")
    name = torch.cuda.get_device_name(device)
    if torch.version.cuda is not None and not torch.cuda.is_bf16_supported(including_emulation=False):
        major, minor = torch.cuda.get_device_capability(device)
        return Readiness(False, f"{name} has compute capability {major}.{minor}; bfloat16 needs 8.0 (Ampere) or newer")
    from torch.distributed import is_nccl_available

    if is_nccl_available() and torch.cuda.nccl.version() < (2, 10):
        return Readiness(False, f"NCCL {torch.cuda.nccl.version()} cannot reduce bfloat16; it needs 2.10 or newer")
    return Readiness(True, f"{name} computes in bfloat16")


def check_precision(plan: Plan, device: torch.device) -> None:
    """Raise for a policy that the model or the hardware cannot follow. Local."""
    precision = plan.precision
    for field in FIELDS:
        dtype = getattr(precision, field)
        if dtype is not None and dtype not in COMPUTED_IN:
            raise PrecisionError(
                f"Precision({field}={dtype}): expected torch.bfloat16, torch.float16, torch.float32 or None"
            )
    if precision == Precision():
        return
    # One parameter's name stands for each dtype.
    names = {}
    for name, info in plan.parameters.items():
        is_number = info.dtype.is_floating_point or info.dtype.is_complex
        if is_number and info.dtype not in (torch.float32, torch.complex64):
            names[info.dtype] = name
    if names:
        others = [f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in names.items()]
        raise PrecisionError(
            f"mixed_precision={precision}: the weights that the optimizer updates stay float32 under every backend, "
            f"and {', '.join(others)}; call model.float() before wrap, or leave mixed_precision=None"
        )
    if torch.bfloat16 in (precision.param, precision.reduce, precision.send):
        answer = bf16_ready(device)
        if not answer:
            raise PrecisionError(f"mixed_precision with bfloat16: {answer.reason}; use 'fp16' with fsshard.GradScaler")


# ------------------------------------------------------------------------------------------------ parameters


class _Rounded(torch.autograd.Function):
    """A float32 tensor with the numbers of a narrower dtype; its gradient passes as it is."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, dtype: torch.dtype) -> Tensor:
        return weight.to(dtype).to(weight.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> Tensor:
        return tangent


def _cast_to(dtype: torch.dtype, weight: Tensor) -> Tensor:
    return weight.to(dtype)


def _rounded_to(dtype: torch.dtype, by_gather: bool, weight: Tensor) -> Tensor:
    if by_gather and not isinstance(weight, UngatheredParameter):
        return weight
    rounded: Tensor = _Rounded.apply(weight, dtype)  # type: ignore[no-untyped-call]
    return rounded


def cast_params(table: ModuleTable, plan: Plan, *, rounds_as_it_gathers: bool) -> None:
    """Show each unit's forward its parameters in the unit's dtype from now on.

    Engines that do so while they gather do not within full_parameters(), where a user's forward may run, too.

    Args:
        table: the modules that were planned, tensorfied.
        plan: which units compute in which dtype. Recomputed blocks run a second time in backward, when the unit around
            them is left already: they cast their parameters themselves too.
        rounds_as_it_gathers: the engine rounds the weights of units with a ``send`` where it gathers them.
    """
    computed = {}
    for each in plan.units:
        if each.send is not None:
            computed[each.name] = functools.partial(_rounded_to, each.send, rounds_as_it_gathers)
        elif each.compute not in (None, torch.float32):
            computed[each.name] = functools.partial(_cast_to, each.compute)
    if not computed:
        return
    modules = table.modules
    blocks = defaultdict(list)
    for name in (*plan.recomputed, *plan.recomputed_before):
        if name in computed:
            continue
        for module in modules[name].modules():
            blocks[module].append(name)
    first_names: dict[int, str] = {}
    casts: dict[str, _Casts] = {}
    for slot in table.slots():
        first_name = first_names.setdefault(id(slot.parameter), slot.name)
        unit = plan.parameters[first_name].unit
        if unit not in computed:
            continue
        cast = (slot, computed[unit])
        casts.setdefault(unit, []).append(cast)
        for block in blocks.get(slot.owner, ()):
            if not unit.startswith(f"{block}."):
                casts.setdefault(block, []).append(cast)
    for name, of_module in casts.items():
        _put_around(modules[name], functools.partial(functools.partial, _with_cast, _fsshard_casts=of_module))


def _put_around(module: nn.Module, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace what ``module`` computes; within a checkpoint that is around it, so that both of its forwards do it."""
    inner = module._modules.get(CHECKPOINTED)  # torch's CheckpointWrapper
    forward = module.__dict__.get("forward")
    if inner is not None:
        _put_around(inner, wrapper)
    elif isinstance(forward, RecomputedForward):
        forward.original = wrapper(forward.original or types.MethodType(type(module).forward, module))
    else:
        module.forward = wrapper(module.forward)


def _with_cast(
    forward: Callable[..., Any],
    /,
    *args: Any,
    _fsshard_casts: _Casts,
    **kwargs: Any,
) -> Any:
    """Run ``forward`` while the modules hold cast parameters, which autograd leads back to the float32 ones."""
    copies = {}
    before = []
    try:
        for slot, cast in _fsshard_casts:
            parameters = stored_in(slot.owner)
            # In a backward pass FSDP1 shows its views in the module's __dict__ only.
            value = parameters.get(slot.stored)
            if value is None or value.dtype != torch.float32:
                continue  # it is cast already
            if id(value) not in copies:
                copies[id(value)] = cast(value)
            if copies[id(value)] is not value:
                before.append((parameters, slot.stored, value))
                parameters[slot.stored] = copies[id(value)]
        result = forward(*args, **kwargs)
        _check_not_written(copies.values(), _fsshard_casts)
        return result
    finally:
        for parameters, stored, value in before:
            parameters[stored] = value


def _check_not_written(copies: Iterable[Tensor], casts: _Casts) -> None:
    """Raise if the forward has changed a copy in place: the version of a fresh tensor is 0."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or functorch_transforms_active():
        return
    # What an engine has gathered is no copy; it has guards of its own.
    if any(version_of(copy) for copy in copies if not isinstance(copy, nn.Parameter)):
        lost = set()
        for slot, _ in casts:
            copy = stored_in(slot.owner)[slot.stored]
            if version_of(copy):
                lost.add(slot.name)
        raise ModelError(
            f"the forward changes {', '.join(map(repr, sorted(lost)))} in place, which would be lost: under mixed "
            "precision it sees copies of the weights in the unit's dtype. Change weights after optimizer.step(), "
            "within `with torch.no_grad(), model.full_parameters(writeback=True):`, or leave mixed_precision=None"
        )


def shield_fp32_units(modules: Mapping[str, nn.Module], plan: Plan) -> None:
    """Take fp32 units out of an autocast around them, which would round what they compute in float32."""
    for unit in plan.units:
        if unit.fp32 and unit.compute is not None:
            _put_around(modules[unit.name], functools.partial(functools.partial, _without_autocast))


def _without_autocast(
    forward: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    with contextlib.ExitStack() as stack:
        for device in _AUTOCAST:  # whatever holds the tensors, and wherever they are
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        return forward(*args, **kwargs)


_AUTOCAST = ("cpu", "cuda", "xpu", "mps", "hpu", "xla", "privateuseone")
"""Device types that have an autocast of their own (torch 2.13)."""


# ------------------------------------------------------------------------------------------------ inputs and outputs


def cast_unit_inputs_and_outputs(modules: Mapping[str, nn.Module], plan: Plan) -> None:
    """Cast what enters and what leaves each unit. After the engine has put its own hooks there.

    ``modules`` are the model's by name, before an engine put wrappers between them.
    """
    precision = plan.precision
    if precision.is_full and precision.output is None:
        return
    units = {unit.name: unit for unit in plan.units}
    for unit in plan.units:
        module = modules[unit.name]
        if unit.compute is not None:
            cast_inputs = functools.partial(_cast_inputs, unit.compute)
            module.register_forward_pre_hook(cast_inputs, prepend=True, with_kwargs=True)
        inside = unit.compute
        if unit.name:
            outside = _around(units, unit.name).compute
        else:
            # The model's own output is cast whatever it is computed in.
            inside = None
            outside = precision.output
        if outside is not None and outside != inside:
            module.register_forward_hook(functools.partial(_cast_output, outside))


def _around(units: Mapping[str, Unit], name: str) -> Unit:
    """Return the unit that holds unit ``name``."""
    while name:
        name = name.rpartition(".")[0]
        if name in units:
            return units[name]
    return units[""]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value`` with its floating-point tensors cast; what holds none that change is itself."""

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf.to(dtype)
        return leaf

    try:
        return map_containers(cast, value, "all")
    except TypeError as error:
        raise PrecisionError(
            "what enters or leaves a sharding unit holds tensors of a dtype that differs from the unit's, and "
            f"{error}; give the class a __copy__ and a __setitem__, or pass a plain list, tuple or dict"
        ) from error


def _cast_inputs(
    dtype: torch.dtype,
    module: nn.Module,
    args: Any,
    kwargs: Any,
) -> Any:
    return _cast(args, dtype), _cast(kwargs, dtype)


def _cast_output(
    dtype: torch.dtype,
    module: nn.Module,
    args: Any,
    output: Any,
) -> Any:
    return _cast(output, dtype)


# ------------------------------------------------------------------------------------------------ buffers


def check_buffers(table: ModuleTable, plan: Plan) -> None:
    """Raise for a buffer that would have to be in two dtypes. Local."""
    names: dict[int, dict[bool, str]] = {}
    for name, _, buffer, fp32 in _floating_buffers(table, plan):
        if plan.precision.buffer in (None, buffer.dtype):
            continue
        places = names.setdefault(id(buffer), {})
        places.setdefault(fp32, name)
        if len(places) == 2:
            raise PrecisionError(
                f"Precision(buffer={plan.precision.buffer}): {places[True]} belongs to a float32 unit, and is the "
                f"same tensor as {places[False]}, which does not; leave buffer=None, or give each its own tensor"
            )


def cast_buffers(table: ModuleTable, plan: Plan) -> dict[str, torch.dtype]:
    """Hold floating-point buffers outside of fp32 units in ``Precision.buffer``; return the dtypes that they had."""
    dtype = plan.precision.buffer
    before: dict[str, torch.dtype] = {}
    if dtype is None:
        return before
    copies: dict[int, Tensor] = {}
    for name, owner, buffer, fp32 in list(_floating_buffers(table, plan)):
        if buffer.dtype == dtype or fp32:
            continue
        before[name] = buffer.dtype
        key = name.rpartition(".")[2]
        owner._buffers[key] = copies.setdefault(id(buffer), buffer.to(dtype))
    return before


def _floating_buffers(table: ModuleTable, plan: Plan) -> Iterator[tuple[str, nn.Module, Tensor, bool]]:
    """Yield every name of every floating-point buffer, its owner, and whether it belongs to an fp32 unit."""
    units = {unit.name: unit for unit in plan.units}
    is_fp32 = {}
    for name, module in table.modules.items():
        unit = units.get(name) or _around(units, name)
        is_fp32[module] = unit.fp32
    for name, module in table.places:
        prefix = f"{name}." if name else ""
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                yield prefix + key, module, buffer, is_fp32[module]
