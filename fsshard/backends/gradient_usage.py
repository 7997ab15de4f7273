"""Which parameters a backward pass reached, under engines that give zero gradients to the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsshard.backends.settings import Settings
from fsshard.planning.entries import Entry

__all__ = ["UsageTracker"]


class UsageTracker:
    """Marks parameters as their gradient arrives.

    FSDP1 gives a parameter without gradient the zeros of its flat buffer, and FSDP2 does with
    ``set_reduce_scatter_unused_params``; an optimizer with momentum or weight decay would move it, where under DDP it
    stays (its gradient is None). With ``find_unused_parameters=True`` the ranks agree on the parameters that none of
    them used, and these get None here too.

    The gradients are seen on the engine's whole tensors, which exist between a unit's gather and its release: a hook
    at the start of each unit's forward finds them in the modules' attributes.
    """

    def __init__(self, settings: Settings, entries: Mapping[str, Entry], units: Mapping[str, nn.Module]) -> None:
        self.settings, self.entries = settings, entries
        self.used: set[str] = set()
        for unit in settings.plan.units:
            units[unit.name].register_forward_pre_hook(self._watch([entries[name] for name in unit.parameters]))

    def _watch(self, own: list[Entry]) -> Callable[..., None]:
        def before_forward(*_: Any) -> None:
            if not torch.is_grad_enabled():
                return
            for entry in own:
                tensor = getattr(entry.slots[0].owner, entry.slots[0].stored)
                if tensor.requires_grad and not getattr(tensor, "_fsshard_watched", False):
                    tensor.register_hook(self._mark(entry.name))
                    tensor._fsshard_watched = True

        return before_forward

    def _mark(self, name: str) -> Callable[[Tensor], None]:
        used = self.used  # not self: what a hook holds, a parameter on one rank would keep forever

        def hook(_: Tensor) -> None:
            used.add(name)

        return hook

    def unused(self, names: Iterable[str]) -> list[str]:
        """Trainable parameters among ``names`` that received no gradient on this rank since theirs was dropped."""
        return [n for n in names if self.entries[n].parameter.requires_grad and n not in self.used]

    def finish(self, entries: Iterable[Entry]) -> None:
        """With ``find_unused_parameters``, drop gradients of parameters that no rank used. Collective."""
        if not self.settings.find_unused_parameters:
            return
        entries = list(entries)
        mask = torch.tensor([entry.name in self.used for entry in entries], dtype=torch.uint8)
        mask = mask.to(self.settings.device)
        dist.all_reduce(mask, op=dist.ReduceOp.MAX, group=self.settings.group)
        for used, entry in zip(mask.tolist(), entries, strict=True):
            if not used:
                entry.parameter.grad = None

    def forget(self, entries: Iterable[Entry]) -> None:
        """Note that the gradients of ``entries`` were dropped."""
        if self.used:
            self.used -= {entry.name for entry in entries}
