"""Whether parameters that several ranks along a mesh dimension hold are the same there, in value and in gradient.

A parameter of which nobody has said anything is taken as held alike by all ranks along the other dimensions, with the
same gradient: norms beside tensor-parallel layers are so. Where that is not true training goes wrong without a word,
each rank with a model of its own; so it is looked at, the values once, before anything is changed, and the gradients
at the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.comm.agreement import per_rank
from fsshard.comm.broadcast import broadcast_tensors
from fsshard.complex_params.layouts import Layout
from fsshard.complex_params.slots import ParameterSlot
from fsshard.errors import GradientError, ModelError
from fsshard.parallel.model_mesh import Axis, ModelMesh
from fsshard.planning.entries import Entry

__all__ = ["SameGradients", "check_same_values", "share_values"]

SAY = (
    "name it in replicated= where the ranks share it and each has a part of its gradient, or in sharded= where each "
    "has a part of it"
)
RELATIVE, OF_ALL = 1e-2, 1e-6
"""By how much norms of one gradient may differ between ranks: by rounding, as a share of it, and of the whole norm."""


def layouts_by_name(slots: Iterable[ParameterSlot], mesh: ModelMesh) -> dict[str, tuple[Layout, ...]]:
    """What each parameter is along other dimensions, by its first name."""
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


def check_same_values(slots: Sequence[ParameterSlot], mesh: ModelMesh, data_rank: int) -> None:
    """Raise on every rank where a parameter that is held alike by all has different values. Collective.

    Only rank 0's of data count, which the others get.

    Raises:
        ModelError: names the parameter, the mesh dimension and two ranks.
    """
    layouts = layouts_by_name(slots, mesh)
    first: dict[str, Tensor] = {}
    for slot in slots:
        if slot.name in layouts:
            first.setdefault(slot.name, slot.parameter)
    sums = {name: _bits(parameter) for name, parameter in first.items() if not parameter.is_meta}
    alike = {axis.name: [n for n in sums if not _spoken_for(layouts[n], axis)] for axis in mesh.axes}
    for axis in mesh.axes:
        mine = None if data_rank else {name: sums[name] for name in alike[axis.name]}
        differing = _first_difference(axis, per_rank(axis.group, mine))
        for message in filter(None, per_rank(mesh.group, differing)):
            raise ModelError(message)


def _first_difference(axis: Axis, found: Sequence[Mapping[str, tuple[int, int]] | None]) -> str | None:
    for rank, sums in zip(axis.ranks, found, strict=True):
        if sums is None or found[0] is None:
            continue
        for name, value in sums.items():
            if found[0].get(name) != value:
                return (
                    f"parameter {name!r} has other values on rank {rank} than on rank {axis.ranks[0]}, along mesh "
                    f"dimension {axis.name!r}, and wrap was not told what it is there: {SAY}; or start both ranks "
                    "from one seed where they are to hold it alike"
                )
    return None


@torch.no_grad()
def _bits(tensor: Tensor) -> tuple[int, int]:
    """Two sums over the bytes, which tensors of different values do not share by chance."""
    plain = tensor.detach().resolve_conj().contiguous().reshape(-1)
    if not plain.numel():
        return 0, 0
    real = torch.view_as_real(plain) if plain.is_complex() else plain
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    numbers = real.view(kinds[real.itemsize]).reshape(-1)
    odd = numbers[1::2].sum(dtype=torch.int64)
    return int(numbers.sum(dtype=torch.int64)), int(odd)


def share_values(slots: Sequence[ParameterSlot], mesh: ModelMesh) -> None:
    """Give all ranks that share a parameter the values of the first of them. Collective."""
    layouts = layouts_by_name(slots, mesh)
    held = {slot.name: slot for slot in reversed(slots) if slot.name in layouts}
    groups: dict[dist.ProcessGroup, list[Tensor]] = {}
    for name, slot in sorted(held.items()):
        for layout in layouts[name]:
            for group in layout.shares:
                if group.size() > 1 and not slot.parameter.is_meta:
                    groups.setdefault(group, []).append(slot.parameter)
    for group, tensors in groups.items():
        broadcast_tensors(tensors, group)


class SameGradients:
    """Compares the norms of gradients that should be the same along mesh dimensions, at the first step.

    Args:
        entries: the model's parameters.
        mesh: the dimensions.
        norm: the norm of one parameter's final gradient over data, or None. Collective over data.
    """

    def __init__(self, entries: Iterable[Entry], mesh: ModelMesh, norm: Callable[[Entry], Tensor]) -> None:
        entries = list(entries)
        self._left = {axis: [entry for entry in entries if not _spoken_for(entry.layouts, axis)] for axis in mesh.axes}
        self._all, self._norm, self._group = entries, norm, mesh.group

    def check(self) -> None:
        """Raise where they differ. Collective over all ranks of the mesh; once.

        Raises:
            GradientError: names the parameter, the mesh dimension and the norms.
        """
        if not self._left:
            return
        left, self._left = self._left, {}
        norms = {entry.name: float(self._norm(entry)) for entry in self._all}
        whole = sum(value**2 for value in norms.values()) ** 0.5
        for axis, entries in left.items():
            mine = {entry.name: norms[entry.name] for entry in entries}
            message = _differing_norms(axis, per_rank(axis.group, mine), whole)
            for each in filter(None, per_rank(self._group, message)):
                raise GradientError(each)


def _differing_norms(axis: Axis, found: Sequence[Mapping[str, float]], whole: float) -> str | None:
    for name in found[0]:
        values = [norms[name] for norms in found]
        spread = max(values) - min(values)
        if spread > RELATIVE * max(values) and spread > OF_ALL * whole:
            return (
                f"the gradient of {name!r} differs between the ranks along mesh dimension {axis.name!r} (norms "
                f"{', '.join(f'{value:.3g}' for value in values)}), and wrap was told nothing of it: {SAY}"
            )
    return None
