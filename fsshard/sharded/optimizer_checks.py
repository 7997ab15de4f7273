"""What must hold before an optimizer is built: checked on every rank, raised on every rank."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from fsshard.backends.base import Backend
from fsshard.backends.settings import Settings
from fsshard.comm.agreement import per_rank
from fsshard.errors import OptimizerError, RankMismatch, UnsupportedByBackend
from fsshard.oss.partition import GLOBAL_OPTIMIZERS
from fsshard.sharded.optimizer_probe import ProbedGroup, Untried, try_on_parts

__all__ = [
    "WHOLE_TENSOR_OPTIMIZERS",
    "asked_of",
    "check_asked_alike",
    "check_fused",
    "check_matrices",
    "check_separable",
]

WHOLE_TENSOR_OPTIMIZERS = frozenset({"Adafactor", "Muon", "Shampoo", "SOAP", "LAMB", "Lamb", "LARS", "Lars"})
"""Known to use the shape, a norm or a factorisation of each parameter; others are found by trying them."""

VOUCH = "fsshard.build_optimizer(model, {name}, ..., separable=True)"


def check_separable(
    backend: type[Backend],
    settings: Settings,
    optimizer_class: type[Optimizer],
    groups: Sequence[ProbedGroup],
    defaults: Mapping[str, Any],
    separable: bool | None,
) -> None:
    """Raise for an algorithm that would train something else where a rank's optimizer sees parts. Local.

    Args:
        backend: what divides.
        settings: among which ranks; other mesh dimensions than data divide parameters under whatever backend.
        optimizer_class: the user's.
        groups: as it will have them.
        defaults: keyword arguments of its constructor.
        separable: True vouches for it, False refuses it, None finds out.

    Raises:
        UnsupportedByBackend: names the nearest backend that works.
    """
    name, of_torch = optimizer_class.__name__, optimizer_class.__module__.startswith("torch.optim")
    divides = backend.facts.divides if settings.world_size > 1 else "nothing"
    on_mesh = settings.model_mesh is not None and settings.model_mesh.divides
    if (separable and not of_torch) or (divides == "nothing" and not on_mesh):
        return
    ancestry = {base.__name__ for base in optimizer_class.__mro__}
    needs, why = "numbers", ""
    if separable is False:
        needs, why = "everything", "separable=False: it needs all parameters, whole"
    elif ancestry & GLOBAL_OPTIMIZERS:
        needs, why = "everything", "its line search needs all parameters on every rank"
    elif ancestry & WHOLE_TENSOR_OPTIMIZERS:
        needs, why = "parameters", "it needs each parameter whole"
    if not why and not of_torch and not _is_fake():
        needs = _try(backend, optimizer_class, groups, defaults, warn=settings.is_first)
        some, whole = ("parts of a parameter", "the whole one") if needs != "everything" else ("some", "all parameters")
        why = f"tried on small tensors, its step on {some} is not its step on {whole}; if that is wrong: "
        why += VOUCH.format(name=name)
    if on_mesh and needs != "numbers":
        raise UnsupportedByBackend(
            f"{name}, which needs each parameter whole, where another mesh dimension divides some",
            backend.name,
            "use an optimizer that works number by number, such as torch.optim.AdamW, or a mesh of data alone",
        )
    if (needs == "everything" and divides != "nothing") or (needs == "parameters" and divides == "elements"):
        alternative = "use backend='ddp'" if needs == "everything" else "use backend='fairscale' or 'ddp'"
        raise UnsupportedByBackend(f"{name} ({why})", backend.name, alternative)


def _try(
    backend: type[Backend],
    optimizer_class: type[Optimizer],
    groups: Sequence[ProbedGroup],
    defaults: Mapping[str, Any],
    *,
    warn: bool,
) -> str:
    """Return what an optimizer must see together; where it cannot be tried, that any numbers do, with a warning."""
    try:
        return try_on_parts(optimizer_class, groups, defaults)
    except Untried as error:
        if warn:
            name = optimizer_class.__name__
            warnings.warn(
                f"{name} could not be tried on small tensors ({error}), so it is unknown whether it works under "
                f"backend {backend.name!r}, whose ranks see parts of the parameters. If it treats each element by "
                f"itself, say so: {VOUCH.format(name=name)}; otherwise use backend='ddp'",
                stacklevel=4,
            )
        return "numbers"


def _is_fake() -> bool:
    """Return whether tensors that are made now have no values: an estimate is being made."""
    return type(torch.empty(0)) is not Tensor


def check_fused(defaults: Mapping[str, Any], *, has_complex: bool, see_complex: bool) -> None:
    """Raise for fused kernels over complex numbers. Local.

    Raises:
        OptimizerError: says what to use.
    """
    if defaults.get("fused") and has_complex and see_complex:
        raise OptimizerError(
            "fused=True: torch's fused kernels take no complex numbers; use foreach=True, or see_complex=False, which "
            "shows the optimizer real pairs"
        )


def check_matrices(optimizer_class: type[Optimizer], parameters: Iterable[tuple[str, torch.Size, bool]]) -> None:
    """Raise for torch's Muon over anything but real matrices. Local.

    torch itself raises too, but under OSS on the rank alone that owns the parameter, while the others go on.

    Args:
        optimizer_class: the user's.
        parameters: the name, the shape and whether it is complex, of each.

    Raises:
        OptimizerError: names the first such parameter.
    """
    if optimizer_class.__name__ != "Muon" or not optimizer_class.__module__.startswith("torch.optim"):
        return
    for name, shape, is_complex in parameters:
        if is_complex or len(shape) != 2:
            raise OptimizerError(
                f"Muon takes real matrices, and {name!r} is {'complex' if is_complex else 'real'}, of shape "
                f"{tuple(shape)}; give it the names of matrices, fsshard.build_optimizer(model, torch.optim.Muon, "
                "[...]), and another optimizer the rest"
            )


# ------------------------------------------------------------------------------------------------ asked alike


def asked_of(
    optimizer_class: type[Optimizer], groups: Iterable[Mapping[str, Any]], defaults: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """Return what a rank asks for, as ranks compare it: (what, text that is the same on every rank).

    Args:
        optimizer_class: of it.
        groups: with names in place of parameters.
        defaults: keyword arguments of its constructor.
    """
    asked = [("optimizer", f"{optimizer_class.__module__}.{optimizer_class.__qualname__}")]
    asked += [(key, _text(value)) for key, value in sorted(defaults.items())]
    for index, group in enumerate(groups):
        asked += [(f"param_groups[{index}][{key!r}]", _text(value)) for key, value in sorted(group.items())]
    return asked


def _text(value: object) -> str:
    """Return a text that is the same on every rank: of what is no plain value, its type or its name."""
    if isinstance(value, Tensor):
        return (
            f"tensor({value.tolist()})" if value.numel() <= 16 and not value.is_meta else f"tensor{tuple(value.shape)}"
        )
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(_text(item) for item in value) + ")"
    if value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype)):
        return repr(value)
    if isinstance(value, type) or inspect.isroutine(value):
        return str(getattr(value, "__qualname__", type(value).__name__))
    return type(value).__name__


def check_asked_alike(
    group: dist.ProcessGroup | None, what: str, asked: Sequence[tuple[str, str]], digests: Sequence[str]
) -> None:
    """Raise on every rank unless all ask for the same. A collective only where they do not.

    Args:
        group: the ranks.
        what: the call, for the text.
        asked: this rank's, from :func:`asked_of`.
        digests: every rank's digest of it, in rank order.

    Raises:
        RankMismatch: names two ranks and the first differences.
    """
    if group is None or len(set(digests)) == 1:
        return
    tables = [dict(table) for table in per_rank(group, list(asked))]
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    here, there = tables[0], tables[other]
    names = [name for name in dict.fromkeys((*here, *there)) if here.get(name) != there.get(name)]
    told = [f"{name} is {here.get(name, 'not given')} and {there.get(name, 'not given')}" for name in names[:3]]
    raise RankMismatch(
        f"{what}: ranks 0 and {other} were asked for different things: {_short('; '.join(told))}; pass the same on "
        "every rank, since each updates a part of one model"
    )


def _short(text: str, most: int = 600) -> str:
    return text if len(text) <= most else text[:most] + " ..."
