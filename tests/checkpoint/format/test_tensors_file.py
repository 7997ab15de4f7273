"""Safetensors files: what is written is read by us and by safetensors, and nothing but sound files is read."""

from __future__ import annotations

import json
import math
import os
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fsshard.checkpoint.format import tensors_file
from fsshard.checkpoint.format.tensors_file import STORED, Item, TensorsFile, open_regular, write
from fsshard.errors import CheckpointError, CorruptCheckpoint


def item(key: str, tensor: Tensor) -> Item:
    return Item(key, tensor.dtype, tuple(tensor.shape), tensor)


def of_dtype(dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(math.prod(shape))
    high = 2 if dtype is torch.bool else 256
    size = math.prod(shape) * dtype.itemsize
    return torch.randint(0, high, (size,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def checksum(path: Path, progress: Any = None) -> tuple[int, int]:
    with TensorsFile(path) as file:
        return file.checksum(progress)


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy())


def raw(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_every_dtype_comes_back_and_safetensors_reads_it(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"matrix": of_dtype(dtype, 3, 5), "scalar": of_dtype(dtype), "empty": of_dtype(dtype, 0, 4)}
    info = write(tmp_path / "a.safetensors", [item(key, tensor) for key, tensor in tensors.items()])
    data = (tmp_path / "a.safetensors").read_bytes()
    assert info == (len(data), zlib.crc32(data)) and checksum(tmp_path / "a.safetensors") == info
    stored = STORED[dtype]
    with TensorsFile(tmp_path / "a.safetensors", info.bytes) as file:
        for key, tensor in tensors.items():
            assert file.entries[key].dtype is stored.dtype
            assert file.entries[key].shape == (*tensor.shape, *([2] if stored.lanes == 2 else []))
            got = file.read(key, 0, tensor.numel(), dtype=dtype)
            assert got.dtype is dtype and bits(got) == bits(tensor) and not got.requires_grad
    with safetensors.safe_open(tmp_path / "a.safetensors", "pt") as theirs:
        for key, tensor in tensors.items():
            read = theirs.get_tensor(key)
            assert read.dtype is stored.dtype and bits(read) == bits(tensor)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[::3, 1::2],
        lambda t: t.conj(),
        lambda t: t.conj().imag,
        lambda t: t[:, :1].expand(-1, 5),
        lambda t: t.requires_grad_(),
        lambda t: t.reshape(-1)[7:],
        lambda t: t.reshape(3, 2, -1).permute(1, 2, 0),
    ],
)
def test_views_are_written_as_what_they_show(view: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors_file, "CHUNK", 64)
    tensor = view(torch.randn(12, 9, dtype=torch.complex64))
    write(tmp_path / "a", [item("x", tensor)])
    with TensorsFile(tmp_path / "a") as file:
        assert torch.equal(file.read("x", 0, tensor.numel()).reshape(tensor.shape), tensor)


def test_slices_go_straight_into_the_tensor(tmp_path: Path) -> None:
    tensor = torch.arange(1000, dtype=torch.float64).to(torch.complex128)
    write(tmp_path / "a", [item("x", tensor), item("y", torch.arange(7))])
    whole = torch.full((50,), -1, dtype=torch.complex128)
    with TensorsFile(tmp_path / "a") as file:
        out = whole[10:30]
        assert file.read("x", 300, 320, out, dtype=torch.complex128) is out
        assert torch.equal(whole[10:30], tensor[300:320]) and (whole[:10] == -1).all() and (whole[30:] == -1).all()
        assert file.read("x", 5, 5).numel() == 0 and file.read("y", 6, 7).item() == 6
        parameter = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
        file.read("x", 4, 8, parameter)
        assert parameter.tolist() == [[2, 0], [3, 0]]


def test_a_tensor_can_be_given_in_pieces(tmp_path: Path) -> None:
    whole = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    given = Item("a", whole.dtype, (4, 6), lambda: whole.reshape(-1).split(7))
    assert write(tmp_path / "pieces", [given]) == write(tmp_path / "whole", [item("a", whole)])
    for pieces, text in (
        ([whole[:2]], "given were 12 elements"),
        ([whole, whole[0]], "given were 30 elements"),
        ([whole.double()], "is torch.float64"),
        ([whole.to("meta")], "on meta"),
    ):
        with pytest.raises(CheckpointError, match=text):
            write(tmp_path / "bad", [given._replace(data=lambda pieces=pieces: iter(pieces))])
        assert not (tmp_path / "bad").exists()


def test_writing_copies_nothing_and_progress_adds_up(tmp_path: Path) -> None:
    told = []
    tensor = torch.ones(4 << 20)
    tracemalloc.start()
    info = write(tmp_path / "a", [item("x", tensor)], progress=told.append)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 18 and sum(told) == info.bytes
    told.clear()
    assert checksum(tmp_path / "a", told.append) == info and sum(told) == info.bytes


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (Item("x", torch.float32, (2,), torch.zeros(3)), "announced"),
        (Item("x", torch.float32, (2,), torch.zeros(2, dtype=torch.int32)), "announced"),
        (item("x", torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8)), "qint8"),
        (item("x", torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)), "float4"),
        (item("__metadata__", torch.zeros(2)), "__metadata__"),
        (item("a", torch.zeros(2)), "twice"),
    ],
)
def test_what_cannot_be_written_is_named_and_leaves_no_file(bad: Item, says: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=says):
        write(tmp_path / "a", [item("a", torch.zeros(2)), bad])
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_over_or_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("there", "link", "no/such/directory"):
        with pytest.raises(CheckpointError, match="cannot create"):
            write(tmp_path / name, [])
    assert (tmp_path / "there").read_text() == "kept" and not (tmp_path / "elsewhere").exists()


