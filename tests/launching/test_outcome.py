"""Checks what a user is told first of a failed job, which failures are echoes, and how they travel."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from fsshard.errors import RankFailed, RankHung
from fsshard.launching.supervisor import Failure, Outcome, is_consequence


def failure(rank: int, when: float, *, consequence: bool = False) -> Failure:
    return Failure(rank, when, "ValueError", f"boom {rank}", "Traceback", consequence)


def outcome(*failures: Failure, finished: tuple[int, ...] = (), size: int = 2) -> Outcome:
    found = Outcome(size, 5.0, dict.fromkeys(finished, "return"))
    for each in failures:
        found.fail(each, Path("nowhere"))
    return found


def test_the_earliest_real_failure_is_told_with_what_became_of_the_others() -> None:
    echo, late, early = failure(0, 1.0, consequence=True), failure(1, 3.0), failure(2, 2.0)
    error = outcome(echo, late, early, finished=(3,), size=4).error()
    assert error is not None
    assert (error.rank, error.others[3], set(error.others)) == (2, "had finished", {0, 1, 3})
    assert str(RankFailed(0, "E", "no", others={1: "raised E: no"})).endswith("rank 1 raised the same")


def test_where_there_are_only_echoes_who_left_early_is_told_or_the_first() -> None:
    echoes = failure(1, 5.0, consequence=True), failure(0, 1.0, consequence=True)
    error = outcome(*echoes).error()
    assert error is not None and error.rank == 0
    error = outcome(*echoes, finished=(2,), size=3).error()
    assert error is not None and (error.rank, error.cause_type) == (2, "an early return")


def test_one_that_does_not_answer_hangs_where_no_other_failed() -> None:
    hanging = outcome(finished=(0,))
    hanging.stacks[1] = ""
    error = hanging.error()
    assert isinstance(error, RankHung)
    assert error.rank == 1 and "no answer within 5 s" in str(error)
    hanging.fail(failure(0, 1.0), Path("nowhere"))
    assert not isinstance(hanging.error(), RankHung)


def test_what_counts_as_the_echo_of_another_failure() -> None:
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")
    assert is_consequence(lost)
    assert is_consequence(RuntimeError("Timed out waiting 8000ms for recv operation to complete"))
    assert is_consequence(dist.DistNetworkError("The client socket has timed out"))
    assert is_consequence(dist.DistBackendError("NCCL error"))
    wrapped = ValueError("step failed")
    wrapped.__context__ = lost
    assert is_consequence(wrapped)
    wrapped.__suppress_context__ = True
    assert not is_consequence(wrapped)
    assert not is_consequence(ConnectionResetError("Connection reset by peer"))  # a download, say
    assert not is_consequence(RuntimeError("shape mismatch"))


class Demanding(Exception):
    """An error that plain pickle cannot load: its arguments are not those of __init__."""

    def __init__(self, one: int, *, two: int) -> None:
        super().__init__(f"{one} and {two}")
        self.two = two


def test_exceptions_travel() -> None:
    copy = Failure.of(0, Demanding(1, two=2)).error()
    assert isinstance(copy, Demanding)
    assert (str(copy), copy.two) == ("1 and 2", 2)
    assert isinstance(Failure.of(0, FileNotFoundError(2, "gone", "file")).error(), FileNotFoundError)

    class Local(Exception):
        pass

    assert Failure.of(0, Local()).error() is None
