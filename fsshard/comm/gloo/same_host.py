"""Finds out whether the ranks of a group are on one host, and connects them if they are."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from fsshard.comm.gloo.shared_memory import Exchange, can_share
from fsshard.errors import ConfigurationError
from fsshard.torch_private.c10d import backend_of

__all__ = ["SWITCHES", "check_switches", "exchange_of", "wants_shared_memory"]

SWITCHES = ("fast_collectives", "shared_memory")
"""Options of a backend that sends through shared memory; both allow it where it can be, and ask for nothing else."""

MOST_RANKS = 8
"""Every rank has a connection to, and maps the memory of, every other."""

BACKLOG_SECONDS = 10.0  # for a connection, which the other side has made already, to be accepted
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: Linux's struct ucred


class _Note(NamedTuple):
    """What a rank tells the others.

    Attributes:
        host: what is equal on one host; "" if this rank cannot.
        address: of its listening socket.
        token: what who connects must say.
        has: name of the exchange that it has.
    """

    host: str
    address: str
    token: bytes
    has: str


_made: WeakKeyDictionary[dist.ProcessGroup, ReferenceType[Exchange]] = WeakKeyDictionary()


def check_switches(options: Mapping[str, Any]) -> None:
    """Raise if one of the two switches is no bool."""
    for name in SWITCHES:
        if not isinstance(value := options.get(name, True), bool):
            raise ConfigurationError(f"{name}={value!r}: expected a bool")


def wants_shared_memory(options: Mapping[str, Any], device: torch.device) -> bool:
    """Whether a model on the CPU, and not on another ``device``, is to send through shared memory where that can be."""
    switches = (options.get(name, True) for name in SWITCHES)
    return device.type == "cpu" and all(switches)


def exchange_of(group: dist.ProcessGroup) -> Exchange | None:
    """The group's, made if there is none; None, on all its ranks, where they cannot share memory. Collective.

    It is closed with the last who holds it.
    """
    if not _asks(group):
        return None
    old = _made.get(group, lambda: None)()
    has = "" if old is None or old.broken else old.name
    with contextlib.ExitStack() as stack:
        listening = _listener() if _can() else None
        address, token = "", secrets.token_bytes(16)
        if listening is not None:
            stack.enter_context(listening)
            address = listening.getsockname().decode()
        notes = _gather_objects(group, _Note(_host() if listening is not None else "", address, token, has))
        if len({note.has for note in notes}) == 1 and has:
            return old
        if len({note.host for note in notes}) > 1 or not all(note.host for note in notes) or listening is None:
            return None
        sockets = _connected(group, notes, listening)
    if sockets is None:
        return None
    exchange = Exchange(notes[0].token.hex(), group, sockets)
    _made[group] = ref(exchange)
    return exchange


def _asks(group: dist.ProcessGroup) -> bool:
    """What every rank knows of the others: whether to ask them."""
    if not 2 <= group.size() <= MOST_RANKS or not sys.platform.startswith("linux"):
        return False
    # Not by its name: who simulates ranks gives others' names.
    return type(backend_of(group, torch.device("cpu"))).__name__ == "ProcessGroupGloo"


def _can() -> bool:
    """Whether this system has all that it takes."""
    known = (
        all(hasattr(os, name) for name in ("memfd_create", "posix_fallocate", "register_at_fork"))
        and all(hasattr(socket, name) for name in ("AF_UNIX", "SOCK_SEQPACKET", "SO_PEERCRED", "send_fds"))
        and hasattr(mmap, "MAP_POPULATE")
    )
    return known and can_share()


def _host() -> str:
    """Equal for the processes of one user on one running system, however many containers that has."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.getuid()}"
    except OSError:
        return ""


def _listener() -> socket.socket | None:
    """A socket with a name in no folder: it goes with the process, and other network namespaces do not see it."""
    with contextlib.ExitStack() as stack:
        try:
            found = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            found.bind(f"\0fsshard-{secrets.token_hex(16)}")
            found.listen(MOST_RANKS)
        except OSError:
            return None
        stack.pop_all()
        return found


def _gather_objects(group: dist.ProcessGroup, value: Any) -> list[Any]:
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, value, group=group)
    return found


def _connected(
    group: dist.ProcessGroup, notes: list[_Note], listening: socket.socket
) -> dict[int, socket.socket] | None:
    """A connection to every other rank; None, on all ranks, if one is missing on any."""
    rank, sockets = group.rank(), dict[int, socket.socket]()
    try:
        works = True
        try:
            for lower in range(rank):
                sockets[lower] = _connect(notes[lower], rank)
        except OSError:
            works = False
        if not all(_gather_objects(group, works)):
            return None
        try:
            for _ in range(rank + 1, group.size()):
                higher, accepted = _accept(listening, notes[rank].token)
                sockets[higher] = accepted
        except OSError:
            works = False
        if all(_gather_objects(group, works)):
            kept, sockets = sockets, {}
            return kept
        return None
    finally:
        for each in sockets.values():
            each.close()


def _connect(note: _Note, rank: int) -> socket.socket:
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        found.settimeout(BACKLOG_SECONDS)  # without one, connecting sleeps for as long as strangers fill the backlog
        found.connect(note.address)
        found.send(note.token + bytes([rank]))
    except OSError:
        found.close()
        raise
    return found


def _accept(listening: socket.socket, token: bytes) -> tuple[int, socket.socket]:
    """The next who knows the token; any other process of the system can connect."""
    deadline = time.monotonic() + BACKLOG_SECONDS
    while True:
        listening.settimeout(max(deadline - time.monotonic(), 0.0))
        found, _ = listening.accept()
        try:
            found.settimeout(max(deadline - time.monotonic(), 0.0))
            _, user, _ = _CREDENTIALS.unpack(found.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
            said = found.recv(len(token) + 1) if user == os.getuid() else b""
            if len(said) == len(token) + 1 and secrets.compare_digest(said[:-1], token):
                return said[-1], found
        except OSError:
            found.close()
            raise
        found.close()
