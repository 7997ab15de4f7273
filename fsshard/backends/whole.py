"""Whole tensors, and the whole state of an optimizer, from the parts that ranks hold, whatever the engine.

Where the elements of each parameter lie is in its entry.

Parts of many parameters travel in one collective, since a small tensor costs far more in calls than in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from fsshard.backends.settings import Settings
from fsshard.comm.agreement import batches, exchange
from fsshard.complex_params.pairs import laid, order_in_memory
from fsshard.complex_params.shown import raw_state
from fsshard.errors import OptimizerError
from fsshard.nested import map_containers
from fsshard.oss.partitioned import local_optimizer
from fsshard.planning.entries import Entry
from fsshard.state_objects import Classes, has_arrays, is_plain_tensor, with_fields, with_objects

if TYPE_CHECKING:
    from fsshard.backends.base import Backend

State = dict[str, Any]
# A parameter, and what this rank holds of it, or of a tensor of its shape.
LocalPart = tuple[Entry, Tensor]
# Attribute of an optimizer that has taken a step, or whose state was set: this rank may have no state all the same.
HAS_BEGUN = "_fsshard_has_begun"
# Most bytes of whole tensors that are sent together: what takes longer by itself gains nothing from company.
BATCH_BYTES = 2**20


def gather(entry: Entry, local: Tensor, device: torch.device) -> Tensor:
    """Return the whole stored tensor from every rank's part of it: a new tensor on every rank. Collective.

    Args:
        entry: the parameter.
        local: this rank's part of it, or of a tensor of its shape.
        device: where parts are sent from, and the whole is made, if ranks hold different ones.
    """
    return next(gather_all([(entry, local)], device))


def owned(backend: Backend, entry: Entry) -> bool:
    """Return whether this rank's gradient and state of ``entry`` count: each element must count on one rank."""
    owner = backend.owner(entry)
    if owner is None or entry.group is None:
        return True
    return owner == entry.group.rank()


def counted_over_ranks(backend: Backend) -> list[Entry]:
    """Return the entries of which the norm of this rank's stored gradient is not what the user means by its norm."""
    settings = backend.settings
    is_divided = backend.facts.divides != "nothing" and settings.world_size > 1
    if is_divided or not settings.knows_all_ranks:
        return backend.all
    return [entry for entry in backend.all if entry.kind.is_complex or entry.layouts]


def raw_state_dict(backend: Backend) -> dict[str, Any]:
    """Return the user's keys; stored parameters as they are now, everything else as the model gives it."""
    with backend.bare() as module, raw_state():
        state = module.state_dict(keep_vars=True)
    raw = dict(state)
    # Modules have no parameter where FSDP1 shows them a view of it; which keys there are does not depend on that.
    for key, name in backend.keys.items():
        raw.setdefault(key, backend.entries[name].parameter)
    return raw


def gather_grads(backend: Backend) -> Iterator[tuple[Entry, Tensor | None]]:
    """Yield entry by entry the whole stored gradient on every rank, or None where no rank has one.

    Collective, so run it to its end on every rank.
    """
    settings = backend.settings
    gradients = [entry.grad() for entry in backend.all]
    present = torch.tensor(
        [gradient is not None for gradient in gradients],
        dtype=torch.uint8,
        device=settings.device,
    )
    if settings.group is not None:
        dist.all_reduce(present, op=dist.ReduceOp.MAX, group=settings.group)
    flags: list[int] = present.tolist()

    def parts() -> Iterator[LocalPart]:
        for entry, gradient, flag in zip(backend.all, gradients, flags, strict=True):
            # Every rank takes part in each gather, with zeros where another rank alone has a gradient.
            if flag and gradient is None:
                gradient = torch.zeros_like(entry.local())
            if gradient is not None:
                yield entry, gradient

    whole = gather_owned(backend, parts())
    for entry, flag in zip(backend.all, flags, strict=True):
        gradient = None
        if flag:
            gradient = next(whole)
        yield entry, gradient


def gather_owned(backend: Backend, parts: Iterable[LocalPart]) -> Iterator[Tensor]:
    """Gather as :func:`gather_all` does what only owners have, where the engine gives each parameter to one rank."""
    if backend.facts.divides != "owners":
        yield from gather_all(parts, backend.settings.device)
    else:
        yield from _gather_from(backend.owner, parts)


