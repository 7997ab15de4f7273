"""Checkpoints that replace each other: crashes at every system call, other processes, odd paths."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fsshard.checkpoint.format import directory as module
from fsshard.checkpoint.format.directory import CheckpointTarget, latest, newest_ordinal, resolve
from fsshard.checkpoint.format.index import INDEX_FILE, Index, ModelInfo, Origin, read_index
from fsshard.checkpoint.format.tensors_file import FileEntry
from fsshard.errors import CheckpointError, CorruptCheckpoint

DATA = "rank-00000-of-00001.safetensors"
CHANGES = ("mkdir", "open", "fsync", "rename", "unlink", "rmdir", "ftruncate")  # of os; what a save does to the disk


def write(folder: Path, ordinal: int, saved_at: str = "2026-01-01T00:00:00+00:00") -> None:
    """Write what ranks put into a checkpoint."""
    data = bytes(ordinal)
    (folder / DATA).write_bytes(data)
    origin = Origin("0.1.0", "2.13.0", "none", 1)
    index = Index(
        f"{ordinal:032x}", ordinal, saved_at, origin, {DATA: FileEntry(len(data), 0)}, {}, ModelInfo({}, {}, {})
    )
    (folder / INDEX_FILE).write_bytes(index.to_json())


def save(path: Any, ordinal: int, saved_at: str = "2026-01-01T00:00:00+00:00", keep: int | None = None) -> Path:
    place = CheckpointTarget(path)
    with place.writing() as (_, partial):
        write(partial, ordinal, saved_at)
        place.commit(partial)
        if keep is not None:
            place.retain(keep)
        return place.path


def listed(folder: Path) -> dict[str, int]:
    """Ordinals by name, of all that is in a folder."""
    return {entry.name: len((entry / DATA).read_bytes()) for entry in sorted(folder.iterdir())}


def child(work: Callable[[], Any]) -> Any:
    """Return what ``work`` returns in a process of its own; if it does not, the negative signal or the exit code."""
    read, written = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(written, json.dumps([work()]).encode())
        except BaseException as error:
            os.write(written, json.dumps([f"{type(error).__name__}: {error}"]).encode())
        finally:
            os._exit(0)
    os.close(written)
    with open(read, "rb") as stream:
        told = stream.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return json.loads(told)[0] if told else status


class Killed(BaseException):
    """This process does nothing more to the disk."""


class Interrupted:
    """Lets ``at`` changes of the disk happen; the next one raises, and all later ones too if that is a kill."""

    def __init__(self, at: int, error: BaseException, names: tuple[str, ...] = CHANGES) -> None:
        self.left, self.error, self.names = at, error, names

    def __enter__(self) -> Interrupted:
        self.before = {name: getattr(os, name) for name in self.names}
        for name, call in self.before.items():
            setattr(os, name, self._counted(call))
        return self

    def __exit__(self, *_: object) -> None:
        for name, call in self.before.items():
            setattr(os, name, call)
        for descriptor in list(module._held):  # the system gives up the locks of the dead
            os.close(descriptor)
        module._held.clear()

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if call is self.before.get("open") and not args[1] & os.O_CREAT:
                return call(*args, **kwargs)
            self.left -= 1
            if self.left == -1 or (self.left < 0 and isinstance(self.error, Killed)):
                raise self.error
            return call(*args, **kwargs)

        return counted


def interrupted(at: int, error: BaseException, work: Callable[[], Any], names: tuple[str, ...] = CHANGES) -> Any:
    """Return what ``work`` returns, or the error of ours or the death it ends with."""
    with Interrupted(at, error, names):
        try:
            return work()
        except (Killed, CheckpointError) as raised:
            return raised


# ------------------------------------------------------------------------------------------------ saving


def test_a_save_replaces_the_last_and_keeps_it_as_previous(tmp_path: Path) -> None:
    path = tmp_path / "made" / "too" / "last"
    for ordinal in (1, 2, 3):
        assert save(path, ordinal) == path
        assert read_index(path).ordinal == ordinal == newest_ordinal(path.parent)
    assert listed(path.parent) == {"last": 3, "last.previous": 2}


def start_none(path: Path) -> None:
    path.parent.mkdir()


def start_two(path: Path) -> None:
    save(path, 1), save(path, 2)


def start_damaged(path: Path) -> None:
    save(path, 2), save(path, 1)
    (path / INDEX_FILE).unlink()


def start_moved(path: Path) -> None:
    """As if a kill had come between two renames."""
    save(path, 2)
    os.rename(path, path.with_name("last.previous"))
    save(path.parent / "x", 1)
    os.rename(path.parent / "x", path.parent / ".last.old-1")


STARTS = [start_none, start_two, start_damaged, start_moved]


@pytest.mark.parametrize("start", STARTS)
def test_killed_at_any_change_of_the_disk(tmp_path: Path, start: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "fsshard")
    for at in range(100):
        folder = tmp_path / str(at)
        path = folder / "last"
        start(path)
        ended = interrupted(at, Killed(), lambda path=path: save(path, 3))
        newest = latest(folder)
        if newest is None:
            assert start is start_none and ended != path
        else:
            assert read_index(newest).ordinal in ((2, 3) if start is not start_none else (3,))
            assert read_index(resolve(path)).ordinal == read_index(newest).ordinal and latest(path) == newest
        assert save(path, 4) == path
        left = listed(folder)
        assert left.pop("last") == 4 and left in ([{}, {"last.previous": 3}] if newest is None else [
            {"last.previous": read_index(path.with_name("last.previous")).ordinal}])  # fmt: skip
        assert newest is None or left["last.previous"] in (2, 3)
        if ended == path:
            break
    assert at > 5


@pytest.mark.parametrize("start", STARTS)
def test_refused_at_any_change_of_the_disk(tmp_path: Path, start: Any) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    for at in range(100):
        folder = tmp_path / str(at)
        path = folder / "last"
        start(path)
        before = {entry.name: sorted(os.listdir(entry)) for entry in folder.iterdir() if ".old-" not in entry.name}
        ended = interrupted(at, full, lambda path=path: save(path, 3), ("rename", "fsync"))
        if ended == path:
            assert read_index(path).ordinal == 3
            break
        assert str(ended) == (
            f"cannot put the new checkpoint into {path}; what was there is as it was: No space left on device"
        )
        assert {entry.name: sorted(os.listdir(entry)) for entry in folder.iterdir()} == before
    assert at >= 3


def test_renames_reach_the_disk_in_order(tmp_path: Path) -> None:
    """Power loss: what is in the new directory before its name, and each name before the next."""
    save(tmp_path / "last", 1), save(tmp_path / "last", 2)
    done = []
    rename, fsync = os.rename, os.fsync

    def renamed(source: Any, target: Any) -> None:
        done.append(Path(target).name.partition("-")[0])
        rename(source, target)

    def synced(descriptor: int) -> None:
        done.append("sync " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.partition("-")[0])
        fsync(descriptor)

    with mock.patch.object(os, "rename", renamed), mock.patch.object(os, "fsync", synced):
        save(tmp_path / "last", 3)
    here = f"sync {tmp_path.name.partition('-')[0]}"
    assert done == ["sync .last.partial", ".last.old", here, "last.previous", here, "last", here]


def test_what_is_incomplete_is_not_committed(tmp_path: Path) -> None:
    path = save(tmp_path / "last", 1)
    place = CheckpointTarget(path)
    with place.writing() as (_, partial):
        write(partial, 2)
        (partial / DATA).unlink()
        with pytest.raises(CheckpointError, match=rf"incomplete, {path} is as it was: .*{DATA}"):
            place.commit(partial)
    assert listed(tmp_path) == {"last": 1}


def test_nothing_else_is_swept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path / "last", 1)
    for name in (".last.partial-x.partial-1", ".last2.partial-1", ".last.partial-", "last.old-1", ".last.partial-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / DATA).write_bytes(b"")
    (tmp_path / ".last.old-1").mkdir()
    (tmp_path / ".last.old-1" / "notes.txt").write_text("mine")
    save(tmp_path / "last", 2)
    left = {".last.old-1", ".last.partial-x.partial-1", ".last2.partial-1", ".last.partial-", "last.old-1"}
    assert set(os.listdir(tmp_path)) == {"last", "last.previous", *left}
    assert (tmp_path / ".last.old-1" / "notes.txt").exists() and "notes.txt" in caplog.text


def rotate(folder: Path, number: int) -> Path:
    return save(folder / f"step-{number}", number, keep=2)


def unsigned(folder: Path) -> set[str]:
    """Locks of who was killed before it could write into them whose they are: empty files, which stay."""
    return {file.name for file in folder.glob(".*.lock") if not file.read_bytes()}


def test_crashes_leak_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Killed at every change of the disk, between saves of ever new names; the next one, or latest(), tidies up."""
    caplog.set_level(logging.CRITICAL, "fsshard")
    for by in ("save", "latest"):
        for at in range(100):
            folder = tmp_path / by / str(at)
            for number in (1, 2, 3):
                rotate(folder, number)
            ended = interrupted(at, Killed(), lambda folder=folder: rotate(folder, 4))
            assert newest_ordinal(folder) in (3, 4)
            if by == "latest":
                newest = latest(folder)
                assert newest is not None and read_index(newest).ordinal in (3, 4)
                names = set(os.listdir(folder))
                names -= unsigned(folder)
                assert names <= {"step-2", "step-3", "step-4"} and len(names) >= 2
            rotate(folder, 5)
            names = set(os.listdir(folder)) - unsigned(folder)
            assert names == {"step-5", "step-4" if "step-4" in names else "step-3"}
            if isinstance(ended, Path):
                break
        assert at > 12


