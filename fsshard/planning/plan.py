"""plan(): decides what is sharded how, before any engine is involved.

A :class:`Plan` holds names and numbers only. It is made without a process group, without a collective and without
touching the model, and every backend executes it as it stands; that is why they agree.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from fsshard.complex_params.flattened import stored_in
from fsshard.complex_params.pairs import Kind, order_in_memory, real_dtype
from fsshard.complex_params.slots import ModuleTable, ParameterSlot
from fsshard.errors import ConfigurationError, ModelError
from fsshard.planning.arguments import PrecisionChoice, Recomputed, WrapPolicy
from fsshard.planning.policies import (
    Precision,
    is_container,
    never_called,
    resolve_blocks,
    resolve_checkpointing,
    resolve_precision,
    resolve_units,
)
from fsshard.planning.text import aligned, size, wrapped
from fsshard.planning.weight_readers import readers_of_weights
from fsshard.torch_private.modules import CHECKPOINTED, BatchNorm
from fsshard.torch_private.tensors import LOCAL_TENSOR


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
    """

    name: str
    reason: str
    parameters: tuple[str, ...]
    nbytes: int
    dtypes: tuple[torch.dtype, ...]
    fp32: bool
    compute: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None


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
        return tuple(sorted((u.name for u in self.units[1:]), key=lambda name: -name.count(".")))

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
        raise ModelError(f"{type(table.root).__name__} has no parameters; there is nothing to shard")
    lazy = [slot.name for slot in slots if nn.parameter.is_lazy(slot.parameter)]
    if lazy:
        raise ModelError(f"lazy parameters have no shape yet: {', '.join(lazy[:5])}; run one forward first")
    return slots


def plan_table(
    table: ModuleTable, slots: list[ParameterSlot], units: object, mixed_precision: object, recomputed: object
) -> Plan:
    """Plan as :func:`plan` does, for a caller that has walked the model already."""
    names = {id(module): name for name, module in table.modules.items()}
    complex_names = [slot.name for slot in slots if slot.is_complex]
    owners = _complex_owners(table, complex_names)
    precision = resolve_precision(mixed_precision)
    picked = resolve_units(table, units, owners)
    if not precision.is_full:
        for module, reason in _fp32_units(table, owners).items():
            picked.setdefault(module, reason)
    ties = _ties(slots)
    leaks = _leaking(table.places, ties)
    read = never_called(table.modules.values())  # units among them would be read while sharded
    handed = _handed_to_autograd(table, names) if units == "auto" else {}
    kept, dropped = _keep(picked, names, leaks, read, handed, mixed=not precision.is_full)
    if len({real_dtype(dtype) for dtype in {slot.parameter.dtype for slot in slots}}) > 1:
        kept = _split_dtypes(table.root, kept, leaks)
    blocks, before = _recomputed(table, recomputed, kept, read)
    made = _assemble(slots, complex_names, kept, names, ties, {names[id(m)] for m in owners}, precision)
    made = replace(made, dropped=dropped, recomputed_before=before)
    again = resolve_checkpointing(recomputed).recompute
    return replace(made, recomputed=blocks) if again else replace(made, offloaded=blocks)


