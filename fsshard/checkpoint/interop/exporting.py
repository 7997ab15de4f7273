"""fsshard.export: writes a checkpoint, or a wrapped model, in another program's format, piece by piece."""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.checkpoint import parts
from fsshard.checkpoint.arguments import TIMEOUT, name_optimizers
from fsshard.checkpoint.format.directory import from_home, sync
from fsshard.checkpoint.format.index import Index, Range, cover, rank_of
from fsshard.checkpoint.format.tensors_file import STORED, new_file, write
from fsshard.checkpoint.reader import Reader, TensorReader
from fsshard.checkpoint.saving import wait_for_saves
from fsshard.comm.agreement import Channel, exchange
from fsshard.errors import CheckpointError, ConfigurationError
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer

__all__ = ["FORMATS", "MAX_SHARD_BYTES", "export"]

FORMATS = ("safetensors", "torch", "dcp", "hf")
MAX_SHARD_BYTES = 5_000_000_000
"""Above it a model is divided into several files, as on the Hugging Face Hub."""

SUFFIXES = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch", ".ckpt": "torch"}
CONFIG_FILE = "config.json"


def export(
    source: ShardedModule | str | os.PathLike[str],
    file: str | os.PathLike[str],
    format: str | None = None,
    *,
    optimizer: bool | str | ShardedOptimizer = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    config: Any = None,
    overwrite: bool = False,
    timeout: float = TIMEOUT,
) -> list[Path]:
    """Write whole weights under the state dict's keys, for other programs to read.

    Weights are read and written in pieces, so a process needs only a few megabytes more. From a checkpoint one process
    does it; from a wrapped model it is collective, and rank 0 writes.

    Args:
        source: a checkpoint's directory, or what :func:`fsshard.wrap` returned.
        file: the file, or for ``"hf"`` and ``"dcp"`` the directory, to write.
        format: ``"safetensors"``: a file, or with more than ``max_shard_bytes`` several and an index. ``"hf"``: a
            directory that ``from_pretrained`` reads. ``"torch"``: what ``torch.load(weights_only=True)`` reads.
            ``"dcp"``: a directory that ``torch.distributed.checkpoint.load`` reads. None: as the suffix of ``file``
            says.
        optimizer: write ``{"model": ..., "optimizer": ...}`` with the optimizer's state, which ``"torch"`` (numbered,
            as torch optimizers have it) and ``"dcp"`` (by name) can. True: the only one of the checkpoint; a string:
            the one that was saved under that name. Of a wrapped model: the optimizer itself.
        max_shard_bytes: of tensors in one safetensors file.
        config: for ``"hf"``: a transformers configuration, a mapping, or the path of a ``config.json``. None: the
            model's own ``config``.
        overwrite: replace existing files, once the new ones are complete.
        timeout: seconds to wait for ranks that do not call this.

    Returns:
        The files, or for ``"dcp"`` the directory.

    Raises:
        ConfigurationError: an argument without meaning, or a setting that the format has no place for.
        CheckpointError: no such checkpoint, something is there already, or it cannot be written. Nothing is left.
        CorruptCheckpoint: the checkpoint is damaged.
    """
    path = Path(from_home(file))
    format = _format(path, format)
    if isinstance(max_shard_bytes, bool) or not isinstance(max_shard_bytes, int) or max_shard_bytes <= 0:
        raise ConfigurationError(f"max_shard_bytes={max_shard_bytes!r}: expected a positive number of bytes")
    if optimizer is not False and format not in ("torch", "dcp"):
        raise ConfigurationError(f"format={format!r} has no place for optimizer=; use 'torch' or 'dcp'")
    if config is not None and format != "hf":
        raise ConfigurationError(f"config= goes with format='hf', not with {format!r}")
    job = _Export(path, format, max_shard_bytes, overwrite)
    if isinstance(source, ShardedModule):
        return _of_model(source, job, config, optimizer, timeout)
    if isinstance(optimizer, ShardedOptimizer):
        raise ConfigurationError("export of a checkpoint: optimizer= takes True, or the name that it was saved under")
    if format == "hf":
        job.config = _config(config)
    with Reader.at(source) as reader:
        return job.write(reader, _chosen(reader.index, optimizer))


