"""Collects what each rank holds of a model, its optimizers and other objects, and arranges who writes what.

At the end: checks of the arguments that save, load and export have in common.

A checkpoint stores nothing but ranges of flattened tensors, in the user's order and dtype, whatever the engine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from fsshard.backends.base import Backend
from fsshard.backends.settings import Settings
from fsshard.backends.whole import check_divisible, gather, raw_state_dict, state_divides, state_entry, state_of
from fsshard.checkpoint.format.division import (
    Division,
    Layout,
    Piece,
    Pieces,
    Range,
    Spread,
    piece_key,
    pieces_in,
    rank_file,
    whole_everywhere,
)
from fsshard.checkpoint.format.index import (
    Index,
    ModelInfo,
    Names,
    OptimizerInfo,
    Origin,
    TensorInfo,
    Tree,
    Values,
    some,
)
from fsshard.checkpoint.format.tensors_file import BY_NAME, Shape, dtype_name
from fsshard.checkpoint.format.tree import encode
from fsshard.checkpoint.format.version import __version__
from fsshard.checkpoint.models import Models, prefix, quoted
from fsshard.checkpoint.position import DataPosition
from fsshard.comm.agreement import Channel, agree
from fsshard.complex_params.pairs import laid, order_in_memory
from fsshard.errors import CheckpointError, ConfigurationError, OptimizerError
from fsshard.planning.entries import Entry
from fsshard.sharded.averages import EMA
from fsshard.sharded.controller import controller_of
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer, groups_by_name
from fsshard.sharded.state_dict import NEURALOP_ARGUMENTS
from fsshard.state_objects import class_name as class_name
from fsshard.state_objects import described, is_composite, is_plain_tensor

TIMEOUT = 300.0  # seconds to wait for ranks, where the caller does not say


@dataclass(frozen=True)
class Part:
    """A tensor, and what of it this rank holds."""

    dtype: torch.dtype  # the user's: complex where the model is
    shape: Shape  # of the whole tensor, the user's
    range: Range  # elements held here, of the flattened tensor
    values: Tensor  # those elements, flat, over the memory where they are
    # The parameter as whose elements they are divided, if that is in another order than that of the indices, or over
    # another mesh dimension than data: the range is one of those over data, in the engine's order, till _put_in_ranges.
    scattered: str = ""
    layout: Layout | None = None  # the rule by which all ranks hold it; None where some do not, or by no rule

    @classmethod
    def of_all(cls, tensor: Tensor, *, everywhere: bool = False) -> Part:
        """Return all elements of a tensor that this rank has as a whole; ``everywhere``: as every rank has."""
        everything = (0, tensor.numel())
        layout = None
        if everywhere:
            layout = whole_everywhere(tensor.numel())
        return cls(tensor.dtype, tuple(tensor.shape), everything, tensor.reshape(-1), layout=layout)

    def within(self, span: Range) -> Part:
        """Return those of the elements held here that lie in a range."""
        start, stop = span
        first, _ = self.range
        values = self.values[start - first : stop - first]
        return dataclasses.replace(self, range=span, values=values, layout=None)


Parts = dict[str, Part]


def as_table(parts: Parts) -> dict[str, list[Any]]:
    """Return the dtype, shape, range and layout of each part by its name, as JSON has it."""
    table = {}
    for name, part in parts.items():
        start, stop = part.range
        table[name] = [dtype_name(part.dtype), list(part.shape), start, stop, part.layout]
    return table


class Layouts:
    """The layouts of entries among all ranks that take part in a checkpoint.

    Attributes:
        grids: by group, its number of shards and how many ranks of other groups lie between two of them; None for a
            group whose ranks are in no such order.
    """

    def __init__(self) -> None:
        self.grids: dict[dist.ProcessGroup, tuple[int, int] | None] = {}

    def of(self, entry: Entry, everyone: dist.ProcessGroup | None) -> Layout | None:
        """Return how ranks hold what has a number for each of a parameter's elements, where all have their part."""
        if not entry.is_cut or entry.group is None or entry.cut is None or everyone is None:
            return whole_everywhere(entry.shape.numel())
        grid = self._grid(entry.group, everyone)
        if grid is None:
            return None
        shards, inner = grid
        stride = entry.cut.stride
        offset = entry.cut.offset
        if entry.kind.is_complex:
            # Two stored numbers are one of the user's.
            stride //= 2
            offset //= 2
        return Layout(shards, inner, max(stride, 1), offset)

    def between(self, group: dist.ProcessGroup, everyone: dist.ProcessGroup, numel: int) -> Layout | None:
        """Return how ranks hold a tensor of which each rank of a group has an equal share."""
        grid = self._grid(group, everyone)
        if grid is None:
            return None
        shards, inner = grid
        share = -(-numel // shards)
        return Layout(shards, inner, max(share, 1), 0)

    def _grid(self, group: dist.ProcessGroup, everyone: dist.ProcessGroup) -> tuple[int, int] | None:
        if group not in self.grids:
            all_ranks = dist.get_process_group_ranks(everyone)
            members = list(map(all_ranks.index, dist.get_process_group_ranks(group)))
            self.grids[group] = _grid_of(members, len(all_ranks))
        return self.grids[group]


def _grid_of(members: Sequence[int], ranks: int) -> tuple[int, int] | None:
    """Return the number of members and how far they lie apart, if :class:`Layout` can say so."""
    shards = len(members)
    inner = 1
    if shards > 1:
        inner = members[1] - members[0]
    # Ranks along a dimension of a mesh lie equally far apart.
    if inner < 1 or ranks % (shards * inner):
        return None
    layout = Layout(shards, inner, 1, 0)
    _, copy = layout.place(members[0])
    for shard, rank in enumerate(members):
        if layout.rank(shard, copy) != rank:
            return None
    return shards, inner


@dataclass
class Collected:
    """The parts that one rank brings to a checkpoint."""

    parts: Parts = field(default_factory=dict)  # by the tensor's name
    model: ModelInfo = field(default_factory=lambda: ModelInfo({}, {}, {}))  # as in the index; so are the next two
    tied: Names = field(default_factory=dict)
    models: dict[str, list[str]] = field(default_factory=dict)
    groups: dict[str, tuple[str, Any]] = field(default_factory=dict)  # optimizer -> (class, groups as a tree)
    # optimizer -> parameter -> key -> tree, of state that is no tensor
    state: dict[str, dict[str, Tree]] = field(default_factory=dict)
    objects: Tree = field(default_factory=dict)  # name -> tree
    digests: Names = field(default_factory=dict)  # of an object's tree and tensors: do ranks have the same?
    own: dict[str, Parts] = field(default_factory=dict)  # object -> its tensors
    rng: Any = None  # tree of the generators' states, if they are saved
    layouts: Layouts = field(default_factory=Layouts)

    def adopt_own(self, rank: int, alike: Collection[str]) -> None:
        """Add the tensors of objects to the others: once where ranks have the same, else under a name for each rank."""
        for name, own in self.own.items():
            for tensor, part in own.items():
                if name not in alike:
                    self.parts[f"{tensor}@rank{rank}"] = part
                elif rank == 0:
                    self.parts[tensor] = part

    def trees(self, alike: Collection[str]) -> Tree:
        """Return what rank 0 puts into the index for this rank besides tensors."""
        objects = dict(self.objects)
        for name in alike:
            objects.pop(name, None)
        states: dict[str, Tree] = {}
        for name, state in self.state.items():
            states[name] = {}
            for parameter, values in state.items():
                if values:
                    states[name][parameter] = values
        return {"objects": objects, "state": states, "rng": self.rng}


def _part(entry: Entry, stored: Tensor, model: str, layout: Layout | None) -> Part:
    """Return this rank's part of a parameter, or of state that has a number for each of its stored elements."""
    values = entry.flat(stored.detach(), whole=entry.in_order)
    scattered = ""
    if is_scattered(entry):
        scattered = f"{prefix(model)}{entry.name}"
    if entry.kept_as_pairs(stored.dtype):
        if layout is not None:
            layout = layout._replace(stride=2 * layout.stride, offset=2 * layout.offset)
        return Part(stored.dtype, entry.pairs_shape, entry.here, values, scattered, layout)
    dtype = entry.kind.user_dtype(stored.dtype)
    return Part(dtype, tuple(entry.full_shape), entry.user_range, values, scattered, layout)


def is_scattered(entry: Entry) -> bool:
    """Return whether a rank's elements of a parameter are no range of it: the same on every rank."""
    return bool(entry.divided_over) or not entry.in_order


@torch.no_grad()
def _put_in_ranges(collected: Collected, models: Models, channel: Channel) -> None:
    """Turn what is scattered into ranges of the flattened tensor, the only form that is stored. Collective."""
    entries = {}
    for of, model in models.items():
        before = prefix(of)
        backend = model.backend
        for entry in backend.all:
            entries[before + entry.name] = (entry, backend)
    # It is the same on every rank, so that all leave here, or none.
    if not any(is_scattered(entry) for entry, _ in entries.values()):
        return
    local_parts = {}
    local_table = {}
    for name, part in collected.parts.items():
        if part.scattered:
            local_parts[name] = part
            dtype_text = dtype_name(part.dtype)
            local_table[name] = [part.scattered, dtype_text, list(part.shape)]
    # A rank that holds no element of a parameter has no state for it, and takes part all the same.
    everyones = {}
    for table in channel.gather(local_table):
        everyones.update(table)
    # In one order on every rank, since each is gathered.
    for name, (parameter, dtype_text, shape) in sorted(everyones.items()):
        entry, backend = entries[parameter]
        is_here = name in local_parts
        if not is_here and backend.facts.divides != "elements":
            # Nor have the ranks that hold other parts of it: the same rank of data owns all.
            continue
        dtype = BY_NAME[dtype_text]
        empty = Part(dtype, tuple(shape), (0, 0), torch.empty(0, dtype=dtype))
        part = _in_range(entry, local_parts.get(name, empty), backend, collected.layouts)
        if is_here or part.values.numel():
            collected.parts[name] = part


def _in_range(
    entry: Entry,
    part: Part,
    backend: Backend,
    layouts: Layouts,
) -> Part:
    """Return this rank's share of the whole tensor. Collective."""
    device = backend.settings.device
    stored = part.values.to(device)
    if part.dtype.is_complex:
        stored = torch.view_as_real(stored).reshape(-1)
    whole = entry.flat(gather(entry, stored, device), whole=True)
    # Where the engine divides a parameter in the order in which it lies in memory (channels_last, or transposed), a
    # rank holds elements from all over, and keeps as many as before, now successive ones.
    start, stop = part.range
    layout = part.layout
    if entry.divided_over:
        # What other mesh dimensions than data divide is put together, and each rank that has a part of it keeps an
        # equal share.
        shape = list(entry.shape)
        if entry.kind.is_complex and not part.dtype.is_complex:
            shape.append(2)
        whole = entry.put_together(whole.view(shape)).reshape(-1)
        everyone = backend.settings.everyone
        rank, ranks = _rank_of_holders(entry, backend)
        shares = Layout(ranks, 1, max(-(-whole.numel() // ranks), 1), 0)
        start, stop = shares.held(rank, whole.numel())
        layout = None
        if backend.facts.divides == "elements":
            layout = shares
        elif len(entry.divided_over) == 1 and everyone is not None and part.layout is not None:
            layout = layouts.between(entry.divided_over[0], everyone, whole.numel())
    values = whole[start:stop].clone()
    return dataclasses.replace(part, range=(start, stop), values=values, scattered="", layout=layout)


def _rank_of_holders(entry: Entry, backend: Backend) -> tuple[int, int]:
    """Return this rank among those that hold a part of what several mesh dimensions divide, and their number."""
    if backend.facts.divides == "elements":
        return backend.settings.overall_rank, backend.settings.all_ranks
    rank = 0
    ranks = 1
    for group in entry.divided_over:
        rank = rank * group.size() + group.rank()
        ranks *= group.size()
    return rank, ranks


def collect_together(
    work: Callable[[], Collected],
    models: Models,
    channel: Channel,
    timeout: float | None = None,
) -> Collected:
    """Run ``work``, which collects, on every rank, and put all tensors in ranges. Collective."""
    collected: Collected = agree(channel, work, timeout)
    _put_in_ranges(collected, models, channel)
    return collected


def collect(
    models: Models,
    optimizers: Mapping[str, ShardedOptimizer],
    objects: Values,
    rank: int,
    random: Values | None = None,
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
            collected.models[of] = []
    model_names = {id(model): of for of, model in models.items()}
    for name, optimizer in optimizers.items():
        of = model_names[id(optimizer.model)]
        if of:
            collected.models[of].append(name)
        _add_optimizer(collected, optimizer, name, of)
    for name, value in objects.items():
        _add_object(collected, value, name)
    if random is not None:
        collected.rng = _encode(random, "rng", collected.own.setdefault("rng", {}))
    return collected


def _add_optimizer(
    collected: Collected,
    optimizer: ShardedOptimizer,
    name: str,
    model: str,
) -> None:
    # The same on every rank.
    own_groups = described(groups_by_name(optimizer), f"param_groups of optimizer {name!r}")
    groups = _encode(own_groups, f"groups/{name}", collected.parts, everywhere=True)
    collected.groups[name] = (class_name(optimizer.optimizer_class), groups)
    collected.state[name] = {}
    states = []
    shapes_of_states = []
    for entry in optimizer.entries:
        state = state_of(optimizer.inner, entry)
        states.append((entry, state))
        shapes = {}
        for key, value in state.items():
            if isinstance(value, Tensor):
                shapes[key] = value.shape
        shapes_of_states.append((entry, shapes))
    single = counters(shapes_of_states)
    divides = state_divides(optimizer.model.backend, optimizer.inner)
    everyone = optimizer.model.backend.settings.everyone
    for entry, state in states:
        own_entry = state_entry(optimizer.inner, entry)
        layout = None
        # Of what one rank has alone the others know nothing.
        if divides != "owners":
            layout = collected.layouts.of(own_entry, everyone)
        _add_state(collected, name, divides, own_entry, state, single, model, layout)


def _add_object(collected: Collected, value: Any, name: str) -> None:
    state = value.state_dict() if hasattr(value, "state_dict") else value
    own_parts: Parts = {}
    tree = _encode(state, f"objects/{name}", own_parts)
    digest = hashlib.sha256(json.dumps([tree, as_table(own_parts)]).encode())
    for part in own_parts.values():
        digest.update(part.values.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    collected.own[name] = own_parts
    collected.objects[name] = tree
    collected.digests[name] = digest.hexdigest()


# Why a checkpoint does not have a key of the model.
FROZEN = "frozen, and saved with only='trainable'"


def _add_model(
    collected: Collected,
    model: ShardedModule,
    rank: int,
    name: str,
    trainable: bool,
) -> None:
    backend = model.backend
    parts = collected.parts
    before = prefix(name)
    # neuralop's BaseModel puts its constructor's arguments into the state dict; the model that loads has its own.
    raw = dict(raw_state_dict(backend))
    raw.pop(NEURALOP_ARGUMENTS, None)
    frozen = _frozen_names(backend, raw) if trainable else set()
    keys, extra, dropped = collected.model
    # The model's order, with what is no parameter as it is; a hook of the user's may leave some out.
    ordered = []
    for key in dict.fromkeys([*backend.key_order, *raw]):
        if key not in raw:
            continue
        if backend.keys.get(key, key) in frozen:
            dropped[before + key] = FROZEN
        else:
            ordered.append(key)
    shown = set(map(backend.keys.get, ordered))
    for entry in backend.entries.values():
        if entry.name in shown:
            place = f"model/{before}{entry.name}"
            layout = collected.layouts.of(entry, backend.settings.everyone)
            parts[place] = _part(entry, entry.local(), name, layout)
    for key in ordered:
        value = raw[key]
        full_key = before + key
        if key in backend.keys:
            keys[full_key] = f"model/{before}{backend.keys[key]}"
        elif is_plain_tensor(value):
            keys[full_key] = f"model/{full_key}"
            # Buffers may differ between ranks; rank 0's count, as in a state dict.
            if rank == 0:
                parts[f"model/{full_key}"] = Part.of_all(controller_of(model).buffers.for_user(key, value))
        else:
            keys[full_key] = None
            own_parts = parts if rank == 0 else {}
            if is_composite(value):
                value = described(value, full_key)
            extra[full_key] = _encode(value, f"model/{full_key}", own_parts)
    for entry in backend.entries.values():
        if entry.name in frozen:
            continue
        first = before + entry.name
        for slot in entry.slots[1:]:
            collected.tied[before + slot.name] = first


def _frozen_names(backend: Backend, raw: Values) -> set[str]:
    """Return the names of frozen parameters, and the keys of those that the engine does not have."""
    frozen = set()
    for entry in backend.all:
        if not entry.parameter.requires_grad:
            frozen.add(entry.name)
    for key, value in raw.items():
        if value in backend.settings.ignored and not value.requires_grad:
            frozen.add(key)
    return frozen


def counters(states: Iterable[tuple[Entry, Mapping[str, Sequence[int]]]]) -> set[str]:
    """Return the keys of state that is one number for a whole parameter, given the shapes of each one's tensors."""
    single = {"step"}
    for entry, shapes in states:
        # A 0-dim parameter's shape does not tell.
        if entry.shape.numel() <= 1:
            continue
        for key, shape in shapes.items():
            if len(shape) == 0:
                single.add(key)
    return single


def _add_state(
    collected: Collected,
    name: str,
    divides: str,
    entry: Entry,
    state: Values,
    single: Collection[str],
    model: str,
    layout: Layout | None,
) -> None:
    local = entry.local()
    if divides == "elements" and not local.numel():
        # What a rank without elements counts (Adagrad's step stays 0 there) means nothing.
        return
    small: Tree = {}
    collected.state[name][entry.name] = small
    if divides != "elements":
        orders = _orders(entry, state)
        if orders:
            small[ORDERS] = _encode(orders, "orders", {})
    for key, value in state.items():
        if not isinstance(key, str) or "/" in key:
            raise OptimizerError(
                f"state {key!r} of {entry.name!r}: its name in a checkpoint must be a text without '/'"
            )
        place = f"optimizer/{name}/{entry.name}/{key}"
        if not is_plain_tensor(value):
            if divides == "elements":
                check_divisible(entry, key, value)
            small[key] = _encode(described(value, place), place, collected.parts)
        elif value.shape == local.shape and key not in single:
            collected.parts[place] = _part(entry, value, model, layout)
        elif value.dim() and (divides == "elements" or entry.divided_over):
            raise OptimizerError(
                f"state {key!r} of {entry.name!r} has shape {tuple(value.shape)}, its local part has "
                f"{tuple(local.shape)}: it cannot be put together from the ranks' parts; pass whole=True to "
                "fsshard.build_optimizer"
            )
        elif divides != "elements":
            collected.parts[place] = Part.of_all(value.detach(), everywhere=divides == "nothing")
        elif entry.here[0] == 0:
            # Of the ranks that have elements, and a count beside them, the first.
            collected.parts[place] = Part.of_all(value.detach())


# Beside the state of a parameter: key -> the order of its dims in memory, where that is another one than theirs.
ORDERS = "/orders"


def _orders(entry: Entry, state: Values) -> dict[str, list[int]]:
    """Return how tensors lie, since products round by it: eigenvectors (SOAP's) column by column."""
    shape = entry.local().shape
    orders = {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            continue
        if value.shape == shape:
            value = entry.kind.to_user(value)
        order = order_in_memory(value)
        if order:
            orders[key] = list(order)
    return orders


def lying(entry: Entry, value: Tensor, order: Sequence[int]) -> Tensor:
    """Return a state as it is to lie in memory, in an order that :data:`ORDERS` has."""
    if value.shape == entry.local().shape and (entry.kind.order or entry.divided_over):
        return value  # as the engine stores the parameter
    # Pairs of reals stay together.
    return laid(value, [*order, *range(len(order), value.dim())])


def _encode(
    value: Any,
    place: str,
    parts: Parts,
    *,
    everywhere: bool = False,
) -> Any:
    """Return the tree of a value; its tensors become parts, numbered below ``place``, which every rank may have."""
    count = 0

    def put(path: str, tensor: Tensor) -> str:
        nonlocal count
        plain = tensor
        if tensor.layout is torch.strided:
            plain = tensor.detach().resolve_conj().resolve_neg()
        what = ""
        if type(plain) is not Tensor:
            what = type(plain).__name__
        elif plain.layout is not torch.strided or plain.is_meta or plain.is_quantized:
            what = f"{plain.layout} on {plain.device}"
        if what:
            raise CheckpointError(
                f"{path}: a {what}, whose values are not on this rank; copy weights under full_parameters()"
            )
        name = f"{place}/{count}"
        count += 1
        parts[name] = Part.of_all(plain, everywhere=everywhere)
        return name

    return encode(value, put, place)


# ------------------------------------------------------------------------------------------------ who writes what


def told_by(parts: Parts, rank: int, *, by_rule: bool) -> dict[str, list[Any]]:
    """Return the rows of :func:`as_table` that a rank tells the others.

    Where all have a part ``by_rule``, the rank with the first element speaks for them.
    """
    told = {}
    for name, row in as_table(parts).items():
        layout = row.pop()
        if layout is None or not by_rule:
            told[name] = row
        elif rank == layout.rank(layout.shard_of(0), 0):
            told[name] = [*row, layout]
    return told


def divide(
    tables: Sequence[Values],
    call: str,
) -> dict[str, TensorInfo]:
    """Decide which rank writes which elements of which tensor: each once, by a rank that has them.

    Engines differ only in this: a rank holds a range of each flattened tensor. Where that is by a rule, ranks may hold
    the same range (all of DDP, the replicas of HYBRID_SHARD, FairScale's parameters): the bytes of such copies are
    spread evenly over them. What is held by no rule is written by the first that has it, also where ranges overlap.

    Args:
        tables: what each rank tells, :func:`told_by`: of a tensor with a layout one rank, of others all that have some.
        call: in messages.

    Returns:
        The tensors with their pieces: a rule, or a table where ranks hold them by none.

    Raises:
        CheckpointError: ranks have a tensor in another dtype or shape.
    """
    infos: dict[str, TensorInfo] = {}
    layouts: dict[str, Layout] = {}
    pieces: dict[str, Pieces] = {}
    listed: dict[str, dict[Range, int]] = {}
    for rank, table in enumerate(tables):
        for name, (dtype, shape, start, stop, *layout) in table.items():
            here = TensorInfo(dtype, tuple(shape), ())
            info = infos.setdefault(name, here)
            _check_alike(call, name, rank, here, info)
            if layout:
                layouts[name] = Layout(*layout[0])
            elif stop > start:
                # The first rank that has a range writes it.
                listed.setdefault(name, {}).setdefault((start, stop), rank)
    for name, ranges in listed.items():
        own = []
        end = 0
        for (start, stop), rank in sorted(ranges.items()):
            # What is before ``end`` another rank writes.
            start = max(start, end)
            if start < stop:
                key = piece_key(name, infos[name].numel, (start, stop))
                own.append(Piece(rank_file(rank, len(tables)), key, start, stop))
                end = stop
        pieces[name] = tuple(own)
    pieces |= _divisions(layouts, infos, len(tables))
    return {name: info._replace(pieces=pieces.get(name, ())) for name, info in infos.items()}


def _check_alike(
    call: str,
    name: str,
    rank: int,
    here: TensorInfo,
    there: TensorInfo,
) -> None:
    """Raise CheckpointError where two ranks have a tensor in other dtypes or shapes."""
    if (here.dtype, here.shape) != (there.dtype, there.shape):
        raise CheckpointError(
            f"{call}: the ranks disagree on {name}: rank {rank} has {here.dtype} {here.shape}, another "
            f"{there.dtype} {there.shape}"
        )


def _divisions(
    layouts: Mapping[str, Layout],
    infos: Mapping[str, TensorInfo],
    ranks: int,
) -> Iterator[tuple[str, Division]]:
    """Yield the rules of tensors that all ranks hold by one."""
    totals: dict[tuple[int, int], int] = {}
    for name, layout in layouts.items():
        grid = (layout.shards, layout.inner)
        totals[grid] = totals.get(grid, 0) + infos[name].nbytes
    before = dict.fromkeys(totals, 0)
    for name, layout in layouts.items():
        info = infos[name]
        grid = (layout.shards, layout.inner)
        spread = Spread(before[grid], totals[grid])
        before[grid] += info.nbytes
        division = Division(name, info.numel, info.kind.itemsize, ranks, layout, spread)
        yield name, division


def written_by(rank: int, ranks: int, tensors: Mapping[str, TensorInfo]) -> dict[str, Range]:
    """Return the elements that a rank writes of each tensor of which it writes some."""
    file = rank_file(rank, ranks)
    written = {}
    for name, info in tensors.items():
        for piece in pieces_in(info.pieces, file):
            written[name] = (piece.start, piece.stop)
    return written


def check_plan(
    collected: Collected,
    rank: int,
    tensors: Mapping[str, TensorInfo],
    call: str,
) -> None:
    """Raise a CheckpointError unless a rank has of each tensor what the plan of all ranks expects of it. Local."""
    parts = collected.parts
    lacking = []
    for needed in collected.model.keys.values():
        if needed is not None and needed not in tensors:
            lacking.append(needed)
    for name, info in tensors.items():
        part = parts.get(name)
        if part is not None:
            _check_alike(call, name, rank, TensorInfo(dtype_name(part.dtype), part.shape, ()), info)
        if not isinstance(info.pieces, Division):
            if not info.is_whole:
                lacking.append(name)
            continue
        layout = info.pieces.layout
        shard, _ = layout.place(rank)
        start, stop = layout.held(shard, info.numel)
        if start == stop:
            continue
        if part is None or part.range != (start, stop):
            lacking.append(name)
    # Of these the rank that has the first elements told none.
    for name in parts:
        if name not in tensors:
            lacking.append(name)
    if lacking:
        raise CheckpointError(f"{call}: the ranks do not hold all of {some(lacking)}; nothing was saved")


def origin_of(models: Models) -> Origin:
    """Return what writes a checkpoint of models."""
    backends = [model.backend for model in models.values()]
    shape: dict[str, int] = {}
    for backend in backends:
        if backend.settings.model_mesh is not None:
            shape |= backend.settings.model_mesh.shape()
    names = dict.fromkeys(backend.name for backend in backends)
    return Origin(__version__, str(torch.__version__), ", ".join(names), backends[0].settings.all_ranks, shape)


def make_index(
    origin: Origin,
    collected: Collected,
    tensors: dict[str, TensorInfo],
    trees: Sequence[Values],
    alike: Collection[str] = (),
) -> Index:
    """Return the index of what all ranks hold, but for the save's number and files.

    Takes rank 0's ``collected``, what :meth:`Collected.trees` gives on each rank, and the names of the objects that all
    ranks have ``alike``.
    """
    optimizers = {}
    for name, (kind, groups) in collected.groups.items():
        states = [of_rank["state"][name] for of_rank in trees]
        optimizers[name] = OptimizerInfo(kind, groups, _first_of(states))
    objects = {}
    for name, tree in collected.objects.items():
        if name in alike:
            objects[name] = {"all": tree}
        else:
            objects[name] = _per_rank([of_rank["objects"][name] for of_rank in trees])
    rng = None
    if collected.rng is not None:
        rng = _per_rank([of_rank["rng"] for of_rank in trees])
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
        optimizers=optimizers,
        objects=objects,
        rng=rng,
    )


def _first_of(states: Sequence[Mapping[str, Tree]]) -> dict[str, Tree]:
    """Merge ranks' ``{parameter: {key: value}}``: each value is that of the first rank that has it."""
    merged: dict[str, Tree] = {}
    # What comes later counts, so the first rank comes last.
    for state in reversed(states):
        for parameter, values in state.items():
            merged.setdefault(parameter, {}).update(values)
    return merged


def _per_rank(trees: list[Any]) -> dict[str, list[Any]]:
    """Return trees that differ, each with its own rank's tensors."""
    renamed = [_renamed(tree, f"@rank{rank}") for rank, tree in enumerate(trees)]
    return {"per_rank": renamed}


def _renamed(node: Any, suffix: str) -> Any:
    """Append a suffix to the names of a tree's tensors."""
    if isinstance(node, list):
        return [_renamed(item, suffix) for item in node]
    if not isinstance(node, dict):
        return node
    # Nodes of these kinds have the name of a tensor.
    if node.get("$") in ("tensor", "ndarray"):
        return {**node, "v": node["v"] + suffix}
    return {key: _renamed(item, suffix) for key, item in node.items()}


# ------------------------------------------------------------------------------------------------ arguments


def check_call(
    name: str,
    path: object,
    timeout: object,
    **flags: object,
) -> tuple[str, str]:
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
    models: Models,
    optimizer: object,
    call: str,
    averages: Mapping[str, EMA] | None = None,
) -> dict[str, ShardedOptimizer]:
    """Name one optimizer ("optimizer"), a sequence of them ("0", "1", ...), or a mapping (by its keys).

    An average of weights is, in a checkpoint, the state of an optimizer of its name.
    """
    if optimizer is None:
        named = {}
    elif isinstance(optimizer, Mapping):
        named = {str(name): value for name, value in optimizer.items()}
    elif isinstance(optimizer, Sequence):
        named = {str(index): value for index, value in enumerate(optimizer)}
    else:
        named = {"optimizer": optimizer}
    own = set(map(id, models.values()))
    for name, value in named.items():
        if not name or "/" in name:
            raise ConfigurationError(f"{call}: an optimizer cannot be named {name!r}; use a word without '/'")
        if not isinstance(value, ShardedOptimizer) or id(value.model) not in own:
            raise ConfigurationError(
                f"{call}: expected optimizer {name!r} to be this model's, got a {type(value).__name__} of another "
                "model or of none; build it with fsshard.build_optimizer, or hand a live one to fsshard.wrap"
            )
    for name, average in (averages or {}).items():
        if id(average.model) not in own:
            raise ConfigurationError(f"{call}: {name}= is the average of another model")
        if name in named:
            raise ConfigurationError(f"{call}: {name!r} names two things, an optimizer and an average; rename one")
        named[name] = average.held
    return named


def as_called(
    call: str,
    models: Iterable[str],
    optimizer: Any,
    objects: Values,
    **options: Any,
) -> str:
    """Return the call with all that ranks have to agree on, so that they find out where they do not."""
    arguments = []
    if any(models):
        arguments.append(f"{{{quoted(models)}}}")
    if isinstance(optimizer, Mapping):
        names = sorted(str(name) for name in optimizer)
        arguments.append(f"optimizer={{{', '.join(map(repr, names))}}}")
    elif isinstance(optimizer, Sequence):
        arguments.append(f"optimizer=[{len(optimizer)}]")
    elif optimizer is not None:
        arguments.append("optimizer")
    for name in sorted(objects):
        arguments.append(f"{name}=")
    for key, value in options.items():
        arguments.append(f"{key}={value!r}")
    return f"{call[:-1]}, {', '.join(arguments)})"


def named_objects(
    scheduler: Any,
    scaler: Any,
    others: Values,
) -> Tree:
    """Return what is saved besides the model and its optimizers, by name; several with state as one object each."""
    objects = {}
    if scheduler is not None:
        objects["scheduler"] = scheduler
    if scaler is not None:
        objects["scaler"] = scaler
    objects.update(others)
    return {name: as_one(value) for name, value in objects.items()}


def with_loader(state: Values, loader: Any, settings: Settings) -> Tree:
    """Return state by name, with the loader's place in the data among it."""
    if loader is None:
        return dict(state)
    return {"loader": DataPosition(loader, settings), **state}


def check_places(scheduler: Any, scaler: Any, call: str) -> None:
    """Raise unless what stands in the places of a scheduler and a scaler can be one. Local.

    Raises:
        ConfigurationError: names the keyword to use.
    """
    keywords = {LRScheduler: "scheduler", torch.amp.GradScaler: "scaler", EMA: "ema", int: "step"}
    for place, value in (("scheduler", scheduler), ("scaler", scaler)):
        if value is None:
            continue
        # A number is most often that of the step.
        keyword = next((name for kind, name in keywords.items() if isinstance(value, kind)), "NAME")
        if keyword in (place, "NAME") and hasattr(as_one(value), "state_dict"):
            continue
        shown = value if keyword == "step" else "..."
        raise ConfigurationError(
            f"{call}: expected something with state_dict() in the place of {place}, or None, got a "
            f"{type(value).__name__}; pass it by name: {keyword}={shown}"
        )


def take_averages(objects: Tree) -> dict[str, EMA]:
    """Take each :class:`fsshard.EMA` out of ``objects``."""
    averages = {}
    for name, value in list(objects.items()):
        if isinstance(value, EMA):
            averages[name] = objects.pop(name)
    return averages


def as_one(value: Any) -> Any:
    """Return a list or mapping in which all have state, ``scheduler=[warmup, decay]``, as one; all else as it is."""
    if hasattr(value, "state_dict") or not isinstance(value, (Mapping, list, tuple)):
        return value
    members: dict[Any, Any] = {}
    members.update(value if isinstance(value, Mapping) else enumerate(value))
    for member in members.values():
        if isinstance(member, EMA):
            raise ConfigurationError(
                "an fsshard.EMA has a keyword of its own, as in ema=ema, slow=slow_ema; got several"
            )
        # A model or an optimizer is no state, and is refused.
        ours = isinstance(member, (ShardedModule, ShardedOptimizer))
        if ours or not (hasattr(member, "state_dict") and hasattr(member, "load_state_dict")):
            return value
    if members:
        return _Several(members, named=isinstance(value, Mapping))
    return value


@dataclass(eq=False)
class _Several:
    """Several objects with state, as one with the state of all: in a list, or by name."""

    members: Mapping[Any, Any]
    named: bool

    def state_dict(self) -> Any:
        states = {}
        for key, member in self.members.items():
            states[key] = member.state_dict()
        if self.named:
            return states
        return list(states.values())

    def load_state_dict(self, state: Any) -> None:
        saved = None
        if self.named and isinstance(state, Mapping):
            saved = dict(state)
        elif not self.named and isinstance(state, (list, tuple)):
            saved = dict(enumerate(state))
        if saved is None or saved.keys() != self.members.keys():
            expected = f"a list of {len(self.members)}"
            if self.named:
                expected = str(list(self.members))
            raise ConfigurationError(f"{expected} was given, {_described(state)} was saved")
        for key, member in self.members.items():
            member.load_state_dict(saved[key])


def _described(state: object) -> str:
    if isinstance(state, Mapping):
        return str(list(state))
    if isinstance(state, (list, tuple)):
        return f"a {type(state).__name__} of {len(state)}"
    return f"a {type(state).__name__}"
