"""Checks what training needs beyond a step, on one GPU: one rank over nccl, and two ranks over gloo that share it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu import lacking

if reason := lacking(1):
    pytest.skip(reason, allow_module_level=True)

from fsshard.launching.pool import RankPool
from tests.gpu import offloading
from tests.gpu.features import CASES, TOGETHER, job_numbered_by_thread
from tests.gpu.on_gpu import run_case, run_on_shared_gpu
from tests.sharded.test_averages import ENGINES

Record = Callable[[str, object], None]


@pytest.mark.parametrize("name", CASES)
def test_one_rank_over_nccl(gpus: RankPool, tmp_path: Path, name: str) -> None:
    assert gpus.run(run_case, 1, CASES[name], str(tmp_path / "files")) == [""]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what is wrong with each case on two ranks; one job, since ranks take long to start."""
    return run_on_shared_gpu({**CASES, **TOGETHER}, 2, tmp_path_factory.mktemp("shared"))


@pytest.mark.parametrize("name", [*CASES, *TOGETHER])
def test_two_ranks_share_a_gpu(shared: dict[str, str], name: str) -> None:
    assert shared[name] == ""


def test_second_derivatives_are_added_up_by_thread(gpus: RankPool, record_property: Record) -> None:
    """A bare model's bits are recorded, and judged in one thread, where the other tests compare them."""
    (found,) = gpus.run(job_numbered_by_thread, 1)
    for name, same in found.items():
        record_property(name, "the same bits again" if same else "other bits")
    assert found["one thread"]


@pytest.mark.parametrize("how", ["offloaded", "recomputed"])
def test_activations_in_host_memory_change_nothing_and_weights_stay(gpus: RankPool, how: str) -> None:
    left = set()
    for backend, settings in ENGINES:
        ((wrong, nbytes, back),) = gpus.run(offloading.job_in_host_memory, 1, backend, settings, how)
        assert not wrong and nbytes and back, (backend, wrong)
        left.add(nbytes)
    assert len(left) == 1, left  # no engine's gathered weights are among them


@pytest.mark.parametrize("backend", ["ddp", "fsdp", "fsdp2"])
def test_activations_in_host_memory_lower_the_peak(gpus: RankPool, record_property: Record, backend: str) -> None:
    found = {
        how: gpus.run(offloading.job_peak, 1, backend, how, timeout=120)[0] for how in (None, "offloaded", "recomputed")
    }
    for how, one in found.items():
        record_property(how or "in place", f"{one['peak']} MiB, {one['ms']} ms, {one['left']:.0f} MiB leave")
        assert one["losses"] == found[None]["losses"] and not math.isnan(one["losses"][-1])
        assert how is None or one["peak"] < 0.6 * found[None]["peak"]
