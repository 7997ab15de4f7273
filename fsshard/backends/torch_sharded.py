"""Base of the FSDP1 and FSDP2 backends: sharded parameters, and zero gradients for unused ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsshard.backends.base import Backend
from fsshard.backends.facts import OWN_FILES, EngineFacts
from fsshard.backends.settings import Settings
from fsshard.complex_params.pairs import real_dtype
from fsshard.errors import UnsupportedByBackend
from fsshard.planning.entries import Entry
from fsshard.planning.torch_settings import HYBRIDS

DIVIDED = EngineFacts(
    divides="elements",
    strategies=("FULL_SHARD", "SHARD_GRAD_OP", *HYBRIDS),
    needs_whole=OWN_FILES,
    hooks_outputs=True,
    adds_in_tree=True,
    shards_integers=True,  # frozen ones, in a unit of their own
)


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
        self.settings = settings
        self.entries = entries
        self.used: set[str] = set()
        # Those whose gradients were dropped, and no backward has come since.
        self._untouched = set(entries)
        # What each hook has found out about nodes.
        self._known: list[tuple[dict[int, str], list[Entry]]] = []
        infos = settings.plan.parameters
        for unit in settings.plan.units:
            # FSDP1 has a flat parameter of what is trained, and one of what is not.
            own: dict[bool, list[Entry]] = {}
            for name in unit.parameters:
                is_trained = infos[name].requires_grad
                own.setdefault(is_trained, []).append(entries[name])
            for together in own.values():
                units[unit.name].register_forward_pre_hook(self._watch(together))

    def _watch(self, own: list[Entry]) -> Callable[..., None]:
        # A hook does not hold self, which its parameter would keep forever.
        used, untouched = self.used, self._untouched
        # Under FSDP1: outputs of the node that divides a unit -> names. They are alike in each forward.
        places: dict[int, str] = {}
        first: list[Entry] = []  # the one whose view leads to that node
        self._known.append((places, first))

        def mark(gradients: Sequence[Tensor | None]) -> None:
            untouched.clear()
            for place, name in places.items():
                if gradients[place] is not None:
                    used.add(name)

        def before_forward(*_: Any) -> None:
            if not torch.is_grad_enabled():
                return
            for entry in first or own:
                tensor = getattr(entry.slots[0].owner, entry.slots[0].stored)
                if not tensor.requires_grad or getattr(tensor, "_fsshard_watched", False):
                    continue
                tensor._fsshard_watched = True
                if tensor.is_leaf:  # FSDP2's, which stay
                    tensor.register_hook(functools.partial(_mark, used, untouched, entry.name))
                    continue
                # FSDP1's are views anew in each forward: one hook for the whole unit, not one for each of them.
                node, place = _dividing_node(tensor)
                if first or not places:
                    node.register_prehook(mark)
                places[place] = entry.name
            if places and not first:
                first.append(next(entry for entry in own if entry.name in places.values()))

        return before_forward

    def trainable_changed(self) -> None:
        """Find out about nodes anew: parameters were frozen or unfrozen."""
        for places, first in self._known:
            places.clear()
            first.clear()

    def unused(self, names: Iterable[str]) -> list[str]:
        """Trainable parameters among ``names`` that received no gradient on this rank since theirs was dropped."""
        unused = []
        for name in names:
            if name not in self.used and self.entries[name].parameter.requires_grad:
                unused.append(name)
        return unused

    def finish(self, entries: Iterable[Entry]) -> None:
        """With ``find_unused_parameters``, drop gradients of parameters that no rank used. Collective."""
        if not self.settings.find_unused_parameters:
            return
        entries = list(entries)
        settings = self.settings
        used = []
        touched = []
        for entry in entries:
            used.append(entry.name in self.used)
            # What no backward has left was set by hand, as torch does to make the state of an optimizer.
            touched.append(entry.name not in self._untouched)
        mask = torch.tensor([used, touched], dtype=torch.uint8).to(settings.device)
        dist.all_reduce(mask, op=dist.ReduceOp.MAX, group=settings.group)
        for entry, is_used, is_touched in zip(entries, *mask.tolist(), strict=True):
            if is_touched and not is_used:
                entry.parameter.grad = None

    def forget(self, entries: Iterable[Entry]) -> None:
        """Note that the gradients of ``entries`` were dropped."""
        names = {entry.name for entry in entries}
        self.used -= names
        self._untouched |= names


def _mark(used: set[str], untouched: set[str], name: str, _: Tensor) -> None:
    untouched.clear()
    used.add(name)


def _dividing_node(view: Tensor) -> tuple[Any, int]:
    """Return the node of autograd that divides a unit's flat parameter, and which of its outputs a view is."""
    node = view.grad_fn
    place = 0
    while node is not None and not node.name().startswith("Split"):
        node, place = node.next_functions[0]
    assert node is not None, "FSDP1 has views of something else than of one flat parameter"
    return node, place


