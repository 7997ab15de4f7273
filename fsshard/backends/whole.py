"""Whole tensors, and the whole state of an optimizer, from the parts that ranks hold, whatever the engine.

Where the elements of each parameter lie is in its entry.

Parts of many parameters travel in one collective, since a small tensor costs far more in calls than in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
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
from fsshard.nested import has_arrays, map_containers
from fsshard.oss.partitioned import local_optimizer
from fsshard.planning.entries import Entry

if TYPE_CHECKING:
    from fsshard.backends.base import Backend

State = dict[str, Any]
BATCH_BYTES = 2**20
"""Most bytes of whole tensors that are sent together: what takes longer by itself gains nothing from company."""


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
    return owner is None or entry.group is None or owner == entry.group.rank()


def counts_all_ranks(backend: Backend, entry: Entry) -> bool:
    """Return whether a norm of this rank's stored gradient of ``entry`` is not what the user means by its norm."""
    divided = backend.facts.divides != "nothing" and backend.settings.world_size > 1
    return entry.kind.is_complex or divided or bool(entry.layouts) or not backend.settings.knows_all_ranks


def has_no_shapes(backend: Backend) -> bool:
    """Return whether what a rank holds of a parameter has no shape of its own, on this rank or on another (FSDP1)."""
    # One that happens to lie whole in this rank's flat shard too: what a script does must not depend on the rank.
    return any(entry.cut is not None and entry.cut.buffer for entry in backend.all)


def raw_state_dict(backend: Backend) -> dict[str, Any]:
    """Return the user's keys; stored parameters as they are now, everything else as the model gives it."""
    with backend.bare() as module, raw_state():
        raw = dict(module.state_dict(keep_vars=True))
    # Modules have no parameter where FSDP1 shows them a view of it; which keys there are does not depend on that.
    for key, name in backend.keys.items():
        raw.setdefault(key, backend.entries[name].parameter)
    return raw


def gather_grads(backend: Backend) -> Iterator[tuple[Entry, Tensor | None]]:
    """Yield entry by entry the whole stored gradient on every rank, or None where no rank has one.

    Collective, so run it to its end on every rank.
    """
    settings = backend.settings
    mine = [(entry, entry.grad()) for entry in backend.all]
    present = torch.tensor([g is not None for _, g in mine], dtype=torch.uint8, device=settings.device)
    if settings.group is not None:
        dist.all_reduce(present, op=dist.ReduceOp.MAX, group=settings.group)
    flags: list[int] = present.tolist()
    whole = gather_owned(
        backend,
        (
            (entry, torch.zeros_like(entry.local()) if gradient is None else gradient)
            for (entry, gradient), flag in zip(mine, flags, strict=True)
            if flag
        ),
    )
    for (entry, _), flag in zip(mine, flags, strict=True):
        yield entry, next(whole) if flag else None


def gather_owned(backend: Backend, parts: Iterable[tuple[Entry, Tensor]]) -> Iterator[Tensor]:
    """Gather as :func:`gather_all` does what only owners have, where the engine gives each parameter to one rank."""
    if backend.facts.divides != "owners":
        yield from gather_all(parts, backend.settings.device)
    else:
        yield from _gather_from(backend.owner, parts)


def _gather_from(owner: Callable[[Entry], int | None], parts: Iterable[tuple[Entry, Tensor]]) -> Iterator[Tensor]:
    for batch in collective_batches(parts):
        owners = [owner(entry) for entry, _ in batch]
        yield from from_owners([tensor for _, tensor in batch], owners, batch[0][0].group)


def gather_all(parts: Iterable[tuple[Entry, Tensor]], device: torch.device) -> Iterator[Tensor]:
    """:func:`gather` of many, small ones together. Collective, so run it to its end on every rank."""
    for batch in collective_batches(parts):
        group = batch[0][0].group
        if group is None or not batch[0][0].is_cut:
            yield from (shaped(entry, local.detach().clone()) for entry, local in batch)
            continue
        sizes = [[stop - start for start, stop in (e.part(rank) for e, _ in batch)] for rank in range(group.size())]
        flat = gathered([part for _, part in batch], sizes, group, device)
        yield from (shaped(entry, whole) for (entry, _), whole in zip(batch, flat, strict=True))


