"""plan(): decides what is sharded how, before any engine is involved.

A :class:`Plan` holds names and numbers only. It is made without a process group, without a collective and without
touching the model, and every backend executes it as it stands; that is why they agree.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from fsshard.complex_params.flattened import stored_in
from fsshard.complex_params.pairs import order_in_memory, real_dtype
from fsshard.complex_params.slots import ModuleTable, ParameterSlot, refuse_lazy
from fsshard.errors import ConfigurationError, ModelError
from fsshard.planning.arguments import PrecisionChoice, Recomputed, WrapPolicy
from fsshard.planning.policies import (
    Precision,
    Reasons,
    is_container,
    never_called,
    resolve_blocks,
    resolve_checkpointing,
    resolve_precision,
    resolve_units,
)
from fsshard.planning.text import aligned, counted, size, wrapped
from fsshard.planning.weight_readers import readers_of_weights
from fsshard.torch_private.modules import CHECKPOINTED, BatchNorm
from fsshard.torch_private.tensors import LOCAL_TENSOR

# Name and module; a module may have several.
Place = tuple[str, nn.Module]
# Reasons by the name of a module.
Texts = dict[str, str]
# The first name of each module, by its id.
NamesById = Mapping[int, str]


@dataclass(frozen=True, kw_only=True)
class ParameterInfo:
    """One parameter as the user knows it.

    Attributes:
        name: its first fully qualified name.
        shape: shape before any flattening.
        dtype: dtype before any flattening.
        nbytes: bytes of one whole copy.
        requires_grad: whether it was trainable when planned.
        unit: name of the unit that owns it, ``""`` for the root.
        order: its dims from the outermost in memory to the innermost; empty where that is their own order.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    requires_grad: bool
    unit: str
    order: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A module whose parameters are gathered, computed with and released together.

    Attributes:
        name: fully qualified name of the module, ``""`` for the root.
        reason: why it is a unit.
        parameters: names of the parameters it owns (those of units below it excluded).
        nbytes: bytes of one whole copy of them.
        dtypes: the dtypes among them, sorted by name.
        fp32: whether it owns complex weights or is a BatchNorm, and so stays in float32 under any mixed precision.
        compute: the dtype that its parameters and floating-point inputs have during forward and backward; None is
            their own.
        reduce_dtype: the dtype in which its gradients are sent; None is their own, float32.
        send: the dtype to which its forward's float32 weights are rounded, and in which they are gathered; None: they
            are as they are.
    """

    name: str
    reason: str
    parameters: tuple[str, ...]
    nbytes: int
    dtypes: tuple[torch.dtype, ...]
    fp32: bool
    compute: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    send: torch.dtype | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The decision what is sharded how: the result of :func:`fsshard.plan`, which every backend executes.

    Attributes:
        units: the root first, then the others in the model's order.
        parameters: every distinct parameter by its first name.
        ties: per tied parameter all its names, the first one first.
        fp32_units: names of called modules that own complex weights.
        dropped: modules that the policy picked but that cannot be units, with the reason.
        precision: what is computed in which dtype.
        recomputed: blocks whose activations are computed again in the backward pass, and why.
        offloaded: blocks whose activations wait in host memory instead, and why.
        recomputed_before: blocks that were checkpointed already, and by what; :func:`fsshard.wrap` leaves them
            unchanged.
    """

    units: tuple[Unit, ...]
    parameters: Mapping[str, ParameterInfo]
    ties: tuple[tuple[str, ...], ...]
    fp32_units: tuple[str, ...]
    dropped: Mapping[str, str] = field(default_factory=dict)
    precision: Precision = field(default_factory=Precision)
    recomputed: Mapping[str, str] = field(default_factory=dict)
    recomputed_before: Mapping[str, str] = field(default_factory=dict)
    offloaded: Mapping[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of one whole copy of all parameters."""
        return sum(unit.nbytes for unit in self.units)

    @property
    def unit_names(self) -> tuple[str, ...]:
        """Names of the units below the root, children before their parents."""
        names = [unit.name for unit in self.units[1:]]
        return tuple(sorted(names, key=lambda name: -name.count(".")))

    @property
    def children_first(self) -> list[Unit]:
        """Return the units in the order in which engines shard them, the root last."""
        by_name = {unit.name: unit for unit in self.units}
        return [by_name[name] for name in (*self.unit_names, "")]

    def explain(self) -> str:
        """Return a table of the units, and below it ties, recomputed blocks and what cannot be a unit."""
        return explain_plan(self)


def plan(
    model: nn.Module,
    *,
    auto_wrap_policy: WrapPolicy = "auto",
    mixed_precision: PrecisionChoice = None,
    activation_checkpointing: Recomputed = None,
) -> Plan:
    """Decide the sharding units and the recomputed blocks of ``model``; pure.

    Args:
        model: any module, tensorfied or not, on any device (meta too).
        auto_wrap_policy: which modules become units besides the root.

            * ``"auto"``: modules that own complex weights (for an FNO: the spectral convolutions), HF's
              ``_no_split_modules``, ``nn.TransformerEncoderLayer`` / ``DecoderLayer``; if there are none of these,
              subtrees of at least 100 MB. None whose weights a forward above hands to a custom Function or to
              ``torch.autograd.grad`` (adjoint methods, reversible blocks), which have to be whole there;
            * a module class, or a set of classes or their names;
            * an int: subtrees of at least that many bytes;
            * a callable ``module -> bool``, or torch's ``(module, recurse, nonwrapped_numel) -> bool``;
            * torch's ``ModuleWrapPolicy``, ``CustomPolicy``, ``transformer_auto_wrap_policy``,
              ``size_based_auto_wrap_policy``;
            * ``None``: the root is the only unit.
        mixed_precision: see :func:`fsshard.wrap`. Below float32, modules that own complex weights and BatchNorms become
            units whatever the policy, since they always compute in float32; where such a module cannot be a unit, the
            unit that holds it computes in float32.
        activation_checkpointing: which blocks compute their activations again in the backward pass: None or False,
            none; True, the units below the root; a module class, a set of classes or class names, a callable
            ``module -> bool``, one of torch's wrap policies; or :class:`fsshard.Checkpointing` with one of these. A
            block within another one is recomputed with it, once.

    Returns:
        A :class:`Plan`. Parameters tied between units live in the root unit: a picked module that holds one of them
        is no unit (its untied descendants may be). Within a unit of several dtypes, subtrees of one dtype that are
        not of the most common dtype become units of their own, since flat engines hold one dtype per unit.

    Raises:
        ConfigurationError: a policy has no meaning for this model.
        ModelError: the model has no parameters, or lazy ones.
    """
    table = ModuleTable(model)
    return plan_table(table, shaped_slots(table), auto_wrap_policy, mixed_precision, activation_checkpointing)


def shaped_slots(table: ModuleTable) -> list[ParameterSlot]:
    """Return the places of a model's parameters; raise if there are none, or if some have no shape yet."""
    slots = list(table.slots())
    if not slots:
        raise ModelError(f"model: expected parameters, got a {type(table.root).__name__} without any; use it as it is")
    refuse_lazy(slots)
    return slots


def plan_table(
    table: ModuleTable,
    slots: list[ParameterSlot],
    units: object,
    mixed_precision: object,
    recomputed: object,
) -> Plan:
    """Plan as :func:`plan` does, for a caller that has walked the model already."""
    names = {id(module): name for name, module in table.modules.items()}
    parameters = [slot.parameter for slot in slots]
    complex_names = [slot.name for slot in slots if slot.is_complex]
    owners = _complex_owners(table, complex_names)
    precision = resolve_precision(mixed_precision)
    mixed = not precision.is_full
    picked = resolve_units(table, units, owners)
    if mixed:
        for module, reason in _fp32_units(table, owners).items():
            picked.setdefault(module, reason)
    # Engines cannot hold one parameter in two units.
    ties = _ties(slots, parameters)
    leaks = _leaking(table.places, ties)
    # Units among these would be read while they are sharded.
    never = never_called(table.modules.values())
    handed = _handed_to_autograd(table, names) if units == "auto" else {}
    kept, dropped = _keep(picked, names, _holders(table, slots), leaks, never, handed, mixed=mixed)
    dtypes = {real_dtype(dtype) for dtype in {parameter.dtype for parameter in parameters}}
    if len(dtypes) > 1:
        # Flat engines hold one dtype per unit.
        kept = _split_dtypes(table.root, kept, leaks)
    blocks, before = _recomputed(table, recomputed, kept, never)
    infos = _parameter_infos(slots, parameters, _names_of_units(table, kept))
    # These parameters keep their unit in float32.
    wide = {*complex_names}
    if mixed:
        wide.update(slot.name for slot in slots if isinstance(slot.owner, BatchNorm))
    fp32_units = {names[id(module)] for module in owners}
    recomputes = resolve_checkpointing(recomputed).recompute
    return Plan(
        units=_units(kept, names, infos, wide, precision),
        parameters=infos,
        ties=ties,
        fp32_units=tuple(name for name in names.values() if name in fp32_units),
        dropped=dropped,
        precision=precision,
        recomputed=blocks if recomputes else {},
        recomputed_before=before,
        offloaded={} if recomputes else blocks,
    )


def _recomputed(
    table: ModuleTable,
    activation_checkpointing: object,
    units: Reasons,
    never: Collection[nn.Module],
) -> tuple[Texts, Texts]:
    """Return the blocks to recompute, and those that recompute already; by name, outermost only, with the reason."""
    policy = resolve_checkpointing(activation_checkpointing).policy
    picked = {}
    if policy is True:
        picked = dict.fromkeys(units, "a unit of the plan")
    elif policy is not None and policy is not False:
        picked = resolve_blocks(table, policy)
    for module in never:
        picked.pop(module, None)
    for module in picked:
        why = ""
        if isinstance(module, torch.jit.ScriptModule):
            why = "has a forward that cannot be replaced"
        if is_container(module):
            why = "is never called"
        if why:
            raise ConfigurationError(
                f"activation_checkpointing={policy!r} picked a {type(module).__name__}, which {why}, so that nothing "
                "would be recomputed; pick the class of modules that are called"
            )
    recomputed, before = _outermost(table.places, picked)
    if policy and not recomputed and not before:
        classes = sorted({type(module).__name__ for module in table.modules.values()})
        hint = "this plan has the root as its only unit" if policy is True else "it matches no block below the root"
        raise ConfigurationError(
            f"activation_checkpointing={policy!r}: {hint}; name the classes of the blocks to recompute, for example "
            f"{{torch.nn.TransformerEncoderLayer}}. The model has {', '.join(classes)}"
        )
    return recomputed, before


def _outermost(
    places: Iterable[Place],
    picked: Reasons,
) -> tuple[Texts, Texts]:
    """Return both by public name, in the model's order; a module counts at its first place outside of other blocks."""
    recomputed = {}
    before = {}
    blocks: set[str] = set()
    seen = set()
    # torch's wrapper and what it wraps have one name.
    for name, module in places:
        if module in seen:
            continue
        if blocks and not blocks.isdisjoint([name, *_above(name)]):
            continue
        reason = recomputed_by(module)
        if reason:
            before[name] = reason
        elif module in picked:
            recomputed[name] = picked[module]
        else:
            continue
        blocks.add(name)
        seen.add(module)
    return recomputed, before


OFFLOADING = "activation offloading"


def is_offloading(how: str) -> bool:
    """Return whether blocks in ``recomputed_before`` are only offloaded, by what stands there for one."""
    return how.startswith(OFFLOADING)


class RecomputingForward:
    """Base of what stands in the place of a module's ``forward`` and computes it again in the backward pass."""

    origin: str  # who put it there, in words


def recomputed_by(module: nn.Module) -> str:
    """Return what recomputes ``module`` already, by whatever library; ``""`` if nothing that is known here does."""
    forward = module.__dict__.get("forward")
    if isinstance(forward, RecomputingForward):
        return f"{forward.origin}, before wrap"
    if is_fairscale_forward(forward):
        return "FairScale's checkpoint_wrapper, before wrap"
    if CHECKPOINTED in module._modules:
        return "torch's checkpoint_wrapper, before wrap"
    if not getattr(module, "gradient_checkpointing", False):
        return ""
    # transformers' class is told by its name, without importing it.
    for cls in type(module).__mro__:
        if cls.__name__ == "GradientCheckpointingLayer":
            return "the model's own gradient checkpointing"
    return ""


def is_fairscale_forward(forward: object) -> bool:
    """Return whether this is what FairScale 0.4.13's ``checkpoint_wrapper`` puts in the place of ``forward``."""
    function = forward.func if isinstance(forward, functools.partial) else None
    return getattr(function, "__module__", "").startswith("fairscale.nn.checkpoint.")


def _complex_owners(table: ModuleTable, complex_names: list[str]) -> list[nn.Module]:
    """Called modules that own complex weights: the nearest ancestor of each that is no mere container.

    For neuralop's ``fno_blocks.convs.0.weight.factors.factor_0`` that is the SpectralConv ``fno_blocks.convs.0``.
    """
    modules = table.by_public_name() if complex_names else {}
    owners: dict[nn.Module, None] = {}
    for path in dict.fromkeys(name.rpartition(".")[0] for name in complex_names):
        while path and is_container(modules[path]):
            path = path.rpartition(".")[0]
        owners[modules[path]] = None
    return list(owners)


def _handed_to_autograd(table: ModuleTable, names: NamesById) -> Reasons:
    """Return the modules below one that reads their weights for autograd; nobody chose them as units by name."""
    handed: Reasons = {}
    for reader in readers_of_weights(table.modules.values()):
        place = "the root" if reader is table.root else repr(names[id(reader)])
        reason = f"{place}, a {type(reader).__name__}, hands its weights to a custom Function or to autograd.grad"
        for module in reader.modules():
            if module is not reader:
                handed.setdefault(module, reason)
    return handed


def _fp32_units(table: ModuleTable, owners: list[nn.Module]) -> Reasons:
    """Return what stays in float32, without the root. BatchNorms: FSDP1's rule (``_module_classes_to_ignore``)."""
    units = dict.fromkeys(owners, "owns complex weights")
    norms = [module for module in table.modules.values() if isinstance(module, BatchNorm)]
    units |= dict.fromkeys(norms, "is a BatchNorm, which computes in float32")
    units.pop(table.root, None)
    return units


def _ties(slots: list[ParameterSlot], parameters: list[nn.Parameter]) -> tuple[tuple[str, ...], ...]:
    groups = defaultdict(list)
    for slot, parameter in zip(slots, parameters, strict=True):
        groups[id(parameter)].append(slot.name)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def _leaking(places: Iterable[Place], ties: Sequence[tuple[str, ...]]) -> set[int]:
    """Return the ids of the modules that hold a parameter that is also reached from outside of them.

    By names, not by owners: a whole module can sit in two places (an embedding that encoder and decoder share).
    """
    if not ties:
        return set()
    modules = defaultdict(list)
    for name, module in places:
        modules[name].append(id(module))
    leaking = set()
    for tie in ties:
        counts: Counter[int] = Counter()
        for name in tie:
            around: set[int] = set()
            for path in _above(name):
                around.update(modules.get(path, ()))
            counts.update(around)
        leaking |= {key for key, count in counts.items() if count < len(tie)}
    return leaking


def _above(name: str) -> list[str]:
    """Return the names of all modules around what has ``name``, the root's included."""
    paths = []
    while name:
        name = name.rpartition(".")[0]
        paths.append(name)
    return paths


def _holders(table: ModuleTable, slots: list[ParameterSlot]) -> set[nn.Module]:
    """Return the modules that hold a parameter, themselves or below."""
    paths = {""}
    for slot in slots:
        path = slot.name.rpartition(".")[0]
        while path not in paths:
            paths.add(path)
            path = path.rpartition(".")[0]
    return {module for path, module in table.places if path in paths}


def _keep(
    picked: Mapping[nn.Module, str],
    names: NamesById,
    holders: Collection[nn.Module],
    leaks: Collection[int],
    never: Collection[nn.Module],
    handed: Mapping[nn.Module, str],
    *,
    mixed: bool,
) -> tuple[Reasons, Texts]:
    """Return which picked modules can be units, and why the others cannot."""
    kept = {}
    dropped = {}
    for module, reason in picked.items():
        name = names[id(module)]
        if is_container(module):
            raise ConfigurationError(
                f"auto_wrap_policy picked {name!r}, a {type(module).__name__}: it is never called, so nothing "
                "would gather its parameters; pick the class of the modules that are called"
            )
        # Where dtypes are mixed, a BatchNorm without parameters is a unit too: its inputs and outputs are cast.
        may_be_empty = mixed and isinstance(module, BatchNorm)
        if not may_be_empty and module not in holders:
            dropped[name] = "has no parameters"
        elif module in never:
            dropped[name] = "is never called: its nn.MultiheadAttention reads the weights itself"
        elif module in handed:
            dropped[name] = handed[module]
        elif id(module) in leaks:
            dropped[name] = "holds a parameter tied to another module; it stays in the root"
        else:
            kept[module] = reason
    return kept, dropped


def _region(unit: nn.Module, units: Reasons) -> list[nn.Module]:
    """Return ``unit`` and the modules below it that belong to no unit further down."""
    region = [unit]
    for child in unit.children():
        if child not in units:
            region += _region(child, units)
    return region


def _own_dtypes(modules: list[nn.Module]) -> dict[torch.dtype, int]:
    sizes: dict[torch.dtype, int] = {}
    seen = set()
    for module in modules:
        for parameter in stored_in(module).values():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                dtype = real_dtype(parameter.dtype)
                sizes[dtype] = sizes.get(dtype, 0) + parameter.nbytes
    return sizes


def _split_dtypes(root: nn.Module, kept: Reasons, leaks: Collection[int]) -> Reasons:
    units = dict(kept)
    for unit in [root, *kept]:
        region = _region(unit, kept)
        sizes = _own_dtypes(region)
        # A unit of one dtype can stay as it is.
        if len(sizes) < 2:
            continue
        main = max(sizes, key=lambda dtype: sizes[dtype])
        assigned = set()
        for module in region[1:]:
            if module in assigned or is_container(module) or id(module) in leaks:
                continue
            inside = _region(module, kept)
            dtypes = list(_own_dtypes(inside))
            if len(dtypes) == 1 and dtypes[0] != main:
                assigned.update(inside)
                units[module] = f"holds {_short(dtypes[0])} in a unit of another dtype"
    return units


def _names_of_units(table: ModuleTable, units: Reasons) -> dict[int, str]:
    """Return by id, for each module, the name of the innermost unit that it is in.

    By first names: of a module with several places, all are in one unit, or its parameters are tied and leak.
    """
    by_name: dict[str, str] = {}
    of_units = {}
    for name, module in table.modules.items():
        unit = by_name.get(name.rpartition(".")[0], "")
        if module in units:
            unit = name
        by_name[name] = unit
        of_units[id(module)] = unit
    return of_units


def _parameter_infos(
    slots: list[ParameterSlot],
    parameters: list[nn.Parameter],
    of_units: NamesById,
) -> dict[str, ParameterInfo]:
    infos = {}
    seen = set()
    for slot, parameter in zip(slots, parameters, strict=True):
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        # Of a DTensor this is what a rank holds of it.
        stored = getattr(parameter, LOCAL_TENSOR, parameter)
        order = slot.kind.order
        if slot.kind.is_plain:
            order = order or order_in_memory(stored)
        infos[slot.name] = ParameterInfo(
            name=slot.name,
            shape=tuple(slot.kind.user_shape(stored.shape)),
            dtype=slot.kind.user_dtype(stored.dtype),
            nbytes=stored.numel() * stored.element_size(),
            requires_grad=parameter.requires_grad,
            unit=of_units.get(id(slot.owner), ""),
            order=order,
        )
    return infos


def _units(
    kept: Reasons,
    names: NamesById,
    infos: Mapping[str, ParameterInfo],
    wide: set[str],
    precision: Precision,
) -> tuple[Unit, ...]:
    """Return the root and the units that were kept; parameters in ``wide`` keep their unit in float32."""
    mixed = not precision.is_full
    modules = {names[id(module)]: module for module in kept}
    own: dict[str, list[ParameterInfo]] = {"": []}
    for name in names.values():
        if name in modules:
            own[name] = []
    for info in infos.values():
        own[info.unit].append(info)
    units = []
    for name, parameters in own.items():
        module = modules.get(name)
        own_names = [info.name for info in parameters]
        fp32 = not wide.isdisjoint(own_names)
        if mixed and isinstance(module, BatchNorm):
            fp32 = True
        compute = None
        if mixed:
            compute = torch.float32 if fp32 else precision.param
        send = None
        if compute in (None, torch.float32) and precision.send != torch.float32:
            send = precision.send
        reduce_dtype = precision.reduce or send or compute
        unit = Unit(
            name=name,
            reason="the root: everything else" if module is None else kept[module],
            parameters=tuple(own_names),
            nbytes=sum([info.nbytes for info in parameters]),
            dtypes=tuple(sorted({info.dtype for info in parameters}, key=str)),
            fp32=fp32,
            compute=compute,
            reduce_dtype=None if reduce_dtype == torch.float32 else reduce_dtype,
            send=send,
        )
        units.append(unit)
    return tuple(units)


def explain_plan(plan: Plan, beside: Sequence[Sequence[str]] | None = None) -> str:
    """Return the plan as a table.

    Args:
        plan: what to show.
        beside: more columns: their heads, then their cells for each unit. The reasons go below the table then.
    """
    frozen = [info for info in plan.parameters.values() if not info.requires_grad]
    units = counted(len(plan.units), "unit")
    parameters = counted(len(plan.parameters), "parameter")
    above = [f"{units}, {parameters} ({len(frozen)} frozen), {size(plan.nbytes)}"]
    if not plan.precision.is_full:
        above.append(_explain_precision(plan))
    whys = [f"{unit.reason}; float32 unit" if unit.fp32 else unit.reason for unit in plan.units]
    rows = _unit_rows(plan, narrow=beside is not None)
    below = []
    if beside is not None:
        for row, cells in zip(rows, beside, strict=True):
            row += cells
        # There is no room for words then: numbers stand for them.
        numbers = {why: str(number) for number, why in enumerate(dict.fromkeys(whys), 1)}
        below += [f"why {number}: {why}" for why, number in numbers.items()]
        whys = [numbers[why] for why in whys]
    for row, why in zip(rows, ["why", *whys], strict=True):
        row.append(why)
    below += [f"tied, in one unit: {' = '.join(group)}" for group in plan.ties]
    below += _explain_recomputed(plan)
    below += [f"no unit: {name} ({why})" for name, why in plan.dropped.items()]
    if beside is not None:
        above = wrapped(above)
        below = wrapped(below)
    texts = ("unit", "dtypes", "computes in", "computes", "why")
    sides = "".join("<" if head in texts else ">" for head in rows[0])
    table = aligned(rows, sides)
    return "\n".join([*above, *table, *below])


def _unit_rows(plan: Plan, *, narrow: bool) -> list[list[str]]:
    """Return the table's head and rows, each unit's name indented below those that it is in."""
    head = ["unit", "bytes", "dtypes"]
    if not plan.precision.is_full:
        head.append("computes" if narrow else "computes in")
    if not narrow:
        head.insert(2, "share")
    rows = [head]
    names = {unit.name for unit in plan.units}
    total = plan.nbytes
    for unit in plan.units:
        depth = len(names.intersection(_above(unit.name)))
        name = unit.name or "(root)"
        row = ["  " * depth + name, size(unit.nbytes)]
        if not narrow:
            share = f"{100 * unit.nbytes / total:.1f}%" if total else "-"
            row.append(share)
        row.append("+".join(map(_short, unit.dtypes)) or "-")
        if not plan.precision.is_full:
            row.append(_short(unit.compute or torch.float32))
        rows.append(row)
    return rows


def _explain_precision(plan: Plan) -> str:
    precision = plan.precision
    buffers = "as they are" if precision.buffer is None else _short(precision.buffer)
    output = "as it comes" if precision.output is None else _short(precision.output)
    reduce_dtype = _short(precision.reduce_dtype or torch.float32)
    of_fp32_units = set()
    for unit in plan.units:
        if unit.fp32:
            of_fp32_units.add(_short(unit.reduce_dtype or torch.float32))
    if of_fp32_units - {reduce_dtype}:
        reduce_dtype += f" (float32 units: {', '.join(sorted(of_fp32_units))})"
    sent = ""
    if precision.send is not None:
        sent = f"float32 units compute with weights rounded to {_short(precision.send)}; "
    return (
        "mixed precision: weights and optimizer float32; inputs and outputs cast per unit; gradients are sent in "
        f"{reduce_dtype}; {sent}buffers {buffers}; output {output}"
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _explain_recomputed(plan: Plan) -> list[str]:
    """Return one line per reason: how many blocks, and which."""
    recomputed = "recomputed in backward"
    offloaded = "activations in host memory"
    groups = defaultdict(list)
    for name, reason in plan.recomputed.items():
        groups[recomputed, reason].append(name)
    for name, reason in plan.recomputed_before.items():
        what = offloaded if is_offloading(reason) else recomputed
        groups[what, f"by {reason}"].append(name)
    for name, reason in plan.offloaded.items():
        groups[offloaded, reason].append(name)
    lines = []
    for (what, reason), names in groups.items():
        blocks = counted(len(names), "block")
        places = [name or "(root)" for name in names]
        where = ", ".join(places)
        lines.append(f"{what}: {blocks} ({reason}): {where}")
    return lines
