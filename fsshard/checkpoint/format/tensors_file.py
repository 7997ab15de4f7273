"""Safetensors files, written as a stream and read by slices, and the dtypes that they hold.

The safetensors package writes tensors that are all in memory, and reads through a map of the file, whose pages count as
the process's memory. Here a file is written tensor by tensor, and a slice is read straight into the memory it is for.
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

from fsshard.errors import CheckpointError, CorruptCheckpoint

StrPath = str | os.PathLike[str]
Shape = tuple[int, ...]

MAX_SIZE = 1 << 63
MAX_HEADER = 100_000_000  # bytes; safetensors has the same bound
# Small enough that the checksum leaves the bytes in the cache for the write that follows.
CHUNK = 1 << 20
# What the disk is told to begin with while the next is written.
_AHEAD = 8 << 20
# What is copied from a device at once; less would leave the bus idle.
_TRANSFER = 16 << 20
_METADATA = "__metadata__"
Progress = Callable[[int], None]


class Stored(NamedTuple):
    """The form in which elements of a dtype lie in a file."""

    name: str  # what the file's header calls it
    dtype: torch.dtype  # what the header means by that; the dtype itself unless lanes is 2
    lanes: int = 1  # 2: an element is stored as real and imaginary part, in one more, last dimension of size 2


# The header's name of a dtype -> the dtype.
BY_FILE_NAME = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}

STORED = {dtype: Stored(name, dtype) for name, dtype in BY_FILE_NAME.items()}
# safetensors 0.8 knows neither of these ("unknown variant `C128`"), so they lie as pairs of reals.
STORED[torch.complex32] = Stored("F16", torch.float16, 2)
# Every dtype a checkpoint can hold. Quantized and sub-byte dtypes are none of them.
STORED[torch.complex128] = Stored("F64", torch.float64, 2)


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"complex64"`` for ``torch.complex64``, as the index writes it."""
    return str(dtype).removeprefix("torch.")


# The index's name of a dtype -> the dtype.
BY_NAME = {dtype_name(dtype): dtype for dtype in STORED}


class Item(NamedTuple):
    """A tensor to write under a key."""

    key: str
    dtype: torch.dtype
    shape: Shape
    # The tensor, or a function that gives it when its turn has come: whole, or its elements in order, in parts.
    data: Tensor | Callable[[], Tensor | Iterable[Tensor]]


class FileEntry(NamedTuple):
    """The size of a file, and the CRC-32 (zlib's) of all its bytes."""

    bytes: int
    crc32: int


def write(
    path: StrPath,
    items: Sequence[Item],
    metadata: Mapping[str, str] | None = None,
    *,
    progress: Progress | None = None,
) -> FileEntry:
    """Write a new file, through to the disk; ``progress`` is told the bytes of each chunk. An error leaves no file."""
    for item in items:
        if item.dtype not in STORED:
            known = ", ".join(map(dtype_name, STORED))
            raise CheckpointError(f"{item.key}: a tensor of {item.dtype}; checkpoints hold {known}")
    # Wider dtypes come first, as safetensors readers want them aligned.
    ordered = sorted(items, key=lambda item: -STORED[item.dtype].dtype.itemsize)
    header = _header(ordered, metadata or {})
    with new_file(Path(path), progress) as stream:
        stream.write(memoryview(header))
        for item in ordered:
            for tensor in _tensors(item):
                for piece in _pieces(tensor):
                    stream.write(_view(piece))
    return FileEntry(stream.bytes, stream.crc32)


