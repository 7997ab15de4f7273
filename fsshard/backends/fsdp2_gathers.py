"""When FSDP2 gathers a unit, and how long it stays gathered: ahead in forward, and longer for second derivatives."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fsshard.torch_private.autograd import current_graph_task_id, keeps_graph, queue_callback
from fsshard.torch_private.fsdp2 import (
    UNSHARDED_PARAM,
    forward_root_of,
    groups_of,
    param_groups,
    pre_backward,
    reduce_at_end_of_backward,
    replace_pre_backward,
    state_of,
)


class ForwardPrefetch:
    """Lets each unit gather the next one while it computes in forward, as FSDP2 itself does in backward only.

    On a GPU the host runs ahead of the device, so the next gather begins in time by itself; on the CPU it begins when
    it is needed. One unit more is there at a time, as under FSDP2's own all-gather, whose buffers live that long.

    The order is that of registration, then that in which the first forward calls them. A wrong guess costs no more than
    a gather: what has arrived is used when its turn comes, and given up at the end of the backward (by FSDP2) or before
    something is written (by :func:`abandon`).

    Args:
        units: FSDP2 modules in the order of registration, the root first.
    """

    def __init__(self, units: Sequence[Any]) -> None:
        self._units = list(units)
        self._called: list[Any] = []
        self._follow(self._units)
        self._handles = [unit.register_forward_pre_hook(self._calls) for unit in self._units]
        self._handles.append(self._units[0].register_forward_hook(self._learns))

    def _calls(self, unit: Any, args: Any) -> None:
        if unit is self._units[0]:
            self._called.clear()  # of a forward that raised
        self._called.append(unit)

    def _learns(self, root: Any, args: Any, output: Any) -> None:
        self._follow(self._called)
        for handle in self._handles:
            handle.remove()
        self._called, self._handles = [], []

    def _follow(self, order: Sequence[Any]) -> None:
        """Let each unit gather the next; none that is called more than once, since another follows it each time."""
        calls = list(map(id, order))
        for unit in self._units:
            unit.set_modules_to_forward_prefetch([])
        for one, following in pairwise(order):
            if calls.count(id(one)) == calls.count(id(following)) == 1:
                one.set_modules_to_forward_prefetch([following])


def gather_ahead(root: Any, args: Any) -> None:
    """Begin the root's all-gather, right before FSDP2's own hook waits for it."""
    # Of a gather that is its own, FSDP2 keeps what arrived until it has copied out the next unit's, in forward (torch
    # 2.13), so that a model of one unit is there twice. Of one that was asked for it lets go at once. Nothing runs
    # at the same time as the root's gather, which this could delay; units further down are still gathered during the
    # computation.
    if not torch.compiler.is_compiling():
        root.unshard(async_op=True)


def abandon(unit: Any) -> None:
    """Discard a gather that was started but not used: its values are older than what is written now."""
    # FSDP2 (torch 2.13) would take it for the next forward's, whatever has become of the parameters since.
    for group in param_groups(unit):
        group.wait_for_unshard()  # does nothing where no gather has begun


class KeptGathered:
    """Keeps units gathered from a first derivative until the loss's backward ends, or something is written to shards.

    FSDP2 lets go of a unit's weights at the end of each pass through it, ``torch.autograd.grad``'s too. The graph that
    ``create_graph=True`` makes reads them again: "setStorage ... out of bounds for storage of size 0", also with
    ``reshard_after_forward=False`` (torch 2.13). It takes the memory of that setting, for models with such losses
    alone; until a derivative is taken it costs a comparison.

    Args:
        units: FSDP2 modules, the root last.
        arrives: is called when gradients come to units that are kept.
    """

    def __init__(self, units: Sequence[Any], arrives: weakref.WeakMethod[Callable[[], None]]) -> None:
        self._arrives = arrives
        self._states = list(map(state_of, units))
        self._before: list[tuple[Any, Any, bool]] | None = None  # what let_go() puts back: (group, mesh, flag)
        # The graph task at whose end they are let go; one that raised calls nothing.
        self._task: int | None = None
        this = weakref.ref(self)
        for state in self._states:
            replace_pre_backward(state, _watched(pre_backward(state), state, this))

    @property
    def keeps(self) -> bool:
        """Return whether units stay gathered."""
        return self._before is not None

    def _groups(self) -> list[Any]:
        """Return FSDP2's groups of parameters of all units."""
        return list(itertools.chain.from_iterable(map(groups_of, self._states)))

    def keep(self) -> None:
        """Keep gathered units from now on."""
        groups = self._groups()
        if self._before is None:
            self._before = [(group, group.post_forward_mesh_info, group.reshard_after_backward) for group in groups]
        for group in groups:
            group.post_forward_mesh_info, group.reshard_after_backward = None, False
            self._follow(group)

    def let_go(self) -> None:
        """Go back to what was asked for; the units themselves are left as they are."""
        for group, mesh, flag in self._before or ():
            group.post_forward_mesh_info, group.reshard_after_backward = mesh, flag
        self._before = None

    def _let_go_at_end(self) -> None:
        """Let the end of this backward, once FSDP2 has reduced there, leave parameters sharded as after any other."""
        if (task := current_graph_task_id()) != self._task:
            self._task = task
            queue_callback(self._end)

    def _end(self) -> None:
        self._task = None
        if keeps_graph():  # another backward will read the weights
            return
        # Not first at the step: a clipping, or a loop over p.grad, would see gathered parameters without gradients.
        self.let_go()
        for group in self._groups():
            group.reshard()

    def _follow(self, group: Any) -> None:
        """Let gradients that come to the gathered parameters of ``group`` be reduced when their backward ends."""
        # A loss of nothing but derivatives does not touch the model's output, where FSDP2 learns that a backward
        # begins. And a unit that several forwards have used is told that its backward is done when that of one of them
        # is: gradients that come later would wait for the next (torch 2.13).
        this, that = weakref.ref(self), weakref.ref(group)

        def came(_: Tensor) -> None:
            kept, group = this(), that()
            if kept is not None and group is not None and kept.keeps:
                if (arrives := kept._arrives()) is not None:
                    arrives()
                reduce_at_end_of_backward(kept._states[-1], group)
                kept._let_go_at_end()

        for part in group.fsdp_params:
            # The first gather makes it.
            whole = getattr(part, UNSHARDED_PARAM, None)
            if whole is not None and whole.requires_grad and not getattr(whole, "_fsshard_followed", False):
                whole.register_post_accumulate_grad_hook(came)
                whole._fsshard_followed = True


def _watched(torchs: Any, state: Any, this: weakref.ref[KeptGathered]) -> Callable[[Tensor], Tensor]:
    """Return FSDP2's hook at the start of a pass backwards through a unit, which keeps units where they are needed."""

    def pre_backward(gradient: Tensor) -> Tensor:
        # With a graph of its own; or inside of a forward that goes on with the root's weights (an energy model's). A
        # recomputed block that stops early leaves one of its units there, never the root.
        running = forward_root_of(state)
        if torch.is_grad_enabled() or running is not None:
            kept = this()
            if kept is not None and (torch.is_grad_enabled() or running is kept._states[-1]):
                kept.keep()
        result: Tensor = torchs(gradient)
        return result

    return pre_backward
