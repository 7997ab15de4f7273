"""Predictions of memory and time beside one GPU's: one rank over nccl."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.gpu import lacking

if reason := lacking(1):
    pytest.skip(reason, allow_module_level=True)

import fsshard
from fsshard.launching.pool import RankPool
from fsshard.simulation.machine import machine_of
from fsshard.simulation.result import Estimate
from tests.gpu import jobs

Record = Callable[[str, object], None]


class Plan(NamedTuple):
    """A model of tests/gpu/recipes.py under an engine; ``offloaded`` is a class whose activations wait on the host."""

    model: str
    backend: str
    offloaded: str = ""

    @property
    def recomputed(self) -> fsshard.Checkpointing | None:
        blocks = {self.offloaded}
        return fsshard.Checkpointing(blocks, offload_to_cpu=True, recompute=False) if self.offloaded else None

    @property
    def given(self) -> tuple[str, str, fsshard.Checkpointing | None]:
        return f"tests.gpu.recipes:{self.model}", self.backend, self.recomputed

    def estimate(self) -> Estimate:
        source, backend, recomputed = self.given
        more = {} if recomputed is None else {"activation_checkpointing": recomputed}
        return fsshard.estimate(source, backend=backend, world_size=1, device="cuda", **more)


OFFLOADED = Plan("t5", "fsdp2", "T5Block")
PLANS = (Plan("t5", "ddp"), Plan("t5", "fsdp2"), OFFLOADED, Plan("vit", "ddp"), Plan("vit", "fsdp2"))


@pytest.fixture(scope="module")
def estimates() -> dict[Plan, Estimate]:
    """Each simulation in a process of its own, since they take long and no GPU."""
    with ProcessPoolExecutor(len(PLANS), multiprocessing.get_context("spawn")) as processes:
        return dict(zip(PLANS, processes.map(Plan.estimate, PLANS), strict=True))


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: " ".join(filter(None, plan)))
def test_memory_is_within_five_percent(
    gpus: RankPool, record_property: Record, estimates: dict[Plan, Estimate], plan: Plan
) -> None:
    """CUDA's allocator is the judge, without cuBLAS's workspaces, which are there before."""
    ((measured, workspaces, tracked),) = gpus.run(jobs.memory, 1, *plan.given, timeout=120)
    sizes = {"estimated": estimates[plan].peak, "measured": measured - workspaces, "tracked": tracked}
    for name, size in {**sizes, "workspaces": workspaces}.items():
        record_property(f"{name} MiB", round(size / 2**20, 1))
    assert sizes["estimated"] == pytest.approx(sizes["measured"], rel=0.05)


def test_activations_in_host_memory_are_not_counted(estimates: dict[Plan, Estimate]) -> None:
    assert estimates[OFFLOADED].peak < estimates[OFFLOADED._replace(offloaded="")].peak


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


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: " ".join(filter(None, plan)))
def test_the_time_of_a_step_beside_its_prediction(
    gpus: RankPool, record_property: Record, machine: Path, estimates: dict[Plan, Estimate], plan: Plan
) -> None:
    """Times are told and not judged: clocks differ."""
    (seconds,) = gpus.run(jobs.seconds_of_a_step, 1, *plan.given, timeout=120)
    record_property("measured ms", round(1e3 * seconds, 1))
    for constants in (machine_of(machine, "cuda"), machine_of(None, "cuda")):
        terms = constants.terms(estimates[plan].work, estimates[plan].collectives)
        told = {key: round(1e3 * value, 1) for key, value in terms.items()}
        record_property(f"by constants {constants.name}", f"{1e3 * sum(terms.values()):.1f} ms {told}")
        assert terms["flops"] > 0 and terms["operators"] > 0