@contextlib.contextmanager
def new_file(path: Path, progress: Progress | None = None) -> Iterator[_Stream]:
    """Yield what writes into a file that does not exist yet; no file is left behind by an error."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        raise CheckpointError(f"cannot create {path}: {error.strerror}") from error
    try:
        try:
            yield _Stream(descriptor, progress)
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
    """Bytes to a file, with count and checksum; the disk begins before the fsync that waits for it."""

    def __init__(self, descriptor: int, progress: Progress | None) -> None:
        self.bytes = 0
        self.crc32 = 0
        self._descriptor = descriptor
        self._progress = progress
        self._begun = 0  # up to which byte the disk was told to take them

    def write(self, data: memoryview) -> None:
        for start in range(0, len(data), CHUNK):
            chunk = data[start : start + CHUNK]
            self.crc32 = zlib.crc32(chunk, self.crc32)
            left = chunk
            while len(left):
                count = os.write(self._descriptor, left)
                left = left[count:]
            self.bytes += len(chunk)
            if self.bytes - self._begun >= _AHEAD:
                self._begin()
            if self._progress is not None:
                self._progress(len(chunk))

    def _begin(self) -> None:
        """Let the disk begin with what has been written."""
        if hasattr(os, "posix_fadvise"):
            # Linux begins to write dirty pages when it is told that nobody needs them, without waiting for the
            # disk; they stay in its cache while it does. Some file systems take no advice.
            size = self.bytes - self._begun
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._descriptor, self._begun, size, os.POSIX_FADV_DONTNEED)
        self._begun = self.bytes


def _header(items: Sequence[Item], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {}
    if metadata:
        header[_METADATA] = dict(metadata)
    end = 0
    for item in items:
        stored = STORED[item.dtype]
        if item.key in header or item.key == _METADATA:
            raise CheckpointError(f"the key {item.key!r} occurs twice, or is reserved by the format")
        shape = list(item.shape)
        if stored.lanes > 1:
            shape.append(stored.lanes)
        begin = end
        end += math.prod(shape) * stored.dtype.itemsize
        header[item.key] = {"dtype": stored.name, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise CheckpointError(f"{len(items)} tensors need a header of {len(text)} bytes; at most {MAX_HEADER}")
    return len(text).to_bytes(8, "little") + text


def _tensors(item: Item) -> Iterator[Tensor]:
    """Yield the tensor, or what it is given as, one after the other."""
    data = item.data if isinstance(item.data, Tensor) else item.data()
    tensors = [data] if isinstance(data, Tensor) else data
    count = 0
    for tensor in tensors:
        count += tensor.numel()
        if tensor.dtype is not item.dtype or tensor.is_meta:
            raise CheckpointError(f"{item.key}: announced as {item.dtype}, is {tensor.dtype} on {tensor.device}")
        yield tensor.detach()
    if count != math.prod(item.shape):
        raise CheckpointError(f"{item.key}: announced as {tuple(item.shape)}, given were {count} elements")


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yield contiguous tensors on the CPU that make up ``tensor`` in order; each is small if it is a copy."""
    copied = CHUNK if tensor.is_cpu else _TRANSFER
    if tensor.is_contiguous() and tensor.is_cpu and not (tensor.is_conj() or tensor.is_neg()):
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
    """View the bytes of a contiguous CPU tensor."""
    # Through uint8, as numpy knows no bfloat16 and no float8.
    return memoryview(cast(Any, tensor.reshape(-1).view(torch.uint8).numpy()))


