"""Reports for the eye: text, picture."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fsshard.errors import ConfigurationError, MissingExtra
from fsshard.parity import render
from fsshard.parity.render import ParityReport
from fsshard.parity.report import Difference
from tests.parity.test_report import WEIGHT, bounded, different, exact, failed, far, refused, report, step
from tests.sets import often


def rows(made: ParityReport) -> dict[tuple[str, str], list[str]]:
    return {(row[0], row[1]): row for row in render.rows(made)}


# Text


TABLE = """\
largest |difference| per quantity, in units of the last place (ulp) too
backend    ranks  verdict    loss               gradient       weight         state  seconds
---------  -----  ---------  -----------------  -------------  -------------  -----  -------
none           1  exact      0                  0              0              0          0.0
fsdp           2  in bound   0                  1.2e-07 3 ulp  1.0e-08 1 ulp  0          0.0
fsdp2          2  DIFFERENT  2.5e-01 4e+05 ulp  inf            inf            0          0.0
ddp            2  refused    -                  -              -              -          0.0
fairscale      2  FAILED     -                  -              -              -          0.0"""


def test_the_whole_text() -> None:
    whole = report(exact("none", 1), bounded(), different(), refused(), failed())
    head, table, *paragraphs, last = str(whole).split("\n\n")
    assert head == "parity of recipes:mlp: 5 runs of 4 steps against ddp"
    assert table == TABLE
    assert paragraphs == [
        f"fsdp at 2 ranks: not equal, but within what rounding alone can do\n  first: {bounded().first_divergence}",
        "fsdp2 at 2 ranks: different from step 2 on\n"
        f"  first: {different().first_divergence}\n"
        "  hint: all gradients together are 2 times the reference's: summed over ranks?",
        "ddp at 2 ranks: refused\n  why: ddp cannot do it; use fsdp2",
        "fairscale at 2 ranks: failed\n"
        "  why: rank 1 failed with ValueError: broken\n"
        "    Traceback (most recent call last):\n"
        '      File "r.py", line 3, in loss\n'
        "    ValueError: broken",
    ]
    assert last == (
        f"NOT the same training: fsdp2 at 2 ranks: different from step 2 on, gradient of {WEIGHT}; "
        "fairscale at 2 ranks: failed (rank 1 failed with ValueError: broken); "
        "ddp at 2 ranks: refused (ddp cannot do it; use fsdp2)"
    )
    assert str(whole).isascii()


def test_the_result_in_words() -> None:
    assert render.summary(report(exact("ddp"), exact("fsdp2"), bounded())) == (
        "all agree: 2 exact, 1 within the rounding bound"
    )
    assert render.summary(report()) == "nothing was compared"
    assert render.summary(report(exact("fsdp"), refused(world_size=1))) == (
        "NOT shown to be the same training: ddp at 1 rank: refused (ddp cannot do it; use fsdp2)"
    )
    many = render.summary(report(*(different(f"engine{i}") for i in range(7))))
    assert "engine3" in many and "engine4" not in many and many.endswith("; and 3 more") and "\n" not in many


def test_what_failed_for_one_reason_is_told_once() -> None:
    whole = str(report(failed("fsdp", 1), failed("fsdp"), failed("fsdp2"), different("ddp"), failed("fairscale")))
    assert whole.count("Traceback") == 2
    assert "\n\nfsdp at 1 rank: failed\n" in whole and "\n\nfsdp, fsdp2, fairscale at 2 ranks: failed\n" in whole
    assert "; fsdp, fsdp2, fairscale at 2 ranks: failed (rank 1" in whole.rpartition("\n\n")[2]


def test_warnings_and_what_is_not_reproducible_are_told() -> None:
    made = report(exact("ddp"))
    made.warnings = ["all ranks get the same batches", "no weight changed"]
    warned = ["warning: all ranks get the same batches", "warning: no weight changed"]
    assert str(made).split("\n\n")[-3:] == [*warned, "all agree: 1 exact; 2 warnings"]
    cell = different()
    cell.reproducible = False
    assert "not reproducible" in str(report(cell))


def test_numbers_are_short() -> None:
    numbers = [render.number(v) for v in (0.0, 1.23e-7, 0.25, math.inf, math.nan)]
    assert numbers == ["0", "1.2e-07", "2.5e-01", "inf", "nan"]
    assert [render.units(v) for v in (0.0, 0.3, 1.0, 512.0, 441234.0)] == ["<1", "<1", "1", "512", "4e+05"]
    assert render.size(far("bound", max_abs=1e-17, ulps=0.0)) == "1.0e-17 <1 ulp"
    assert render.size(Difference(verdict="different", note="is missing")) == "see below"
    assert render.size(far(max_abs=math.inf, ulps=math.inf)) == "inf"


def test_other_quantities_have_a_column_where_they_differ() -> None:
    assert render.quantities(report(exact("ddp"), different())) == ["loss", "gradient", "weight", "state"]
    cell = exact("fsdp")
    cell.steps[0] = step(buffer=far(), norm=far("bound"))
    assert render.quantities(report(cell)) == ["loss", "gradient", "norm", "weight", "state", "buffer"]
    assert rows(report(cell))["fsdp", "2"][8] == "1.2e-02 4e+05 ulp"
    assert "norm " in str(report(cell))


# Picture


def axes_of(figure: Figure, panel: str) -> Axes:
    return next(axes for axes in figure.axes if axes.get_label() == panel)


def test_losses_lie_on_top_of_each_other_and_all_show() -> None:
    figure = render.figure(report(exact("ddp"), exact("fsdp"), exact("fsdp2")))
    reference, *others = axes_of(figure, "loss, 2").lines
    assert reference.get_label() == "ddp (reference)"
    assert [line.get_label() for line in others] == ["ddp: exact", "fsdp: exact", "fsdp2: exact"]
    assert all(list(line.get_ydata()) == list(reference.get_ydata()) for line in others)
    widths = [line.get_linewidth() for line in (reference, *others)]
    sizes = [line.get_markersize() for line in others]
    assert widths == sorted(set(widths), reverse=True) and sizes == sorted(set(sizes), reverse=True)
    assert len({line.get_marker() for line in others}) == len({line.get_color() for line in others}) == 3
    legend = axes_of(figure, "loss, 2").get_legend()
    assert len(figure.axes) == 1 and legend and legend.get_title().get_text() == "difference: exactly 0"


def test_a_column_per_world_size() -> None:
    cells = [exact("ddp", 1), exact("fsdp", 1), exact("ddp", 2), different(), failed("fsdp", 2)]
    figure = render.figure(report(*cells))
    panels = ("loss", "loss difference", "weight difference")
    assert {axes.get_label() for axes in figure.axes} == {f"{p}, {n}" for p in panels for n in (1, 2)}
    assert [axes_of(figure, f"loss, {n}").get_title() for n in (1, 2)] == ["1 rank", "2 ranks"]
    said = [[text.get_text() for text in axes_of(figure, f"weight difference, {n}").texts] for n in (1, 2)]
    assert said == [["difference: exactly 0"], []]
    (gone,) = [line for line in axes_of(figure, "loss, 2").lines if line.get_label() == "fsdp: FAILED"]
    assert gone.get_linestyle() == "None" and len(gone.get_xdata()) == 0


def test_zero_has_a_place_of_its_own_on_the_log_axis() -> None:
    figure = render.figure(report(exact("fsdp"), different()))
    axes = axes_of(figure, "weight difference, 2")
    assert axes.get_yscale() == "symlog"
    labels = dict(zip([t.get_text() for t in axes.get_yticklabels()], axes.get_yticks(), strict=True))
    zero, broken = labels["0"], labels["nan, inf"]
    same, off = (list(line.get_ydata()) for line in axes.lines[:2])
    low, high = axes.get_ylim()
    assert low < zero == 0 and {*same, off[0], off[1]} == {0}
    assert off[2] == 0.25
    assert max(place for label, place in labels.items() if label.startswith("$")) < off[3] == broken < high
    (mark,) = [line for line in axes.lines if list(line.get_xdata()) == [2, 2]]
    assert mark.get_color() == axes.lines[1].get_color()


@pytest.mark.parametrize("suffix", often(["png", "svg", "pdf"], "png"))
def test_picture_files(suffix: str, tmp_path: Path) -> None:
    made = report(exact("fsdp", 1), bounded(), different(), refused(), failed())
    file = tmp_path / f"parity.{suffix}"
    made.plot(file)
    first = file.read_bytes()
    assert first.startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix])
    made.plot(str(file))
    assert file.read_bytes() == first  # no date, no random ids


def test_a_bad_picture_name(tmp_path: Path) -> None:
    for name, match in (
        ("parity.jpg", r"ends in \.png, \.svg or \.pdf, got suffix '\.jpg'"),
        ("no/a.png", "no folder"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            report(exact("fsdp")).plot(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [m for m in sys.modules if m.partition(".")[0] == "matplotlib"] + ["matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    made = report(exact("fsdp"))
    with pytest.raises(MissingExtra, match=r"matplotlib.*fsshard\[plot\]"):
        made.plot(tmp_path / "parity.png")
    with pytest.raises(MissingExtra, match=r"fsshard\[plot\]"):
        render.figure(made)
    assert "all agree" in str(made)
