"""What a rank has to save: its ranges of tensors, and trees of everything else.

Every backend says which range of each flattened parameter a rank holds (``Entry.here``); from that alone the
rest of the room works, so it never asks which engine there is.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsshard.backends.base import Backend
from fsshard.backends.optimizer_state import state_of
from fsshard.backends.whole import raw_state_dict
from fsshard.checkpoint.format.pieces import Range
from fsshard.checkpoint.format.tree import encode
from fsshard.complex_params.pairs import viewable
from fsshard.errors import CheckpointError, ConfigurationError, OptimizerError
from fsshard.planning.entries import Entry
from fsshard.sharded.buffers import buffers_of
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer, groups_by_name
from fsshard.sharded.state_dict import NEURALOP_ARGUMENTS

__all__ = [
    "Collected",
    "Part",
    "check_call",
    "check_model",
    "class_name",
    "collect",
    "counters",
    "first_of",
    "flat",
    "in_users_order",
    "is_scattered",
    "name_optimizers",
    "pairs_shape",
    "user_range",
]

PAIRED = (torch.float32, torch.float64)
"""Pairs of which torch sees as complex numbers."""


@dataclass(frozen=True)
class Part:
    """A tensor, and what of it this rank holds.

    Attributes:
        dtype: the user's: complex where the model is.
        shape: of the whole tensor, the user's.
        range: elements held here, of the flattened tensor.
        values: those elements, flat, over the memory where they are.
        scattered: the parameter as whose elements they are divided, if that is in another order than that of the
            indices, or over another mesh dimension than data: the range is one of what is divided over data, in the
            engine's order, until :func:`~fsshard.checkpoint.ranges.put_in_ranges`.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    range: Range
    values: Tensor
    scattered: str = ""


@dataclass
class Collected:
    """What one rank brings to a checkpoint.

    Attributes:
        parts: tensor's name -> this rank's part of it.
        model: the index's ``model`` and ``tied``.
        groups: optimizer -> (class, groups as a tree).
        state: optimizer -> parameter -> key -> tree, of state that is no tensor.
        objects: name -> tree.
        digests: name -> hash of the tree and of its tensors, to tell whether ranks have the same.
        own: name -> the tensors of that object.
    """

    parts: dict[str, Part] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, tuple[str, Any]] = field(default_factory=dict)
    state: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    own: dict[str, dict[str, Part]] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------------ views


def flat(entry: Entry, local: Tensor) -> Tensor:
    """A stored local part as a flat tensor of the user's dtype, over the same memory where that is contiguous."""
    values = local.detach().reshape(-1)
    return torch.view_as_complex(viewable(values.view(-1, 2))) if entry.kind.is_complex else values


def in_users_order(entry: Entry, whole: Tensor) -> Tensor:
    """A whole stored tensor as a flat one in the user's order, and of the user's dtype where there is one so wide."""
    if not entry.kind.order:
        return flat(entry, whole) if whole.dtype in PAIRED or not entry.kind.is_complex else whole.reshape(-1)
    if entry.kind.is_complex and whole.dtype not in PAIRED:
        return whole.permute(*entry.kind.way_back, -1).reshape(-1)
    return entry.kind.to_user(whole).reshape(-1)


def pairs_shape(entry: Entry) -> tuple[int, ...]:
    """The shape of a complex parameter's numbers as pairs in the user's order."""
    return (*entry.full_shape, 2) if entry.shape else tuple(entry.stored_shape)


def is_scattered(backend: Backend, entry: Entry) -> bool:
    """Whether what a rank holds is no range of the whole tensor's elements; the same on every rank."""
    return not entry.in_order or bool(entry.divided_over)


def user_range(entry: Entry, stored: Range) -> Range:
    """A range of stored elements in the user's: a complex number is two stored ones."""
    width = 2 if entry.kind.is_complex else 1
    if stored[0] % width or stored[1] % width:
        raise AssertionError(f"{entry.name}: a complex number is split between two ranks")
    return stored[0] // width, stored[1] // width


# ------------------------------------------------------------------------------------------------ arguments


