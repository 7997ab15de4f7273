"""Reads a checkpoint of ours: its index, and of each tensor the elements that are asked for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsshard.checkpoint.format.directory import read_unreplaced, resolve
from fsshard.checkpoint.format.dtypes import BY_NAME, STORED
from fsshard.checkpoint.format.index import Index, check_files, read_index
from fsshard.checkpoint.format.pieces import Range, cover
from fsshard.checkpoint.format.tensors_file import TensorsFile
from fsshard.checkpoint.format.tree import decode
from fsshard.errors import CorruptCheckpoint
from fsshard.planning.text import printable

__all__ = ["Reader"]


class Reader:
    """An open checkpoint: its index, and the elements of its tensors.

    Args:
        directory: a valid checkpoint.

    Raises:
        CorruptCheckpoint: a file is missing or of another size.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.index: Index = read_index(directory)
        self._files: dict[str, TensorsFile] = {}

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> Reader:
        """The checkpoint at a path, all of its files open: a save that replaces it from now on changes nothing."""

        def opened() -> Reader:
            reader = cls(resolve(path))
            try:
                reader.check_headers()
            except BaseException:
                reader.__exit__()
                raise
            return reader

        return read_unreplaced(path, opened)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _open(self, name: str) -> TensorsFile:
        if name not in self._files:
            file = TensorsFile.open(self.directory / name, expected_bytes=self.index.files[name].bytes)
            self._files[name] = file
            if file.metadata.get("checkpoint") != self.index.id:
                raise CorruptCheckpoint(
                    f"{file.path} belongs to another checkpoint than the index beside it; the index has it hold "
                    f"{', '.join(map(printable, self.index.tensors_in(name)[:8]))}"
                )
        return self._files[name]

    def check_headers(self) -> None:
        """Raise unless every piece lies in its file as the index says.

        Raises:
            CorruptCheckpoint: names the file and the tensor.
        """
        for name, info in self.index.tensors.items():
            for piece in info.pieces:
                entry = self._open(piece.file).entries.get(piece.key)
                stored = STORED[BY_NAME[info.dtype]]
                want = (stored.dtype, (piece.stop - piece.start) * stored.lanes)
                if entry is None or (entry.dtype, torch.Size(entry.shape).numel()) != want:
                    raise CorruptCheckpoint(
                        f"{self.directory / piece.file} does not hold elements {piece.start} to {piece.stop} of "
                        f"{printable(name)} "
                        "as the index says; was the file exchanged?"
                    )

    def verify(self, rank: int = 0, ranks: int = 1, progress: Callable[[int], None] | None = None) -> None:
        """Compare checksums: of every ``ranks``-th file, from the ``rank``-th on.

        Raises:
            CorruptCheckpoint: names the file and the tensors in it.
        """
        only = sorted(self.index.files)[rank::ranks]
        # By the descriptors from which tensors are read: a save may have put other files under these names meanwhile.
        opened = lambda path: self._open(path.name).duplicate()  # noqa: E731
        check_files(self.directory, self.index, verify=True, only=only, progress=progress, opened=opened)

    def read(self, name: str, wanted: Range | None = None) -> Tensor:
        """Elements [start, stop) of a flattened tensor, all of them by default, in its own dtype. On the host."""
        info = self.index.tensors[name]
        dtype = BY_NAME[info.dtype]
        start, stop = wanted if wanted is not None else (0, torch.Size(info.shape).numel())
        out = torch.empty(stop - start, dtype=dtype, device="cpu")
        for index, (low, high) in cover([(p.start, p.stop) for p in info.pieces], (start, stop)):
            piece = info.pieces[index]
            place = out[low - start : high - start]
            self._open(piece.file).read(piece.key, low - piece.start, high - piece.start, out=place, dtype=dtype)
        return out

    def tensor(self, name: str) -> Tensor:
        """A whole tensor in its own shape."""
        return self.read(name).reshape(self.index.tensors[name].shape)

    def tree(self, node: Any) -> Any:
        """The value of a tree in the index, with its tensors."""
        return decode(node, self.tensor)
