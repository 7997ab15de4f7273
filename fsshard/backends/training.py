"""One training step through an engine: before the forward, the backward, gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsshard.backends.engine_state import EngineState
from fsshard.errors import UnsupportedByBackend
from fsshard.planning.entries import Entry
from fsshard.torch_private.autograd import functorch_transforms_active, will_execute

__all__ = ["Training", "taking_gradients"]


class Training(EngineState):
    """What an engine is told, and asked, during a training step. The defaults do nothing, or what a bare model does."""

    _flags: list[bool]  # of ``all``: whether the engine trains it
    _deviates = False  # others are trainable in the latest forward than were to the engine

    def before_forward(self, *, training: bool) -> None:
        """Called before each forward through :class:`~fsshard.sharded.module.ShardedModule`."""
        flags = [entry.parameter.requires_grad for entry in self.all]
        self._deviates = flags != self._flags
        # What is frozen for a reference pass without gradients (DPO) has a graph that awaits its backward.
        if self._deviates and torch.is_grad_enabled():
            self._change_trainable(flags)

    def _change_trainable(self, flags: list[bool]) -> None:
        """Let the engine train what takes a gradient now, and what a graph that awaits its backward may reach."""
        if self.pending:
            flags = [now or before for now, before in zip(flags, self._flags, strict=True)]
            if flags == self._flags:
                return
        with taking_gradients(entry.parameter for entry, now in zip(self.all, flags, strict=True) if now):
            self.on_trainable_changed()
        self._flags = flags

    def on_trainable_changed(self) -> None:
        """From now on the engine is to train the parameters that take gradients at this moment."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes within accumulate local gradients without communication."""
        yield

    def finish_backward(self, entries: Iterable[Entry]) -> None:
        """Make the gradients of ``entries`` final. Collective and idempotent; before a step and before clipping."""

    def accumulates(self) -> bool:
        """Whether the graph task that runs adds to parameters' gradients; ``torch.autograd.grad`` does not."""
        # Below a transform of torch.func nothing has a gradient of its own.
        return not functorch_transforms_active() and any(map(_is_accumulated, self._leaves()))

    def _leaves(self) -> Iterator[Tensor]:
        """The tensors to which autograd adds gradients."""
        return (entry.parameter for entry in self.all if entry.parameter.requires_grad)

    def backward_starts(self, *, synchronised: bool) -> None:
        """The backward of a forward through :class:`~fsshard.sharded.module.ShardedModule` begins, in its graph."""

    def derivative_starts(self) -> None:
        """``torch.autograd.grad`` begins to pass through such a forward (in its graph task)."""

    def forward_failed(self) -> None:
        """A forward has raised; what it left half done must not be seen by the next one."""

    def reshard(self) -> None:
        """Put parameters that a forward left whole back to their shards, so that the next one sees what is written."""

    def unused(self, names: Iterable[str]) -> list[str]:
        """Those of ``names`` that are trainable and received no gradient on this rank."""
        chosen = (self.entries[name] for name in names)
        return [e.name for e in chosen if e.parameter.requires_grad and e.parameter.grad is None]

    def zero_grad(self, entries: Iterable[Entry], *, set_to_none: bool) -> None:
        """Drop (or zero) the gradients of ``entries``."""
        for entry in entries:
            if set_to_none:
                entry.parameter.grad = None
            elif entry.parameter.grad is not None:
                entry.parameter.grad.detach().zero_()

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let ``hook(state, bucket)`` of torch's DDP reduce gradients. Local; to be called on all ranks alike."""
        raise UnsupportedByBackend(
            f"register_comm_hook({getattr(hook, '__name__', type(hook).__name__)})",
            self.name,
            "gradients of parameters that other ranks share are summed by wrap(replicated={name: mesh['cp']}), and the "
            "dtype in which they are sent is mixed_precision=fsshard.Precision(reduce=...); or use backend='ddp'",
        )

    def reduce_dtypes(self) -> dict[nn.Parameter, torch.dtype | None]:
        """In which dtype each parameter's gradient is sent, by the plan's units; None is its own."""
        units = {unit.name: unit.reduce_dtype for unit in self.settings.plan.units}
        infos = self.settings.plan.parameters
        return {entry.parameter: units[infos[name].unit] for name, entry in self.entries.items()}

    moves = 0
    """How often the engine has put parameters into other memory since it was made, the same on every rank."""

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

    def owner(self, entry: Entry) -> int | None:
        """The rank of ``entry.group`` that alone has its final gradient and its optimizer state; None: all ranks."""
        return None


@contextlib.contextmanager
def taking_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Context in which those of ``parameters`` that are frozen are trainable."""
    frozen = [parameter.requires_grad_() for parameter in parameters if not parameter.requires_grad]
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _is_accumulated(leaf: Tensor) -> bool:
    """Whether the graph task that runs adds to the gradient of ``leaf``."""
    try:
        return will_execute(torch.autograd.graph.get_gradient_edge(leaf).node)
    except RuntimeError as error:
        if "running autograd.grad()" not in str(error):  # which captures this very leaf (torch 2.13)
            raise
        return False
