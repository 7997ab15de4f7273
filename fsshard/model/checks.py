"""Checks of the model before any engine touches it: made on every rank, raised on every rank."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsshard.comm.agreement import agree as agree
from fsshard.comm.agreement import per_rank
from fsshard.complex_params.replaced import has_gradient_hooks
from fsshard.complex_params.slots import ModuleTable, ParameterSlot, public_name
from fsshard.errors import AlreadyWrapped, ModelError, RankMismatch, UnsupportedByBackend
from fsshard.model.memory_layout import memory_order, reach, shares_memory, storage_of
from fsshard.model.meta import is_meta
from fsshard.planning.plan import shaped_slots
from fsshard.planning.policies import Precision
from fsshard.planning.text import aligned


class CheckedBackend(Protocol):
    """The part of a backend's class that the checks use; of its facts ``divides`` and ``keeps_grad_dtype``."""

    name: str
    facts: Any


SHOWN = 10  # differences between two ranks
OURS = "ShardedModule"
"""The class of what ``wrap`` returns."""


def check_model(table: ModuleTable, wrappers: Collection[str]) -> list[ParameterSlot]:
    """Return the places of the model's parameters if it can be wrapped, else raise. Local.

    Args:
        table: the modules of what a user gave.
        wrappers: names of the engines' classes of modules.
    """
    if not isinstance(table.root, nn.Module):
        raise ModelError(f"expected a torch.nn.Module, got {type(table.root).__name__}")
    check_not_wrapped(table.modules, wrappers)
    slots = shaped_slots(table)
    parameters = [(slot.name, slot.parameter) for slot in slots]
    buffers = table.buffers()
    _check_dense(buffers, parameters)
    if is_meta(slots):
        return slots
    meta = [name for name, buffer in buffers.items() if buffer.is_meta]
    if meta:
        raise ModelError(
            f"buffers on the meta device, and real parameters: {', '.join(meta[:5])}; materialise them before wrap, or "
            "build the whole model under torch.device('meta')"
        )
    devices = {p.device: name for name, p in parameters}
    if len(devices) > 1:
        found = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ModelError(f"the model is on several devices ({found}); move it to one with model.to(device)")
    return slots


def check_not_wrapped(modules: Mapping[str, nn.Module], wrappers: Collection[str]) -> None:
    """Raise if the model, or a part of it with parameters, is under an engine or compiled by torch.jit. Local."""
    engines: dict[type, str | None] = {}  # class of modules -> the wrapper that it is one of
    managed = False
    for name, module in modules.items():
        if isinstance(module, nn.DataParallel):  # it copies its module in every forward, past any engine
            within = f"{name}.module" if name else "model.module"
            raise AlreadyWrapped(f"{_where(name)} is an nn.DataParallel; wrap the model without it, which is {within}")
        if isinstance(module, torch.jit.ScriptModule) and next(module.parameters(), None) is not None:
            raise ModelError(
                f"{_where(name)} is compiled by torch.jit (script, trace or load), and its code keeps its tensors, so "
                "no engine can replace them by shards; wrap the module that torch.jit was given (fsshard.wrap(..., "
                "compile=True) compiles it by torch.compile), and script a bare copy with model.state_dict() after "
                "training"
            )
        kind = type(module)
        if kind not in engines:
            names = (cls.__name__ for cls in kind.__mro__)
            engines[kind] = next((found for found in names if found in wrappers or found == OURS), None)
        if (under := engines[kind]) is not None:
            raise AlreadyWrapped(f"{_where(name)} is under {under} already; wrap the bare model once")
        managed |= module in _managed
    if managed:
        raise AlreadyWrapped("the model is managed by fsshard already; wrap it once, and use what wrap returned")


def _where(name: str) -> str:
    return f"module {public_name(name)!r}" if name else "the model"


def _check_dense(buffers: Mapping[str, Tensor], parameters: Sequence[tuple[str, Tensor]]) -> None:
    kinds = [("parameter", parameters), ("buffer", buffers.items())]
    for kind, name, tensor in ((kind, *item) for kind, items in kinds for item in items):
        if tensor.layout != torch.strided or tensor.is_quantized:
            what = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
            raise ModelError(
                f"{kind} {name!r} is {what}: ranks exchange dense tensors only; store its dense form, or its indices "
                "and values as two buffers"
            )
        if kind == "parameter" and (shares_memory(tensor) or tensor.is_neg()):
            raise ModelError(
                f"parameter {name!r} is expanded or lazily negated, so its elements share memory; assign "
                "nn.Parameter(value.resolve_neg().contiguous()) before wrap"
            )


