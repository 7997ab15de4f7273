"""Checks of the model before any engine touches it: made on every rank, raised on every rank."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Any, NoReturn, Protocol
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
from fsshard.state_objects import is_composite

Modules = Mapping[str, nn.Module]
Tensors = Mapping[str, Tensor]


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
        raise ModelError(
            f"model: expected an nn.Module, got {type(table.root).__name__}; pass the model, not its class or a list"
        )
    check_not_wrapped(table.modules, wrappers)
    slots = shaped_slots(table)
    buffers = table.buffers()
    devices = {}
    for slot in slots:
        parameter = slot.parameter
        _check_dense(slot.name, parameter)
        devices[parameter.device] = slot.name
    for name, buffer in buffers.items():
        _check_strided("buffer", name, buffer)
    if torch.device("meta") in devices and is_meta(slots):
        return slots
    meta = [name for name, buffer in buffers.items() if buffer.is_meta]
    if meta:
        raise ModelError(
            f"buffers on the meta device, and real parameters: {', '.join(meta[:5])}; materialise them before wrap, or "
            "build the whole model under torch.device('meta')"
        )
    if len(devices) > 1:
        places = [f"{name} on {device}" for device, name in devices.items()]
        raise ModelError(f"model: expected one device, got {', '.join(places)}; move it to one with model.to(device)")
    return slots


def check_not_wrapped(modules: Modules, wrappers: Collection[str]) -> None:
    """Raise if the model, or a part of it with parameters, is under an engine or compiled by torch.jit. Local."""
    names_of_wrappers = {*wrappers, OURS}
    engines = {}  # class of modules -> the wrapper that it is one of
    managed = False
    for name, module in modules.items():
        # It copies its module in every forward, past any engine.
        if isinstance(module, nn.DataParallel):
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
            names = [cls.__name__ for cls in kind.__mro__]
            engines[kind] = next(filter(names_of_wrappers.__contains__, names), None)
        engine = engines[kind]
        if engine is not None:
            raise AlreadyWrapped(f"{_where(name)} is under {engine} already; wrap the bare model once")
        managed |= module in _managed
    if managed:
        raise AlreadyWrapped("the model is managed by fsshard already; wrap it once, and use what wrap returned")


def _where(name: str) -> str:
    if name:
        return f"module {public_name(name)!r}"
    return "the model"


def _check_dense(name: str, parameter: nn.Parameter) -> None:
    if is_composite(parameter):
        raise ModelError(
            f"parameter {name!r} is a {type(parameter).__name__}, made of other tensors, which no engine "
            "divides; freeze quantised weights, and keep them out: fsshard.wrap(model, ignored_states=[...])"
        )
    _check_strided("parameter", name, parameter)
    if shares_memory(parameter) or parameter.is_neg():
        raise ModelError(
            f"parameter {name!r} is expanded or lazily negated, so its elements share memory; assign "
            "nn.Parameter(value.resolve_neg().contiguous()) before wrap"
        )


def _check_strided(kind: str, name: str, tensor: Tensor) -> None:
    if tensor.layout == torch.strided and not tensor.is_quantized:
        return
    what = "quantized"
    if not tensor.is_quantized:
        what = str(tensor.layout).removeprefix("torch.")
    raise ModelError(
        f"{kind} {name!r} is {what}: ranks exchange dense tensors only; store its dense form, or its indices "
        "and values as two buffers"
    )


def check_modules(
    modules: Modules,
    precision: Precision,
    backend: CheckedBackend,
    world_size: int,
) -> None:
    """Raise for embeddings, and for transformers' LayerDrop, which cannot be right under an engine. Local."""
    divides_elements = backend.facts.divides == "elements"
    narrow = {precision.param, precision.reduce_dtype} - {None, torch.float32}
    # Ranks would scale rows in weights that all must hold alike, or in a copy.
    refuses_max_norm = world_size > 1 or divides_elements or precision.param not in (None, torch.float32)
    for name, module in modules.items():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        kind = type(module).__name__
        if module.sparse and module.weight.requires_grad and (divides_elements or narrow):
            setting = f"sparse gradients ({_where(name)}: {kind} with sparse=True)"
            if not divides_elements:
                setting += f" in {str(narrow.pop()).removeprefix('torch.')}"
            raise UnsupportedByBackend(
                setting,
                backend.name,
                "build it with sparse=False, or use backend='ddp' in float32, which reduces sparse gradients",
            )
        if module.max_norm is not None and refuses_max_norm:
            weight = public_name(f"{name}.weight".lstrip("."))
            norm = f"{module.norm_type}, 0, {module.max_norm}"
            raise ModelError(
                f"{weight!r} belongs to an nn.{kind} with max_norm, whose forward scales the rows "
                "that it looks up in place: each rank would scale those of its own batch, in weights that all must "
                "hold alike, or in a copy that is thrown away. Build the module without max_norm, and scale all rows "
                "after each optimizer.step(), on every rank: `with torch.no_grad(), "
                f"model.full_parameters(writeback=True) as weights: weights[{weight!r}].renorm_({norm})`"
            )
    if divides_elements:
        _check_layer_drop(modules, backend)


