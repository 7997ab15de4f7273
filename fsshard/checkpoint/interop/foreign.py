"""Opens other programs' checkpoints: their kind and the saved tree, with tensors still on disk.

Only what cannot be read otherwise is unpickled, and only if the caller trusts it: unpickling runs whatever code a file
asks for.
"""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsshard.checkpoint.format import strict_json
from fsshard.checkpoint.format.index import INDEX_NAME
from fsshard.checkpoint.format.pieces import Range
from fsshard.checkpoint.format.tensors_file import TensorsFile, open_regular
from fsshard.checkpoint.format.tree import MAX_DEPTH, MAX_VALUES
from fsshard.errors import CheckpointError, CorruptCheckpoint

__all__ = ["KINDS", "Opened", "foreign", "memory_of", "open_tree"]

KINDS = ("safetensors", "hf", "torch", "dcp", "neuralop")

MAX_INDEX = 100_000_000
MAX_PICKLE = 1 << 28
"""Bytes that the pickle in a file of torch.save can have: tensors lie beside it."""
MOST_BYTES_PER_BYTE, SPARE_BYTES = 4, 64 << 20
"""What the tensors of a file may stand for, as a multiple of its size and beyond that: expanded ones have no bound."""
HF_INDEXES = re.compile(r".+\.(safetensors|bin)\.index\.json")
HF_FILES = ("model.safetensors", "diffusion_pytorch_model.safetensors", "pytorch_model.bin")
OWN_FILE = re.compile(r"rank-\d+-of-\d+\.safetensors")
NEURALOP_MODEL = "_state_dict.pt"
NEURALOP_PARTS = ("optimizer", "scheduler", "regularizer")
ZIP, PICKLE = b"PK\x03\x04", b"\x80"


def foreign(path: str | os.PathLike[str]) -> str | None:
    """The kind of a checkpoint that fsshard did not write, by names and first bytes; nothing is unpickled.

    Returns:
        ``"safetensors"``, a file; ``"hf"``, a directory as on the Hugging Face Hub; ``"torch"``, a file of
        ``torch.save``; ``"dcp"``, a directory of ``torch.distributed.checkpoint``; ``"neuralop"``, a folder of
        neuraloperator's trainer; None for ours and for what nobody knows.
    """
    try:
        path = Path(path)
        if path.is_dir():
            return _kind_of_directory(path)
        return _kind_of_file(path) if path.is_file() else None
    except (OSError, TypeError, ValueError):  # whoever reads it then says what is wrong with the path
        return None


def _kind_of_directory(path: Path) -> str | None:
    names = {entry.name for entry in os.scandir(path)}
    if INDEX_NAME in names:
        return None
    if ".metadata" in names:
        return "dcp"
    if any((path / name / INDEX_NAME).is_file() for name in names):
        return None  # checkpoints of ours, and what was exported beside them
    if any(name in HF_FILES or HF_INDEXES.fullmatch(name) for name in names) or len(_single_file(names)) == 1:
        return "hf"
    return "neuralop" if any(name.endswith(NEURALOP_MODEL) for name in names) else None


def _single_file(names: set[str]) -> list[str]:
    return [name for name in names if name.endswith(".safetensors") and not OWN_FILE.fullmatch(name)]


def _kind_of_file(path: Path) -> str | None:
    with path.open("rb") as stream:
        head = stream.read(9)
    if path.suffix == ".safetensors" or (
        head[8:] == b"{" and int.from_bytes(head[:8], "little") <= path.stat().st_size
    ):
        return "safetensors"
    return "torch" if head.startswith((ZIP, PICKLE)) else None


# ------------------------------------------------------------------------------------------------ opening


