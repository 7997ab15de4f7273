"""A checkpoint's directory: written next to its place, renamed once, and replaced only by a complete one.

Beside ``ckpt/last`` lie, hidden, what is being written (``.last.partial-<id>``), what is being removed
(``.last.old-<id>``) and the lock of who does that (``.last.lock``), and in plain sight the checkpoint before
(``last.previous``). All here is local: one rank does it for the others.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from fsshard.checkpoint.format.division import RANK_FILE
from fsshard.checkpoint.format.index import INDEX_FILE, Index, ordinal_in, read_index, says_ours, write_index
from fsshard.checkpoint.format.object_store import is_url, latest_url, refuse_url
from fsshard.checkpoint.format.tensors_file import StrPath, open_regular
from fsshard.errors import CheckpointError
from fsshard.planning.text import printable

log = logging.getLogger("fsshard")

PREVIOUS = ".previous"
# The files of a checkpoint.
OURS = re.compile(rf"({re.escape(INDEX_FILE)}|{RANK_FILE.pattern})(\.\w+)?")
STRAY = re.compile(r"\.(?P<name>.+)\.(partial|old)-[0-9A-Za-z]+", re.DOTALL)
LOCK = re.compile(r"\.(?P<name>.+)\.lock", re.DOTALL)
# The text in a lock file.
HOLDER = re.compile(r"(process|sweeper) [0-9]+ on (?P<host>.*)", re.DOTALL)
# Seconds that a save waits for whoever removes things under its name.
SWEEPING = 10.0
# Seconds until a child that a killed process had just forked has closed the lock, the first thing that it does.
DYING = 0.5
NO_LOCKS = frozenset({errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENOLCK})

Value = TypeVar("Value")


class CheckpointTarget:
    """The ``path`` to which checkpoints are saved, again and again, and that of the ``previous`` one.

    A symbolic link to a checkpoint in the same directory is replaced by the new checkpoint; what it points to stays.
    """

    def __init__(self, path: StrPath) -> None:
        place = _absolute(path)  # a later chdir does not change it
        if place.name in ("", ".."):
            place = Path(os.path.realpath(place))
        self._parent = Path(os.path.realpath(place.parent))
        self.path = self._parent / place.name
        self.previous = self._parent / (place.name + PREVIOUS)
        if not place.name:
            raise CheckpointError(f"{os.fspath(path)!r} cannot be replaced by a checkpoint; name a directory in it")
        if place.name.endswith(PREVIOUS):
            raise CheckpointError(f"{self.path}: names that end in {PREVIOUS!r} are for the checkpoint before the last")

    def _beside(self, suffix: str) -> Path:
        return self._parent / f".{self.path.name}.{suffix}"

    def _check(self) -> None:
        """Raise if a save would replace something here that is not a checkpoint."""
        with _errors(f"look at {self.path}"):
            for place in (self.path, self.previous):
                if os.path.lexists(place):
                    _check_replaceable(place)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the path for saves of this process; a process that dies releases it.

        Raises a CheckpointError where another process saves here, or what is here cannot be replaced.
        """
        self._check()
        with _errors(f"lock {self.path}"):
            _make(self._parent)
            lock = self._beside("lock")
            held = _lock(lock, self.path)
        _held.add(held)
        try:
            yield
        finally:
            with suppress(OSError):
                # It goes before the lock is given up, so that nobody can have got this file meanwhile.
                lock.unlink()
            _held.discard(held)
            os.close(held)

    @contextmanager
    def writing(self) -> Iterator[tuple[str, Path]]:
        """Under the lock, yield a new checkpoint's id and the directory to write it into, which goes at the end."""
        with self.lock():
            _sweep(self.path)
            clear(self._parent, but=self.path.name)
            id = uuid.uuid4().hex
            partial = self._beside(f"partial-{id}")
            with _errors(f"make {partial}"):
                partial.mkdir()
            try:
                yield id, partial
            finally:
                _remove(partial)  # nothing is left of it after the rename

    def write_alone(self, write: Callable[[str, Path, int], None]) -> Path:
        """Write a whole checkpoint by this one process: it is there when this returns, and what was here if it raises.

        ``write`` gets the checkpoint's id, the directory to write into, and the count of saves that it is.
        """
        with self.writing() as (id, partial):
            write(id, partial, newest_ordinal(self._parent) + 1)
            return self.commit(partial)

    @contextmanager
    def part(self, partial: StrPath, name: str) -> Iterator[Path]:
        """Yield the path of a rank's file in the directory that rank 0 has made."""
        if not Path(partial).is_dir():
            raise CheckpointError(
                f"{os.fspath(partial)} was made by rank 0 and is not there for this rank; path must be on a file "
                "system that all ranks share"
            )
        yield Path(partial) / name

    def finish(self, partial: StrPath, index: Index) -> None:
        """Write the index, and :meth:`commit`."""
        write_index(partial, index)
        self.commit(Path(partial))

    def newest_ordinal(self) -> int:
        """Return the highest count of saves among the checkpoints beside this one."""
        return newest_ordinal(self._parent)

    def commit(self, partial: Path) -> Path:
        """Put a checkpoint that is whole in its place, and the one that was there into ``previous``; under the lock.

        What was here is as it was if this raises.
        """
        try:
            read_index(partial)
        except CheckpointError as error:
            raise CheckpointError(f"the new checkpoint is incomplete, {self.path} is as it was: {error}") from error
        self._check()
        old = self._beside(f"old-{uuid.uuid4().hex}")
        done = []
        try:
            with _errors(f"put the new checkpoint into {self.path}; what was there is as it was"):
                sync(partial)
                for source, target in [*self._moves(old), (partial, self.path)]:
                    os.rename(source, target)
                    done.append((source, target))
                    # The renames reach the disk in this order.
                    sync(self._parent)
        except CheckpointError:
            for source, target in reversed(done):
                with suppress(OSError):
                    os.rename(target, source)
            raise
        _remove(old)
        return self.path

    def _moves(self, old: Path) -> list[tuple[Path, Path]]:
        """List renames that clear the path, and never leave it without a whole checkpoint next to it."""
        if self.path.is_symlink():
            # What it points to is not the checkpoint before, but one of its own.
            return [(self.path, old)]
        if not os.path.lexists(self.path) or not os.listdir(self.path):
            return []  # a rename replaces an empty directory
        if not os.path.lexists(self.previous):
            return [(self.path, self.previous)]
        if not _by_age([self.path]) and _by_age([self.previous]):
            # A damaged one does not push out one that is whole.
            return [(self.path, old)]
        return [(self.previous, old), (self.path, self.previous)]

    def retain(self, keep: int) -> list[Path]:
        """Remove all but the newest whole checkpoints next to this one whose names differ in the last number only.

        One that another process is saving to is left as well, and one that a symbolic link in its directory or the
        directory above points to (``best -> step-100``). Returns those that were removed.
        """
        with _errors(f"list {self._parent}"):
            alike = [path for *_, path in _by_age(_series(self.path))]
        spared = {self.path, *_linked(self._parent), *_linked(self._parent.parent)}
        retired = []
        for path in alike[keep:]:
            if path not in spared and CheckpointTarget(path)._retire():
                retired.append(path)
        return retired

    def _retire(self) -> bool:
        """Remove this checkpoint and the one before it, unless somebody saves to it."""
        try:
            with self.lock():
                for path in filter(os.path.lexists, (self.previous, self.path)):
                    # It is renamed first, so that nobody finds it half removed.
                    gone = self._beside(f"partial-{uuid.uuid4().hex}")
                    os.rename(path, gone)
                    _remove(gone)
        except (CheckpointError, OSError) as error:
            _warn("%s is left, though it is old: %s", self.path, error)
            return False
        return True