class TorchShardedBackend(Backend):
    """Base of the backends that divide each parameter among ranks."""

    facts: ClassVar[EngineFacts] = DIVIDED
    shard_group: dist.ProcessGroup  # the ranks among which one copy of the parameters is divided
    usage: UsageTracker | None  # None where the engine itself leaves None what got no gradient

    @classmethod
    def check(cls, settings: Settings) -> Settings:
        settings = super().check(settings)
        if settings.cpu_offload and settings.device.type == "cpu":
            # torch 2.13: RuntimeError without an accelerator, from inside the engine
            raise UnsupportedByBackend(
                "cpu_offload=True on a CPU device", cls.name, "leave it off: shards are in host memory already"
            )
        cls._check_unit_dtypes(settings)
        cls._check_compilation(settings)
        empty = [name for name, info in settings.plan.parameters.items() if 0 in info.shape]
        # FSDP2 raises "_chunk_cat expects non-empty tensor", FSDP1 gives no gradient at all (torch 2.13).
        if empty:
            raise UnsupportedByBackend(
                f"parameters without elements ({', '.join(empty[:3])})", cls.name, "remove them, or use backend='ddp'"
            )
        return settings

    @classmethod
    def _check_compilation(cls, settings: Settings) -> None:
        """Refuse CUDA graphs: they read parameters where they were recorded; here each gather allocates them anew."""
        compilation = settings.compilation
        if compilation is None or settings.device.type != "cuda" or not compilation.uses_cuda_graphs:
            return
        raise UnsupportedByBackend(
            f"compile={dict(compilation.keywords)!r}, which records CUDA graphs",
            cls.name,
            "use mode='max-autotune-no-cudagraphs', or backend='ddp'",
        )

    @classmethod
    def _check_unit_dtypes(cls, settings: Settings) -> None:
        """Refuse units of several dtypes ("FSDP expects uniform original parameter dtype", torch 2.13)."""
        for unit in settings.plan.units:
            dtypes = set(map(real_dtype, unit.dtypes))
            has_integers = not all(dtype.is_floating_point for dtype in dtypes)
            if len(dtypes) <= 1 and (cls.facts.shards_integers or not has_integers):
                continue
            names = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)
            where = f"unit {unit.name!r}" if unit.name else "the root unit"
            advice = "put them into modules of their own and pass these in auto_wrap_policy"
            if has_integers:
                advice = "make what is not trained a buffer, module.register_buffer(name, tensor)"
            raise UnsupportedByBackend(
                f"{' and '.join(names)} parameters in {where}",
                cls.name,
                f"{advice}, or use backend='ddp'",
            )

    def finish_backward(self, entries: Iterable[Entry]) -> None:
        if self.usage is not None:
            self.usage.finish(entries)

    def zero_grad(self, entries: Iterable[Entry], *, set_to_none: bool) -> None:
        entries = list(entries)
        super().zero_grad(entries, set_to_none=set_to_none)
        # Zeros are a gradient, as they are for DDP.
        if set_to_none and self.usage is not None:
            self.usage.forget(entries)

    def derivatives_of(self, output: Tensor) -> list[Tensor]:
        used = set() if self.usage is None else set(self.usage.used)
        try:
            return super().derivatives_of(output)
        finally:
            if self.usage is not None:
                self.usage.used &= used  # in place: its hooks have the set

    def before_forward(self, *, training: bool) -> None:
        super().before_forward(training=training)
        if self.usage is not None and self.usage.used and not self.step.local:
            # A gradient dropped by hand. A rank without elements of a parameter has none to see; others speak for it.
            gone = []
            for entry in self.all:
                if entry.parameter.grad is None and entry.local().numel():
                    gone.append(entry)
            self.usage.forget(gone)

    def unused(self, names: Iterable[str]) -> list[str]:
        if self.usage is None:
            return super().unused(names)
        return self.usage.unused(names)