def _gather_from(
    owner: Callable[[Entry], int | None],
    parts: Iterable[LocalPart],
) -> Iterator[Tensor]:
    for batch in collective_batches(parts):
        entries, tensors = zip(*batch, strict=True)
        owners = list(map(owner, entries))
        group = entries[0].group
        yield from from_owners(tensors, owners, group)


def gather_all(parts: Iterable[LocalPart], device: torch.device) -> Iterator[Tensor]:
    """:func:`gather` of many, small ones together. Collective, so run it to its end on every rank."""
    for batch in collective_batches(parts):
        entries, locals_ = zip(*batch, strict=True)
        group = entries[0].group
        # A batch holds either what is cut or what is not.
        if group is None or not entries[0].is_cut:
            for entry, local in batch:
                yield shaped(entry, local.detach().clone())
            continue
        sizes = []
        for rank in range(group.size()):
            of_rank = []
            for entry in entries:
                start, stop = entry.part(rank)
                of_rank.append(stop - start)
            sizes.append(of_rank)
        flat = gathered(locals_, sizes, group, device)
        for entry, whole in zip(entries, flat, strict=True):
            yield shaped(entry, whole)


def stream(entry: Entry, settings: Settings, device: torch.device) -> Tensor:
    """Return the whole stored parameter as a new tensor on ``device``. Collective."""
    local = entry.local()
    if not entry.is_cut or entry.group is None:
        return shaped(entry, local.to(device, copy=True))
    return gather(entry, local, settings.device).to(device)


def to_rank0(entries: Iterable[Entry], settings: Settings, device: torch.device) -> Iterator[Tensor | None]:
    """Yield each whole stored parameter as a new tensor on ``device``, on rank 0; None on the others.

    Collective, so run it to its end on every rank. Small ones travel together, one message from each rank; what is
    large is received where it stays, and nothing else is allocated.
    """
    parts = ((entry, entry.local()) for entry in entries)
    for batch in collective_batches(parts):
        first, _ = batch[0]
        group = first.group
        if group is None or not first.is_cut:
            for entry, local in batch:
                yield None if settings.rank else shaped(entry, local.to(device, copy=True))
            continue
        rank0, *_ = dist.get_process_group_ranks(settings.group)
        if dist.get_rank() == rank0:
            yield from _receive(batch, group, settings.device, device)
            continue
        # Another copy of the same parameters (HYBRID_SHARD) has nothing to send.
        if rank0 in dist.get_process_group_ranks(group):
            _send(batch, group, rank0, settings.device)
        for _ in batch:
            yield None


def _send(batch: list[LocalPart], group: dist.ProcessGroup, to: int, here: torch.device) -> None:
    """Send this rank's parts as one message."""
    parts = [local.reshape(-1) for _, local in batch]
    message = parts[0]
    # A single one goes as it is, unless cpu_offload keeps it in host memory.
    if len(parts) > 1:
        message = torch.cat(parts)
    if message.numel():
        message = message.to(here)
        _exchange([dist.P2POp(dist.isend, message, to, group)])


def _receive(
    batch: list[LocalPart],
    group: dist.ProcessGroup,
    here: torch.device,
    device: torch.device,
) -> list[Tensor]:
    """Receive every rank's parts, put together on ``device``; they arrive on ``here``."""
    entries, locals_ = zip(*batch, strict=True)
    tensors = []
    for entry in entries:
        size = entry.stored_shape.numel()
        # A batch has one dtype.
        tensors.append(torch.empty(size, dtype=locals_[0].dtype, device=device))
    messages = []  # each with the places of its parts
    operations = []
    for rank, peer in enumerate(dist.get_process_group_ranks(group)):
        places = _places(entries, tensors, rank)
        if rank == group.rank():
            for place, local in zip(places, locals_, strict=True):
                place.copy_(local.reshape(-1))
            continue
        # A single part is received where it stays.
        message = places[0]
        if len(places) > 1 or device != here:
            size = sum(map(Tensor.numel, places))
            message = torch.empty(size, dtype=message.dtype, device=here)
            messages.append((message, places))
        if message.numel():
            operations.append(dist.P2POp(dist.irecv, message, peer, group))
    _exchange(operations)
    for message, places in messages:
        start = 0
        for place in places:
            stop = start + place.numel()
            place.copy_(message[start:stop])
            start = stop
    return list(map(shaped, entries, tensors))


