"""Questions to a store that does not answer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from fsshard.comm import stores
from fsshard.comm.stores import PatientStore, answer_within, own_store, timeout_of
from tests.on_ranks import on_ranks

SECONDS = 60.0  # what takes longer hangs


class Cable:
    """A connection to a store that can be cut: what goes in stays in."""

    def __init__(self, port: int) -> None:
        self.whole = threading.Event()
        self.whole.set()
        self._server, self._to = socket.create_server(("127.0.0.1", 0)), port
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            here, _ = self._server.accept()
            there = socket.create_connection(("127.0.0.1", self._to))
            for source, sink in ((here, there), (there, here)):
                threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        while data := source.recv(4096):
            self.whole.wait()
            sink.sendall(data)


@contextmanager
def cut_store(limit: float) -> Iterator[tuple[PatientStore, Cable]]:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    cable = Cable(server.port)
    store = TCPStore("127.0.0.1", cable.port, is_master=False, timeout=timedelta(seconds=SECONDS))
    yield PatientStore(PrefixStore("x", store), limit), cable
    cable.whole.set()


def test_a_question_without_an_answer_raises_in_time_and_the_next_at_once() -> None:
    with cut_store(SECONDS) as (store, cable):
        store.set("a", "1")
        assert store.get("a") == b"1" and store.get("b") is None
        assert (store.add("n", 2), store.add("n", 1), store.get_all(["b", "a"])) == (2, 3, {"a": b"1"})
        assert store.delete_key("a") and store.get("a") is None
        assert store.another().check(["n"])
        cable.whole.clear()
        store.limit = 0.1
        with pytest.raises(dist.DistStoreError, match=r"gave no answer within 0\.1 s"):
            store.get("n")
        for _ in range(3):  # without waiting
            with pytest.raises(dist.DistStoreError, match="has not answered for a while"):
                store.get("n")
        late, store.limit = store._asking, SECONDS
        cable.whole.set()
        assert late is not None and late.wait(SECONDS), "the answer comes after all"
        assert store.add("n", 1) == 4


def test_a_process_that_stood_still_meanwhile_gets_its_answer() -> None:
    waits = []

    class Resumed(threading.Event):
        """A job is suspended during the first wait, which is over when it goes on; the answer is there soon after."""

        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0)
            return len(waits) == 3 and super().wait(SECONDS)

    assert answer_within(8.0, lambda: 1, Resumed()) == 1 and len(waits) == 3 and max(waits) <= 1.0
    with pytest.raises(dist.DistStoreError):
        answer_within(8.0, lambda: 1, Resumed())
    assert sum(waits[3:]) == 8.0


def test_an_error_of_the_store_is_the_askers() -> None:
    with pytest.raises(ZeroDivisionError):
        answer_within(SECONDS, lambda: 1 // 0)


@on_ranks()
def test_ranks_share_their_own_store_and_the_next_is_another() -> None:
    group = dist.group.WORLD
    first, second = own_store(group), own_store(group)
    rank = dist.get_rank()
    first.set(f"rank{rank}", "here")
    dist.barrier()
    assert first.get("rank1") == b"here"
    assert second.get("rank1") is None
    assert first.limit == min(stores.ANSWER_SECONDS, timeout_of(group))