def _of_model(model: ShardedModule, job: _Export, config: Any, optimizer: Any, timeout: float) -> list[Path]:
    call = f"fsshard.export(model, {os.fspath(job.path)!r})"
    channel = Channel.of(model.backend.settings.everyone)
    wait_for_saves()
    channel.arrive(call, timeout)
    named: dict[str, ShardedOptimizer] = {}

    def prepared() -> None:
        if optimizer is not False:
            named.update(name_optimizers(model, optimizer, "fsshard.export"))
        if job.format == "hf":
            own = config if config is not None else getattr(model.module, "config", None)
            job.config = {"architectures": [type(model.module).__name__], **_config(own)}

    exchange(channel, prepared)
    live = LiveReader(model, named, channel, call)

    def work() -> list[str]:
        if channel.rank:
            live.serve()
            return []
        try:
            return [str(path) for path in job.write(live, next(iter(named), None))]
        finally:
            live.close()

    return [Path(path) for path in exchange(channel, work)[0]]


def _format(path: Path, given: str | None) -> str:
    of_suffix = SUFFIXES.get(path.suffix)
    format = given if given is not None else of_suffix
    if format is None:
        raise ConfigurationError(
            f"{os.fspath(path)!r} does not say which format; pass format= one of {', '.join(FORMATS)}, or a file that "
            f"ends in {', '.join(SUFFIXES)}"
        )
    if format not in FORMATS:
        raise ConfigurationError(f"unknown format {format!r}; known: {', '.join(FORMATS)}")
    if of_suffix not in (None, format):
        raise ConfigurationError(
            f"format={format!r} into {os.fspath(path)!r}, whose name says {of_suffix!r}; change one"
        )
    return format


def _chosen(index: Index, optimizer: bool | str) -> str | None:
    """Return the name of the optimizer to write."""
    known = list(index.optimizers)
    if optimizer is False:
        return None
    if optimizer is True and len(known) == 1:
        return known[0]
    if optimizer not in known:
        raise ConfigurationError(
            f"optimizer={optimizer!r}: the checkpoint has {', '.join(map(repr, known)) or 'none'}; pass the name of one"
        )
    return str(optimizer)


# ------------------------------------------------------------------------------------------------ files


@dataclass
class _Export:
    """The place and format of what is written."""

    path: Path
    format: str
    max_shard_bytes: int
    overwrite: bool
    config: dict[str, Any] = field(default_factory=dict)  # for "hf"

    @property
    def directory(self) -> Path:
        """Return where the files will be."""
        return self.path if self.format == "hf" else self.path.parent

    def write(self, reader: TensorReader, optimizer: str | None) -> list[Path]:
        """Write all files in a hidden directory beside, and give them their names at the end; or leave nothing."""
        folder = self.directory / f".{self.path.name}.partial-{uuid.uuid4().hex}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
            try:
                if self.format in ("torch", "dcp"):
                    return self._write_one(reader, optimizer, folder)
                return self._write_safetensors(reader, folder)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path}: {error.strerror or error}") from error

    def _replaced(self, names: list[str], pattern: str) -> list[Path]:
        """Return files beside those that will be written which are then no longer true: other shards of the model.

        Raises:
            CheckpointError: there are such files already, and nothing said to overwrite them.
        """
        there = sorted(path.name for path in self.directory.iterdir() if re.fullmatch(pattern, path.name))
        there += [name for name in names if name not in there and os.path.lexists(self.directory / name)]
        if there and not self.overwrite:
            raise CheckpointError(
                f"{self.directory / there[0]} exists; pass overwrite=True to replace it, or choose another path"
            )
        return [self.directory / name for name in there if name not in names]

    def _commit(self, folder: Path, names: list[str], stale: Sequence[Path] = ()) -> list[Path]:
        """Give the files their names."""
        paths = [self.directory / name for name in names]
        for path in paths:
            if self.format == "dcp" and path.exists():  # a rename replaces no directory that has files
                os.rename(path, folder / f"{path.name}.old")
            os.replace(folder / path.name, path)
        for path in stale:
            path.unlink()
        sync(self.directory)
        return paths

    def _write_safetensors(self, reader: TensorReader, folder: Path) -> list[Path]:
        hf, tensors = self.format == "hf", reader.index.tensors
        weights, tied = _once(reader.index, self.format)
        shards = list(_shards(reader.index, weights, self.max_shard_bytes))
        stem = "model" if hf else self.path.name.removesuffix(".safetensors")
        single = f"{stem}.safetensors" if hf else self.path.name
        files = [f"{stem}-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
        files = files if len(shards) > 1 else [single]
        index = f"{stem}.safetensors.index.json"
        names = [*files, *([index] if len(shards) > 1 else []), *([CONFIG_FILE] if hf else [])]
        pattern = rf"({re.escape(stem)}-\d+-of-\d+\.safetensors|{re.escape(single)}|{re.escape(index)})"
        stale = self._replaced(names, pattern)
        for name, shard in zip(files, shards, strict=True):
            here = set(shard)
            metadata = {"format": "pt"} | {other: key for other, key in tied.items() if key in here}
            write(folder / name, [reader.item(key, weights[key]) for key in shard], metadata)
        if len(shards) > 1:
            total = sum(tensors[tensor].nbytes for tensor in weights.values())
            where = {key: name for name, shard in zip(files, shards, strict=True) for key in shard}
            _write_text(folder / index, {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))})
        if hf:
            dtypes = [tensors[tensor] for tensor in weights.values()]
            floating = next((info.dtype for info in dtypes if info.kind.is_floating_point), "float32")
            _write_text(folder / CONFIG_FILE, {**self.config, "dtype": self.config.get("dtype") or floating})
        return self._commit(folder, names, stale)

    def _write_one(self, reader: TensorReader, optimizer: str | None, folder: Path) -> list[Path]:
        """Write one file of torch, or one directory of DCP."""
        from fsshard.checkpoint.interop.torch_formats import Placeholder, write_dcp, write_torch

        model, name, path = reader.index.model, self.path.name, self.path
        value: dict[str, Any] = {}  # with placeholders
        for key, tensor in model.keys.items():
            if tensor is not None:
                value[key] = Placeholder(tensor, reader.index.tensors[tensor])
            elif key in model.extra:
                value[key] = reader.tree(model.extra[key])
        if optimizer is not None:
            state = _by_name(reader, optimizer)
            value = {"model": value, "optimizer": _numbered(state) if self.format == "torch" else state}
        if self.format == "torch":
            self._replaced([name], "")
            write_torch(folder / name, value, reader.chunks)
            return self._commit(folder, [name])
        there = os.path.lexists(path) and not (path.is_dir() and not path.is_symlink() and not os.listdir(path))
        if there and (not self.overwrite or not _is_dcp(path)):
            what = "it holds no DCP checkpoint alone" if self.overwrite else "pass overwrite=True to replace it"
            raise CheckpointError(f"{path} exists; {what}, or choose another path")
        write_dcp(folder / name, value, reader)
        return self._commit(folder, [name])


