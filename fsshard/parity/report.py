"""The result of a comparison, numbers and verdicts as plain data; and how far two tensors, or numbers, are apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fsshard.parity.sketch import real_view

QUANTITIES = (
    "initial weight",
    "batch",
    "loss",
    "gradient",
    "norm",
    "param_groups",
    "weight",
    "state",
    "buffer",
    "random state",
)
"""In the order in which a step computes them, so the first one that differs is nearest to the cause."""
SEVERITY = {"exact": 0, "bound": 1, "different": 2}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The distance of one tensor (or number) from the reference's.

    Attributes:
        verdict: ``"exact"``, ``"bound"`` (within the derived rounding bound) or ``"different"``.
        max_abs: the largest absolute difference; infinite where exactly one of the two is NaN.
        ulps: the largest difference in units of the last place.
        apart: the absolute difference of the worst element, the one that uses most of its bound.
        bound: what rounding alone may make of the worst element; 0.0 where nothing but equality is right.
        rank: the rank that has the worst element, as owner of the part that it lies in.
        index: where the worst element is.
        expected: its value under the reference.
        got: its value here.
        note: what else there is to say, such as a missing tensor.
        estimated: there are digests but no tensors: ``max_abs`` is the root mean square of the difference, estimated;
            ``apart`` and ``bound`` are what its projections differ by, and may differ by, per element.
    """

    verdict: str = "exact"
    max_abs: float = 0.0
    ulps: float = 0.0
    apart: float = 0.0
    bound: float = 0.0
    rank: int = 0
    index: tuple[int, ...] = ()
    expected: str = ""
    got: str = ""
    note: str = ""
    estimated: bool = False


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The place where a run first differed from the reference: step, quantity, parameter, rank."""

    step: int
    quantity: str
    name: str
    rank: int
    difference: Difference

    def __str__(self) -> str:
        d = self.difference
        what = f"{self.quantity} of {self.name}" if self.name else self.quantity
        where = f" at {list(d.index)}" if d.index else ""
        values = f": expected {d.expected}, got {d.got}" if d.expected or d.got else ""
        ulps = "<1" if d.max_abs and d.ulps < 1 else f"{d.ulps:.3g}"
        size = f" (off by {d.apart:.3g}, bound {d.bound:.3g}; at most {d.max_abs:.3g}, {ulps} ulp)"
        if d.estimated:
            size = f" (off by about {d.max_abs:.3g} per element, bound {d.bound:.3g})"
        size = size if d.apart or not d.note else ""
        return f"step {self.step}, {what}, rank {self.rank}{where}{values}{size}{f'; {d.note}' if d.note else ''}"


@dataclass(kw_only=True)
class StepReport:
    """One step of one run.

    Attributes:
        loss: mean over the ranks.
        reference_loss: the reference's.
        norm: of the gradients, before clipping.
        reference_norm: the reference's.
        differences: quantity -> name -> difference, for every parameter, every state tensor and every buffer.
    """

    loss: float
    reference_loss: float
    norm: float
    reference_norm: float
    differences: dict[str, dict[str, Difference]] = field(default_factory=dict)

    def worst(self, quantity: str) -> Difference:
        """Return the most telling difference: one beyond its bound first, then the largest."""
        return _most_telling(self.differences.get(quantity, {}).values())


@dataclass(kw_only=True)
class RankStep(StepReport):
    """The findings of one rank in one step; ``owner`` holds the (quantity, name) whose worst element it owns."""

    owner: set[tuple[str, str]] = field(default_factory=set)


@dataclass(kw_only=True)
class Cell:
    """One backend at one world size, against the reference.

    Attributes:
        backend: its name.
        world_size: number of ranks.
        verdict: ``"exact"``, ``"bound"``, ``"different"``, ``"refused"`` (the backend or the comparison has no meaning
            here, see ``reason``) or ``"failed"`` (a rank raised, died or did not answer, see ``reason``).
        steps: what each step gave.
        first_divergence: the first difference beyond its bound, or, where all are within, the first at all.
        reason: why it was refused or failed, or what else is known of a difference.
        traceback: of the rank that failed first.
        reproducible: False if a second run of the same backend differed; None if it was not checked.
        seconds: wall time.
        mesh: the mesh that the model was divided over, such as ``"data=2,tp=2"``; "" without one.
    """

    backend: str
    world_size: int
    verdict: str = "exact"
    steps: list[StepReport] = field(default_factory=list)
    first_divergence: Divergence | None = None
    reason: str = ""
    traceback: str = ""
    reproducible: bool | None = None
    seconds: float = 0.0
    mesh: str = ""

    @property
    def ok(self) -> bool:
        """Return whether it differs from the reference by rounding at most."""
        return self.verdict in ("exact", "bound")

    def worst(self, quantity: str) -> Difference:
        """Return the most telling difference of a quantity over all steps."""
        return _most_telling(step.worst(quantity) for step in self.steps)


def _most_telling(differences: Iterable[Difference]) -> Difference:
    return max(differences, key=lambda d: (SEVERITY[d.verdict], d.ulps, d.max_abs), default=Difference())


def worst_of(verdicts: Iterable[str]) -> str:
    """Return ``"different"``, ``"bound"`` or ``"exact"``."""
    return max(verdicts, key=SEVERITY.__getitem__, default="exact")


def first_divergence(
    steps: Sequence[StepReport], parameters: list[str], verdict: str = "", quantities: Sequence[str] = QUANTITIES
) -> Divergence | None:
    """Return the earliest difference: by step, by stage of the step, by the order of ``parameters`` in the model.

    ``verdict`` is that of the difference; "" for any that is not exact.
    """
    for number, step in enumerate(steps):
        for quantity in quantities:
            named = step.differences.get(quantity, {})
            hits = [name for name, d in named.items() if d.verdict != "exact" and verdict in ("", d.verdict)]
            if hits:
                order = {name: index for index, name in enumerate(parameters)}
                name = min(hits, key=lambda n: order.get(n.partition(": ")[0], len(order)))
                found = named[name]
                return Divergence(step=number, quantity=quantity, name=name, rank=found.rank, difference=found)
    return None


# ------------------------------------------------------------------------------------------- tensors and numbers


def difference(expected: Tensor, got: Tensor, bound: Tensor | float = 0.0, *, rank: int = 0) -> Difference:
    """Compare ``got`` with ``expected``.

    ``bound`` is the largest difference that rounding explains, of a real number or element by element of the real view.
    """
    if expected.dtype != got.dtype or expected.shape != got.shape:
        note = f"{got.dtype}{tuple(got.shape)} where the reference has {expected.dtype}{tuple(expected.shape)}"
        return Difference(verdict="different", max_abs=math.inf, ulps=math.inf, rank=rank, note=note)
    a, b = (real_view(tensor.detach().cpu()).reshape(-1) for tensor in (expected, got))
    if torch.equal(a, b) or bool((same := (a == b) | (a.isnan() & b.isnan())).all()):
        return Difference(rank=rank)
    wide = torch.float64 if a.is_floating_point() else torch.int64
    # infinite where one is NaN, or only one is infinite; nothing where both are the same infinity
    apart = torch.nan_to_num((a.to(wide) - b.to(wide)).abs().double(), nan=math.inf, posinf=math.inf)
    apart[same] = 0.0
    allowed = bound.reshape(-1).double().cpu() if isinstance(bound, Tensor) else torch.tensor(float(bound)).double()
    allowed = torch.nan_to_num(allowed, nan=0.0, posinf=0.0)  # an overflow allows nothing
    # The worst element uses most of its bound; among those that have none, it differs most.
    share = torch.where(same, 0.0, apart / allowed)
    worst = int(torch.where(share == share.max(), apart, -1.0).argmax())
    limit, place = float(allowed[worst] if allowed.dim() else allowed), worst // 2 if expected.is_complex() else worst
    index = tuple(map(int, torch.unravel_index(torch.tensor(place), expected.shape))) if expected.dim() else ()
    return Difference(
        verdict="different" if float(apart[worst]) > limit else "bound",
        max_abs=float(apart.max()),
        apart=float(apart[worst]),
        ulps=ulps_between(a, b),
        bound=limit,
        rank=rank,
        index=index,
        expected=_element_text(expected, index),
        got=_element_text(got, index),
    )


def number_difference(expected: float, got: float, bound: float = 0.0, *, rank: int = 0) -> Difference:
    """Compare two numbers; units in the last place are counted in float32."""
    a, b = torch.tensor(expected, dtype=torch.float64), torch.tensor(got, dtype=torch.float64)
    found = difference(a, b, bound, rank=rank)
    if found.verdict == "exact":
        return found
    return replace(found, ulps=ulps_between(a.float(), b.float()), expected=repr(expected), got=repr(got))


def unequal(rank: int, note: str, expected: str = "", got: str = "") -> Difference:
    """Return a difference for which there is no bound."""
    return Difference(verdict="different", rank=rank, expected=expected, got=got, note=note)


def value_differences(
    expected: Mapping[str, Any], got: Mapping[str, Any], rank: int
) -> Iterator[tuple[str, Difference]]:
    """Compare values that are no tensors, key by key; a key that one side lacks is a difference too."""
    for key in [*expected, *(key for key in got if key not in expected)]:
        one, other = (repr(side[key]) if key in side else "missing" for side in (expected, got))
        # as texts: equal for NaN, and exact for numbers
        yield key, Difference(rank=rank) if one == other else unequal(rank, "not equal", one, other)


def place_of(shape: Sequence[int], pairs: bool, index: tuple[int, ...]) -> int:
    """Return where an element begins in the real view of a tensor, whose numbers are pairs if it is complex."""
    flat = 0
    for size, place in zip(shape, index, strict=False):
        flat = flat * size + place
    return flat * (2 if pairs else 1)


INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
"""By the bytes of an element."""


def ulps_between(a: Tensor, b: Tensor) -> float:
    """Return the largest number of representable numbers between two real tensors' elements; inf if only one is NaN.

    The bits of IEEE numbers, read as integers, count them in order on each side of zero (Bruce Dawson, Comparing
    Floating Point Numbers, 2012).
    """
    if not a.is_floating_point():
        return float((a.to(torch.int64) - b.to(torch.int64)).abs().max()) if a.numel() else 0.0
    if bool((a.isnan() != b.isnan()).any()):
        return math.inf
    known = ~a.isnan()
    if not bool(known.any()):
        return 0.0
    one, other = _ordered(a[known]), _ordered(b[known])
    # A difference of int64 counts can overflow where signs differ; there the counts are so many that float64 will do.
    apart = torch.where(
        (one < 0) == (other < 0), (one - other).abs().double(), one.double().abs() + other.double().abs()
    )
    return float(apart.max())


def _ordered(value: Tensor) -> Tensor:
    kind = INTEGERS[value.element_size()]
    bits = value.contiguous().view(kind).to(torch.int64)
    return torch.where(bits < 0, torch.iinfo(kind).min - bits, bits)


def _element_text(tensor: Tensor, index: tuple[int, ...]) -> str:
    value = tensor.detach()[index].item() if index else tensor.detach().item()
    if isinstance(value, complex):
        return f"{value.real:.9g}{value.imag:+.9g}j"
    return f"{value:.9g}" if isinstance(value, float) else str(value)
