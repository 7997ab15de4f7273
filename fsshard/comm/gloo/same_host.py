"""Finds out whether the ranks of a group are on one host, and connects them if they are."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from fsshard.comm.agreement import per_rank
from fsshard.comm.gloo.shared_memory import Exchange, can_share
from fsshard.errors import ConfigurationError
from fsshard.torch_private.c10d import backend_of

__all__ = ["SWITCHES", "check_switches", "exchange_of", "wants_shared_memory"]

SWITCHES = ("fast_collectives", "shared_memory")
"""Options of a backend that sends through shared memory; both allow it where it can be, and ask for nothing else."""

MOST_RANKS = 8
"""Every rank has a connection to, and maps the memory of, every other."""

BACKLOG_SECONDS = 10.0  # for a connection, which the other side has made already, to be accepted


class _Note(NamedTuple):
    """The message of a rank to the others.

    Attributes:
        host: what is equal on one host; "" if this rank cannot.
        address: of its listening socket.
        has: name of the exchange that it has.
    """

    host: str
    address: str
    has: str


_made: WeakKeyDictionary[dist.ProcessGroup, ReferenceType[Exchange]] = WeakKeyDictionary()


def check_switches(options: Mapping[str, Any]) -> None:
    """Raise if one of the two switches is no bool."""
    for name in SWITCHES:
        if not isinstance(value := options.get(name, True), bool):
            raise ConfigurationError(f"{name}={value!r}: expected a bool")


def wants_shared_memory(options: Mapping[str, Any], device: torch.device) -> bool:
    """Tell whether a model on the CPU, and on no other ``device``, is to use shared memory where that can be."""
    return device.type == "cpu" and all(options.get(name, True) for name in SWITCHES)


def exchange_of(group: dist.ProcessGroup) -> Exchange | None:
    """Return the group's, made if there is none; None, on all its ranks, where they cannot share memory. Collective.

    It is closed with the last who holds it.
    """
    # What every rank knows of the others. gloo not by its name: who simulates ranks gives others' names.
    if not 2 <= group.size() <= MOST_RANKS or not sys.platform.startswith("linux"):
        return None
    if type(backend_of(group, torch.device("cpu"))).__name__ != "ProcessGroupGloo":
        return None
    old = _made.get(group, lambda: None)()
    has = "" if old is None or old.broken else old.name
    with contextlib.ExitStack() as stack:
        listening = _listener() if can_share() else None
        host, address = "", ""
        if listening is not None:
            stack.enter_context(listening)
            host, address = _host(), listening.getsockname().decode()
        notes = per_rank(group, _Note(host, address, has))
        if has and all(note.has == has for note in notes):
            return old
        if listening is None or not host or any(note.host != host for note in notes):
            return None
        sockets = _connected(group, notes, listening)
    if sockets is None:
        return None
    exchange = Exchange(notes[0].address, group, sockets)
    _made[group] = ref(exchange)
    return exchange


def _host() -> str:
    """Return what is equal for the processes of one user on one running system, whatever containers that has."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.getuid()}"
    except OSError:
        return ""


def _listener() -> socket.socket | None:
    """Return a socket with a name in no folder: it goes with the process; other network namespaces do not see it."""
    with contextlib.ExitStack() as stack:
        try:
            found = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            found.bind(f"\0fsshard-{secrets.token_hex(16)}")
            found.listen(MOST_RANKS)
        except OSError:
            return None
        stack.pop_all()
        return found


def _connected(
    group: dist.ProcessGroup, notes: list[_Note], listening: socket.socket
) -> dict[int, socket.socket] | None:
    """Return a connection to every other rank; None, on all ranks, if one is missing on any."""
    rank, sockets = group.rank(), dict[int, socket.socket]()
    with contextlib.ExitStack() as stack:
        works = True
        try:
            for lower in range(rank):
                sockets[lower] = stack.enter_context(_connect(notes[lower].address, rank))
        except OSError:
            works = False
        if not all(per_rank(group, works)):
            return None
        try:
            for _ in range(rank + 1, group.size()):
                higher, accepted = _accept(listening)
                sockets[higher] = stack.enter_context(accepted)
        except OSError:
            works = False
        if not all(per_rank(group, works)):
            return None
        stack.pop_all()
        return sockets


def _connect(address: str, rank: int) -> socket.socket:
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        found.connect(address)
        found.send(bytes([rank]))
    except OSError:
        found.close()
        raise
    return found


def _accept(listening: socket.socket) -> tuple[int, socket.socket]:
    listening.settimeout(BACKLOG_SECONDS)
    found, _ = listening.accept()
    found.settimeout(BACKLOG_SECONDS)
    return found.recv(1)[0], found
