"""Spawns a job's processes on this machine, or runs its function in the process that a launcher has started.

:func:`launch` joins or, where nothing has been started yet, spawns the processes itself, returns rank 0's result and
raises the first real failure of any rank as :class:`~fsshard.errors.RankFailed`.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import logging
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from fsshard.comm import presence
from fsshard.comm.stores import LOOPBACK, loopback_store
from fsshard.errors import LaunchError, RankFailed
from fsshard.launching.context import Context, JoinSettings, init, join, running_sizes
from fsshard.launching.environment import RankInfo, cores, cuda_devices, exported
from fsshard.launching.failures import Failure, first_failure, is_consequence
from fsshard.launching.handing_on import Handed, handed_on, take_over
from fsshard.launching.hang_diagnosis import location_in_traceback
from fsshard.launching.leaving import (
    die_with_parent,
    end_process,
    finish_before_leaving,
    naming_lost_rank,
    say_leaving,
    tear_down,
)
from fsshard.launching.pool_outcome import JobOutcome, with_stack
from fsshard.launching.supervisor import Heard, Supervisor, check_importable, check_not_importing

__all__ = ["launch"]

logger = logging.getLogger(__name__)
GRACE_SECONDS = 2.0  # after the first failure, for the other ranks to say what happened to them


def launch(
    fn: Callable[..., Any],
    nprocs: int | None = None,
    args: Sequence[Any] = (),
    *,
    backend: str | None = None,
    timeout: float | timedelta | None = None,
    threads: int | None = None,
    grace: float = 30.0,
) -> Any:
    """Run ``fn(context, *args)`` on every rank.

    Under torchrun or SLURM this process is one of the ranks: it joins, runs ``fn`` and leaves. Otherwise ``nprocs``
    processes are spawned on this machine, and if one rank fails, the others are ended. In spawned ranks ``MASTER_ADDR``
    and ``MASTER_PORT`` name a TCPStore that the parent serves: connect to it, do not bind it.

    Args:
        fn: a module-level function; spawned processes import it by name.
        nprocs: processes on this machine; by default one per CUDA device, or one without CUDA.
        args: what ``fn`` gets after the context; must be picklable when processes are spawned.
        backend: as in :func:`init`.
        timeout: as in :func:`init`.
        threads: as in :func:`init`.
        grace: seconds that spawned ranks have to save and to leave when this process is told to end (SIGTERM, as SLURM,
            Kubernetes and torchrun send it). Each of them gets the signal; what is left then is killed. If all ranks
            return in time, so does this call.

    Returns:
        What ``fn`` returned: on rank 0 when spawned (it must be picklable), on this rank under a launcher. ``None``
        if ``fn`` left with ``sys.exit(0)``.

    Raises:
        LaunchError: the request does not fit the machine, the environment or pickle. Nothing was started.
        RankFailed: a spawned rank raised, was killed or left early; the earliest failure that no other one caused.
            Its ``__cause__`` is that rank's exception, where that can be pickled. Where SIGTERM ended the ranks, it
            ends this process, too.
    """
    settings = JoinSettings.check(backend, timeout, threads, None)
    _check_nprocs(nprocs)
    _check_call(fn, args)
    if not isinstance(grace, (int, float)) or not grace >= 0:
        raise LaunchError(f"grace must be a number of seconds from 0 on, got {grace!r}")
    sizes = running_sizes()
    if sizes is None:
        return _spawn(fn, tuple(args), _fitting_nprocs(nprocs, settings.backend), settings, grace)
    if nprocs is not None and nprocs not in sizes:
        raise LaunchError(
            f"launch(nprocs={nprocs}), but a job of WORLD_SIZE={sizes[0]} (LOCAL_WORLD_SIZE={sizes[1]}) is already "
            "running in this environment; leave nprocs out, or start that many processes with the launcher"
        )
    run = functools.partial(_run, functools.partial(init, backend=backend, timeout=timeout, threads=threads))
    if dist.is_torchelastic_launched():
        from torch.distributed.elastic.multiprocessing.errors import record

        return record(lambda: run(fn, tuple(args)))()  # tells torchrun which rank failed first, and why
    return run(fn, tuple(args))


def _check_nprocs(nprocs: int | None) -> None:
    if nprocs is not None and (not isinstance(nprocs, int) or isinstance(nprocs, bool) or nprocs < 1):
        raise LaunchError(f"nprocs must be a positive integer or None, got {nprocs!r}")


def _check_call(fn: Callable[..., Any], args: Sequence[Any]) -> None:
    if not callable(fn):
        raise LaunchError(f"launch() needs a function fn(context, *args), got {fn!r}")
    if not isinstance(args, (tuple, list)):
        raise LaunchError(f"args must be a tuple or a list, got {type(args).__name__}; for one argument: args=(x,)")


def _fitting_nprocs(nprocs: int | None, backend: str | None) -> int:
    """The number of processes to spawn, if this machine can hold it."""
    devices = cuda_devices()
    if backend == "nccl" and not devices:
        raise LaunchError("backend='nccl' needs a CUDA device and none was found; use backend='gloo'")
    if devices and backend != "gloo":
        wanted = devices if nprocs is None else nprocs
        if wanted > devices:
            raise LaunchError(
                f"nprocs={wanted}, but this machine has {devices} CUDA device{'s' if devices > 1 else ''}; "
                f"pass nprocs={devices} or less, or backend='gloo' to run on the CPU"
            )
        return wanted
    wanted, limit = nprocs or 1, max(4, cores())
    if wanted > limit:
        raise LaunchError(
            f"nprocs={wanted}, but this machine has {cores()} CPU cores and at most {limit} ranks are started on "
            f"them; pass nprocs={limit} or less"
        )
    return wanted


# ------------------------------------------------------------------------------------------------------- on each rank


class _Left(Exception):
    """``fn`` left with ``sys.exit(0)``, a way of finishing."""


def _run(join: Callable[[], Context], fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """As :func:`_run_or_leave`, where it does not matter how ``fn`` finished."""
    try:
        return _run_or_leave(join, fn, args)
    except _Left:
        return None


def _run_or_leave(join: Callable[[], Context], fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Join, call, leave; raises :class:`_Left` where ``fn`` did ``sys.exit(0)``."""
    made_here = not dist.is_initialized()
    context = join()
    try:
        with _forks_end_here():
            result = fn(context, *args)
        finish_before_leaving()
        presence.leave("had finished: its function had returned")
    except BaseException as error:
        with suppress(Exception):  # a save that began before the error may still be completed
            finish_before_leaving(is_consequence(error))
        say_leaving(error)
        if not isinstance(error, SystemExit) or error.code not in (None, 0):
            # Destroying an NCCL group here could wait for collectives that will never be complete.
            named = naming_lost_rank(error)
            if made_here and context.backend == "gloo":
                tear_down()
            if named is not error:
                raise named from error
            raise
        result = _Left()
    if made_here:
        tear_down()
    if isinstance(result, _Left):
        raise result
    return result