def _places(entries: Sequence[Entry], tensors: list[Tensor], rank: int) -> list[Tensor]:
    """Return the part of each flat tensor that this rank of the group has."""
    places = []
    for entry, whole in zip(entries, tensors, strict=True):
        start, stop = entry.part(rank)
        places.append(whole[start:stop])
    return places


def shaped(entry: Entry, whole: Tensor) -> Tensor:
    """Return the stored tensor of all elements, given in the order in which the engine lays them."""
    cut = entry.cut
    if cut is not None and cut.strides is not None:
        return whole.contiguous().as_strided(entry.stored_shape, cut.strides)
    # As it is where it has that shape: reshape() gives dims of size 1 other strides.
    if whole.shape == entry.stored_shape:
        return whole
    return whole.reshape(entry.stored_shape)


def _exchange(operations: list[dist.P2POp]) -> None:
    if not operations:
        return
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def collective_batches(parts: Iterable[LocalPart]) -> Iterator[list[LocalPart]]:
    """Successive parts of one dtype whose whole tensors have at most ``BATCH_BYTES`` together; larger ones alone.

    The same on every rank, since it looks at whole tensors only. Sparse tensors are alone.
    """

    def nbytes(pair: LocalPart) -> int:
        entry, part = pair
        if part.layout is not torch.strided:
            return BATCH_BYTES + 1
        return entry.stored_shape.numel() * part.element_size()

    def kind(pair: LocalPart) -> tuple[torch.dtype, bool]:
        entry, part = pair
        return part.dtype, entry.is_cut

    return batches(parts, nbytes, BATCH_BYTES, kind)


def gathered(
    parts: Sequence[Tensor],
    sizes: Sequence[Sequence[int]],
    group: dist.ProcessGroup,
    device: torch.device,
) -> list[Tensor]:
    """Return whole flat tensors from every rank's parts of them. Collective.

    Args:
        parts: this rank's, all of one dtype.
        sizes: by rank of the group, the number of elements of each of its parts.
        group: who holds the parts.
        device: where they are sent from.
    """
    vectors = [part.detach().reshape(-1) for part in parts]
    sent = torch.cat(vectors).to(device)
    rank = group.rank()
    counts = list(map(sum, sizes))
    # The collective takes as much from every rank.
    width = max(counts)
    missing = width - counts[rank]
    assert sent.numel() + missing == width
    if missing:
        sent = torch.cat([sent, sent.new_zeros(missing)])
    elements = group.size() * width
    received = sent.new_empty(elements)
    dist.all_gather_single(received, sent, group=group)
    if len(parts) == 1:
        total = sum(counts)
        left = total
        is_padded_behind = True
        for count in counts:
            is_padded_behind &= count == min(width, left)
            left -= count
        if is_padded_behind:
            # No second copy of what may be large.
            return [received[:total]]
    rows = []
    for row, count, padded in zip(sizes, counts, received.split(width), strict=True):
        of_rank = padded[:count]
        rows.append(of_rank.split(list(row)))
    return list(map(torch.cat, zip(*rows, strict=True)))


def from_owners(
    tensors: Sequence[Tensor],
    owners: Sequence[int | None],
    group: dist.ProcessGroup | None,
) -> list[Tensor]:
    """Return copies of the owners' tensors, or of this rank's where there is no owner. Collective, once per owner.

    Args:
        tensors: this rank's: of one dtype, of the owners' shapes. As these lie in memory, so do the copies.
        owners: the rank of the group that each comes from.
        group: who takes part; None where nobody owns anything.
    """
    copies = [tensor.detach().clone() for tensor in tensors]
    first = copies[0]
    # A sparse tensor travels as it is.
    if len(copies) == 1 and (first.layout is not torch.strided or first.is_contiguous()):
        if owners[0] is not None:
            dist.broadcast(first, group=group, group_src=owners[0])
        return copies
    # Flattened by index: gloo sends memory as it lies, and a tensor may lie otherwise on another rank (torch 2.13).
    by_owner: dict[int, list[Tensor]] = {}
    for copy, owner in zip(copies, owners, strict=True):
        if owner is not None:
            by_owner.setdefault(owner, []).append(copy)
    # Every rank broadcasts in the order of owners.
    for owner, of_owner in sorted(by_owner.items()):
        flat = torch.cat([copy.reshape(-1) for copy in of_owner])
        dist.broadcast(flat, group=group, group_src=owner)
        start = 0
        for copy in of_owner:
            stop = start + copy.numel()
            part = flat[start:stop]
            copy.copy_(part.view(copy.shape))
            start = stop
    return copies