def stream(entry: Entry, settings: Settings, *, rank0_only: bool, device: torch.device) -> Tensor | None:
    """Return the whole stored parameter as a new tensor on ``device``; None where it is not kept. Collective.

    With ``rank0_only`` parts are received where they stay: nothing else is allocated.
    """
    group = entry.group
    if not entry.is_cut or group is None:
        kept = not (rank0_only and settings.rank)
        return shaped(entry, entry.local().to(device, copy=True)) if kept else None
    if not rank0_only:
        return gather(entry, entry.local(), settings.device).to(device)
    rank0 = dist.get_process_group_ranks(settings.group)[0]
    if rank0 not in dist.get_process_group_ranks(group):
        return None  # another copy of the same parameters (HYBRID_SHARD)
    mine = entry.local().reshape(-1)
    if dist.get_rank() == rank0:
        return _receive(entry, group, mine, settings.device, device)
    if mine.numel():
        sent = mine.to(settings.device)  # the shard itself, unless cpu_offload keeps it in host memory
        _exchange([dist.P2POp(dist.isend, sent, rank0, group)])
    return None


def _receive(entry: Entry, group: dist.ProcessGroup, mine: Tensor, here: torch.device, device: torch.device) -> Tensor:
    """Receive every rank's part of ``entry``, put together on ``device``; they arrive on ``here``."""
    whole = torch.empty(entry.stored_shape.numel(), dtype=mine.dtype, device=device)
    waited: list[tuple[Tensor, Tensor]] = []  # (where a part arrives, where it belongs)
    operations = []
    for rank, peer in enumerate(dist.get_process_group_ranks(group)):
        start, stop = entry.part(rank)
        place = whole[start:stop]
        if rank == group.rank():
            place.copy_(mine)
        elif stop > start:
            arrives = place if device == here else torch.empty_like(place, device=here)
            waited.append((arrives, place))
            operations.append(dist.P2POp(dist.irecv, arrives, peer, group))
    _exchange(operations)
    for arrives, place in waited:
        if arrives is not place:
            place.copy_(arrives)
    return shaped(entry, whole)


def shaped(entry: Entry, whole: Tensor) -> Tensor:
    """Return the stored tensor of all elements, given in the order in which the engine lays them."""
    if entry.cut is not None and entry.cut.strides is not None:
        return whole.contiguous().as_strided(entry.stored_shape, entry.cut.strides)
    # As it is where it has that shape: reshape() gives dims of size 1 other strides.
    return whole if whole.shape == entry.stored_shape else whole.reshape(entry.stored_shape)


