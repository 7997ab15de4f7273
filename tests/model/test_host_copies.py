"""Streams of CUDA are asked for the right things in order; test_activation_offload.py tests what is kept."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from fsshard.model import host_copies
from fsshard.model.host_copies import Offloader, StreamedCopies


class Stream:
    """Notes what it is asked for."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name, self.events = log, name, 0

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.events += 1
        return f"{self.name} {self.events}"


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    main, names = Stream(found, "main"), iter(("out", "in"))
    at_work = [main]

    @contextmanager
    def stream(other: Stream) -> Any:
        at_work.append(other)
        yield
        at_work.pop()

    copy, empty = Tensor.copy_, torch.empty

    def copied(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        found.append(f"copy on {at_work[-1].name}{', at once' if non_blocking else ''}")
        return copy(target, source)

    def pinned(*shape: Any, pin_memory: bool = False, **more: Any) -> Tensor:
        found.append(f"{'pinned' if pin_memory else 'device'} memory on {at_work[-1].name}")
        return empty(*shape, **more)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(found, next(names)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: at_work[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(Tensor, "copy_", copied)
    monkeypatch.setattr(Tensor, "record_stream", lambda _, other: found.append(f"memory is {other.name}'s, too"))
    return found


def test_a_tensor_leaves_and_comes_back(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "WINDOW", 1)
    offloader = Offloader(StreamedCopies(torch.device("cpu")))
    values = [torch.full((4,), float(number)) for number in range(3)]
    kept = [offloader.keep(values[0])]
    leaves = ["pinned memory on main", "out waits for main", "copy on out, at once", "memory is out's, too"]
    assert log == leaves  # it may be read, and given back, only when the copy is done
    log.clear()
    kept += [offloader.keep(value) for value in values[1:]]
    assert log == [*leaves, "main waits for out 1", *leaves, "main waits for out 2"]  # no more than one on its way
    log.clear()
    assert torch.equal(offloader.fetch(kept[2]), values[2])  # it is there still; those before it are fetched
    comes = ["device memory on main", "in waits for main", "in waits for out {}", "copy on in, at once"]
    comes.append("memory is in's, too")
    assert log == [line.format(number) for number in (2, 1) for line in comes]
    log.clear()
    assert torch.equal(offloader.fetch(kept[1]), values[1]) and log == ["main waits for in 1"]
    assert torch.equal(offloader.fetch(kept[0]), values[0]) and log[1:] == ["main waits for in 2"]


def test_each_device_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    monkeypatch.setattr(host_copies, "_offloaders", {})
    monkeypatch.setattr(host_copies, "StreamedCopies", lambda device: device)
    assert host_copies.offloader_of(first) is host_copies.offloader_of(torch.device("cuda", 0))
    assert host_copies.offloader_of(first) is not host_copies.offloader_of(second)
