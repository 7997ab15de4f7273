"""Reads a checkpoint: its index, and of each tensor the elements that are asked for."""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from fsshard.checkpoint.format.directory import read_unreplaced
from fsshard.checkpoint.format.division import Division, Piece, Range, cover, pieces_in
from fsshard.checkpoint.format.index import MANY_FILES, Index, read_index, share_of, some, steps
from fsshard.checkpoint.format.object_store import StoredCheckpoint, is_url
from fsshard.checkpoint.format.tensors_file import STORED, Item, StrPath, TensorsFile
from fsshard.checkpoint.format.tree import decode
from fsshard.errors import CorruptCheckpoint
from fsshard.planning.text import printable

Itself = TypeVar("Itself", bound="TensorReader")


class TensorReader(ABC):
    """Tensors and other values by an index, whatever they are read from. A context, which closes files."""

    index: Index

    def __enter__(self: Itself) -> Itself:
        return self

    @abstractmethod
    def __exit__(self, *_: object) -> None:
        """Close what is open."""

    @abstractmethod
    def read(self, name: str, wanted: Range) -> Tensor:
        """Return elements [start, stop) of a flattened tensor in its own dtype, on the host."""

    def tensor(self, name: str) -> Tensor:
        """Return a whole tensor in its own shape."""
        info = self.index.tensors[name]
        return self.read(name, (0, info.numel)).reshape(info.shape)

    def tree(self, node: Any) -> Any:
        """Return the value of a tree in the index, with its tensors."""
        return decode(node, self.tensor)

    def chunks(self, name: str) -> Iterator[Tensor]:
        """Yield a flattened tensor in order, a bounded number of bytes at a time."""
        info = self.index.tensors[name]
        return (self.read(name, part) for part in steps(info.numel, info.kind.itemsize))

    def item(self, key: str, name: str) -> Item:
        """Return a tensor as something to write under a key, which is read when its turn has come."""
        info = self.index.tensors[name]
        return Item(key, info.kind, info.shape, lambda: self.chunks(name))


class PieceReader(TensorReader):
    """Reads tensors whose pieces the index lists."""

    def read(self, name: str, wanted: Range) -> Tensor:
        info = self.index.tensors[name]
        start = wanted[0]
        out = torch.empty(wanted[1] - start, dtype=info.kind, device="cpu")
        for piece, low, high in cover(info.pieces, wanted):
            self.fill(out[low - start : high - start], name, piece, low, high)
        return out

    @abstractmethod
    def fill(
        self,
        out: Tensor,
        name: str,
        piece: Piece,
        low: int,
        high: int,
    ) -> None:
        """Read elements [low, high) of a tensor, which are in that piece."""


class Reader(PieceReader):
    """An open checkpoint of ours."""

    def __init__(self, directory: Path, rank: int = 0, ranks: int = 1) -> None:
        self.path: Path | str = directory
        self.directory = directory
        self.index = read_index(directory, rank=rank, ranks=ranks)
        # The one that was opened last comes last.
        self._files: dict[str, TensorsFile] = {}

    @classmethod
    def of(cls, path: str, rank: int, ranks: int) -> Reader:
        """Open the checkpoint that one of several ranks reads, which is at a path or a URL."""
        if is_url(path):
            return StoredReader(path, rank, ranks)
        return cls(Path(path), rank, ranks)

    @classmethod
    def at(cls, path: StrPath) -> Reader:
        """Open the checkpoint at a path with all of its files: a save that replaces it from now on changes nothing."""

        def opened(place: Path) -> Reader:
            with ExitStack() as unless_whole:
                reader = unless_whole.enter_context(cls(place))
                reader.check_headers()
                unless_whole.pop_all()
                return reader

        return read_unreplaced(path, opened)

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _open(self, name: str) -> TensorsFile:
        if name not in self._files:
            # A load that needs more files opens them again, and notices if a save has replaced them.
            if len(self._files) >= MANY_FILES:
                self._files.pop(next(iter(self._files))).close()
            file = TensorsFile(self.directory / name, expected_bytes=self.index.files[name].bytes)
            self._files[name] = file
            if file.metadata.get("checkpoint") != self.index.id:
                raise CorruptCheckpoint(
                    f"{file.path} belongs to another checkpoint than the index next to it, which expects it to hold "
                    f"{some(self.index.tensors_in(name))}"
                )
        return self._files[name]

    def check_headers(self, rank: int = 0, ranks: int = 1) -> None:
        """Raise a CorruptCheckpoint, which names the file and the tensor, unless every piece lies as the index says.

        It looks at this rank's :func:`share_of` the files.
        """
        share = share_of(self.index, rank, ranks)
        # File by file, so that none is opened twice.
        pieces: dict[str, list[tuple[str, Piece]]] = {file: [] for file in share}
        for name, info in self.index.tensors.items():
            if isinstance(info.pieces, Division):
                for file in share:
                    pieces[file] += [(name, piece) for piece in pieces_in(info.pieces, file)]
                continue
            for piece in info.pieces:
                if piece.file in pieces:
                    pieces[piece.file].append((name, piece))
        for file, expected in pieces.items():
            for name, piece in expected:
                self._check_piece(file, name, piece)

    def _check_piece(self, file: str, name: str, piece: Piece) -> None:
        stored = STORED[self.index.tensors[name].kind]
        entry = self._open(file).entries.get(piece.key)
        want = (stored.dtype, (piece.stop - piece.start) * stored.lanes)
        if entry is None or (entry.dtype, torch.Size(entry.shape).numel()) != want:
            raise CorruptCheckpoint(
                f"{self.directory / file} does not hold elements {piece.start} to {piece.stop} of "
                f"{printable(name)}, which the index expects; was the file exchanged?"
            )

    def verify(
        self,
        rank: int = 0,
        ranks: int = 1,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Compare checksums of every ``ranks``-th file, from the ``rank``-th on; the error names files and tensors."""
        # By the descriptors from which tensors are read: a save may have put other files under these names meanwhile.
        faults = []
        names = sorted(self.index.files)
        for name in names[rank::ranks]:
            if self._open(name).checksum(progress) != self.index.files[name]:
                path = self.directory / name
                tensors = some(self.index.tensors_in(name))
                faults.append(f"{path}: its checksum differs from what was written; it holds {tensors}")
        if faults:
            raise CorruptCheckpoint("\n".join(faults))

    def fill(
        self,
        out: Tensor,
        name: str,
        piece: Piece,
        low: int,
        high: int,
    ) -> None:
        kind = self.index.tensors[name].kind
        self._open(piece.file).read(piece.key, low - piece.start, high - piece.start, out=out, dtype=kind)


class StoredReader(Reader):
    """A checkpoint of ours on a store. The files that this rank needs are copied to a temporary directory."""

    def __init__(self, url: str, rank: int, ranks: int) -> None:
        self._store = StoredCheckpoint(url)
        self.path = self._store.url
        self.index = self._store.read_index()
        self._store.check_files(self.index, share_of(self.index, rank, ranks))
        self._copies = tempfile.TemporaryDirectory(prefix="fsshard-")
        self.directory = Path(self._copies.name)
        self._files = {}

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._copies.cleanup()

    def _open(self, name: str) -> TensorsFile:
        copy = self.directory / name
        if not copy.exists():
            self._store.fetch(self.index.id, name, copy)
        return super()._open(name)

    def check_headers(self, rank: int = 0, ranks: int = 1) -> None:
        """Do nothing: a header is looked at when its file is needed, and none is copied for it alone."""