def check_call(name: str, path: object, timeout: object, **flags: object) -> str:
    """The call as messages show it.

    Raises:
        ConfigurationError: ``path`` is no path, ``timeout`` no number of seconds, or a flag neither True nor False.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigurationError(
            f"{name}: expected a path first and the model second, got {type(path).__name__} as the path"
        )
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ConfigurationError(f"{name}: timeout={timeout!r}: expected seconds, more than 0")
    for flag, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigurationError(
                f"{name}: {flag}= is an option and takes True or False, got {type(value).__name__}; state of that name "
                "has to be renamed"
            )
    return f"{name}({os.fspath(path)!r})"


def check_model(model: object, call: str) -> ShardedModule:
    """The model itself.

    Raises:
        ConfigurationError: it is not wrapped.
    """
    if not isinstance(model, ShardedModule):
        raise ConfigurationError(
            f"{call}: expected what fsshard.wrap returned as the model, got {type(model).__name__}; a model on one "
            "process takes fsshard.wrap(model, backend='none')"
        )
    return model


def name_optimizers(model: ShardedModule, optimizer: object, call: str) -> dict[str, ShardedOptimizer]:
    """``{name: optimizer}`` of one optimizer ("optimizer"), a sequence of them ("0", "1", ...), or a mapping.

    Raises:
        ConfigurationError: something else, a plain torch optimizer, or one over another model.
    """
    if optimizer is None:
        return {}
    if isinstance(optimizer, Mapping):
        named = {str(name): value for name, value in optimizer.items()}
    elif isinstance(optimizer, Sequence):
        named = {str(index): value for index, value in enumerate(optimizer)}
    else:
        named = {"optimizer": optimizer}
    for name, value in named.items():
        if not name or "/" in name:
            raise ConfigurationError(f"{call}: an optimizer cannot be named {name!r}; use a word without '/'")
        if not isinstance(value, ShardedOptimizer):
            raise ConfigurationError(
                f"{call}: optimizer {name!r} is a {type(value).__name__}; build it with fsshard.build_optimizer, or "
                "hand a live one to fsshard.wrap"
            )
        if value.model is not model:
            raise ConfigurationError(f"{call}: optimizer {name!r} was built over another model")
    return named


# ------------------------------------------------------------------------------------------------ collecting


def collect(
    model: ShardedModule, optimizers: Mapping[str, ShardedOptimizer], objects: Mapping[str, Any], rank: int
) -> Collected:
    """This rank's share of the model, the optimizers and the user's objects. No communication.

    Raises:
        CheckpointError: an object holds something that a checkpoint without pickle cannot.
        ModelError: the model was built on the meta device, and some of it has no values yet.
        OptimizerError: an optimizer's state cannot be put together from parts.
    """
    model.check_filled()
    found = Collected()
    _add_model(found, model, rank)
    for name, optimizer in optimizers.items():
        groups = _with_tensors(found, groups_by_name(optimizer), f"groups/{name}")
        found.groups[name] = (class_name(optimizer.optimizer_class), groups)
        found.state[name] = {}
        states = [(entry, state_of(optimizer.inner, entry)) for entry in optimizer.entries]
        single = counters(
            (entry, {k: v.shape for k, v in state.items() if isinstance(v, Tensor)}) for entry, state in states
        )
        for entry, state in states:
            _add_state(found, name, model, entry, state, single)
    for name, value in objects.items():
        _add_object(found, name, value)
    return found


def class_name(kind: type) -> str:
    """Module and name of an optimizer's class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _add_model(found: Collected, model: ShardedModule, rank: int) -> None:
    backend = model.backend
    ordered = list(_ordered(model))
    listed = {backend.keys[key] for key, _ in ordered if key in backend.keys}  # a hook of the user's may leave some out
    for entry in backend.entries.values():
        if entry.name in listed:
            part = user_range(entry, entry.here)
            local = entry.local()
            values = in_users_order(entry, local) if entry.in_order else flat(entry, local)
            scattered = entry.name if is_scattered(backend, entry) else ""
            found.parts[f"model/{entry.name}"] = Part(entry.dtype, tuple(entry.full_shape), part, values, scattered)
    keys: dict[str, str | None] = {}
    extra: dict[str, Any] = {}
    dropped: dict[str, str] = {}
    for key, value in ordered:
        if key in backend.keys:
            keys[key] = f"model/{backend.keys[key]}"
        elif isinstance(value, Tensor):
            keys[key] = f"model/{key}"
            if rank == 0:  # buffers may differ between ranks; rank 0's count, as in a state dict
                buffer = buffers_of(model).for_user(key, value)
                part = (0, buffer.numel())
                found.parts[f"model/{key}"] = Part(buffer.dtype, tuple(buffer.shape), part, buffer.reshape(-1))
        else:
            keys[key] = None
            try:
                extra[key] = _with_tensors(found, value, f"model/{key}", hold=rank == 0)
            except CheckpointError as error:
                if key != NEURALOP_ARGUMENTS:
                    raise
                # neuralop's BaseModel puts its constructor's arguments into the state dict, functions among them;
                # the model that loads has its own.
                dropped[key] = str(error)
    tied = {slot.name: entry.name for entry in backend.entries.values() for slot in entry.slots[1:]}
    found.model = {"keys": keys, "extra": extra, "dropped": dropped, "tied": tied}


def _ordered(model: ShardedModule) -> Iterator[tuple[str, Any]]:
    """The state dict's keys in the model's order, with what is not a parameter as it is."""
    backend = model.backend
    raw = raw_state_dict(backend)
    order = [key for key in backend.key_order if key in raw] + [key for key in raw if key not in backend.key_order]
    return ((key, raw[key]) for key in order)


