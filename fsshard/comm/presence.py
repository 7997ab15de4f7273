"""Names the rank that is missing when a collective fails: each waiting rank reports where it waits.

gloo names an address at best ("Connection closed by peer [127.0.0.1]:41234", "Timed out waiting 60000ms for recv
operation to complete", torch 2.13). The ranks that notice tell each other over the store of their group; a rank whose
process is gone, on this host, or that said why it leaves, needs no waiting for.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fsshard.comm.forks import check_not_inherited
from fsshard.comm.stores import own_store, timeout_of
from fsshard.errors import FsshardError, RankMismatch

__all__ = [
    "LOST_NEIGHBOUR",
    "join",
    "leave",
    "lost_ranks",
    "somebody_left",
    "speaks_of_a_lost_rank",
    "taking_part",
    "who_left",
]

LAST_WORDS = 2.5
"""Seconds for the ranks that are left to say so. Connections close one after another, and time runs out alike."""
PAUSE = 0.02
LOST_NEIGHBOUR = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "Timed out waiting",
    "Application timeout caused pair closure",  # in the second operation that waits, when the first has timed out
)
"""What a rank reads when another one goes away in the middle of a collective."""
UNEQUAL_CALLS = (
    "Look for what ranks do not call equally often: under `if rank == 0`, or in a loop over unequal numbers of batches "
    "(drop_last=True, DistributedSampler)"
)


def speaks_of_a_lost_rank(error: BaseException) -> bool:
    """Whether the error is what a collective raises when another rank is gone or late."""
    if isinstance(error, FsshardError):
        return False
    text = str(error)
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(part in text for part in LOST_NEIGHBOUR)
    )


@contextmanager
def taking_part(group: dist.ProcessGroup | None, what: str) -> Iterator[None]:
    """Around collectives of ours: they raise at once where they would hang, and name the rank that they lose.

    Args:
        group: None is no group at all.
        what: what was called, as users write it.

    Raises:
        LaunchError: this process was forked from the rank that made the group.
        RankMismatch: another rank was lost, or waits elsewhere; names it.
    """
    check_not_inherited(group, what)
    try:
        yield
    except RuntimeError as error:
        if group is None or not speaks_of_a_lost_rank(error):
            raise
        raise lost_ranks(group, error, what) from error


def lost_ranks(group: dist.ProcessGroup, error: BaseException, what: str) -> RankMismatch:
    """The error that names who is missing in ``what``, where ``error`` does not. Waits for the others' word."""
    why = str(error).partition(". This is")[0].strip()  # gloo guesses at reasons at length
    presence = _presences.get(group)
    limit = timeout_of(group) if "time" in why.lower() else None
    told = "another rank was lost" if presence is None else presence.told(what, limit)
    return RankMismatch(f"{what}: {told} ({why})")


def somebody_left(group: dist.ProcessGroup) -> bool:
    """Whether another rank is known to take part no longer. Asks the store."""
    presence = _presences.get(group)
    with suppress(RuntimeError):
        return presence is not None and bool(presence.left())
    return True  # the store is gone, and with it the rank that held it


def who_left(group: dist.ProcessGroup) -> dict[int, str]:
    """Return the ranks that are known to take part no longer, with the reason. Asks the store."""
    presence = _presences.get(group)
    with suppress(RuntimeError):
        return {} if presence is None else presence.left()
    return {}


def join(group: dist.ProcessGroup | None) -> None:
    """Let this rank be found in the group from now on; on every rank alike. No collective."""
    if group is None or group.size() == 1 or group in _presences:
        return
    with suppress(RuntimeError, ValueError, NotImplementedError):  # a group without a store names nobody
        _presences[group] = _Presence(group)


def leave(why: str) -> None:
    """Tell the other ranks why this one takes no part any longer."""
    for presence in list(_presences.values()):
        with suppress(RuntimeError):  # they may have ended before it, and the store with them
            presence.leave(why)


class _Presence:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._store = own_store(group, "presence")
        self._store.set(f"process/{self.rank}", json.dumps(_process()))

    def leave(self, why: str) -> None:
        if self._store.get(f"waits/{self.rank}") is None:  # who leaves because it lost another is no news
            self._store.set(f"left/{self.rank}", why)

    def told(self, what: str, limit: float | None) -> str:
        """What became of the others, in one line.

        Args:
            what: the call in which this rank has waited.
            limit: seconds that it has waited in vain; None where its connections broke.
        """
        try:
            self._store.set(f"waits/{self.rank}", what)
            left, waits, unknown = self._others()
        except RuntimeError:  # dist.DistError among them
            return "another rank was lost, and the store of the process group with it (rank 0's, or the launcher's)"
        if left:
            return "; ".join(f"rank {rank} {text}" for rank, text in left.items())
        if unknown:
            advice = "; who needs more than {:g} s is given a longer timeout= in fsshard.launch or fsshard.init"
            return (
                f"rank {', '.join(map(str, unknown))} did not take part and does not answer: it hangs, is busy with "
                f"something else, or cannot be reached{advice.format(limit) if limit else ''}"
            )
        elsewhere = {rank: text for rank, text in waits.items() if text != what}
        if elsewhere:
            told = "; ".join(f"rank {rank} waits in {text} instead" for rank, text in elsewhere.items())
            return f"{told}. {UNEQUAL_CALLS}"
        if limit:
            return (
                "all ranks are alive and wait in it, but in different collectives: they took different paths in it. "
                + UNEQUAL_CALLS
            )
        return "all ranks are alive, but have lost their connections"

    def _others(self) -> tuple[dict[int, str], dict[int, str], list[int]]:
        """Who has left and why, who waits and where, and of whom nothing is known."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        deadline = time.monotonic() + LAST_WORDS
        while True:
            waits = self._said("waits", others)
            left = self.left(waits)
            unknown = [rank for rank in others if rank not in waits and rank not in left]
            if left or not unknown or time.monotonic() > deadline:
                return dict(sorted(left.items())), waits, unknown
            time.sleep(PAUSE)

    def left(self, waits: Mapping[int, str] = MappingProxyType({})) -> dict[int, str]:
        """Why other ranks have left, of those that do not wait."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        left = self._said("left", others)
        processes = self._said("process", [rank for rank in others if rank not in waits and rank not in left])
        return left | {rank: "has ended: its process is gone" for rank, text in processes.items() if _is_gone(text)}

    def _said(self, kind: str, ranks: Sequence[int]) -> dict[int, str]:
        found = self._store.get_all([f"{kind}/{rank}" for rank in ranks]) if ranks else {}
        return {int(key.rpartition("/")[2]): text.decode() for key, text in found.items()}


_presences: WeakKeyDictionary[dist.ProcessGroup, _Presence] = WeakKeyDictionary()


def _process() -> dict[str, str]:
    """This process, and where it is seen; empty where the system has no ``/proc``."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return {"seen": f"{boot} {os.readlink('/proc/self/ns/pid')}", "pid": str(os.getpid()), "began": _began("self")}
    return {}


def _began(pid: str) -> str:
    """When a process has begun, in ticks; "" for one that has ended and is not waited for yet."""
    fields = (
        Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    )  # proc(5): state is the 3rd, start the 22nd
    return "" if fields[0] in "ZX" else fields[19]


def _is_gone(text: str) -> bool:
    """Whether a rank's process has ended, as far as that can be seen from here."""
    theirs: Mapping[str, str] = json.loads(text)
    mine = _process()
    if not theirs or theirs["seen"] != mine.get("seen"):
        return False
    try:
        return _began(theirs["pid"]) != theirs["began"]
    except OSError:
        return True
