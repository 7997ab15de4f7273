"""Checks that parameters which several ranks along a mesh dimension hold are the same there, in value and in gradient.

A parameter of which nobody has said anything is taken as held alike by all ranks along the other dimensions, with the
same gradient: norms next to tensor-parallel layers are so. Where that is not true training goes wrong without a word,
each rank with a model of its own; so it is looked at, the values once, before anything is changed, and the gradients
at the first step.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from fsshard.comm.agreement import broadcast_tensors, fingerprint, per_rank
from fsshard.complex_params.flattened import stored_in
from fsshard.complex_params.layouts import HandSplit, Layout, Shared
from fsshard.complex_params.slots import ModuleTable, ParameterSlot
from fsshard.errors import ConfigurationError, GradientError, ModelError, UnsupportedByBackend
from fsshard.parallel.model_mesh import Axis, ModelMesh, check_asked_alike
from fsshard.planning.entries import Entry

SAY = (
    "name it in replicated= where the ranks share it and each has a part of its gradient, or in sharded= where each "
    "has a part of it"
)
LOOKS = 20
"""Steps at which gradients are compared that have told nothing so far: those of parameters that are never used."""
RELATIVE, OF_ALL = 1e-2, 1e-6
"""By how much norms of one gradient may differ between ranks: by rounding, as a share of it, and of the whole norm."""


def layouts_by_name(slots: Iterable[ParameterSlot], mesh: ModelMesh) -> dict[str, tuple[Layout, ...]]:
    """Return what each parameter is along other dimensions, by its first name."""
    found: dict[str, tuple[Layout, ...]] = {}
    known: set[int] = set()
    for slot in slots:
        if id(slot.parameter) not in known:
            known.add(id(slot.parameter))
            own = () if slot.kind.layout is None else (slot.kind.layout,)
            found[slot.name] = (*own, *mesh.layouts.get(slot.name, ()))
    return found


def _spoken_for(layouts: Sequence[Layout], axis: Axis) -> bool:
    groups = [group for layout in layouts for group in (*layout.divides, *layout.shares)]
    return any(tuple(dist.get_process_group_ranks(group)) == axis.ranks for group in groups)


def check_same_on_mesh(table: ModuleTable, slots: Sequence[ParameterSlot], mesh: ModelMesh, data_rank: int) -> None:
    """Raise on every rank unless all say the same of parameters, and hold alike what all are to hold. Collective."""
    check_asked_alike(mesh, [slot.name for slot in slots])
    check_same_values(slots, mesh, data_rank)
    kept = set(table.root.state_dict(keep_vars=True))
    check_same_buffers({n: b for n, b in table.buffers().items() if n in kept}, mesh, data_rank)


def check_same_values(slots: Sequence[ParameterSlot], mesh: ModelMesh, data_rank: int) -> None:
    """Raise on every rank where a parameter that is held alike by all has different values. Collective.

    Only rank 0's of data count, which the others get.
    """
    _check_real(slots, mesh)
    layouts = layouts_by_name(slots, mesh)
    _check_even(slots, layouts, mesh)
    first: dict[str, Tensor] = {}
    for slot in slots:
        if slot.name in layouts:
            first.setdefault(slot.name, slot.parameter)
    sums = {name: int(fingerprint(parameter)) for name, parameter in first.items() if not parameter.is_meta}
    for axis in mesh.axes:
        alike = [name for name in sums if not _spoken_for(layouts[name], axis)]
        mine = None if data_rank else {name: sums[name] for name in alike}
        _check_alike(
            mesh, axis, mine,
            "parameter {name!r} has different values on ranks {first} and {rank}, along mesh dimension "
            f"{{axis!r}}, and wrap was not told how they share it: {SAY}; or start both ranks from the same seed if "
            "they should hold the same",
        )  # fmt: skip


def _check_real(slots: Iterable[ParameterSlot], mesh: ModelMesh) -> None:
    meta = next((slot.name for slot in slots if slot.parameter.is_meta), None)
    for name in filter(None, per_rank(mesh.group, meta)):
        raise ModelError(
            f"parameter {name!r} is on the meta device on some rank, and the model is on a mesh of several dimensions: "
            "what ranks along them hold cannot be compared, nor shared; give the model its values before wrap"
        )


def _check_even(slots: Sequence[ParameterSlot], layouts: Mapping[str, Sequence[Layout]], mesh: ModelMesh) -> None:
    """Raise on every rank where parts that were cut by hand have several shapes."""
    mine: dict[str, tuple[int, ...]] = {}
    for slot in slots:
        if any(isinstance(layout, HandSplit) for layout in layouts.get(slot.name, ())):
            mine[slot.name] = tuple(slot.kind.user_shape(slot.parameter.shape))
    shapes = per_rank(mesh.group, mine)
    for rank, other in enumerate(shapes):
        unlike = [name for name, shape in other.items() if shapes[0].get(name) != shape]
        if unlike:
            raise ModelError(
                f"sharded: parts of {unlike[0]!r} have the shapes {shapes[0].get(unlike[0])} on rank 0 and "
                f"{other[unlike[0]]} on rank {rank}; parts that you split yourself must be of one shape (DTensors "
                "need not)"
            )


def check_even_dtensors(slots: Iterable[ParameterSlot], backend: type[Any]) -> None:
    """Raise for DTensors in unequal parts where an engine gives each parameter to a rank by its size. Local."""
    if backend.facts.divides != "owners":
        return
    for slot in slots:
        layout = slot.kind.layout
        if layout is None:
            continue
        for at, placed in enumerate(layout.placements):
            if placed.is_shard() and layout.shape[placed.dim] % layout.mesh.size(at):
                raise UnsupportedByBackend(
                    f"the DTensor {slot.name!r} of shape {tuple(layout.shape)} in unequal parts along dim {placed.dim}",
                    backend.name,
                    "use backend='fsdp2', 'fsdp' or 'ddp', or a size that its mesh dimension divides",
                )


def check_same_buffers(buffers: Mapping[str, Tensor], mesh: ModelMesh, data_rank: int) -> None:
    """Raise on every rank where buffers of the state dict differ along other dimensions than data. Collective.

    One of them alone would be saved. Over data rank 0's count.
    """
    mine = (
        None
        if data_rank
        else {name: int(fingerprint(buffer)) for name, buffer in buffers.items() if not buffer.is_meta}
    )
    for axis in mesh.axes:
        _check_alike(
            mesh, axis, mine,
            "buffer {name!r} differs between ranks {first} and {rank}, along mesh dimension {axis!r}, and a checkpoint "
            "has one of it: register it with persistent=False if it can be made anew, or keep it alike on these ranks",
        )  # fmt: skip


def _check_alike(mesh: ModelMesh, axis: Axis, mine: Mapping[str, int] | None, told: str) -> None:
    """Raise on every rank of the mesh where sums of one name differ along an axis; ranks with None are left out."""
    found: list[Mapping[str, int] | None] = per_rank(axis.group, mine)
    first, message = found[0], None
    for rank, sums in zip(axis.ranks, found, strict=True):
        unlike = [name for name, value in (sums or {}).items() if first is not None and first.get(name) != value]
        if unlike and message is None:
            message = told.format(name=unlike[0], rank=rank, first=axis.ranks[0], axis=axis.name)
    for each in filter(None, per_rank(mesh.group, message)):
        raise ModelError(each)


def send_values(table: ModuleTable, group: dist.ProcessGroup, mesh: ModelMesh | None) -> None:
    """Give all ranks of data rank 0's values; then those that share a parameter the first one's. Collective."""
    if group.size() > 1:
        stored = (p for module in table.modules.values() for p in stored_in(module).values() if p is not None)
        everything = [*{id(parameter): parameter for parameter in stored}.values(), *table.buffers().values()]
        broadcast_tensors([tensor for tensor in everything if not tensor.is_meta], group)
    if mesh is None:
        return
    slots = list(table.slots())
    layouts = layouts_by_name(slots, mesh)
    held = {slot.name: slot for slot in reversed(slots) if slot.name in layouts}
    groups: dict[dist.ProcessGroup, list[Tensor]] = {}
    for name, slot in sorted(held.items()):
        for layout in layouts[name]:
            for shared in layout.shares:
                if shared.size() > 1 and not slot.parameter.is_meta:
                    groups.setdefault(shared, []).append(slot.parameter)
    for shared, tensors in groups.items():
        broadcast_tensors(tensors, shared)


class SameGradients:
    """Compares the norms of gradients that should be the same along mesh dimensions, until each has been seen once.

    Args:
        entries: the model's parameters.
        mesh: the dimensions.
        norm: the norm of one parameter's final gradient over data. Collective over data.
    """

    def __init__(self, entries: Iterable[Entry], mesh: ModelMesh, norm: Callable[[Entry], Tensor]) -> None:
        entries = list(entries)
        self._left = {
            axis: {entry.name for entry in entries if not _spoken_for(entry.layouts, axis)} for axis in mesh.axes
        }
        self._norm, self._group, self._tries = norm, mesh.group, LOOKS

    def check(self, entries: Iterable[Entry]) -> None:
        """Raise GradientError where they differ. Collective over all ranks of the mesh.

        A gradient of zeros, or one that overflowed, tells nothing: it is looked at again at the next step, so often.
        """
        waiting = set().union(*self._left.values())
        trained = [entry for entry in entries if entry.parameter.requires_grad]
        if not any(entry.name in waiting for entry in trained) or not self._tries:
            return
        self._tries -= 1
        norms = {entry.name: float(self._norm(entry)) for entry in trained}
        whole = sum(value**2 for value in norms.values() if math.isfinite(value)) ** 0.5
        for axis, left in self._left.items():
            found = per_rank(axis.group, {name: value for name, value in norms.items() if name in left})
            told = {name for name in found[0] if _tells([each[name] for each in found])}
            message = _differing_norms(axis, [{name: each[name] for name in told} for each in found], whole)
            for each in filter(None, per_rank(self._group, message)):
                raise GradientError(each)
            left -= told


def _tells(norms: Sequence[float]) -> bool:
    return all(math.isfinite(norm) for norm in norms) and max(norms) > 0


def _differing_norms(axis: Axis, found: Sequence[Mapping[str, float]], whole: float) -> str | None:
    for name in sorted(found[0]):
        values = [norms[name] for norms in found]
        spread = max(values) - min(values)
        if spread > RELATIVE * max(values) and spread > OF_ALL * whole:
            return (
                f"the gradient of {name!r} differs between the ranks along mesh dimension {axis.name!r} (norms "
                f"{', '.join(f'{value:.3g}' for value in values)}), and wrap was not told why: {SAY}"
            )
    return None


def check_split_fields(
    modules: Iterable[nn.Module], slots: Sequence[ParameterSlot], data: dist.ProcessGroup, mesh: ModelMesh | None
) -> None:
    """Raise unless gradients, of which each rank has a part, are averaged over the model's domain. Local."""
    sharding: Any = sys.modules.get("fsshard.parallel.domain.sharding")  # without it no model is split
    domain = None if sharding is None else sharding.domain_of(modules)
    if domain is None or not domain.attached:
        return
    ranks = set(dist.get_process_group_ranks(data))
    layouts = dict.fromkeys((slot.name for slot in slots), ()) if mesh is None else layouts_by_name(slots, mesh)
    for axis in domain.axes:
        if axis.size == 1 or set(axis.ranks) <= ranks:
            continue
        left = [name for name, found in layouts.items() if not any(_averages(each, axis.ranks) for each in found)]
        if left:
            raise ConfigurationError(
                f"the model's fields are split over ranks {list(axis.ranks)} (shard_domain), and the group of data has "
                f"{sorted(ranks & set(axis.ranks))} of them only, so their gradients would not be averaged "
                f"({left[0]!r}, ...): wrap over all ranks of data and domain, leaving device_mesh out; or, with "
                "shard_domain(weights='modes'), pass replicated=domain.replicated"
            )


def _averages(layout: Layout, ranks: Sequence[int]) -> bool:
    """Return whether a gradient is averaged over these ranks, or each has its own part of the parameter."""
    groups = [*layout.divides, *(layout.shares if isinstance(layout, Shared) and layout.mean else ())]
    return any(tuple(dist.get_process_group_ranks(group)) == tuple(ranks) for group in groups)
