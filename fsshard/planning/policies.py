"""The policies that a user may pass: small frozen objects, checked when they are created.

torch's own objects are accepted wherever these are; :func:`resolve_units` turns every accepted form of
``auto_wrap_policy`` into modules, so that no backend interprets a policy of its own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import nn

from fsshard.complex_params.slots import ModuleTable
from fsshard.errors import ConfigurationError, PrecisionError
from fsshard.torch_private.modules import classes_of_policy, is_policy, run_policy

# "auto" on a model that names no blocks: a unit per subtree of this many bytes (torch: 1e8 parameters).
AUTO_MIN_BYTES = 100_000_000


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes that are used where, under every backend alike (docs/precision.md); master weights stay float32.

    Attributes:
        param: dtype in which units compute: that of their parameters and floating-point inputs during forward and
            backward. None: the model's own.
        reduce: dtype in which gradients are sent between ranks. None: the dtype in which their unit computes, ``param``
            or a unit's float32.
        buffer: dtype of floating-point buffers outside of fp32 units. None: the model's own.
        output: dtype of the model's floating-point outputs. None: as they come.
        send: dtype in which engines that gather weights send those of units that compute in float32, complex ones
            too: ``fsdp2``. Under every engine a forward computes with weights rounded to it (to the nearest, ties to
            even), and the gradients of these units are sent in it unless ``reduce`` says otherwise. None: float32.
        fp32_units: dtype in which modules compute that own complex weights or are BatchNorms: None, or float32 by name.
            There is no complex bfloat16, and a complex32 has no matrix product on the CPU.
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    buffer: torch.dtype | None = None
    output: torch.dtype | None = None
    send: torch.dtype | None = None
    fp32_units: torch.dtype | None = None

    def __post_init__(self) -> None:
        for field in ("param", "reduce", "buffer", "output", "send", "fp32_units"):
            dtype = getattr(self, field)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise PrecisionError(f"Precision({field}=...): expected a floating-point dtype or None, got {dtype!r}")
        if self.fp32_units not in (None, torch.float32):
            raise PrecisionError(
                f"Precision(fp32_units={self.fp32_units}): modules with complex weights, and BatchNorms, compute in "
                "float32 under every backend; leave fp32_units=None"
            )

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """Return the dtype in which gradients are sent outside of fp32 units; None is float32."""
        dtype = self.reduce or self.param or self.send
        return None if dtype == torch.float32 else dtype

    @property
    def is_full(self) -> bool:
        """Return whether nothing is cast anywhere."""
        dtypes = {self.param, self.reduce, self.buffer, self.output, self.send, self.fp32_units}
        return dtypes <= {None, torch.float32}


def resolve_precision(value: object) -> Precision:
    """Return the :class:`Precision` that ``mixed_precision=`` names.

    With ``"bf16"`` or ``"fp16"`` units compute in that dtype; gradients are sent and outputs come in float32.
    """
    names = {"bf16": torch.bfloat16, "fp16": torch.float16}
    if value is None or value == "fp32":
        return Precision()
    if isinstance(value, Precision):
        return value
    if isinstance(value, str) and value in names:
        return Precision(param=names[value], reduce=torch.float32, output=torch.float32)
    if hasattr(value, "param_dtype") and hasattr(value, "reduce_dtype"):
        _refuse_other_settings(value)
        return Precision(
            param=value.param_dtype,
            reduce=value.reduce_dtype,
            buffer=getattr(value, "buffer_dtype", None),
            output=getattr(value, "output_dtype", None),
        )
    raise PrecisionError(
        f"mixed_precision={value!r}: expected None, 'fp32', 'bf16', 'fp16', fsshard.Precision, "
        "or torch's MixedPrecision / MixedPrecisionPolicy"
    )


def _refuse_other_settings(value: Any) -> None:
    if not is_dataclass(value):
        return
    for field in fields(value):
        if field.name in ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype"):
            continue
        setting = getattr(value, field.name)
        if setting != field.default:
            raise PrecisionError(
                f"mixed_precision={type(value).__name__}({field.name}={setting!r}): no backend would honour it, "
                "since fsshard.Precision has dtypes only; leave the default"
            )


@dataclass(frozen=True)
class Checkpointing:
    """The blocks that keep no activations on the device, and what they do instead: compute them again, or fetch them.

    Attributes:
        policy: True (the plan's own units), a module class, a set of classes or class names, a callable
            ``module -> bool``, or one of torch's wrap policies; None or False: none.
        offload_to_cpu: keep the block's inputs in host memory until the backward pass.
        recompute: False, with ``offload_to_cpu=True``: compute nothing again, but keep all that the block saves for the
            backward pass in host memory, except gathered weights. On CUDA the copies overlap the computation.
        preserve_rng_state: recompute with the random numbers of the first forward. Without it dropout drops other
            elements in the second forward, and the gradients are wrong.
    """

    policy: object = True
    offload_to_cpu: bool = False
    preserve_rng_state: bool = True
    recompute: bool = True

    def __post_init__(self) -> None:
        if not self.recompute and not self.offload_to_cpu:
            raise ConfigurationError(
                "Checkpointing(recompute=False) would change nothing: expected offload_to_cpu=True with it, so that "
                "activations wait in host memory; or leave activation_checkpointing out"
            )


def resolve_checkpointing(value: object) -> Checkpointing:
    """Return the :class:`Checkpointing` that ``activation_checkpointing=`` means; only its form is checked."""
    checkpointing = value if isinstance(value, Checkpointing) else Checkpointing(policy=value)
    policy = checkpointing.policy
    if policy is None or isinstance(policy, bool) or callable(policy) or is_policy(policy):
        return checkpointing
    if isinstance(policy, str) or not isinstance(policy, Collection):
        raise ConfigurationError(
            f"activation_checkpointing={policy!r}: expected None, True (the plan's units), a module class, a set of "
            "classes or their names, a callable module -> bool, one of torch's wrap policies, or fsshard.Checkpointing"
        )
    return checkpointing


# Modules that were picked, and why.
Reasons = dict[nn.Module, str]


def resolve_blocks(table: ModuleTable, policy: object) -> Reasons:
    """Return the modules that ``activation_checkpointing`` picks, without the root, and why."""
    try:
        return resolve_units(table, policy, ())
    except ConfigurationError as error:
        raise ConfigurationError(str(error).replace("auto_wrap_policy", "activation_checkpointing")) from None


def resolve_units(
    table: ModuleTable,
    policy: object,
    complex_owners: Collection[nn.Module],
) -> Reasons:
    """Return the modules that ``auto_wrap_policy`` picks as units, without the root, and why.

    ``complex_owners`` are the called modules that own complex weights.
    """
    picked = _picked(table, policy, complex_owners)
    # The root is a unit in any case.
    picked.pop(table.root, None)
    return picked


def _picked(table: ModuleTable, policy: object, complex_owners: Collection[nn.Module]) -> Reasons:
    if policy is None:
        return {}
    if isinstance(policy, str):
        if policy != "auto":
            raise ConfigurationError(
                f"auto_wrap_policy={policy!r}: expected 'auto', or something else than text; settings of fsshard.tune "
                "are passed as fsshard.wrap(model, **fsshard.tune(model, batch=batch, world_size=N).settings)"
            )
        return _auto(table, complex_owners)
    if isinstance(policy, int):
        if policy is True or policy <= 0:
            raise ConfigurationError(f"auto_wrap_policy={policy!r}: expected a positive number of bytes, or None")
        return _by_size(table, policy)
    if isinstance(policy, type):
        return _by_class(table, {policy})
    # These are torch's ModuleWrapPolicy and CustomPolicy.
    if is_policy(policy):
        return _torch_policy(table, policy)
    if isinstance(policy, Collection):
        return _by_class(table, policy)
    if callable(policy) and not isinstance(policy, nn.Module):
        return _by_callable(table, policy)
    raise ConfigurationError(
        f"auto_wrap_policy={policy!r}: expected 'auto', None, a module class, a set of classes or their names, a "
        "number of bytes, a callable module -> bool, or one of torch's wrap policies"
    )


def is_container(module: nn.Module) -> bool:
    """Return whether the module only holds others or parameters: without a forward it cannot be a unit."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)):
        return True
    # tltorch's FactorizedTensor and FactorList: weights in the shape of modules. Told apart without importing them.
    for cls in type(module).__mro__:
        if cls.__module__.startswith("tltorch.") and cls.__name__ in _TLTORCH_HOLDERS:
            return True
    return False


_TLTORCH_HOLDERS = frozenset({"FactorizedTensor", "TensorizedTensor", "FactorList", "ParameterList"})


def never_called(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Return the modules below each nn.MultiheadAttention, which reads their weights itself and never calls them."""
    below: set[nn.Module] = set()
    for attention in modules:
        if isinstance(attention, nn.MultiheadAttention):
            below.update(module for module in attention.modules() if module is not attention)
    return below


def _auto(table: ModuleTable, complex_owners: Collection[nn.Module]) -> Reasons:
    names = set()
    # A model may be a Hugging Face one, or hold some.
    for module in table.modules.values():
        classes = getattr(module, "_no_split_modules", None)
        # One name in place of a list is a mistake that works with transformers.
        if isinstance(classes, str):
            names.add(classes)
        elif isinstance(classes, Collection):
            names.update(classes)
    owners = set(complex_owners)
    picked = {}
    for module in table.modules.values():
        name = type(module).__name__
        if module in owners:
            picked[module] = "owns complex weights"
        elif name in names:
            picked[module] = f"{name} in _no_split_modules"
        elif isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
            picked[module] = f"is an nn.{name}"
    return picked or _by_size(table, AUTO_MIN_BYTES)


def _by_class(table: ModuleTable, policy: Collection[Any]) -> Reasons:
    classes = tuple(item for item in policy if isinstance(item, type))
    names = {item for item in policy if isinstance(item, str)}
    if not policy or not all(isinstance(item, (str, type)) for item in policy):
        raise ConfigurationError(f"auto_wrap_policy={policy!r}: expected module classes, or their names, in a set")
    _check_present(table, classes, names)
    picked = {}
    for module in table.modules.values():
        name = type(module).__name__
        if isinstance(module, classes) or name in names:
            picked[module] = f"is a {name}"
    return picked


def _check_present(
    table: ModuleTable,
    classes: Collection[type],
    names: Collection[str] = (),
) -> None:
    """Raise for classes, or names of classes, that the model has no module of."""
    modules = table.modules.values()
    present = {type(module).__name__ for module in modules}
    absent = [cls.__name__ for cls in classes if not any(isinstance(module, cls) for module in modules)]
    absent += sorted(set(names) - present)
    if absent:
        raise ConfigurationError(
            f"auto_wrap_policy: the model has no {', '.join(absent)}; it has {', '.join(sorted(present))}"
        )


def _by_callable(table: ModuleTable, policy: Callable[..., bool]) -> Reasons:
    function = getattr(policy, "func", None)
    name = getattr(policy, "__name__", None) or getattr(function, "__name__", "callable")
    classes = None
    if isinstance(policy, functools.partial):
        classes = policy.keywords.get("transformer_layer_cls")
    # torch's policy picks nothing if the model has none of the classes.
    if name == "transformer_auto_wrap_policy":
        _check_present(table, classes or ())
    if "recurse" in _argument_names(policy):
        picked = _torch_recursion(table.root, policy, containers=classes is not None)
    else:
        picked = []
        for module in table.modules.values():
            if module is not table.root and policy(module):
                picked.append(module)
    return dict.fromkeys(picked, f"picked by {name}")


def _argument_names(function: Callable[..., Any]) -> Collection[str]:
    if isinstance(function, functools.partial):
        function = function.func
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return ()


def _torch_recursion(
    root: nn.Module,
    policy: Callable[..., bool],
    *,
    containers: bool,
) -> list[nn.Module]:
    """Ask a policy by torch's protocol ``policy(module, recurse, nonwrapped_numel)``, bottom up.

    As in torch/distributed/fsdp/wrap.py, but that only ``containers=True`` puts containers of weights to the policy.
    """

    def reals(module: nn.Module) -> int:
        count = 0
        for parameter in module.parameters():
            # A complex number counts as two reals, since that is what FSDP gets to see.
            count += 2 * parameter.numel() if parameter.is_complex() else parameter.numel()
        return count

    def enters(module: nn.Module, total: int) -> bool:
        return policy(module=module, recurse=True, nonwrapped_numel=total)

    def picks(module: nn.Module, rest: int) -> bool:
        # torch would wrap a factorised tensor or a ParameterList, too, which is never called: what it holds counts for
        # the module around it. Where classes are named, one that is never called was named, and is refused later.
        if not containers and is_container(module):
            return False
        return policy(module=module, recurse=False, nonwrapped_numel=rest)

    return _bottom_up(root, reals, enters, picks)


def _by_size(table: ModuleTable, minimum: int) -> Reasons:
    """Pick modules of which ``minimum`` bytes are left besides their own units."""
    # A unit among these would be read while it is sharded.
    never = never_called(table.modules.values())

    def nbytes(module: nn.Module) -> int:
        return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())

    def enters(module: nn.Module, total: int) -> bool:
        return total >= minimum and module not in never

    def picks(module: nn.Module, rest: int) -> bool:
        return rest >= minimum and not is_container(module)

    picked = _bottom_up(table.root, nbytes, enters, picks)
    return dict.fromkeys(picked, f"holds at least {minimum:,} bytes")


def _bottom_up(
    root: nn.Module,
    size: Callable[[nn.Module], int],
    enters: Callable[[nn.Module, int], bool],
    picks: Callable[[nn.Module, int], bool],
) -> list[nn.Module]:
    """Return the modules that ``picks`` takes by what their own units leave over, children before their parents."""
    picked = []

    def visit(module: nn.Module) -> int:
        total = size(module)
        if not enters(module, total):
            return 0
        inside = sum(visit(child) for child in module.children())
        if module is root or not picks(module, total - inside):
            return inside
        picked.append(module)
        return total

    visit(root)
    return picked


def _torch_policy(table: ModuleTable, policy: Any) -> Reasons:
    # A ModuleWrapPolicy picks nothing if the model has none of its classes.
    _check_present(table, classes_of_policy(policy))
    targets: dict[nn.Module, dict[str, Any]] = run_policy(policy, table.root)
    if any(targets.values()):
        raise ConfigurationError(
            f"auto_wrap_policy={policy!r} returns settings per module, which not every backend supports; return a bool"
        )
    return dict.fromkeys(targets, f"picked by {type(policy).__name__}")
