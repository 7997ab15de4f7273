"""fsshard.save: every rank writes what it holds, and one rename makes it a checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from fsshard.checkpoint import arguments, dividing, parts
from fsshard.checkpoint import rng as generators
from fsshard.checkpoint.format.directory import CheckpointTarget
from fsshard.checkpoint.format.division import Range, piece_key, rank_file
from fsshard.checkpoint.format.index import Origin, TensorInfo, Values
from fsshard.checkpoint.format.object_store import StoredCheckpoint, is_url
from fsshard.checkpoint.format.tensors_file import FileEntry, Item, write
from fsshard.checkpoint.models import name_models
from fsshard.checkpoint.staging import Staging
from fsshard.comm.agreement import Channel, agree, exchange, exchange_first
from fsshard.errors import CheckpointError, ConfigurationError
from fsshard.launching.leaving import unfinished
from fsshard.parallel.replicas import check_same_buffers
from fsshard.planning.text import is_count
from fsshard.sharded.controller import controller_of
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer

log = logging.getLogger("fsshard")
# Seconds between two looks at whether a save that is waited for goes on.
LOOK_SECONDS = 1.0
LOAD_OPTIONS = frozenset({"strict", "verify", "trust_pickle", "objects"})
# In place of a rule by which ranks hold elements.
NO_GRID = "None"


def save(
    path: str | os.PathLike[str],
    model: ShardedModule | Mapping[str, ShardedModule],
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    *,
    only: str | None = None,
    block: bool = True,
    keep: int | None = None,
    rng: bool = True,
    loader: Any = None,
    timeout: float = arguments.TIMEOUT,
    **state: Any,
) -> SaveHandle:
    """Write a checkpoint that any engine loads at any world size. Collective: call it on every rank.

    Each rank writes the shards that it holds (identical copies are divided among the ranks) next to ``path``; once all
    files are on disk, one rename makes them the checkpoint. The checkpoint that was at ``path`` becomes
    ``<path>.previous``, and is not touched before the new one is complete.

    Args:
        path: the directory that the checkpoint will be, on a file system that all ranks see. Its parent is made. A
            leading ``~`` is the home directory, here and wherever a checkpoint's path is taken. Or a URL for fsspec,
            such as ``s3://bucket/run/step-100`` (docs/checkpoints.md says what differs there).
        model: what :func:`fsshard.wrap` returned, or several by name, ``{"g": generator, "d": critic}``, each under an
            engine of its own choice, of which :func:`fsshard.load` can take some.
        optimizer: one of :func:`fsshard.build_optimizer`, a list, or a mapping of them.
        scheduler: anything with ``state_dict``, a list, or a mapping of such.
        scaler: anything with ``state_dict``.
        only: ``"trainable"`` leaves out the weights that are frozen at this moment (``requires_grad=False``), as those
            that adapters are put on; buffers are saved. None: the whole model.
        block: False returns as soon as this rank's part is copied to host memory. A thread meets the other ranks and
            does the rest; its errors are raised by the next call and by the handle.
        keep: how many checkpoints to keep whose names differ from this one in their last number only, at least 2; None
            removes none.
        rng: save every rank's random number generators.
        loader: torchdata's StatefulDataLoader, or a sampler with ``state_dict``: the place in the data (docs/data.md).
        timeout: seconds to wait for ranks that do not call this, or that take so much longer than the others to write.
            One that dies is noticed immediately.
        **state: whatever else: an :class:`fsshard.EMA`, numbers, strings, tensors, containers of them, and objects with
            ``state_dict``, alone or in a list or mapping. A value that is equal on all ranks is stored once, otherwise
            once per rank.

    Returns:
        A handle; finished already if ``block``.

    Raises:
        CheckpointError: a rank did not call this, or failed; the earlier checkpoint is unchanged. Also the failure of
            an earlier save with ``block=False``. On every rank.
        ConfigurationError: an argument without meaning.
    """
    path, call = arguments.check_call("fsshard.save", path, timeout, block=block, rng=rng)
    models = name_models(model, "fsshard.save")
    settings = next(iter(models.values())).backend.settings
    channel = Channel.of(settings.everyone)
    objects = arguments.named_objects(scheduler, scaler, arguments.with_loader(state, loader, settings))
    # An earlier one with block=False may still write, or have failed.
    wait_for_saves()
    called = arguments.described_call(call, models, optimizer, objects, only=only, block=block, keep=keep, rng=rng)
    averages = arguments.take_averages(objects)
    place = path if is_url(path) else Path(path).absolute()
    job = _Save(channel, place, call, timeout, keep, dividing.origin_of(models))

    def collect_share() -> parts.Collected:
        arguments.check_places(scheduler, scaler, call)
        _check_arguments(keep, only, Path(path).name, objects)
        for sharded in models.values():
            sharded.backend.reshard()
        optimizers = arguments.name_optimizers(models, optimizer, "fsshard.save", averages)
        random = generators.capture(settings.device) if rng else None
        share = parts.collect(models, optimizers, objects, settings.overall_rank, random, trainable=only is not None)
        job.place = StoredCheckpoint(path) if is_url(path) else CheckpointTarget(path)
        return share

    def meet(collect: Callable[[], parts.Collected], to_sync: Mapping[str, ShardedModule]) -> None:
        """Agree with the other ranks on what is saved, and on who writes what. Collective."""
        channel.arrive(called, timeout, call)
        for average in averages.values():
            average.check_alike(channel)
        for sharded in to_sync.values():
            # Rank 0's buffers count, as in a state dict.
            controller_of(sharded).buffers.sync()
            own = sharded.backend.settings
            if own.model_mesh is not None:
                saved = set(sharded.backend.key_order)
                buffers = {name: buffer for name, buffer in sharded.named_buffers() if name in saved}
                check_same_buffers(buffers, own.model_mesh, own.rank)
        job.collected = parts.collect_together(collect, to_sync, channel, timeout)
        job.arrange()

    # True on all ranks, or on none: collectives in training's groups are made in this call, or not at all.
    needs_training_groups = block or averages or _talks_in_training(models)
    if not needs_training_groups and job.copied_as_before(collect_share):
        # The save's thread meets the others; the default of an argument keeps the group alive until then.
        job.meet = lambda group=settings.everyone: meet(lambda: job.collected, {})
    else:
        meet(collect_share, models if needs_training_groups else {})
        if not block:
            job.copy_to_host()
    handle = SaveHandle(job)
    if block:
        handle._run()
        handle.wait()
    else:
        handle._start()
    return handle


def _talks_in_training(models: Mapping[str, ShardedModule]) -> bool:
    """Return whether a save needs collectives of training, which no other thread may call; the same on all ranks."""
    for model in models.values():
        # Another rank's buffers than the first's count where that one has no batches left, and must be sent to it.
        asks = model.backend.settings.model_mesh is not None or controller_of(model).buffers.source
        if asks or any(map(parts.is_scattered, model.backend.all)):
            return True
    return False


def _check_arguments(
    keep: object,
    only: object,
    name: str,
    objects: Values,
) -> None:
    if only not in (None, "trainable"):
        raise ConfigurationError(f"only={only!r}: expected 'trainable', or None for the whole model")
    numbered = any(character.isdigit() for character in name)
    if keep is not None and not (numbered and is_count(keep, least=2)):
        raise ConfigurationError(
            f"keep={keep!r} for {name!r}: expected at least 2, since a crash may leave the last one unfinished, and a "
            "name with a number, such as 'step-000100': without one each save replaces the one before, which is kept "
            "as '.previous'"
        )
    for keyword, value in objects.items():
        if keyword in LOAD_OPTIONS:
            raise ConfigurationError(f"{keyword}= is an option of fsshard.load; save that value under another name")
        if isinstance(value, (ShardedModule, ShardedOptimizer)):
            raise ConfigurationError(
                f"{keyword}= is a {type(value).__name__}: several models come by name in the place of one, as in "
                "fsshard.save(path, {'g': generator, 'd': critic}, {'g': og, 'd': od}), and so do their optimizers"
            )


class _Arrangement(NamedTuple):
    """The division of a save among ranks: who writes what."""

    key: str  # hash of what every rank holds, and of which objects they have alike
    own_key: str  # hash of what this rank holds
    ranges: Mapping[str, Range]  # the elements that this rank writes of each tensor
    tensors: dict[str, TensorInfo]  # all of them with their pieces
    total: int  # bytes that this rank writes


NOTHING = _Arrangement("", "", {}, {}, 0)
# The arrangement of the last save of each group: most saves are like the one before.
_arrangements: WeakKeyDictionary[Channel, _Arrangement] = WeakKeyDictionary()


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


@dataclass
class _Save:
    """One save on one rank, from what is to be written to the rename."""

    channel: Channel
    path: Path | str
    call: str
    timeout: float
    keep: int | None
    origin: Origin
    collected: parts.Collected = field(default_factory=parts.Collected)
    place: CheckpointTarget | StoredCheckpoint = field(default=None)  # type: ignore[assignment]
    arrangement: _Arrangement = NOTHING
    staging: Staging = field(default_factory=Staging)
    meet: Callable[[], None] | None = None  # agrees with the other ranks, if that is still to be done
    uncopied: Exception | None = None  # why there is no copy to write
    alike: set[str] = field(default_factory=set)  # names of the objects that all ranks have the same
    bytes_written: int = 0
    ticks: int = 0  # raised with each bit of progress; the guard compares it

    @property
    def total(self) -> int:
        """Return how many bytes this rank writes."""
        return self.arrangement.total

    @property
    def patience(self) -> float:
        """Return the seconds within which something moves, unless the file system does not answer."""
        return self.timeout + self.channel.patience

    def arrange(self) -> None:
        """Agree on who writes what; reuse the last division if every rank holds what it held then. Collective."""
        channel = self.channel
        collected = self.collected
        last = _arrangements.get(channel, NOTHING)
        own_key = last.own_key
        # A copy made before the ranks met follows the last save's division, so no rule describes it.
        grids = [NO_GRID]
        if self.meet is None:
            own_key = self._own_key()
            grids = sorted(map(str, collected.layouts.grids.values()))
        answers = channel.gather([own_key, last.key, collected.digests, grids], self.timeout)
        own_keys, last_keys, all_digests, all_grids = zip(*answers, strict=True)
        for name in collected.objects:
            distinct = {digests[name] for digests in all_digests}
            if len(distinct) == 1:
                self.alike.add(name)
        # What is alike lies under one name, and rank 0 writes it.
        collected.adopt_own(channel.rank, self.alike)
        key = _digest([own_keys, sorted(self.alike)])
        # On all ranks, or on none.
        if set(last_keys) == {key}:
            self.arrangement = last
            return
        by_rule = NO_GRID not in grids and all(other == grids for other in all_grids)
        self.arrangement = self._arranged_anew(key, own_key, by_rule)
        if self.meet is None:
            _arrangements[channel] = self.arrangement
        else:
            # It divides what was copied, which is not all that this rank holds: the next save asks again.
            _arrangements.pop(channel, None)

    def _own_key(self) -> str:
        """Return a hash of what this rank holds."""
        tables = {name: parts.as_table(own) for name, own in self.collected.own.items()}
        return _digest([parts.as_table(self.collected.parts), tables])

    def _arranged_anew(self, key: str, own_key: str, by_rule: bool) -> _Arrangement:
        """Divide the work, on every rank alike, from what all tell of what they hold. Collective."""
        channel = self.channel
        own = dividing.announced_by(self.collected.parts, channel.rank, by_rule=by_rule)
        # Gathered messages are padded to the longest. Rank 0's is by far the longest, and so is broadcast.
        first = channel.tell(own, self.timeout)
        told = channel.gather(own if channel.rank else {}, self.timeout)
        tensors = dividing.divide([first, *told[1:]], self.call)
        agree(channel, lambda: dividing.check_plan(self.collected, channel.rank, tensors, self.call), self.timeout)
        ranges = dividing.written_by(channel.rank, channel.size, tensors)
        total = 0
        for name, (start, stop) in ranges.items():
            total += (stop - start) * tensors[name].kind.itemsize
        return _Arrangement(key, own_key, ranges, tensors, total)

    def copied_as_before(self, collect: Callable[[], parts.Collected]) -> bool:
        """Copy what this rank wrote last, if it holds the same as then: training need not wait for the other ranks.

        False where it does not, or where something fails: that is said with the other ranks.
        """
        self.arrangement = _arrangements.get(self.channel, NOTHING)
        with contextlib.suppress(Exception):
            self.collected = collect()
            if self._own_key() == self.arrangement.own_key:
                self._copy()
                return True
        return False

    def copy_to_host(self) -> None:
        """Let training go on: what is to be written is this copy. A failure is raised when all ranks write."""
        # adopt_own() has put this rank's tensors of objects among the parts.
        self.collected.own = {}
        try:
            self._copy()
        except Exception as error:
            # The other ranks do not wait for this one here.
            self.uncopied = error
            self.collected.parts = {}

    def _copy(self) -> None:
        """Put copies in place of what is collected: of the elements that this rank writes, and of all of objects."""
        own_parts = self.collected.parts
        for name, part in own_parts.items():
            own_parts[name] = part.within(self.arrangement.ranges.get(name, (0, 0)))
        tables = [own_parts, *self.collected.own.values()]
        copies = iter(self.staging.copy([part.values for table in tables for part in table.values()]))
        for table in tables:
            for name, part in table.items():
                table[name] = dataclasses.replace(part, values=next(copies))

    def _items(self) -> Iterator[Item]:
        """Yield what this rank writes."""
        for name, span in self.arrangement.ranges.items():
            part = self.collected.parts[name].within(span)
            numel = math.prod(part.shape)
            shape = part.shape if len(part.values) == numel else (len(part.values),)
            yield Item(piece_key(name, numel, span), part.dtype, shape, part.values.view(shape))

    def run(self) -> None:
        """Write, and make it the checkpoint. Collective, and in any thread."""
        if self.meet is not None:
            self.meet()
            self.ticks += 1
        with contextlib.ExitStack() as until_renamed:
            id, partial = exchange(self.channel, lambda: self._open(until_renamed), self.timeout)[0]
            self.ticks += 1
            answers = exchange_first(self.channel, lambda: self._write(id, partial), self.timeout)
            self.ticks += 1
            exchange(self.channel, lambda: self._commit(id, partial, answers), self.timeout)

    def _open(self, until_renamed: contextlib.ExitStack) -> list[str]:
        """Take the lock and make the temporary directory, on rank 0; return the save's id and that directory."""
        if self.channel.rank:
            return []
        id, partial = until_renamed.enter_context(self.place.writing())
        return [id, str(partial)]

    def _write(self, id: str, partial: str) -> list[Any]:
        """Write this rank's file; return its size and checksum, and what the index needs of this rank."""
        if self.uncopied is not None:
            raise self.uncopied
        name = rank_file(self.channel.rank, self.channel.size)
        with self.place.part(partial, name) as path:
            file = write(path, list(self._items()), {"format": "pt", "checkpoint": id}, progress=self._note_progress)
        return [file, self.collected.trees(self.alike)]

    def _note_progress(self, count: int) -> None:
        self.bytes_written += count
        self.ticks += 1

    def _commit(self, id: str, partial: str, answers: list[Any]) -> None:
        # Every rank's file is on the disk by now; one rank writes the index and renames the directory.
        if self.channel.rank:
            return
        all_trees = [trees for _, trees in answers]
        index = dataclasses.replace(
            dividing.make_index(self.origin, self.collected, self.arrangement.tensors, all_trees, self.alike),
            id=id,
            # Another job may have saved there meanwhile.
            ordinal=self.place.newest_ordinal() + 1,
            saved_at=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            files={rank_file(rank, len(answers)): FileEntry(*file) for rank, (file, _) in enumerate(answers)},
        )
        self.place.finish(partial, index)
        if self.keep is not None:
            self.place.retain(self.keep)


