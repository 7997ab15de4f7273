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


Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Axis:
    """A mesh dimension other than data."""

    # As the mesh has it.
    name: str
    # This rank's ranks along it.
    group: dist.ProcessGroup = field(compare=False)
    # Global ranks.
    ranks: Ranks


@dataclass(frozen=True)
class ModelMesh:
    """The mesh dimensions other than data."""

    # Those with one rank are left out.
    axes: tuple[Axis, ...]
    # All ranks of the training: those of data times those of the axes.
    group: dist.ProcessGroup
    # A parameter's name -> what it is along them, as the caller has said it.
    layouts: Mapping[str, tuple[Layout, ...]]
    # How many ranks there are along data.
    data_size: int
    # Whether ranks along the axes have different elements of some parameter.
    divides: bool

    def shape(self) -> dict[str, int]:
        """Return the number of ranks of each dimension by its name; data first."""
        names = [axis.name for axis in self.axes]
        shape = {"data": self.data_size}
        for index, axis in enumerate(self.axes):
            name = axis.name
            if names.count(name) > 1:
                name = f"{name} ({index})"
            shape[name] = len(axis.ranks)
        return shape

    def described(self) -> list[Any]:
        """Return what ranks have to ask for alike."""
        axes = [(axis.name, len(axis.ranks)) for axis in self.axes]
        kinds = []
        for name, layouts in self.layouts.items():
            of_name = []
            for layout in layouts:
                kind = type(layout).__name__
                of_name.append((kind, getattr(layout, "dim", None), getattr(layout, "mean", None)))
            kinds.append((name, of_name))
        return [axes, kinds]


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
    dtensors = {name: parameter for name, _, _, parameter in dtensor_parameters(table.modules)}
    if not dtensors and replicated is None and sharded is None:
        # Nothing is said, and so nothing is known.
        return None
    check_dtensors(table)
    data_ranks = tuple(dist.get_process_group_ranks(data))
    axes: dict[Ranks, Axis] = {}
    of_dtensors: dict[str, set[Ranks]] = {}
    has_parts = False
    for name, parameter in dtensors.items():
        mesh = parameter.device_mesh
        of_dtensors[name] = set()
        for dim in range(mesh.ndim):
            axis = _axis(mesh, dim, f"parameter {name!r}, a DTensor,")
            of_dtensors[name].add(axis.ranks)
            _add(axes, axis, data_ranks)
        has_parts |= any(placed.is_shard() for placed in parameter.placements)
    declared = _Declared(table, of_dtensors)
    for argument, mapping in (("replicated", replicated), ("sharded", sharded)):
        for axis in declared.take(argument, mapping):
            _add(axes, axis, data_ranks)
    if axes:
        meshes = [device_mesh, *(parameter.device_mesh for parameter in dtensors.values())]
        _check_all_named(axes, meshes, set(data_ranks))
    layouts = declared.layouts()
    for of_name in layouts.values():
        has_parts |= any(layout.divides for layout in of_name)
    group = keep_group(_everyone(data, axes.values()))
    return ModelMesh(tuple(axes.values()), group, layouts, len(data_ranks), has_parts)


def check_asked_alike(mesh: ModelMesh, names: Sequence[str]) -> None:
    """Raise on every rank unless all have parameters of the same ``names``, and say the same of each. Collective."""
    (description, of_first), *others = per_rank(mesh.group, (mesh.described(), list(names)))
    for rank, (other_description, of_rank) in enumerate(others, start=1):
        if other_description != description:
            raise RankMismatch(
                f"replicated= and sharded= differ: {description} on rank 0, {other_description} on rank {rank}"
            )
        if of_rank != of_first:
            unlike = set(of_rank) ^ set(of_first) or {"in another order"}
            raise RankMismatch(
                f"ranks 0 and {rank} have parameters of different names ({', '.join(sorted(unlike)[:3])}): along every "
                "mesh dimension parts have one name; give all ranks the parameter, even where its values are not used"
            )


def _axis(mesh: Any, dim: int, what: str) -> Axis:
    group = mesh.get_group(dim)
    ranks = tuple(dist.get_process_group_ranks(group))
    if dist.get_rank() not in ranks:
        raise ConfigurationError(f"{what} names a mesh that rank {dist.get_rank()} is not in: {mesh}")
    names = mesh.mesh_dim_names
    name = names[dim] if names else f"dim{dim}"
    return Axis(name, group, ranks)


def _add(
    axes: dict[Ranks, Axis],
    axis: Axis,
    data_ranks: Sequence[int],
) -> None:
    if len(axis.ranks) == 1:
        return
    if len(set(axis.ranks) & set(data_ranks)) > 1:
        raise ConfigurationError(
            f"mesh dimension {axis.name!r} has ranks {list(axis.ranks)} and device_mesh has ranks {list(data_ranks)}: "
            "they must have this rank alone in common; pass as device_mesh= the slice whose ranks see different "
            "samples, such as mesh['data'], and name the other dimensions in replicated= and sharded="
        )
    axes.setdefault(axis.ranks, axis)


