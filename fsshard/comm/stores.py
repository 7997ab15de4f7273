"""Requests to the store of a process group, with a deadline.

A TCPStore answers ``check``, ``add`` and the rest over a connection that has no limit of time (torch 2.13): where the
network is cut, or the host of the store stands still, such a call comes back when TCP gives up, a quarter of an hour
later. So questions are asked by a thread that may be left behind.

A store also answers whoever connects to it, and torch's listens on all interfaces: anybody may write what the ranks
decide by. So theirs listens on the loopback interface where all of them are on one host.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from fsshard.comm.forks import check_not_inherited
from fsshard.torch_private.c10d import backend_of, device_types, store_of, timeout_of_options

__all__ = [
    "ANSWER_SECONDS",
    "LOOPBACK",
    "PatientStore",
    "answer_within",
    "loopback_store",
    "own_store",
    "timeout_of",
]

LOOPBACK = "127.0.0.1"
BACKLOG = 1024  # connections that wait to be accepted: every rank opens several at once

ANSWER_SECONDS = 30.0
"""For one answer; less where the process group's own timeout is shorter. On an idle network it takes microseconds."""

SLICES = 16  # in which an answer's time passes
SHORTEST_PAUSE, LONGEST_PAUSE = 2e-4, 0.05  # seconds between two looks at the store

Answer = TypeVar("Answer")


