"""Collects what each rank holds of a model, its optimizers and other objects, and arranges who writes what.

Every backend says which range of each flattened parameter a rank holds (``Entry.here``). A checkpoint stores nothing
but ranges, in the user's order and dtype; from these alone the rest of the room works, so it never asks which engine
there is.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsshard.backends.base import Backend
from fsshard.backends.optimizer_state import state_of
from fsshard.backends.whole import gather, raw_state_dict
from fsshard.checkpoint.format.dtypes import BY_NAME, dtype_name
from fsshard.checkpoint.format.index import Index, ModelInfo, OptimizerInfo, Origin, Piece, TensorInfo
from fsshard.checkpoint.format.pieces import Range, piece_key, rank_file
from fsshard.checkpoint.format.tree import encode
from fsshard.checkpoint.format.version import __version__
from fsshard.comm.agreement import exchange
from fsshard.comm.channel import Channel
from fsshard.complex_params.pairs import viewable
from fsshard.errors import CheckpointError, OptimizerError
from fsshard.planning.entries import Entry
from fsshard.sharded.buffers import buffers_of
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer, groups_by_name
from fsshard.sharded.state_dict import NEURALOP_ARGUMENTS

__all__ = [
    "Collected",
    "Part",
    "class_name",
    "collect",
    "collect_together",
    "counters",
    "flat",
    "holders",
    "make_index",
    "origin_of",
    "pairs_shape",
    "tensor_infos",
    "user_range",
]

PAIRED = (torch.float32, torch.float64)
"""Pairs of which torch sees as complex numbers."""

Held = dict[str, list[Range | None]]


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
            engine's order, until :func:`_put_in_ranges`.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    range: Range
    values: Tensor
    scattered: str = ""

    @classmethod
    def of_all(cls, tensor: Tensor) -> Part:
        """Return all elements of a tensor that this rank has as a whole."""
        return cls(tensor.dtype, tuple(tensor.shape), (0, tensor.numel()), tensor.reshape(-1))


@dataclass
class Collected:
    """The parts that one rank brings to a checkpoint.

    Attributes:
        parts: tensor's name -> this rank's part of it.
        model: the index's ``model`` and ``tied``.
        groups: optimizer -> (class, groups as a tree).
        state: optimizer -> parameter -> key -> tree, of state that is no tensor.
        objects: name -> tree.
        digests: name -> hash of the tree and of its tensors, to tell whether ranks have the same.
        own: name -> the tensors of that object.
        rng: tree of the generators' states, if they are saved.
    """

    parts: dict[str, Part] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, tuple[str, Any]] = field(default_factory=dict)
    state: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    own: dict[str, dict[str, Part]] = field(default_factory=dict)
    rng: Any = None

    def add_generators(self, state: Mapping[str, Any]) -> None:
        """Add the state of this rank's random number generators."""
        own = self.own["rng"] = {}

        def put(path: str, tensor: Tensor) -> str:
            name = f"rng/{path.removeprefix('rng').lstrip('.')}"
            own[name] = Part.of_all(tensor)
            return name

        self.rng = encode(state, put, "rng")

    def adopt_own(self, rank: int, alike: Collection[str]) -> None:
        """Add the tensors of objects to the others: once where ranks have the same, else under a name for each rank."""
        for name, own in self.own.items():
            for tensor, part in own.items():
                if name not in alike:
                    self.parts[f"{tensor}@rank{rank}"] = part
                elif rank == 0:
                    self.parts[tensor] = part

    def table(self) -> dict[str, list[Any]]:
        """Return the dtype, shape and range of each tensor by its name, as JSON has it."""
        return {name: [dtype_name(p.dtype), list(p.shape), *p.range] for name, p in self.parts.items()}

    def trees(self, alike: Collection[str]) -> dict[str, Any]:
        """Return what rank 0 puts into the index for this rank beside tensors."""
        return {
            "objects": {name: tree for name, tree in self.objects.items() if name not in alike},
            "state": {name: {p: s for p, s in state.items() if s} for name, state in self.state.items()},
            "rng": self.rng,
        }


# ------------------------------------------------------------------------------------------------ views


def flat(entry: Entry, local: Tensor) -> Tensor:
    """Flatten a stored local part to the user's dtype, over the same memory where that is contiguous."""
    values = local.detach().reshape(-1)
    return torch.view_as_complex(viewable(values.view(-1, 2))) if entry.kind.is_complex else values


