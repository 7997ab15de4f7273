"""Sends messages between the ranks of one host through shared memory.

Each rank writes into segments of its own, files without a name that its peers map, and tells them by a small all-gather
of gloo's where a message lies. They read it in place. All ranks send the messages of a group in the same order.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import secrets
import socket
import struct
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.comm.agreement import per_rank
from fsshard.comm.stores import timeout_of
from fsshard.errors import ConfigurationError, RankMismatch
from fsshard.torch_private.c10d import AllgatherOptions, allgather_base, backend_of
from fsshard.torch_private.dispatch import current_modes

__all__ = ["SWITCHES", "Exchange", "Message", "announce", "check_switches", "exchange_of"]

SWITCHES = ("fast_collectives", "shared_memory")
"""Options of a backend; both allow what they name where it can be, and ask for nothing else."""
MOST_RANKS = 8  # each maps the memory of every other
SMALLEST = 2**16  # bytes of a segment
ALIGNMENT = 64  # of a part of a message
CPU = torch.device("cpu")
PAUSE = 1e-3  # seconds, where a mailbox is full
SLICE = timedelta(seconds=0.1)  # of waiting, until a rank looks into its own
FLAGS = getattr(socket, "MSG_DONTWAIT", 0) | getattr(socket, "MSG_CMSG_CLOEXEC", 0)  # of Linux
_NOTE = struct.Struct("QQ")  # rank, number of its segment
APART = (
    "the ranks do different things in forward or backward. Units that only some ranks run (experts) are no units of "
    "their own: give wrap an auto_wrap_policy without them, and find_unused_parameters=True"
)


def check_switches(options: Mapping[str, Any]) -> None:
    """Raise if one of the two switches is no bool."""
    for name in SWITCHES:
        if not isinstance(value := options.get(name, True), bool):
            raise ConfigurationError(f"{name}={value!r}: expected a bool")


def announce(kind: str, payloads: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Tell of a collective that no operator tells of: to every dispatch mode that has a method ``sends``."""
    for mode in current_modes():
        sends = getattr(mode, "sends", None)
        if sends is not None:
            for payload in payloads:
                sends(kind, payload, group.size())


class _Segment:
    """Memory that is mapped here, and in the peers' processes."""

    def __init__(self, number: int, descriptor: int) -> None:
        self.number, self.nbytes = number, os.fstat(descriptor).st_size
        self._map = mmap.mmap(descriptor, self.nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)

    def view(self, like: Tensor, at: int) -> Tensor:
        """Return a flat tensor over it, as large as ``like``; no operator makes it, so none is seen to take memory."""
        return torch.frombuffer(self._map, dtype=like.dtype, count=like.numel(), offset=at)


class Message:
    """One collective: what this rank sends, and what its peers do."""

    def __init__(self, exchange: Exchange, row: Sequence[int], work: Any, table: Tensor) -> None:
        self._exchange, self._row, self._work, self._table = exchange, row, work, table
        self._segments: list[_Segment | None] = []

    def part(self, rank: int, like: Tensor) -> Tensor:
        """Return what ``rank`` has sent to this one, flat, as large as ``like``. Ours to change until :meth:`end`."""
        if not self._segments:
            self._wait()
            self._segments = self._exchange._arrived(self._row, self._table)
        segment, own = self._segments[rank], self._exchange.rank
        if segment is None or not like.numel():
            return torch.empty(0, dtype=like.dtype)
        # Of a gather there is one part for all, of a reduction one for each rank but the sender.
        return segment.view(like, 0 if self._row[0] else (own - (own > rank)) * _aligned(like.nbytes))

    def _wait(self) -> None:
        """Wait for the peers' rows; raises again what it has raised. Peers may wait until this rank has looked."""
        while not self._work.is_completed():
            with contextlib.suppress(RuntimeError):  # the slice is over, or the collective has failed
                self._work.wait(SLICE)
            self._exchange.look()
        self._work.wait()  # not within a handler: else a traceback begins here, and names neither collective nor line

    def end(self) -> None:
        """Let the peers use their memory again: all views are void."""
        self._exchange._open.pop(self._row[-1], None)