def test_what_a_living_process_holds_is_left(tmp_path: Path) -> None:
    for number in (1, 2):
        rotate(tmp_path, number)
    place = CheckpointTarget(tmp_path / "step-3")
    with place.writing() as (_, partial):
        write(partial, 3)
        assert latest(tmp_path) == tmp_path / "step-2" and child(lambda: str(latest(tmp_path))).endswith("step-2")
        rotate(tmp_path, 4)
        assert place.commit(partial) == tmp_path / "step-3"
    assert sorted(os.listdir(tmp_path)) == ["step-2", "step-3", "step-4"]


def test_what_another_host_or_nobody_signed_is_left(tmp_path: Path) -> None:
    """Locks of another host need not be seen here; a stranger's lock file is not ours to remove."""
    save(tmp_path / "last", 1)
    said = {"here": f"process 1 on {module.socket.gethostname()}", "there": "process 1 on there", "other": "pid 7\n"}
    for name, text in said.items():
        (tmp_path / f".{name}.lock").write_text(text)
        (tmp_path / f".{name}.partial-1").mkdir()
        (tmp_path / f".{name}.partial-1" / DATA).write_bytes(b"")
    (tmp_path / ".nobody.partial-1").mkdir(), (tmp_path / ".empty.lock").touch(), os.mkfifo(tmp_path / ".pipe.lock")
    before = set(os.listdir(tmp_path))
    latest(tmp_path)
    assert before - set(os.listdir(tmp_path)) == {".here.lock", ".here.partial-1"}
    assert [path.name for path in module.leftovers(tmp_path)] == [
        f".{n}.partial-1" for n in ("nobody", "other", "there")
    ]


