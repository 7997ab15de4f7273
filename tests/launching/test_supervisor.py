"""The supervisor of spawned ranks: what it hears, whom it names, and that nobody stays."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from fsshard.errors import LaunchError
from fsshard.launching.outcome import Outcome
from fsshard.launching.supervisor import Supervisor, say
from tests.forked import forking


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    found = Supervisor()
    with forking():
        yield found
        found.end(found.ranks)


def tell_all(words: list[str], stack: Path, pipe: Connection) -> None:
    with contextlib.suppress(BrokenPipeError):  # of what is said after the last word, if nobody listens any more
        for word in words:
            say(pipe, "return" if word == "bye" else "told", pickle.dumps(word))


def wait_for_work(stack: Path, pipe: Connection) -> None:
    try:
        say(pipe, "told", pickle.dumps(pipe.recv()))
        threading.Event().wait()
    except EOFError:
        sys.exit(0)


def hear(supervisor: Supervisor, size: int, **limits: Any) -> tuple[list[tuple[int, str]], Outcome, set[int]]:
    told: list[tuple[int, str]] = []
    outcome = Outcome(size)
    silent = supervisor.watch(range(size), outcome, on_message=lambda *message: told.append(message), **limits)
    return sorted(told), outcome, silent


def test_every_message_is_heard_until_the_last(supervisor: Supervisor) -> None:
    for rank, words in enumerate((["a", "b", "bye"], ["bye", "after"])):
        supervisor.start(rank, tell_all, (words,))
    told, outcome, silent = hear(supervisor, 2)
    assert told == [(0, "a"), (0, "b")] and outcome.results == {0: "bye", 1: "bye"} and not silent
    assert supervisor.end([0, 1], None) == {0: 0, 1: 0} and supervisor.ranks == []


def test_after_a_death_the_others_have_little_time(supervisor: Supervisor) -> None:
    supervisor.start(0, wait_for_work, ())
    supervisor.start(1, tell_all, (["a", "b"],))
    told, outcome, silent = hear(supervisor, 2, patience=0.2)
    assert told == [(1, "a"), (1, "b")] and outcome.failures[1].type_name == "exit code 0" and silent == {0}
    supervisor.send(0, "here")  # nothing happened to it
    supervisor.watch([0], outcome, ("told",))
    pid = supervisor.pid(0)
    os.kill(pid, signal.SIGKILL)
    assert hear(supervisor, 1)[1].failures[0].type_name == "SIGKILL" and 0 in supervisor.dead()


def test_an_idle_rank_leaves_when_its_pipe_is_closed_and_a_busy_one_is_killed(supervisor: Supervisor) -> None:
    for rank in (0, 1):
        supervisor.start(rank, wait_for_work, ())
    supervisor.send(1, "busy")
    supervisor.watch([1], Outcome(2), ("told",))
    pid = supervisor.pid(1)
    assert supervisor.end([0], None) == {0: 0}
    assert supervisor.end([1]) == {}
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_what_cannot_be_pickled_starts_nothing(supervisor: Supervisor) -> None:
    with forking(forks=False), pytest.raises(LaunchError, match="cannot be pickled"):
        supervisor.start(0, tell_all, (threading.Lock(),))
    assert supervisor.ranks == []
