"""What a job's user is told first; how ranks of a real pool end is in test_pool.py."""

from __future__ import annotations

from fsshard.errors import RankHung
from fsshard.launching.failures import Failure
from fsshard.launching.pool_outcome import JobOutcome


def failure(rank: int, when: float, *, consequence: bool = False, trace: str = "Traceback") -> Failure:
    return Failure(rank, when, "ValueError", f"boom {rank}", trace, consequence)


def test_no_failure_is_no_error() -> None:
    assert JobOutcome(2, 60.0, {0: 1, 1: 2}).error() is None


def test_the_first_real_failure_is_told_with_what_became_of_the_others() -> None:
    echo, real = failure(0, 1.0, consequence=True), failure(2, 2.0)
    error = JobOutcome(3, 60.0, {1: None}, {0: echo, 2: real}).error()
    assert error is not None
    assert (error.rank, error.others[1], set(error.others)) == (2, "had finished", {0, 1})


def test_one_that_does_not_answer_hangs_where_no_other_failed() -> None:
    error = JobOutcome(2, 5.0, {0: None}, {}, {1: ""}).error()
    assert isinstance(error, RankHung)
    assert error.rank == 1 and "no answer within 5 s" in str(error)
    assert not isinstance(JobOutcome(2, 5.0, {}, {0: failure(0, 1.0)}, {1: ""}).error(), RankHung)


def test_each_rank_has_its_own_error() -> None:
    outcome = JobOutcome(2, 60.0, {0: None}, {1: failure(1, 1.0)})
    assert outcome.error_of(0) is None and outcome.cause(0) is None
    error = outcome.error_of(1)
    assert error is not None and error.rank == 1
