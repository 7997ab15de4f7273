"""Spawns a job's processes on this machine, or runs its function in the process that a launcher has started.

:func:`launch` joins or, where nothing has been started yet, spawns the processes itself, returns rank 0's result and
raises the first real failure of any rank as :class:`~fsshard.errors.RankFailed`.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import inspect
import logging
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from fsshard.comm import watchdog
from fsshard.comm.stores import LOOPBACK, loopback_store
from fsshard.errors import LaunchError
from fsshard.launching.context import (
    Context,
    JoinSettings,
    RankInfo,
    check_count,
    cores,
    cuda_devices,
    exported,
    init,
    join,
    running_sizes,
)
from fsshard.launching.leaving import (
    die_with_parent,
    end_process,
    finish_before_leaving,
    naming_lost_rank,
    say_leaving,
    tear_down,
)
from fsshard.launching.supervisor import (
    Arguments,
    Failure,
    Handed,
    Job,
    Outcome,
    Supervisor,
    check_importable,
    check_not_importing,
    handed,
    is_consequence,
    packed,
    say,
    take_over,
)

logger = logging.getLogger(__name__)
GRACE_SECONDS = 2.0  # after the first failure, for the other ranks to say what happened to them


def launch(
    fn: Job,
    nprocs: int | None = None,
    args: Sequence[Any] = (),
    *,
    process_group_backend: str | None = None,
    timeout: float | timedelta | None = None,
    threads: int | None = None,
    grace: float = 30.0,
    oversubscribe: bool = False,
) -> Any:
    """Run ``fn(context, *args)`` on every rank.

    Under torchrun or SLURM this process is one of the ranks: it joins, runs ``fn`` and leaves. Otherwise ``nprocs``
    processes are spawned on this machine, and if one rank fails, the others are ended. In spawned ranks ``MASTER_ADDR``
    and ``MASTER_PORT`` name a TCPStore that the parent serves: connect to it, do not bind it.

    Args:
        fn: a module-level function; spawned processes import it by name.
        nprocs: processes on this machine; by default one per CUDA device, or one without CUDA.
        args: what ``fn`` gets after the context; must be picklable when processes are spawned.
        process_group_backend: as in :func:`init`.
        timeout: as in :func:`init`.
        threads: as in :func:`init`.
        grace: seconds that spawned ranks have to save and to leave after this process gets SIGTERM, which SLURM,
            Kubernetes and torchrun send. The signal is passed on to each rank; ranks that are left after that time are
            killed. If all ranks return in time, so does this call.
        oversubscribe: start more ranks than this machine has CPU cores, as a test of many ranks does; they take turns.

    Returns:
        What ``fn`` returned: on rank 0 when spawned (it must be picklable), on this rank under a launcher. ``None``
        if ``fn`` left with ``sys.exit(0)``.

    Raises:
        LaunchError: the request does not fit the machine, the environment or pickle. Nothing was started.
        RankFailed: a spawned rank raised, was killed or left early; the earliest failure that no other one caused.
            Its ``cause`` is that rank's exception, where that can be pickled. Where SIGTERM ended the ranks, it ends
            this process, too.
    """
    settings = JoinSettings.check(process_group_backend, timeout, threads, None)
    check_count("nprocs", nprocs)
    if not isinstance(args, (tuple, list)):
        raise LaunchError(f"args: expected a tuple or a list, got {type(args).__name__}; for one argument: args=(x,)")
    _check_takes(fn, args)
    if not isinstance(grace, (int, float)) or not grace >= 0:
        raise LaunchError(f"grace: expected seconds, at least 0, got {grace!r}; leave it out for 30")
    sizes = running_sizes()
    if sizes is None:
        return _spawn(fn, tuple(args), _fitting_nprocs(nprocs, settings.backend, oversubscribe), settings, grace)
    if nprocs is not None and nprocs not in sizes:
        raise LaunchError(
            f"launch(nprocs={nprocs}), but a job of WORLD_SIZE={sizes[0]} (LOCAL_WORLD_SIZE={sizes[1]}) is already "
            "running in this environment; leave nprocs out, or start that many processes with the launcher"
        )
    join_job = functools.partial(init, process_group_backend=process_group_backend, timeout=timeout, threads=threads)

    def run() -> Any:
        return _run(join_job, fn, tuple(args))[1]

    if dist.is_torchelastic_launched():
        from torch.distributed.elastic.multiprocessing.errors import record

        # This tells torchrun which rank failed first, and why.
        return record(run)()
    return run()


def _check_takes(fn: Any, args: Sequence[Any]) -> None:
    """Raise unless ``fn`` can be called with the context and ``args``, as far as its signature tells."""
    try:
        inspect.signature(fn, follow_wrapped=False).bind(None, *args)
    except ValueError:
        # A function in C does not tell what it takes.
        return
    except TypeError as error:
        name = getattr(fn, "__name__", repr(fn))
        raise LaunchError(
            f"fn: expected a function that launch() can call as fn(ctx, *args), got {name} with {len(args)} args "
            f"({error}); write def train(ctx, ...): the context first, then a parameter for each of args"
        ) from None


def _fitting_nprocs(nprocs: int | None, backend: str | None, oversubscribe: bool) -> int:
    """Return the number of processes to spawn, if this machine can hold it."""
    devices = cuda_devices()
    if backend == "nccl" and not devices:
        raise LaunchError(
            "process_group_backend='nccl' needs a CUDA device and none was found; use process_group_backend='gloo'"
        )
    if devices and backend != "gloo":
        wanted = devices if nprocs is None else nprocs
        if wanted > devices:
            raise LaunchError(
                f"nprocs={wanted}, but this machine has {devices} CUDA device(s); pass nprocs={devices} "
                "or less, or process_group_backend='gloo' for the CPU"
            )
        return wanted
    wanted, limit = nprocs or 1, max(4, cores())
    if wanted > limit and not oversubscribe:
        raise LaunchError(
            f"nprocs={wanted}, but this machine has {cores()} CPU cores and at most {limit} ranks are started on "
            f"them; pass nprocs={limit} or less, or oversubscribe=True to let them take turns"
        )
    return wanted


# ------------------------------------------------------------------------------------------------------- on each rank


def _run(join: Callable[[], Context], fn: Job, args: Arguments) -> tuple[str, Any]:
    """Join, call, leave; return how ``fn`` finished, with ``"return"`` or ``"sys.exit(0)"``, and what it returned."""
    made_here = not dist.is_initialized()
    context, how, result = join(), "return", None
    try:
        result = fn(context, *args)
        finish_before_leaving()
        watchdog.leave("had finished: its function had returned")
    except BaseException as error:
        # A save that began before the error may still be completed.
        with suppress(Exception):
            finish_before_leaving(is_consequence(error))
        say_leaving(error)
        if not isinstance(error, SystemExit) or error.code not in (None, 0):
            # Destroying an NCCL group here could wait for collectives that will never be complete.
            named = _second_group(error) or naming_lost_rank(error)
            if made_here and context.backend == "gloo":
                tear_down()
            if named is not error:
                raise named from error
            raise
        how = "sys.exit(0)"
    if made_here:
        tear_down()
    return how, result


def _second_group(error: BaseException) -> LaunchError | None:
    """Return what to do instead if ``fn`` has called ``init_process_group``, whose own error names no way out."""
    if not isinstance(error, ValueError) or "initialize the default process group twice" not in str(error):
        return None
    return LaunchError(
        "expected one process group, which fsshard.launch() has made before it calls the function; got a second "
        "init_process_group() in it: remove that line, and pass launch() its timeout= and process_group_backend="
    )


def _rank_main(
    fn: Job,
    args: Arguments,
    info: RankInfo,
    settings: JoinSettings,
    handed_on: Handed,
    stack: Path,
    pipe: connection.Connection,
) -> None:
    """Body of a spawned process: run, then tell the parent how it ended."""
    die_with_parent()
    # The file stays open, for a fatal signal.
    faulthandler.enable(stack.open("w"))
    code = 0
    try:
        take_over(handed_on)
        how, result = _run(lambda: _join_parent(info, settings), fn, args)
        message = how, packed(info.rank, result if info.rank == 0 else None)
    except BaseException as error:
        message, code = ("raised", pickle.dumps(Failure.of(info.rank, error))), 1
    say(pipe, *message)
    pipe.close()
    atexit.register(end_process, code)
    sys.exit(code)


def _join_parent(info: RankInfo, settings: JoinSettings) -> Context:
    store = TCPStore(LOOPBACK, info.port or 0, is_master=False, timeout=settings.store_timeout)
    context = join(info, settings, PrefixStore("fsshard", store))
    # From here on this process is a rank like any other: a nested launch() must see the job that it is in.
    exported.clear()
    return context


# ------------------------------------------------------------------------------------------------------ in the parent


def _spawn(
    fn: Job,
    args: Arguments,
    nprocs: int,
    settings: JoinSettings,
    grace: float,
) -> Any:
    check_not_importing("launch() was called")
    check_importable(fn)
    # Bound here, on a port the system picks, and never closed in between: no other process can take it.
    store = loopback_store(LOOPBACK, 0, None, serves=True, timeout=settings.store_timeout)
    supervisor, outcome = Supervisor(), Outcome(nprocs)
    with _passing_on_sigterm(supervisor, grace) as would_end:
        try:
            for rank in range(nprocs):
                if supervisor.until is not None:
                    break
                info = RankInfo("launch()", rank, nprocs, rank, nprocs, LOOPBACK, store.port)
                supervisor.start(rank, _rank_main, (fn, args, info, settings, tuple(handed.values())))
            supervisor.watch(supervisor.ranks, outcome, patience=GRACE_SECONDS)
        finally:
            unheard = set(supervisor.ranks) - set(outcome.finished) - set(outcome.failures)
            supervisor.terminate(unheard)
            # Those that finished end in their own time, the others now.
            complete = not outcome.failures and not unheard
            codes = supervisor.end(supervisor.ranks, None if complete else GRACE_SECONDS)
            for rank, code in codes.items() if complete else ():
                if code:
                    logger.warning("rank %d finished, but its process then ended with code %d", rank, code)
    if supervisor.until is not None:
        message = f"it had not ended {grace:g} s (grace=) after SIGTERM, and was killed"
        for rank in sorted(unheard):
            outcome.failures[rank] = Failure(rank, time.time(), "SIGKILL", message, died=True)
        if would_end and any(each.type_name in ("SIGTERM", "SIGKILL") for each in outcome.failures.values()):
            signal.raise_signal(signal.SIGTERM)
    if (error := outcome.error()) is not None:
        raise error
    return outcome.results.get(0)


@contextmanager
def _passing_on_sigterm(supervisor: Supervisor, grace: float) -> Iterator[bool]:
    """Hand SIGTERM on to the ranks, then to the user's own handler; yield whether it would end this process."""
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