@contextmanager
def _forks_end_here() -> Iterator[None]:
    """End a process that a rank has forked where ``fn`` ends in it: only the rank says how the rank has ended."""
    rank, code = os.getpid(), 0
    try:
        yield
    except BaseException as error:
        if os.getpid() == rank:
            raise
        if not isinstance(error, SystemExit):
            traceback.print_exception(error)
            code = 1
        elif error.code is not None:
            code = error.code if isinstance(error.code, int) else 1
    if os.getpid() != rank:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@dataclass(frozen=True)
class _Finished:
    """How a rank ended that did not fail: ``"return"`` or ``"sys.exit(0)"``; and what rank 0 returned."""

    how: str
    result: bytes | None = None


def _rank_main(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    info: RankInfo,
    settings: JoinSettings,
    handed: Handed,
    stack: str,
    pipe: connection.Connection,
) -> None:
    """Body of a spawned process: run, then tell the parent how it ended, in one message.

    Where a fatal signal ends it, ``stack`` is the file in which the parent finds where that was.
    """
    die_with_parent()
    faulthandler.enable(open(stack, "w"))  # noqa: SIM115  it stays open
    code = 0
    try:
        take_over(handed)
        try:
            result, how = _run_or_leave(lambda: _join_parent(info, settings), fn, args), "return"
        except _Left:
            result, how = None, "sys.exit(0)"
        message = pickle.dumps(_Finished(how, _pack_result(result) if info.rank == 0 else None))
    except BaseException as error:
        message, code = pickle.dumps(Failure.of(info.rank, error)), 1
    pipe.send_bytes(message)
    pipe.close()
    atexit.register(end_process, code)
    sys.exit(code)


def _join_parent(info: RankInfo, settings: JoinSettings) -> Context:
    assert info.address is not None
    assert info.port is not None
    store = TCPStore(info.address, info.port, is_master=False, timeout=settings.store_timeout)
    context = join(info, settings, PrefixStore("fsshard", store))
    # From here on this process is a rank like any other: a nested launch() must see the job that it is in.
    exported.clear()
    return context


def _pack_result(result: Any) -> bytes:
    # Plain pickle, not multiprocessing's: a tensor travels as bytes, not as shared memory that dies with this process.
    try:
        return pickle.dumps(result)
    except Exception as error:
        raise LaunchError(
            f"rank 0 returned a {type(result).__name__} that cannot be pickled ({error}); return plain data"
        ) from error


# ------------------------------------------------------------------------------------------------------ in the parent


