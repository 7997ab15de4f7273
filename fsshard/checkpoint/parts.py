"""Collects what each rank holds of a model, its optimizers and other objects, and arranges who writes what.

At the end: checks of the arguments that save, load and export have in common.

A checkpoint stores nothing but ranges of flattened tensors, in the user's order and dtype, whatever the engine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from fsshard.backends.base import Backend
from fsshard.backends.whole import gather, raw_state_dict, state_divides, state_entry, state_of
from fsshard.checkpoint.format.index import (
    Index,
    ModelInfo,
    OptimizerInfo,
    Origin,
    Piece,
    Range,
    TensorInfo,
    piece_key,
    rank_file,
)
from fsshard.checkpoint.format.tensors_file import BY_NAME, dtype_name
from fsshard.checkpoint.format.tree import encode
from fsshard.checkpoint.format.version import __version__
from fsshard.checkpoint.models import Models, prefix, quoted
from fsshard.comm.agreement import Channel, agree
from fsshard.complex_params.pairs import laid, order_in_memory
from fsshard.errors import CheckpointError, ConfigurationError, OptimizerError
from fsshard.planning.entries import Entry
from fsshard.sharded.averages import EMA
from fsshard.sharded.controller import controller_of
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer, groups_by_name
from fsshard.sharded.state_dict import NEURALOP_ARGUMENTS

TIMEOUT = 300.0  # seconds to wait for ranks, where the caller does not say


@dataclass(frozen=True)
class Part:
    """A tensor, and what of it this rank holds."""

    dtype: torch.dtype  # the user's: complex where the model is
    shape: tuple[int, ...]  # of the whole tensor, the user's
    range: Range  # elements held here, of the flattened tensor
    values: Tensor  # those elements, flat, over the memory where they are
    # The parameter as whose elements they are divided, if that is in another order than that of the indices, or over
    # another mesh dimension than data: the range is one of those over data, in the engine's order, till _put_in_ranges.
    scattered: str = ""

    @classmethod
    def of_all(cls, tensor: Tensor) -> Part:
        """Return all elements of a tensor that this rank has as a whole."""
        return cls(tensor.dtype, tuple(tensor.shape), (0, tensor.numel()), tensor.reshape(-1))


def as_table(parts: Mapping[str, Part]) -> dict[str, list[Any]]:
    """Return the dtype, shape and range of each part by its name, as JSON has it."""
    return {name: [dtype_name(part.dtype), list(part.shape), *part.range] for name, part in parts.items()}


@dataclass
class Collected:
    """The parts that one rank brings to a checkpoint."""

    parts: dict[str, Part] = field(default_factory=dict)  # by the tensor's name
    model: ModelInfo = field(default_factory=lambda: ModelInfo({}, {}, {}))  # as in the index; so are the next two
    tied: dict[str, str] = field(default_factory=dict)
    models: dict[str, list[str]] = field(default_factory=dict)
    groups: dict[str, tuple[str, Any]] = field(default_factory=dict)  # optimizer -> (class, groups as a tree)
    # optimizer -> parameter -> key -> tree, of state that is no tensor
    state: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)  # name -> tree
    digests: dict[str, str] = field(default_factory=dict)  # of an object's tree and tensors: do ranks have the same?
    own: dict[str, dict[str, Part]] = field(default_factory=dict)  # object -> its tensors
    rng: Any = None  # tree of the generators' states, if they are saved

    def adopt_own(self, rank: int, alike: Collection[str]) -> None:
        """Add the tensors of objects to the others: once where ranks have the same, else under a name for each rank."""
        for name, own in self.own.items():
            for tensor, part in own.items():
                if name not in alike:
                    self.parts[f"{tensor}@rank{rank}"] = part
                elif rank == 0:
                    self.parts[tensor] = part

    def trees(self, alike: Collection[str]) -> dict[str, Any]:
        """Return what rank 0 puts into the index for this rank besides tensors."""
        return {
            "objects": {name: tree for name, tree in self.objects.items() if name not in alike},
            "state": {name: {p: s for p, s in state.items() if s} for name, state in self.state.items()},
            "rng": self.rng,
        }


def _part(entry: Entry, stored: Tensor, model: str) -> Part:
    """Return this rank's part of a parameter, or of state that has a number for each of its stored elements."""
    values = entry.flat(stored.detach(), whole=entry.in_order)
    scattered = "" if entry.in_order and not entry.divided_over else f"{prefix(model)}{entry.name}"
    if entry.kept_as_pairs(stored.dtype):
        return Part(stored.dtype, entry.pairs_shape, entry.here, values, scattered)
    return Part(entry.kind.user_dtype(stored.dtype), tuple(entry.full_shape), entry.user_range, values, scattered)