def clear(directory: Path, *, but: str = "") -> None:
    """Remove what dead processes of this host have left of saves in a directory; leave the name ``but`` alone."""
    with suppress(OSError):
        for lock in filter(None, map(LOCK.fullmatch, os.listdir(directory))):
            if lock["name"] != but:
                # Somebody may hold it, or the file system has no locks.
                with suppress(OSError, CheckpointError):
                    _clear_name(directory / lock["name"], directory / lock.string)


def _clear_name(path: Path, file: Path) -> None:
    """Remove what is left of saves to ``path`` if its lock file is signed by a process of this host, which is dead."""
    held = open_regular(file, flags=os.O_RDWR)
    _held.add(held)
    try:
        # A save that is killed leaves its lock, signed with the host and free to be taken. What another host has left
        # stays, since its locks may not show here. Other programs have such files too: theirs are not even tried.
        holder = HOLDER.fullmatch(os.pread(held, 400, 0).decode(errors="replace"))
        if holder is None or holder["host"] != socket.gethostname():
            return
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _same(held, file):
            _sign(held, "sweeper")
            _sweep(path, links=os.path.lexists(path))
            file.unlink()
    finally:
        _held.discard(held)
        os.close(held)


def _sweep(path: Path, *, links: bool = True) -> None:
    """Remove what dead processes have left of saves to a path, whose lock is held."""
    with _errors(f"list {path.parent}"):
        strays = _strays(path)
    for stray in strays:
        # A checkpoint is needed in none of it: a save moves one out of the way only when another is whole under a
        # name. Not so a link that was at the path, if the save was killed before its own checkpoint was there.
        if links or not stray.is_symlink():
            _remove(stray)


