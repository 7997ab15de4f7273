"""Gathers the next FSDP2 unit while one computes in forward, as FSDP2 itself does in backward only.

On a GPU the host runs ahead of the device, so the next gather begins in time by itself; on the CPU it begins when it is
needed. One unit more is there at a time, as under FSDP2's own all-gather, whose buffers live that much longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from fsshard.torch_private.fsdp2 import param_groups

__all__ = ["ForwardPrefetch", "abandon"]


class ForwardPrefetch:
    """Tells each unit which one comes next: first as they were registered, then as the first forward calls them.

    A wrong guess costs no more than a gather: what has arrived is used when its turn comes, and given up at the end of
    the backward (by FSDP2) or before something is written (by :func:`abandon`).
    """

    def __init__(self, units: Sequence[Any]) -> None:
        """
        Args:
            units: FSDP2 modules in the order of registration, the root first.
        """
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
        calls = [id(unit) for unit in order]
        for unit in self._units:
            unit.set_modules_to_forward_prefetch([])
        for one, following in pairwise(order):
            if calls.count(id(one)) == calls.count(id(following)) == 1:
                one.set_modules_to_forward_prefetch([following])


def abandon(unit: Any) -> None:
    """Discard a gather that was started but not used: its values are older than what is written now.

    FSDP2 (torch 2.13) would take it for the next forward's, whatever has become of the parameters since.
    """
    for group in param_groups(unit):
        group.wait_for_unshard()  # does nothing where no gather has begun