class Exchange:
    """The memory that one model of this rank shares with the other ranks of a group; see :func:`exchange_of`."""

    def __init__(self, group: dist.ProcessGroup, mailbox: socket.socket, addresses: Sequence[str]) -> None:
        self.rank, self.group_name, self._limit = group.rank(), group.group_name, timeout_of(group)
        self._mailbox, self._addresses = mailbox, addresses
        weakref.finalize(self, mailbox.close)
        self._numbers, self._segment_numbers = itertools.count(), itertools.count()
        # Messages that are not ended. One that nobody holds any more (a gather ahead, not used) counts as ended.
        self._open: weakref.WeakValueDictionary[int, Message] = weakref.WeakValueDictionary()
        self._free: list[_Segment] = []
        self._lent: dict[int, _Segment] = {}  # number of a message -> its memory, until all peers have read it
        self._theirs: dict[tuple[int, int], _Segment] = {}  # rank, number of its segment

    def send(self, group: dist.ProcessGroup, parts: Sequence[Tensor], *, to_all: bool) -> Message:
        """Begin a message of contiguous parts, all of one size on all ranks.

        Args:
            group: the one that this serves.
            parts: one for all, or one for each peer, by rank.
            to_all: which of both.
        """
        nbytes, number = parts[0].nbytes, next(self._numbers)
        segment = self._segment(_aligned(nbytes) * len(parts))
        self._lent[number] = segment
        for place, part in enumerate(parts):
            if part.nbytes:
                ctypes.memmove(segment.view(part, place * _aligned(nbytes)).data_ptr(), part.data_ptr(), part.nbytes)
        done = min(self._open.keys(), default=number)
        row = [int(to_all), nbytes, segment.number, done, number]
        mine = torch.tensor(row, device=CPU)
        table = torch.empty((group.size(), len(row)), dtype=torch.int64, device=CPU)
        # The small message also orders the memory, and fails as any collective of gloo's where a rank is gone or late.
        work = allgather_base(backend_of(group, CPU), table.view(-1), mine, AllgatherOptions())
        message = self._open[number] = Message(self, row, work, table)
        return message

    def _segment(self, nbytes: int) -> _Segment:
        """Return a free one, the smallest that is large enough; or a new one."""
        fitting = [segment for segment in self._free if segment.nbytes >= nbytes]
        if fitting:
            chosen = min(fitting, key=lambda segment: segment.nbytes)
            self._free.remove(chosen)
            return chosen
        try:
            return self._make(nbytes)
        except ConnectionError as error:
            raise RuntimeError(f"Connection closed by peer: another rank has ended (shared memory: {error})") from error
        except OSError as error:
            raise RuntimeError(
                f"no {nbytes} bytes of shared memory for messages between ranks ({error}); wrap the model with "
                "shared_memory=False to send them over TCP"
            ) from error

    def reaches_all(self) -> bool:
        """Tell whether the system lets this process share memory with the others: not with those of another host."""
        try:
            self._free.append(self._make(SMALLEST))
        except OSError:
            return False
        return True

    def _make(self, nbytes: int) -> _Segment:
        """Return a new segment. The peers have its descriptor by then, also if this process ends before they look."""
        step = max(SMALLEST, 1 << max(nbytes.bit_length() - 4, 0))  # few sizes, so that one serves many messages
        descriptor = os.memfd_create("fsshard", os.MFD_CLOEXEC)
        try:
            # Without it want of memory would be a SIGBUS later.
            os.posix_fallocate(descriptor, 0, -(-max(nbytes, 1) // step) * step)
            found = _Segment(next(self._segment_numbers), descriptor)
            for rank, address in enumerate(self._addresses):
                if rank != self.rank:
                    self._post(address, _NOTE.pack(self.rank, found.number), descriptor)
        finally:
            os.close(descriptor)
        return found

    def _post(self, address: str, note: bytes, descriptor: int) -> None:
        deadline, rights = time.monotonic() + self._limit, struct.pack("i", descriptor)
        while True:
            try:
                self._mailbox.sendmsg([note], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)], FLAGS, address)
                return
            except BlockingIOError:  # its mailbox is full until it looks, and it may wait for this rank to look
                if time.monotonic() > deadline:
                    raise
                self.look()
                time.sleep(PAUSE)

    def look(self) -> None:
        """Map the segments of the peers that have come."""
        with contextlib.suppress(BlockingIOError):
            while True:
                note, extra, *_ = self._mailbox.recvmsg(_NOTE.size, socket.CMSG_SPACE(4), FLAGS)
                for _, _, data in extra:
                    (descriptor,) = struct.unpack("i", data)
                    rank, number = _NOTE.unpack(note)
                    try:
                        self._theirs[rank, number] = _Segment(number, descriptor)
                    finally:
                        os.close(descriptor)

    def _arrived(self, own: Sequence[int], table: Tensor) -> list[_Segment | None]:
        """Return the memory that the ranks' messages lie in, and free what all have read of this rank's."""
        rows: list[list[int]] = table.tolist()
        for rank, row in enumerate(rows):
            if row[:2] != list(own[:2]):
                kinds = [
                    f"{nbytes} bytes of {'all_gather' if to_all else 'reduce_scatter'}"
                    for to_all, nbytes, *_ in (row, own)
                ]
                raise RankMismatch(f"rank {rank} sends {kinds[0]} where this rank waits for {kinds[1]}: {APART}")
        for number in [number for number in self._lent if number < min(row[3] for row in rows)]:
            self._free.append(self._lent.pop(number))
        self.look()
        found = [self._theirs.get((rank, row[2])) for rank, row in enumerate(rows)]
        if any(segment is None for rank, segment in enumerate(found) if rank != self.rank):
            # The kernel drops a descriptor for which there is no room, silently.
            raise RuntimeError(
                "no room for the memory of another rank: this process may open no more files (ulimit -n); allow more, "
                "or wrap the model with shared_memory=False"
            )
        return found


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def exchange_of(group: dist.ProcessGroup) -> Exchange | None:
    """Return one for a model; None, on all ranks of the group, where they cannot share memory. Collective."""
    # What every rank knows of the others. gloo not by its name: who simulates ranks gives others' names.
    if not 2 <= group.size() <= MOST_RANKS or not sys.platform.startswith("linux"):
        return None
    if type(backend_of(group, CPU)).__name__ != "ProcessGroupGloo":
        return None
    name, mailbox = f"\0fsshard-{secrets.token_hex(16)}", None  # in no folder: it goes with the process
    with contextlib.suppress(OSError):
        mailbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        mailbox.bind(name)
    names = per_rank(group, name)
    exchange = None if mailbox is None else Exchange(group, mailbox, names)
    if all(per_rank(group, exchange is not None and exchange.reaches_all())):
        assert exchange is not None
        with contextlib.suppress(OSError):
            exchange.look()
        if all(per_rank(group, len(exchange._theirs) == group.size() - 1)):
            return exchange
    return None
