"""Checks that parameters which several ranks along a mesh dimension hold are the same there, in value and in gradient.

A parameter of which nobody has said anything is taken as held alike by all ranks along the other dimensions, with the
same gradient: norms next to tensor-parallel layers are so. Where that is not true training goes wrong without a word,
each rank with a model of its own; so it is looked at, the values once, before anything is changed, and the gradients
at the first step.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
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
RELATIVE = 1e-2
OF_ALL = 1e-6
"""By how much norms of one gradient may differ between ranks: by rounding, as a share of it, and of the whole norm."""


Sums = Mapping[str, int]
"""A fingerprint of each parameter or buffer by its name."""


def layouts_by_name(slots: Iterable[ParameterSlot], mesh: ModelMesh) -> dict[str, tuple[Layout, ...]]:
    """Return what each parameter is along other dimensions, by its first name."""
    layouts = {}
    seen = set()
    for slot in slots:
        if id(slot.parameter) in seen:
            continue
        seen.add(id(slot.parameter))
        own = mesh.layouts.get(slot.name, ())
        if slot.kind.layout is not None:
            own = (slot.kind.layout, *own)
        layouts[slot.name] = own
    return layouts


def _spoken_for(layouts: Sequence[Layout], axis: Axis) -> bool:
    """Return whether somebody has said what a parameter is along an axis."""
    groups = []
    for layout in layouts:
        groups += [*layout.divides, *layout.shares]
    return _is_among(axis.ranks, groups)


def _is_among(ranks: Sequence[int], groups: Iterable[dist.ProcessGroup]) -> bool:
    return any(dist.get_process_group_ranks(group) == list(ranks) for group in groups)


def check_same_on_mesh(
    table: ModuleTable,
    slots: Sequence[ParameterSlot],
    mesh: ModelMesh,
    data_rank: int,
) -> None:
    """Raise on every rank unless all say the same of parameters, and hold alike what all are to hold. Collective."""
    check_asked_alike(mesh, [slot.name for slot in slots])
    check_same_values(slots, mesh, data_rank)
    saved = table.root.state_dict(keep_vars=True)
    buffers = {}
    for name, buffer in table.buffers().items():
        if name in saved:
            buffers[name] = buffer
    check_same_buffers(buffers, mesh, data_rank)


def check_same_values(slots: Sequence[ParameterSlot], mesh: ModelMesh, data_rank: int) -> None:
    """Raise on every rank where a parameter that is held alike by all has different values. Collective.

    Only rank 0's of data count, which the others get.
    """
    _check_real(slots, mesh)
    layouts = layouts_by_name(slots, mesh)
    _check_even(slots, layouts, mesh)
    sums = {}
    for slot in slots:
        if slot.name in layouts and slot.name not in sums:
            sums[slot.name] = int(fingerprint(slot.parameter))
    for axis in mesh.axes:
        compared = {}
        for name, value in sums.items():
            if not _spoken_for(layouts[name], axis):
                compared[name] = value
        _check_alike(
            mesh,
            axis,
            None if data_rank else compared,
            "parameter {name!r} has different values on ranks {first} and {rank}, along mesh dimension "
            f"{{axis!r}}, and wrap was not told how they share it: {SAY}; or start both ranks from the same seed if "
            "they should hold the same",
        )


def _check_real(slots: Iterable[ParameterSlot], mesh: ModelMesh) -> None:
    meta = next((slot.name for slot in slots if slot.parameter.is_meta), None)
    for name in per_rank(mesh.group, meta):
        if name:
            raise ModelError(
                f"parameter {name!r} is on the meta device on some rank, and the model is on a mesh of several "
                "dimensions: what ranks along them hold cannot be compared, nor shared; give the model its values "
                "before wrap"
            )


def _check_even(
    slots: Sequence[ParameterSlot],
    layouts: Mapping[str, Sequence[Layout]],
    mesh: ModelMesh,
) -> None:
    """Raise on every rank where parts that were cut by hand have several shapes."""
    own = {}
    for slot in slots:
        is_split = any(isinstance(layout, HandSplit) for layout in layouts.get(slot.name, ()))
        if is_split:
            shape = slot.kind.user_shape(slot.parameter.shape)
            own[slot.name] = tuple(shape)
    shapes = per_rank(mesh.group, own)
    first = shapes[0]
    for rank, of_rank in enumerate(shapes):
        for name, other_shape in of_rank.items():
            if first.get(name) != other_shape:
                raise ModelError(
                    f"sharded: parts of {name!r} have the shapes {first.get(name)} on rank 0 and "
                    f"{other_shape} on rank {rank}; parts that you split yourself must be of one shape (DTensors "
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
        for mesh_dim, placed in enumerate(layout.placements):
            if placed.is_shard() and layout.shape[placed.dim] % layout.mesh.size(mesh_dim):
                raise UnsupportedByBackend(
                    f"the DTensor {slot.name!r} of shape {tuple(layout.shape)} in unequal parts along dim {placed.dim}",
                    backend.name,
                    "use backend='fsdp2', 'fsdp' or 'ddp', or a size that its mesh dimension divides",
                )


def check_same_buffers(buffers: Mapping[str, Tensor], mesh: ModelMesh, data_rank: int) -> None:
    """Raise on every rank where buffers of the state dict differ along other dimensions than data. Collective.

    One of them alone would be saved. Over data rank 0's count.
    """
    sums = {}
    for name, buffer in buffers.items():
        if data_rank == 0 and not buffer.is_meta:
            sums[name] = int(fingerprint(buffer))
    for axis in mesh.axes:
        _check_alike(
            mesh,
            axis,
            None if data_rank else sums,
            "buffer {name!r} differs between ranks {first} and {rank}, along mesh dimension {axis!r}, and a checkpoint "
            "has one of it: register it with persistent=False if it can be made anew, or keep it alike on these ranks",
        )


def _check_alike(mesh: ModelMesh, axis: Axis, own: Sums | None, text: str) -> None:
    """Raise on every rank of the mesh where sums of one name differ along an axis; ranks with None are left out."""
    tables = per_rank(axis.group, own)
    _raise_everywhere(mesh.group, ModelError, _difference(axis, tables, text))


def _difference(axis: Axis, tables: Sequence[Sums | None], text: str) -> str | None:
    """Return the error for the first name whose sum differs from that of the axis's first rank."""
    first = tables[0]
    if first is None:
        return None
    for rank, sums in zip(axis.ranks, tables, strict=True):
        for name, value in (sums or {}).items():
            if first.get(name) != value:
                return text.format(name=name, rank=rank, first=axis.ranks[0], axis=axis.name)
    return None


