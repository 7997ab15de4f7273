"""The end of a rank: work is finished, others are told, and groups end without a deadlock."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection

import torch.distributed as dist

from fsshard.comm import watchdog
from fsshard.comm.stacks import location_in_traceback
from fsshard.comm.watchdog import Watchdog, speaks_of_a_lost_rank
from fsshard.launching.supervisor import is_consequence
from fsshard.patches import END_OF_PROCESS
from fsshard.torch_private.c10d import all_groups

# A Python reference to each process group. Without one, a DDP model that outlives destroy_process_group() frees the
# group inside c10d::Reducer's destructor, with the GIL held, while the group's worker thread waits for that GIL:
# a deadlock (pytorch issue #56297; seen on gloo with torch 2.13 in up to half of the runs). Bounded, because a kept
# gloo group keeps its three threads and its sockets; by the time a group falls off the end its threads are idle.
groups: deque[dist.ProcessGroup] = deque(maxlen=64)


def keep_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Hold a reference to a group that a DDP model is given past its destruction, and return the group."""
    groups.append(group)
    return group


def keep_all_groups() -> None:
    groups.extend([group for group in all_groups() if not any(group is kept for kept in groups)])


def tear_down() -> None:
    """Destroy the process group with every group still referenced, and so without the deadlock of issue #56297."""
    # Let go of the GIL, under which worker threads of groups drop their last work, in microseconds as a rule. One that
    # waits for it when the interpreter is finalizing is ended inside a C++ destructor by Python before 3.14 (gh-87135):
    # "terminate called without an active exception", SIGABRT, in up to a tenth of the ranks that leave right after a
    # backward pass of DDP (torch 2.13).
    time.sleep(0.05)
    if dist.is_initialized():
        keep_all_groups()
        # Models in reference cycles go before their group does.
        gc.collect()
        dist.destroy_process_group()


unfinished: list[Callable[[bool], None]] = []
"""Calls ``finish(lost)`` that each rank makes before its process group is destroyed. ``lost``: whether it ends because
it has lost another rank, so that there is little to wait for."""


def finish_before_leaving(lost: bool = False) -> None:
    """Finish what is :data:`unfinished`, and answer other ranks no longer."""
    for finish in unfinished:
        finish(lost)
    of_job = Watchdog.of_job()
    if of_job is not None:
        of_job.end()


def say_leaving(error: BaseException) -> None:
    """Tell the ranks that wait for this one what it ended with, where that is no echo of what happened to another."""
    if is_consequence(error):
        return
    if isinstance(error, SystemExit):
        watchdog.leave(f"left with sys.exit({error.code or 0})")
    else:
        watchdog.leave(f"ended with {type(error).__name__}: {str(error).partition(chr(10))[0]}")


_failed = False


def watch_end(group: dist.ProcessGroup) -> None:
    """Name the lost rank below an error that ends this process; destroy the group after a script that has finished."""
    END_OF_PROCESS.keep_for(group, _ended)


def _ended(error: BaseException | None) -> None:
    global _failed
    if error is None:
        # A rank that failed may have operations under way that will never be complete, and destroying could wait for
        # them.
        if dist.is_initialized() and not _failed:
            finish_before_leaving()
            tear_down()
        return
    _failed = True
    with suppress(Exception):
        for finish in unfinished if is_consequence(error) else ():
            finish(True)
    with suppress(Exception):
        named = naming_lost_rank(error)
        if named is not error:
            print(f"fsshard: {named}", file=sys.stderr)
        say_leaving(error)


def naming_lost_rank(error: BaseException) -> BaseException:
    """Return the error that names the rank that was lost, where ``error`` is what that looks like; else ``error``."""
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None or world.size() == 1 or not speaks_of_a_lost_rank(error):
        return error
    place = location_in_traceback("".join(traceback.format_exception(error)))
    return watchdog.lost_ranks(world, error, place.collective or "a collective")


def die_with_parent() -> None:
    """Leave no orphan when the parent is killed: nobody would be there to end a stuck rank."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        sentinel = parent.sentinel

        def watch() -> None:
            connection.wait([sentinel])
            os._exit(1)

        threading.Thread(target=watch, name="fsshard-parent-watch", daemon=True).start()


def end_process(code: int) -> None:
    """Run what others registered for the exit, then leave without finalizing the interpreter.

    The last step of a spawned rank, which is sure to be safe from the abort that :func:`tear_down` describes.
    """
    try:
        atexit.unregister(end_process)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
