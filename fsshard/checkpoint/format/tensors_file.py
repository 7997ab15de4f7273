"""Safetensors files, written as a stream and read by slices.

The safetensors package writes a file from tensors that are all in memory at once, and reads through a map of the file,
whose pages count as the process's memory. Here a file is written tensor by tensor with its checksum on the way, and a
slice is read straight into the memory that it is meant for. ``safetensors.safe_open`` opens what is written here.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fsshard.checkpoint.format.dtypes import BY_FILE_NAME, STORED, dtype_name
from fsshard.errors import CheckpointError, CorruptCheckpoint

__all__ = [
    "MAX_HEADER",
    "FileEntry",
    "Item",
    "TensorEntry",
    "TensorsFile",
    "new_file",
    "open_regular",
    "parse_json",
    "write",
]

MAX_HEADER = 100_000_000
"""Bytes that a header can have; safetensors has the same bound."""

CHUNK = 1 << 20  # Small enough that the checksum leaves the bytes in the cache for the write that follows.
_AHEAD = 8 << 20  # What the disk is told to begin with while the next is written.
_TRANSFER = 16 << 20  # What is copied from a device at once; less would leave the bus idle.
_METADATA = "__metadata__"
Progress = Callable[[int], None]


class Item(NamedTuple):
    """A tensor to write.

    Attributes:
        key: its name in the file.
        dtype: its dtype.
        shape: its shape.
        data: the tensor, or a function that gives it when its turn has come, whole or as its elements in order in any
            number of tensors. One that is contiguous and on the CPU is not copied; others are copied there piece by
            piece.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    data: Tensor | Callable[[], Tensor | Iterable[Tensor]]


class FileEntry(NamedTuple):
    """The size of a file, and the CRC-32 (zlib's) of all its bytes."""

    bytes: int
    crc32: int


class TensorEntry(NamedTuple):
    """A tensor in a file; its bytes are ``[begin, end)`` of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def write(
    path: str | os.PathLike[str],
    items: Sequence[Item],
    metadata: Mapping[str, str] | None = None,
    *,
    sync: bool = True,
    progress: Progress | None = None,
) -> FileEntry:
    """Write a new file; wider dtypes come first, as safetensors readers want them aligned, else in the order given.

    complex128 and complex32, which safetensors does not know, become float64 and float16 with one more dimension of 2.

    Args:
        path: of a file that does not exist.
        items: the tensors.
        metadata: text for the file's header.
        sync: return only when the disk has it.
        progress: told the bytes of each chunk that was written.

    Raises:
        CheckpointError: it exists, cannot be written, or an item is not what it says or has a dtype that checkpoints do
            not hold. No file is left behind.
    """
    ordered = sorted(items, key=lambda item: -_stored(item).dtype.itemsize)
    header = _header(ordered, metadata or {})
    with new_file(Path(path), sync=sync, progress=progress) as stream:
        stream.write(memoryview(header))
        for item in ordered:
            for tensor in _tensors(item):
                for piece in _pieces(tensor):
                    stream.write(_view(piece))
    return FileEntry(stream.bytes, stream.crc32)


@contextlib.contextmanager
def new_file(path: Path, *, sync: bool = True, progress: Progress | None = None) -> Iterator[_Stream]:
    """Yield what writes into a file that does not exist yet; no file is left behind by an error.

    Raises:
        CheckpointError: it exists, or cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise CheckpointError(f"cannot create {path}: {error.strerror}") from error
    try:
        try:
            yield _Stream(descriptor, progress, ahead=sync and hasattr(os, "posix_fadvise"))
            if sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except BaseException as error:
        with contextlib.suppress(OSError):
            path.unlink()
        if isinstance(error, OSError):
            raise CheckpointError(f"cannot write {path}: {error.strerror}") from error
        raise


class _Stream:
    """Bytes to a file, with count and checksum; ``ahead``: the disk begins before the fsync that waits for it."""

    def __init__(self, descriptor: int, progress: Progress | None, ahead: bool) -> None:
        self.bytes = self.crc32 = 0
        self._descriptor, self._progress, self._ahead = descriptor, progress, ahead
        self._begun = 0  # up to which byte the disk was told to take them

    def write(self, data: memoryview) -> None:
        for start in range(0, len(data), CHUNK):
            chunk = data[start : start + CHUNK]
            self.crc32 = zlib.crc32(chunk, self.crc32)
            left = chunk
            while len(left):
                left = left[os.write(self._descriptor, left) :]
            self.bytes += len(chunk)
            if self._ahead and self.bytes - self._begun >= _AHEAD:
                self._begin()
            if self._progress is not None:
                self._progress(len(chunk))

    def _begin(self) -> None:
        """Have the disk take what it was not told of yet, without waiting for it.

        Linux begins to write dirty pages when it is told that nobody needs them; they stay in its cache while it does.
        """
        with contextlib.suppress(OSError):  # of a file system that takes no advice; a failed write is fsync's to tell
            os.posix_fadvise(self._descriptor, self._begun, self.bytes - self._begun, os.POSIX_FADV_DONTNEED)
        self._begun = self.bytes


