"""fsshard.save: every rank writes what it holds, and one rename makes it a checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fsshard.checkpoint import rng as generators
from fsshard.checkpoint.collect import Collected, Part, check_call, check_model, collect, first_of, name_optimizers
from fsshard.checkpoint.format.directory import CheckpointTarget, from_home, newest_ordinal
from fsshard.checkpoint.format.dtypes import BY_NAME, dtype_name
from fsshard.checkpoint.format.index import (
    FileEntry,
    Index,
    ModelInfo,
    OptimizerInfo,
    Origin,
    Piece,
    TensorInfo,
    write_index,
)
from fsshard.checkpoint.format.pieces import Range, divide, piece_key, piece_shape, rank_file
from fsshard.checkpoint.format.tensors_file import Item, write
from fsshard.checkpoint.format.tree import encode
from fsshard.checkpoint.format.version import __version__
from fsshard.checkpoint.ranges import divides_otherwise, put_in_ranges
from fsshard.checkpoint.several import as_one
from fsshard.checkpoint.staging import Staging
from fsshard.comm.rendezvous import Rendezvous
from fsshard.errors import CheckpointError, ConfigurationError
from fsshard.launching.leaving import before_leaving
from fsshard.parallel.replicas import check_same_buffers
from fsshard.sharded.buffers import buffers_of
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer

__all__ = ["SaveHandle", "save", "wait_for_saves"]

log = logging.getLogger("fsshard")
TIMEOUT = 300.0
LOOK_SECONDS = 1.0  # between two looks at whether a save that is waited for goes on
OF_LOAD = frozenset({"strict", "verify", "trust_pickle"})


def save(
    path: str | os.PathLike[str],
    model: ShardedModule,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    *,
    block: bool = True,
    keep: int | None = None,
    rng: bool = True,
    timeout: float = TIMEOUT,
    **state: Any,
) -> SaveHandle:
    """Write a checkpoint that any engine loads at any world size. Collective: call it on every rank.

    Each rank writes the shards that it holds (identical copies are divided among the ranks) next to ``path``; once all
    files are on disk, one rename makes them the checkpoint. The checkpoint that was at ``path`` becomes
    ``<path>.previous``, and is not touched before the new one is complete.

    Args:
        path: the directory that the checkpoint will be, on a file system that all ranks see. Its parent is made. A
            leading ``~`` is the home directory, here and wherever a checkpoint's path is taken.
        model: what :func:`fsshard.wrap` returned.
        optimizer: one of :func:`fsshard.build_optimizer`, a list, or a mapping of them.
        scheduler: anything with ``state_dict``, a list, or a mapping of such.
        scaler: anything with ``state_dict``.
        block: False returns as soon as this rank's part is copied to host memory. A thread does the rest; its errors
            are raised by the next call and by the handle.
        keep: how many checkpoints to keep whose names differ from this one in their last number only, at least 2; None
            removes none.
        rng: save every rank's random number generators.
        timeout: seconds to wait for ranks that do not call this, or that take so much longer than the others to write.
            One that dies is noticed at once.
        **state: whatever else: numbers, strings, tensors, containers of them, and objects with ``state_dict``, alone or
            in a list or mapping. A value that is equal on all ranks is stored once, otherwise once per rank.

    Returns:
        A handle; finished already if ``block``.

    Raises:
        CheckpointError: a rank did not call this, or failed; the earlier checkpoint is unchanged. Also the failure of
            an earlier save with ``block=False``. On every rank.
        ConfigurationError: an argument without meaning.
    """
    path = from_home(path)
    call = check_call("fsshard.save", path, timeout, block=block, rng=rng)
    sharded = check_model(model, "fsshard.save")
    settings = sharded.backend.settings
    rendezvous = Rendezvous.of(settings.everyone)
    given = {key: value for key, value in (("scheduler", scheduler), ("scaler", scaler)) if value is not None} | state
    objects = as_one(given)
    wait_for_saves()
    rendezvous.arrive(as_called(call, optimizer, objects, block=block, keep=keep, rng=rng), timeout, call)
    buffers_of(sharded).sync()  # rank 0's count, as in a state dict
    if settings.model_mesh is not None:
        kept = set(sharded.backend.key_order)
        check_same_buffers({n: b for n, b in sharded.named_buffers() if n in kept}, settings.model_mesh, settings.rank)
    job = _Save(rendezvous, settings.overall_rank, Path(path).absolute(), call, timeout, settings.knows_all_ranks)

    def collected() -> list[Any]:
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 2):
            raise ConfigurationError(
                f"keep={keep!r}: at least 2, since the last one may be the one that a crash leaves unfinished"
            )
        if keep is not None and not any(character.isdigit() for character in Path(path).name):
            raise ConfigurationError(
                f"keep={keep}: the name {Path(path).name!r} has no number, so it is always replaced, and the one "
                "before is kept as '.previous'; save to a name such as 'step-000100', or leave keep out"
            )
        _check_state(objects)
        sharded.backend.reshard()
        optimizers = name_optimizers(sharded, optimizer, "fsshard.save")
        job.collected = collect(sharded, optimizers, objects, settings.overall_rank)
        job.random = _encode_generators(settings.device, job.collected) if rng else None
        job.place = CheckpointTarget(path)
        job.keep = keep
        return [] if divides_otherwise(sharded.backend) else job.layout()

    layouts = rendezvous.run_on_all_ranks(collected, timeout)
    if divides_otherwise(sharded.backend):
        put_in_ranges(job.collected, sharded.backend, rendezvous)
        layouts = rendezvous.run_on_all_ranks(job.layout, timeout)
    job.arrange(layouts)
    job.origin = _origin(sharded)
    handle = SaveHandle(job)
    if block:
        handle._run()
        handle.wait()
    else:
        job.copy_to_host()
        handle._start()
    return handle


def _check_state(objects: Mapping[str, Any]) -> None:
    for name, value in objects.items():
        if name in OF_LOAD:
            raise ConfigurationError(f"{name}= is an option of fsshard.load; save that value under another name")
        if isinstance(value, (ShardedModule, ShardedOptimizer)):
            raise ConfigurationError(
                f"{name}= is a {type(value).__name__}: a checkpoint has one model, and its optimizers come as "
                "optimizer=[...] or optimizer={name: ...}; save another model to a path of its own"
            )


def as_called(call: str, optimizer: Any, objects: Mapping[str, Any], **options: Any) -> str:
    """The call with all that ranks have to agree on, so that they find out where they do not."""
    if isinstance(optimizer, Mapping):
        handed = [f"optimizer={{{', '.join(map(repr, sorted(map(str, optimizer))))}}}"]
    elif isinstance(optimizer, Sequence):
        handed = [f"optimizer=[{len(optimizer)}]"]
    else:
        handed = [] if optimizer is None else ["optimizer"]
    handed += [f"{name}=" for name in sorted(objects)] + [f"{key}={value!r}" for key, value in options.items()]
    return f"{call[:-1]}, {', '.join(handed)})"


def _origin(model: ShardedModule) -> Origin:
    settings = model.backend.settings
    mesh = {} if settings.model_mesh is None else settings.model_mesh.shape()
    return Origin(__version__, str(torch.__version__), model.backend.name, settings.all_ranks, mesh)


def _encode_generators(device: torch.device, found: Collected) -> Any:
    own: dict[str, Part] = {}

    def put(path: str, tensor: Tensor) -> str:
        name = f"rng/{path.removeprefix('rng').lstrip('.')}"
        own[name] = Part(tensor.dtype, tuple(tensor.shape), (0, tensor.numel()), tensor.reshape(-1))
        return name

    tree = encode(generators.capture(device), put, "rng")
    found.own["rng"] = own
    return tree


# ------------------------------------------------------------------------------------------------ one save


@dataclass(frozen=True)
class _Arrangement:
    """Who writes what.

    Attributes:
        key: hash of what every rank holds, and of which objects they have alike.
        kinds: tensor's name -> its dtype and shape.
        shares: the elements of each tensor that each rank writes: (ranks, tensors, 2), [0, 0) for none. On rank 0.
        mine: what this rank writes: tensor's name, key in the file, shape there, range within the part that it holds.
        total: bytes of that.
    """

    key: str
    kinds: Mapping[str, tuple[str, tuple[int, ...]]]
    shares: Tensor | None
    mine: Sequence[tuple[str, str, tuple[int, ...], int, int]]
    total: int


_arrangements: WeakKeyDictionary[Rendezvous, _Arrangement] = WeakKeyDictionary()
"""Of the last save of each group."""


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _table_of(shares: list[dict[str, Range]], names: list[str]) -> Tensor:
    """Shares in little memory."""
    places = {name: number for number, name in enumerate(names)}
    table = torch.zeros(len(shares), len(names), 2, dtype=torch.int64, device="cpu")
    for row, share in zip(table, shares, strict=True):
        if share:
            row[[places[name] for name in share]] = torch.tensor(list(share.values()), dtype=torch.int64, device="cpu")
    return table


@dataclass
class _Save:
    """One save on one rank, from what is to be written to the rename."""

    rendezvous: Rendezvous
    rank: int
    path: Path
    call: str
    timeout: float
    knows_all_ranks: bool = True  # whether wrap was told of ranks that are not the model's
    collected: Collected = field(default_factory=Collected)
    random: Any = None
    origin: Origin = field(default=None)  # type: ignore[assignment]
    place: CheckpointTarget = field(default=None)  # type: ignore[assignment]
    keep: int | None = None
    id: str = ""
    table: tuple[list[Any], list[Range], dict[str, Any]] = ([], [], {})  # of what is held: kinds, ranges, objects' own
    alike: dict[str, bool] = field(default_factory=dict)  # object's name -> whether all ranks have the same
    arrangement: _Arrangement = field(default=None)  # type: ignore[assignment]
    items: list[Item] = field(default_factory=list)
    index: Index | None = None  # on rank 0, but for the files' sizes and checksums
    partial: Path = Path()
    staging: Staging = field(default_factory=Staging)
    uncopied: Exception | None = None  # why there is no copy to write
    total: int = 0  # bytes that this rank writes
    written: int = 0
    moved: int = 0  # how often something of it was done

    @property
    def patience(self) -> float:
        """Seconds within which something moves, unless the file system does not answer."""
        return self.timeout + self.rendezvous.patience

    def layout(self) -> list[Any]:
        """What this rank holds, in hashes."""
        self.table = parts, ranges, own = self._table()
        known = _arrangements.get(self.rendezvous)
        return [_digest(parts), _digest([ranges, own]), known.key if known else "", self.collected.digests]

    def _table(self) -> tuple[list[Any], list[Range], dict[str, Any]]:
        mine = self.collected
        parts = [[n, dtype_name(p.dtype), list(p.shape)] for n, p in mine.parts.items()]
        own = {
            name: {n: [dtype_name(p.dtype), list(p.shape)] for n, p in tensors.items()}
            for name, tensors in mine.own.items()
        }
        return parts, [p.range for p in mine.parts.values()], own

    def arrange(self, layouts: list[list[Any]]) -> None:
        """Agree on who writes what; as the last time, where all hold the same as then. Collective."""
        self.alike = {name: len({digests[name] for *_, digests in layouts}) == 1 for name in self.collected.objects}
        key = _digest([[layout[:2] for layout in layouts], self.alike])
        self._adopt_own()
        known = _arrangements.get(self.rendezvous)
        if known is None or any(layout[2] != key for layout in layouts):  # on all ranks, or on none
            # Where all have tensors of the same names, as engines have that divide each parameter, only ranges travel.
            same = len({layout[0] for layout in layouts}) == 1
            parts, ranges, own = self.table
            table = {"parts": None if same else parts, "ranges": ranges, "own": own}
            tables = self.rendezvous.gather(table, self.timeout)
            held, kinds = self._held([{**table, "parts": table["parts"] or parts} for table in tables])
            sizes = {name: BY_NAME[dtype].itemsize for name, (dtype, _) in kinds.items()}
            known = self._arranged(key, kinds, divide(held, sizes))
        self.arrangement, self.total = known, known.total
        for name, key, shape, low, high in known.mine:
            part = self.collected.parts[name]
            self.items.append(Item(key, part.dtype, shape, part.values[low:high].view(shape)))

    def _arranged(
        self, key_of_all: str, kinds: Mapping[str, tuple[str, tuple[int, ...]]], shares: list[dict[str, Range]]
    ) -> _Arrangement:
        """The arrangement, remembered for the next save."""
        mine, total = [], 0
        for name, (start, stop) in shares[self.rank].items():
            dtype, shape = kinds[name]
            part = self.collected.parts[name]
            low, high = start - part.range[0], stop - part.range[0]
            key = piece_key(name, torch.Size(shape).numel(), (start, stop))
            mine.append((name, key, piece_shape(shape, (start, stop)), low, high))
            total += (stop - start) * BY_NAME[dtype].itemsize
        table = _table_of(shares, list(kinds)) if self.rank == 0 else None
        found = _arrangements[self.rendezvous] = _Arrangement(key_of_all, kinds, table, mine, total)
        return found

    def _adopt_own(self) -> None:
        """Tensors of objects join the others: once where ranks have the same, else under a name for each rank."""
        for name, own in self.collected.own.items():
            for tensor, part in own.items():
                if not self.alike.get(name, False):
                    self.collected.parts[f"{tensor}@rank{self.rank}"] = part
                elif self.rank == 0:
                    self.collected.parts[tensor] = part

    def _held(
        self, tables: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Range | None]], dict[str, tuple[str, tuple[int, ...]]]]:
        held: dict[str, list[Range | None]] = {}
        kinds: dict[str, tuple[str, tuple[int, ...]]] = {}

        def add(rank: int, name: str, dtype: str, shape: list[int], part: Range) -> None:
            known = kinds.setdefault(name, (dtype, tuple(shape)))
            if known != (dtype, tuple(shape)):
                raise CheckpointError(
                    f"{self.call}: the ranks disagree on {name}: rank {rank} has {dtype} {tuple(shape)}, another "
                    f"{known[0]} {known[1]}"
                )
            held.setdefault(name, [None] * len(tables))[rank] = part

        for rank, table in enumerate(tables):
            for (name, dtype, shape), (start, stop) in zip(table["parts"], table["ranges"], strict=True):
                add(rank, name, dtype, shape, (start, stop))
            for name, own in table["own"].items():
                once = self.alike.get(name, False)
                for tensor, (dtype, shape) in own.items() if rank == 0 or not once else ():
                    add(rank, tensor if once else f"{tensor}@rank{rank}", dtype, shape, (0, _numel(shape)))
        return held, kinds

    def _index_part(self) -> dict[str, Any]:
        """What rank 0 puts into the index for this rank beside tensors."""
        mine = self.collected
        return {
            "objects": {name: tree for name, tree in mine.objects.items() if not self.alike[name]},
            "state": {name: {p: s for p, s in state.items() if s} for name, state in mine.state.items()},
            "rng": self.random,
        }

    def _index(self, tables: list[dict[str, Any]]) -> Index:
        names = [rank_file(rank, len(tables)) for rank in range(len(tables))]
        tensors = {}
        assert self.arrangement.shares is not None
        of_tensors = self.arrangement.shares.unbind(1)
        for (name, (dtype, shape)), shares in zip(self.arrangement.kinds.items(), of_tensors, strict=True):
            parts = sorted((start, stop, rank) for rank, (start, stop) in enumerate(shares.tolist()) if start < stop)
            total = torch.Size(shape).numel()
            pieces = tuple(Piece(names[rank], piece_key(name, total, (a, b)), a, b) for a, b, rank in parts)
            tensors[name] = TensorInfo(dtype, shape, pieces)
        model = dict(self.collected.model)
        return Index(
            id="",
            ordinal=0,
            saved_at="",
            origin=self.origin,
            files={},
            tensors=tensors,
            tied=model.pop("tied"),
            model=ModelInfo(**model),
            optimizers={
                name: OptimizerInfo(kind, groups, first_of([t["state"][name] for t in tables]))
                for name, (kind, groups) in self.collected.groups.items()
            },
            objects={
                name: {"all": tree} if self.alike[name] else _per_rank([t["objects"][name] for t in tables])
                for name, tree in self.collected.objects.items()
            },
            rng=None if self.random is None else _per_rank([t["rng"] for t in tables]),
        )

    # -- on the disk

    def _open(self, until_written: contextlib.ExitStack) -> None:
        """Rank 0 takes the lock, makes the directory beside, and hears what it needs for the index. Collective."""

        def make() -> dict[str, Any]:
            if self.rank:
                return {"told": self._index_part()}
            until_written.enter_context(self._locked())
            self.place.sweep()
            id = uuid.uuid4().hex
            partial = self.place.partial(id)
            until_written.callback(self.place.discard, partial)  # nothing is left of it after the rename
            return {"told": self._index_part(), "id": id, "partial": str(partial)}

        answers = self.rendezvous.run_on_all_ranks(make, self.timeout)
        self.id, self.partial = answers[0]["id"], Path(answers[0]["partial"])
        if self.rank == 0:
            self.index = self._index([answer["told"] for answer in answers])

        def visible() -> None:
            if not self.partial.is_dir():
                raise CheckpointError(
                    f"{self.partial} was made by rank 0 and is not there for rank {self.rank}; "
                    "path must be on a file system that all ranks share"
                )

        self.rendezvous.run_on_all_ranks(visible, self.timeout)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(self.place.lock())
            except CheckpointError as error:
                if self.knows_all_ranks:
                    raise
                raise CheckpointError(
                    f"{error}. This model is on a part of the ranks, and wrap was told nothing of the others: if they "
                    "save their parts of it, say so (fsshard.wrap(..., replicated={...}, sharded={...})), and all "
                    "write one checkpoint; if theirs is another model, give it a path of its own"
                ) from error
            yield

    def copy_to_host(self) -> None:
        """Let training go on: what is to be written is this copy. Where it fails, that is said when all write."""
        try:
            copies = self.staging.copy([cast(Tensor, item.data) for item in self.items])
            self.items = [item._replace(data=copy) for item, copy in zip(self.items, copies, strict=True)]
        except Exception as error:  # the other ranks do not wait for this one here
            self.uncopied, self.items = error, []
        self.collected = dataclasses.replace(self.collected, parts={}, own={})

    def run(self) -> None:
        """Write, and make it the checkpoint. Collective, and in any thread."""
        with contextlib.ExitStack() as until_written:
            self._open(until_written)
            self.moved += 1
            self._write()

    def _write(self) -> None:
        def written() -> list[Any]:
            if self.uncopied is not None:
                raise self.uncopied
            path = self.partial / rank_file(self.rank, self.rendezvous.size)
            info = write(path, self.items, {"format": "pt", "checkpoint": self.id}, progress=self._on)
            return [info.name, info.bytes, info.crc32]

        files = self.rendezvous.run_on_all_ranks(written, self.timeout)
        self.moved += 1
        self.rendezvous.run_on_all_ranks(lambda: self._commit(files) if self.rank == 0 else None, self.timeout)

    def _on(self, count: int) -> None:
        self.written += count
        self.moved += 1

    def _commit(self, files: list[list[Any]]) -> None:
        assert self.index is not None
        index = dataclasses.replace(
            self.index,
            id=self.id,
            ordinal=_next_ordinal(self.place.path.parent),
            saved_at=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            files={name: FileEntry(size, crc) for name, size, crc in files},
        )
        write_index(self.partial, index)
        self.place.commit(self.partial)
        if self.keep is not None:
            self.place.retain(self.keep)


def _numel(shape: list[int]) -> int:
    return torch.Size(shape).numel()


def _per_rank(trees: list[Any]) -> dict[str, list[Any]]:
    """Trees that differ, each with its own rank's tensors."""
    return {"per_rank": [_renamed(tree, f"@rank{rank}") for rank, tree in enumerate(trees)]}