def _raise_everywhere(group: dist.ProcessGroup, kind: type[Exception], message: str | None) -> None:
    """Raise on all ranks the first error's text that any of them has. Collective."""
    for text in per_rank(group, message):
        if text:
            raise kind(text)


def send_values(table: ModuleTable, group: dist.ProcessGroup, mesh: ModelMesh | None) -> None:
    """Give all ranks of data rank 0's values; then those that share a parameter the first one's. Collective."""
    if group.size() > 1:
        stored = {}
        for module in table.modules.values():
            for parameter in stored_in(module).values():
                if parameter is not None:
                    stored[id(parameter)] = parameter
        tensors = [*stored.values(), *table.buffers().values()]
        broadcast_tensors([tensor for tensor in tensors if not tensor.is_meta], group)
    if mesh is None:
        return
    slots = list(table.slots())
    layouts = layouts_by_name(slots, mesh)
    parameters = {}
    for slot in reversed(slots):
        # The first of several places counts.
        if slot.name in layouts:
            parameters[slot.name] = slot.parameter
    of_groups = defaultdict(list)
    for name in sorted(parameters):
        parameter = parameters[name]
        if parameter.is_meta:
            continue
        for layout in layouts[name]:
            for shared in layout.shares:
                if shared.size() > 1:
                    of_groups[shared].append(parameter)
    for shared, tensors in of_groups.items():
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
        # Of each axis the names of those gradients that were not compared yet.
        self._left: dict[Axis, set[str]] = {}
        for axis in mesh.axes:
            self._left[axis] = {entry.name for entry in entries if not _spoken_for(entry.layouts, axis)}
        self._norm = norm
        self._group = mesh.group
        self._tries = LOOKS

    def check(self, entries: Iterable[Entry]) -> None:
        """Raise GradientError where they differ. Collective over all ranks of the mesh.

        A gradient of zeros, or one that overflowed, tells nothing: it is looked at again at the next step, so often.
        """
        waiting = set().union(*self._left.values())
        trained = [entry for entry in entries if entry.parameter.requires_grad]
        if not self._tries or all(entry.name not in waiting for entry in trained):
            return
        self._tries -= 1
        norms = {entry.name: float(self._norm(entry)) for entry in trained}
        finite = [norm for norm in norms.values() if math.isfinite(norm)]
        whole = math.hypot(*finite)
        for axis, left in self._left.items():
            own = {name: value for name, value in norms.items() if name in left}
            compared = _norms_of_ranks(axis, own)
            _raise_everywhere(self._group, GradientError, _differing_norms(axis, compared, whole))
            left.difference_update(compared)


