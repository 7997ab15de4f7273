"""One rank over nccl on one GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.gpu import lacking

if reason := lacking(1):
    pytest.skip(reason, allow_module_level=True)

import fsshard
from fsshard.launching.pool import RankPool
from tests.gpu import jobs

Record = Callable[[str, object], None]
ENGINES: dict[str, dict[str, Any]] = {"none": {"backend": "none"}, "ddp": {"backend": "ddp"}, **jobs.ENGINES}
SHARDED = ("fsdp", "fsdp2")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert list(one) == list(other)
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("engine", ENGINES)
def test_one_rank_over_nccl_trains_as_torch_does(gpus: RankPool, engine: str) -> None:
    (native,), (ours,) = gpus.run(jobs.native, 1), gpus.run(jobs.train, 1, **ENGINES[engine])
    same(native, ours)


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "none"])
def test_a_stream_of_the_users_changes_nothing(gpus: RankPool, engine: str) -> None:
    (usual,), (ours,) = (
        gpus.run(jobs.train, 1, **ENGINES[engine]),
        gpus.run(jobs.train, 1, stream=True, **ENGINES[engine]),
    )
    same(usual, ours)


@pytest.mark.parametrize("backend", ["ddp", "fsdp", "fsdp2", "fairscale"])
def test_an_asynchronous_save_has_the_weights_of_its_call(gpus: RankPool, tmp_path: Path, backend: str) -> None:
    assert gpus.run(jobs.asynchronous_save, 1, str(tmp_path), backend) == [True]


@pytest.mark.parametrize("backend", SHARDED)
def test_offloaded_shards_train_as_the_others(gpus: RankPool, backend: str) -> None:
    """The step is the CPU's, which may round a product and a sum at once where the GPU does not."""
    settings = {"sgd": True, "backend": backend}
    (usual,), (ours,) = gpus.run(jobs.train, 1, **settings), gpus.run(jobs.train, 1, cpu_offload=True, **settings)
    torch.testing.assert_close(ours, usual, rtol=1e-5, atol=1e-6)


def test_prefetching_changes_nothing(gpus: RankPool) -> None:
    settings = {"backend": "fsdp", "forward_prefetch": True, "limit_all_gathers": False}
    (usual,), (ours,) = gpus.run(jobs.train, 1, backend="fsdp"), gpus.run(jobs.train, 1, **settings)
    same(usual, ours)


@pytest.mark.parametrize("backend", SHARDED)
def test_cuda_graphs_are_refused(gpus: RankPool, backend: str) -> None:
    (error,) = gpus.run_expecting_errors(jobs.train, 1, backend=backend, compile={"mode": "reduce-overhead"})
    assert isinstance(error, fsshard.UnsupportedByBackend)
    assert "CUDA graphs" in str(error)


@pytest.mark.parametrize("offloaded", [False, True], ids=["on the GPU", "offloaded"])
@pytest.mark.parametrize("backend", ["ddp", "fsdp", "fsdp2", "fairscale"])
def test_a_step_with_an_infinite_gradient_is_left_out(gpus: RankPool, backend: str, offloaded: bool) -> None:
    if offloaded and backend not in SHARDED:
        pytest.skip(f"backend {backend!r} has no cpu_offload")
    (((before, after), left),) = gpus.run(jobs.scaled, 1, backend=backend, cpu_offload=offloaded)
    assert (before, after, left) == (2.0**10, 2.0**9, True)


def test_a_rank_is_bound_to_its_device(gpus: RankPool, record_property: Record) -> None:
    (found,) = gpus.run(jobs.where, 1)
    record_property("backend", found["backend"])
    assert (found["bound"], found["current"], found["parameters"]) == ("cuda:0", 0, ["cuda:0"])


@pytest.mark.parametrize("name", ["nccl", "nccl2", "nccl-lazy", "nccl-legacy"])
def test_every_nccl_of_torchs(gpus: RankPool, name: str) -> None:
    if name != "nccl" and not hasattr(dist, "ProcessGroupNCCL2"):  # they are registered when one is asked for
        pytest.skip(f"torch {torch.__version__} has no backend {name!r}")
    found = fsshard.launch(jobs.over_a_group_of_the_users, nprocs=1, args=(name,), process_group_backend="gloo")
    same(gpus.run(jobs.train, 1, backend="fsdp2")[0], found)
