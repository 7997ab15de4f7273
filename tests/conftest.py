"""Fixtures that all tests share. The pool of ranks is that of our own pytest plugin, with more patience."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from fsshard.launching.pool import RankPool

# Before any rank starts: they inherit it. No test may go to the network.
os.environ["HF_HUB_OFFLINE"] = "1"
# Before torch is imported, here and in every process that is started. Models of these sizes gain nothing from a second
# thread, and on a busy machine two threads spend their time waiting for each other: up to a hundredfold.
os.environ["OMP_NUM_THREADS"] = "1"
# The tests that are about several threads: these wait without spinning.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
# A shell without job control starts what is to run in background with interrupts ignored, and every process that is
# started from there inherits it; tests are about interrupts too.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, and no folder of those that failed.
settings.register_profile("fsshard", derandomize=True, database=None, deadline=None)
settings.load_profile("fsshard")

pytest_plugins = ["pytester", "tests.sets"]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for XDG_CACHE_HOME, which the demo and the examples share: what takes seconds is made once.

    The user's own is neither read nor written.
    """
    return tmp_path_factory.mktemp("cache")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave modules to no collection of garbage; where it pays, fork ranks from a process with other libraries too."""
    gc.collect()
    gc.freeze()
    if "torch" in sys.modules and not session.config.option.collectonly:
        from tests import forked

        if len(session.items) > 500:
            forked.PRELOADED[-1:-1] = forked.OF_OTHERS
        forked.serve_from_here()


@pytest.fixture(scope="module")
def forked() -> Iterator[None]:
    """What is spawned starts as a copy of a process that has imported torch."""
    from tests.forked import forking

    with forking():
        yield


@pytest.fixture(scope="session")
def forks() -> Any:
    """Such processes, to be killed; those of the pool would have to be started anew."""
    return multiprocessing.get_context("forkserver")


PATIENCE = 300
"""Seconds that a job may take on a machine with much else to do; it needs a few. What is about time says its own."""


@pytest.fixture(scope="session")
def _fsshard_ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Ranks that are forked from one process that has imported torch, which is sooner.

    Of those of the parity tests the first is spawned, as users start theirs: it iterates over sets in another order.
    """
    from tests.forked import ForkedButFirst, ForkedPool

    parity = any("parity" in item.path.parts for item in request.session.items)
    with (ForkedButFirst if parity else ForkedPool)() as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks(_fsshard_ranks: RankPool) -> RankPool:
    """The session's pool of ranks; its processes start with the first job."""
    pool = _fsshard_ranks
    pool.run = partial(pool.run, timeout=PATIENCE)
    pool.run_expecting_errors = partial(pool.run_expecting_errors, timeout=PATIENCE)
    return _fsshard_ranks


LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def nothing_of_a_rank_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """In pytest's own process: later tests would take it for a rank, and simulations make a process group of their own.

    ``fsshard.init()`` exports what a launcher does; Accelerate makes a process group where it finds that.
    """
    before = {name: os.environ.get(name) for name in LAUNCHERS}
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail(f"{request.node.nodeid} has left a process group: run it on ranks of the pool")