def _as_users(entry: Entry, stored: Tensor, *, whole: bool) -> Tensor:
    """Flatten what is stored of all or some elements to the user's dtype, where there is one so wide.

    What is whole comes in the user's order, a part in the order in which it lies.
    """
    pairs = entry.kind.is_complex and stored.dtype not in PAIRED
    if whole and entry.kind.order:
        return stored.permute(*entry.kind.way_back, -1).reshape(-1) if pairs else entry.kind.to_user(stored).reshape(-1)
    return stored.reshape(-1) if pairs else flat(entry, stored)


def pairs_shape(entry: Entry) -> tuple[int, ...]:
    """Return the shape of a complex parameter's numbers as pairs in the user's order."""
    return (*entry.full_shape, 2) if entry.shape else tuple(entry.stored_shape)


def user_range(entry: Entry, stored: Range) -> Range:
    """Convert a range of stored elements to the user's: a complex number is two stored ones."""
    width = 2 if entry.kind.is_complex else 1
    if stored[0] % width or stored[1] % width:
        raise AssertionError(f"{entry.name}: a complex number is split between two ranks")
    return stored[0] // width, stored[1] // width


def _part(entry: Entry, stored: Tensor) -> Part:
    """Return this rank's part of a parameter, or of state that has a number for each of its stored elements."""
    values = _as_users(entry, stored.detach(), whole=entry.in_order)
    scattered = "" if entry.in_order and not entry.divided_over else entry.name
    if entry.kind.is_complex and stored.dtype not in PAIRED:  # no complex dtype of that width: saved as pairs
        return Part(stored.dtype, pairs_shape(entry), entry.here, values, scattered)
    dtype = entry.kind.user_dtype(stored.dtype)
    return Part(dtype, tuple(entry.full_shape), user_range(entry, entry.here), values, scattered)


# ------------------------------------------------------------------------------------------------ collecting


def collect_together(
    work: Callable[[], Collected], backend: Backend, channel: Channel, timeout: float | None = None
) -> Collected:
    """Run ``work``, which collects, on every rank, and put all tensors in ranges. Collective."""
    found: list[Collected] = []
    exchange(channel, lambda: found.append(work()), timeout)
    _put_in_ranges(found[0], backend, channel)
    return found[0]


def collect(
    model: ShardedModule, optimizers: Mapping[str, ShardedOptimizer], objects: Mapping[str, Any], rank: int
) -> Collected:
    """Collect this rank's share of the model, the optimizers and the user's objects. No communication.

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
            _add_state(found, name, model.backend, entry, state, single)
    for name, value in objects.items():
        _add_object(found, name, value)
    return found


def class_name(kind: type) -> str:
    """Return the module and name of an optimizer's class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _add_model(found: Collected, model: ShardedModule, rank: int) -> None:
    backend = model.backend
    # neuralop's BaseModel puts its constructor's arguments into the state dict; the model that loads has its own.
    raw = {key: value for key, value in raw_state_dict(backend).items() if key != NEURALOP_ARGUMENTS}
    # The model's order, with what is no parameter as it is; a hook of the user's may leave some out.
    ordered = [key for key in backend.key_order if key in raw] + [key for key in raw if key not in backend.key_order]
    listed = {backend.keys[key] for key in ordered if key in backend.keys}
    for entry in backend.entries.values():
        if entry.name in listed:
            found.parts[f"model/{entry.name}"] = _part(entry, entry.local())
    keys: dict[str, str | None] = {}
    extra: dict[str, Any] = {}
    for key in ordered:
        value = raw[key]
        if key in backend.keys:
            keys[key] = f"model/{backend.keys[key]}"
        elif isinstance(value, Tensor):
            keys[key] = f"model/{key}"
            if rank == 0:  # buffers may differ between ranks; rank 0's count, as in a state dict
                found.parts[f"model/{key}"] = Part.of_all(buffers_of(model).for_user(key, value))
        else:
            keys[key] = None
            extra[key] = _with_tensors(found, value, f"model/{key}", hold=rank == 0)
    tied = {slot.name: entry.name for entry in backend.entries.values() for slot in entry.slots[1:]}
    found.model = {"model": ModelInfo(keys, extra, {}), "tied": tied}