def _series(path: Path) -> list[Path]:
    """List the directories next to ``path`` whose names differ from its name in the last number only, and itself."""
    number = re.fullmatch(r"(.*?)[0-9]+([^0-9]*)", path.name, re.DOTALL)
    if number is None:
        return []
    pattern = f"{re.escape(number[1])}[0-9]+{re.escape(number[2])}"
    names = [entry.name for entry in os.scandir(path.parent) if entry.is_dir(follow_symlinks=False)]
    return [path.parent / name for name in names if re.fullmatch(pattern, name)]


def _linked(directory: Path) -> Iterator[Path]:
    """Yield what the symbolic links in a directory point to."""
    with suppress(OSError):  # the directory above may not be readable
        for entry in os.scandir(directory):
            if entry.is_symlink():
                yield Path(os.path.realpath(entry))


def latest(directory: StrPath) -> Path | str | None:
    """Return the newest complete checkpoint in a directory: all its files exist and have the right sizes.

    The newest one has the highest count of saves, then the latest time, then the last name. Directories that are not
    complete checkpoints are skipped with a warning. Leftovers of killed saves are removed.

    Args:
        directory: a directory of checkpoints; or a checkpoint's own path, for that checkpoint or the one before it;
            or a URL for fsspec of a folder of checkpoints.

    Returns:
        Its absolute path, or its URL, or None where there is none.

    Raises:
        CheckpointError: ``directory`` is a file, or cannot be read.
    """
    if is_url(directory):
        return latest_url(os.fspath(directory))
    path = _absolute(directory)
    clear(path.parent if not path.is_dir() or os.path.lexists(path / INDEX_FILE) else path)
    return newest_whole(path)


def newest_whole(path: Path, *, warn: bool = True) -> Path | None:
    """Return what :func:`latest` returns, and change nothing. ``warn``: of those that are not complete."""
    own = _versions(path)
    with _errors(f"list {path}"):
        if not os.path.lexists(path):
            return _newest(own, warn=warn)
        if not path.is_dir():
            raise CheckpointError(f"{path} is a file; latest() takes a directory of checkpoints")
        children = [path / entry.name for entry in os.scandir(path) if entry.is_dir() and entry.name[0] != "."]
        if os.path.lexists(path / INDEX_FILE) or (own and not children):
            return _newest([path, *own], warn=warn)
    # A link to another entry of the directory is left out: that one is looked at anyway.
    alias = set()
    for child in children:
        if child.is_symlink() and child.resolve().parent == path.resolve():
            alias.add(child)
    return _newest(sorted(set(children) - alias), warn=warn)


def identity(path: StrPath) -> list[int]:
    """Tell one checkpoint at a path from the next that a save puts there; empty where there is none."""
    with suppress(OSError):
        status = os.stat(_absolute(path))
        return [status.st_dev, status.st_ino, status.st_mtime_ns]
    return []


def resolve(path: StrPath) -> Path:
    """Find what to load from: ``path``, or the checkpoint before it where a save was cut short and left none.

    Returns an absolute path of a directory with an index; raises if there is no checkpoint, or ``path`` holds several.
    """
    return read_unreplaced(path, lambda place: place)