def _check_layer_drop(modules: Modules, backend: CheckedBackend) -> None:
    """Raise for transformers' LayerDrop."""
    # A rank that leaves out a layer does not take part in gathering it, so that the others would wait. Some models of
    # transformers 5.23 (``is_fsdp_managed_module``) therefore run all layers under FSDP, without a word; others hang.
    owners: dict[int, tuple[str, object]] = {}
    for name, module in modules.items():
        path = public_name(f"model.{name}".rstrip("."))
        owners.setdefault(id(module), (path, module))
        config = getattr(module, "config", None)
        owners.setdefault(id(config), (f"{path}.config", config))
    drops = []
    for path, owner in owners.values():
        for key, value in getattr(owner, "__dict__", {}).items():
            if key.endswith("layerdrop") and isinstance(value, (int, float)) and value > 0:
                drops.append(f"{path}.{key}")
    if drops:
        lines = "; ".join(f"{drop} = 0.0" for drop in drops)
        raise UnsupportedByBackend(
            f"LayerDrop ({', '.join(drops)}), by which ranks leave out different layers",
            backend.name,
            f"switch it off before wrap: `{lines}`; or use backend='ddp' or "
            "'fairscale' with find_unused_parameters=True, under which each rank leaves out layers of its own",
        )


def check_parameters(
    buffers: Tensors,
    slots: Sequence[ParameterSlot],
    backend: CheckedBackend,
) -> None:
    """Raise for shared memory, gradient hooks and dtypes of gradients that would silently be lost. Local."""
    # A tied one once, by its first name.
    first_names: dict[int, str] = {}
    parameters = {}
    for slot in slots:
        parameter = slot.parameter
        if first_names.setdefault(id(parameter), slot.name) == slot.name:
            parameters[slot.name] = parameter
    if not slots[0].parameter.is_meta:
        _check_memory({**buffers, **parameters}, backend)
    hooked = [name for name, parameter in parameters.items() if has_gradient_hooks(parameter)]
    if hooked and backend.facts.divides == "elements":
        raise UnsupportedByBackend(
            f"gradient hooks on parameters ({', '.join(sorted(hooked)[:3])}), which its engine would not call",
            backend.name,
            "hook the module's output, or use backend='ddp' or 'fairscale'",
        )
    for name, parameter in parameters.items():
        # DDP raises in backward ("Expected Float, got BFloat16"), FSDP2 forgets it (2.13).
        dtype = parameter.grad_dtype
        if not parameter.requires_grad or dtype in (None, parameter.dtype):
            continue
        if parameter.is_complex() or not backend.facts.keeps_grad_dtype:
            setting = f"grad_dtype={dtype} of the {parameter.dtype} parameter {name!r}"
            raise UnsupportedByBackend(setting, backend.name, "leave grad_dtype as it is")


def _check_memory(tensors: Tensors, backend: CheckedBackend) -> None:
    """Raise for two tensors that share memory and would train apart."""
    shared = overlapping(tensors)
    if shared is None:
        return
    # A slice with gaps is moved under every engine; see own_memory.
    has_gaps = any(reach(tensors[name]) > tensors[name].numel() for name in shared)
    if backend.facts.divides != "nothing" or has_gaps:
        one, other = sorted(shared)
        raise ModelError(
            f"{one!r} and {other!r} are two tensors that share memory; under backend {backend.name!r} each would get "
            "its own memory and they would train apart: assign one nn.Parameter to both places (tied weights), or a "
            "clone to one of them"
        )


