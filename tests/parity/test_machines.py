"""Engines agree on other code paths of the math libraries, too: the short form of ``make machines``, and its table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fsshard.launching.pool import RankPool
from tests.complex_params.training import equal, train
from tests.parity import machines, page
from tests.parity.machines import LOWEST, SETTINGS, Line, Work
from tests.zoo import COMPLEX, ZOO

SHORT = Work(
    rows=(("tfno", "clip", "AdamW"),),
    wide=("neuralop_AdamW",),
    cases=COMPLEX,
    trainings=("zoo-transposed", "turned_complex"),
)
"""The whole suite runs without any setting on one thread per rank; this runs on what differs most from that."""


@pytest.fixture(scope="module")
def lowest() -> Iterator[RankPool]:
    with machines.ranks_under(LOWEST) as pool:
        yield pool


@pytest.mark.long
def test_ranks_take_other_code_paths(lowest: RankPool, ranks: Any) -> None:
    """Which kernels differ depends on the CPU, but some do."""
    usual, one, two = (
        ranks.run(machines.probe, 1)[0],
        *(lowest.run(machines.with_threads, 1, threads, machines.probe)[0] for threads in (1, 2)),
    )
    assert one == lowest.run(machines.probe, 1)[0]
    assert two.changed(one)
    if torch.backends.cpu.get_cpu_capability() != "DEFAULT":
        assert one.changed(usual)


@pytest.mark.long
@pytest.mark.parametrize("job", machines.JOBS)
def test_engines_agree_there(lowest: RankPool, job: str) -> None:
    found = machines.told(machines.JOBS[job], lowest, 2, SHORT)
    assert found and [fault for _, fault in found if fault] == []


def test_engines_agree_on_two_threads(ranks: Any) -> None:
    """Large tensors are shared between threads, whose shares of a shard are not those of the whole."""
    try:
        assert {fault for _, fault in machines.told(machines.engines, ranks, 2, Work(wide=SHORT.wide))} == {""}
    finally:
        ranks.run(torch.set_num_threads, 2, 1)  # other tests' ranks have one: sums over two have other last bits


def job_contiguous() -> tuple[bool, bool]:
    """Return whether this CPU multiplies by strides, and whether a contiguous copy then trains as the model does."""
    native, copy = ZOO["transposed"].build(), ZOO["transposed"].build()
    copy.w.data = copy.w.data.contiguous()
    return machines.probe().by_strides, equal(train(native, "transposed"), train(copy, "transposed"))


@pytest.mark.long
def test_the_layout_is_kept_for_a_reason(lowest: RankPool) -> None:
    """Where MKL is told to be compatible, the case ``transposed`` tells a copy with other strides, on any CPU."""
    by_strides, same = lowest.run(job_contiguous, 1)[0]
    assert same is not by_strides


def test_what_a_cpu_lacks_is_named_and_not_run(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("model name\t: Old CPU\nflags\t\t: sse4_1 sse4_2\ncpu family\t: 25\n")
    flags = machines.cpu_flags(str(tmp_path / "cpuinfo"))
    assert flags == {"sse4_1", "sse4_2"} and machines.cpu_flags(str(tmp_path / "absent")) == frozenset()
    for setting in (setting for setting in SETTINGS if setting.needs == machines.AVX512):
        (line,) = machines.run(setting, flags, Work(), {})
        assert line.cells[2] == "not run: this CPU lacks avx512f, avx512bw, avx512dq, avx512vl"


def test_a_fault_is_listed_and_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bad = Line(["`X=1`", "2", "-", "no", "3 exact, 1 different", "", ""], ["X=1, threads: 2: mlp under fsdp: step 0"])
    monkeypatch.setattr(machines, "run_all", lambda *_: [Line(["none", "1"]), bad])
    monkeypatch.setattr(machines, "environment", lambda: {"processor": "Old CPU"})
    assert machines.main(["--table", str(tmp_path / "page.md")]) == 1
    text = page.part_of((tmp_path / "page.md").read_text(), "machines, Old CPU")
    assert text is not None and "| 3 exact, 1 different |" in text
    assert "- X=1, threads: 2: mlp under fsdp: step 0" in text
    monkeypatch.setattr(machines, "run_all", lambda *_: [])
    assert machines.main([]) == 0