def read_unreplaced(path: StrPath, read: Callable[[Path], Value]) -> Value:
    """Return what ``read`` makes of the checkpoint at a path; once more where it fails while a save has replaced it."""
    while True:
        before = identity(path)
        try:
            return read(_resolved(path))
        except CheckpointError:
            if identity(path) == before:
                raise


def _resolved(path: StrPath) -> Path:
    place = _absolute(path)
    if place.is_symlink():
        place = Path(os.path.realpath(place))
    if os.path.lexists(place / INDEX_FILE):
        # If something has happened to it, that is to be heard of.
        return place
    before = _newest(_versions(place))
    if before is not None:
        _warn("loading %s instead of %s: a save was cut short there", before, place)
        return before
    newest = None
    with suppress(OSError):
        newest = _newest([child for child in sorted(place.iterdir()) if child.name[0] != "."])
    if newest is not None:
        raise CheckpointError(
            f"{place} is a directory of checkpoints, not one; take one of them, such as what "
            f"fsshard.latest({os.fspath(path)!r}) returns: {newest}"
        )
    read_index(place)  # raises, and says why
    return place


def newest_ordinal(directory: Path) -> int:
    """Return the highest count of saves among the checkpoints in a directory, whole or not; 0 where there is none."""
    with _errors(f"list {directory}"):
        children = [child for child in directory.iterdir() if child.is_dir()] if directory.is_dir() else []
    return max(map(ordinal_in, children), default=0)


def _by_age(directories: Sequence[Path], *, warn: bool = False) -> list[tuple[int, str, str, Path]]:
    """List the directories that hold a whole checkpoint, the newest first, after what makes them so."""
    ages = []
    for directory in directories:
        try:
            index = read_index(directory)
            ages.append((index.ordinal, index.saved_at, directory.name, directory))
        except CheckpointError as error:
            if warn:
                _warn("%s is not a complete checkpoint and is skipped: %s", directory, error)
    return sorted(ages, reverse=True)


def _newest(directories: Sequence[Path], *, warn: bool = False) -> Path | None:
    return next((directory for *_, directory in _by_age(directories, warn=warn)), None)


def _versions(path: Path) -> list[Path]:
    """List what there is of earlier checkpoints at a path, ``previous`` first."""
    before = path.with_name(path.name + PREVIOUS) if path.name not in ("", "..") else path
    versions = [before] if before != path and before.is_dir() else []
    with suppress(OSError):
        versions += [stray for stray in _strays(path) if ".old-" in stray.name]
    return versions


def _strays(path: Path) -> list[Path]:
    """List the directories that are being written or removed for a path, or were when a process died."""
    own = []
    for stray in leftovers(path.parent):
        name, _, _ = stray.name[1:].rpartition(".")
        if name == path.name:
            own.append(stray)
    return own


def leftovers(parent: Path) -> list[Path]:
    """List what saves under any name write or remove in a directory, or did when their processes died."""
    names = sorted(os.listdir(parent)) if parent.is_dir() else []
    return [parent / name for name in names if STRAY.fullmatch(name)]


def _absolute(path: StrPath) -> Path:
    try:
        text = os.path.expanduser(os.fsdecode(path))
    except TypeError:
        raise CheckpointError(f"a path must be a string or a pathlib.Path, got {type(path).__name__}") from None
    if not text or "\0" in text:
        raise CheckpointError(f"{text!r} is not a path")
    refuse_url(text)
    if text.startswith("~"):
        raise CheckpointError(
            f"{text!r}: there is no such home directory; for a directory of that name write './{text}'"
        )
    return Path(text).absolute()