def overlapping(tensors: Tensors) -> tuple[str, str] | None:
    """Return two different tensors, a parameter among them, that have elements in common; or None."""
    by_storage = defaultdict(list)
    for name, tensor in tensors.items():
        if tensor.numel():
            by_storage[storage_of(tensor)].append(name)
    for names in by_storage.values():
        if len(names) == 1:
            continue
        spans = []
        for name in names:
            tensor = tensors[name]
            start = int(tensor.storage_offset()) * tensor.itemsize
            spans.append((start, start + reach(tensor) * tensor.itemsize, name))
        spans.sort()
        end = 0
        overlaps = False
        for start, stop, _ in spans:
            overlaps = overlaps or start < end
            end = max(end, stop)
        if overlaps:
            shared = _in_common({name: tensors[name] for *_, name in spans})
            if shared is not None:
                return shared
    return None


def _in_common(tensors: Tensors) -> tuple[str, str] | None:
    """Return two of the tensors over one storage that have a byte in common; two columns of a table, say, have none."""
    storage = next(iter(tensors.values())).untyped_storage()
    mask = torch.zeros(storage.nbytes(), dtype=torch.bool)

    def bytes_of(name: str) -> Tensor:
        tensor = tensors[name]
        size = tensor.itemsize
        shape = []
        strides = []
        for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
            # All elements of an expanded dimension are one.
            shape.append(length if stride else 1)
            strides.append(stride * size)
        return mask.as_strided((*shape, size), (*strides, 1), int(tensor.storage_offset()) * size)

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
    buffers: Tensors,
    slots: Sequence[ParameterSlot],
    settings: Mapping[str, Any],
    group: dist.ProcessGroup | None,
) -> None:
    """Raise on every rank unless all of ``group`` hold the same names, shapes and layouts, and ask for the same."""
    if group is None or group.size() == 1:
        return
    facts: list[tuple[Any, ...]] = []
    first_names: dict[int, str] = {}
    for slot in slots:
        parameter = slot.parameter
        kind = str(parameter.dtype)
        # A tie on some ranks only would let the ranks send different numbers of tensors.
        first_name = first_names.setdefault(id(parameter), slot.name)
        if first_name != slot.name:
            kind += f" tied to {first_name!r}"
        # FSDP1 and DDP divide by it.
        order = memory_order(parameter)
        if order is not None:
            kind += f" with dimensions {order} in memory"
        facts.append((slot.name, tuple(parameter.shape), kind, parameter.requires_grad))
    for name, buffer in buffers.items():
        facts.append((name, tuple(buffer.shape), str(buffer.dtype), False))
    asked = {f"{key}=": repr(value) for key, value in settings.items()}
    facts += asked.items()
    digests = per_rank(group, hashlib.sha256(repr(facts).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    tables = per_rank(group, facts)
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    _raise_difference(other, _cells(tables[0]), _cells(tables[other]), asked)


def _raise_difference(
    other: int,
    here: Mapping[str, str],
    there: Mapping[str, str],
    asked: Container[str],
) -> NoReturn:
    """Raise with a table of what rank 0 and another one hold, or were asked for."""
    names = [name for name in {**here, **there} if here.get(name) != there.get(name)]
    if not names:
        raise RankMismatch(f"ranks 0 and {other} hold different models: the same parameters in another order")
    what = "were asked for different things"
    # Other models have other units, too: these are not shown then.
    of_model = [name for name in names if name not in asked]
    if of_model:
        names = of_model
        what = "hold different models"
    rows = [["", "rank 0", f"rank {other}"]]
    for name in names[:SHOWN]:
        rows.append([name, here.get(name, "-"), there.get(name, "-")])
    lines = [f"ranks 0 and {other} {what}:", *aligned(rows)]
    if len(names) > SHOWN:
        lines.append(f"and {len(names) - SHOWN} more")
    raise RankMismatch("\n  ".join(lines))


def _cells(facts: Iterable[Sequence[Any]]) -> dict[str, str]:
    return {name: _described(*values) for name, *values in facts}


def _described(*values: Any) -> str:
    """Return a parameter's shape, kind and whether it is trained, or a setting's value, as a cell of a table."""
    if len(values) == 1:
        return str(values[0])
    shape, kind, trained = values
    note = "" if trained else ", no gradient"
    return f"{shape} {kind}{note}"