def _recomputed(
    table: ModuleTable, activation_checkpointing: object, units: Mapping[nn.Module, str], read: Collection[nn.Module]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the blocks to recompute, and those that recompute already; by name, outermost only, with the reason."""
    policy = resolve_checkpointing(activation_checkpointing).policy
    if policy is True:
        picked = dict.fromkeys(units, "a unit of the plan")
    elif policy is None or policy is False:
        picked = {}
    else:
        picked = resolve_blocks(table, policy)
    reasons = {module: reason for module, reason in picked.items() if module not in read}
    for module in reasons:
        if is_container(module) or isinstance(module, torch.jit.ScriptModule):
            why = "is never called" if is_container(module) else "has a forward that cannot be replaced"
            raise ConfigurationError(
                f"activation_checkpointing={policy!r} picked a {type(module).__name__}, which {why}, so that nothing "
                "would be recomputed; pick the class of modules that are called"
            )
    recomputed, before = _outermost(table.places, reasons)
    if policy and not recomputed and not before:
        classes = ", ".join(sorted({type(m).__name__ for m in table.modules.values()}))
        hint = "this plan has the root as its only unit" if policy is True else "it matches no block below the root"
        raise ConfigurationError(
            f"activation_checkpointing={policy!r}: {hint}; name the classes of the blocks to recompute, for example "
            f"{{torch.nn.TransformerEncoderLayer}}. The model has {classes}"
        )
    return recomputed, before


def _outermost(
    places: Iterable[tuple[str, nn.Module]], picked: Mapping[nn.Module, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return both by public name, in the model's order; a module counts at its first place outside of other blocks."""
    recomputed: dict[str, str] = {}
    before: dict[str, str] = {}
    seen: set[nn.Module] = set()
    for name, module in places:  # one name for torch's wrapper and for what it wraps
        is_within = (recomputed or before) and any(p in recomputed or p in before for p in (name, *_above(name)))
        if is_within or module in seen:
            continue
        if known := recomputed_by(module):
            before[name] = known
        elif module in picked:
            recomputed[name] = picked[module]
        else:
            continue
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
    kinds = {cls.__name__ for cls in type(module).__mro__}  # transformers, told without importing it
    if "GradientCheckpointingLayer" in kinds and getattr(module, "gradient_checkpointing", False):
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
    found: dict[nn.Module, None] = {}
    for name in dict.fromkeys(name.rpartition(".")[0] for name in complex_names):
        while name and is_container(modules[name]):
            name = name.rpartition(".")[0]
        found.setdefault(modules[name])
    return list(found)


def _handed_to_autograd(table: ModuleTable, names: Mapping[int, str]) -> dict[nn.Module, str]:
    """Return the modules below one that reads their weights for autograd; nobody chose them as units by name."""
    handed: dict[nn.Module, str] = {}
    for reader in readers_of_weights(table.modules.values()):
        place = repr(names[id(reader)]) if reader is not table.root else "the root"
        reason = f"{place}, a {type(reader).__name__}, hands its weights to a custom Function or to autograd.grad"
        for module in reader.modules():
            if module is not reader:
                handed.setdefault(module, reason)
    return handed


def _fp32_units(table: ModuleTable, owners: list[nn.Module]) -> dict[nn.Module, str]:
    """Return what stays in float32, without the root. BatchNorms: FSDP1's rule (``_module_classes_to_ignore``)."""
    found = dict.fromkeys(owners, "owns complex weights")
    norms = [m for m in table.modules.values() if isinstance(m, BatchNorm)]
    found |= dict.fromkeys(norms, "is a BatchNorm, which computes in float32")
    found.pop(table.root, None)
    return found


def _ties(slots: list[ParameterSlot]) -> tuple[tuple[str, ...], ...]:
    groups: dict[int, list[str]] = {}
    for slot in slots:
        groups.setdefault(id(slot.parameter), []).append(slot.name)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def _leaking(places: Iterable[tuple[str, nn.Module]], ties: Sequence[tuple[str, ...]]) -> set[int]:
    """Return the ids of the modules that hold a parameter that is also reached from outside of them.

    By names, not by owners: a whole module can sit in two places (an embedding that encoder and decoder share).
    """
    if not ties:
        return set()
    held: dict[str, list[int]] = {}
    for name, module in places:
        held.setdefault(name, []).append(id(module))
    leaking: set[int] = set()
    for tie in ties:
        inside = Counter(key for name in tie for key in {key for above in _above(name) for key in held.get(above, ())})
        leaking |= {key for key, count in inside.items() if count < len(tie)}
    return leaking


def _above(name: str) -> list[str]:
    """Return the names of all modules around what has ``name``, the root's included."""
    return [*(name.rsplit(".", steps)[0] for steps in range(1, name.count(".") + 1)), ""]


def _keep(
    picked: Mapping[nn.Module, str],
    names: Mapping[int, str],
    leaks: Collection[int],
    read: Collection[nn.Module],
    handed: Mapping[nn.Module, str],
    *,
    mixed: bool,
) -> tuple[dict[nn.Module, str], dict[str, str]]:
    """Return which picked modules can be units, and why the others cannot."""
    kept: dict[nn.Module, str] = {}
    dropped: dict[str, str] = {}
    for module, reason in picked.items():
        name = names[id(module)]
        if is_container(module):
            raise ConfigurationError(
                f"auto_wrap_policy picked {name!r}, a {type(module).__name__}: it is never called, so nothing "
                "would gather its parameters; pick the class of the modules that are called"
            )
        # Where dtypes are mixed, a BatchNorm without parameters is a unit too: its inputs and outputs are cast.
        held = (p for m in module.modules() for p in stored_in(m).values() if p is not None)
        if next(held, None) is None and not (mixed and isinstance(module, BatchNorm)):
            dropped[name] = "has no parameters"
        elif module in read:
            dropped[name] = "is never called: its nn.MultiheadAttention reads the weights itself"
        elif module in handed:
            dropped[name] = handed[module]
        elif id(module) in leaks:
            dropped[name] = "holds a parameter tied to another module; it stays in the root"
        else:
            kept[module] = reason
    return kept, dropped


def _region(unit: nn.Module, units: Mapping[nn.Module, str]) -> list[nn.Module]:
    """Return ``unit`` and the modules below it that belong to no unit further down."""
    found = [unit]
    for child in unit.children():
        if child not in units:
            found += _region(child, units)
    return found


def _own_dtypes(modules: list[nn.Module]) -> dict[torch.dtype, int]:
    sizes: dict[torch.dtype, int] = {}
    # dict, not set: ranks must meet equal sizes in the same order
    for parameter in dict.fromkeys(p for m in modules for p in stored_in(m).values() if p is not None):
        dtype = real_dtype(parameter.dtype)
        sizes[dtype] = sizes.get(dtype, 0) + parameter.numel() * parameter.element_size()
    return sizes


def _split_dtypes(root: nn.Module, kept: dict[nn.Module, str], leaks: Collection[int]) -> dict[nn.Module, str]:
    units = dict(kept)
    for unit in [root, *kept]:
        region = _region(unit, kept)
        sizes = _own_dtypes(region)
        if len(sizes) < 2:
            continue
        main = max(sizes, key=lambda dtype: sizes[dtype])
        taken: set[nn.Module] = set()
        for module in region[1:]:
            inside = _region(module, kept)
            below = _own_dtypes(inside)
            if module in taken or len(below) != 1 or main in below or is_container(module) or id(module) in leaks:
                continue
            taken.update(inside)
            units[module] = f"holds {str(next(iter(below))).removeprefix('torch.')} in a unit of another dtype"
    return units


def _assemble(
    slots: list[ParameterSlot],
    complex_names: Iterable[str],
    kept: Mapping[nn.Module, str],
    names: Mapping[int, str],
    ties: tuple[tuple[str, ...], ...],
    fp32_units: set[str],
    precision: Precision,
) -> Plan:
    reasons = {names[id(module)]: reason for module, reason in kept.items()}
    below = {
        id(m): names[id(unit)] for unit in sorted(kept, key=lambda m: names[id(m)].count(".")) for m in unit.modules()
    }
    infos: dict[str, ParameterInfo] = {}
    mixed = not precision.is_full
    numbers = {*complex_names, *(slot.name for slot in slots if mixed and isinstance(slot.owner, BatchNorm))}
    seen: set[int] = set()
    for slot in slots:
        parameter = slot.parameter
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        stored: Tensor = getattr(parameter, LOCAL_TENSOR, parameter)  # of a DTensor what a rank holds of it
        infos[slot.name] = ParameterInfo(
            name=slot.name,
            shape=tuple(slot.kind.user_shape(stored.shape)),
            dtype=slot.kind.user_dtype(stored.dtype),
            nbytes=stored.numel() * stored.element_size(),
            requires_grad=parameter.requires_grad,
            unit=below.get(id(slot.owner), ""),
            order=slot.kind.order or (order_in_memory(stored) if slot.kind == Kind.PLAIN else ()),
        )
    own: dict[str, list[ParameterInfo]] = {}
    for info in infos.values():
        own.setdefault(info.unit, []).append(info)
    bare = {names[id(m)] for m in kept if isinstance(m, BatchNorm) and mixed}
    units = []
    for name in ["", *(name for name in names.values() if name in reasons)]:
        held = own.get(name, [])
        fp32 = name in bare or any(info.name in numbers for info in held)
        compute = None if precision.is_full else torch.float32 if fp32 else precision.param
        reduce_dtype = precision.reduce if precision.reduce is not None else compute
        unit = Unit(
            name=name,
            reason=reasons.get(name, "the root: everything else"),
            parameters=tuple(info.name for info in held),
            nbytes=sum(info.nbytes for info in held),
            dtypes=tuple(sorted({info.dtype for info in held}, key=str)),
            fp32=fp32,
            compute=compute,
            reduce_dtype=None if reduce_dtype == torch.float32 else reduce_dtype,
        )
        units.append(unit)
    return Plan(
        units=tuple(units),
        parameters=infos,
        ties=ties,
        fp32_units=tuple(name for name in names.values() if name in fp32_units),
        precision=precision,
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def explain_plan(plan: Plan, beside: Sequence[Sequence[str]] | None = None) -> str:
    """Return the plan as a table.

    Args:
        plan: what to show.
        beside: more columns: their heads, then their cells for each unit. The reasons go below the table then.
    """
    frozen = sum(1 for info in plan.parameters.values() if not info.requires_grad)
    counts = f"{_count(len(plan.units), 'unit')}, {_count(len(plan.parameters), 'parameter')} ({frozen} frozen)"
    precision = [_explain_precision(plan)] if not plan.precision.is_full else []
    whys = [unit.reason + ("; float32 unit" if unit.fp32 else "") for unit in plan.units]
    notes: list[str] = []
    if beside is None:
        columns = [[why] for why in ("why", *whys)]
    else:  # there is no room for words then: numbers stand for them
        reasons = list(dict.fromkeys(whys))
        numbered = [str(reasons.index(why) + 1) for why in whys]
        columns = [[*cells, why] for cells, why in zip(beside, ["why", *numbered], strict=True)]
        notes = [f"why {number}: {reason}" for number, reason in enumerate(reasons, 1)]
    rows = [[*row, *more] for row, more in zip(_unit_rows(plan, narrow=beside is not None), columns, strict=True)]
    texts = ("dtypes", "computes in", "computes", "why")
    sides = "<" + "".join("<" if head in texts else ">" for head in rows[0][1:])
    ties = [f"tied, in one unit: {' = '.join(group)}" for group in plan.ties]
    gone = [f"no unit: {name} ({why})" for name, why in plan.dropped.items()]
    before, after = [f"{counts}, {size(plan.nbytes)}", *precision], [*notes, *ties, *_explain_recomputed(plan), *gone]
    if beside is not None:
        before, after = wrapped(before), wrapped(after)
    return "\n".join([*before, *aligned(rows, sides), *after])


def _unit_rows(plan: Plan, *, narrow: bool) -> list[list[str]]:
    """Return the table's head and rows, each unit's name indented below those that it is in."""
    mixed = not plan.precision.is_full
    cast = ["computes" if narrow else "computes in"] if mixed else []
    rows = [["unit", "bytes", *([] if narrow else ["share"]), "dtypes", *cast]]
    names, total = {unit.name for unit in plan.units}, plan.nbytes
    for unit in plan.units:
        dtypes = "+".join(_short(d) for d in unit.dtypes) or "-"
        share = [] if narrow else [f"{100 * unit.nbytes / total:.1f}%" if total else "-"]
        computes = [_short(unit.compute or torch.float32)] if mixed else []
        depth = sum(above in names for above in _above(unit.name)) if unit.name else 0
        rows.append(["  " * depth + (unit.name or "(root)"), size(unit.nbytes), *share, dtypes, *computes])
    return rows


def _explain_precision(plan: Plan) -> str:
    precision = plan.precision
    buffers = "as they are" if precision.buffer is None else _short(precision.buffer)
    output = "as it comes" if precision.output is None else _short(precision.output)
    reduce_dtype = _short(precision.reduce_dtype or torch.float32)
    of_fp32_units = {_short(unit.reduce_dtype or torch.float32) for unit in plan.units if unit.fp32}
    if of_fp32_units - {reduce_dtype}:
        reduce_dtype += f" (float32 units: {', '.join(sorted(of_fp32_units))})"
    return (
        "mixed precision: weights and optimizer float32; inputs and outputs cast per unit; gradients are sent in "
        f"{reduce_dtype}; buffers {buffers}; output {output}"
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _explain_recomputed(plan: Plan) -> list[str]:
    """Return one line per reason: how many blocks, and which."""
    lines = []
    recomputed, offloaded = "recomputed in backward", "activations in host memory"
    kinds = ((recomputed, plan.recomputed, ""), (recomputed, plan.recomputed_before, "by "))
    for done, blocks, what in (*kinds, (offloaded, plan.offloaded, "")):
        for reason in dict.fromkeys(blocks.values()):
            done = offloaded if is_offloading(reason) else done
            names = [name or "(root)" for name, why in blocks.items() if why == reason]
            lines.append(f"{done}: {_count(len(names), 'block')} ({what}{reason}): {', '.join(names)}")
    return lines
