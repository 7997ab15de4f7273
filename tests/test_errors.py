"""Errors travel between ranks as they are."""

from __future__ import annotations

import pickle

import pytest

from fsshard.errors import (
    FsshardError,
    MissingExtra,
    RankFailed,
    RankHung,
    StateDictError,
    UnknownBackend,
    UnsupportedByBackend,
)


@pytest.mark.parametrize(
    "error",
    [
        UnknownBackend("x", ["ddp"]),
        UnsupportedByBackend("this", "ddp", "use that"),
        MissingExtra("fairscale", "fairscale", "backend='fairscale'"),
        StateDictError("the state dict", ["a"], ["b"], {"c": ((1,), (2,))}),
        RankFailed(1, "ValueError", "broken", "Traceback", {0: "had finished"}),
        RankHung(0, "all_reduce", "it waits", "File", {1: "was elsewhere"}),
    ],
)
def test_pickle_keeps_kind_text_and_attributes(error: FsshardError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_kinds_are_builtin_kinds_too() -> None:
    assert issubclass(UnknownBackend, ValueError)
    assert issubclass(MissingExtra, ImportError)
    assert issubclass(StateDictError, RuntimeError)


def test_a_state_dict_error_lists_everything() -> None:
    text = str(StateDictError("the state dict", ["gone"], ["extra"], {"w": ((2, 2), (3,))}))
    assert "missing: gone" in text and "unexpected: extra" in text and "w: expected (2, 2), got (3,)" in text
    assert "nothing was loaded" in text


def test_a_failed_rank_comes_with_what_the_others_did() -> None:
    error = RankFailed(1, "ValueError", "broken", "Traceback", {2: "died: SIGKILL", 0: "had finished"})
    assert str(error) == (
        "rank 1 failed with ValueError: broken\n  rank 0 had finished\n  rank 2 died: SIGKILL\n\nTraceback"
    )
    assert list(error.others) == [0, 2]


def test_a_rank_that_hangs_is_said_to_hang() -> None:
    error = RankHung(0, "all_reduce", "rank 0 waits in all_reduce", "Traceback", {1: "had finished"})
    assert str(error) == "rank 0 waits in all_reduce\n  rank 1 had finished\n\nTraceback"
    assert error.cause_type == "TimeoutError"


def test_names_out_of_files_are_spelled_and_keys_may_be_anything() -> None:
    text = str(StateDictError("the state dict", ["gone\x1b[2J"], [3], {"w\n": (1, 2)}))  # type: ignore[list-item]
    assert r"missing: 'gone\x1b[2J'" in text and "unexpected: 3" in text and r"'w\n': expected 1, got 2" in text
