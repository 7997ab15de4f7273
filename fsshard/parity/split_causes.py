"""Why is the loss or gradient of a divided model wrong? What the usual mistakes make of it is tried on the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsshard.comm.agreement import per_rank
from fsshard.parity.findings import RankStep
from fsshard.parity.trace import real_view

__all__ = ["causes"]


def causes(
    mesh: DeviceMesh,
    step: RankStep,
    expected: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor | None],
    bounds: Mapping[str, float],
) -> None:
    """Note beside the loss and each gradient that differ what would make it right, where that is found. Collective.

    Args:
        mesh: of all ranks.
        step: whose differences get the notes.
        expected: gradients of one process.
        gradients: this rank's, whole.
        bounds: by name, how far rounding may carry an element.
    """
    _loss_cause(mesh, step)
    found, everyone = step.differences.get("gradient", {}), dist.group.WORLD
    assert everyone is not None
    mine = [name for name, difference in found.items() if difference.verdict == "different"]
    asked: Iterable[list[str]] = per_rank(everyone, mine)
    for name in dict.fromkeys(name for each in asked for name in each):
        gradient = gradients.get(name)
        right = name in expected and gradient is not None and gradient.shape == expected[name].shape
        if not all(per_rank(everyone, right)) or gradient is None:
            continue
        note = _cause(mesh, real_view(expected[name]).double(), real_view(gradient).double(), bounds.get(name, 0.0))
        if note and found[name].verdict == "different":
            found[name] = replace(found[name], note=note)


def _loss_cause(mesh: DeviceMesh, step: RankStep) -> None:
    found = step.differences["loss"][""]
    for dim in mesh.mesh_dim_names or ():
        ranks = mesh[dim].size()
        if found.verdict != "different" or found.note or ranks == 1:
            continue
        if abs(step.loss * ranks - step.reference_loss) <= found.bound * ranks:
            note = f"it is {ranks} times too small: if the losses of {dim!r}'s ranks add up, Split(adds=({dim!r},))"
            found = replace(found, note=note)
        elif abs(step.loss / ranks - step.reference_loss) <= found.bound:
            note = f"it is {ranks} times too large: if each rank of {dim!r} has all of it, it is not for Split(adds=)"
            found = replace(found, note=note)
    step.differences["loss"][""] = found


def _cause(mesh: DeviceMesh, expected: Tensor, gradient: Tensor, bound: float) -> str:
    """In words, "" if it is none of them. Collective."""
    said = ""
    for dim in mesh.mesh_dim_names or ():
        total = gradient.clone()
        dist.all_reduce(total, group=mesh[dim].get_group())
        ranks = mesh[dim].size()
        if ranks == 1 or said:
            continue
        apart = not torch.equal(total, gradient * ranks)
        if apart and _near(total, expected, bound * ranks):
            said = f"the parts that the {ranks} ranks of {dim!r} have add up to it: replicated={{...: mesh[{dim!r}]}}"
        elif apart and _near(total / ranks, expected, bound):
            said = f'the mean over {dim!r} is right: replicated={{...: (mesh[{dim!r}], "mean")}}'
        elif _near(gradient / ranks, expected, bound):
            said = f"it is {ranks} times too large, the number of ranks of {dim!r}: added up where all have the whole?"
        elif _near(gradient * ranks, expected, bound * ranks):
            said = f"it is {ranks} times too small, the number of ranks of {dim!r}: averaged where each has a part?"
    return said or _factor(expected, gradient, bound)


def _near(value: Tensor, expected: Tensor, bound: float) -> bool:
    return bool(((value - expected).abs() <= bound).all())


def _factor(expected: Tensor, gradient: Tensor, bound: float) -> str:
    """ "it is 3 times the right one", if it is a multiple of it."""
    length = float(expected.square().sum())
    ratio = float((gradient * expected).sum()) / length if length else 0.0
    if ratio and _near(gradient / ratio, expected, bound / abs(ratio) + bound):
        return f"it is {ratio:.6g} times what it should be"
    return ""
