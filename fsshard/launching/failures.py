"""What went wrong on a rank, in a form that its parent can read, tell from echoes, and raise."""

from __future__ import annotations

import pickle
import signal
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from fsshard.comm.presence import UNEQUAL_CALLS, speaks_of_a_lost_rank
from fsshard.errors import RankMismatch

__all__ = ["Failure", "death", "first_failure", "is_consequence", "unpack_error"]


@dataclass(frozen=True)
class Failure:
    """What went wrong on a rank, in a form that any process can read."""

    rank: int
    time: float
    type_name: str
    message: str
    traceback: str = ""
    consequence: bool = False  # most likely only an echo of another rank's failure
    pickled: bytes | None = None
    died: bool = False

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        text = "".join(traceback.format_exception(error))
        consequence = is_consequence(error)
        return cls(rank, time.time(), type(error).__name__, str(error), text, consequence, pack_error(error))


def first_failure(failures: Iterable[Failure]) -> Failure:
    """The earliest failure that is not the echo of another one; the earliest echo if there is nothing else."""
    return min(failures, key=lambda failure: (failure.consequence, failure.time))


HINTS = {
    "SIGKILL": "; out of memory, perhaps",
    # Gloo ends the process (torch 2.13): "gloo::EnforceNotMet ... Received data size doesn't match expected size".
    "SIGABRT": f"; over gloo: perhaps ranks called different collectives. {UNEQUAL_CALLS}",
}


def death(rank: int, code: int | None) -> Failure:
    if code is not None and code < 0:
        names = {number.value: number.name for number in signal.Signals}
        name = names.get(-code, f"signal {-code}")
        return Failure(rank, time.time(), name, f"the process was killed by a signal{HINTS.get(name, '')}", died=True)
    message = "the process exited without finishing: os._exit(), or an error on standard error before fn was reached"
    return Failure(rank, time.time(), f"exit code {code}", message, died=True)


def is_consequence(error: BaseException) -> bool:
    """Whether the error, or the one it was raised from, speaks of a neighbour that went away."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        if isinstance(link, RankMismatch):
            return True
        if speaks_of_a_lost_rank(link):
            return True
        seen.add(id(link))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return False


def pack_error(error: BaseException) -> bytes | None:
    """The exception as bytes that are known to load, or None."""
    # The default pickle calls the class with error.args, which fails for an __init__ of another signature.
    for state in (error, (type(error), error.args, error.__dict__)):
        with suppress(Exception):
            data = pickle.dumps(state)
            copy = unpack_error(data)
            if type(copy) is type(error) and str(copy) == str(error):
                return data
    return None


def unpack_error(data: bytes | None) -> BaseException | None:
    with suppress(Exception):
        state = pickle.loads(data) if data is not None else None
        if isinstance(state, tuple):
            kind, args, attributes = state
            state = kind.__new__(kind, *args)
            state.args = args
            state.__dict__.update(attributes)
        if isinstance(state, BaseException):
            return state
    return None
