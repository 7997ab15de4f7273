"""The policies that a user may pass: small frozen objects, checked when they are created.

torch's own objects are accepted wherever these are; :func:`resolve_units` turns every accepted form of
``auto_wrap_policy`` into one list of modules, so that no backend interprets a policy of its own.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import InitVar, dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import nn

from fsshard.errors import ConfigurationError, PrecisionError
from fsshard.torch_private.modules import classes_of_policy, is_policy, run_policy

__all__ = [
    "AUTO_MIN_BYTES",
    "Checkpointing",
    "Precision",
    "UnitChoice",
    "resolve_blocks",
    "resolve_checkpointing",
    "resolve_precision",
    "resolve_units",
]

AUTO_MIN_BYTES = 100_000_000
"""``"auto"`` on a model that names no blocks: a unit per subtree of this many bytes (torch: 1e8 parameters)."""


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
        fp32_units: dtype in which modules compute that own complex weights or are BatchNorms: None, or float32 by name.
            There is no complex bfloat16, and a complex32 has no matrix product on the CPU.
        island: what ``fp32_units`` was called before 0.1.
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    buffer: torch.dtype | None = None
    output: torch.dtype | None = None
    fp32_units: torch.dtype | None = None
    island: InitVar[torch.dtype | None] = None

    def __post_init__(self, island: torch.dtype | None) -> None:
        if island is not None:
            told = "fsshard.Precision(island=...) is called fp32_units=; the old word goes with the next release"
            warnings.warn(told, FutureWarning, stacklevel=3)
            object.__setattr__(self, "fp32_units", island)
        for field in ("param", "reduce", "buffer", "output", "fp32_units"):
            dtype = getattr(self, field)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise PrecisionError(f"Precision({field}=...) must be a floating-point dtype or None, got {dtype!r}")
        if self.fp32_units not in (None, torch.float32):
            raise PrecisionError(
                f"Precision(fp32_units={self.fp32_units}): modules with complex weights, and BatchNorms, compute in "
                "float32 under every backend; leave fp32_units=None"
            )

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """In which dtype gradients are sent outside of fp32 units: ``reduce``, else ``param``; None is float32."""
        chosen = self.reduce if self.reduce is not None else self.param
        return None if chosen == torch.float32 else chosen

    @property
    def is_full(self) -> bool:
        """Return whether nothing is cast anywhere."""
        return {self.param, self.reduce, self.buffer, self.output, self.fp32_units} <= {None, torch.float32}


def resolve_precision(value: object) -> Precision:
    """The :class:`Precision` that ``mixed_precision=`` names.

    Args:
        value: None, ``"fp32"``, ``"bf16"``, ``"fp16"`` (units compute in that dtype; gradients are sent and outputs
            come in float32), a :class:`Precision`, or torch's ``MixedPrecision`` / ``MixedPrecisionPolicy``.

    Raises:
        PrecisionError: anything else, or a torch policy with more settings than dtypes changed from their defaults.
    """
    names = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if value is None:
        return Precision()
    if isinstance(value, Precision):
        return value
    if isinstance(value, str) and value in names:
        if value == "fp32":
            return Precision()
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
    dtypes = ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype")
    known = {field.name: field.default for field in fields(value)} if is_dataclass(value) else {}
    changed = [name for name, default in known.items() if name not in dtypes and getattr(value, name) != default]
    if changed:
        raise PrecisionError(
            f"mixed_precision={type(value).__name__}({', '.join(f'{n}={getattr(value, n)!r}' for n in changed)}): "
            f"fsshard.Precision has dtypes only, so no backend would honour {', '.join(changed)}; leave the default"
        )


@dataclass(frozen=True)
class Checkpointing:
    """The blocks that compute their activations again in the backward pass, and the way in which they do.

    Attributes:
        policy: True (the plan's own units), a module class, a set of classes or class names, a callable
            ``module -> bool``, or one of torch's wrap policies; None or False: none.
        offload_to_cpu: keep the block's inputs in host memory until the backward pass.
        preserve_rng_state: recompute with the random numbers of the first forward. Without it dropout drops other
            elements in the second forward, and the gradients are wrong.
    """

    policy: object = True
    offload_to_cpu: bool = False
    preserve_rng_state: bool = True

    def __post_init__(self) -> None:
        for name in ("offload_to_cpu", "preserve_rng_state"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigurationError(f"Checkpointing({name}={getattr(self, name)!r}): expected a bool")
        if isinstance(self.policy, Checkpointing):
            raise ConfigurationError("Checkpointing(policy=Checkpointing(...)): give one of them")


def resolve_checkpointing(value: object) -> Checkpointing:
    """The :class:`Checkpointing` that ``activation_checkpointing=`` means; its form is checked, not its match."""
    found = value if isinstance(value, Checkpointing) else Checkpointing(policy=value)
    policy = found.policy
    known = policy is None or isinstance(policy, (bool, type)) or callable(policy) or is_policy(policy)
    if not known and (isinstance(policy, str) or not isinstance(policy, Collection)):
        raise ConfigurationError(
            f"activation_checkpointing={policy!r}: expected None, True (the plan's units), a module class, a set of "
            "classes or their names, a callable module -> bool, one of torch's wrap policies, or fsshard.Checkpointing"
        )
    return found


def resolve_blocks(model: nn.Module, policy: object) -> list[UnitChoice]:
    """The modules that an ``activation_checkpointing`` other than None, False and True picks, without the root.

    Raises:
        ConfigurationError: a class set matches nothing.
    """
    if isinstance(policy, type):
        policy = {policy}
    try:
        chosen = resolve_units(model, policy, ())
    except ConfigurationError as error:
        raise ConfigurationError(str(error).replace("auto_wrap_policy", "activation_checkpointing")) from None
    return [choice for choice in chosen if choice.module is not model]


@dataclass(frozen=True, kw_only=True)
class UnitChoice:
    """A module that a policy picked as a sharding unit, and why."""

    module: nn.Module
    reason: str


Unwrapped = dict[nn.Module, int]
"""Per module, the bytes (or reals) that it would bring to a unit of its own."""


def resolve_units(model: nn.Module, policy: object, complex_owners: Collection[nn.Module]) -> list[UnitChoice]:
    """The modules that ``auto_wrap_policy`` picks as units, without the root.

    Args:
        model: the root.
        policy: see :func:`fsshard.plan`.
        complex_owners: the called modules that own complex weights.

    Raises:
        ConfigurationError: the policy is of no accepted form, or a class set matches nothing.
    """
    if policy is None:
        return []
    if isinstance(policy, str):
        if policy == "tuned":
            raise ConfigurationError(
                "auto_wrap_policy='tuned': expected settings that were found before; write "
                "fsshard.wrap(model, **fsshard.tune(model, batch=batch, world_size=N).settings)"
            )
        if policy != "auto":
            raise ConfigurationError(f"auto_wrap_policy={policy!r}: the only string is 'auto'; see fsshard.plan")
        return _auto(model, complex_owners)
    if isinstance(policy, bool) or (isinstance(policy, int) and policy <= 0):
        raise ConfigurationError(f"auto_wrap_policy={policy!r}: a size must be a positive number of bytes")
    if isinstance(policy, int):
        return [UnitChoice(module=m, reason=f"holds at least {policy:,} bytes") for m in _by_size(model, policy)]
    if isinstance(policy, type):
        raise ConfigurationError(f"auto_wrap_policy={policy.__name__}: put the class in a set, {{{policy.__name__}}}")
    if is_policy(policy):  # torch's ModuleWrapPolicy and CustomPolicy
        return _torch_policy(model, policy)
    if isinstance(policy, Collection):
        return _by_class(model, policy)
    if callable(policy):
        return _by_callable(model, policy)
    raise ConfigurationError(
        f"auto_wrap_policy={policy!r}: expected 'auto', None, a set of module classes or their names, a number of "
        "bytes, a callable module -> bool, or one of torch's wrap policies"
    )


def is_container(module: nn.Module) -> bool:
    """Return whether the module only holds others or parameters: without a forward it cannot be a unit."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)):
        return True
    # tltorch's FactorizedTensor and FactorList: weights in the shape of modules. Told apart without importing them.
    return any(
        cls.__module__.startswith("tltorch.") and cls.__name__ in _TLTORCH_HOLDERS for cls in type(module).__mro__
    )


_TLTORCH_HOLDERS = frozenset({"FactorizedTensor", "TensorizedTensor", "FactorList", "ParameterList"})


def _names(names: object) -> Collection[str]:
    """transformers 5 has a list on the class and a set on the instance; one name by itself is a mistake that works."""
    return (names,) if isinstance(names, str) else names if isinstance(names, Collection) else ()


def _auto(model: nn.Module, complex_owners: Collection[nn.Module]) -> list[UnitChoice]:
    # A model may be a Hugging Face one, or hold some.
    names = {name for module in model.modules() for name in _names(getattr(module, "_no_split_modules", None))}
    layers = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    chosen: list[UnitChoice] = []
    for module in model.modules():
        if module in complex_owners:
            chosen.append(UnitChoice(module=module, reason="owns complex weights"))
        elif type(module).__name__ in names:
            chosen.append(UnitChoice(module=module, reason=f"{type(module).__name__} in _no_split_modules"))
        elif isinstance(module, layers):
            chosen.append(UnitChoice(module=module, reason=f"is an nn.{type(module).__name__}"))
    if chosen:
        return chosen
    return [
        UnitChoice(module=m, reason=f"holds at least {AUTO_MIN_BYTES:,} bytes") for m in _by_size(model, AUTO_MIN_BYTES)
    ]


def _by_class(model: nn.Module, policy: Collection[Any]) -> list[UnitChoice]:
    wrong = [item for item in policy if not isinstance(item, (str, type))]
    if wrong or not policy:
        raise ConfigurationError(f"auto_wrap_policy={policy!r}: a set must hold module classes or class names")
    classes = tuple(item for item in policy if isinstance(item, type))
    names = {item for item in policy if isinstance(item, str)}
    found = [m for m in model.modules() if isinstance(m, classes) or type(m).__name__ in names]
    _check_present(model, classes, names)
    return [UnitChoice(module=m, reason=f"is a {type(m).__name__}") for m in found]


def _check_present(model: nn.Module, classes: Collection[type], names: Collection[str] = ()) -> None:
    """Raise for classes, or names of classes, that the model has no module of."""
    present = {type(m).__name__ for m in model.modules()}
    absent = [cls.__name__ for cls in classes if not any(isinstance(m, cls) for m in model.modules())]
    absent += sorted(set(names) - present)
    if absent:
        raise ConfigurationError(
            f"auto_wrap_policy: the model has no {', '.join(absent)}; it has {', '.join(sorted(present))}"
        )


def _by_callable(model: nn.Module, policy: Callable[..., bool]) -> list[UnitChoice]:
    name = getattr(policy, "__name__", None) or getattr(getattr(policy, "func", None), "__name__", "callable")
    if isinstance(policy, functools.partial) and name == "transformer_auto_wrap_policy":  # torch's picks nothing then
        _check_present(model, policy.keywords.get("transformer_layer_cls", ()))
    if "recurse" in _argument_names(policy):
        picked = list(_torch_recursion(model, policy))
    else:
        picked = [m for m in model.modules() if m is not model and policy(m)]
    return [UnitChoice(module=m, reason=f"picked by {name}") for m in picked]


def _names_classes(policy: Callable[..., bool]) -> bool:
    """Return whether the policy is torch's for classes: one of these that is never called was named."""
    return isinstance(policy, functools.partial) and "transformer_layer_cls" in policy.keywords


def _argument_names(function: Callable[..., Any]) -> set[str]:
    target = function.func if isinstance(function, functools.partial) else function
    try:
        return set(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return set()


def _torch_recursion(root: nn.Module, policy: Callable[..., bool]) -> Iterator[nn.Module]:
    """torch's protocol ``policy(module, recurse, nonwrapped_numel)``, bottom up, as in torch/distributed/fsdp/wrap.py.

    A complex number counts as two, since that is what FSDP gets to see. torch would put its wrapper around a container
    of weights, too (a factorised tensor, a ParameterList), which is never called; here what it holds counts for the
    module around it.
    """
    classes = _names_classes(policy)
    picked: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        total = _size(module, per_real=True)
        if not policy(module=module, recurse=True, nonwrapped_numel=total):
            return 0
        wrapped = sum(visit(child) for child in module.children())
        rest = total - wrapped
        skipped = is_container(module) and not classes
        if module is not root and not skipped and policy(module=module, recurse=False, nonwrapped_numel=rest):
            picked.append(module)
            return total
        return wrapped

    visit(root)
    yield from picked


def _torch_policy(model: nn.Module, policy: Any) -> list[UnitChoice]:
    _check_present(model, classes_of_policy(policy))  # ModuleWrapPolicy's; it picks nothing then
    targets: dict[nn.Module, dict[str, Any]] = run_policy(policy, model)
    if any(kwargs for kwargs in targets.values()):
        raise ConfigurationError(
            f"auto_wrap_policy={policy!r} returns settings per module, which not every backend supports; return a bool"
        )
    return [UnitChoice(module=m, reason=f"picked by {type(policy).__name__}") for m in targets if m is not model]


def _size(module: nn.Module, *, per_real: bool) -> int:
    total = 0
    for parameter in module.parameters():
        reals = parameter.numel() * (2 if parameter.is_complex() else 1)
        total += reals if per_real else parameter.numel() * parameter.element_size()
    return total


def _by_size(root: nn.Module, minimum: int) -> list[nn.Module]:
    """Bottom up: a module becomes a unit when what its own units leave over reaches ``minimum`` bytes."""
    picked: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        total = _size(module, per_real=False)
        if total < minimum:
            return 0
        # nn.MultiheadAttention reads its projections' weights itself: a unit inside it would be read while sharded.
        children = () if isinstance(module, nn.MultiheadAttention) else module.children()
        wrapped = sum(visit(child) for child in children)
        if module is not root and not is_container(module) and total - wrapped >= minimum:
            picked.append(module)
            return total
        return wrapped

    visit(root)
    return picked