def check_modules(
    modules: Mapping[str, nn.Module], precision: Precision, backend: CheckedBackend, world_size: int
) -> None:
    """Raise for embeddings, and for transformers' LayerDrop, which cannot be right under an engine. Local."""
    parted = backend.facts.divides == "elements"
    narrow = {precision.param, precision.reduce_dtype} - {None, torch.float32}
    for name, module in modules.items():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        kind = type(module).__name__
        if module.sparse and module.weight.requires_grad and (parted or narrow):
            raise UnsupportedByBackend(
                f"sparse gradients ({_where(name)}: {kind} with sparse=True)"
                + ("" if parted else f" in {str(narrow.pop()).removeprefix('torch.')}"),
                backend.name,
                "build it with sparse=False, or use backend='ddp' in float32, which reduces sparse gradients",
            )
        if module.max_norm is not None and (world_size > 1 or parted or precision.param not in (None, torch.float32)):
            weight, norm = public_name(f"{name}.weight".lstrip(".")), f"{module.norm_type}, 0, {module.max_norm}"
            raise ModelError(
                f"{weight!r} belongs to an nn.{kind} with max_norm, whose forward scales the rows "
                "that it looks up in place: each rank would scale those of its own batch, in weights that all must "
                "hold alike, or in a copy that is thrown away. Build the module without max_norm, and scale all rows "
                "after each optimizer.step(), on every rank: `with torch.no_grad(), "
                f"model.full_parameters(writeback=True) as weights: weights[{weight!r}].renorm_({norm})`"
            )
    if parted:
        _check_layer_drop(modules, backend)


def _check_layer_drop(modules: Mapping[str, nn.Module], backend: CheckedBackend) -> None:
    """Raise for transformers' LayerDrop."""
    # A rank that leaves out a layer does not take part in gathering it, so that the others would wait. Some models of
    # transformers 5.23 (``is_fsdp_managed_module``) therefore run all layers under FSDP, without a word; others hang.
    owners: dict[int, tuple[str, object]] = {}
    for name, module in modules.items():
        path = public_name(f"model.{name}".rstrip("."))
        owners.setdefault(id(module), (path, module))
        config = getattr(module, "config", None)
        owners.setdefault(id(config), (f"{path}.config", config))
    found = [
        f"{path}.{key}"
        for path, owner in owners.values()
        for key, value in getattr(owner, "__dict__", {}).items()
        if key.endswith("layerdrop") and isinstance(value, (int, float)) and value > 0
    ]
    if found:
        raise UnsupportedByBackend(
            f"LayerDrop ({', '.join(found)}), by which ranks leave out different layers",
            backend.name,
            f"switch it off before wrap: `{'; '.join(f'{each} = 0.0' for each in found)}`; or use backend='ddp' or "
            "'fairscale' with find_unused_parameters=True, under which each rank leaves out layers of its own",
        )


def check_parameters(buffers: Mapping[str, Tensor], slots: Sequence[ParameterSlot], backend: CheckedBackend) -> None:
    """Raise for shared memory, gradient hooks and dtypes of gradients that would silently be lost. Local."""
    held = ((slot.name, slot.parameter) for slot in reversed(slots))
    parameters = dict({id(parameter): (name, parameter) for name, parameter in held}.values())  # a tied one once
    tensors = {**buffers, **parameters}
    shared = None if slots[0].parameter.is_meta else overlapping(tensors)
    # A slice with gaps is moved under every engine; see own_memory.
    has_gaps = shared is not None and any(reach(tensors[name]) > tensors[name].numel() for name in shared)
    if shared is not None and (backend.facts.divides != "nothing" or has_gaps):
        one, other = sorted(shared)
        raise ModelError(
            f"{one!r} and {other!r} are two tensors that share memory; under backend {backend.name!r} each would get "
            "its own memory and they would train apart: assign one nn.Parameter to both places (tied weights), or a "
            "clone to one of them"
        )
    hooked = [name for name, parameter in parameters.items() if has_gradient_hooks(parameter)]
    if hooked and backend.facts.divides == "elements":
        raise UnsupportedByBackend(
            f"gradient hooks on parameters ({', '.join(sorted(hooked)[:3])}), which its engine would not call",
            backend.name,
            "hook the module's output, or use backend='ddp' or 'fairscale'",
        )
    for name, parameter in parameters.items():
        asked = parameter.grad_dtype  # DDP raises in backward ("Expected Float, got BFloat16"), FSDP2 forgets it (2.13)
        kept = asked in (None, parameter.dtype) or (backend.facts.keeps_grad_dtype and not parameter.is_complex())
        if parameter.requires_grad and not kept:
            told = f"grad_dtype={asked} of the {parameter.dtype} parameter {name!r}"
            raise UnsupportedByBackend(told, backend.name, "leave grad_dtype as it is")


