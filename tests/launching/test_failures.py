"""Failures: which counts, which is an echo, and how they travel."""

from __future__ import annotations

import torch.distributed as dist

from fsshard.launching.failures import Failure, first_failure, is_consequence, pack_error, unpack_error


def failure(rank: int, when: float, *, consequence: bool = False) -> Failure:
    return Failure(rank, when, "ValueError", "boom", consequence=consequence)


def test_the_earliest_real_failure_counts() -> None:
    echo, late, early = failure(0, 1.0, consequence=True), failure(1, 3.0), failure(2, 2.0)
    assert first_failure([echo, late, early]) is early
    assert first_failure([failure(1, 5.0, consequence=True), echo]) is echo


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
    """What plain pickle cannot load: its arguments are not those of __init__."""

    def __init__(self, one: int, *, two: int) -> None:
        super().__init__(f"{one} and {two}")
        self.two = two


def test_exceptions_travel() -> None:
    copy = unpack_error(pack_error(Demanding(1, two=2)))
    assert isinstance(copy, Demanding)
    assert (str(copy), copy.two) == ("1 and 2", 2)
    assert isinstance(unpack_error(pack_error(FileNotFoundError(2, "gone", "file"))), FileNotFoundError)

    class Local(Exception):
        pass

    assert pack_error(Local()) is None
    assert unpack_error(None) is None