@pytest.fixture
def small(tmp_path: Path) -> bytes:
    write(tmp_path / "small", [item("w", torch.randn(3, 2)), item("b", torch.ones(5, dtype=torch.bool))], {"k": "v"})
    return (tmp_path / "small").read_bytes()


def opens(path: Path, data: bytes) -> bool:
    """Tell whether the file opens; whatever is wrong with it is a CorruptCheckpoint that names it."""
    path.unlink(missing_ok=True)  # a file that is truncated and written again waits for the disk on ext4
    path.write_bytes(data)
    try:
        with TensorsFile(path) as file:
            for key, entry in file.entries.items():
                file.read(key, 0, math.prod(entry.shape))
    except CorruptCheckpoint as error:
        named = str(path) in str(error)
    else:
        return True
    assert named
    return False


def test_cut_short_at_every_byte(small: bytes, tmp_path: Path) -> None:
    assert opens(tmp_path / "a", small)
    assert not any(opens(tmp_path / "a", small[:length]) for length in range(len(small)))
    assert not opens(tmp_path / "a", small + b"\0")


def entry(**changes: Any) -> dict[str, Any]:
    return {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


BAD_HEADERS = {
    "over the cap": struct.pack("<Q", tensors_file.MAX_HEADER + 1) + b"{}",
    "no json": raw(b"\x80\x04\x95"),
    "a list": raw([]),
    "entry without": raw({"x": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "unknown dtype": raw(entry(dtype="F128"), bytes(8)),
    "shape wraps to 8 bytes": raw(entry(shape=[(1 << 62) + 1, 2]), bytes(8)),
    "size and shape differ": raw(entry(shape=[3]), bytes(8)),
    "a hole": raw(entry(data_offsets=[4, 12]), bytes(12)),
    "beyond the end": raw(entry(), bytes(7)),
    "more at the end": raw(entry(), bytes(9)),
    "overlap": raw({**entry(), "y": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, bytes(8)),
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_bad_headers(name: str, tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        assert not opens(tmp_path / "a", BAD_HEADERS[name])
        assert tracemalloc.get_traced_memory()[1] < 20 * len(BAD_HEADERS[name]) + (1 << 20)
    finally:
        tracemalloc.stop()


def test_only_regular_files_are_opened(small: bytes, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "small")
    os.mkfifo(tmp_path / "fifo")  # nobody writes to it: an open that waits would hang here
    (tmp_path / "directory").mkdir()
    for path in [*(tmp_path / name for name in ("link", "fifo", "directory", "none")), Path("/dev/zero")]:
        with pytest.raises(CorruptCheckpoint, match=r"not a regular file|missing"):
            open_regular(path)


def test_a_size_that_was_not_written_and_a_file_that_shrinks(small: bytes, tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match=f"{len(small)} bytes where 7"):
        TensorsFile(tmp_path / "small", 7)
    with TensorsFile(tmp_path / "small", len(small)) as file:
        os.truncate(tmp_path / "small", len(small) - 10)
        with pytest.raises(CorruptCheckpoint, match="cut short"):
            file.read("w", 0, 6)