def _exchange(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()


def collective_batches(parts: Iterable[tuple[Entry, Tensor]]) -> Iterator[list[tuple[Entry, Tensor]]]:
    """Successive parts of one dtype whose whole tensors have at most ``BATCH_BYTES`` together; larger ones alone.

    The same on every rank, since it looks at whole tensors only. Sparse tensors are alone.
    """

    def nbytes(pair: tuple[Entry, Tensor]) -> int:
        entry, part = pair
        return entry.stored_shape.numel() * part.element_size() if part.layout is torch.strided else BATCH_BYTES + 1

    return batches(parts, nbytes, BATCH_BYTES, kind=lambda pair: pair[1].dtype)


def gathered(
    parts: Sequence[Tensor], sizes: Sequence[Sequence[int]], group: dist.ProcessGroup, device: torch.device
) -> list[Tensor]:
    """Return whole flat tensors from every rank's parts of them. Collective.

    Args:
        parts: this rank's, all of one dtype.
        sizes: by rank of the group, the number of elements of each of its parts.
        group: who holds the parts.
        device: where they are sent from.
    """
    mine = torch.cat([part.detach().reshape(-1) for part in parts]).to(device)
    assert mine.numel() == sum(sizes[group.rank()])
    width = max(map(sum, sizes))
    sent = mine if mine.numel() == width else torch.cat([mine, mine.new_zeros(width - mine.numel())])
    received = sent.new_empty(group.size() * width)
    dist.all_gather_single(received, sent, group=group)
    total = sum(map(sum, sizes))
    if len(parts) == 1 and all(row[0] == min(width, max(0, total - rank * width)) for rank, row in enumerate(sizes)):
        return [received[:total]]  # there is padding at the end only: no second copy of what may be large
    rows = (received[rank * width :][: sum(row)].split(list(row)) for rank, row in enumerate(sizes))
    return [torch.cat(pieces) for pieces in zip(*rows, strict=True)]


def from_owners(
    tensors: Sequence[Tensor], owners: Sequence[int | None], group: dist.ProcessGroup | None
) -> list[Tensor]:
    """Copies of the owners' tensors, or of this rank's where there is no owner. Collective, once per owner.

    Args:
        tensors: this rank's: of one dtype, of the owners' shapes. As these lie in memory, so do the copies.
        owners: the rank of the group that each comes from.
        group: who takes part; None where nobody owns anything.
    """
    if len(tensors) == 1 and (
        tensors[0].layout is not torch.strided or owners[0] is None or tensors[0].is_contiguous()
    ):
        found = [tensors[0].detach().clone()]
        if owners[0] is not None:
            dist.broadcast(found[0], group=group, group_src=owners[0])
        return found
    # Flattened by index: gloo sends memory as it lies, and a tensor may lie otherwise on another rank (torch 2.13).
    found = list(tensors)
    for owner in sorted({rank for rank in owners if rank is not None}):
        places = [place for place, rank in enumerate(owners) if rank == owner]
        flat = torch.cat([tensors[place].detach().reshape(-1) for place in places])
        dist.broadcast(flat, group=group, group_src=owner)
        for place, piece in zip(places, flat.split([tensors[p].numel() for p in places]), strict=True):
            found[place] = torch.empty_like(tensors[place]).copy_(piece.view(tensors[place].shape))
    return [tensor.detach().clone() if owner is None else tensor for tensor, owner in zip(found, owners, strict=True)]


# ------------------------------------------------------------------------------------------------ optimizers


def states_at_rest(optimizer: Optimizer) -> Any:
    """Return this rank's states by the engine's parameters: real tensors, shaped like the local parts."""
    local: Any = local_optimizer(optimizer)
    getattr(local, "put_to_rest", bool)()  # between steps they lie under what the optimizer was shown
    return local.state


def state_of(optimizer: Optimizer, entry: Entry) -> State:
    """Return the state of ``entry`` on this rank (tensors shaped as the stored local part, or not per element)."""
    return dict(states_at_rest(optimizer).get(entry.parameter, {}))


def whole_owners(optimizer: Any) -> Any:
    """Return who steps each parameter whole (fsshard/sharded/optimizer_whole.py); None where nobody does."""
    return getattr(local_optimizer(getattr(optimizer, "inner", optimizer)), "_fsshard_owners", None)


def state_divides(backend: Backend, optimizer: Optimizer) -> str:
    """Return what ranks divide of the optimizer's state, as :attr:`EngineFacts.divides`."""
    return backend.facts.divides if whole_owners(optimizer) is None else "owners"


def state_owner(backend: Backend, optimizer: Optimizer, entry: Entry) -> int | None:
    """Return the rank of ``entry.group`` that alone has the optimizer's state of ``entry``; None: each has its part."""
    owners = whole_owners(optimizer)
    return backend.owner(entry) if owners is None else owners.owner[entry.name]


def state_entry(optimizer: Optimizer, entry: Entry) -> Entry:
    """Return ``entry`` as this rank's state of it lies: whole, where this rank steps it whole."""
    owners = whole_owners(optimizer)
    return entry if owners is None else owners.mine.get(entry.name, entry)


def owns_state(backend: Backend, optimizer: Optimizer, entry: Entry) -> bool:
    """Return whether this rank has the state of ``entry``, or a part of it."""
    owner = state_owner(backend, optimizer, entry)
    return owner is None or entry.group is None or owner == entry.group.rank()


def state_device(optimizer: Optimizer, entry: Entry) -> torch.device:
    """Return where state of ``entry`` lies, but for counters: beside it, unless the optimizer keeps it elsewhere."""
    return getattr(local_optimizer(optimizer), "_fsshard_state_device", None) or entry.local().device


def set_state(backend: Backend, optimizer: Optimizer, entry: Entry, state: State) -> None:
    """Replace the state of ``entry`` on this rank, if it is this rank's."""
    states = states_at_rest(optimizer)
    states.pop(entry.parameter, None)
    if state and owns_state(backend, optimizer, entry):
        states[entry.parameter] = state


def gather_states(backend: Backend, optimizer: Optimizer, entries: list[Entry]) -> Iterator[tuple[Entry, State]]:
    """Yield entry by entry the whole state, as stored (real). Collective, so run it to its end on every rank.

    A rank can hold no part of a parameter, and then no state for it; so the ranks first tell each other what
    there is, in one exchange.
    """
    states = [state_of(optimizer, entry) for entry in entries]
    divides = state_divides(backend, optimizer)
    tables = exchange(
        backend.settings.group, lambda: [_describe(divides, *one) for one in zip(entries, states, strict=True)]
    )
    described: list[dict[str, Any]] = [
        {key: value for found in reversed(column) for key, value in found.items()}
        for column in zip(*tables, strict=True)
    ]
    travelling = (
        (entry, _sent(backend, optimizer, entry, state.get(key), item))
        for entry, state, items in zip(entries, states, described, strict=True)
        for key, item in items.items()
        if isinstance(item, _Travels)
    )
    whole = gather_all(travelling, backend.settings.device)
    if divides == "owners":
        whole = _gather_from(partial(state_owner, backend, optimizer), travelling)
    for entry, items in zip(entries, described, strict=True):
        yield (
            entry,
            {
                key: next(whole) if isinstance(item, _Travels) else _unpacked(item, backend.settings.device)
                for key, item in items.items()
            },
        )


def scatter_state(backend: Backend, optimizer: Optimizer, entry: Entry, state: State) -> None:
    """Inverse of :func:`gather_states`: keep this rank's part of the whole state. No communication."""
    by_owner, whole = state_divides(backend, optimizer) == "owners", entry.stored_shape
    device = state_device(optimizer, entry)
    part = {
        key: (value if by_owner else entry.take(value)).to(device, copy=True)
        if isinstance(value, Tensor) and value.shape == whole
        else _copied(value, device)
        for key, value in state.items()
    }
    set_state(backend, optimizer, entry, part)


def _describe(kind: str, entry: Entry, state: State) -> dict[str, Any]:
    """Per key either the value itself, or what the others need to know of a tensor that must be sent."""
    local, divides = entry.local(), kind == "elements"
    if divides and not local.numel():
        return {}  # what a rank without elements counts (Adagrad's step stays 0 there) means nothing
    found: dict[str, Any] = {}
    for key, value in state.items():
        is_array = isinstance(value, Tensor) and value.dim() > 0
        by_owner = kind == "owners" and is_array
        if by_owner or (is_array and value.shape == local.shape):
            found[key] = _Travels(tuple(value.shape), value.dtype, order_in_memory(value) if by_owner else ())
        elif divides and has_arrays(value):
            raise OptimizerError(
                f"state {key!r} of {entry.name!r} is not one tensor of the shape {tuple(local.shape)} that its "
                "local part has: it cannot be put together from the ranks' parts; keep tensors shaped like the "
                "parameter directly in state[parameter], or use backend='fairscale' or 'ddp'"
            )
        else:
            found[key] = _packed(value)
    return found


def _sent(backend: Backend, optimizer: Optimizer, entry: Entry, value: Tensor | None, item: _Travels) -> Tensor:
    """Return what this rank gives to a whole tensor of the state; room for the owner's where it is another's."""
    if state_divides(backend, optimizer) == "owners":
        mine = value if owns_state(backend, optimizer, entry) else None
        return item.empty(backend.settings.device) if mine is None else mine.to(backend.settings.device)
    return torch.zeros_like(entry.local(), dtype=item.dtype) if value is None else value


class _Travels(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...]  # of its dims in memory, by which products with it are rounded; () for their own

    def empty(self, device: torch.device) -> Tensor:
        return laid(torch.empty(self.shape, dtype=self.dtype, device=device), self.order)


class _Copied(NamedTuple):
    value: Any
    dtype: torch.dtype
    on_host: bool


def _packed(value: Any) -> Any:
    """Pack a value of the state to be sent whole; tensors of one number as that, since tensors take long to pickle."""
    if not isinstance(value, Tensor):
        return copied(value)
    data = value.detach().cpu().clone() if value.dim() else value.item()
    return _Copied(data, value.dtype, value.device.type == "cpu")


def _unpacked(value: Any, device: torch.device) -> Any:
    """Return what was packed, on ``device`` unless it lay in host memory, as counters of steps do."""
    if not isinstance(value, _Copied):
        return value
    return torch.as_tensor(value.value, dtype=value.dtype, device="cpu" if value.on_host else device)


def copied(value: Any) -> Any:
    """Return tensors and plain containers of them anew, since both ends may change them in place; all else itself."""
    return map_containers(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, value, "plain")


def _copied(value: Any, device: torch.device) -> Any:
    if not isinstance(value, Tensor):
        return copied(value)
    # Factors and histories, which have shapes of their own, lie beside the parameter; where numbers lie is settled.
    return value.detach().to(device if value.dim() else value.device, copy=True)
