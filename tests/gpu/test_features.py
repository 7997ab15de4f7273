"""What training needs beyond a step, on one GPU: one rank over nccl, and two ranks over gloo that share it."""

from __future__ import annotations

import functools
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
from fsshard.simulation.result import Estimate
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


BLOCKS = {"t5": "T5Block", "vit": "ViTLayer"}


def in_host_memory(model: str) -> fsshard.Checkpointing:
    return fsshard.Checkpointing({BLOCKS[model]}, offload_to_cpu=True, recompute=False)


@functools.cache
def estimated(model: str, backend: str, offloaded: bool) -> Estimate:
    more = {"activation_checkpointing": in_host_memory(model)} if offloaded else {}
    return fsshard.estimate(f"tests.gpu.recipes:{model}", backend=backend, world_size=1, device="cuda", **more)


@pytest.mark.parametrize("model", BLOCKS)
def test_the_estimate_of_activations_in_host_memory(gpus: RankPool, record_property: Record, model: str) -> None:
    given = f"tests.gpu.recipes:{model}", "fsdp2", in_host_memory(model)
    ((measured, workspaces, _),) = gpus.run(jobs.memory, 1, *given, timeout=120)
    peak, usual = (estimated(model, "fsdp2", offloaded).peak for offloaded in (True, False))
    record_property("estimated MiB", round(peak / 2**20, 1))
    record_property("measured MiB", round((measured - workspaces) / 2**20, 1))
    record_property("estimated without MiB", round(usual / 2**20, 1))
    assert peak == pytest.approx(measured - workspaces, rel=0.05) and peak < usual


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


@pytest.mark.parametrize("model", BLOCKS)
def test_the_time_of_a_step_beside_its_prediction(
    gpus: RankPool, record_property: Record, machine: Path, model: str
) -> None:
    """Times are told and not judged: clocks differ."""
    for backend, offloaded in (("ddp", False), ("fsdp2", False), ("fsdp2", True)):
        given = f"tests.gpu.recipes:{model}", backend, in_host_memory(model) if offloaded else None
        (seconds,) = gpus.run(jobs.seconds_of_a_step, 1, *given, timeout=120)
        found = estimated(model, backend, offloaded)
        told = [f"{1e3 * seconds:.1f} ms"]
        for constants in (machine_of(machine, "cuda"), machine_of(None, "cuda")):
            terms = constants.terms(found.work, found.collectives)
            told.append(f"{constants.name} {1e3 * sum(terms.values()):.1f}")
            told.append(str({key: round(1e3 * value, 1) for key, value in terms.items()}))
            assert terms["flops"] > 0 and terms["operators"] > 0
        record_property(f"{backend}{', offloaded' if offloaded else ''}", " ".join(told))
