"""Process groups: whether this process may use one, its time limit, and its store, which answers by a deadline.

A TCPStore answers ``check``, ``add`` and the rest over a connection that has no limit of time (torch 2.13): where the
network is cut, or the host of the store stands still, such a call comes back when TCP gives up, a quarter of an hour
later. So each question is asked in a thread that may be left behind.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from fsshard.errors import LaunchError
from fsshard.torch_private.c10d import backend_of, device_types, store_of, timeout_of_options

LOOPBACK = "127.0.0.1"
# Connections that wait to be accepted: every rank opens several at once.
BACKLOG = 1024

# For one answer; less where the process group's own timeout is shorter. On an idle network it takes microseconds.
ANSWER_SECONDS = 30.0
# An answer's time passes in so many slices.
SLICES = 16
SHORTEST_PAUSE, LONGEST_PAUSE = 2e-4, 0.05  # seconds between two looks at the store

Answer = TypeVar("Answer")


class PatientStore:
    """A store whose every question is answered within ``limit`` seconds, or raises.

    After a question without an answer the next ones raise at once, until that answer has come after all.
    """

    def __init__(self, store: Store, limit: float = ANSWER_SECONDS) -> None:
        self.limit = limit
        self._store = store
        self._asking: threading.Event | None = None

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes | None:
        """Return the value of a key, None where no rank has set it. Waits for nothing."""
        return self.get_all([key]).get(key)

    def get_all(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Return the values of those keys that a rank has set. Waits for nothing."""

        def found() -> dict[str, bytes]:
            there = list(keys)
            if not self._store.check(there):
                there = []
                # One by one: the store tells only whether all of several are there.
                if len(keys) > 1:
                    there = [key for key in keys if self._store.check([key])]
            if there:
                return dict(zip(there, self._store.multi_get(there), strict=True))
            return {}

        if keys:
            return self._ask(found)
        return {}

    def awaited(self, keys: Sequence[str], seconds: float) -> bool:
        """Wait until ranks have set all keys; return False if they do not in time."""
        # No wait of the store with a limit: torch 2.13 prints "waitForInput: socket ... timed out" and a C++ stack,
        # and holds the lock of the connection meanwhile.
        deadline = time.monotonic() + seconds
        pause = SHORTEST_PAUSE
        while len(self.get_all(keys)) < len(keys):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE)
        return True

    def add(self, key: str, amount: int) -> int:
        """Add to a count, and return it."""
        return self._ask(lambda: self._store.add(key, amount))

    def delete_key(self, key: str) -> bool:
        return self._ask(lambda: self._store.delete_key(key))

    def another(self) -> Store:
        """Return the store itself, over another connection, for what asks it by itself: in another thread only."""
        return _reconnected(self._store)

    def _ask(self, question: Callable[[], Answer]) -> Answer:
        if self._asking is not None and not self._asking.is_set():
            raise dist.DistStoreError("the store of the process group has not answered for a while")
        answered = threading.Event()
        try:
            return answer_within(self.limit, question, answered)
        finally:
            if not answered.is_set():
                self._asking = answered


def answer_within(seconds: float, question: Callable[[], Answer], answered: threading.Event | None = None) -> Answer:
    """Return what ``question()`` returns, or raise what it raises, or DistStoreError if it does not come back in time.

    Its thread is left behind then. Time in which this process stands still (a suspended job) counts as one slice at
    most. ``answered`` is set when it has ended.
    """
    answers = []
    errors = []
    event = answered or threading.Event()

    def ask() -> None:
        try:
            answers.append(question())
        except Exception as error:
            errors.append(error)
        event.set()

    threading.Thread(target=ask, name="fsshard-store", daemon=True).start()
    if not any(event.wait(seconds / SLICES) for _ in range(SLICES)):
        raise dist.DistStoreError(f"the store of the process group gave no answer within {seconds:g} s")
    if errors:
        raise errors.pop()
    return answers.pop()


def _reconnected(store: Any) -> Store:
    # One connection does one thing at a time: a thread that waits in it for a key would keep us out (TCPStore).
    with suppress(RuntimeError, NotImplementedError, AttributeError):
        store = store.clone()
    found: Store = store
    return found


def own_store(group: dist.ProcessGroup) -> PatientStore:
    """Return the group's store under a prefix of our own, over a connection of our own where it has connections.

    The same calls on all ranks, since each is given another prefix.
    """
    check_not_inherited(group, "the store of the process group")
    store = store_of(group)
    limit = min(ANSWER_SECONDS, timeout_of(group))

    def connected() -> Store:
        found = _reconnected(store)
        # A group that is made again may find the notes of the one before it: torch (2.13) numbers groups anew after
        # destroy_process_group, and a store can outlive them.
        return PrefixStore(f"fsshard/{found.add(f'fsshard/turns/{group.rank()}', 1)}", found)

    return PatientStore(answer_within(limit, connected), limit)


def loopback_store(
    address: str,
    port: int,
    world_size: int | None,
    *,
    serves: bool,
    timeout: timedelta,
) -> TCPStore:
    """Return a TCPStore that only this host can reach: torch's own (2.13) listens on all interfaces.

    Args:
        address: one of the loopback interface.
        port: 0 is any free one.
        world_size: of those who connect, the server included, all of whom it waits for; None waits for nobody.
        serves: whether this process holds it.
        timeout: of connecting, and of waiting for keys.
    """
    listening = None
    if serves:
        # The port may be taken: by this process, perhaps, which has had a group before. Torch shares that store
        # (multi_tenant), or says that the address is in use.
        with suppress(OSError), socket.create_server((address, port), backlog=BACKLOG) as server:
            port = server.getsockname()[1]
            listening = server.detach()
    return TCPStore(
        address, port, world_size, serves, timeout,
        wait_for_workers=world_size is not None, multi_tenant=world_size is not None, master_listen_fd=listening,
    )  # fmt: skip


def timeout_of(group: dist.ProcessGroup) -> float:
    """Return the group's own, in seconds."""
    for device in device_types(group):
        limit = timeout_of_options(getattr(backend_of(group, device), "options", None))
        if limit is not None:
            return limit.total_seconds()
    return dist.default_pg_timeout.total_seconds()


_owners: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""Group -> the process that has used it first; ``wrap`` and each meeting of ranks do."""


def check_not_destroyed(group: dist.ProcessGroup | None, what: str) -> None:
    """Raise LaunchError where the process group is gone; ``what`` was called, as users write it."""
    if group is not None and dist.group.WORLD is None:
        raise LaunchError(
            f"{what}: expected the process group of the model, which was destroyed; call this before "
            "torch.distributed.destroy_process_group()"
        )


def check_not_inherited(group: dist.ProcessGroup | None, what: str) -> None:
    """Raise LaunchError in a forked process, where a collective waits forever; ``what`` was called, as users write it.

    It has inherited the connections of the group, and none of its threads.
    """
    if group is not None and group.size() > 1 and _owners.setdefault(group, os.getpid()) != os.getpid():
        raise LaunchError(
            f"{what}: process {os.getpid()} was forked from rank {group.rank()}, whose process group it inherited but "
            "cannot use: the connections belong to its parent. Call this on the rank itself; to train in other "
            "processes start them with fsshard.launch, or spawn them and create a group there (evaluation under "
            "torch.no_grad() is possible where every rank has whole parameters)"
        )
