"""The store of a process group, asked so that no question waits for ever.

A TCPStore answers ``check``, ``add`` and the rest over a connection that has no limit of time (torch 2.13): where the
network is cut, or the host of the store stands still, such a call comes back when TCP gives up, a quarter of an hour
later. So questions are asked by a thread that may be left behind.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store  # torch.distributed's, where typed

from fsshard.comm.forks import check_not_inherited

__all__ = ["ANSWER_SECONDS", "PatientStore", "own_store", "timeout_of"]

ANSWER_SECONDS = 30.0
"""For one answer; less where the process group's own timeout is shorter. On an idle network it takes microseconds."""

Answer = TypeVar("Answer")


class PatientStore:
    """A store whose every question is answered within ``limit`` seconds, or raises.

    After a question without an answer the next ones raise at once, until that answer has come after all.

    Attributes:
        limit: seconds for one answer.
    """

    def __init__(self, store: Store, limit: float = ANSWER_SECONDS) -> None:
        self.limit = limit
        self._store = store
        self._asker = _Asker()

    def set(self, key: str, value: str) -> None:
        self.ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        """The value of a key that is known to be there."""
        return self.ask(lambda: self._store.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self.ask(lambda: self._store.multi_get(list(keys)))

    def add(self, key: str, amount: int) -> int:
        return self.ask(lambda: self._store.add(key, amount))

    def check(self, keys: Sequence[str]) -> bool:
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
        if not order.answered.wait(limit):
            self._late = order
            raise dist.DistStoreError(f"the store of the process group gave no answer within {limit:g} s")
        if order.error is not None:
            raise order.error
        return cast("Answer", order.answer)


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
        name: of what uses it; the prefix is ``fsshard/<name>/<turn>``, where the turn counts how often a rank has
            asked for this: the same calls on all ranks.

    Raises:
        LaunchError: the group was inherited from the process that forked this one.
        dist.DistStoreError: it gives no answer.
    """
    check_not_inherited(group, f"the store of the process group ({name})")
    store: Any = dist.distributed_c10d._get_process_group_store(group)
    rank, limit = group.rank(), min(ANSWER_SECONDS, timeout_of(group))

    def connected() -> Store:
        found = store
        # One connection does one thing at a time: a thread that waits in it for a key would keep us out (TCPStore).
        with suppress(RuntimeError, NotImplementedError, AttributeError):
            found = store.clone()
        # A group that is made again may find the notes of the one before it: torch (2.13) numbers groups anew after
        # destroy_process_group, and a store can outlive them.
        turn = found.add(f"fsshard/{name}/turns/{rank}", 1)
        return PrefixStore(f"fsshard/{name}/{turn}", found)

    return PatientStore(_Asker().ask(connected, limit), limit)


def timeout_of(group: dist.ProcessGroup) -> float:
    """The group's own, in seconds."""
    for device in group._device_types:
        limit = getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
        if isinstance(limit, timedelta):
            return limit.total_seconds()
    return dist.default_pg_timeout.total_seconds()
