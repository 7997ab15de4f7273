"""An optimizer over an engine's parameters, and its state: this rank's part, and the whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from fsshard.backends.shard_access import ShardAccess
from fsshard.backends.training import Training
from fsshard.backends.whole import gather_all
from fsshard.comm.agreement import exchange
from fsshard.errors import OptimizerError
from fsshard.model.nested import has_arrays
from fsshard.planning.entries import Entry

__all__ = ["OptimizerState", "State"]


State = dict[str, Any]


class OptimizerState(ShardAccess, Training):
    """The optimizer and its state. What is written here is for a plain torch optimizer over the engine's parameters."""

    moves = 0
    """How often the engine has put parameters into other memory since it was made, the same on every rank."""

    @property
    def owners_group(self) -> dist.ProcessGroup | None:
        """The ranks among which whole gradients and their optimizer's state are divided: each is on one of them."""
        return self.settings.group

    @classmethod
    def cut_in_two(cls, whole: Tensor, *, in_order: bool = True) -> tuple[Tensor, Tensor] | None:
        """The parts of a parameter as the optimizers of two ranks see them; None where it stays whole. Local.

        For trying an optimizer: cut at a multiple of 64 numbers, as :mod:`fsshard.sharded.optimizer_probe` says. Not
        ``in_order`` are parameters whose dims lie in another order in memory.
        """
        return None

    def new_optimizer(
        self, optimizer_class: type[Optimizer], groups: list[dict[str, Any]], defaults: dict[str, Any]
    ) -> Optimizer:
        """An optimizer over ``entries[...].parameter``; its class comes already able to see complex numbers."""
        return optimizer_class(groups, **defaults)

    def before_closure(self, optimizer: Optimizer) -> None:
        """A closure of ``step`` is about to run forwards, which must see what ``optimizer`` has changed. Collective.

        Args:
            optimizer: over this rank's parts; whether it has changed any is not known.
        """
        self.reshard()

    def optimizer_state(self, optimizer: Optimizer, entry: Entry) -> State:
        """The state of ``entry`` on this rank (tensors shaped as the stored local part, or not per element)."""
        return dict(optimizer.state.get(entry.parameter, {}))

    def set_optimizer_state(self, optimizer: Optimizer, entry: Entry, state: State) -> None:
        """Replace the state of ``entry`` on this rank."""
        if state:
            optimizer.state[entry.parameter] = state
        else:
            optimizer.state.pop(entry.parameter, None)

    def gather_states(self, optimizer: Optimizer, entries: list[Entry]) -> Iterator[tuple[Entry, State]]:
        """Entry by entry the whole state, tensors as stored (real). Collective, so run it to its end on every rank.

        A rank can hold no part of a parameter, and then no state for it; so the ranks first tell each other what
        there is, in one exchange.
        """
        states = [self.optimizer_state(optimizer, entry) for entry in entries]
        tables = exchange(self.settings.group, lambda: list(map(self._describe, entries, states)))
        described: list[dict[str, Any]] = [
            {key: value for found in reversed(column) for key, value in found.items()}
            for column in zip(*tables, strict=True)
        ]
        travelling = (
            (entry, state.get(key), item)
            for entry, state, items in zip(entries, states, described, strict=True)
            for key, item in items.items()
            if isinstance(item, _Travels)
        )
        whole = self._gather_items(travelling)
        for entry, items in zip(entries, described, strict=True):
            yield (
                entry,
                {key: next(whole) if isinstance(item, _Travels) else _unpacked(item) for key, item in items.items()},
            )

    def _describe(self, entry: Entry, state: State) -> dict[str, Any]:
        """Per key either the value itself, or what the others need to know of a tensor that must be sent."""
        local = entry.local()
        if self.divides == "elements" and not local.numel():
            return {}  # what a rank without elements counts (Adagrad's step stays 0 there) means nothing
        found: dict[str, Any] = {}
        for key, value in state.items():
            if _is_per_element(value, local):
                found[key] = _Travels(tuple(value.shape), value.dtype)
            elif self.divides == "elements" and has_arrays(value):
                raise OptimizerError(
                    f"state {key!r} of {entry.name!r} is not one tensor of the shape {tuple(local.shape)} that its "
                    "local part has: it cannot be put together from the ranks' parts; keep tensors shaped like the "
                    "parameter directly in state[parameter], or use backend='fairscale' or 'ddp'"
                )
            else:
                found[key] = _packed(value)
        return found

    def _gather_items(self, items: Iterable[tuple[Entry, Tensor | None, _Travels]]) -> Iterator[Tensor]:
        """The whole tensors of parts of the state, None where this rank has no part."""
        parts = (
            (entry, torch.zeros_like(entry.local(), dtype=item.dtype) if value is None else value)
            for entry, value, item in items
        )
        return gather_all(parts, self.settings.device)

    def scatter_state(self, optimizer: Optimizer, entry: Entry, state: State) -> None:
        """Inverse of :meth:`gather_states`: keep this rank's part of the whole state. No communication."""
        whole = entry.stored_shape
        part = {
            key: entry.take(value).to(entry.local().device, copy=True)
            if isinstance(value, Tensor) and value.shape == whole
            else _clone_if_tensor(value)
            for key, value in state.items()
        }
        self.set_optimizer_state(optimizer, entry, part)


class _Travels(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


class _Number(NamedTuple):
    value: Any
    dtype: torch.dtype


def _packed(value: Any) -> Any:
    """A value of the state, to be sent whole; tensors of one number as that, since tensors take long to pickle."""
    if not isinstance(value, Tensor):
        return value
    return _Number(value.item(), value.dtype) if not value.dim() else value.detach().cpu().clone()


def _unpacked(value: Any) -> Any:
    return torch.tensor(value.value, dtype=value.dtype) if isinstance(value, _Number) else value


def _is_per_element(value: object, local: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == local.shape


def _clone_if_tensor(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
