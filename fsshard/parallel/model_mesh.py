"""The mesh dimensions other than data, and what every parameter is along each of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn

from fsshard.comm.agreement import per_rank
from fsshard.complex_params.layouts import HandSplit, Layout, Shared
from fsshard.complex_params.slots import ModuleTable
from fsshard.complex_params.tensorfy import check_dtensors, dtensor_parameters
from fsshard.errors import ConfigurationError, RankMismatch
from fsshard.launching.leaving import keep_group
from fsshard.parallel.meshes import shape_text, shares_samples
from fsshard.torch_private.c10d import whole_mesh

HOW_REPLICATED = 'a mesh dimension such as mesh["cp"], or (mesh["cp"], "mean") for gradients that are to be averaged'
HOW_SHARDED = '(mesh["tp"], dim) with the dimension along which the parts lie, or mesh["tp"] where there is none'


@dataclass(frozen=True)
class Axis:
    """A mesh dimension other than data."""

    name: str  # as the mesh has it
    group: dist.ProcessGroup = field(compare=False)  # of this rank's ranks along it
    ranks: tuple[int, ...]  # global ones


@dataclass(frozen=True)
class ModelMesh:
    """The mesh dimensions other than data."""

    axes: tuple[Axis, ...]  # those with one rank left out
    group: dist.ProcessGroup  # all ranks of the training: those of data times those of the axes
    layouts: Mapping[str, tuple[Layout, ...]]  # parameter's name -> what it is along them, as the caller has said it
    data_size: int  # how many ranks there are along data
    divides: bool  # ranks along the axes have different elements of some parameter

    def shape(self) -> dict[str, int]:
        """Return the number of ranks of each dimension by its name; data first."""
        names = [axis.name for axis in self.axes]
        unlike = [name if names.count(name) == 1 else f"{name} ({at})" for at, name in enumerate(names)]
        sizes = [len(axis.ranks) for axis in self.axes]
        return {"data": self.data_size, **dict(zip(unlike, sizes, strict=True))}

    def described(self) -> list[Any]:
        """Return what ranks have to ask for alike."""

        def told(layout: Layout) -> tuple[Any, ...]:
            return type(layout).__name__, getattr(layout, "dim", None), getattr(layout, "mean", None)

        kinds = [(name, list(map(told, layouts))) for name, layouts in self.layouts.items()]
        return [[(axis.name, len(axis.ranks)) for axis in self.axes], kinds]


def find_model_mesh(
    table: ModuleTable,
    data: dist.ProcessGroup,
    replicated: object = None,
    sharded: object = None,
    device_mesh: Any = None,
) -> ModelMesh | None:
    """Return the mesh dimensions that DTensors and the arguments name; None where there are none. Collective then.

    Args:
        table: the modules of the user's model, not changed yet.
        data: the ranks of data.
        replicated: name, pattern or module class -> the mesh dimension whose ranks share these plain parameters.
        sharded: name, pattern or module class -> the mesh dimension whose ranks have parts of these plain parameters.
        device_mesh: the mesh of data, whose other dimensions are to be named if any is.

    Raises:
        ConfigurationError: a pattern that fits no parameter, a mesh that is none or overlaps data, or a dimension of
            these meshes that divides samples or the model and is named nowhere.
        ModelError: a DTensor that cannot be taken.
    """
    dtensors = list(dtensor_parameters(table.modules))
    if not dtensors and replicated is None and sharded is None:
        return None  # nothing is said, and so nothing is known
    check_dtensors(table)
    data_ranks = tuple(dist.get_process_group_ranks(data))
    axes: dict[tuple[int, ...], Axis] = {}
    for name, _, _, parameter in dtensors:
        for dim in range(parameter.device_mesh.ndim):
            _add(axes, _axis(parameter.device_mesh, dim, f"parameter {name!r}, a DTensor,"), data_ranks)
    groups = {name: p.device_mesh.get_all_groups() for name, *_, p in dtensors}
    ranks = {name: {tuple(dist.get_process_group_ranks(each)) for each in found} for name, found in groups.items()}
    named = _Declared(table, ranks)
    for argument, given in (("replicated", replicated), ("sharded", sharded)):
        for axis in named.take(argument, given):
            _add(axes, axis, data_ranks)
    if axes:
        roots = [device_mesh, *(parameter.device_mesh for *_, parameter in dtensors)]
        _check_all_named(axes, roots, set(data_ranks))
    found = tuple(axes.values())
    layouts = named.layouts()
    parted = any(placed.is_shard() for *_, parameter in dtensors for placed in parameter.placements)
    parted |= any(layout.divides for each in layouts.values() for layout in each)
    return ModelMesh(found, keep_group(_everyone(data, found)), layouts, len(data_ranks), parted)


def check_asked_alike(mesh: ModelMesh, names: Sequence[str]) -> None:
    """Raise on every rank unless all have parameters of the same ``names``, and say the same of each. Collective."""
    told = per_rank(mesh.group, (mesh.described(), list(names)))
    for rank, (said, held) in enumerate(told):
        if said != told[0][0]:
            raise RankMismatch(f"replicated= and sharded= differ: {told[0][0]} on rank 0, {said} on rank {rank}")
        if held != told[0][1]:
            only = {*held} ^ {*told[0][1]} or {"in another order"}
            raise RankMismatch(
                f"ranks 0 and {rank} have parameters of different names ({', '.join(sorted(only)[:3])}): along every "
                "mesh dimension parts have one name; give all ranks the parameter, even where its values are not used"
            )


def _axis(mesh: Any, dim: int, what: str) -> Axis:
    group = mesh.get_group(dim)
    names = mesh.mesh_dim_names
    ranks = tuple(dist.get_process_group_ranks(group))
    if dist.get_rank() not in ranks:
        raise ConfigurationError(f"{what} names a mesh that rank {dist.get_rank()} is not in: {mesh}")
    return Axis(names[dim] if names else f"dim{dim}", group, ranks)


def _add(axes: dict[tuple[int, ...], Axis], axis: Axis, data_ranks: Sequence[int]) -> None:
    if len(axis.ranks) == 1:
        return
    if len(set(axis.ranks) & set(data_ranks)) > 1:
        raise ConfigurationError(
            f"mesh dimension {axis.name!r} has ranks {list(axis.ranks)} and device_mesh has ranks {list(data_ranks)}: "
            "they must have this rank alone in common; pass as device_mesh= the slice whose ranks see different "
            "samples, such as mesh['data'], and name the other dimensions in replicated= and sharded="
        )
    axes.setdefault(axis.ranks, axis)


def _check_all_named(axes: Iterable[tuple[int, ...]], meshes: Iterable[Any], data_ranks: set[int]) -> None:
    """Raise for a dimension of these meshes whose ranks share samples, and of which nothing was said. Local."""
    known = [data_ranks, *map(set, axes)]
    for mesh in meshes:
        whole = whole_mesh(mesh)
        for dim, name in enumerate(getattr(whole, "mesh_dim_names", None) or ()):
            ranks = set(dist.get_process_group_ranks(whole.get_group(dim)))
            if shares_samples(name) and len(ranks) > 1 and not any(ranks <= each for each in known):
                raise ConfigurationError(
                    f"{shape_text(whole)}: dimension {name!r} is not named, while others are: if its ranks have parts "
                    "of gradients, training is silently wrong; name it in replicated= or sharded=, or pass "
                    f"replicated={{(): mesh[{name!r}]}} if all of its ranks have the same gradients"
                )


def _everyone(data: dist.ProcessGroup, axes: Iterable[Axis]) -> dist.ProcessGroup:
    """Return the group of all ranks that are reached along data and the axes. Collective over them."""
    known = set(dist.get_process_group_ranks(data))
    for axis in axes:
        known = {rank for found in per_rank(axis.group, sorted(known)) for rank in found}
    for group in (data, dist.group.WORLD):
        assert group is not None
        if known == set(dist.get_process_group_ranks(group)):
            return group
    made = _groups.setdefault(dist.group.WORLD, {})
    key = tuple(sorted(known))
    if key not in made:
        group_of_all: Any = dist.new_group(list(key), use_local_synchronization=True)  # -100 for who is not in it
        made[key] = group_of_all
    return made[key]


_groups: WeakKeyDictionary[Any, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()
"""The groups that were made for models in each world, by their ranks: a group is never freed before its world."""


class _Declared:
    """The words of ``replicated`` and ``sharded`` on each parameter."""

    def __init__(self, table: ModuleTable, dtensors: Mapping[str, set[tuple[int, ...]]]) -> None:
        self._dtensors = dtensors
        self._modules, slots = table.modules, list(table.slots())
        first: dict[int, str] = {}
        self._tied = {slot.name: first.setdefault(id(slot.parameter), slot.name) for slot in slots}
        self._dims = {slot.name: len(slot.kind.user_shape(slot.parameter.shape)) for slot in slots}
        self._found: dict[str, dict[tuple[int, ...], Layout]] = {}

    def take(self, argument: str, given: object) -> list[Axis]:
        """Remember one of the two arguments; the mesh dimensions that it names."""
        if given is None:
            return []
        if not isinstance(given, Mapping):
            how = HOW_REPLICATED if argument == "replicated" else HOW_SHARDED
            raise ConfigurationError(
                f"{argument}={given!r}: expected a mapping from a parameter's name, pattern or module class to {how}"
            )
        found = []
        for key, value in given.items():
            axis, said = _named_axis(argument, key, value)
            if len(axis.ranks) > 1:
                for name in self._fitting(argument, key):
                    self._say(argument, name, axis, said)
                found.append(axis)
        return found

    def layouts(self) -> dict[str, tuple[Layout, ...]]:
        """Parameter's name -> what it is along the mesh dimensions."""
        return {name: tuple(found.values()) for name, found in self._found.items()}

    def _fitting(self, argument: str, key: object) -> list[str]:
        if key == ():
            return []  # the dimension is named, and no parameter
        if isinstance(key, type) and issubclass(key, nn.Module):
            owners = [name for name, module in self._modules.items() if isinstance(module, key)]
            names = [n for n in self._tied if any(n.startswith(f"{owner}." if owner else "") for owner in owners)]
        elif isinstance(key, str):
            try:
                names = [name for name in self._tied if re.search(key, name)]
            except re.error as error:
                raise ConfigurationError(f"{argument}={{{key!r}: ...}}: no regular expression: {error}") from error
        else:
            raise ConfigurationError(
                f"{argument}={{{key!r}: ...}}: expected a name, a pattern, a module class, or () for none"
            )
        if not names:
            raise ConfigurationError(
                f"{argument}={{{key!r}: ...}} fits no parameter; the model has {', '.join([*self._tied][:5])}, ..."
            )
        return list(dict.fromkeys(self._tied[name] for name in names))

    def _say(self, argument: str, name: str, axis: Axis, said: Any) -> None:
        known = self._found.setdefault(name, {})
        if axis.ranks in known:
            raise ConfigurationError(
                f"{argument}: parameter {name!r} is named twice for mesh dimension {axis.name!r}; let one pattern fit"
            )
        if axis.ranks in self._dtensors.get(name, ()):
            raise ConfigurationError(
                f"{argument}: parameter {name!r} is a DTensor, whose placements define it along mesh dimension "
                f"{axis.name!r}; leave it out"
            )
        if argument == "replicated":
            known[axis.ranks] = Shared(axis.group, mean=said == "mean")
            return
        dims = self._dims[name]
        if said is not None and not -dims <= said < dims:
            raise ConfigurationError(f"sharded: parameter {name!r} has {dims} dimensions, and no dimension {said}")
        known[axis.ranks] = HandSplit(axis.group, None if said is None else said % dims)


def _named_axis(argument: str, key: object, value: object) -> tuple[Axis, Any]:
    how = HOW_REPLICATED if argument == "replicated" else HOW_SHARDED
    mesh, said = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    allowed = said is None or (said in ("sum", "mean") if argument == "replicated" else type(said) is int)
    if isinstance(mesh, dist.ProcessGroup) and allowed:
        ranks = tuple(dist.get_process_group_ranks(mesh))
        return Axis(f"ranks of {key}", mesh, ranks), said
    if getattr(mesh, "ndim", None) != 1 or not hasattr(mesh, "get_group") or not allowed:
        raise ConfigurationError(f"{argument}={{{key!r}: {value!r}}}: expected {how}")
    return _axis(mesh, 0, f"{argument}={{{key!r}: ...}}"), said