@torch.no_grad()
def _put_in_ranges(collected: Collected, models: Models, channel: Channel) -> None:
    """Turn what is scattered into ranges of the flattened tensor, the only form that is stored. Collective."""
    entries = {f"{prefix(m)}{e.name}": (e, model.backend) for m, model in models.items() for e in model.backend.all}
    if not any(not entry.in_order or entry.divided_over for entry, _ in entries.values()):  # the same on every rank
        return
    mine = {name: part for name, part in collected.parts.items() if part.scattered}
    told = {name: [p.scattered, dtype_name(p.dtype), list(p.shape)] for name, p in mine.items()}
    # A rank that holds no element of a parameter has no state for it, and takes part all the same.
    known: dict[str, Any] = {name: item for table in channel.gather(told) for name, item in table.items()}
    for name, (parameter, dtype, shape) in sorted(known.items()):
        entry, backend = entries[parameter]
        if name not in mine and backend.facts.divides != "elements":
            continue  # nor have the ranks that hold other parts of it: the same rank of data owns all
        empty = Part(BY_NAME[dtype], tuple(shape), (0, 0), torch.empty(0, dtype=BY_NAME[dtype]))
        part = _in_range(entry, mine.get(name, empty), backend)
        if name in mine or part.values.numel():
            collected.parts[name] = part


def _in_range(entry: Entry, part: Part, backend: Backend) -> Part:
    """Return this rank's share of the whole tensor. Collective."""
    settings, values = backend.settings, part.values.to(backend.settings.device)
    stored = torch.view_as_real(values).reshape(-1) if part.dtype.is_complex else values
    whole, share = entry.flat(gather(entry, stored, settings.device), whole=True), part.range
    # Where the engine divides a parameter in the order in which it lies in memory (channels_last, or transposed), a
    # rank holds elements from all over, and keeps as many as before, now successive ones. What other mesh dimensions
    # than data divide is put together, and each rank that has a part of it keeps an equal share.
    if entry.divided_over:
        pairs = (2,) if entry.kind.is_complex and not part.dtype.is_complex else ()
        whole = entry.put_together(whole.view(*entry.shape, *pairs)).reshape(-1)
        rank, ranks = settings.overall_rank, settings.all_ranks
        if backend.facts.divides != "elements":
            rank, ranks = 0, 1
            for group in entry.divided_over:
                rank, ranks = rank * group.size() + group.rank(), ranks * group.size()
        share = whole.numel() * rank // ranks, whole.numel() * (rank + 1) // ranks
    return dataclasses.replace(part, range=share, values=whole[slice(*share)].clone(), scattered="")


def collect_together(
    work: Callable[[], Collected], models: Models, channel: Channel, timeout: float | None = None
) -> Collected:
    """Run ``work``, which collects, on every rank, and put all tensors in ranges. Collective."""
    collected: Collected = agree(channel, work, timeout)
    _put_in_ranges(collected, models, channel)
    return collected