class SaveHandle:
    """A save that is running or has ended, and the ``path`` where the checkpoint will be."""

    def __init__(self, job: _Save) -> None:
        self.path = job.path
        self._job = job
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._guard: threading.Thread | None = None

    @property
    def progress(self) -> float:
        """Return the share of this rank's bytes that is written, from 0 to 1."""
        if self._job.total == 0:
            return 1.0
        return min(1.0, self._job.bytes_written / self._job.total)

    def done(self) -> bool:
        """Tell whether the save has ended, successfully or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is complete on every rank; ``timeout`` in seconds, None as long as it takes.

        Raises CheckpointError on every rank if it failed (what stood there before is as it was), TimeoutError if it
        goes on.
        """
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise TimeoutError(f"{self._job.call} is still running after {timeout} s, {self.progress:.0%} written")
        _pending.pop(self, None)
        if self._error is not None:
            raise self._error

    def _start(self) -> None:
        _pending[self] = None
        # The interpreter waits for the guard before it ends, which is no daemon; and for the writer only through it.
        self._thread = threading.Thread(target=self._run, name="fsshard-save", daemon=True)
        self._guard = threading.Thread(target=self._wait_while_it_moves, name="fsshard-save-guard")
        self._thread.start()
        self._guard.start()

    def _wait_while_it_moves(self) -> None:
        """Return when the writer has ended, or has made no progress for ``patience`` seconds."""
        assert self._thread is not None
        seen = -1
        deadline = 0.0
        while self._thread.is_alive() and (time.monotonic() < deadline or self._job.ticks != seen):
            if self._job.ticks != seen:
                seen = self._job.ticks
                deadline = time.monotonic() + self._job.patience
            self._thread.join(min(LOOK_SECONDS, self._job.patience))

    def _leave(self, lost: bool) -> None:
        """Wait, for a rank that ends, no longer than the save's own limits; less where a rank is lost."""
        if lost:
            self._job.channel.hurry()
        if self._guard is not None:
            self._guard.join()
        if not self.done():
            _pending.pop(self, None)
            raise CheckpointError(
                f"{self._job.call} has not moved for {self._job.patience:g} s, {self.progress:.0%} written; it was "
                "abandoned"
            )
        self.wait()

    def _run(self) -> None:
        try:
            self._job.run()
        except BaseException as error:
            # It is kept for whoever asks next, in another thread.
            self._error = error
            if self._thread is not None:
                log.error("%s failed: %s", self._job.call, error)
        finally:
            # A handle that somebody keeps holds no memory of the model.
            self._job.collected = parts.Collected()
            self._job.meet = None
            self._job.staging.give_back()


_pending: dict[SaveHandle, None] = {}


def wait_for_saves() -> None:
    """Wait for saves with ``block=False``, as the next save or load does; raise CheckpointError if one failed."""
    for handle in list(_pending):
        handle.wait()


def _leave_saves(lost: bool) -> None:
    """Wait for all saves, and raise the first failure then."""
    errors = []
    for handle in list(_pending):
        try:
            handle._leave(lost)
        except CheckpointError as error:
            errors.append(error)
    if errors:
        raise errors[0]


unfinished.append(_leave_saves)