# ------------------------------------------------------------------------------------------------ other processes


@pytest.mark.parametrize("code", [errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks(tmp_path: Path, code: int) -> None:
    path = save(tmp_path / "last", 1)
    (tmp_path / ".gone.partial-1").mkdir()
    with mock.patch.object(module.fcntl, "flock", side_effect=OSError(code, "Nothing of that kind")):
        with pytest.raises(CheckpointError, match=r"has no locks \(flock\)(.|\n)*the option flock(.|\n)*another file"):
            save(path, 2)
        assert latest(tmp_path) == path
    assert sorted(os.listdir(tmp_path)) == [".gone.partial-1", "last"] and read_index(path).ordinal == 1


def test_a_dead_process_gives_up_the_lock_though_its_workers_live(tmp_path: Path) -> None:
    path = tmp_path / "last"
    read, written = os.pipe()

    def dies() -> None:
        with CheckpointTarget(path).lock():
            if os.fork() == 0:  # a worker of a DataLoader, which stays
                os.close(written)
                os.read(read, 1)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(os, "write"):
        pid = os.fork()
        if pid == 0:
            dies()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    try:
        assert (tmp_path / ".last.lock").exists() and save(path, 1) == path
    finally:
        os.close(written), os.close(read)
    assert os.listdir(tmp_path) == ["last"]


# ------------------------------------------------------------------------------------------------ paths


def test_paths_as_users_write_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    place = CheckpointTarget("ckpt/läst 步骤\n/")
    monkeypatch.chdir("elsewhere")
    with place.writing() as (_, partial):
        write(partial, 1)
        assert place.commit(partial) == tmp_path / "ckpt" / "läst 步骤\n"
    assert save("../ckpt/x/..//y/", 2) == tmp_path / "ckpt" / "y"
    assert save(os.fsdecode(b"\xff"), 3).name == "\udcff" and save(b"bytes", 4).name == "bytes"
    assert latest(".") == Path.cwd() / "bytes" and resolve("bytes/") == Path.cwd() / "bytes"
    assert latest("../ckpt") == Path.cwd() / "../ckpt" / "y"
    assert CheckpointTarget(".").path == Path.cwd()


def _file(path: Path) -> Path:
    path.write_text("mine")
    return path


def _full(path: Path, index: bool = False) -> Path:
    path.mkdir()
    (path / "results.csv").write_text("mine")
    return path


def _index(path: Path, *others: str, text: str = '{"photos": ["photo.jpg"]}') -> Path:
    """A folder of somebody whose program calls its index as we do."""
    path.mkdir()
    for name in others:
        (path / name).write_text("mine")
    (path / "index.json").write_text(text)
    return path


def _link(path: Path, target: Any) -> Path:
    path.symlink_to(target)
    return path


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "file": (lambda t: _file(t / "x"), "x: expected a directory that is a checkpoint, got a file"),
    "file above": (lambda t: _file(t / "x") / "last", "x/last: Not a directory"),
    "other things": (lambda t: _full(t / "x"), r"x holds no checkpoint but other files \(results.csv\)"),
    "an index of others": (lambda t: _index(t / "x", "photo.jpg"), r"x holds no checkpoint but .*\(photo.jpg\)"),
    "nothing but an index of others": (lambda t: _index(t / "x"), r"x holds no checkpoint but .*\(index.json\)"),
    "dangling link": (lambda t: _link(t / "x", "nothing"), r"x is a symbolic link to nothing, or .*\(nothing\)"),
    "link out": (lambda t: _link(t / "x", "/tmp"), r"link to nothing, or out of its directory \(/tmp\)"),
    "root": (lambda t: "/", "'/' cannot be replaced"),
    "mount point": (lambda t: "/proc", "/proc is a mount point"),
    "empty": (lambda t: "", "'' is not a path"),
    "home of nobody": (
        lambda t: "~nobody-of-that-name/x",
        "there is no such home directory; .* write './~nobody-of-that-name",
    ),
    "reserved": (lambda t: t / "x.previous", "names that end in '.previous'"),
}


@pytest.mark.parametrize("what", BAD)
def test_where_no_checkpoint_can_be(tmp_path: Path, what: str) -> None:
    make, message = BAD[what]
    path = make(tmp_path)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(CheckpointError, match=message):
        save(path, 1)
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("text", ["", "{", "\0" * 300, '{"format":"fsshard-checkpoint","format_version":99}'])
def test_a_damaged_one_of_ours_is_replaced(tmp_path: Path, text: str) -> None:
    path = save(tmp_path / "last", 1)
    (path / "index.json").write_text(text)
    assert save(path, 2) == path and read_index(path).ordinal == 2


def test_a_save_through_a_link_may_be_killed_at_any_moment(tmp_path: Path) -> None:
    seen = set()
    for at in itertools.count():
        folder = tmp_path / str(at)
        step_1, last = save(folder / "step-1", 1), folder / "last"
        last.symlink_to("step-1")  # is replaced; not so what it points to, which would no longer be what its name says
        outcome = interrupted(at, Killed(), lambda: save(last, 2))  # noqa: B023
        newest = latest(last)
        assert newest is not None and read_index(newest).ordinal == read_index(resolve(last)).ordinal
        seen.add(read_index(newest).ordinal)
        assert save(last, 3) == last and read_index(last).ordinal == 3 and read_index(step_1).ordinal == 1
        assert set(os.listdir(folder)) <= {"last", "last.previous", "step-1"}
        if not isinstance(outcome, Killed):
            break
    assert seen == {1, 2}


# ------------------------------------------------------------------------------------------------ retaining


def test_the_oldest_beyond_a_number_are_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for ordinal, name in enumerate(["step-900", "step-20", "step-3", "other-1", "step-4b", "last"], start=1):
        save(tmp_path / name, ordinal)
    save(tmp_path / "step-900", 1)  # has one before it
    (tmp_path / "step-5").mkdir()
    (tmp_path / "step-7").symlink_to("step-20")
    place = CheckpointTarget(save(tmp_path / "step-21", 9))
    with place.lock():
        assert place.retain(4) == []
        with CheckpointTarget(tmp_path / "step-900").lock():
            assert place.retain(3) == [] and "another process is saving" in caplog.text
        assert place.retain(2) == [tmp_path / "step-900"], "a link points to step-20"
        (tmp_path / "step-7").unlink()
        (tmp_path.parent / "best").symlink_to(tmp_path / "step-20")
        assert place.retain(2) == [], "as one in the directory above does"
        (tmp_path.parent / "best").unlink()
        assert place.retain(2) == [tmp_path / "step-20"]
    assert CheckpointTarget(tmp_path / "last").retain(2) == []
    assert CheckpointTarget(save(tmp_path / "step-1", 1)).retain(2) == [], "the one just saved is never removed"
    left = {"step-3", "step-21", "other-1", "step-4b", "last", "step-5", "step-1"}
    assert set(os.listdir(tmp_path)) == left


# ------------------------------------------------------------------------------------------------ finding


def test_the_latest_is_the_newest_whole_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert latest(tmp_path / "gone") is None and latest(tmp_path) is None and newest_ordinal(tmp_path / "gone") == 0
    early, late = "2026-01-01T00:00:00+00:00", "2026-02-01T00:00:00+00:00"
    save(tmp_path / "b", 1, late), save(tmp_path / "a", 2, early)
    assert latest(tmp_path) == tmp_path / "a"
    save(tmp_path / "0", 2, late)
    assert latest(tmp_path) == tmp_path / "0"
    save(tmp_path / "c", 2, late)
    _link(tmp_path / "latest", "c")
    assert latest(str(tmp_path)) == tmp_path / "c" and newest_ordinal(tmp_path) == 2, "not the link to it"
    (tmp_path / "notes.txt").write_text("")
    assert not caplog.messages
    save(tmp_path / "9", 9), save(tmp_path / "8", 8), save(tmp_path / "7", 7), (tmp_path / "logs").mkdir()
    (tmp_path / "9" / DATA).write_bytes(b"short")
    (tmp_path / "8" / INDEX_FILE).write_bytes(b"{")
    (tmp_path / "7" / INDEX_FILE).unlink()
    assert latest(tmp_path) == tmp_path / "c"
    told = caplog.messages
    assert [text.partition(" is not a complete")[0] for text in told] == [
        str(tmp_path / name) for name in ("7", "8", "9", "logs")
    ]
    assert DATA in told[2]
    os.rename(tmp_path / "logs", tmp_path / "logs\x1b[31m")
    latest(tmp_path)
    assert caplog.messages[-1].startswith(f"{tmp_path}/logs\\x1b[31m is not") and caplog.messages[-1].isprintable()


def test_latest_of_what_is_no_directory_of_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is a file; latest"):
        latest(_file(tmp_path / "x"))
    path = save(tmp_path / "ckpt" / "last", 1)
    save(path, 2)
    assert latest(path) == path
    os.rename(path, tmp_path / "away")
    assert latest(path) == path.with_name("last.previous"), "a run that is killed here must not begin anew"


def test_what_is_loaded_where_a_save_was_cut_short(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "last"
    with pytest.raises(CheckpointError, match=f"there is no checkpoint at {path}"):
        resolve(path)
    save(path, 1), save(path, 2)
    (path / DATA).unlink()
    assert resolve(path) == path and not caplog.messages, "loading names the file"
    (path / INDEX_FILE).write_bytes(b"{")
    assert resolve(path) == path and not caplog.messages, "something happened to it: not older numbers"
    (path / INDEX_FILE).unlink()
    assert resolve(path) == path.with_name("last.previous")
    assert caplog.messages[0].startswith(f"loading {path}.previous instead of {path}: ")
    (path.with_name("last.previous") / DATA).unlink()
    with pytest.raises(CorruptCheckpoint, match=INDEX_FILE):
        resolve(path)
    with pytest.raises(CheckpointError, match="got a file"):
        resolve(_file(tmp_path / "x"))
    with pytest.raises(CheckpointError, match="is not a path"):
        resolve("")


def test_a_directory_of_checkpoints_is_not_one(tmp_path: Path) -> None:
    save(tmp_path / "step-1", 1), save(tmp_path / "step-2", 2)
    with pytest.raises(CheckpointError, match=rf"directory of checkpoints, not one; .*latest\('{tmp_path}'\).*step-2"):
        resolve(tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        resolve(_link(tmp_path / "x", "nothing"))
