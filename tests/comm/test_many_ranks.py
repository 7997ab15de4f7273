"""What ranks ask of the store when they meet does not grow with their number: counted, with threads for ranks."""

from __future__ import annotations

import json
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fsshard
from fsshard.comm import watchdog
from fsshard.comm.stores import PatientStore
from fsshard.errors import RankMismatch
from tests.models import batch, net, take_step


class CountingStore:
    """Counts keys that are asked for and bytes that are read, by the rank that asks."""

    def __init__(self, store: Any, asked: Counter[int], rank: int, read: Counter[int] | None = None) -> None:
        self._store = store
        self._asked = asked
        self._read = Counter() if read is None else read
        self._rank = rank

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def counted(*arguments: Any) -> Any:
            keys = arguments[0] if isinstance(arguments[0], list) else [arguments[0]]
            if name != "check":  # looks at a key that is not there yet come as often as the clock says
                self._asked[self._rank] += len(keys)
            answer = method(*arguments)
            if name == "multi_get":
                self._read[self._rank] += sum(map(len, answer))
            return answer

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
    asked = Counter()
    notes = [[] for _ in range(size)]

    def one(rank: int) -> None:
        dog = object.__new__(watchdog.Watchdog)
        vars(dog).update(rank=rank, _size=size, waits=None, _lost_at=None)
        dog.store = PatientStore(CountingStore(store, asked, rank))  # type: ignore[arg-type]
        dog._meetings, dog._names = weakref.WeakKeyDictionary(), Counter()
        group = Group(rank, size)
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


def waiting(size: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Counter[int], Counter[int], list[str]]:
    """Let ``size`` threads wait for each other for good; return the keys and bytes of each, and what each raised."""
    monkeypatch.setattr(watchdog, "_ranks_of", lambda group: tuple(range(group.size())))
    store = dist.HashStore()
    asked = Counter()
    read = Counter()
    dogs = []
    for rank in range(size):
        dog = object.__new__(watchdog.Watchdog)
        vars(dog).update(rank=rank, _size=size, waits=None, _lost_at=None)
        dog.store = PatientStore(CountingStore(store, asked, rank, read))  # type: ignore[arg-type]
        dogs.append(dog)
    everyone = tuple(range(size))
    questions = [watchdog._Questions(dog, everyone, f"call {dog.rank % 2}") for dog in dogs]
    raised = [""] * size
    waited = 1.0
    clock = 0.0
    while not all(raised):
        assert waited < 60.0
        for rank, one in enumerate(questions):
            if raised[rank] or waited <= one.next:
                continue
            try:
                one.look(waited)
            except RankMismatch as error:
                raised[rank] = str(error)
        # Each answers as its thread does: odd ranks have not begun what the even ones wait in, and vice versa.
        question = store.add("asked", 0)
        clock += 1.0
        for rank in everyone:
            pending, last = [["g", 5]], {"g": 5, "h": 3}
            if rank % 2:
                pending, last = [["h", 4]], {"g": 4, "h": 4}
            answer = [question, f"waits in call {rank % 2}", watchdog._runs(everyone), 0.0, clock, pending, last]
            store.set(f"at/{rank}", json.dumps(answer))
        waited += 1.0
    return asked, read, raised


def test_one_of_the_waiting_ranks_asks_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    most = {}
    for size in (4, 64):
        asked, read, raised = waiting(size, monkeypatch)
        for rank, text in enumerate(raised):
            assert f"rank {1 - rank % 2} waits in call {1 - rank % 2}" in text and "for each other forever" in text
        most[size] = (sorted(asked.values())[-2], sorted(read.values())[-2])
    assert most[64][0] == most[4][0], "all but the one that asks: as many requests"
    assert most[64][1] <= 2 * most[4][1], "and as many bytes, but for the digits of ranks"


def test_another_rank_asks_where_the_first_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_ranks_of", lambda group: tuple(range(group.size())))
    store = dist.HashStore()

    def questions_of(rank: int) -> watchdog._Questions:
        dog = object.__new__(watchdog.Watchdog)
        vars(dog).update(rank=rank, _size=3, waits=None, _lost_at=None)
        dog.store = PatientStore(store)
        return watchdog._Questions(dog, (0, 1, 2), "the sum")

    first, second, third = map(questions_of, range(3))
    first.look(1.0)
    second.look(1.0)
    assert store.add("asked", 0) == 1, "one asks"
    # The first is killed. What the others read does not change any more.
    for waited in range(2, 16):
        second.look(float(waited))
    assert store.add("asked", 0) == 2
    # The second goes on with its work: the third asks at once.
    second.end()
    third.look(1.0)
    assert store.add("asked", 0) == 3


@pytest.mark.parametrize(
    "ranks", [(), (0,), (0, 1, 2, 3), (0, 8, 16, 24), (3, 5, 6, 7), (0, 1, 8, 9, 16, 17), (5, 2, 9)]
)
def test_ranks_as_ranges(ranks: tuple[int, ...]) -> None:
    runs = watchdog._runs(sorted(ranks))
    assert watchdog._ranks_in(json.loads(json.dumps(runs))) == tuple(sorted(ranks))
    assert len(watchdog._runs(range(0, 1024, 8))) == 1


def job_calls(folder: str) -> dict[str, int]:
    """How many keys of the store this rank touches in each call; looks that are repeated count once."""
    keys = set()
    counts = {}

    def noted(name: str) -> Any:
        method = getattr(PatientStore, name)

        def call(store: PatientStore, key: Any, *given: Any) -> Any:
            keys.update([key] if isinstance(key, str) else key)
            return method(store, key, *given)

        return mock.patch.object(PatientStore, name, call)

    with ExitStack() as patches:
        for name in ("set", "get_all", "add", "delete_key"):
            patches.enter_context(noted(name))

        def counted(what: str, call: Callable[[], Any]) -> Any:
            keys.clear()
            result = call()
            counts[what] = len(keys - {"asked"})  # which the watchdog's thread looks at meanwhile
            return result

        model = counted("wrap", lambda: fsshard.wrap(net(), backend="fsdp2"))
        optimizer = counted("build_optimizer", lambda: fsshard.build_optimizer(model, torch.optim.Adam, lr=0.1))

        def step() -> None:
            model(batch(dist.get_rank())).square().mean().backward()
            model.clip_grad_norm_(1.0)
            take_step(optimizer)

        counted("step", step)
        counted("state_dict", model.state_dict)
        counted("save", lambda: fsshard.save(folder, model, optimizer))
        counted("save again", lambda: fsshard.save(folder, model, optimizer))
        counted("load", lambda: fsshard.load(folder, model, optimizer))
    return counts


def test_keys_of_each_call_do_not_grow_with_the_ranks(ranks: Any, tmp_path: Path) -> None:
    """One rank of each meeting, the last to come, reads all notes; the others as many keys as on two ranks."""
    few = ranks.run(job_calls, 2, str(tmp_path / "2"))
    many = ranks.run(job_calls, 8, str(tmp_path / "8"))
    for what in few[0]:
        most = max(counts[what] for counts in few)
        found = sorted(counts[what] for counts in many)
        # Who waits for more than a second looks after a neighbour, and for what the rank that asks has found.
        patience = 6 if what not in ("step", "build_optimizer") else 0
        assert found[len(found) // 2] <= most + patience, f"{what}: {found}, on two ranks {most}"
        assert found[-1] <= most + patience + 3 * 8, f"{what}: {found}, on two ranks {most}"