def _spawn(fn: Callable[..., Any], args: tuple[Any, ...], nprocs: int, settings: JoinSettings, grace: float) -> Any:
    check_not_importing("launch() was called")
    check_importable(fn)
    # Bound here, on a port the system picks, and never closed in between: no other process can take it.
    store = loopback_store(LOOPBACK, 0, None, serves=True, timeout=settings.store_timeout)
    stacks = tempfile.TemporaryDirectory(prefix="fsshard-stacks-")
    supervisor, endings = Supervisor(), _Endings(Path(stacks.name))
    with _passing_on_sigterm(supervisor, grace) as would_end:
        try:
            for rank in range(nprocs):
                if supervisor.until is not None:
                    break
                info = RankInfo("launch()", rank, nprocs, rank, nprocs, LOOPBACK, store.port)
                supervisor.start(rank, _rank_main, (fn, args, info, settings, handed_on(), endings.stack(rank)))
            supervisor.watch(supervisor.ranks, endings.hear, patience=GRACE_SECONDS)
        finally:
            unheard = set(supervisor.ranks) - endings.ended
            _stop(supervisor, complete=not endings.failures and not unheard, unheard=unheard)
    if supervisor.until is not None:
        endings.failures += [_outlasted(rank, grace) for rank in sorted(unheard)]
        if would_end and any(failure.type_name in ("SIGTERM", "SIGKILL") for failure in endings.failures):
            signal.raise_signal(signal.SIGTERM)
    if endings.failures:
        outcome = JobOutcome(nprocs, 0.0, dict(endings.finished), {each.rank: each for each in endings.failures})
        first = first_failure(endings.failures)
        if first.consequence and endings.finished:
            raise _left_early(first, endings.finished) from outcome.cause(first.rank)
        error = outcome.error()
        assert error is not None
        raise error from outcome.cause(error.rank)
    return _unpack_result(endings.result)


@contextmanager
def _passing_on_sigterm(supervisor: Supervisor, grace: float) -> Iterator[bool]:
    """Hand SIGTERM on to the ranks meanwhile, then to the user's own handler, if there is one.

    Yields:
        Whether the signal would end this process.
    """
    before = signal.getsignal(signal.SIGTERM)
    if before in (signal.SIG_IGN, None) or threading.current_thread() is not threading.main_thread():
        yield False
        return

    def pass_on(number: int, frame: FrameType | None) -> None:
        supervisor.leave_within(grace)
        if callable(before):
            before(number, frame)

    signal.signal(signal.SIGTERM, pass_on)
    try:
        yield before == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def _outlasted(rank: int, grace: float) -> Failure:
    message = f"it had not ended {grace:g} s (grace=) after SIGTERM, and was killed"
    return Failure(rank, time.time(), "SIGKILL", message, died=True)


class _Endings:
    """How the ranks have ended. Each sends exactly one message, its result or its failure; one without has died."""

    def __init__(self, stacks: Path) -> None:
        self._stacks = stacks  # a folder
        self.ended: set[int] = set()
        self.failures: list[Failure] = []
        self.finished: dict[int, str] = {}  # rank -> how, the first one first
        self.result: bytes | None = None

    def hear(self, rank: int, message: bytes | Failure) -> Heard:
        """Take down what a rank has sent, or how it died."""
        self.ended.add(rank)
        if isinstance(message, Failure):
            with suppress(OSError):
                message = with_stack(message, Path(self.stack(rank)).read_text())
        ending = message if isinstance(message, Failure) else pickle.loads(message)
        if isinstance(ending, Failure):
            self.failures.append(ending)
            return Heard.LAST | Heard.FAILURE
        self.finished[rank] = ending.how
        self.result = ending.result if rank == 0 else self.result
        return Heard.LAST

    def stack(self, rank: int) -> str:
        """The file in which a rank writes where it was when a fatal signal came."""
        return str(self._stacks / str(rank))


def _stop(supervisor: Supervisor, *, complete: bool, unheard: set[int]) -> None:
    """End every process: those that finished in their own time, the others now."""
    supervisor.terminate(unheard)
    codes = supervisor.end(supervisor.ranks, None if complete else GRACE_SECONDS)
    for rank, code in codes.items() if complete else ():
        if code:
            logger.warning("rank %d finished, but its process then ended with code %d", rank, code)


def _left_early(failure: Failure, finished: Mapping[int, str]) -> RankFailed:
    """Return the failure of the first rank that had finished, of which ``failure`` is the echo on another one."""
    left, *others = finished
    how = {"return": "an early return", "sys.exit(0)": "SystemExit"}[finished[left]]
    also = f" (so had rank {', '.join(map(str, others))})" if others else ""
    waited = location_in_traceback(failure.traceback).told("waited")
    said = "sys.exit(0) was called there" if how == "SystemExit" else "its function had returned"
    message = (
        f"{said}{also} while rank {failure.rank} still needed it: did it skip a collective, or have fewer "
        f"batches (drop_last=True, DistributedSampler)? {failure.type_name} on "
        f"rank {failure.rank}: {failure.message}"
    )
    return RankFailed(left, how, message, failure.traceback, {failure.rank: waited})


def _unpack_result(data: bytes | None) -> Any:
    try:
        return None if data is None else pickle.loads(data)
    except Exception as error:
        raise LaunchError(f"rank 0's result cannot be unpickled here ({error}); return plain data") from error