class PatientStore:
    """A store whose every question is answered within ``limit`` seconds, or raises.

    After a question without an answer the next ones raise at once, until that answer has come after all.

    Attributes:
        limit: seconds for one answer.
    """

    def __init__(self, store: Store, limit: float = ANSWER_SECONDS) -> None:
        """
        Args:
            store: to be asked.
            limit: as above.
        """
        self.limit, self._store = limit, store
        self._asker = _Asker()

    def set(self, key: str, value: str) -> None:
        self.ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes | None:
        """The value of a key, None where no rank has set it. Waits for nothing."""
        return self.get_all([key]).get(key)

    def get_all(self, keys: Sequence[str]) -> dict[str, bytes]:
        """The values of those keys that a rank has set. Waits for nothing."""

        def found() -> dict[str, bytes]:
            there = list(keys) if self._store.check(list(keys)) else [k for k in keys if self._store.check([k])]
            return dict(zip(there, self._store.multi_get(there), strict=True)) if there else {}

        return self.ask(found)

    def awaited(self, keys: Sequence[str], seconds: float) -> bool:
        """Whether ranks have set all keys in time."""
        # No wait of the store with a limit: torch 2.13 prints "waitForInput: socket ... timed out" and a C++ stack,
        # and holds the lock of the connection meanwhile.
        deadline, pause = time.monotonic() + seconds, SHORTEST_PAUSE
        while len(self.get_all(keys)) < len(keys):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE)
        return True

    def add(self, key: str, amount: int) -> int:
        """Add to a count, and return it."""
        return self.ask(lambda: self._store.add(key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there, whoever has set them."""
        return self.ask(lambda: self._store.check(list(keys)))

    def delete_key(self, key: str) -> bool:
        return self.ask(lambda: self._store.delete_key(key))

    def ask(self, question: Callable[[], Answer], limit: float | None = None) -> Answer:
        """What ``question()`` returns or raises, where it comes back in time.

        Args:
            question: uses :meth:`under`'s store, and may go on in a thread when nobody waits for it any longer.
            limit: seconds; None for the store's own.

        Raises:
            dist.DistStoreError: no answer in time, or one before is still missing.
        """
        return self._asker.ask(question, self.limit if limit is None else limit)

    def under(self, prefix: str) -> Store:
        """The store itself with a prefix, for what asks it by itself: within :meth:`ask` only."""
        return PrefixStore(prefix, self._store)


class _Asker:
    """A thread that asks, started with the first question, ended with this object."""

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._started = threading.Lock()
        self._late: _Question | None = None

    def ask(self, question: Callable[[], Answer], limit: float) -> Answer:
        late = self._late
        if late is not None and not late.answered.is_set():
            raise dist.DistStoreError("the store of the process group has not answered for a while")
        order = _Question(question)
        if self._started.acquire(blocking=False):
            threading.Thread(target=_serve, args=(self._orders,), name="fsshard-store", daemon=True).start()
            weakref.finalize(self, self._orders.put, None).atexit = False
        self._orders.put(order)
        if not _awaited(order.answered, limit):
            self._late = order
            raise dist.DistStoreError(f"the store of the process group gave no answer within {limit:g} s")
        if order.error is not None:
            raise order.error
        return cast("Answer", order.answer)


def answer_within(seconds: float, question: Callable[[], Answer]) -> Answer:
    """What ``question()`` returns or raises.

    Raises:
        dist.DistStoreError: it has not come back in time; its thread is left behind.
    """
    return _Asker().ask(question, seconds)


def _awaited(event: threading.Event, limit: float) -> bool:
    """Whether it came in time. Time in which this process stood still (a suspended job) counts as one slice at most."""
    return any(event.wait(limit / SLICES) for _ in range(SLICES))


class _Question:
    def __init__(self, call: Callable[[], Any]) -> None:
        self.call: Callable[[], Any] | None = call
        self.answered = threading.Event()
        self.answer: Any = None
        self.error: Exception | None = None


def _serve(orders: queue.SimpleQueue[_Question | None]) -> None:
    while (order := orders.get()) is not None:
        call, order.call = order.call, None
        assert call is not None
        try:
            order.answer = call()
        except Exception as error:
            order.error = error
        del call  # before the answer: it may hold the store, or the group that the question has made
        order.answered.set()
        del order


def own_store(group: dist.ProcessGroup, name: str) -> PatientStore:
    """The group's store under a prefix of our own, over a connection of our own where it has connections.

    Args:
        group: asked for its store.
        name: of what uses it: the same calls on all ranks, since each is given another prefix.

    Raises:
        LaunchError: the group was inherited from the process that forked this one.
        dist.DistStoreError: it gives no answer.
    """
    check_not_inherited(group, f"the store of the process group ({name})")
    store: Any = store_of(group)
    rank, limit = group.rank(), min(ANSWER_SECONDS, timeout_of(group))
    place = f"fsshard/{name}"

    def connected() -> Store:
        found = store
        # One connection does one thing at a time: a thread that waits in it for a key would keep us out (TCPStore).
        with suppress(RuntimeError, NotImplementedError, AttributeError):
            found = store.clone()
        # A group that is made again may find the notes of the one before it: torch (2.13) numbers groups anew after
        # destroy_process_group, and a store can outlive them.
        return PrefixStore(f"{place}/{found.add(f'{place}/turns/{rank}', 1)}", found)

    return PatientStore(_Asker().ask(connected, limit), limit)


def loopback_store(address: str, port: int, world_size: int | None, *, serves: bool, timeout: timedelta) -> TCPStore:
    """A TCPStore that only this host can reach; torch's own (2.13) listens on all interfaces.

    Args:
        address: one of the loopback interface.
        port: 0 is any free one.
        world_size: of those who connect, the server included, all of whom it waits for; None waits for nobody.
        serves: whether this process holds it.
        timeout: of connecting, and of waiting for keys.
    """
    listening = None
    if serves:
        try:
            with socket.create_server((address, port), backlog=BACKLOG) as server:
                port = server.getsockname()[1]
                listening = server.detach()
        except OSError:
            # Taken. By this process, perhaps, which has had a group before; torch shares that store (multi_tenant), or
            # says that the address is in use.
            listening = None
    return TCPStore(
        address, port, world_size, serves, timeout,
        wait_for_workers=world_size is not None, multi_tenant=world_size is not None, master_listen_fd=listening,
    )  # fmt: skip


def timeout_of(group: dist.ProcessGroup) -> float:
    """The group's own, in seconds."""
    for device in device_types(group):
        limit = timeout_of_options(getattr(backend_of(group, device), "options", None))
        if limit is not None:
            return limit.total_seconds()
    return dist.default_pg_timeout.total_seconds()
