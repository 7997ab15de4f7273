"""Sends messages between the ranks of one host through shared memory.

Each rank writes into segments of its own, which its peers map, and tells them over a socket where a message lies. They
read it in place, and tell when they have: then the segment is used again. Nothing waits for a free segment, since
another one is made where there is none; and who waits sleeps in the kernel, whose calls also order the memory.

Every rank begins the messages of an :class:`Exchange` in the same order, as of collectives of a process group; they can
be ended in any.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import select
import socket
import struct
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.errors import RankMismatch
from fsshard.torch_private.c10d import backend_of, timeout_of_options
from fsshard.torch_private.dispatch import current_modes

__all__ = ["Exchange", "Message", "aligned", "announce", "can_share"]

SMALLEST = 2**16  # bytes of a segment
ALIGNMENT = 64  # of what lies in it
LONGEST_SLEEP = 1000.0  # seconds; poll() takes no more than 24 days ("timeout is too large"), and a timeout may be more

_DATA, _DONE = 1, 2
_PACKET = struct.Struct("=BB6xQQQQ")  # which of these; what; number; segment; where in it; bytes
_WHATS = ("all_gather", "reduce_scatter", "all_reduce")

_Parts: TypeAlias = Mapping[int, tuple[int, int]] | int


def announce(kind: str, payloads: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Tell of a collective that no operator tells of: to every dispatch mode that has a method ``sends``."""
    for mode in current_modes():
        sends = getattr(mode, "sends", None)
        if sends is not None:
            for payload in payloads:
                sends(kind, payload, group.size())


def aligned(nbytes: int) -> int:
    """Room for a part of a message, so that the next one begins at a good place."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def can_share() -> bool:
    """Tell whether the system lets this process make memory for others: a sandbox may forbid it."""
    try:
        descriptor = os.memfd_create("fsshard", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, SMALLEST)
            _MappedSegment(0, descriptor, SMALLEST)
        finally:
            os.close(descriptor)
    except OSError:
        return False
    return True


class _MappedSegment:
    """Memory that is mapped here, and in the peers' processes."""

    def __init__(self, number: int, descriptor: int, nbytes: int) -> None:
        self.number, self.nbytes = number, nbytes
        self._map = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()

    def view(self, dtype: torch.dtype, count: int, at: int) -> Tensor:
        """Return a tensor over it; no operator makes it, so none is seen to take memory."""
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=at)


@dataclass(frozen=True)
class _MessageLocation:
    """The place of a peer's message."""

    what: int
    segment: _MappedSegment | None
    at: int
    nbytes: int


@dataclass(eq=False)
class _Peer:
    """Another rank.

    Attributes:
        rank: in the group.
        socket: to it; packets, in order.
        segments: its, by number.
        arrived: messages of its that nobody has asked for yet.
        unwanted: numbers of messages that nobody will ask for.
        latest: number of its last message.
        owed: numbers of messages of its that it is to be told are read, once there is room in the socket.
        closed: whether it will send nothing more.
    """

    rank: int
    socket: socket.socket
    segments: dict[int, _MappedSegment] = field(default_factory=dict)
    arrived: dict[int, _MessageLocation] = field(default_factory=dict)
    unwanted: set[int] = field(default_factory=set)
    latest: int = -1
    owed: deque[int] = field(default_factory=deque)
    closed: bool = False


class Message:
    """One collective: what this rank sends, and what its peers do."""

    def __init__(self, exchange: Exchange, number: int, what: int, segment: _MappedSegment | None) -> None:
        self._exchange, self.number, self._what, self._segment = exchange, number, what, segment
        self._ended = False

    def put(self, source: Tensor, at: int = 0) -> None:
        """Write a contiguous tensor, ``at`` bytes from the beginning."""
        if self._segment is not None:
            ctypes.memmove(self._segment.address + at, source.data_ptr(), source.nbytes)

    def room(self, like: Tensor, at: int = 0) -> Tensor:
        """Return a flat tensor over what is sent, as large as ``like``."""
        return _view(self._segment, like, at)

    def send(self, parts: _Parts) -> None:
        """Tell the peers where their part is.

        Args:
            parts: by rank where its part begins, and how many bytes it has; or how many each gets from the beginning.
        """
        self._exchange._send(self.number, self._what, self._segment, parts)

    def copy(self, rank: int, target: Tensor) -> None:
        """Write what ``rank`` has sent into a contiguous tensor of that size; waits for it."""
        place = self._exchange._await(rank, self.number, self._what, target.nbytes)
        if place.segment is not None:
            ctypes.memmove(target.data_ptr(), place.segment.address + place.at, target.nbytes)

    def view(self, rank: int, like: Tensor) -> Tensor:
        """Return what ``rank`` has sent, flat, as large as ``like``; wait for it. Ours to change until :meth:`end`."""
        place = self._exchange._await(rank, self.number, self._what, like.nbytes)
        return _view(place.segment, like, place.at)

    def end(self) -> None:
        """Let go of what was sent, which has been read; all views are void."""
        if not self._ended:
            self._ended = True
            self._exchange._end(self.number, everything=True)

    def __del__(self) -> None:
        if not self._ended:  # at any moment, in any thread: left to the next call
            self._exchange._given_up.append(self.number)


