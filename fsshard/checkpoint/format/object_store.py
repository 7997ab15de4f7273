"""Checkpoints where fsspec opens files (``s3://``, ``gs://``, ``abfs://``, ...): whole or absent without a rename.

Object stores write an object whole or not at all, but rename none. So one object decides. The files of
``s3://bucket/run/step-100`` lie in a folder that is named by the save's id, ``s3://bucket/run/step-100/<id>/``. When
all are there, ``s3://bucket/run/step-100/index.json`` is written, which names that id. Until then the index of the
checkpoint before is there, with its own folder, which goes afterwards. What a killed save has left goes with the next
save to the same path. There are no locks: two jobs must not save to one path at the same time.
"""

from __future__ import annotations

import posixpath
import re
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fsshard.checkpoint.format.index import INDEX_FILE, Index, check_length, ordinal_of, share_of
from fsshard.errors import CheckpointError, CorruptCheckpoint

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://.+", re.DOTALL)
ID = re.compile(r"[0-9a-f]{32}")  # of a save
# One slash will do: Path("s3://bucket") has no second one.
SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
NUMBERED = re.compile(r"(.*?)[0-9]+([^0-9]*)", re.DOTALL)


def is_url(path: object) -> bool:
    """Return whether a path is one for fsspec; ``file://`` is a path like any other, which fsspec opens, too."""
    return isinstance(path, str) and URL.fullmatch(path) is not None


def refuse_url(path: str) -> None:
    """Raise CheckpointError for a URL where a local path is needed, or one that pathlib has made a path of."""
    if SCHEME.match(path):
        raise CheckpointError(
            f"{path!r}: expected a local path, got a URL; fsshard.save, fsshard.load and fsshard.latest take URLs, as "
            "text and not as a pathlib.Path; for all else copy the checkpoint to a local path"
        )


