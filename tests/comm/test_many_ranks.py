"""What ranks ask of the store when they meet does not grow with their number: counted, with threads for ranks."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist

from fsshard.comm import watchdog
from fsshard.comm.stores import PatientStore


class CountingStore:
    """Counts keys that are asked for, by the rank that asks."""

    def __init__(self, store: Any, asked: Counter[int], rank: int) -> None:
        self._store = store
        self._asked = asked
        self._rank = rank

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def counted(*arguments: Any) -> Any:
            keys = arguments[0] if isinstance(arguments[0], list) else [arguments[0]]
            if name != "check":  # looks at a key that is not there yet come as often as the clock says
                self._asked[self._rank] += len(keys)
            return method(*arguments)

        return counted


class Group:
    """As much of a process group as a meeting needs."""

    group_name = "0"

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def meetings(size: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Counter[int], list[list[str]]]:
    """Let ``size`` threads meet twice; return the keys that each asked for, and the notes that each was given."""
    monkeypatch.setattr(watchdog, "_ranks_of", lambda group: tuple(range(group.size())))
    store = dist.HashStore()
    asked: Counter[int] = Counter()
    notes: list[list[str]] = [[] for _ in range(size)]

    def one(rank: int) -> None:
        dog = object.__new__(watchdog.Watchdog)
        vars(dog).update(rank=rank, _size=size, waits=None, _lost_at=None)
        dog.store = PatientStore(CountingStore(store, asked, rank))  # type: ignore[arg-type]
        dog._meetings, dog._names = weakref.WeakKeyDictionary(), Counter()
        group: Any = Group(rank, size)
        for call in ("fsshard.save", "fsshard.load"):
            meeting = dog.meet(group, call, f"rank {rank} in {call}", 60.0)
            assert not meeting.missing and not meeting.late
            notes[rank] = [meeting.notes[other] for other in range(size)]

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return asked, notes


def test_requests_of_a_meeting_do_not_grow_with_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    most = {}
    for size in (4, 64):
        asked, notes = meetings(size, monkeypatch)
        assert notes == [[f"rank {rank} in fsshard.load" for rank in range(size)]] * size
        # The last rank to come to each of the two meetings reads all notes, and writes them down for the others.
        counts = sorted(asked.values())
        most[size] = counts[-3]
        assert counts[-1] <= counts[0] + 2 * size + 8
    # Who comes while the outcome is being written asks once more.
    assert most[64] <= most[4] + 6, "all but the two that came last ask for as many keys as among four ranks"
