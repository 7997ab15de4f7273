"""What must hold before an optimizer is built: checked on every rank, raised on every rank."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from fsshard.backends.base import Backend
from fsshard.comm.agreement import per_rank
from fsshard.errors import OptimizerError, RankMismatch, UnsupportedByBackend
from fsshard.oss.partition import GLOBAL_OPTIMIZERS
from fsshard.sharded.optimizer_probe import Cut, ProbedGroup, ProbeResult, Untried, begins_with_closure, try_on_parts

__all__ = [
    "WHOLE_TENSOR_OPTIMIZERS",
    "asked_of",
    "calls_closure_first",
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
    world_size: int,
    optimizer_class: type[Optimizer],
    groups: Sequence[ProbedGroup],
    defaults: Mapping[str, Any],
    separable: bool | None,
    *,
    warn: bool = True,
    divided_before: bool = False,
) -> None:
    """Raise for an algorithm that would train something else where a rank's optimizer sees parts. Local.

    Args:
        backend: what divides.
        world_size: ranks that it divides among.
        optimizer_class: the user's.
        groups: as it will have them.
        defaults: keyword arguments of its constructor.
        separable: True vouches for it, False refuses it, None finds out.
        warn: say that it could not be found out.
        divided_before: other mesh dimensions than data divide parameters, under whatever backend.

    Raises:
        UnsupportedByBackend: names the nearest backend that works.
    """
    name, of_torch = optimizer_class.__name__, optimizer_class.__module__.startswith("torch.optim")
    divides = backend.facts.divides != "nothing" and world_size > 1
    if (separable and not of_torch) or not (divides or divided_before):
        return
    ancestry = {base.__name__ for base in optimizer_class.__mro__}
    needs_whole = bool(ancestry & (WHOLE_TENSOR_OPTIMIZERS | GLOBAL_OPTIMIZERS)) or separable is False
    on_parts = UnsupportedByBackend(
        f"{name}, which needs each parameter whole, where another mesh dimension divides some",
        backend.name,
        "use an optimizer that works number by number, such as torch.optim.AdamW, or a mesh of data alone",
    )
    if divided_before and needs_whole:
        raise on_parts
    if divides and separable is False:
        _refuse(backend, optimizer_class, "separable=False: it needs all parameters, whole", keeps_whole=False)
    if divides and ancestry & GLOBAL_OPTIMIZERS:
        _refuse(backend, optimizer_class, "its line search needs all parameters on every rank", keeps_whole=False)
    if divides and needs_whole and backend.facts.divides == "elements":
        _refuse(backend, optimizer_class, "it needs each parameter whole", keeps_whole=True)
    tried = None if of_torch or _is_fake() else _try(backend, optimizer_class, groups, defaults, warn, divided_before)
    if tried is None:
        return
    if divided_before and not tried.by_number:
        raise on_parts
    if divides and not (tried.by_parameter and (tried.by_number or backend.facts.divides != "elements")):
        some, whole = ("parts of a parameter", "the whole one") if tried.by_parameter else ("some", "all parameters")
        why = f"tried on small tensors, its step on {some} is not its step on {whole}"
        vouch = VOUCH.format(name=name)
        _refuse(backend, optimizer_class, f"{why}; if that is wrong: {vouch}", keeps_whole=tried.by_parameter)


def _refuse(backend: type[Backend], optimizer_class: type[Optimizer], why: str, *, keeps_whole: bool) -> None:
    alternative = "use backend='fairscale' or 'ddp'" if keeps_whole else "use backend='ddp'"
    raise UnsupportedByBackend(f"{optimizer_class.__name__} ({why})", backend.name, alternative)


def _try(
    backend: type[Backend],
    optimizer_class: type[Optimizer],
    groups: Sequence[ProbedGroup],
    defaults: Mapping[str, Any],
    warn: bool,
    divided_before: bool,
) -> ProbeResult | None:
    """Return the result of a trial; None where there can be none, with a warning."""
    cut: Cut = functools.partial(backend.cut_in_two, in_order=all(group.in_order for group in groups))
    if divided_before and backend.facts.divides != "elements":
        cut = _half_of_the_rows
    try:
        return try_on_parts(optimizer_class, groups, defaults, cut)
    except Untried as error:
        if warn:
            name = optimizer_class.__name__
            warnings.warn(
                f"{name} could not be tried on small tensors ({error}), so it is unknown whether it works under "
                f"backend {backend.name!r}, whose ranks see parts of the parameters. If it treats each element by "
                f"itself, say so: {VOUCH.format(name=name)}; otherwise use backend='ddp'",
                stacklevel=4,
            )
        return None


def _half_of_the_rows(whole: Tensor) -> tuple[Tensor, Tensor] | None:
    """As the ranks of another mesh dimension hold a parameter that the engine leaves as it is."""
    return None if len(whole) <= 64 else (whole[:64].clone(), whole[64:].clone())


def calls_closure_first(
    optimizer_class: type[Optimizer], groups: Sequence[ProbedGroup], defaults: Mapping[str, Any]
) -> bool:
    """Whether ``step(closure)`` begins with the closure; False where that cannot be found out. Local."""
    if optimizer_class.__module__.startswith("torch.optim"):
        return True
    try:
        return begins_with_closure(optimizer_class, groups, defaults)
    except Untried:
        return False


def _is_fake() -> bool:
    """Whether tensors that are made now have no values: an estimate is being made."""
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
    """Raise for torch's Muon over anything but real matrices: of complex ones it drops the imaginary part. Local.

    Args:
        optimizer_class: the user's.
        parameters: the name, the shape and whether it is complex, of each.

    Raises:
        OptimizerError: names the parameters.
    """
    if optimizer_class.__name__ != "Muon" or not optimizer_class.__module__.startswith("torch.optim"):
        return
    wrong = [(name, shape, is_complex) for name, shape, is_complex in parameters if is_complex or len(shape) != 2]
    if wrong:
        name, shape, is_complex = wrong[0]
        what = f"{'complex' if is_complex else 'real'}, of shape {tuple(shape)}"
        names = _short(", ".join(name for name, _, _ in wrong), 200)
        raise OptimizerError(
            f"Muon takes real matrices, and {name!r} is {what}; give it the names of matrices, "
            f"fsshard.build_optimizer(model, torch.optim.Muon, [...]), and another optimizer the rest: {names}"
        )


# ------------------------------------------------------------------------------------------------ asked alike


def asked_of(
    optimizer_class: type[Optimizer], groups: Iterable[Mapping[str, Any]], defaults: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """What a rank asks for, as ranks compare it: (what, text that is the same on every rank).

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
    """A text that is the same on every rank: of what is no plain value, its type or its name."""
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