# ------------------------------------------------------------------------------------------------ optimizers


def states_at_rest(optimizer: Optimizer) -> Any:
    """Return this rank's states by the engine's parameters: real tensors, shaped like the local parts."""
    local = local_optimizer(optimizer)
    # Between steps they lie under what the optimizer was shown.
    if hasattr(local, "put_to_rest"):
        local.put_to_rest()
    return local.state


def state_of(optimizer: Optimizer, entry: Entry) -> State:
    """Return the state of ``entry`` on this rank (tensors shaped as the stored local part, or not per element)."""
    states = states_at_rest(optimizer)
    return dict(states.get(entry.parameter, {}))


def whole_owners(optimizer: Any) -> Any:
    """Return who steps each parameter whole (fsshard/sharded/optimizer_whole.py); None where nobody does."""
    inner = getattr(optimizer, "inner", optimizer)
    return getattr(local_optimizer(inner), "_fsshard_owners", None)


def state_divides(backend: Backend, optimizer: Optimizer) -> str:
    """Return what ranks divide of the optimizer's state, as :attr:`EngineFacts.divides`."""
    return backend.facts.divides if whole_owners(optimizer) is None else "owners"


def state_owner(backend: Backend, optimizer: Optimizer, entry: Entry) -> int | None:
    """Return the rank of ``entry.group`` that alone has the optimizer's state of ``entry``; None: each has its part."""
    owners = whole_owners(optimizer)
    if owners is None:
        return backend.owner(entry)
    owner: int | None = owners.owner[entry.name]
    return owner


def state_entry(optimizer: Optimizer, entry: Entry) -> Entry:
    """Return ``entry`` as this rank's state of it lies: whole, where this rank steps it whole."""
    owners = whole_owners(optimizer)
    return entry if owners is None else owners.mine.get(entry.name, entry)


def owns_state(backend: Backend, optimizer: Optimizer, entry: Entry) -> bool:
    """Return whether this rank has the state of ``entry``, or a part of it."""
    owner = state_owner(backend, optimizer, entry)
    if owner is None or entry.group is None:
        return True
    return owner == entry.group.rank()


def state_device(optimizer: Optimizer, entry: Entry) -> torch.device:
    """Return where state of ``entry`` lies, but for counters: beside it, unless the optimizer keeps it elsewhere."""
    local = local_optimizer(optimizer)
    device = getattr(local, "_fsshard_state_device", None)
    return device or entry.local().device


def set_state(
    backend: Backend,
    optimizer: Optimizer,
    entry: Entry,
    state: State,
    classes: Classes = MappingProxyType({}),
) -> None:
    """Replace the state of ``entry`` on this rank, if it is this rank's; objects in it are filled where they are.

    ``classes`` are those of objects that are not there yet.
    """
    vars(optimizer)[HAS_BEGUN] = True
    states = states_at_rest(optimizer)
    before = states.pop(entry.parameter, {})
    if state and owns_state(backend, optimizer, entry):
        device = state_device(optimizer, entry)
        states[entry.parameter] = with_objects(state, before, classes, device)


def gather_states(
    backend: Backend,
    optimizer: Optimizer,
    entries: list[Entry],
) -> Iterator[tuple[Entry, State]]:
    """Yield entry by entry the whole state, as stored (real). Collective, so run it to its end on every rank.

    A rank can hold no part of a parameter, and then no state for it; so the ranks first tell each other what
    there is, in one exchange.
    """
    states = [state_of(optimizer, entry) for entry in entries]
    divides = state_divides(backend, optimizer)
    group = backend.settings.group
    device = backend.settings.device
    describe = partial(_describe, divides)
    tables = exchange(group, lambda: list(map(describe, entries, states)))
    descriptions = []
    for of_ranks in zip(*tables, strict=True):
        items = {}
        # The first rank that knows a key counts.
        for of_rank in reversed(of_ranks):
            items.update(of_rank)
        descriptions.append(items)

    def parts() -> Iterator[LocalPart]:
        for entry, state, items in zip(entries, states, descriptions, strict=True):
            for key, item in items.items():
                if isinstance(item, _Travels):
                    yield entry, _sent(backend, optimizer, entry, state.get(key), item)

    if divides == "owners":
        whole = _gather_from(partial(state_owner, backend, optimizer), parts())
    else:
        whole = gather_all(parts(), device)
    for entry, items in zip(entries, descriptions, strict=True):
        state = {}
        for key, item in items.items():
            if isinstance(item, _Travels):
                state[key] = next(whole)
            else:
                state[key] = _unpacked(item, device)
        yield entry, state