def overlapping(tensors: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """Return two different tensors, a parameter among them, that have elements in common; or None."""
    held: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            held.setdefault(storage_of(tensor), []).append(name)
    for names in held.values():
        if len(names) == 1:
            continue
        starts = {name: int(tensors[name].storage_offset()) * tensors[name].itemsize for name in names}
        found = sorted((at, at + reach(tensors[n]) * tensors[n].itemsize, n) for n, at in starts.items())
        ends = itertools.accumulate((stop for _, stop, _ in found), max)
        if any(start < end for end, (start, _, _) in zip(ends, found[1:], strict=False)):
            shared = _in_common({name: tensors[name] for *_, name in found})
            if shared is not None:
                return shared
    return None


def _in_common(tensors: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """Return two of the tensors over one storage that have a byte in common; two columns of a table, say, have none."""
    taken = torch.zeros(next(iter(tensors.values())).untyped_storage().nbytes(), dtype=torch.bool)

    def bytes_of(name: str) -> Tensor:
        tensor, size = tensors[name], tensors[name].itemsize
        places = [1 if stride == 0 else n for n, stride in zip(tensor.shape, tensor.stride(), strict=True)]  # expanded
        strides = [stride * size for stride in tensor.stride()]
        return taken.as_strided((*places, size), (*strides, 1), int(tensor.storage_offset()) * size)

    # Parameters first: buffers may share memory with each other. One mask for all: a table may have 3,000 columns.
    names = sorted(tensors, key=lambda name: not isinstance(tensors[name], nn.Parameter))
    for index, name in enumerate(names):
        if bytes_of(name).any():
            count = int(bytes_of(name).sum())
            for other in names[:index]:
                bytes_of(other).fill_(False)
                if int(bytes_of(name).sum()) < count:
                    return other, name
        if isinstance(tensors[name], nn.Parameter):
            bytes_of(name).fill_(True)
    return None


_managed: WeakSet[nn.Module] = WeakSet()


def is_managed(module: nn.Module) -> bool:
    """Return whether it is a model that was wrapped, or a part of one."""
    return module in _managed


def mark_managed(modules: Iterable[nn.Module]) -> None:
    """Remember that these modules are under an engine."""
    for module in modules:
        _managed.add(module)


def unmark_managed(modules: Iterable[nn.Module]) -> None:
    """Forget it: no engine has these modules any more."""
    for module in modules:
        _managed.discard(module)


def check_same_model(
    buffers: Mapping[str, Tensor],
    slots: Sequence[ParameterSlot],
    settings: Mapping[str, Any],
    group: dist.ProcessGroup | None,
) -> None:
    """Raise on every rank unless all of ``group`` hold the same names, shapes and layouts, and ask for the same."""
    if group is None or group.size() == 1:
        return
    mine: list[tuple[Any, ...]] = []
    first: dict[int, str] = {}  # a tie on some ranks only would let the ranks send different numbers of tensors
    for slot in slots:
        parameter = slot.parameter
        tied, order = first.setdefault(id(parameter), slot.name), memory_order(parameter)
        kind = str(parameter.dtype) + ("" if tied == slot.name else f" tied to {tied!r}")
        kind += "" if order is None else f" with dimensions {order} in memory"  # FSDP1 and DDP divide by it
        mine.append((slot.name, tuple(parameter.shape), kind, parameter.requires_grad))
    mine += [(name, tuple(b.shape), str(b.dtype), False) for name, b in buffers.items()]
    asked = {f"{key}=": repr(value) for key, value in settings.items()}
    mine += asked.items()
    digests = per_rank(group, hashlib.sha256(repr(mine).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    tables = per_rank(group, mine)
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    here, there = ({name: _described(*values) for name, *values in tables[rank]} for rank in (0, other))
    names = [name for name in {**here, **there} if here.get(name) != there.get(name)]
    if not names:
        raise RankMismatch(f"ranks 0 and {other} hold different models: the same parameters in another order")
    held = [name for name in names if name not in asked]  # other models have other units, too
    what = "hold different models" if held else "were asked for different things"
    rows = [[name, here.get(name, "-"), there.get(name, "-")] for name in held or names]
    more = [f"and {len(rows) - SHOWN} more"] if len(rows) > SHOWN else []
    table = [*aligned([["", "rank 0", f"rank {other}"], *rows[:SHOWN]]), *more]
    raise RankMismatch("\n  ".join([f"ranks 0 and {other} {what}:", *table]))


def _described(*values: Any) -> str:
    """Return a parameter's shape, kind and whether it is trained, or a setting's value, as a cell of a table."""
    if len(values) == 1:
        return str(values[0])
    shape, kind, trained = values
    return f"{shape} {kind}{'' if trained else ', no gradient'}"
