"""Second derivatives under FSDP2: units stay gathered from the first derivative until the backward of the loss ends.

FSDP2 lets go of a unit's weights at the end of each pass through it, ``torch.autograd.grad``'s too. The graph that
``create_graph=True`` makes reads them again: "setStorage ... out of bounds for storage of size 0" (torch 2.13), with
``reshard_after_forward=False`` as well. So units that such a pass goes through are kept, in forward too, until
gradients of parameters have come, or something is written to the shards. It takes the memory of
``reshard_after_forward=False``, for models with such losses alone.

A loss of nothing but derivatives does not touch the model's output, where FSDP2 learns that a backward begins: nobody
would reduce its gradients. And a unit that several forwards have used is told that its backward is done when that of
one of them is: gradients that come later would wait for the next. So hooks on the gathered parameters tell it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fsshard.torch_private.autograd import keeps_graph, queue_callback
from fsshard.torch_private.fsdp2 import (
    UNSHARDED_PARAM,
    forward_root_of,
    groups_of,
    pre_backward,
    reduce_at_end_of_backward,
    replace_pre_backward,
    state_of,
)

__all__ = ["KeptGathered"]


class KeptGathered:
    """Watches the passes through the units of one FSDP2 model. Until a derivative is taken it costs a comparison."""

    def __init__(self, units: Sequence[Any]) -> None:
        """
        Args:
            units: FSDP2 modules, the root last.
        """
        self._states = [state_of(unit) for unit in units]
        self._before: list[tuple[Any, Any, bool]] | None = None  # what let_go() puts back: (group, mesh, flag)
        self._queued = False
        this = weakref.ref(self)
        for state in self._states:
            replace_pre_backward(state, _watched(pre_backward(state), state, this))

    def keep(self) -> None:
        """From now on no unit is let go."""
        if self._before is None:
            groups = [group for state in self._states for group in groups_of(state)]
            self._before = [(group, group.post_forward_mesh_info, group.reshard_after_backward) for group in groups]
            for group in groups:
                group.post_forward_mesh_info, group.reshard_after_backward = None, False
        for state in self._states:
            for group in groups_of(state):
                self._follow(group)

    def let_go(self) -> None:
        """Go back to what was asked for; the units themselves are left as they are."""
        if self._before is None:
            return
        for group, mesh, flag in self._before:
            group.post_forward_mesh_info, group.reshard_after_backward = mesh, flag
        self._before = None

    def _follow(self, group: Any) -> None:
        """Learn of gradients that come to the gathered parameters of ``group``."""
        this, that = weakref.ref(self), weakref.ref(group)
        for part in group.fsdp_params:
            whole = getattr(part, UNSHARDED_PARAM, None)  # made by the first gather
            if whole is None or not whole.requires_grad or getattr(whole, "_fsshard_followed", False):
                continue
            whole.register_post_accumulate_grad_hook(_arrival(this, that))
            whole._fsshard_followed = True

    def _came(self, group: Any) -> None:
        if self._before is None:
            return
        reduce_at_end_of_backward(self._states[-1], group)
        if not self._queued:
            self._queued = True
            queue_callback(self._end)

    def _end(self) -> None:
        """Called when a backward of the loss has ended; one that keeps its graph will be followed by another."""
        self._queued = False
        if keeps_graph():
            return
        self.let_go()
        for state in self._states:
            for group in groups_of(state):
                group.reshard()


def _watched(torchs: Any, state: Any, this: weakref.ref[KeptGathered]) -> Callable[[Tensor], Tensor]:
    """FSDP2's hook at the start of a pass backwards through a unit."""

    def pre_backward(gradient: Tensor) -> Tensor:
        # With a graph of its own; or inside of a forward that goes on with the root's weights (an energy model's). A
        # recomputed block that stops early leaves one of its units there, never the root.
        running = forward_root_of(state)
        if torch.is_grad_enabled() or running is not None:
            found = this()
            if found is not None and (torch.is_grad_enabled() or running is found._states[-1]):
                found.keep()
        result: Tensor = torchs(gradient)
        return result

    return pre_backward


def _arrival(this: weakref.ref[KeptGathered], that: weakref.ref[Any]) -> Callable[[Tensor], None]:
    def came(_: Tensor) -> None:
        found, group = this(), that()
        if found is not None and group is not None:
            found._came(group)

    return came
