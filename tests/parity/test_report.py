"""Reports: what they say about themselves, and JSON there and back."""

from __future__ import annotations

import json
import math
import re

import pytest

from fsshard.errors import ConfigurationError, ParityError
from fsshard.parity.render import ParityReport
from fsshard.parity.report import Cell, Difference, Divergence, StepReport

WEIGHT = "layers.0.weight"


def far(verdict: str = "different", **given: object) -> Difference:
    """A difference at one element."""
    values: dict[str, object] = {
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
    for quantity, difference in differences.items():
        found.setdefault(quantity, {})[WEIGHT] = difference
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