def _renamed(node: Any, suffix: str) -> Any:
    """A tree whose tensors have longer names."""
    if isinstance(node, list):
        return [_renamed(item, suffix) for item in node]
    if not isinstance(node, dict):
        return node
    if node.get("$") in ("tensor", "ndarray"):
        return {**node, "v": node["v"] + suffix}
    return {key: _renamed(item, suffix) for key, item in node.items()}


_ordinals: dict[Path, int] = {}  # directory -> the highest ordinal that this process has seen or given there


def _next_ordinal(directory: Path) -> int:
    known = _ordinals.get(directory)
    _ordinals[directory] = 1 + (newest_ordinal(directory) if known is None else known)
    return _ordinals[directory]


def seen_ordinal(directory: Path, ordinal: int) -> None:
    """Saves from here on come after that checkpoint."""
    _ordinals[directory] = max(ordinal, _ordinals.get(directory, 0))


# ------------------------------------------------------------------------------------------------ the handle


class SaveHandle:
    """A save that is running or has ended.

    Attributes:
        path: where the checkpoint will be.
    """

    def __init__(self, job: _Save) -> None:
        self.path = job.path
        self._job = job
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._guard: threading.Thread | None = None
        self._index_part = False

    @property
    def progress(self) -> float:
        """The share of this rank's bytes that is written, from 0 to 1."""
        return 1.0 if self._job.total == 0 else min(1.0, self._job.written / self._job.total)

    def done(self) -> bool:
        """Whether the save has ended, successfully or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is complete on every rank.

        Args:
            timeout: seconds; None waits as long as it takes.

        Raises:
            CheckpointError: it failed; what stood there before is as it was. On every rank.
            TimeoutError: it goes on.
        """
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise TimeoutError(f"{self._job.call} is still running after {timeout} s, {self.progress:.0%} written")
        _pending.pop(self, None)
        if self._error is not None:
            self._index_part = True
            raise self._error

    def _start(self) -> None:
        _pending[self] = None
        # The interpreter waits for the guard before it ends, which is no daemon; and for the writer only through it.
        self._thread = threading.Thread(target=self._run, name="fsshard-save", daemon=True)
        self._guard = threading.Thread(target=self._wait_while_it_moves, name="fsshard-save-guard")
        self._thread.start()
        self._guard.start()

    def _wait_while_it_moves(self) -> None:
        """Return when the writer has ended, or nothing of it has moved for longer than it may take by its own limits.

        What the ranks ask each other ends by itself; a file system that does not answer does not.
        """
        assert self._thread is not None
        seen, deadline = -1, 0.0
        while self._thread.is_alive() and (time.monotonic() < deadline or self._job.moved != seen):
            if self._job.moved != seen:
                seen, deadline = self._job.moved, time.monotonic() + self._job.patience
            self._thread.join(min(LOOK_SECONDS, self._job.patience))

    def _leave(self, lost: bool) -> None:
        """As :meth:`wait`, for a rank that ends: no longer than the save's own limits, less where a rank is lost."""
        if lost:
            self._job.rendezvous.hurry()
        if self._guard is not None:
            self._guard.join()
        if not self.done():
            _pending.pop(self, None)
            raise CheckpointError(
                f"{self._job.call} has not moved for {self._job.patience:g} s, {self.progress:.0%} written; left behind"
            )
        self.wait()

    def _run(self) -> None:
        try:
            self._job.run()
        except BaseException as error:  # kept for whoever asks next, in another thread
            self._error = error
            if self._thread is not None:
                log.error("%s failed: %s", self._job.call, error)
        finally:
            self._job.items, self._job.collected = [], Collected()
            self._job.staging.give_back()


_pending: dict[SaveHandle, None] = {}


def wait_for_saves() -> None:
    """Wait for saves with ``block=False`` that are still running; the next save or load does so by itself.

    Raises:
        CheckpointError: one of them failed.
    """
    for handle in list(_pending):
        handle.wait()


def _leave_saves(lost: bool) -> None:
    """All are waited for before the first failure is raised."""
    errors = []
    for handle in list(_pending):
        try:
            handle._leave(lost)
        except CheckpointError as error:
            errors.append(error)
    if errors:
        raise errors[0]


before_leaving(_leave_saves)