def open_regular(path: Path, *, follow: bool = False, flags: int = os.O_RDONLY) -> int:
    """Open a regular file; what else has its name, or that there is nothing, is a CorruptCheckpoint.

    A link is refused too, unless ``follow``: the Hub's cache holds links, which a checkpoint of ours may not.
    """
    # Without O_NONBLOCK the open of a pipe waits for a writer.
    flags |= os.O_NONBLOCK | os.O_CLOEXEC
    if not follow:
        flags |= os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{path}: missing") from None
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
            raise CheckpointError(f"cannot open {path}: {error.strerror}") from error
        raise CorruptCheckpoint(f"{path}: not a regular file: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CorruptCheckpoint(f"{path}: not a regular file")
    return descriptor


def parse_json(data: bytes | bytearray, where: str) -> Any:
    """Return the value of UTF-8 JSON; all else, or what is nested too deep for Python, is a CorruptCheckpoint."""
    try:
        return json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        # JSONDecodeError and UnicodeDecodeError are ValueErrors.
        raise CorruptCheckpoint(f"{where}: not valid JSON: {error}") from None


class TensorEntry(NamedTuple):
    """A tensor in a file; its bytes are ``[begin, end)`` of the file."""

    dtype: torch.dtype
    shape: Shape
    begin: int
    end: int


Header = tuple[dict[str, TensorEntry], dict[str, str]]


class TensorsFile:
    """A safetensors file open for reading slices, with its header's ``entries`` and ``metadata``.

    Raises a CorruptCheckpoint where it is missing, no regular file, of another size than ``expected_bytes``, or no
    sound safetensors file; a CheckpointError where the system does not let it be read.
    """

    def __init__(
        self,
        path: StrPath,
        expected_bytes: int | None = None,
    ) -> None:
        self.path = Path(path)
        self._descriptor = open_regular(self.path)
        try:
            size = os.fstat(self._descriptor).st_size
            if expected_bytes is not None and size != expected_bytes:
                raise CorruptCheckpoint(f"{self.path}: {size} bytes where {expected_bytes} were written")
            self.entries, self.metadata = self._read_header(size)
        except BaseException:
            self.close()
            raise

    def _read_header(self, size: int) -> Header:
        path = self.path
        prefix = bytearray(8)
        if size < len(prefix):
            raise CorruptCheckpoint(f"{path}: {size} bytes are too few for a safetensors file")
        self._read(0, memoryview(prefix))
        length = int.from_bytes(prefix, "little")
        # This is checked before there is room made for it.
        if length > min(MAX_HEADER, size - len(prefix)):
            raise CorruptCheckpoint(f"{path}: claims a header of {length} bytes; the file has {size}")
        text = bytearray(length)
        self._read(len(prefix), memoryview(text))
        header = parse_json(text, f"{path}: header")
        if not isinstance(header, dict):
            raise CorruptCheckpoint(f"{path}: the header is not a JSON object")
        metadata = header.pop(_METADATA, {})
        if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
            raise CorruptCheckpoint(f"{path}: {_METADATA} is not a mapping of names to texts")
        end = len(prefix) + length
        entries = {}
        for key, value in header.items():
            entries[key] = _entry(f"{path}: {key!r}", value, end)
        in_order = sorted(entries, key=lambda key: (entries[key].begin, entries[key].end))
        for key in in_order:
            entry = entries[key]
            if entry.begin != end:
                raise CorruptCheckpoint(
                    f"{path}: {key!r} begins at byte {entry.begin}, what is before it ends at {end}"
                )
            end = entry.end
        if end != size:
            raise CorruptCheckpoint(f"{path}: {size} bytes where its header describes {end}")
        return {key: entries[key] for key in in_order}, metadata

    def checksum(self, progress: Progress | None = None) -> FileEntry:
        """Read the whole file, for its size and CRC-32."""
        size = 0
        crc32 = 0
        buffer = memoryview(bytearray(CHUNK))
        while True:
            count = self._read_some(buffer, size)
            if count == 0:
                return FileEntry(size, crc32)
            crc32 = zlib.crc32(buffer[:count], crc32)
            size += count
            if progress is not None:
                progress(count)

    def read(
        self,
        key: str,
        start: int,
        stop: int,
        out: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Read elements ``[start, stop)`` of the flattened tensor, into ``out``, contiguous and on the CPU, if given.

        ``dtype``: complex128 or complex32 where the entry is the pairs of these, and elements are counted in it.
        """
        entry = self.entries.get(key)
        if entry is None:
            raise CorruptCheckpoint(f"{self.path}: has no tensor {key!r}")
        dtype = dtype or entry.dtype
        stored = STORED.get(dtype)
        fits = False
        if stored is not None and stored.dtype is entry.dtype:
            fits = stored.lanes == 1 or entry.shape[-1:] == (2,)
        if not fits:
            raise CorruptCheckpoint(f"{self.path}: {key!r} is {entry.dtype} {list(entry.shape)}, not {dtype}")
        size = dtype.itemsize
        count = (entry.end - entry.begin) // size
        if not 0 <= start <= stop <= count:
            raise CorruptCheckpoint(f"{self.path}: {key!r} has no elements {start} to {stop}")
        if out is None:
            out = torch.empty(stop - start, dtype=dtype, device="cpu")
        self._read(entry.begin + start * size, _view(out.detach()))
        return out

    def _read(self, position: int, view: memoryview) -> None:
        while len(view):
            count = self._read_some(view, position)
            if count == 0:
                raise CorruptCheckpoint(f"{self.path}: cut short at byte {position}")
            view = view[count:]
            position = position + count

    def _read_some(self, view: memoryview, position: int) -> int:
        try:
            return os.preadv(self._descriptor, [view], position)
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path}: {error.strerror}") from error

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        descriptor = self._descriptor
        self._descriptor = -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> TensorsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _entry(where: str, value: Any, data: int) -> TensorEntry:
    try:
        dtype = BY_FILE_NAME[value["dtype"]]
        shape = tuple(value["shape"])
        begin, end = value["data_offsets"]
    except (LookupError, TypeError, ValueError):
        raise CorruptCheckpoint(f"{where} has no known dtype, shape and data_offsets: {str(value)[:80]}") from None
    for size in (*shape, begin, end):
        # True is no size.
        if type(size) is not int or not 0 <= size < MAX_SIZE:
            raise CorruptCheckpoint(f"{where} has an impossible shape or offsets: {str(value)[:80]}")
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise CorruptCheckpoint(f"{where} has an impossible shape or offsets: {str(value)[:80]}")
    return TensorEntry(dtype, shape, data + begin, data + end)