def _norms_of_ranks(axis: Axis, own: Mapping[str, float]) -> dict[str, list[float]]:
    """Return the norms of all ranks along an axis, of those gradients whose norms tell something. Collective."""
    of_ranks = per_rank(axis.group, own)
    norms = {}
    for name in own:
        values = [table[name] for table in of_ranks]
        if _tells(values):
            norms[name] = values
    return norms


def _tells(norms: Sequence[float]) -> bool:
    return all(math.isfinite(norm) for norm in norms) and max(norms) > 0


def _differing_norms(axis: Axis, norms: Mapping[str, Sequence[float]], whole: float) -> str | None:
    """Return the error for the first gradient whose norms, by rank, differ by more than rounding."""
    for name, values in sorted(norms.items()):
        largest = max(values)
        spread = largest - min(values)
        if spread > RELATIVE * largest and spread > OF_ALL * whole:
            text = ", ".join(f"{value:.3g}" for value in values)
            return (
                f"the gradient of {name!r} differs between the ranks along mesh dimension {axis.name!r} (norms "
                f"{text}), and wrap was not told why: {SAY}"
            )
    return None


def check_split_fields(
    modules: Iterable[nn.Module],
    slots: Sequence[ParameterSlot],
    data: dist.ProcessGroup,
    mesh: ModelMesh | None,
) -> None:
    """Raise unless gradients, of which each rank has a part, are averaged over the model's domain. Local."""
    # Without this module no model is split.
    sharding = sys.modules.get("fsshard.parallel.domain.sharding")
    domain = None if sharding is None else sharding.domain_of(modules)
    if domain is None or not domain.attached:
        return
    ranks = set(dist.get_process_group_ranks(data))
    layouts: Mapping[str, Sequence[Layout]] = {slot.name: () for slot in slots}
    if mesh is not None:
        layouts = layouts_by_name(slots, mesh)
    for axis in domain.axes:
        if axis.size == 1 or ranks.issuperset(axis.ranks):
            continue
        for name, of_name in layouts.items():
            if any(_averages(layout, axis.ranks) for layout in of_name):
                continue
            raise ConfigurationError(
                f"the model's fields are split over ranks {list(axis.ranks)} (shard_domain), and the group of data has "
                f"{sorted(ranks.intersection(axis.ranks))} of them only, so their gradients would not be averaged "
                f"({name!r}, ...): wrap over all ranks of data and domain, leaving device_mesh out; or, with "
                "shard_domain(weights='modes'), pass replicated=domain.replicated"
            )


def _averages(layout: Layout, ranks: Sequence[int]) -> bool:
    """Return whether a gradient is averaged over these ranks, or each has its own part of the parameter."""
    if _is_among(ranks, layout.divides):
        return True
    return isinstance(layout, Shared) and layout.mean and _is_among(ranks, layout.shares)