def _check_all_named(
    axes: Iterable[Ranks],
    meshes: Iterable[Any],
    data_ranks: set[int],
) -> None:
    """Raise for a dimension of these meshes whose ranks share samples, and of which nothing was said. Local."""
    known = [data_ranks, *map(set, axes)]
    for mesh in meshes:
        whole = whole_mesh(mesh)
        names = getattr(whole, "mesh_dim_names", None) or ()
        for dim, name in enumerate(names):
            ranks = set(dist.get_process_group_ranks(whole.get_group(dim)))
            if not shares_samples(name) or len(ranks) == 1:
                continue
            if not any(ranks <= each for each in known):
                raise ConfigurationError(
                    f"{shape_text(whole)}: dimension {name!r} is not named, while others are: if its ranks have parts "
                    "of gradients, training is silently wrong; name it in replicated= or sharded=, or pass "
                    f"replicated={{(): mesh[{name!r}]}} if all of its ranks have the same gradients"
                )


def _everyone(data: dist.ProcessGroup, axes: Iterable[Axis]) -> dist.ProcessGroup:
    """Return the group of all ranks that are reached along data and the axes. Collective over them."""
    reached = set(dist.get_process_group_ranks(data))
    for axis in axes:
        for ranks in per_rank(axis.group, sorted(reached)):
            reached.update(ranks)
    for group in (data, dist.group.WORLD):
        assert group is not None
        if reached == set(dist.get_process_group_ranks(group)):
            return group
    groups = _groups.setdefault(dist.group.WORLD, {})
    key = tuple(sorted(reached))
    if key not in groups:
        # It would be -100 on a rank that is not in it.
        new_group = dist.new_group(list(key), use_local_synchronization=True)
        groups[key] = new_group
    return groups[key]


_groups: WeakKeyDictionary[Any, dict[Ranks, dist.ProcessGroup]] = WeakKeyDictionary()
"""The groups that were made for models in each world, by their ranks: a group is never freed before its world."""


class _Declared:
    """The words of ``replicated`` and ``sharded`` on each parameter."""

    def __init__(
        self,
        table: ModuleTable,
        dtensors: Mapping[str, set[Ranks]],
    ) -> None:
        self._dtensors = dtensors
        self._modules = table.modules
        # A parameter's name -> its first name.
        self._tied: dict[str, str] = {}
        self._dims: dict[str, int] = {}
        first_names: dict[int, str] = {}
        for slot in table.slots():
            self._tied[slot.name] = first_names.setdefault(id(slot.parameter), slot.name)
            self._dims[slot.name] = len(slot.kind.user_shape(slot.parameter.shape))
        self._layouts: dict[str, dict[Ranks, Layout]] = {}

    def take(self, argument: str, given: object) -> list[Axis]:
        """Remember one of the two arguments, and return the mesh dimensions that it names."""
        if given is None:
            return []
        if not isinstance(given, Mapping):
            how = HOW_REPLICATED if argument == "replicated" else HOW_SHARDED
            raise ConfigurationError(
                f"{argument}={given!r}: expected a mapping from a parameter's name, pattern or module class to {how}"
            )
        axes = []
        for key, value in given.items():
            axis, detail = _named_axis(argument, key, value)
            if len(axis.ranks) > 1:
                for name in self._fitting(argument, key):
                    self._say(argument, name, axis, detail)
                axes.append(axis)
        return axes

    def layouts(self) -> dict[str, tuple[Layout, ...]]:
        """Map a parameter's name to what it is along the mesh dimensions."""
        return {name: tuple(layouts.values()) for name, layouts in self._layouts.items()}

    def _fitting(self, argument: str, key: object) -> list[str]:
        # The dimension is named, and no parameter.
        if key == ():
            return []
        if isinstance(key, type) and issubclass(key, nn.Module):
            prefixes = []
            for name, module in self._modules.items():
                if isinstance(module, key):
                    prefixes.append(f"{name}." if name else "")
            names = [name for name in self._tied if name.startswith(tuple(prefixes))]
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

    def _say(
        self,
        argument: str,
        name: str,
        axis: Axis,
        detail: Any,
    ) -> None:
        layouts = self._layouts.setdefault(name, {})
        if axis.ranks in layouts:
            raise ConfigurationError(
                f"{argument}: parameter {name!r} is named twice for mesh dimension {axis.name!r}; let one pattern fit"
            )
        if axis.ranks in self._dtensors.get(name, ()):
            raise ConfigurationError(
                f"{argument}: parameter {name!r} is a DTensor, whose placements define it along mesh dimension "
                f"{axis.name!r}; leave it out"
            )
        if argument == "replicated":
            layouts[axis.ranks] = Shared(axis.group, mean=detail == "mean")
            return
        dim = detail
        if dim is not None:
            dims = self._dims[name]
            if not -dims <= dim < dims:
                raise ConfigurationError(f"sharded: parameter {name!r} has {dims} dimensions, and no dimension {dim}")
            dim %= dims
        layouts[axis.ranks] = HandSplit(axis.group, dim)


def _named_axis(argument: str, key: object, value: object) -> tuple[Axis, Any]:
    how = HOW_SHARDED
    mesh, detail = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    is_allowed = detail is None or type(detail) is int
    if argument == "replicated":
        how = HOW_REPLICATED
        is_allowed = detail in (None, "sum", "mean")
    if isinstance(mesh, dist.ProcessGroup) and is_allowed:
        ranks = tuple(dist.get_process_group_ranks(mesh))
        return Axis(f"ranks of {key}", mesh, ranks), detail
    if getattr(mesh, "ndim", None) != 1 or not hasattr(mesh, "get_group") or not is_allowed:
        raise ConfigurationError(f"{argument}={{{key!r}: {value!r}}}: expected {how}")
    return _axis(mesh, 0, f"{argument}={{{key!r}: ...}}"), detail