def _stored(item: Item) -> Any:
    try:
        return STORED[item.dtype]
    except KeyError:
        raise CheckpointError(
            f"{item.key}: a tensor of {item.dtype}; checkpoints hold {', '.join(map(dtype_name, STORED))}"
        ) from None


def _header(items: Sequence[Item], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    end = 0
    for item in items:
        stored = _stored(item)
        if item.key in header or item.key == _METADATA:
            raise CheckpointError(f"the key {item.key!r} occurs twice, or is reserved by the format")
        shape = [*item.shape, *([stored.lanes] if stored.lanes > 1 else [])]
        begin, end = end, end + math.prod(shape) * stored.dtype.itemsize
        header[item.key] = {"dtype": stored.name, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise CheckpointError(f"{len(items)} tensors need a header of {len(text)} bytes; at most {MAX_HEADER}")
    return len(text).to_bytes(8, "little") + text


def _tensors(item: Item) -> Iterator[Tensor]:
    """Yield the tensor, or what it is given as, one after the other."""
    given = item.data if isinstance(item.data, Tensor) else item.data()
    count = 0
    for tensor in [given] if isinstance(given, Tensor) else given:
        count += tensor.numel()
        if tensor.dtype is not item.dtype or tensor.is_meta:
            raise CheckpointError(f"{item.key}: announced as {item.dtype}, is {tensor.dtype} on {tensor.device}")
        yield tensor.detach()
    if count != math.prod(item.shape):
        raise CheckpointError(f"{item.key}: announced as {tuple(item.shape)}, given were {count} elements")


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yield contiguous tensors on the CPU that make up ``tensor`` in order; each is small if it is a copy."""
    lazy = tensor.is_conj() or tensor.is_neg()
    on_cpu = tensor.device.type == "cpu"
    copied = CHUNK if on_cpu else _TRANSFER
    if tensor.is_contiguous() and on_cpu and not lazy:
        yield tensor
    elif tensor.nbytes <= copied:
        yield tensor.cpu().resolve_conj().resolve_neg().contiguous()
    elif tensor.is_contiguous() and tensor.dim() > 1:
        yield from _pieces(tensor.view(-1))
    else:
        rows = max(1, copied * len(tensor) // tensor.nbytes)
        for start in range(0, len(tensor), rows):
            piece = tensor[start : start + rows]
            yield from _pieces(piece[0] if rows == 1 else piece)


def _view(tensor: Tensor) -> memoryview:
    """View the bytes of a contiguous CPU tensor; through uint8, as numpy knows no bfloat16 and no float8."""
    return memoryview(cast(Any, tensor.reshape(-1).view(torch.uint8).numpy()))


def open_regular(path: Path, *, follow: bool = False) -> int:
    """Open a regular file for reading; a pipe, device or directory under its name is refused.

    A link is refused too, unless ``follow``: the Hub's cache holds links, which a checkpoint of ours may not.

    Raises:
        CorruptCheckpoint: there is no such file, or it is something else.
        CheckpointError: it cannot be opened.
    """
    try:
        # Without O_NONBLOCK the open of a pipe waits for a writer.
        descriptor = os.open(path, os.O_RDONLY | (0 if follow else os.O_NOFOLLOW) | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) or error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
            if isinstance(error, FileNotFoundError):
                raise CorruptCheckpoint(f"{path}: missing") from None
            what = "a symbolic link" if os.path.islink(path) else str(error.args[-1])
            raise CorruptCheckpoint(f"{path}: not a regular file: {what}") from None
        raise CheckpointError(f"cannot open {path}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CorruptCheckpoint(f"{path}: not a regular file")
    return descriptor


def parse_json(data: bytes | bytearray, where: str) -> Any:
    """Return the value of UTF-8 JSON.

    Raises:
        CorruptCheckpoint: it is anything else, or nested too deep for Python; no other exception comes out.
    """
    try:
        return json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise CorruptCheckpoint(f"{where}: not valid JSON: {error}") from None


class TensorsFile:
    """A safetensors file open for reading slices. Make one with :meth:`open`; close it, or use it as a context.

    Attributes:
        path: of the file.
        entries: key -> what the header says of the tensor, in the order of their bytes.
        metadata: text of the header.
    """

    def __init__(self, path: Path, descriptor: int, entries: dict[str, TensorEntry], metadata: dict[str, str]) -> None:
        self.path, self.entries, self.metadata = path, entries, metadata
        self._descriptor = descriptor

    @classmethod
    def open(cls, path: str | os.PathLike[str], expected_bytes: int | None = None) -> TensorsFile:
        """Open a file and check all that its header says.

        Args:
            path: of the file.
            expected_bytes: what its size has to be.

        Raises:
            CorruptCheckpoint: it is missing, no regular file, of another size, or no sound safetensors file.
            CheckpointError: the system does not let it be read.
        """
        path = Path(path)
        descriptor = open_regular(path)
        try:
            size = os.fstat(descriptor).st_size
            if expected_bytes is not None and size != expected_bytes:
                raise CorruptCheckpoint(f"{path}: {size} bytes where {expected_bytes} were written")
            return cls(path, descriptor, *_read_header(path, descriptor, size))
        except BaseException:
            os.close(descriptor)
            raise

    def checksum(self, progress: Progress | None = None) -> FileEntry:
        """Read the whole file, for its size and CRC-32.

        Raises:
            CheckpointError: it cannot be read.
        """
        size = crc32 = 0
        buffer = memoryview(bytearray(CHUNK))
        try:
            while count := os.preadv(self._descriptor, [buffer], size):
                crc32 = zlib.crc32(buffer[:count], crc32)
                size += count
                if progress is not None:
                    progress(count)
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path}: {error.strerror}") from error
        return FileEntry(size, crc32)

    def read(
        self, key: str, start: int, stop: int, out: Tensor | None = None, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Read elements ``[start, stop)`` of the flattened tensor.

        Args:
            key: of the tensor.
            start: the first element.
            stop: one past the last.
            out: where to put them: contiguous, on the CPU, ``stop - start`` elements of the dtype. Else they are new.
            dtype: complex128 or complex32 where the entry is the pairs of these, and elements are counted in it.

        Raises:
            CorruptCheckpoint: the file has no such tensor, not as many elements, or is cut short.
            CheckpointError: the system does not let it be read.
        """
        entry = self.entries.get(key)
        if entry is None:
            raise CorruptCheckpoint(f"{self.path}: has no tensor {key!r}")
        dtype = dtype or entry.dtype
        stored = STORED.get(dtype)
        if stored is None or stored.dtype is not entry.dtype or (stored.lanes > 1 and entry.shape[-1:] != (2,)):
            raise CorruptCheckpoint(f"{self.path}: {key!r} is {entry.dtype} {list(entry.shape)}, not {dtype}")
        if not 0 <= start <= stop <= (entry.end - entry.begin) // dtype.itemsize:
            raise CorruptCheckpoint(f"{self.path}: {key!r} has no elements {start} to {stop}")
        if out is None:
            out = torch.empty(stop - start, dtype=dtype, device="cpu")
        _read(self.path, self._descriptor, entry.begin + start * dtype.itemsize, _view(out.detach()))
        return out

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> TensorsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read(path: Path, descriptor: int, position: int, view: memoryview) -> None:
    try:
        while len(view):
            count = os.preadv(descriptor, [view], position)
            if count == 0:
                raise CorruptCheckpoint(f"{path}: cut short at byte {position}")
            view, position = view[count:], position + count
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


def _read_header(path: Path, descriptor: int, size: int) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    prefix = bytearray(8)
    if size < len(prefix):
        raise CorruptCheckpoint(f"{path}: {size} bytes are too few for a safetensors file")
    _read(path, descriptor, 0, memoryview(prefix))
    length = int.from_bytes(prefix, "little")
    if length > min(MAX_HEADER, size - len(prefix)):
        raise CorruptCheckpoint(f"{path}: claims a header of {length} bytes; the file has {size}")
    text = bytearray(length)
    _read(path, descriptor, len(prefix), memoryview(text))
    header = parse_json(text, f"{path}: header")
    if not isinstance(header, dict):
        raise CorruptCheckpoint(f"{path}: the header is no JSON object")
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise CorruptCheckpoint(f"{path}: {_METADATA} is not text by name")
    data = len(prefix) + length
    entries = {key: _entry(f"{path}: {key!r}", value, data) for key, value in header.items()}
    entries = dict(sorted(entries.items(), key=lambda pair: (pair[1].begin, pair[1].end)))
    end = data
    for key, entry in entries.items():
        if entry.begin != end:
            raise CorruptCheckpoint(f"{path}: {key!r} begins at byte {entry.begin}, what is before it ends at {end}")
        end = entry.end
    if end != size:
        raise CorruptCheckpoint(f"{path}: {size} bytes where its header describes {end}")
    return entries, metadata


def _entry(where: str, value: Any, data: int) -> TensorEntry:
    try:
        name, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
        dtype, sizes = BY_FILE_NAME[name], [*shape, begin, end]
    except (LookupError, TypeError, ValueError):
        raise CorruptCheckpoint(f"{where} has no known dtype, shape and data_offsets: {str(value)[:80]}") from None
    if not all(type(size) is int and 0 <= size < 1 << 63 for size in sizes):  # True is no size
        raise CorruptCheckpoint(f"{where} has an impossible shape or offsets: {str(value)[:80]}")
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise CorruptCheckpoint(f"{where} of {name} {shape} cannot take {end - begin} bytes")
    return TensorEntry(dtype, tuple(shape), data + begin, data + end)