def collect(
    models: Models,
    optimizers: Mapping[str, ShardedOptimizer],
    objects: Mapping[str, Any],
    rank: int,
    random: Mapping[str, Any] | None = None,
    *,
    trainable: bool = False,
) -> Collected:
    """Collect this rank's share of models, optimizers, objects and generators' state. No communication.

    ``trainable`` leaves out frozen parameters.
    """
    collected = Collected()
    for of, model in models.items():
        controller_of(model).check_filled()
        _add_model(collected, model, rank, of, trainable)
        if of:
            collected.models[of] = [name for name, optimizer in optimizers.items() if optimizer.model is model]
    model_names = {id(model): of for of, model in models.items()}
    for name, optimizer in optimizers.items():
        groups = _encode(groups_by_name(optimizer), f"groups/{name}", collected.parts)
        collected.groups[name] = (class_name(optimizer.optimizer_class), groups)
        collected.state[name] = {}
        states = [(entry, state_of(optimizer.inner, entry)) for entry in optimizer.entries]
        single = counters(
            (entry, {k: v.shape for k, v in state.items() if isinstance(v, Tensor)}) for entry, state in states
        )
        divides, of = state_divides(optimizer.model.backend, optimizer.inner), model_names[id(optimizer.model)]
        for entry, state in states:
            _add_state(collected, name, divides, state_entry(optimizer.inner, entry), state, single, of)
    for name, value in objects.items():
        state = value.state_dict() if hasattr(value, "state_dict") else value
        own = collected.own[name] = {}
        tree = collected.objects[name] = _encode(state, f"objects/{name}", own)
        digest = hashlib.sha256(json.dumps([tree, as_table(own)]).encode())
        for part in own.values():
            digest.update(part.values.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        collected.digests[name] = digest.hexdigest()
    if random is not None:
        collected.rng = _encode(random, "rng", collected.own.setdefault("rng", {}))
    return collected


def class_name(kind: type) -> str:
    """Return the module and name of an optimizer's class."""
    return f"{kind.__module__}.{kind.__qualname__}"


FROZEN = "frozen, and saved with only='trainable'"
"""Why a checkpoint does not have a key of the model."""


def _add_model(collected: Collected, model: ShardedModule, rank: int, name: str, trainable: bool) -> None:
    backend, parts, before = model.backend, collected.parts, prefix(name)
    # neuralop's BaseModel puts its constructor's arguments into the state dict; the model that loads has its own.
    raw = {key: value for key, value in raw_state_dict(backend).items() if key != NEURALOP_ARGUMENTS}
    # The model's order, with what is no parameter as it is; a hook of the user's may leave some out.
    frozen = {entry.name for entry in backend.all if trainable and not entry.parameter.requires_grad}
    dropped = {key: FROZEN for key in backend.key_order if key in raw and backend.keys.get(key) in frozen}
    ordered = [key for key in dict.fromkeys([*backend.key_order, *raw]) if key in raw and key not in dropped]
    listed = {backend.keys[key] for key in ordered if key in backend.keys}
    for entry in backend.entries.values():
        if entry.name in listed:
            parts[f"model/{before}{entry.name}"] = _part(entry, entry.local(), name)
    keys, extra, left_out = collected.model
    left_out |= {before + key: why for key, why in dropped.items()}
    for key in ordered:
        value, told = raw[key], before + key
        if key in backend.keys:
            keys[told] = f"model/{before}{backend.keys[key]}"
        elif isinstance(value, Tensor):
            keys[told] = f"model/{told}"
            if rank == 0:  # buffers may differ between ranks; rank 0's count, as in a state dict
                parts[f"model/{told}"] = Part.of_all(controller_of(model).buffers.for_user(key, value))
        else:
            keys[told] = None
            extra[told] = _encode(value, f"model/{told}", parts if rank == 0 else {})
    for entry in backend.entries.values():
        if entry.name not in frozen:
            collected.tied |= {before + slot.name: before + entry.name for slot in entry.slots[1:]}


def counters(states: Iterable[tuple[Entry, Mapping[str, Sequence[int]]]]) -> set[str]:
    """Return the keys of state that is one number for a whole parameter, given the shapes of each one's tensors."""
    # A 0-dim parameter's shape does not tell.
    shaped = [shapes for entry, shapes in states if entry.shape.numel() > 1]
    return {"step"} | {key for shapes in shaped for key, shape in shapes.items() if not len(shape)}


def _add_state(
    collected: Collected,
    name: str,
    divides: str,
    entry: Entry,
    state: Mapping[str, Any],
    single: Collection[str],
    model: str,
) -> None:
    local = entry.local()
    if divides == "elements" and not local.numel():
        return  # what a rank without elements counts (Adagrad's step stays 0 there) means nothing
    small = collected.state[name][entry.name] = {}
    if divides != "elements" and (orders := _orders(entry, state)):
        small[ORDERS] = _encode(orders, "orders", {})
    for key, value in state.items():
        if not isinstance(key, str) or "/" in key:
            raise OptimizerError(
                f"state {key!r} of {entry.name!r}: its name in a checkpoint must be a text without '/'"
            )
        place = f"optimizer/{name}/{entry.name}/{key}"
        if not isinstance(value, Tensor):
            small[key] = _encode(value, place, collected.parts)
        elif value.shape == local.shape and key not in single:
            collected.parts[place] = _part(entry, value, model)
        elif value.dim() and (divides == "elements" or entry.divided_over):
            raise OptimizerError(
                f"state {key!r} of {entry.name!r} has shape {tuple(value.shape)}, its local part has "
                f"{tuple(local.shape)}: it cannot be put together from the ranks' parts"
            )
        else:
            collected.parts[place] = Part.of_all(value.detach())


ORDERS = "/orders"
"""Beside the state of a parameter: key -> the order of its dims in memory, where that is another one than theirs."""


def _orders(entry: Entry, state: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return how tensors lie, since products round by it: eigenvectors (SOAP's) column by column."""
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    same = {key for key, value in tensors.items() if value.shape == entry.local().shape}
    lying = {k: order_in_memory(entry.kind.to_user(v) if k in same else v) for k, v in tensors.items()}
    return {key: list(order) for key, order in lying.items() if order}


def lying(entry: Entry, value: Tensor, order: Sequence[int]) -> Tensor:
    """Return a state as it is to lie in memory, in an order that :data:`ORDERS` has."""
    if value.shape == entry.local().shape and (entry.kind.order or entry.divided_over):
        return value  # as the engine stores the parameter
    return laid(value, [*order, *range(len(order), value.dim())])  # pairs of reals stay together


def _encode(value: Any, place: str, parts: dict[str, Part]) -> Any:
    """Return the tree of a value; its tensors become parts, numbered below ``place``."""
    count = 0

    def put(path: str, tensor: Tensor) -> str:
        nonlocal count
        plain = tensor.detach().resolve_conj().resolve_neg() if tensor.layout is torch.strided else tensor
        if type(plain) is not Tensor or plain.layout is not torch.strided or plain.is_meta or plain.is_quantized:
            what = type(plain).__name__ if type(plain) is not Tensor else f"{plain.layout} on {plain.device}"
            raise CheckpointError(
                f"{path}: a {what}, whose values are not on this rank; copy weights under full_parameters()"
            )
        name, count = f"{place}/{count}", count + 1
        parts[name] = Part.of_all(plain)
        return name

    return encode(value, put, place)


# ------------------------------------------------------------------------------------------------ who writes what


def divide(
    tables: Sequence[Mapping[str, Any]], call: str, *, shared: bool = True
) -> tuple[dict[str, TensorInfo], list[dict[str, Range]]]:
    """Decide which rank writes which elements of which tensor: each once, by a rank that has them.

    Engines differ only in this: a rank holds a range of each flattened tensor. The same range on several ranks is a
    copy (all of DDP, the replicas of HYBRID_SHARD, FairScale's parameters), whose bytes are spread evenly over them if
    ``shared``; else the first one writes all of it. Returns the tensors with their pieces, and for each rank
    ``{tensor: range}``; raises if ranks have a tensor in another dtype or shape.
    """
    infos: dict[str, TensorInfo] = {}
    copies: dict[tuple[str, int, int], list[int]] = {}
    for rank, table in enumerate(tables):
        for name, (dtype, shape, start, stop) in table.items():
            here = TensorInfo(dtype, tuple(shape), ())
            known = infos.setdefault(name, here)
            if known != here:
                raise CheckpointError(
                    f"{call}: the ranks disagree on {name}: rank {rank} has {dtype} {tuple(shape)}, another "
                    f"{known.dtype} {known.shape}"
                )
            if stop > start:
                copies.setdefault((name, start, stop), []).append(rank)
    together: dict[tuple[int, ...], list[tuple[str, int, int]]] = {}
    for copy, ranks in copies.items():
        together.setdefault(tuple(ranks if shared else ranks[:1]), []).append(copy)
    written: list[dict[str, Range]] = [{} for _ in tables]
    pieces: dict[str, list[Piece]] = {name: [] for name in infos}
    for group, parts in together.items():
        # Laid end to end, so that few tensors are cut; each rank of the group gets an equal stretch.
        total = sum((stop - start) * infos[name].kind.itemsize for name, start, stop in parts)
        before = 0
        for name, start, stop in parts:
            size = infos[name].kind.itemsize
            # The k-th rank's stretch begins at byte k * total / len(group), here in elements of this part.
            cuts = [-(-(k * total // len(group) - before) // size) for k in range(len(group) + 1)]
            bounds = [start + min(max(cut, 0), stop - start) for cut in cuts]
            for rank, low, high in zip(group, bounds, bounds[1:], strict=False):
                if high > low:
                    written[rank][name] = (low, high)
                    key = piece_key(name, infos[name].numel, (low, high))
                    pieces[name].append(Piece(rank_file(rank, len(tables)), key, low, high))
            before += (stop - start) * size
    in_order = {name: tuple(sorted(each, key=lambda piece: piece.start)) for name, each in pieces.items()}
    return {name: info._replace(pieces=in_order[name]) for name, info in infos.items()}, written


def origin_of(models: Models) -> Origin:
    """Return what writes a checkpoint of models."""
    backends = [model.backend for model in models.values()]
    shape: dict[str, int] = {}
    for mesh in (backend.settings.model_mesh for backend in backends):
        shape |= {} if mesh is None else mesh.shape()
    names = ", ".join(dict.fromkeys(backend.name for backend in backends))
    return Origin(__version__, str(torch.__version__), names, backends[0].settings.all_ranks, shape)


def make_index(
    origin: Origin,
    collected: Collected,
    tensors: dict[str, TensorInfo],
    trees: Sequence[Mapping[str, Any]],
    alike: Collection[str] = (),
) -> Index:
    """Return the index of what all ranks hold, but for the save's number and files.

    Takes rank 0's ``collected``, what :meth:`Collected.trees` gives on each rank, and the names of the objects that all
    ranks have ``alike``.
    """
    return Index(
        id="",
        ordinal=0,
        saved_at="",
        origin=origin,
        files={},
        tensors=tensors,
        model=collected.model,
        tied=collected.tied,
        models=collected.models,
        optimizers={
            name: OptimizerInfo(kind, groups, _first_of([told["state"][name] for told in trees]))
            for name, (kind, groups) in collected.groups.items()
        },
        objects={
            name: {"all": tree} if name in alike else _per_rank([told["objects"][name] for told in trees])
            for name, tree in collected.objects.items()
        },
        rng=None if collected.rng is None else _per_rank([told["rng"] for told in trees]),
    )


def _first_of(states: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Merge ranks' ``{parameter: {key: value}}``: each value is that of the first rank that has it."""
    merged: dict[str, dict[str, Any]] = {}
    for state in reversed(states):
        for parameter, values in state.items():
            merged[parameter] = {**merged.get(parameter, {}), **values}
    return merged


def _per_rank(trees: list[Any]) -> dict[str, list[Any]]:
    """Return trees that differ, each with its own rank's tensors."""
    return {"per_rank": [_renamed(tree, f"@rank{rank}") for rank, tree in enumerate(trees)]}


def _renamed(node: Any, suffix: str) -> Any:
    """Append a suffix to the names of a tree's tensors."""
    if isinstance(node, list):
        return [_renamed(item, suffix) for item in node]
    if not isinstance(node, dict):
        return node
    if node.get("$") in ("tensor", "ndarray"):
        return {**node, "v": node["v"] + suffix}
    return {key: _renamed(item, suffix) for key, item in node.items()}


# ------------------------------------------------------------------------------------------------ arguments


def check_call(name: str, path: object, timeout: object, **flags: object) -> tuple[str, str]:
    """Check a path, a timeout and flags; return the path from the home directory, and the call as messages show it."""
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
    path = os.path.expanduser(os.fspath(path))
    return path, f"{name}({path!r})"


def name_optimizers(
    models: Models, optimizer: object, call: str, averages: Mapping[str, EMA] | None = None
) -> dict[str, ShardedOptimizer]:
    """Name one optimizer ("optimizer"), a sequence of them ("0", "1", ...), or a mapping (by its keys).

    An average of weights is, in a checkpoint, the state of an optimizer of its name.
    """
    if optimizer is None:
        named: dict[str, Any] = {}
    elif isinstance(optimizer, Mapping):
        named = {str(name): value for name, value in optimizer.items()}
    elif isinstance(optimizer, Sequence):
        named = {str(index): value for index, value in enumerate(optimizer)}
    else:
        named = {"optimizer": optimizer}
    for name, value in named.items():
        if not name or "/" in name:
            raise ConfigurationError(f"{call}: an optimizer cannot be named {name!r}; use a word without '/'")
        if not isinstance(value, ShardedOptimizer) or not any(value.model is model for model in models.values()):
            raise ConfigurationError(
                f"{call}: expected optimizer {name!r} to be this model's, got a {type(value).__name__} of another "
                "model or of none; build it with fsshard.build_optimizer, or hand a live one to fsshard.wrap"
            )
    for name, average in (averages or {}).items():
        if not any(average.model is model for model in models.values()):
            raise ConfigurationError(f"{call}: {name}= is the average of another model")
        if name in named:
            raise ConfigurationError(f"{call}: {name!r} names two things, an optimizer and an average; rename one")
        named[name] = average.held
    return named


def as_called(call: str, models: Iterable[str], optimizer: Any, objects: Mapping[str, Any], **options: Any) -> str:
    """Return the call with all that ranks have to agree on, so that they find out where they do not."""
    several = [f"{{{quoted(models)}}}"] if any(models) else []
    if isinstance(optimizer, Mapping):
        handed = [f"optimizer={{{', '.join(map(repr, sorted(map(str, optimizer))))}}}"]
    elif isinstance(optimizer, Sequence):
        handed = [f"optimizer=[{len(optimizer)}]"]
    else:
        handed = [] if optimizer is None else ["optimizer"]
    handed = (
        several
        + handed
        + [f"{name}=" for name in sorted(objects)]
        + [f"{key}={value!r}" for key, value in options.items()]
    )
    return f"{call[:-1]}, {', '.join(handed)})"


def named_objects(scheduler: Any, scaler: Any, others: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is saved besides the model and its optimizers, by name; several with state as one object each."""
    given = {key: value for key, value in (("scheduler", scheduler), ("scaler", scaler)) if value is not None}
    return {name: as_one(value) for name, value in (given | dict(others)).items()}


def check_places(scheduler: Any, scaler: Any, call: str) -> None:
    """Raise unless what stands in the places of a scheduler and a scaler can be one. Local.

    Raises:
        ConfigurationError: names the keyword to use.
    """
    keywords = {LRScheduler: "scheduler", torch.amp.GradScaler: "scaler", EMA: "ema"}
    for place, value in (("scheduler", scheduler), ("scaler", scaler)):
        keyword = next((keyword for kind, keyword in keywords.items() if isinstance(value, kind)), place)
        if value is None or (keyword == place and hasattr(as_one(value), "state_dict")):
            continue
        if keyword == place:  # a number is most often that of the step
            keyword = "step" if isinstance(value, int) else "NAME"
        raise ConfigurationError(
            f"{call}: expected something with state_dict() in the place of {place}, or None, got a "
            f"{type(value).__name__}; pass it by name: {keyword}={value if isinstance(value, int) else '...'}"
        )


def take_averages(objects: dict[str, Any]) -> dict[str, EMA]:
    """Take each :class:`fsshard.EMA` out of ``objects``."""
    return {name: objects.pop(name) for name, value in list(objects.items()) if isinstance(value, EMA)}


def as_one(value: Any) -> Any:
    """Return a list or mapping in which all have state, ``scheduler=[warmup, decay]``, as one; all else as it is."""
    if hasattr(value, "state_dict") or not isinstance(value, (Mapping, list, tuple)):
        return value
    members = dict(value) if isinstance(value, Mapping) else dict(enumerate(value))
    for member in members.values():
        if isinstance(member, EMA):
            raise ConfigurationError(
                "an fsshard.EMA has a keyword of its own, as in ema=ema, slow=slow_ema; got several"
            )
        ours = isinstance(member, (ShardedModule, ShardedOptimizer))  # they are no state, and are refused
        if ours or not (hasattr(member, "state_dict") and hasattr(member, "load_state_dict")):
            return value
    return _Several(members, named=isinstance(value, Mapping)) if members else value


class _Several:
    """Several objects with state, as one with the state of all: in a list, or by name."""

    def __init__(self, members: Mapping[Any, Any], *, named: bool) -> None:
        self._members, self._named = members, named

    def state_dict(self) -> Any:
        states = {key: member.state_dict() for key, member in self._members.items()}
        return states if self._named else list(states.values())

    def load_state_dict(self, state: Any) -> None:
        kind = Mapping if self._named else (list, tuple)
        saved = dict(state if self._named else enumerate(state)) if isinstance(state, kind) else None
        if saved is None or saved.keys() != self._members.keys():
            theirs = list(state) if isinstance(state, Mapping) else f"a {type(state).__name__}"
            theirs = f"{theirs} of {len(state)}" if isinstance(state, (list, tuple)) else theirs
            mine = list(self._members) if self._named else f"a list of {len(self._members)}"
            raise ConfigurationError(f"{mine} was given, {theirs} was saved")
        for key, member in self._members.items():
            member.load_state_dict(saved[key])