class Opened(ExitStack):
    """The tree of another program's checkpoint; close it after reading.

    Attributes:
        path: of the file or directory.
        kind: one of :data:`KINDS`.
        tree: dicts and lists of values and tensors; a tensor on the meta device is still to be read.
        tied: key -> the key under which the same tensor was saved.
    """

    def __init__(self, path: Path, kind: str) -> None:
        super().__init__()
        self.path, self.kind = path, kind
        self.tree: Any = {}
        self.tied: dict[str, str] = {}
        self._readers: dict[int, Callable[[Range], Tensor]] = {}
        self._stands: list[Tensor] = []  # kept, since they are known by their ids
        self._values: dict[Any, Tensor] = {}  # what has been read whole: there can be any number of references to it

    def read(self, tensor: Tensor, wanted: Range | None = None) -> Tensor:
        """Elements [start, stop) of a tensor of the tree, flat; all by default."""
        start, stop = wanted if wanted is not None else (0, tensor.numel())
        reader = self._readers.get(id(tensor))
        if reader is not None:
            return reader((start, stop))
        return tensor.detach().resolve_conj().resolve_neg().reshape(-1)[start:stop].clone()

    def value(self, node: Any) -> Any:
        """A part of the tree with all its tensors read; the same memory once, as it was when it was saved."""
        if isinstance(node, Tensor):
            key = memory_of(node)
            if key not in self._values:
                self._values[key] = self.read(node).reshape(node.shape)
            return self._values[key]
        if type(node) in (list, tuple):
            return type(node)(self.value(item) for item in node)
        if isinstance(node, dict):
            return {key: self.value(item) for key, item in node.items()}
        return node

    def stand(self, dtype: torch.dtype, shape: tuple[int, ...], read: Callable[[Range], Tensor]) -> Tensor:
        """A tensor on the meta device for one that is read by and by."""
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        self.known(tensor, read)
        return tensor

    def known(self, tensor: Tensor, read: Callable[[Range], Tensor]) -> None:
        """Say how the numbers of a tensor on the meta device are read."""
        self._stands.append(tensor)
        self._readers[id(tensor)] = read


def open_tree(path: str | os.PathLike[str], kind: str, *, trust_pickle: bool) -> Opened:
    """Open another program's checkpoint.

    Args:
        path: of the file or directory.
        kind: what :func:`foreign` said.
        trust_pickle: unpickle what cannot be read otherwise.

    Raises:
        CheckpointError: it must be unpickled, and is not trusted.
        CorruptCheckpoint: it is damaged.
    """
    path = Path(path)
    openers = {
        "safetensors": _open_safetensors,
        "hf": _open_hf,
        "torch": _open_torch,
        "dcp": _open_dcp,
        "neuralop": _open_neuralop,
    }
    opened = Opened(path, kind)
    try:
        openers[kind](opened, path, trust_pickle)
        return opened
    except OSError as error:
        opened.close()
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except BaseException:
        opened.close()
        raise


def _open_safetensors(opened: Opened, path: Path, trust_pickle: bool) -> None:
    # The Hub's cache holds links, which a checkpoint of ours may not.
    file = opened.enter_context(TensorsFile.open(os.path.realpath(path)))
    for key, entry in file.entries.items():
        if key in opened.tree:
            raise CorruptCheckpoint(f"{path}: has {key!r}, which another file has too")

        def read(wanted: Range, key: str = key) -> Tensor:
            return file.read(key, *wanted)

        opened.tree[key] = opened.stand(entry.dtype, entry.shape, read)
    opened.tied |= {key: first for key, first in file.metadata.items() if first in file.entries}


def _open_hf(opened: Opened, path: Path, trust_pickle: bool) -> None:
    names = {entry.name for entry in os.scandir(path)}
    indexes = sorted((name for name in names if HF_INDEXES.fullmatch(name)), key=lambda name: ".bin." in name)
    if indexes:
        files = _files_of_index(path / indexes[0])
    else:
        files = [next(name for name in (*HF_FILES, *_single_file(names)) if name in names)]
    for name in files:
        if name.endswith(".safetensors"):
            _open_safetensors(opened, path / name, trust_pickle)
        else:
            opened.tree |= _unpickled(path / name, trust_pickle)
    if indexes:
        absent = sorted(_weight_map(path / indexes[0]).keys() - opened.tree.keys() - opened.tied.keys())
        if absent:
            raise CorruptCheckpoint(f"{path / indexes[0]} lists tensors that its files lack: {', '.join(absent[:5])}")


