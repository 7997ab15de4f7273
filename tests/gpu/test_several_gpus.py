"""On two GPUs and more: engines agree over nccl, and send while they compute."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.gpu import lacking

if reason := lacking(2):
    pytest.skip(reason, allow_module_level=True)

from fsshard import parity
from fsshard.launching.pool import RankPool
from tests.gpu import jobs

Record = Callable[[str, object], None]
BACKENDS = ("fairscale", "fsdp", "fsdp2", "ddp")


@pytest.mark.parametrize("recipe", ["mlp", "convnet", "t5", "vit"])
def test_two_ranks_agree_to_the_last_bit(gpus: RankPool, record_property: Record, recipe: str) -> None:
    """Two numbers have one sum, whatever the order."""
    report = parity.compare(recipe, backends=BACKENDS, world_sizes=(2,), steps=3, device="cuda", pool=gpus)
    record_property("verdicts", " ".join(f"{cell.backend}={cell.verdict}" for cell in report.cells))
    assert {cell.verdict for cell in report.cells} == {"exact"}, str(report)


@pytest.mark.parametrize("recipe", ["mlp", "t5"])
def test_more_ranks_agree_within_the_bound(gpus: RankPool, record_property: Record, recipe: str) -> None:
    """nccl adds in an order of its own, by ring or tree and by where a number lies; parity/bounds.py has the bound."""
    count = torch.cuda.device_count()
    if count < 3:
        pytest.skip(f"needs 3 GPUs, and torch sees {count}: the sum of two numbers has one order")
    report = parity.compare(recipe, backends=BACKENDS, world_sizes=(min(count, 8),), steps=3, device="cuda", pool=gpus)
    record_property("verdicts", " ".join(f"{cell.backend}={cell.verdict}" for cell in report.cells))
    assert {cell.verdict for cell in report.cells} <= {"exact", "bound"}, str(report)


@pytest.mark.parametrize("backend", ["ddp", "fsdp", "fsdp2"])
def test_ranks_send_while_they_compute(gpus: RankPool, record_property: Record, backend: str) -> None:
    sent, both = max(gpus.run(jobs.overlap, 2, backend, timeout=120))
    record_property("ms of NCCL", round(sent, 2))
    record_property("of them beside other kernels", round(both, 2))
    assert both > 0


def test_each_rank_is_bound_to_its_own_device(gpus: RankPool) -> None:
    for rank, found in enumerate(gpus.run(jobs.where, 2)):
        assert (found["bound"], found["current"], found["parameters"]) == (f"cuda:{rank}", rank, [f"cuda:{rank}"])
