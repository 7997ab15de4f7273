"""The state of an optimizer over an engine's parameters: this rank's part, and the whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from fsshard.backends.whole import gather_owned, owned
from fsshard.comm.agreement import exchange
from fsshard.errors import OptimizerError
from fsshard.nested import has_arrays
from fsshard.oss.partitioned import local_optimizer
from fsshard.planning.entries import Entry

if TYPE_CHECKING:
    from fsshard.backends.base import Backend

__all__ = ["State", "gather_states", "scatter_state", "set_state", "state_of"]


State = dict[str, Any]


def state_of(optimizer: Optimizer, entry: Entry) -> State:
    """Return the state of ``entry`` on this rank (tensors shaped as the stored local part, or not per element)."""
    return dict(local_optimizer(optimizer).state.get(entry.parameter, {}))


def set_state(backend: Backend, optimizer: Optimizer, entry: Entry, state: State) -> None:
    """Replace the state of ``entry`` on this rank, if it is this rank's."""
    states = local_optimizer(optimizer).state
    if state and owned(backend, entry):
        states[entry.parameter] = state
    else:
        states.pop(entry.parameter, None)


def gather_states(backend: Backend, optimizer: Optimizer, entries: list[Entry]) -> Iterator[tuple[Entry, State]]:
    """Yield entry by entry the whole state, as stored (real). Collective, so run it to its end on every rank.

    A rank can hold no part of a parameter, and then no state for it; so the ranks first tell each other what
    there is, in one exchange.
    """
    states = [state_of(optimizer, entry) for entry in entries]
    tables = exchange(
        backend.settings.group, lambda: [_describe(backend, *one) for one in zip(entries, states, strict=True)]
    )
    described: list[dict[str, Any]] = [
        {key: value for found in reversed(column) for key, value in found.items()}
        for column in zip(*tables, strict=True)
    ]
    travelling = (
        (entry, _sent(backend, entry, state.get(key), item))
        for entry, state, items in zip(entries, states, described, strict=True)
        for key, item in items.items()
        if isinstance(item, _Travels)
    )
    whole = gather_owned(backend, travelling)
    for entry, items in zip(entries, described, strict=True):
        yield (
            entry,
            {key: next(whole) if isinstance(item, _Travels) else _unpacked(item) for key, item in items.items()},
        )


def scatter_state(backend: Backend, optimizer: Optimizer, entry: Entry, state: State) -> None:
    """Inverse of :func:`gather_states`: keep this rank's part of the whole state. No communication."""
    whole = entry.stored_shape
    part = {
        key: entry.take(value).to(entry.local().device, copy=True)
        if isinstance(value, Tensor) and value.shape == whole
        else _clone_if_tensor(value)
        for key, value in state.items()
    }
    set_state(backend, optimizer, entry, part)


def _describe(backend: Backend, entry: Entry, state: State) -> dict[str, Any]:
    """Per key either the value itself, or what the others need to know of a tensor that must be sent."""
    local, divides = entry.local(), backend.facts.divides == "elements"
    if divides and not local.numel():
        return {}  # what a rank without elements counts (Adagrad's step stays 0 there) means nothing
    found: dict[str, Any] = {}
    for key, value in state.items():
        by_owner = backend.facts.divides == "owners" and isinstance(value, Tensor) and value.dim() > 0
        if by_owner or _is_per_element(value, local):
            found[key] = _Travels(tuple(value.shape), value.dtype)
        elif divides and has_arrays(value):
            raise OptimizerError(
                f"state {key!r} of {entry.name!r} is not one tensor of the shape {tuple(local.shape)} that its "
                "local part has: it cannot be put together from the ranks' parts; keep tensors shaped like the "
                "parameter directly in state[parameter], or use backend='fairscale' or 'ddp'"
            )
        else:
            found[key] = _packed(value)
    return found


def _sent(backend: Backend, entry: Entry, value: Tensor | None, item: _Travels) -> Tensor:
    """Return what this rank gives to a whole tensor of the state; room for the owner's where it is another's."""
    if backend.facts.divides == "owners":
        return value if value is not None and owned(backend, entry) else item.empty(backend.settings.device)
    return torch.zeros_like(entry.local(), dtype=item.dtype) if value is None else value


class _Travels(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


class _Number(NamedTuple):
    value: Any
    dtype: torch.dtype


def _packed(value: Any) -> Any:
    """Pack a value of the state to be sent whole; tensors of one number as that, since tensors take long to pickle."""
    if not isinstance(value, Tensor):
        return value
    return _Number(value.item(), value.dtype) if not value.dim() else value.detach().cpu().clone()


def _unpacked(value: Any) -> Any:
    return torch.tensor(value.value, dtype=value.dtype) if isinstance(value, _Number) else value


def _is_per_element(value: object, local: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == local.shape


def _clone_if_tensor(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