def _weight_map(index: Path) -> dict[str, str]:
    with os.fdopen(_opened_regular(index), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > MAX_INDEX:
            raise CorruptCheckpoint(f"{index}: {size} bytes; an index has at most {MAX_INDEX}")
        value = strict_json.parse(stream.read(size), str(index), max_depth=8)
    found = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise CorruptCheckpoint(f"{index}: has no weight_map of keys to files")
    outside = [name for name in found.values() if name != os.path.basename(name) or name in ("", ".", "..")]
    if outside:
        raise CorruptCheckpoint(f"{index}: {outside[0]!r} is not a file next to it")
    return found


def _files_of_index(index: Path) -> list[str]:
    return list(dict.fromkeys(_weight_map(index).values()))


def _open_torch(opened: Opened, path: Path, trust_pickle: bool) -> None:
    opened.tree = _unpickled(path, trust_pickle)


def _open_neuralop(opened: Opened, path: Path, trust_pickle: bool) -> None:
    names = sorted(entry.name for entry in os.scandir(path) if entry.name.endswith(".pt"))
    manifest = _unpickled(path / "manifest.pt", trust_pickle) if "manifest.pt" in names else {}
    models = [name for name in names if name.endswith(NEURALOP_MODEL)]
    chosen = manifest.get("model") if manifest.get("model") in models else None
    if chosen is None and len(models) > 1:
        chosen = f"model{NEURALOP_MODEL}" if f"model{NEURALOP_MODEL}" in models else None
        if chosen is None:
            raise CheckpointError(f"{path} has several models ({', '.join(models)}); pass the path of one")
    opened.tree = {"model": _unpickled(path / (chosen or models[0]), trust_pickle)}
    for part in NEURALOP_PARTS:
        if f"{part}.pt" in names:
            opened.tree[part] = _unpickled(path / f"{part}.pt", trust_pickle)
    if "epoch" in manifest:
        opened.tree["epoch"] = manifest["epoch"]


def _open_dcp(opened: Opened, path: Path, trust_pickle: bool) -> None:
    if not trust_pickle:
        raise CheckpointError(
            f"{path} is of torch.distributed.checkpoint, whose .metadata is a pickle: reading it runs whatever code is "
            "in it. Pass trust_pickle=True (--trust-pickle) if you know who wrote it"
        )
    from fsshard.checkpoint.interop.dcp import DcpDirectory

    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        if not entry.is_dir():
            os.close(_opened_regular(path / entry.name))
    directory = DcpDirectory(path)
    opened.tree = directory.tree
    for tensor, name in directory.tensors():

        def read(wanted: Range, name: str = name) -> Tensor:
            return directory.read(name, wanted)

        opened.known(tensor, read)


def _unpickled(path: Path, trust_pickle: bool) -> Any:
    """What ``torch.save`` wrote; its tensors are mapped, not read, where the file's format allows it.

    Plain tensors and containers are read by torch's own restricted unpickler, which runs no code.
    """
    with os.fdopen(_opened_regular(path), "rb") as stream:
        zipped = stream.read(4) == ZIP
    if zipped:
        _check_archive(path)
    arguments: dict[str, Any] = {"map_location": "cpu", "mmap": zipped}
    try:
        return _checked(path, torch.load(os.fspath(path), weights_only=True, **arguments))
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        if not trust_pickle:
            raise CheckpointError(
                f"{path} holds more than tensors and plain values ({_reason(error)}): reading it runs whatever code "
                "the file asks for. Pass trust_pickle=True (--trust-pickle) if you know who wrote it"
            ) from None
    except Exception as error:  # of a damaged file anything can come
        raise CorruptCheckpoint(f"{path}: {type(error).__name__}: {error}") from error
    try:
        return _checked(path, torch.load(os.fspath(path), weights_only=False, **arguments))
    except CheckpointError:
        raise
    except Exception as error:
        raise CorruptCheckpoint(f"{path}: {type(error).__name__}: {error}") from error


def _checked(path: Path, value: Any) -> Any:
    if isinstance(value, nn.Module):
        value = value.state_dict()
    if not isinstance(value, dict):
        raise CorruptCheckpoint(f"{path} holds a {type(value).__name__}; expected a state dict, or a dict of them")
    _Extent(path).check(value)
    return value


def _opened_regular(path: Path) -> int:
    """A descriptor for reading, of a file that is no pipe and no device; a link to one is followed.

    The Hub's cache holds links, which a checkpoint of ours may not.
    """
    real = os.path.realpath(path)
    try:
        return open_regular(Path(real))
    except CorruptCheckpoint as error:
        raise CorruptCheckpoint(f"{path}: {str(error).removeprefix(f'{real}: ')}") from None


def _check_archive(path: Path) -> None:
    """Raise for a zip archive that torch.save has not written, before anything in it is read.

    Raises:
        CorruptCheckpoint: it is compressed, its members overlap or reach beyond it, or its pickle is out of proportion.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise CorruptCheckpoint(f"{path}: no sound archive: {error}") from None
    size = path.stat().st_size
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise CorruptCheckpoint(f"{path}: a compressed archive; torch.save writes none: it could unfold without end")
    if sum(member.file_size for member in members) > size:
        raise CorruptCheckpoint(f"{path}: members of more bytes than the {size} of the file")
    pickles = [member.file_size for member in members if member.filename.endswith("data.pkl")]
    if max(pickles, default=0) > MAX_PICKLE:
        raise CorruptCheckpoint(f"{path}: a pickle of {max(pickles)} bytes; at most {MAX_PICKLE}")


class _Extent:
    """How much a tree stands for, found out without unfolding it: containers and memory can be shared."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._most = MOST_BYTES_PER_BYTE * path.stat().st_size + SPARE_BYTES
        self._known: dict[int, tuple[int, int]] = {}  # id of a container -> values in it, depth below it
        self._above: set[int] = set()
        self._memory: dict[Any, int] = {}  # each stretch of memory, seen in each way, once

    def check(self, value: Any) -> None:
        """Raise unless it can be walked through, and written, in bounded time and room.

        Raises:
            CorruptCheckpoint: it holds itself, or too many values, too deep, or tensors far beyond the file's bytes.
        """
        self._count(value, 0)
        total = sum(self._memory.values())
        if total > self._most:
            raise CorruptCheckpoint(
                f"{self._path}: its tensors stand for {total} bytes, far more than the file has: they are expanded, or "
                "show the same memory over and over; save copies of them (tensor.clone())"
            )

    def _count(self, node: Any, depth: int) -> tuple[int, int]:
        if isinstance(node, Tensor):
            self._add(node)
            return 1, 0
        if isinstance(node, dict):
            inner = [*node, *node.values()]
        elif isinstance(node, (list, tuple, set, frozenset)):
            inner = list(node)
        else:
            return 1, 0
        if id(node) in self._above:
            raise CorruptCheckpoint(f"{self._path}: a {type(node).__name__} that holds itself")
        found = self._known.get(id(node))
        if found is None:
            if depth > MAX_DEPTH:
                raise CorruptCheckpoint(f"{self._path}: nested deeper than {MAX_DEPTH}")
            self._above.add(id(node))
            below = [self._count(item, depth + 1) for item in inner]
            self._above.discard(id(node))
            found = 1 + sum(count for count, _ in below), 1 + max((deep for _, deep in below), default=0)
            self._known[id(node)] = found
        if depth + found[1] > MAX_DEPTH + 1:
            raise CorruptCheckpoint(f"{self._path}: nested deeper than {MAX_DEPTH}")
        if found[0] > MAX_VALUES:
            raise CorruptCheckpoint(
                f"{self._path}: stands for {found[0]} values, at most {MAX_VALUES}: containers that are shared"
            )
        return found

    def _add(self, tensor: Tensor) -> None:
        if tensor.is_meta:
            raise CorruptCheckpoint(f"{self._path}: a tensor on the meta device, which has no numbers")
        if tensor.layout is not torch.strided or tensor.is_quantized:
            what = "a quantized tensor" if tensor.is_quantized else f"a tensor of {tensor.layout}"
            raise CheckpointError(
                f"{self._path}: {what}; only plain ones are read: save it as such (tensor.to_dense())"
            )
        if type(tensor) in (Tensor, nn.Parameter):
            self._memory[memory_of(tensor)] = tensor.numel() * tensor.dtype.itemsize


def memory_of(tensor: Tensor) -> Any:
    """What tells tensors of a tree apart that show other memory, or the same in another way."""
    if tensor.is_meta or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _reason(error: Exception) -> str:
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    return found[1] if found else str(error).strip().splitlines()[-1][:200] if str(error).strip() else "a bad pickle"