def _write_text(path: Path, value: Any) -> None:
    with new_file(path) as stream:
        stream.write(memoryview((json.dumps(value, indent=2) + "\n").encode()))


def _is_dcp(path: Path) -> bool:
    """Check that a directory holds a DCP checkpoint and nothing else, so that it can be removed."""
    if path.is_symlink() or not (path / ".metadata").is_file():
        return False
    return all(name == ".metadata" or name.endswith(".distcp") for name in os.listdir(path))


# ------------------------------------------------------------------------------------------------ contents


def _once(index: Index, format: str) -> tuple[dict[str, str], dict[str, str]]:
    """Map keys to tensors with each tensor once, and further keys of it to the first one, as safetensors has ties.

    Raises:
        CheckpointError: something that safetensors has no place for.
    """
    first: dict[str, str] = {}
    weights: dict[str, str] = {}
    tied: dict[str, str] = {}
    for key, tensor in index.model.keys.items():
        if tensor is None:
            raise CheckpointError(f"format={format!r} holds tensors only, and {key!r} is none; use format='torch'")
        if tensor in first:
            tied[key] = first[tensor]
            continue
        info = index.tensors[tensor]
        if STORED[info.kind].lanes > 1:
            raise CheckpointError(
                f"format={format!r} has no {info.dtype}, which {key!r} is; use format='torch', or convert the model to "
                "complex64"
            )
        first[tensor] = key
        weights[key] = tensor
    return weights, tied


def _shards(index: Index, weights: Mapping[str, str], most: int) -> Iterator[list[str]]:
    """Yield keys in order, up to ``most`` bytes together; a tensor that is larger has a file of its own."""
    shard: list[str] = []
    nbytes = 0
    for key, tensor in weights.items():
        size = index.tensors[tensor].nbytes
        if shard and nbytes + size > most:
            yield shard
            shard, nbytes = [], 0
        shard.append(key)
        nbytes += size
    yield shard


def _by_name(reader: TensorReader, optimizer: str) -> dict[str, Any]:
    """Return an optimizer's state by parameter's name, with placeholders."""
    from fsshard.checkpoint.interop.torch_formats import Placeholder

    index, saved = reader.index, reader.index.optimizers[optimizer]
    tensors = index.optimizer_tensors(optimizer)
    groups = [reader.tree(group) for group in saved.groups]
    state: dict[str, dict[str, Any]] = {}
    for name in (name for group in groups for name in group["params"]):
        item = {key: reader.tree(node) for key, node in saved.state.get(name, {}).items()}
        item |= {key: Placeholder(tensor, index.tensors[tensor]) for key, tensor in tensors.get(name, {}).items()}
        if item:
            state[name] = item
    return {"state": state, "param_groups": groups}