def counters(states: Iterable[tuple[Entry, Mapping[str, Sequence[int]]]]) -> set[str]:
    """Keys of state that is one number for a whole parameter: of a 0-dim parameter its shape does not tell.

    Args:
        states: parameters, and of each the shapes of its state's tensors.
    """
    shaped = [shapes for entry, shapes in states if entry.shape.numel() > 1]
    return {"step"} | {key for shapes in shaped for key, shape in shapes.items() if not len(shape)}


def first_of(states: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Merge ranks' ``{parameter: {key: value}}``: each value is that of the first rank that has it."""
    merged: dict[str, dict[str, Any]] = {}
    for state in reversed(states):
        for parameter, values in state.items():
            merged[parameter] = {**merged.get(parameter, {}), **values}
    return merged


def _add_state(
    found: Collected,
    name: str,
    model: ShardedModule,
    entry: Entry,
    state: Mapping[str, Any],
    single: Collection[str],
) -> None:
    backend = model.backend
    local = entry.local()
    if backend.facts.divides == "elements" and not local.numel():
        return  # what a rank without elements counts (Adagrad's step stays 0 there) means nothing
    small: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(key, str) or "/" in key:
            raise OptimizerError(f"state {key!r} of {entry.name!r}: a checkpoint names it by a text without '/'")
        place = f"optimizer/{name}/{entry.name}/{key}"
        if not isinstance(value, Tensor):
            small[key] = _with_tensors(found, value, place)
        elif value.shape == local.shape and key not in single:
            found.parts[place] = _per_element(entry, value, backend)
        elif not value.dim():
            found.parts[place] = Part(value.dtype, (), (0, 1), value.detach().reshape(1))
        elif backend.facts.divides == "elements" or entry.divided_over:
            raise OptimizerError(
                f"state {key!r} of {entry.name!r} has shape {tuple(value.shape)}, its local part has "
                f"{tuple(local.shape)}: it cannot be put together from the ranks' parts"
            )
        else:
            whole = value.detach().reshape(-1)
            found.parts[place] = Part(value.dtype, tuple(value.shape), (0, value.numel()), whole)
    found.state[name][entry.name] = small


def _per_element(entry: Entry, value: Tensor, backend: Backend) -> Part:
    part, in_order = entry.here, entry.in_order
    scattered = entry.name if is_scattered(backend, entry) else ""
    if entry.kind.is_complex and value.dtype not in PAIRED:  # no complex dtype of that width: saved as pairs
        values = in_users_order(entry, value.detach()) if in_order else value.detach().reshape(-1)
        return Part(value.dtype, pairs_shape(entry), part, values, scattered)
    values = in_users_order(entry, value.detach()) if in_order else flat(entry, value)
    dtype, shape = entry.kind.user_dtype(value.dtype), tuple(entry.full_shape)
    return Part(dtype, shape, user_range(entry, part), values, scattered)


def _add_object(found: Collected, name: str, value: Any) -> None:
    state = value.state_dict() if hasattr(value, "state_dict") else value
    own: dict[str, Part] = {}
    found.objects[name] = _encode(state, f"objects/{name}", own)
    found.own[name] = own
    digest = hashlib.sha256(json.dumps(found.objects[name]).encode())
    for part in own.values():
        digest.update(repr((part.dtype, part.shape)).encode())
        digest.update(part.values.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    found.digests[name] = digest.hexdigest()


def _with_tensors(found: Collected, value: Any, place: str, *, hold: bool = True) -> Any:
    """The tree of a value that is the same on all ranks; its tensors become parts, where ``hold``."""
    own: dict[str, Part] = {}
    tree = _encode(value, place, own)
    if hold:
        found.parts.update(own)
    return tree


def _encode(value: Any, place: str, own: dict[str, Part]) -> Any:
    def put(path: str, tensor: Tensor) -> str:
        name = f"{place}/{len(own)}"
        plain = _dense(tensor, path)
        own[name] = Part(plain.dtype, tuple(plain.shape), (0, plain.numel()), plain.reshape(-1))
        return name

    return encode(value, put, place)


def _dense(tensor: Tensor, path: str) -> Tensor:
    """The tensor itself if it has all its numbers here."""
    found = tensor.detach().resolve_conj().resolve_neg() if tensor.layout is torch.strided else tensor
    if type(found) is not Tensor or found.layout is not torch.strided or found.is_meta or found.is_quantized:
        what = type(found).__name__ if type(found) is not Tensor else f"{found.layout} on {found.device}"
        raise CheckpointError(
            f"{path}: a {what}, whose values are not on this rank; copy weights under full_parameters()"
        )
    return found
