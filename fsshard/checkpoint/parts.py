"""Collects what each rank holds of a model, its optimizers and other objects.

A checkpoint stores nothing but ranges of flattened tensors, in the user's order and dtype, whatever the engine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.backends.base import Backend
from fsshard.backends.whole import check_divisible, gather, raw_state_dict, state_divides, state_entry, state_of
from fsshard.checkpoint.format.division import (
    Layout,
    Range,
    whole_everywhere,
)
from fsshard.checkpoint.format.index import (
    ModelInfo,
    Names,
    Tree,
    Values,
)
from fsshard.checkpoint.format.tensors_file import BY_NAME, Shape, dtype_name
from fsshard.checkpoint.format.tree import encode
from fsshard.checkpoint.models import Models, prefix
from fsshard.comm.agreement import Channel, agree
from fsshard.complex_params.pairs import laid, order_in_memory
from fsshard.errors import CheckpointError, OptimizerError
from fsshard.planning.entries import Entry
from fsshard.sharded.controller import controller_of
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer, groups_by_name
from fsshard.sharded.state_dict import NEURALOP_ARGUMENTS
from fsshard.state_objects import class_name, described, is_composite, is_plain_tensor


@dataclass(frozen=True)
class Part:
    """A tensor, and what of it this rank holds."""

    dtype: torch.dtype  # the user's: complex where the model is
    shape: Shape  # of the whole tensor, the user's
    range: Range  # elements held here, of the flattened tensor
    values: Tensor  # those elements, flat, over the memory where they are
    # Name of the parameter whose division this part follows, if its elements are no range of the flattened tensor;
    # "" if they are. _put_in_ranges() clears it.
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
        """Return the rule by which ranks hold a tensor of a parameter's shape; None if they follow no rule."""
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


def _part_of_parameter(entry: Entry, stored: Tensor, model: str, layout: Layout | None) -> Part:
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
    for model_name, model in models.items():
        before = prefix(model_name)
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
            # All ranks of this gather are one rank of data, which owns the parameter or does not: none comes.
            continue
        dtype = BY_NAME[dtype_text]
        empty = Part(dtype, tuple(shape), (0, 0), torch.empty(0, dtype=dtype))
        part = _with_range(entry, local_parts.get(name, empty), backend, collected.layouts)
        if is_here or part.values.numel():
            collected.parts[name] = part


def _with_range(
    entry: Entry,
    part: Part,
    backend: Backend,
    layouts: Layouts,
) -> Part:
    """Return as many elements of the whole tensor as ``part`` has, or an equal share, now a range. Collective."""
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
    model_names = {}
    for model_name, model in models.items():
        model_names[id(model)] = model_name
        controller_of(model).check_filled()
        _add_model(collected, model, rank, model_name, trainable)
        if model_name:
            collected.models[model_name] = []
    for name, optimizer in optimizers.items():
        model_name = model_names[id(optimizer.model)]
        if model_name:
            collected.models[model_name].append(name)
        _add_optimizer(collected, optimizer, name, model_name)
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
        # State that its owner alone holds follows no rule that the others know.
        if divides != "owners":
            layout = collected.layouts.of(own_entry, everyone)
        _add_state(collected, name, divides, own_entry, state, single, model, layout)


def _add_object(collected: Collected, value: Any, name: str) -> None:
    state = value.state_dict() if hasattr(value, "state_dict") else value
    own_parts: Parts = {}
    tree = _encode(state, f"objects/{name}", own_parts)
    digest = hashlib.sha256(json.dumps([tree, as_table(own_parts)]).encode())
    for part in own_parts.values():
        numbers = part.values.contiguous().cpu().reshape(-1)
        digest.update(numbers.view(torch.uint8).numpy().tobytes())
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
            parts[place] = _part_of_parameter(entry, entry.local(), name, layout)
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
            collected.parts[place] = _part_of_parameter(entry, value, model, layout)
        elif value.dim() and (divides == "elements" or entry.divided_over):
            raise OptimizerError(
                f"state {key!r} of {entry.name!r} has shape {tuple(value.shape)}, its local part has "
                f"{tuple(local.shape)}: it cannot be put together from the ranks' parts; pass whole=True to "
                "fsshard.build_optimizer"
            )
        elif divides != "elements":
            collected.parts[place] = Part.of_all(value.detach(), everywhere=divides == "nothing")
        elif entry.here[0] == 0:
            # Of a counter, the rank with the first element saves its copy.
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
