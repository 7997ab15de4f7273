"""Reports: what they say about themselves, JSON there and back, and how far tensors are apart."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch

from fsshard.errors import ConfigurationError, ParityError
from fsshard.parity.render import ParityReport
from fsshard.parity.report import Cell, Difference, Divergence, StepReport, difference, number_difference, ulps_between

WEIGHT = "layers.0.weight"


def far(verdict: str = "different", **given: object) -> Difference:
    """A difference at one element."""
    values = {
        "max_abs": 0.012,
        "apart": 0.012,
        "ulps": 4.4e5,
        "bound": 1.2e-7,
        "rank": 1,
        "index": (3, 4),
        "expected": "0.123",
        "got": "0.135",
    }
    return Difference(verdict=verdict, **{**values, **given})  # type: ignore[arg-type]


def step(loss: float = 0.5, reference_loss: float = 0.5, **differences: Difference) -> StepReport:
    """A step in which everything is exact but ``differences`` (quantity -> of ``WEIGHT``)."""
    found = {q: {"bias": Difference(), WEIGHT: Difference()} for q in ("gradient", "weight", "state")}
    for quantity, one in differences.items():
        found.setdefault(quantity, {})[WEIGHT] = one
    gap = abs(loss - reference_loss)
    found["loss"] = {"": Difference() if gap == 0 else far(max_abs=gap)}
    return StepReport(loss=loss, reference_loss=reference_loss, norm=1.0, reference_norm=1.0, differences=found)


def exact(backend: str, world_size: int = 2, steps: int = 4) -> Cell:
    """A cell without any difference."""
    return Cell(backend=backend, world_size=world_size, steps=[step(1 / (n + 1), 1 / (n + 1)) for n in range(steps)])


def different(backend: str = "fsdp2", world_size: int = 2, at: int = 2) -> Cell:
    """A cell that leaves the reference at step ``at``, by its gradient."""
    cell = exact(backend, world_size)
    cell.steps[at] = step(gradient=far(), weight=far(max_abs=0.25))
    cell.steps[at + 1] = step(0.75, 0.5, gradient=far(max_abs=math.inf, ulps=math.inf), weight=far(max_abs=math.inf))
    cell.verdict = "different"
    cell.first_divergence = Divergence(step=at, quantity="gradient", name=WEIGHT, rank=1, difference=far())
    cell.reason = "all gradients together are 2 times the reference's: summed over ranks?"
    cell.reproducible = True
    return cell


def bounded(backend: str = "fsdp", world_size: int = 2) -> Cell:
    """A cell within the rounding bound."""
    cell = exact(backend, world_size)
    off = far("bound", max_abs=1.2e-7, ulps=3.0, bound=2.4e-7)
    cell.steps[1] = step(gradient=off, weight=far("bound", max_abs=1e-8, ulps=1.0))
    cell.verdict = "bound"
    cell.first_divergence = Divergence(step=1, quantity="gradient", name=WEIGHT, rank=0, difference=off)
    return cell


def refused(backend: str = "ddp", world_size: int = 2) -> Cell:
    """A cell that was never run."""
    return Cell(backend=backend, world_size=world_size, verdict="refused", reason="ddp cannot do it; use fsdp2")


def failed(backend: str = "fairscale", world_size: int = 2) -> Cell:
    """A cell in which a rank raised."""
    trace = 'Traceback (most recent call last):\n  File "r.py", line 3, in loss\nValueError: broken\n'
    reason = "rank 1 failed with ValueError: broken"
    return Cell(backend=backend, world_size=world_size, verdict="failed", reason=reason, traceback=trace)


def report(*cells: Cell) -> ParityReport:
    """A report of 4 steps against ddp."""
    return ParityReport(recipe="recipes:mlp", reference="ddp", steps=4, cells=list(cells))


def test_json_there_and_back() -> None:
    whole = report(exact("none", 1), bounded(), different(), refused(), failed())
    assert ParityReport.from_json(whole.to_json()) == whole


@pytest.mark.parametrize(("place", "name"), [("cells[1]", "verdict"), ("cells[1].steps[0]", "differences")])
def test_a_lost_field_is_told(place: str, name: str) -> None:
    """It does not read as its default, which says that all is exact."""
    text = json.loads(report(exact("none", 1), different()).to_json())
    (text["cells"][1] if name == "verdict" else text["cells"][1]["steps"][0]).pop(name)
    with pytest.raises(ConfigurationError, match=re.escape(f"field {place}.{name}: is missing")):
        ParityReport.from_json(json.dumps(text))


def test_a_verdict_that_is_none_is_told() -> None:
    text = json.loads(report(exact("none", 1), different()).to_json())
    text["cells"][1]["verdict"] = "fine"
    with pytest.raises(ConfigurationError, match=r"cells\[1\].verdict: expected one of exact, .*got 'fine'"):
        ParityReport.from_json(json.dumps(text))


def test_json_has_no_numbers_that_json_does_not_know() -> None:
    cell = exact("fsdp")
    cell.steps[0].loss, cell.steps[0].norm = math.nan, -math.inf
    text = report(cell, different()).to_json()

    def unknown(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    json.loads(text, parse_constant=unknown)
    again = ParityReport.from_json(text)
    assert math.isnan(again["fsdp", 2].steps[0].loss) and again["fsdp", 2].steps[0].norm == -math.inf
    assert again["fsdp2", 2].worst("weight").max_abs == math.inf


@pytest.mark.parametrize(
    ("cells", "ok"),
    [
        ([exact("ddp"), bounded()], True),
        ([exact("ddp"), different()], False),
        ([exact("fsdp"), refused()], False),
        ([failed()], False),
        ([], False),
    ],
)
def test_ok_only_when_all_agree(cells: list[Cell], ok: bool) -> None:
    made = report(*cells)
    assert made.ok is ok
    if ok:
        made.raise_if_different()
    else:
        with pytest.raises(ParityError) as caught:
            made.raise_if_different()
        assert str(caught.value) == str(made)


def test_cells_by_backend_and_world_size() -> None:
    made = report(exact("fsdp", 1), bounded())
    assert made["fsdp", 2].verdict == "bound" and made["fsdp", 1].verdict == "exact"
    assert [cell.world_size for cell in made] == [1, 2]
    with pytest.raises(KeyError):
        made["ddp", 2]


def test_the_worst_is_beyond_its_bound_first_and_large_second() -> None:
    cell = exact("fsdp")
    cell.steps[0] = step(weight=far("bound", max_abs=1.0, ulps=1e6))
    cell.steps[1] = step(weight=far("different", max_abs=1e-9, ulps=1.0))
    cell.steps[2] = step(weight=far("different", max_abs=1e-8, ulps=2.0))
    assert cell.worst("weight").max_abs == 1e-8
    assert cell.worst("buffer") == Difference()


def test_a_divergence_in_words() -> None:
    said = str(different().first_divergence)
    assert said == (
        f"step 2, gradient of {WEIGHT}, rank 1 at [3, 4]: expected 0.123, got 0.135 "
        "(off by 0.012, bound 1.2e-07; at most 0.012, 4.4e+05 ulp)"
    )
    missing = Divergence(step=0, quantity="loss", name="", rank=0, difference=Difference(note="no such tensor"))
    assert str(missing) == "step 0, loss, rank 0; no such tensor"


ONE = torch.tensor([1.0, 2.0, -3.0])


def bumped(value: torch.Tensor, index: int, ulps: int) -> torch.Tensor:
    moved = value.clone()
    moved.view(torch.int32)[index] += ulps
    return moved


def test_equal_is_exact() -> None:
    found = difference(ONE, ONE.clone(), rank=3)
    assert (found.verdict, found.max_abs, found.ulps, found.rank) == ("exact", 0.0, 0.0, 3)
    assert difference(torch.empty(0), torch.empty(0)).verdict == "exact"


def test_nan_and_zeros() -> None:
    nan = torch.tensor([math.nan, 1.0])
    assert difference(nan, nan.clone()).verdict == "exact"
    assert difference(torch.tensor([0.0]), torch.tensor([-0.0])).verdict == "exact"
    found = difference(torch.tensor([1.0, 1.0]), nan, bound=1e9)
    assert (found.verdict, found.max_abs, found.ulps, found.index) == ("different", math.inf, math.inf, (0,))
    inf = torch.tensor([math.inf])
    assert difference(inf, inf.clone()).verdict == "exact"
    assert difference(inf, -inf, bound=1e9).verdict == "different"


@pytest.mark.parametrize("ulps", [1, 5, 1000])
def test_units_in_the_last_place_are_counted(ulps: int) -> None:
    found = difference(ONE, bumped(ONE, 2, ulps))
    assert (found.verdict, found.ulps, found.index) == ("different", ulps, (2,))
    assert found.expected == "-3"


def test_ulps_across_zero_and_of_other_types() -> None:
    tiny = torch.tensor([1e-45])
    assert ulps_between(tiny, -tiny) == 2
    one = torch.ones(1, dtype=torch.float64)
    assert ulps_between(one, torch.nextafter(one, 2 * one)) == 1
    assert ulps_between(torch.tensor([1.0]).bfloat16(), torch.tensor([1.0 + 2.0**-7]).bfloat16()) == 1
    assert ulps_between(torch.tensor([3]), torch.tensor([7])) == 4


def test_a_bound_is_per_element() -> None:
    got = ONE + torch.tensor([0.5, 0.0, 0.1])
    assert difference(ONE, got, 0.6).verdict == "bound"
    assert difference(ONE, got, 0.4).verdict == "different"
    tight = difference(ONE, got, torch.tensor([0.6, 0.0, 0.05]))
    assert (tight.verdict, tight.index) == ("different", (2,))  # beyond its bound, though not the largest
    assert tight.apart == pytest.approx(0.1)
    loose = difference(ONE, got, torch.tensor([1.0, 0.0, 0.11]))
    assert (loose.verdict, loose.index) == ("bound", (2,))  # uses most of its bound
    assert tight.bound == pytest.approx(0.05)
    assert tight.max_abs == pytest.approx(0.5)


def test_complex_numbers_are_pairs() -> None:
    one = torch.tensor([[1 + 1j, 2 - 2j]])
    other = one.clone()
    other.view(torch.float32)[0, 3] += 2.0**-22
    found = difference(one, other)
    assert (found.index, found.ulps, found.max_abs) == ((0, 1), 2, 2.0**-22)  # below 2 ulps are half as large
    assert "j" in found.got


def test_shape_and_dtype_are_named() -> None:
    found = difference(ONE, ONE.double())
    assert found.verdict == "different" and "float64" in found.note
    assert "(2,)" in difference(ONE, ONE[:2]).note


def test_numbers() -> None:
    assert number_difference(1.5, 1.5).verdict == "exact"
    assert number_difference(math.nan, math.nan).verdict == "exact"
    assert number_difference(1.5, 1.5 + 2**-23).ulps == 1
    assert number_difference(1.5, 1.6, 0.2).verdict == "bound"
    assert number_difference(1.5, math.nan, 0.2).verdict == "different"
