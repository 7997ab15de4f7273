"""What training needs beyond a step, on one GPU: one rank over nccl, and two ranks over gloo that share it."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu import lacking

if reason := lacking(1):
    pytest.skip(reason, allow_module_level=True)

import fsshard
from fsshard.launching.pool import RankPool
from fsshard.simulation.machine import machine_of
from tests.gpu import jobs, offloading
from tests.gpu.features import CASES, UNEVEN
from tests.gpu.on_gpu import run_case, run_on_shared_gpu
from tests.sharded.test_averages import ENGINES

Record = Callable[[str, object], None]


@pytest.mark.parametrize("name", CASES)
def test_one_rank_over_nccl(gpus: RankPool, tmp_path: Path, name: str) -> None:
    assert gpus.run(run_case, 1, CASES[name], str(tmp_path / "files")) == [""]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What is wrong with each case on two ranks; all in one job, since ranks take longer to start than most cases."""
    return run_on_shared_gpu({**CASES, **UNEVEN}, 2, tmp_path_factory.mktemp("shared"))


@pytest.mark.parametrize("name", [*CASES, *UNEVEN])
def test_two_ranks_share_a_gpu(shared: dict[str, str], name: str) -> None:
    assert shared[name] == ""


@pytest.mark.parametrize("how", ["offloaded", "recomputed"])
def test_late_copies_change_nothing_and_weights_stay(gpus: RankPool, how: str) -> None:
    """Each copy begins a millisecond late on its stream: whoever does not wait computes with what is not there yet."""
    left = set()
    for backend, settings in ENGINES:
        ((wrong, nbytes, back),) = gpus.run(offloading.job_late_copies, 1, backend, settings, how)
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


@pytest.mark.parametrize(("model", "block"), [("t5", "T5Block"), ("vit", "ViTLayer")])
def test_the_estimate_of_activations_in_host_memory(
    gpus: RankPool, record_property: Record, model: str, block: str
) -> None:
    choice = fsshard.Checkpointing({block}, offload_to_cpu=True, recompute=False)
    source = f"tests.gpu.recipes:{model}"
    ((measured, workspaces, _),) = gpus.run(jobs.memory, 1, source, "fsdp2", choice, timeout=120)
    estimated, usual = (
        fsshard.estimate(source, backend="fsdp2", world_size=1, device="cuda", **more).peak
        for more in ({"activation_checkpointing": choice}, {})
    )
    record_property("estimated MiB", round(estimated / 2**20, 1))
    record_property("measured MiB", round((measured - workspaces) / 2**20, 1))
    record_property("estimated without MiB", round(usual / 2**20, 1))
    assert estimated == pytest.approx(measured - workspaces, rel=0.05) and estimated < usual


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that the command writes."""
    file = tmp_path_factory.mktemp("machine") / "machine.json"
    ran = subprocess.run(
        [sys.executable, "-m", "fsshard", "doctor", "--measure", str(file)], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return file


def test_constants_of_this_gpu(machine: Path, record_property: Record) -> None:
    """Within orders of magnitude of any GPU's."""
    found, listed = machine_of(machine, "cuda"), machine_of(None, "cuda")
    for name in ("written", "operator", "host"):
        record_property(name, f"{getattr(found, name):.3g} (h100: {getattr(listed, name):.3g})")
    for dtype, speed in found.flops.items():
        record_property(dtype, f"{speed:.3g} (h100: {listed.flops[dtype]:.3g})")
    assert found.flops["bfloat16"] > found.flops["float32"] > 1e11 and found.written > 1e10 and found.host > 1e8
    assert 1e-7 < found.operator < 1e-3 and "one rank" in found.source


@pytest.mark.parametrize("model", ["t5", "vit"])
def test_the_time_of_a_step_beside_its_prediction(
    gpus: RankPool, record_property: Record, machine: Path, model: str
) -> None:
    """Times are told and not judged: clocks differ."""
    source = f"tests.gpu.recipes:{model}"
    for backend in ("ddp", "fsdp2"):
        (seconds,) = gpus.run(jobs.seconds_of_a_step, 1, source, backend, timeout=120)
        predicted = [
            fsshard.estimate(source, backend=backend, world_size=1, device="cuda", machine=one)
            for one in (str(machine), "h100")
        ]
        told = ", ".join(f"{1e3 * sum(one.terms.values()):.1f} by {one.machine}" for one in predicted)
        record_property(backend, f"{1e3 * seconds:.1f} ms; predicted {told}")
        assert all(one.terms["flops"] > 0 and one.terms["operators"] > 0 for one in predicted)
    record_property("terms", {key: f"{1e3 * value:.1f} ms" for key, value in predicted[0].terms.items()})