def scatter_state(backend: Backend, optimizer: Optimizer, entry: Entry, state: State) -> None:
    """Inverse of :func:`gather_states`: keep this rank's part of the whole state. No communication."""
    by_owner = state_divides(backend, optimizer) == "owners"
    device = state_device(optimizer, entry)
    part = {}
    for key, value in state.items():
        if is_plain_tensor(value) and value.shape == entry.stored_shape:
            own = value if by_owner else entry.take(value)
            part[key] = own.to(device, copy=True)
        else:
            part[key] = _copied(value, device)
    set_state(backend, optimizer, entry, part)


def _describe(divides: str, entry: Entry, state: State) -> State:
    """Per key either the value itself, or what the others need to know of a tensor that must be sent."""
    local = entry.local()
    if divides == "elements" and not local.numel():
        # What a rank without elements counts (Adagrad's step stays 0 there) means nothing.
        return {}
    items = {}
    for key, value in state.items():
        is_array = is_plain_tensor(value) and value.dim() > 0
        if is_array and divides == "owners":
            items[key] = _Travels(value.shape, value.dtype, order_in_memory(value))
        elif is_array and value.shape == local.shape:
            items[key] = _Travels(value.shape, value.dtype, ())
        else:
            if divides == "elements":
                check_divisible(entry, key, value)
            items[key] = _packed(value)
    return items


def check_divisible(entry: Entry, key: str, value: Any) -> None:
    """Raise OptimizerError for state of a shard that has arrays and is not one tensor of the shard's shape."""
    if has_arrays(value):
        raise OptimizerError(
            f"state {key!r} of {entry.name!r} is not one tensor of the shape {tuple(entry.local().shape)} that its "
            "local part has: it cannot be put together from the ranks' parts; keep tensors shaped like the "
            "parameter directly in state[parameter], pass whole=True to fsshard.build_optimizer, or use "
            "backend='fairscale' or 'ddp'"
        )


def _sent(
    backend: Backend,
    optimizer: Optimizer,
    entry: Entry,
    value: Tensor | None,
    item: _Travels,
) -> Tensor:
    """Return what this rank gives to a whole tensor of the state; room for the owner's where it is another's."""
    if state_divides(backend, optimizer) == "owners":
        device = backend.settings.device
        if value is not None and owns_state(backend, optimizer, entry):
            return value.to(device)
        room = torch.empty(item.shape, dtype=item.dtype, device=device)
        return laid(room, item.order)
    if value is None:
        return torch.zeros_like(entry.local(), dtype=item.dtype)
    return value


class _Travels(NamedTuple):
    """A tensor of the state that is sent by itself, and not with its description."""

    shape: torch.Size
    dtype: torch.dtype
    # Of its dims in memory, by which products with it are rounded; () for their own.
    order: tuple[int, ...]


class _Packed(NamedTuple):
    """A tensor of the state that is sent with its description."""

    value: Any
    dtype: torch.dtype
    on_host: bool


def _packed(value: Any) -> Any:
    """Pack a value of the state to be sent whole; tensors of one number as that, since tensors take long to pickle."""
    if not is_plain_tensor(value):
        return copied(value)
    number = value.detach().cpu().clone() if value.dim() else value.item()
    on_host = value.device.type == "cpu"
    return _Packed(number, value.dtype, on_host)


def _unpacked(value: Any, device: torch.device) -> Any:
    """Return what was packed, on ``device`` unless it lay in host memory, as counters of steps do."""
    if not isinstance(value, _Packed):
        return value
    if value.on_host:
        device = torch.device("cpu")
    return torch.as_tensor(value.value, dtype=value.dtype, device=device)


def copied(value: Any) -> Any:
    """Return tensors, plain containers of them and objects anew, since both ends may change them; all else itself."""

    def copy_leaf(leaf: Any) -> Any:
        if is_plain_tensor(leaf):
            return leaf.detach().clone()
        return with_fields(leaf, copied)

    return map_containers(copy_leaf, value, "plain")


def _copied(value: Any, device: torch.device) -> Any:
    if not is_plain_tensor(value):
        return copied(value)
    # Factors and histories, which have shapes of their own, lie beside the parameter; where numbers lie is settled.
    if not value.dim():
        device = value.device
    return value.detach().to(device, copy=True)