def counters(states: Iterable[tuple[Entry, Mapping[str, Sequence[int]]]]) -> set[str]:
    """Return the keys of state that is one number for a whole parameter: a 0-dim parameter's shape does not tell.

    Args:
        states: parameters, and of each the shapes of its state's tensors.
    """
    shaped = [shapes for entry, shapes in states if entry.shape.numel() > 1]
    return {"step"} | {key for shapes in shaped for key, shape in shapes.items() if not len(shape)}


def _add_state(
    found: Collected, name: str, backend: Backend, entry: Entry, state: Mapping[str, Any], single: Collection[str]
) -> None:
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
            found.parts[place] = _part(entry, value)
        elif value.dim() and (backend.facts.divides == "elements" or entry.divided_over):
            raise OptimizerError(
                f"state {key!r} of {entry.name!r} has shape {tuple(value.shape)}, its local part has "
                f"{tuple(local.shape)}: it cannot be put together from the ranks' parts"
            )
        else:
            found.parts[place] = Part.of_all(value.detach())
    found.state[name][entry.name] = small


def _add_object(found: Collected, name: str, value: Any) -> None:
    state = value.state_dict() if hasattr(value, "state_dict") else value
    own = found.own[name] = {}
    found.objects[name] = _encode(state, f"objects/{name}", own)
    digest = hashlib.sha256(json.dumps(found.objects[name]).encode())
    for part in own.values():
        digest.update(repr((part.dtype, part.shape)).encode())
        digest.update(part.values.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    found.digests[name] = digest.hexdigest()


def _with_tensors(found: Collected, value: Any, place: str, *, hold: bool = True) -> Any:
    """Return the tree of a value that is the same on all ranks; its tensors become parts, where ``hold``."""
    own: dict[str, Part] = {}
    tree = _encode(value, place, own)
    if hold:
        found.parts.update(own)
    return tree


def _encode(value: Any, place: str, own: dict[str, Part]) -> Any:
    def put(path: str, tensor: Tensor) -> str:
        name = f"{place}/{len(own)}"
        own[name] = Part.of_all(_dense(tensor, path))
        return name

    return encode(value, put, place)


def _dense(tensor: Tensor, path: str) -> Tensor:
    """Return the tensor itself if it has all its numbers here."""
    found = tensor.detach().resolve_conj().resolve_neg() if tensor.layout is torch.strided else tensor
    if type(found) is not Tensor or found.layout is not torch.strided or found.is_meta or found.is_quantized:
        what = type(found).__name__ if type(found) is not Tensor else f"{found.layout} on {found.device}"
        raise CheckpointError(
            f"{path}: a {what}, whose values are not on this rank; copy weights under full_parameters()"
        )
    return found


# ------------------------------------------------------------------------------------------------ ranges


@torch.no_grad()
def _put_in_ranges(found: Collected, backend: Backend, channel: Channel) -> None:
    """Turn what is scattered into ranges of the flattened tensor, the only form that is stored. Collective.

    An engine may divide a parameter in the order in which it lies in memory (``Entry.in_order``): of one in
    ``channels_last``, or transposed, a rank then holds elements from all over. These tensors are put together one by
    one, and each rank keeps as many elements as before, now successive ones. Likewise what other mesh dimensions than
    data have divided (``Entry.divided_over``): put together one by one, of which each rank keeps an equal share.
    """
    if not any(not entry.in_order or entry.divided_over for entry in backend.all):  # the same on every rank
        return
    mine = {name: part for name, part in found.parts.items() if part.scattered}
    told = {name: [p.scattered, dtype_name(p.dtype), list(p.shape)] for name, p in mine.items()}
    # A rank that holds no element of a parameter has no state for it, and takes part all the same.
    known: dict[str, Any] = {name: item for table in channel.gather(told) for name, item in table.items()}
    for name, (parameter, dtype, shape) in sorted(known.items()):
        if name not in mine and backend.facts.divides != "elements":
            continue  # nor have the ranks that hold other parts of it: the same rank of data owns all
        empty = Part(BY_NAME[dtype], tuple(shape), (0, 0), torch.empty(0, dtype=BY_NAME[dtype]))
        part = _in_range(backend.entries[parameter], mine.get(name, empty), backend)
        if name in mine or part.values.numel():
            found.parts[name] = part


def _in_range(entry: Entry, part: Part, backend: Backend) -> Part:
    """Return this rank's share of the whole tensor. Collective."""
    values = part.values.to(backend.settings.device)
    stored = torch.view_as_real(values).reshape(-1) if part.dtype.is_complex else values
    whole = _as_users(entry, gather(entry, stored, backend.settings.device), whole=True)
    if not entry.divided_over:  # as many elements as before
        return dataclasses.replace(part, values=whole[slice(*part.range)].clone(), scattered="")
    pairs = (2,) if entry.kind.is_complex and not part.dtype.is_complex else ()
    whole = entry.put_together(whole.view(*entry.shape, *pairs)).reshape(-1)
    share = _share(entry, whole.numel(), backend)
    return dataclasses.replace(part, range=share, values=whole[slice(*share)].clone(), scattered="")


def _share(entry: Entry, numel: int, backend: Backend) -> Range:
    """Return the elements that this rank keeps of those that all ranks of data hold: along the other dimensions."""
    if backend.facts.divides == "elements":
        rank, ranks = backend.settings.overall_rank, backend.settings.all_ranks
    else:
        rank, ranks = 0, 1
        for group in entry.divided_over:
            rank, ranks = rank * group.size() + group.rank(), ranks * group.size()
    return numel * rank // ranks, numel * (rank + 1) // ranks


# ------------------------------------------------------------------------------------------------ who has what


def holders(tables: Sequence[Mapping[str, Any]], call: str) -> tuple[dict[str, TensorInfo], Held]:
    """Merge the tables of all ranks: the tensors, without pieces, and of each the range that every rank holds.

    Raises:
        CheckpointError: ranks have one in another dtype or shape.
    """
    infos: dict[str, TensorInfo] = {}
    held: Held = {}
    for rank, table in enumerate(tables):
        for name, (dtype, shape, start, stop) in table.items():
            here = TensorInfo(dtype, tuple(shape), ())
            known = infos.setdefault(name, here)
            if known != here:
                raise CheckpointError(
                    f"{call}: the ranks disagree on {name}: rank {rank} has {dtype} {tuple(shape)}, another "
                    f"{known.dtype} {known.shape}"
                )
            held.setdefault(name, [None] * len(tables))[rank] = (start, stop)
    return infos, held


def tensor_infos(infos: Mapping[str, TensorInfo], shares: Sequence[Mapping[str, Range]]) -> dict[str, TensorInfo]:
    """Complete tensors by their pieces: ``shares`` has what each rank's file holds of them."""
    pieces: dict[str, list[Piece]] = {name: [] for name in infos}
    for rank, share in enumerate(shares):
        file = rank_file(rank, len(shares))
        for name, (start, stop) in share.items():
            pieces[name].append(Piece(file, piece_key(name, infos[name].numel, (start, stop)), start, stop))
    return {
        name: info._replace(pieces=tuple(sorted(pieces[name], key=lambda piece: piece.start)))
        for name, info in infos.items()
    }


def origin_of(model: ShardedModule) -> Origin:
    """Return what writes a checkpoint of a model."""
    mesh = model.backend.settings.model_mesh
    shape = {} if mesh is None else mesh.shape()
    return Origin(__version__, str(torch.__version__), model.backend.name, model.backend.settings.all_ranks, shape)


def make_index(
    origin: Origin,
    found: Collected,
    tensors: dict[str, TensorInfo],
    trees: Sequence[Mapping[str, Any]],
    alike: Collection[str] = (),
) -> Index:
    """Return the index of what all ranks hold, but for the save's number and files.

    Args:
        origin: of the checkpoint.
        found: rank 0's.
        tensors: of all ranks.
        trees: of each rank, :meth:`Collected.trees`.
        alike: names of the objects that all ranks have the same.
    """
    return Index(
        id="",
        ordinal=0,
        saved_at="",
        origin=origin,
        files={},
        tensors=tensors,
        **found.model,
        optimizers={
            name: OptimizerInfo(kind, groups, _first_of([told["state"][name] for told in trees]))
            for name, (kind, groups) in found.groups.items()
        },
        objects={
            name: {"all": tree} if name in alike else _per_rank([told["objects"][name] for told in trees])
            for name, tree in found.objects.items()
        },
        rng=None if found.rng is None else _per_rank([told["rng"] for told in trees]),
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