def _numbered(named: dict[str, Any]) -> dict[str, Any]:
    """Number the parameters in the order of the groups, as torch's optimizers do."""
    names = [name for group in named["param_groups"] for name in group["params"]]
    number = {name: index for index, name in enumerate(names)}
    groups = [{**group, "params": [number[name] for name in group["params"]]} for group in named["param_groups"]]
    return {"state": {number[name]: item for name, item in named["state"].items()}, "param_groups": groups}


def _config(given: Any) -> dict[str, Any]:
    """Return a model's configuration as JSON has it."""
    config: Any = None
    try:
        if isinstance(given, Mapping):
            config = json.loads(json.dumps(dict(given)))
        elif hasattr(given, "to_json_string"):
            config = json.loads(given.to_json_string())
        elif isinstance(given, (str, os.PathLike)):
            path = Path(given)
            config = json.loads((path / CONFIG_FILE if path.is_dir() else path).read_text(encoding="utf-8"))
    except (OSError, TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"config={given!r} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        got = "the model has none" if given is None else f"got {type(given).__name__}"
        raise ConfigurationError(
            f"format='hf' writes a config.json ({got}); pass config= a transformers configuration, a mapping, or the "
            "path of a config.json"
        )
    return config


# ------------------------------------------------------------------------------------------------ a live model


class LiveReader(TensorReader):
    """Reads a wrapped model, and optimizers over it, in the memory of all ranks as if it were a checkpoint.

    Collective to make. Rank 0 reads; every other rank calls :meth:`serve`, which hands out what rank 0 asks for until
    it closes.
    """

    def __init__(
        self, model: ShardedModule, optimizers: Mapping[str, ShardedOptimizer], channel: Channel, call: str
    ) -> None:
        settings = model.backend.settings
        self._group, self._rank, self._device = settings.everyone, settings.overall_rank, settings.device
        model.buffers_held.sync()  # rank 0's count, as in a state dict

        def collected() -> parts.Collected:
            model.backend.reshard()
            return parts.collect(model, optimizers, {}, settings.overall_rank)

        mine = parts.collect_together(collected, model.backend, channel)
        self._parts = mine.parts
        told = channel.gather([parts.as_table(mine.parts), mine.trees(())])
        tensors = parts.in_pieces(*parts.divide([table for table, _ in told], call, shared=False))
        self.index = parts.make_index(parts.origin_of(model), mine, tensors, [trees for _, trees in told])
        self._numbers = {name: number for number, name in enumerate(tensors)}  # the same on all ranks
        ranks = {rank_of(piece.file) for info in tensors.values() for piece in info.pieces}
        self._asked = sorted(ranks - {0})  # those that rank 0 needs at all: with whole parameters, none

    # -- rank 0

    def read(self, name: str, wanted: Range) -> Tensor:
        """Return elements [start, stop) of a flattened tensor, on the CPU. On rank 0, while the others serve."""
        info = self.index.tensors[name]
        out = torch.empty(wanted[1] - wanted[0], dtype=info.kind)
        for piece, low, high in cover(info.pieces, wanted):
            place, rank = out[low - wanted[0] : high - wanted[0]], rank_of(piece.file)
            if rank == 0:
                place.copy_(self._slice(name, low, high))
                continue
            self._send([self._numbers[name], low, high], rank)
            buffer = place if self._device.type == "cpu" else torch.empty_like(place, device=self._device)
            dist.recv(_bytes(buffer), group=self._group, group_src=rank)
            if buffer is not place:
                place.copy_(buffer)
        return out

    def _slice(self, name: str, low: int, high: int) -> Tensor:
        part = self._parts[name]
        return part.values[low - part.range[0] : high - part.range[0]]

    def close(self) -> None:
        """Let the others go on; on rank 0."""
        for rank in self._asked:
            self._send([-1, 0, 0], rank)
        self._asked = []

    def _send(self, request: list[int], rank: int) -> None:
        dist.send(torch.tensor(request, device=self._device), group=self._group, group_dst=rank)

    # -- the others

    def serve(self) -> None:
        """Hand out parts until rank 0 closes; on the other ranks."""
        request, names = torch.empty(3, dtype=torch.int64, device=self._device), list(self._numbers)
        while self._rank in self._asked:
            dist.recv(request, group=self._group, group_src=0)
            at, low, high = request.tolist()
            if at < 0:
                return
            part = self._slice(names[at], low, high).to(self._device)  # a step's count is on the CPU
            dist.send(_bytes(part), group=self._group, group_dst=0)


def _bytes(values: Tensor) -> Tensor:
    """View values as bytes."""
    # Every collective library carries these; not all of them carry complex numbers and bool.
    return values.contiguous().view(torch.uint8)
