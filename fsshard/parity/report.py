"""The result of a comparison, numbers and verdicts as plain data; and how far two tensors, or numbers, are apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from fsshard.parity.sketch import real_view
from fsshard.recipes.recipe import Arguments

# In the order in which a step computes them, so the first one that differs is nearest to the cause.
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
        text = f"step {self.step}, {self.quantity}"
        if self.name:
            text += f" of {self.name}"
        text += f", rank {self.rank}"
        difference = self.difference
        if difference.index:
            text += f" at {list(difference.index)}"
        if difference.expected or difference.got:
            text += f": expected {difference.expected}, got {difference.got}"
        if difference.apart or not difference.note:
            text += f" ({_size(difference)})"
        if difference.note:
            text += f"; {difference.note}"
        return text


def _size(difference: Difference) -> str:
    bound = f"bound {difference.bound:.3g}"
    if difference.estimated:
        return f"off by about {difference.max_abs:.3g} per element, {bound}"
    ulps = f"{difference.ulps:.3g}"
    if difference.max_abs and difference.ulps < 1:
        ulps = "<1"
    return f"off by {difference.apart:.3g}, {bound}; at most {difference.max_abs:.3g}, {ulps} ulp"


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
    def weight(difference: Difference) -> tuple[int, float, float]:
        return SEVERITY[difference.verdict], difference.ulps, difference.max_abs

    return max(differences, key=weight, default=Difference())


def worst_of(verdicts: Iterable[str]) -> str:
    """Return ``"different"``, ``"bound"`` or ``"exact"``."""
    return max(verdicts, key=SEVERITY.__getitem__, default="exact")


def first_divergence(
    steps: Sequence[StepReport],
    parameters: list[str],
    verdict: str = "",
    quantities: Sequence[str] = QUANTITIES,
) -> Divergence | None:
    """Return the earliest difference: by step, by stage of the step, by the order of ``parameters`` in the model.

    ``verdict`` is that of the difference; "" for any that is not exact.
    """
    verdicts = (verdict,) if verdict else ("bound", "different")
    order = {name: index for index, name in enumerate(parameters)}

    def place(name: str) -> int:
        # The name of a tensor of the optimizer's state begins with its parameter's.
        parameter = name.partition(": ")[0]
        return order.get(parameter, len(order))

    for number, step in enumerate(steps):
        for quantity in quantities:
            differences = step.differences.get(quantity, {})
            names = [name for name, each in differences.items() if each.verdict in verdicts]
            if names:
                name = min(names, key=place)
                return Divergence(
                    step=number,
                    quantity=quantity,
                    name=name,
                    rank=differences[name].rank,
                    difference=differences[name],
                )
    return None


# ------------------------------------------------------------------------------------------- tensors and numbers


def difference(
    expected: Tensor,
    got: Tensor,
    bound: Tensor | float = 0.0,
    *,
    rank: int = 0,
) -> Difference:
    """Compare ``got`` with ``expected``.

    ``bound`` is the largest difference that rounding explains, of a real number or element by element of the real view.
    """
    if expected.dtype != got.dtype or expected.shape != got.shape:
        reference = f"{expected.dtype}{tuple(expected.shape)}"
        note = f"{got.dtype}{tuple(got.shape)} where the reference has {reference}"
        return Difference(verdict="different", max_abs=math.inf, ulps=math.inf, rank=rank, note=note)
    a = real_view(expected.detach().cpu()).reshape(-1)
    b = real_view(got.detach().cpu()).reshape(-1)
    # Most tensors end here, without a copy in float64.
    if torch.equal(a, b):
        return Difference(rank=rank)
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return Difference(rank=rank)
    wide = torch.float64 if a.is_floating_point() else torch.int64
    apart = (a.to(wide) - b.to(wide)).abs().double()
    # It is infinite where one is NaN, or only one is infinite, and nothing where both are the same infinity.
    apart = torch.nan_to_num(apart, nan=math.inf, posinf=math.inf)
    apart[same] = 0.0
    allowed = torch.as_tensor(bound).reshape(-1).double().cpu()
    # An overflow allows nothing.
    allowed = torch.nan_to_num(allowed, nan=0.0, posinf=0.0).expand_as(apart)
    # The worst element uses most of its bound; among those that have none, it differs most.
    share = torch.where(same, 0.0, apart / allowed)
    worst = int(torch.where(share == share.max(), apart, -1.0).argmax())
    size = float(apart[worst])
    limit = float(allowed[worst])
    index = _index_of(expected, worst)
    return Difference(
        verdict="different" if size > limit else "bound",
        max_abs=float(apart.max()),
        apart=size,
        ulps=ulps_between(a, b),
        bound=limit,
        rank=rank,
        index=index,
        expected=_element_text(expected, index),
        got=_element_text(got, index),
    )


def _index_of(tensor: Tensor, place: int) -> tuple[int, ...]:
    """Return the index of the element that a place in the flat real view belongs to."""
    if not tensor.dim():
        return ()
    if tensor.is_complex():
        place //= 2
    index = torch.unravel_index(torch.tensor(place), tensor.shape)
    return tuple(map(int, index))


def number_difference(
    expected: float,
    got: float,
    bound: float = 0.0,
    *,
    rank: int = 0,
) -> Difference:
    """Compare two numbers; units in the last place are counted in float32."""
    a = torch.tensor(expected, dtype=torch.float64)
    b = torch.tensor(got, dtype=torch.float64)
    result = difference(a, b, bound, rank=rank)
    if result.verdict == "exact":
        return result
    ulps = ulps_between(a.float(), b.float())
    return replace(result, ulps=ulps, expected=repr(expected), got=repr(got))


def unequal(rank: int, note: str, expected: str = "", got: str = "") -> Difference:
    """Return a difference for which there is no bound."""
    return Difference(verdict="different", rank=rank, expected=expected, got=got, note=note)


def value_differences(expected: Arguments, got: Arguments, rank: int) -> Iterator[tuple[str, Difference]]:
    """Compare values that are no tensors, key by key; a key that one side lacks is a difference too."""
    for key in dict.fromkeys([*expected, *got]):
        one = _text_of(expected, key)
        other = _text_of(got, key)
        if one == other:
            yield key, Difference(rank=rank)
        else:
            yield key, unequal(rank, "not equal", one, other)


def _text_of(values: Arguments, key: str) -> str:
    # Texts are equal for NaN, and exact for numbers.
    return repr(values[key]) if key in values else "missing"


def place_of(shape: Sequence[int], pairs: bool, index: tuple[int, ...]) -> int:
    """Return where an element begins in the real view of a tensor, whose numbers are pairs if it is complex."""
    flat = int(np.ravel_multi_index(index, tuple(shape))) if index else 0
    return 2 * flat if pairs else flat


# By the bytes of an element.
INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def ulps_between(a: Tensor, b: Tensor) -> float:
    """Return the largest number of representable numbers between two real tensors' elements; inf if only one is NaN.

    The bits of IEEE numbers, read as integers, count them in order on each side of zero (Bruce Dawson, Comparing
    Floating Point Numbers, 2012).
    """
    if not a.is_floating_point():
        apart = (a.to(torch.int64) - b.to(torch.int64)).abs()
        return float(apart.max()) if apart.numel() else 0.0
    if bool((a.isnan() != b.isnan()).any()):
        return math.inf
    numbers = ~a.isnan()
    if not bool(numbers.any()):
        return 0.0
    one = _ordered(a[numbers])
    other = _ordered(b[numbers])
    same_sign = (one < 0) == (other < 0)
    # A difference of int64 counts can overflow where signs differ; there the counts are so many that float64 will do.
    across_zero = one.double().abs() + other.double().abs()
    apart = torch.where(same_sign, (one - other).abs().double(), across_zero)
    return float(apart.max())


def _ordered(value: Tensor) -> Tensor:
    kind = INTEGERS[value.element_size()]
    bits = value.contiguous().view(kind).to(torch.int64)
    return torch.where(bits < 0, torch.iinfo(kind).min - bits, bits)


def _element_text(tensor: Tensor, index: tuple[int, ...]) -> str:
    value = tensor.detach()[index].item()
    if isinstance(value, complex):
        return f"{value.real:.9g}{value.imag:+.9g}j"
    return f"{value:.9g}" if isinstance(value, float) else str(value)