def _view(segment: _MappedSegment | None, like: Tensor, at: int) -> Tensor:
    if segment is None or not like.numel():
        return torch.empty(0, dtype=like.dtype)
    return segment.view(like.dtype, like.numel(), at)


class Exchange:
    """The connections of a rank to the others of its group; see :func:`fsshard.comm.gloo.same_host.exchange_of`.

    Attributes:
        name: the same on all its ranks, and no other's.
        group_name: the process group's.
    """

    def __init__(self, name: str, group: dist.ProcessGroup, sockets: Mapping[int, socket.socket]) -> None:
        """
        Args:
            name: as above.
            group: whose ranks are connected; not kept alive.
            sockets: rank -> a connection of packets to it; closed with this object.
        """
        self.name, self.group_name = name, group.group_name
        self._group = weakref.ref(group)
        self._peers = {rank: _Peer(rank, each) for rank, each in sorted(sockets.items())}
        self._poll = select.poll()
        for peer in self._peers.values():
            peer.socket.setblocking(False)
            self._poll.register(peer.socket, select.POLLIN)
        self._by_descriptor = {peer.socket.fileno(): peer for peer in self._peers.values()}
        self._numbers, self._segments = itertools.count(), itertools.count(1)
        self._free: list[_MappedSegment] = []
        self._lent: dict[int, tuple[_MappedSegment, set[int]]] = {}  # message -> its segment, and the ranks that use it
        self._new: dict[int, int] = {}  # segment -> its descriptor, until the peers have it
        self._given_up: deque[int] = deque()
        self._lock = threading.RLock()
        self.broken = ""
        self._close = weakref.finalize(self, _close_all, list(sockets.values()), self._new)
        _exchanges.add(self)

    # ------------------------------------------------------------------------------------------ messages

    def begin(self, what: str, nbytes: int) -> Message:
        """Return the next message, on every rank the same.

        Args:
            what: the collective that it stands for: ``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"``.
            nbytes: what this rank sends, all parts together; may differ between ranks.

        Raises:
            RuntimeError: a peer is gone, or there is no memory.
        """
        with self._lock:
            self._check()
            while self._given_up:
                self._end(self._given_up.popleft(), everything=False)
            number = next(self._numbers)
            segment = self._segment(nbytes) if nbytes else None
            if segment is not None:
                self._lent[number] = (segment, {*self._peers, -1})  # -1: this rank
            return Message(self, number, _WHATS.index(what), segment)

    def _segment(self, nbytes: int) -> _MappedSegment:
        """Return a free one, the smallest that is large enough; or a new one."""
        fitting = [segment for segment in self._free if segment.nbytes >= nbytes]
        if not fitting:
            self._read()
            fitting = [segment for segment in self._free if segment.nbytes >= nbytes]
        if not fitting:
            return self._make(nbytes)
        chosen = min(fitting, key=lambda segment: segment.nbytes)
        self._free.remove(chosen)
        return chosen

    def _make(self, nbytes: int) -> _MappedSegment:
        step = max(SMALLEST, 1 << max(nbytes.bit_length() - 4, 0))  # few sizes, so that one serves many messages
        size, number = -(-nbytes // step) * step, next(self._segments)
        try:
            descriptor = os.memfd_create("fsshard", os.MFD_CLOEXEC)
            self._new[number] = descriptor
            os.posix_fallocate(descriptor, 0, size)  # else want of memory would be a SIGBUS later
            return _MappedSegment(number, descriptor, size)
        except OSError as error:
            self._fail(f"no {size} bytes of shared memory for messages between ranks ({error}); wrap the model with "
                       "shared_memory=False to send them over TCP")  # fmt: skip

    def _send(
        self, number: int, what: int, segment: _MappedSegment | None, parts: Mapping[int, tuple[int, int]] | int
    ) -> None:
        with self._lock:
            self._check()
            which = 0 if segment is None else segment.number
            descriptor = self._new.get(which)
            try:
                for rank, peer in self._peers.items():
                    at, nbytes = (0, parts) if isinstance(parts, int) else parts[rank]
                    packet = _PACKET.pack(_DATA, what, number, which, at, nbytes)
                    # Who has sent this one and left without waiting for ours (a gather ahead, not used) is not missed;
                    # of a reduction all are to know that one has given up.
                    left = not self._post(peer, packet, descriptor)
                    if left and (peer.latest < number or _WHATS[what] != "all_gather"):
                        self._fail(_gone(peer, what))
            except BaseException as error:
                self._half_done(error)
            if descriptor is not None:
                os.close(self._new.pop(which))

    def _end(self, number: int, *, everything: bool) -> None:
        """Let the peers use their segments again, and this rank its own.

        Args:
            number: of the message.
            everything: whether all that the peers sent was asked for.
        """
        with self._lock:
            if self.broken:
                return
            for peer in self._peers.values():
                if not everything and peer.latest < number:
                    peer.unwanted.add(number)
                else:  # read, or to be passed over
                    peer.arrived.pop(number, None)
                    self._done(peer, number)
            self._let_go(number, -1)

    def _done(self, peer: _Peer, number: int) -> None:
        """Tell a peer that its message is read. Never waits: the peer may be at work for long."""
        peer.owed.append(number)
        while peer.owed:
            packet = _PACKET.pack(_DONE, 0, peer.owed[0], 0, 0, 0)
            try:
                peer.socket.send(packet, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except ConnectionError:  # who is gone need not be told
                peer.owed.clear()
                return
            peer.owed.popleft()

    def _let_go(self, number: int, rank: int) -> None:
        segment, users = self._lent.get(number, (None, set()))
        users.discard(rank)
        if segment is not None and not users:
            del self._lent[number]
            self._free.append(segment)

    # ------------------------------------------------------------------------------------------ the sockets

    def _await(self, rank: int, number: int, what: int, nbytes: int) -> _MessageLocation:
        """Return where the message of ``rank`` lies, once it has come."""
        with self._lock:
            peer, deadline = self._peers[rank], 0.0
            while number not in peer.arrived:
                self._check()
                # Who is gone before it has sent this one never will, and others that wait for it will not either.
                for other in self._peers.values():
                    if other.closed and other.latest < number:
                        self._fail(_gone(other, what))
                limit = self._limit()
                deadline = deadline or time.monotonic() + limit
                left = deadline - time.monotonic()
                if left <= 0:
                    text = f"Timed out waiting {1e3 * limit:.0f}ms for rank {rank} in {_WHATS[what]} (shared memory)"
                    self._fail(text)
                self._read(left)
            place = peer.arrived.pop(number)
            if (place.what, place.nbytes) != (what, nbytes):
                theirs, ours = f"{place.nbytes} bytes of {_WHATS[place.what]}", f"{nbytes} of {_WHATS[what]}"
                self._break(text := f"rank {rank} sends {theirs} where this rank waits for {ours}: {APART}")
                raise RankMismatch(text)
            return place

    def _limit(self) -> float:
        """Return the process group's timeout of now, in seconds."""
        group = self._group()
        options = None if group is None else backend_of(group, torch.device("cpu")).options
        limit = timeout_of_options(options) or dist.default_pg_timeout
        return limit.total_seconds()

    def _post(self, peer: _Peer, packet: bytes, descriptor: int | None) -> bool:
        """Send a message's packet; False if the peer is gone.

        Reads on where there is no room, so that two ranks never wait for each other to read.
        """
        flags, limit = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL, 0.0
        while not self.broken and not peer.closed:
            try:
                if descriptor is None:
                    peer.socket.send(packet, flags)
                else:
                    socket.send_fds(peer.socket, [packet], [descriptor], flags)
                return True
            except BlockingIOError:
                limit = limit or time.monotonic() + self._limit()
                if time.monotonic() > limit:
                    self._fail(f"Timed out waiting for rank {peer.rank} to read what it is sent (shared memory)")
                self._poll.modify(peer.socket, select.POLLIN | select.POLLOUT)
                self._read(limit - time.monotonic())
                if not peer.closed:
                    self._poll.modify(peer.socket, select.POLLIN)
            except ConnectionError:
                self._receive(peer)  # all that it has sent before it left
                return False
        return False

    def _half_done(self, error: BaseException) -> NoReturn:
        """After something that must not be done by half (Ctrl-C, want of descriptors) close the connections."""
        if isinstance(error, OSError):
            self._fail(f"messages through shared memory failed ({error}); wrap the model with shared_memory=False to "
                       "send them over TCP")  # fmt: skip
        if not self.broken:
            self._break(f"messages through shared memory were interrupted by {type(error).__name__}; wrap the "
                        "model anew on all ranks")  # fmt: skip
        raise error

    def _read(self, seconds: float = 0.0) -> None:
        """Take what has come; wait that long for something to come."""
        milliseconds = 1e3 * min(max(seconds, 0.0), LONGEST_SLEEP)  # a negative time has no end
        for descriptor, happened in self._poll.poll(milliseconds):
            if happened != select.POLLOUT:
                try:
                    self._receive(self._by_descriptor[descriptor])
                except BaseException as error:
                    self._half_done(error)

    def _receive(self, peer: _Peer) -> None:
        while not peer.closed:
            try:
                packet, extra, _, _ = peer.socket.recvmsg(
                    _PACKET.size, socket.CMSG_SPACE(4), socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # it left before it had read all of ours; what it sent comes yet, and then the end
            if not packet:
                peer.closed = True
                self._poll.unregister(peer.socket)
                return
            self._take(peer, _PACKET.unpack(packet), extra)

    def _take(self, peer: _Peer, packet: tuple[int, ...], extra: list[Any]) -> None:
        kind, what, number, which, at, nbytes = packet
        if kind == _DONE:
            self._let_go(number, peer.rank)
            return
        for _, _, data in extra:
            descriptor = int.from_bytes(data[:4], sys.byteorder)
            try:
                peer.segments[which] = _MappedSegment(which, descriptor, os.fstat(descriptor).st_size)
            finally:
                os.close(descriptor)
        if which and which not in peer.segments:  # the kernel drops a descriptor for which there is no room, silently
            self._fail(f"no room for the memory of rank {peer.rank}: this process may open no more files (ulimit -n); "
                       "allow more, or wrap the model with shared_memory=False")  # fmt: skip
        peer.latest = number
        if number in peer.unwanted:
            peer.unwanted.discard(number)
            self._done(peer, number)
        else:
            peer.arrived[number] = _MessageLocation(what, peer.segments.get(which), at, nbytes)

    # ------------------------------------------------------------------------------------------ the end

    def _check(self) -> None:
        if self.broken:
            raise RuntimeError(self.broken)

    def _break(self, text: str) -> None:
        """Close the connections, so that the others learn of it; nothing can be sent any more."""
        self.broken = text
        self._close()
        self._lent.clear()
        self._free.clear()
        for peer in self._peers.values():  # a forked process would keep the memory for as long as it lives
            peer.segments.clear()
            peer.arrived.clear()

    def _fail(self, text: str) -> NoReturn:
        self._break(text)
        raise RuntimeError(text)


APART = (
    "the ranks do different things in forward or backward. Units that only some ranks run (experts) are no units of "
    "their own: give wrap an auto_wrap_policy without them, and find_unused_parameters=True"
)


def _gone(peer: _Peer, what: int) -> str:
    return (
        f"Connection closed by peer: rank {peer.rank} ended or gave up before it took part in this {_WHATS[what]} "
        "(shared memory)"
    )


def _close_all(sockets: list[socket.socket], descriptors: dict[int, int]) -> None:
    for each in sockets:
        each.close()
    while descriptors:
        os.close(descriptors.popitem()[1])


_exchanges: weakref.WeakSet[Exchange] = weakref.WeakSet()


def _leave_to_the_parent() -> None:
    """Close the connections in a forked child (a DataLoader's worker): they would outlive the rank."""
    for exchange in list(_exchanges):
        exchange._lock = threading.RLock()
        exchange._break("a forked process cannot take part in the collectives of its parent")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_the_parent)
