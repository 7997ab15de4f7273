"""The supervisor of spawned ranks: what it hears, whom it names, and that nobody stays."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from fsshard.errors import LaunchError
from fsshard.launching.outcome import Failure
from fsshard.launching.supervisor import Heard, Supervisor
from tests.forked import forking


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    found = Supervisor()
    with forking():
        yield found
        found.end(found.ranks)


def say(words: list[str], pipe: Connection) -> None:
    with contextlib.suppress(BrokenPipeError):  # of what is said after the last word, if nobody listens any more
        for word in words:
            pipe.send_bytes(word.encode())


def wait_for_work(pipe: Connection) -> None:
    try:
        pipe.send_bytes(pipe.recv().encode())
        threading.Event().wait()
    except EOFError:
        sys.exit(0)


def hear_all(supervisor: Supervisor, ranks: list[int], last: str = "bye", **limits: float) -> dict[int, list[object]]:
    heard: dict[int, list[object]] = {rank: [] for rank in ranks}

    def take(rank: int, message: bytes | Failure) -> Heard:
        heard[rank].append(message.type_name if isinstance(message, Failure) else message.decode())
        if isinstance(message, Failure):
            return Heard.FAILURE
        return Heard.LAST if message == last.encode() else Heard.NEWS

    heard[-1] = sorted(supervisor.watch(ranks, take, **limits))
    return heard


def test_every_message_is_heard_until_the_last(supervisor: Supervisor) -> None:
    for rank, words in enumerate((["a", "b", "bye"], ["bye", "after"])):
        supervisor.start(rank, say, (words,))
    assert hear_all(supervisor, [0, 1]) == {0: ["a", "b", "bye"], 1: ["bye"], -1: []}
    assert supervisor.end([0, 1], None) == {0: 0, 1: 0}
    assert supervisor.ranks == []


def test_a_rank_that_ends_without_its_last_word_has_died_after_what_it_said(supervisor: Supervisor) -> None:
    supervisor.start(0, say, (["a", "b"],))
    assert hear_all(supervisor, [0]) == {0: ["a", "b", "exit code 0"], -1: []}


def test_after_a_failure_the_others_have_little_time(supervisor: Supervisor) -> None:
    supervisor.start(0, wait_for_work, ())
    supervisor.start(1, say, ([],))
    begun = time.monotonic()
    assert hear_all(supervisor, [0, 1], patience=0.2) == {0: [], 1: ["exit code 0"], -1: [0]}
    assert time.monotonic() - begun < 60
    supervisor.send(0, "here")
    assert hear_all(supervisor, [0], last="here") == {0: ["here"], -1: []}  # nothing happened to it


def test_an_idle_rank_leaves_when_its_pipe_is_closed_and_a_busy_one_is_killed(supervisor: Supervisor) -> None:
    for rank in (0, 1):
        supervisor.start(rank, wait_for_work, ())
    supervisor.send(1, "busy")
    assert hear_all(supervisor, [1], last="busy")[1] == ["busy"]
    pid = supervisor.pid(1)
    assert supervisor.end([0], None) == {0: 0}
    assert supervisor.end([1]) == {}
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_killed_rank_is_noticed_and_named_by_its_signal(supervisor: Supervisor) -> None:
    supervisor.start(0, wait_for_work, ())
    os.kill(supervisor.pid(0), signal.SIGKILL)
    assert hear_all(supervisor, [0]) == {0: ["SIGKILL"], -1: []}
    assert supervisor.dead() == [0]


def test_what_cannot_be_pickled_starts_nothing(supervisor: Supervisor) -> None:
    with forking(forks=False), pytest.raises(LaunchError, match="cannot be pickled"):
        supervisor.start(0, say, (threading.Lock(),))
    assert supervisor.ranks == []
