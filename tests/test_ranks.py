"""The pool of ranks that other tests stand on."""

from __future__ import annotations

import os
import random
import signal
import threading
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsshard.errors import UnsupportedByBackend
from tests.ranks import MOST_RANKS, RankError, RankPool


class Pair(NamedTuple):
    left: torch.Tensor
    right: int


def summed(value: float, *, scale: float = 1.0) -> torch.Tensor:
    total = torch.tensor([value + dist.get_rank()]) * scale
    dist.all_reduce(total)
    return total


def surroundings() -> dict[str, Any]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "HF_HUB_OFFLINE")
    return {
        "environment": [os.environ.get(name) for name in names],
        "leftover": os.environ.get("FSSHARD_LEFTOVER"),
        "world": (dist.get_rank(), dist.get_world_size(), dist.get_backend()),
        "random": (torch.rand(1).item(), random.random()),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.is_available(),
        "error_filter": any(entry[0] == "error" for entry in warnings.filters),
    }


def litter() -> None:
    os.environ["FSSHARD_LEFTOVER"] = "here"
    warnings.simplefilter("error")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    torch.manual_seed(5)


def tensors() -> dict[str, Any]:
    base = torch.arange(1000.0)
    return {
        "parameter": nn.Parameter(base[:2]),
        "pair": Pair(base[2:4], 7),
        "list": [base[0], (base[1],)],
        "complex": torch.complex(base[:1], base[1:2]),
    }


def threads_in_use() -> int:
    dist.all_reduce(torch.ones(1))
    return threading.active_count() if not os.path.isdir("/proc/self/task") else len(os.listdir("/proc/self/task"))


def rank_one_raises_while_the_others_wait() -> None:
    if dist.get_rank() == 1:
        raise KeyError("missing piece")
    dist.all_reduce(torch.ones(1))


def every_rank_raises() -> None:
    raise UnsupportedByBackend("cpu_offload=True", "ddp", f"use backend='fsdp' (rank {dist.get_rank()})")


def rank_one_raises_alone() -> int:
    if dist.get_rank() == 1:
        raise ValueError("only me")
    return dist.get_rank()


def raises_what_cannot_be_pickled() -> None:
    class LocalError(Exception):
        pass

    raise LocalError("of a local class")


def returns_what_cannot_be_pickled() -> Any:
    return lambda: None


def rank_one_is_killed() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def rank_one_leaves() -> None:
    if dist.get_rank() == 1:
        os._exit(0)
    dist.all_reduce(torch.ones(1))


def rank_one_hangs() -> int:
    if dist.get_rank() == 1:
        threading.Event().wait()
    return dist.get_rank()


def trains_under_ddp() -> float:
    model = DistributedDataParallel(nn.Linear(3, 2), process_group=dist.new_group())
    model(torch.ones(1, 3)).sum().backward()
    globals()["still_alive"] = model  # at teardown, as in a user's main script
    grad = model.module.weight.grad
    assert grad is not None
    return float(grad.sum())


@pytest.fixture(scope="module")
def own_pool() -> Iterator[RankPool]:
    """For tests that break processes, so that the session's pool need not be started anew."""
    pool = RankPool()
    yield pool
    pool.close()


def test_each_job_gets_a_group_of_the_size_it_asked_for(ranks: RankPool) -> None:
    for world_size in (1, 3, 2):
        results = ranks.run(summed, world_size, 1.0, scale=2.0)
        expected = 2.0 * (world_size + sum(range(world_size)))
        assert [result.item() for result in results] == [expected] * world_size


def test_a_job_finds_what_a_new_process_would_find(ranks: RankPool) -> None:
    first = ranks.run(surroundings, 2)
    ranks.run(litter, 2)
    assert ranks.run(surroundings, 2) == first
    for rank, found in enumerate(first):
        assert found["environment"] == [str(rank), str(rank), "2", "2", "127.0.0.1", "1", "1"]
        assert found["leftover"] is None
        assert found["world"] == (rank, 2, "gloo")
        assert found["dtype"] is torch.float32
        assert found["threads"] == 1
        assert not found["cuda"]
        assert not found["error_filter"]


def test_tensors_come_back_as_copies_of_their_own(ranks: RankPool) -> None:
    for result in ranks.run(tensors, 2):
        parameter, pair = result["parameter"], result["pair"]
        assert type(parameter) is torch.Tensor
        assert not parameter.requires_grad
        assert parameter.untyped_storage().nbytes() == 8  # not the thousand numbers it was a view of
        assert isinstance(pair, Pair)
        assert pair.left.tolist() == [2.0, 3.0]
        assert pair.right == 7
        assert result["list"][1][0].item() == 1.0
        assert result["complex"].dtype is torch.complex64
        assert not any(tensor.is_shared() for tensor in (parameter, pair.left, result["complex"]))