def _check_replaceable(path: Path) -> None:
    if path.is_symlink():
        target = Path(os.path.realpath(path))
        if target.parent != path.parent or not os.path.lexists(target):
            raise CheckpointError(
                f"{path} is a symbolic link to nothing, or out of its directory ({os.readlink(path)}): remove it, or "
                "save to the path that it leads to"
            )
        path = target
    if not path.is_dir():
        raise CheckpointError(f"{path}: expected a directory that is a checkpoint, got a file; save under another name")
    # It is said before all is written to a place next to it.
    if os.path.ismount(path):
        raise CheckpointError(f"{path} is a mount point, which cannot be renamed; save to a directory in it")
    names = sorted(os.listdir(path))
    others = [name for name in names if not OURS.fullmatch(name)]
    # Many programs call a file index.json. Where ours is damaged there are only names to go by.
    if names and not says_ours(path) and (others or names == [INDEX_FILE]):
        things = ", ".join(map(printable, (others or names)[:5]))
        raise CheckpointError(
            f"{path} holds no checkpoint but other files ({things}), which a save would replace; save to a directory "
            "in it, or to another path"
        )


@contextmanager
def _errors(doing: str) -> Iterator[None]:
    """Raise errors of the operating system as one of ours."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot {doing}: {error.strerror or error}") from error


def _make(directory: Path) -> None:
    """Make a directory and those above it that are missing, and have their names on the disk."""
    missing = [folder for folder in (directory, *directory.parents) if not os.path.lexists(folder)]
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def sync(directory: Path) -> None:
    """fsync a directory, so that the names in it are on the disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems know no such thing (some of FUSE, SMB).
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _remove(directory: Path) -> None:
    """Remove a checkpoint's files and then its directory, which stays if anybody put anything else there."""
    try:
        if not os.path.lexists(directory):
            return
        if directory.is_symlink():
            directory.unlink()
            return
        names = os.listdir(directory)
        others = [name for name in names if not OURS.fullmatch(name)]
        # The index first: without one it is no checkpoint at once.
        for name in sorted(set(names).difference(others), key=lambda name: name != INDEX_FILE):
            os.unlink(directory / name)
        if others:
            _warn("%s is not removed: fsshard did not write %s", directory, ", ".join(others[:5]))
        else:
            os.rmdir(directory)
    except OSError as error:
        _warn("%s could not be removed: %s", directory, error)


def _warn(text: str, *parts: object) -> None:
    """Log names as a terminal may show them: they can come from anybody."""
    log.warning(text, *(printable(str(part)) for part in parts))


# ---------------------------------------------------------------------------------------------------------- the lock

_held: set[int] = set()


def _close_in_child() -> None:
    """Close the locks that a forked process has inherited."""
    # A lock is held as long as any process has it open, and a worker of a DataLoader outlives a killed rank.
    for descriptor in _held:
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


def _lock(file: Path, what: Path) -> int:
    """Return the descriptor of a lock file that is locked, and still the one of that name."""
    begun = time.monotonic()
    while True:
        is_new = not os.path.lexists(file)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _same(descriptor, file):
                _sign(descriptor, "process")
                return descriptor
        except BlockingIOError:
            who = os.pread(descriptor, 400, 0).decode(errors="replace")
            os.close(descriptor)
            if time.monotonic() - begun > (SWEEPING if who.startswith("sweeper ") else DYING):
                said = f" ({printable(who)})" if who else ""
                raise CheckpointError(
                    f"another process is saving to {what}{said}: give it a path of its own. Ranks that save parts of "
                    "one model need wrap(..., replicated={...}, sharded={...}), which say so"
                ) from None
            time.sleep(0.01)
            continue
        except BaseException as error:
            os.close(descriptor)
            if is_new and isinstance(error, OSError):
                with suppress(OSError):
                    file.unlink()
            if isinstance(error, OSError) and error.errno in NO_LOCKS:
                raise CheckpointError(
                    f"cannot lock {file}: {error.strerror}. The file system has no locks (flock), without which two "
                    "jobs could write one checkpoint at the same time. Have it mounted with them (Lustre: the option "
                    "flock; NFS: without nolock), or save to another file system and copy from there when the save "
                    "has ended"
                ) from error
            raise
        os.close(descriptor)  # who held it has removed it in the same moment


def _sign(descriptor: int, what: str) -> None:
    """Write into a lock file who has it: for people, and for who finds it when its holder is dead."""
    os.ftruncate(descriptor, 0)
    with suppress(OSError):  # of a full disk
        os.pwrite(descriptor, f"{what} {os.getpid()} on {socket.gethostname()}".encode(), 0)


def _same(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), file.lstat())
    except FileNotFoundError:
        return False