@contextmanager
def _errors(doing: str) -> Iterator[None]:
    """Raise what a store raises (errors of its own library among it) as one of ours."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"cannot {doing}: {type(error).__name__}: {error}") from error


class StoredCheckpoint:
    """A checkpoint, or the place of one, on a store."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        with _errors(f"open {self.url}"):
            # torch depends on it. What opens s3://, s3fs say, is the user's to install: fsspec's error says which.
            from fsspec.core import url_to_fs

            self._fs, self._root = url_to_fs(self.url)
            # It may know names that were listed before, in another save.
            self._fs.invalidate_cache()

    def _at(self, *names: str) -> str:
        return posixpath.join(self._root, *names)

    def read_index(self) -> Index:
        """Read the index."""
        where = f"{self.url}/{INDEX_FILE}"
        try:
            data = self._fs.cat_file(self._at(INDEX_FILE))
        except FileNotFoundError:
            raise CheckpointError(f"there is no checkpoint at {self.url}") from None
        except Exception as error:
            raise CheckpointError(f"cannot read {where}: {type(error).__name__}: {error}") from error
        return Index.from_json(data, where)

    def check_files(self, index: Index, names: list[str]) -> None:
        """Raise CorruptCheckpoint unless files are there with their sizes."""
        for name in names:
            file = f"{self.url}/{index.id}/{name}"
            expected = index.files[name].bytes
            path = self._at(index.id, name)
            try:
                size = self._fs.size(path)
            except FileNotFoundError:
                raise CorruptCheckpoint(f"{file} is missing") from None
            if size != expected:
                raise CorruptCheckpoint(f"{file}: {size} bytes where {expected} were written")

    def fetch(self, id: str, name: str, path: Path) -> None:
        """Copy one file of a checkpoint to a local path."""
        with _errors(f"read {self.url}/{id}/{name}"):
            self._fs.get_file(self._at(id, name), str(path))

    # ------------------------------------------------------------------------------------------------ saving

    @contextmanager
    def writing(self) -> Iterator[tuple[str, str]]:
        """Yield a new checkpoint's id, and its folder on the store; what no index names goes at the end."""
        id = uuid.uuid4().hex
        try:
            yield id, id
        finally:
            with suppress(CheckpointError):
                self._clear()

    @contextmanager
    def part(self, folder: str, name: str) -> Iterator[Path]:
        """Yield a local path for a rank's file, which is copied to the store at the end."""
        with tempfile.TemporaryDirectory(prefix="fsshard-") as local:
            path = Path(local) / name
            yield path
            with _errors(f"write {self.url}/{folder}/{name}"):
                self._fs.makedirs(self._at(folder), exist_ok=True)
                self._fs.put_file(str(path), self._at(folder, name))

    def finish(self, folder: str, index: Index) -> None:
        """Make the files in a folder the checkpoint: one object says so."""
        data = index.to_json()
        check_length(self.url, data)
        try:
            self.check_files(index, list(index.files))
        except CheckpointError as error:
            raise CheckpointError(f"the new checkpoint is incomplete, {self.url} is as it was: {error}") from error
        with _errors(f"write {self.url}/{INDEX_FILE}"):
            self._fs.pipe_file(self._at(INDEX_FILE), data)

    def _clear(self) -> None:
        """Remove the folders here that the index does not name, as far as they are checkpoints' folders."""
        with _errors(f"list {self.url}"):
            self._fs.invalidate_cache()
            current = ""
            if self._fs.exists(self._at(INDEX_FILE)):
                current = self.read_index().id
            for path in _folders(self._fs, self._root):
                name = posixpath.basename(path)
                is_of_a_save = ID.fullmatch(name) is not None
                if is_of_a_save and name != current:
                    self._fs.rm(path, recursive=True)

    def newest_ordinal(self) -> int:
        """Return the highest count of saves among the checkpoints beside this one."""
        ages = self._beside()
        if not ages:
            return 0
        newest, _ = ages[0]
        return newest

    def _beside(self) -> list[tuple[int, str]]:
        return _by_age(self._fs, posixpath.dirname(self._root))

    def retain(self, keep: int) -> None:
        """Remove all but the newest checkpoints beside this one whose names differ in the last number only."""
        number = NUMBERED.fullmatch(posixpath.basename(self._root))
        assert number is not None
        before, after = map(re.escape, number.groups())
        pattern = re.compile(f"{before}[0-9]+{after}")
        alike = [path for _, path in self._beside() if pattern.fullmatch(posixpath.basename(path))]
        with _errors(f"remove old checkpoints beside {self.url}"):
            for path in alike[keep:]:
                if path == self._root:
                    continue
                # Without an index it is no checkpoint at once.
                self._fs.rm_file(posixpath.join(path, INDEX_FILE))
                self._fs.rm(path, recursive=True)


def _folders(fs: Any, root: str) -> list[str]:
    """List the folders in a folder, which may not be there."""
    folders = []
    with suppress(FileNotFoundError):
        for entry in fs.ls(root, detail=True):
            if entry["type"] == "directory":
                folders.append(entry["name"].rstrip("/"))
    return folders


def _by_age(fs: Any, root: str) -> list[tuple[int, str]]:
    """List the checkpoints in a folder, the newest first, each after its count of saves."""
    ages = []
    with _errors(f"list {root}"):
        for path in _folders(fs, root):
            with suppress(FileNotFoundError):
                beginning = fs.cat_file(posixpath.join(path, INDEX_FILE), start=0, end=4096)
                ages.append((ordinal_of(beginning), path))
    return sorted(ages, reverse=True)


def identity_of_url(url: str) -> list[str]:
    """Tell one checkpoint at a URL from the next that a save puts there."""
    return [StoredCheckpoint(url).read_index().id]


def latest_url(url: str) -> str | None:
    """Return the URL of the newest complete checkpoint in a folder of a store, or of that checkpoint; None for none."""
    place = StoredCheckpoint(url)
    urls = [place.url]
    for _, path in _by_age(place._fs, place._root):
        name = posixpath.basename(path)
        urls.append(f"{place.url}/{name}")
    for candidate in urls:
        found = StoredCheckpoint(candidate)
        with suppress(CheckpointError):
            index = found.read_index()
            found.check_files(index, share_of(index, 0, 1))
            return found.url
    return None