def test_groups_of_past_jobs_do_not_pile_up(ranks: RankPool) -> None:
    ranks.run(threads_in_use, 2), ranks.run(threads_in_use, 2), ranks.run(threads_in_use, 2)
    before = ranks.run(threads_in_use, 2)
    for _ in range(40):
        after = ranks.run(threads_in_use, 2)
    assert max(after) <= max(before) + 3  # one group's threads, at most


def test_a_ddp_model_that_outlives_its_job_does_not_lock_up_the_worker(ranks: RankPool) -> None:
    workers = [worker.process.pid for worker in ranks._workers]
    for _ in range(25):
        assert ranks.run(trains_under_ddp, 2) == [6.0, 6.0]
    assert [worker.process.pid for worker in ranks._workers] == workers


def test_a_rank_that_raises_is_named_first_and_frees_the_others(ranks: RankPool) -> None:
    ranks.run(summed, 2, 0.0)
    workers = [worker.process.pid for worker in ranks._workers]
    with pytest.raises(RankError) as caught:
        ranks.run(rank_one_raises_while_the_others_wait, 3)
    errors = caught.value.errors
    assert next(iter(errors)) == 1
    assert set(errors) == {0, 1, 2}
    name, message, trace = errors[1]
    assert (name, message) == ("KeyError", "'missing piece'")
    assert "rank_one_raises_while_the_others_wait" in trace
    assert str(caught.value).startswith("rank 1: KeyError: 'missing piece'")
    assert "rank 0: RuntimeError" in str(caught.value)
    assert isinstance(caught.value.exceptions[1], KeyError)
    assert caught.value.__cause__ is caught.value.exceptions[1]
    assert all(isinstance(caught.value.exceptions[rank], RuntimeError) for rank in (0, 2))
    # The pool goes on with the same processes.
    assert ranks.run(summed, 2, 0.0)[0].item() == 1.0
    assert [worker.process.pid for worker in ranks._workers][: len(workers)] == workers


def test_errors_that_every_rank_is_expected_to_raise(ranks: RankPool) -> None:
    errors = ranks.run_expecting_errors(every_rank_raises, 2)
    assert [type(error) for error in errors] == [UnsupportedByBackend] * 2
    for rank, error in enumerate(errors):
        assert isinstance(error, UnsupportedByBackend)
        assert error.setting == "cpu_offload=True"
        assert f"(rank {rank})" in str(error)


def test_a_rank_that_raises_nothing_is_none(ranks: RankPool) -> None:
    quiet, raised = ranks.run_expecting_errors(rank_one_raises_alone, 2)
    assert quiet is None
    assert isinstance(raised, ValueError)


def test_what_cannot_be_pickled_is_reported_as_text(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="LocalError: of a local class") as caught:
        ranks.run(raises_what_cannot_be_pickled, 1)
    assert caught.value.exceptions == {0: None}
    assert isinstance(ranks.run_expecting_errors(raises_what_cannot_be_pickled, 1)[0], RankError)
    with pytest.raises(RankError, match="returns_what_cannot_be_pickled"):
        ranks.run(returns_what_cannot_be_pickled, 1)


def test_too_many_ranks(ranks: RankPool) -> None:
    with pytest.raises(ValueError, match=r"world_size must lie in 1\.\.4, got 5"):
        ranks.run(summed, MOST_RANKS + 1, 0.0)


def test_the_pool_recovers_from_ranks_that_die_or_hang(own_pool: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        own_pool.run(rank_one_is_killed, 2)
    assert next(iter(caught.value.errors)) == 1
    assert caught.value.errors[1][0] == "SIGKILL"

    with pytest.raises(RankError) as caught:
        own_pool.run(rank_one_leaves, 2)
    assert caught.value.errors[1][0] == "exit code 0"

    assert own_pool.run(summed, 2, 0.0)[1].item() == 1.0
    with pytest.raises(RankError) as caught:
        own_pool.run(rank_one_hangs, 2, timeout=1)
    assert list(caught.value.errors) == [1]
    name, message, stack = caught.value.errors[1]
    assert name == "TimeoutError"
    assert "did not answer" in message
    assert "rank_one_hangs" in stack

    own_pool.close()
    assert own_pool.run(summed, 1, 3.0)[0].item() == 3.0
