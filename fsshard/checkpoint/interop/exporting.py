"""fsshard.export: writes a checkpoint, or a wrapped model, in another program's format, piece by piece."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.checkpoint import arguments, dividing, parts
from fsshard.checkpoint.format.directory import sync
from fsshard.checkpoint.format.division import Piece, pieces_of, rank_of
from fsshard.checkpoint.format.index import Index, Names, Tree, Values, some
from fsshard.checkpoint.format.object_store import refuse_url
from fsshard.checkpoint.format.tensors_file import STORED, StrPath, new_file, write
from fsshard.checkpoint.interop.adapters import PEFT_FILES, MergedReader, write_peft
from fsshard.checkpoint.models import choose_models
from fsshard.checkpoint.reader import PieceReader, Reader, TensorReader
from fsshard.checkpoint.saving import wait_for_saves
from fsshard.comm.agreement import Channel, batches, exchange
from fsshard.errors import CheckpointError, ConfigurationError
from fsshard.planning.text import is_count
from fsshard.sharded.averages import KEY, Averages
from fsshard.sharded.controller import controller_of
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer
from fsshard.state_objects import class_name

FORMATS = ("safetensors", "torch", "dcp", "hf", "peft")
# A larger model is divided into several files, as on the Hugging Face Hub.
MAX_SHARD_BYTES = 5_000_000_000
SUFFIXES = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch", ".ckpt": "torch"}
CONFIG_FILE = "config.json"
# Averages of weights are, in a checkpoint, the state of an optimizer of this class.
AVERAGES = class_name(Averages)


def export(
    source: ShardedModule | StrPath,
    file: StrPath,
    format: str | None = None,
    *,
    optimizer: bool | str | ShardedOptimizer = False,
    average: str | None = None,
    model: str | None = None,
    merged: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    config: Any = None,
    overwrite: bool = False,
    timeout: float = arguments.TIMEOUT,
) -> list[Path]:
    """Write whole weights under the state dict's keys, for other programs to read.

    Weights are read and written in pieces, so a process needs only a few megabytes more; for ``"dcp"`` one tensor is
    whole at a time. From a checkpoint one process does it; from a wrapped model it is collective, and rank 0 writes.

    Args:
        source: a checkpoint's directory, or what :func:`fsshard.wrap` returned.
        file: the file, or for ``"hf"``, ``"peft"`` and ``"dcp"`` the directory, to write.
        format: ``"safetensors"``: a file, or with more than ``max_shard_bytes`` several and an index. ``"hf"``: a
            directory that ``from_pretrained`` reads. ``"torch"``: what ``torch.load(weights_only=True)`` reads.
            ``"dcp"``: a directory that ``torch.distributed.checkpoint.load`` reads. ``"peft"``: of a wrapped model,
            the adapters alone (PEFT's, or :func:`fsshard.lora` on linear and convolutional layers), in a directory
            that ``PeftModel.from_pretrained`` reads. None: chosen by the suffix of ``file``.
        optimizer: write ``{"model": ..., "optimizer": ...}`` with the optimizer's state, which ``"torch"`` (numbered,
            as torch optimizers have it) and ``"dcp"`` (by name) can. True: the only one of the checkpoint; a string:
            the one that was saved under that name. Of a wrapped model: the optimizer itself.
        average: of a checkpoint: the name under which an :class:`fsshard.EMA` was saved, which is written in place of
            the weights. Of a wrapped model: export it within ``ema.swapped()``.
        model: of a checkpoint of several models: the name of the one to write.
        merged: write weights that :func:`fsshard.lora` was put on with their adapters, under their own names, as the
            model had them before; of these one is whole at a time.
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
    refuse_url(os.fspath(file))
    path = Path(os.path.expanduser(file))
    format = _format(path, format)
    if not is_count(max_shard_bytes):
        raise ConfigurationError(f"max_shard_bytes={max_shard_bytes!r}: expected a positive number of bytes")
    if (optimizer is not False and format not in ("torch", "dcp")) or (config is not None and format != "hf"):
        raise ConfigurationError(f"format={format!r}: optimizer= goes with 'torch' and 'dcp', config= with 'hf'")
    if merged and (optimizer is not False or format == "peft"):
        raise ConfigurationError("merged=True: an optimizer's state is of the adapters, and format='peft' writes them")
    job = _Export(path, format, max_shard_bytes, overwrite, merged)
    if isinstance(source, ShardedModule):
        if average is not None:
            raise ConfigurationError("average= goes with a checkpoint; export a model within `with ema.swapped():`")
        return _of_model(source, job, config, optimizer, timeout)
    if isinstance(source, Mapping):
        raise ConfigurationError("export: expected a checkpoint or one wrapped model, got several; export each alone")
    if isinstance(optimizer, ShardedOptimizer):
        raise ConfigurationError("export of a checkpoint: optimizer= takes True, or the name that it was saved under")
    if format == "peft":
        raise ConfigurationError("format='peft' goes with a wrapped model: load the checkpoint into one, and export it")
    if format == "hf":
        job.config = _config(config)
    with Reader.at(source) as reader:
        hint = "pass model= with one of these names (--model)"
        name = model or ""
        reader.index = choose_models(reader.index, [name], "fsshard.export", hint)[name]
        frozen = [key for key, why in reader.index.model.dropped.items() if why == parts.FROZEN]
        if frozen:
            raise ConfigurationError(
                f"export of {os.fspath(source)!r}: expected a checkpoint of the whole model, got one that was saved "
                f"with only='trainable', without {some(frozen)}. Load it into the wrapped model, and export that"
            )
        chosen = _chosen(reader.index, optimizer)
        if average is not None:
            reader.index = _averaged(reader.index, average)
        return job.write(reader, chosen)


def _of_model(model: ShardedModule, job: _Export, config: Any, optimizer: Any, timeout: float) -> list[Path]:
    call = f"fsshard.export(model, {os.fspath(job.path)!r})"
    channel = Channel.of(model.backend.settings.everyone)
    wait_for_saves()
    channel.arrive(call, timeout)
    job.model = model

    def prepared() -> dict[str, ShardedOptimizer]:
        if job.format == "hf":
            own = config
            if own is None:
                own = getattr(model.module, "config", None)
            job.config = {"architectures": [type(model.module).__name__], **_config(own)}
        if optimizer is False:
            return {}
        return arguments.name_optimizers({"": model}, optimizer, "fsshard.export")

    live = LiveReader(model, prepared, channel, call)

    def work() -> list[str]:
        if channel.rank:
            live.serve()
            return []
        with live:
            name = next(iter(live.index.optimizers), None)
            return list(map(str, job.write(live, name)))

    paths = exchange(channel, work)[0]
    return list(map(Path, paths))


def _format(path: Path, given: str | None) -> str:
    of_suffix = SUFFIXES.get(path.suffix)
    format = of_suffix if given is None else given
    if format not in FORMATS or of_suffix not in (None, format):
        raise ConfigurationError(
            f"format={given!r} into {os.fspath(path)!r}: expected one of {', '.join(FORMATS)} that the suffix does not "
            f"contradict; without format= a file that ends in {', '.join(SUFFIXES)}"
        )
    return format


def _averaged(index: Index, average: str) -> Index:
    """Return an index in which the model's keys lead to an average of its weights."""
    names = [name for name, saved in index.optimizers.items() if saved.kind == AVERAGES]
    if average not in names:
        raise ConfigurationError(f"average={average!r}: the checkpoint has {', '.join(map(repr, names)) or 'none'}")
    states = index.optimizer_tensors(average)
    if not states:
        raise ConfigurationError(f"average={average!r} has no values: it was saved before its first update")
    keys = dict(index.model.keys)
    averages = {}
    for parameter, state in states.items():
        averages[keys.get(parameter)] = state[KEY]
    for key, tensor in keys.items():
        if tensor is not None:
            keys[key] = averages.get(tensor, tensor)
    return dataclasses.replace(index, model=index.model._replace(keys=keys))


def _chosen(index: Index, optimizer: bool | str) -> str | None:
    """Return the name of the optimizer to write."""
    if optimizer is False:
        return None
    names = [name for name, saved in index.optimizers.items() if saved.kind != AVERAGES]
    if optimizer is True and len(names) == 1:
        return names[0]
    if optimizer not in names:
        raise ConfigurationError(
            f"optimizer={optimizer!r}: the checkpoint has {', '.join(map(repr, names)) or 'none'}; pass the name of one"
        )
    return str(optimizer)


@dataclass
class _Export:
    """The place and format of what is written."""

    path: Path
    format: str
    max_shard_bytes: int
    overwrite: bool
    merged: bool = False
    model: ShardedModule | None = None  # which is exported, if no checkpoint is
    config: Tree = field(default_factory=dict)  # for "hf"

    @property
    def directory(self) -> Path:
        """Return where the files will be."""
        if self.format in ("hf", "peft"):
            return self.path
        return self.path.parent

    def write(self, reader: TensorReader, optimizer: str | None) -> list[Path]:
        """Write all files into a hidden directory, and give them their names at the end; or leave nothing."""
        folder = self.directory / f".{self.path.name}.partial-{uuid.uuid4().hex}"
        if self.merged:
            reader = MergedReader(reader)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
            try:
                if self.format in ("torch", "dcp"):
                    return self._write_one(reader, optimizer, folder)
                if self.format == "peft":
                    return self._write_adapters(reader, folder)
                return self._write_safetensors(reader, folder)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path}: {error.strerror or error}") from error

    def _replaced(self, names: list[str], pattern: str) -> list[Path]:
        """Return files that an earlier export leaves next to those written now; raise if none may be overwritten."""
        stale = []
        for name in sorted(os.listdir(self.directory)):
            is_new = name in names
            if not is_new and not re.fullmatch(pattern, name):
                continue
            if not self.overwrite:
                raise CheckpointError(
                    f"{self.directory / name} exists; pass overwrite=True (--overwrite) to replace it, or choose "
                    "another path"
                )
            if not is_new:
                stale.append(self.directory / name)
        return stale

    def _commit(
        self,
        folder: Path,
        names: list[str],
        stale: Sequence[Path] = (),
    ) -> list[Path]:
        """Give the files their names."""
        paths = [self.directory / name for name in names]
        for path in paths:
            # A rename replaces no directory that has files.
            if self.format == "dcp" and path.exists():
                os.rename(path, folder / f"{path.name}.old")
            os.replace(folder / path.name, path)
        for path in stale:
            path.unlink()
        sync(self.directory)
        return paths

    def _write_safetensors(self, reader: TensorReader, folder: Path) -> list[Path]:
        tensors = reader.index.tensors
        weights, tied = _once(reader.index, self.format)
        shards = list(batches(weights, lambda key: tensors[weights[key]].nbytes, self.max_shard_bytes)) or [[]]
        single = self.path.name
        if self.format == "hf":
            single = "model.safetensors"
        stem = single.removesuffix(".safetensors")
        index = f"{stem}.safetensors.index.json"
        files = [single]
        texts = {}
        if len(shards) > 1:
            files = []
            for n in range(1, len(shards) + 1):
                files.append(f"{stem}-{n:05d}-of-{len(shards):05d}.safetensors")
            total = sum(tensors[tensor].nbytes for tensor in weights.values())
            file_of_key = {}
            for file, shard in zip(files, shards, strict=True):
                file_of_key.update(dict.fromkeys(shard, file))
            texts[index] = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of_key.items()))}
        if self.format == "hf":
            infos = [tensors[tensor] for tensor in weights.values()]
            floating = next((info.dtype for info in infos if info.kind.is_floating_point), "float32")
            dtype = self.config.get("dtype") or floating
            texts[CONFIG_FILE] = {**self.config, "dtype": dtype}
        pattern = rf"({re.escape(stem)}-\d+-of-\d+\.safetensors|{re.escape(single)}|{re.escape(index)})"
        stale = self._replaced([*files, *texts], pattern)
        for file, shard in zip(files, shards, strict=True):
            metadata = {"format": "pt"}
            for alias, key in tied.items():
                if key in shard:
                    metadata[alias] = key
            write(folder / file, [reader.item(key, weights[key]) for key in shard], metadata)
        for name, value in texts.items():
            text = json.dumps(value, indent=2) + "\n"
            with new_file(folder / name) as stream:
                stream.write(memoryview(text.encode()))
        return self._commit(folder, [*files, *texts], stale)

    def _write_adapters(self, reader: TensorReader, folder: Path) -> list[Path]:
        """Write PEFT's two files."""
        assert self.model is not None
        stale = self._replaced([*PEFT_FILES], "")
        write_peft(self.model, reader, folder)
        return self._commit(folder, [*PEFT_FILES], stale)

    def _write_one(self, reader: TensorReader, optimizer: str | None, folder: Path) -> list[Path]:
        """Write one file of torch, or one directory of DCP."""
        from fsshard.checkpoint.interop.torch_formats import Placeholder, write_dcp, write_torch

        index = reader.index
        name = self.path.name
        value: Tree = {}
        for key, tensor in index.model.keys.items():
            if tensor is not None:
                value[key] = Placeholder(tensor, index.tensors[tensor])
            elif key in index.model.extra:
                value[key] = reader.tree(index.model.extra[key])
        if optimizer is not None:
            groups = list(map(reader.tree, index.optimizers[optimizer].groups))
            state = _state_by_name(reader, optimizer, groups)
            if self.format == "torch":
                state = _numbered(state, groups)
            value = {"model": value, "optimizer": {"state": state, "param_groups": groups}}
        if self.format == "torch":
            self._replaced([name], "")
            write_torch(folder / name, value, reader.chunks)
        else:
            self._check_directory()
            write_dcp(folder / name, value, reader)
        return self._commit(folder, [name])

    def _check_directory(self) -> None:
        """Raise if a directory of DCP would replace anything but an empty directory, or another one of DCP."""
        path = self.path
        if not os.path.lexists(path):
            return
        is_dcp = False
        if path.is_dir() and not path.is_symlink():
            names = os.listdir(path)
            if not names:
                return
            is_dcp = ".metadata" in names and all(name == ".metadata" or name.endswith(".distcp") for name in names)
        if not self.overwrite:
            raise CheckpointError(
                f"{path} exists; pass overwrite=True (--overwrite) to replace it, or choose another path"
            )
        if not is_dcp:
            raise CheckpointError(f"{path} exists; it holds no DCP checkpoint alone, or choose another path")


def _state_by_name(reader: TensorReader, optimizer: str, groups: Sequence[Values]) -> dict[Any, Any]:
    """Return the state of an optimizer's parameters by name, with placeholders for tensors."""
    from fsshard.checkpoint.interop.torch_formats import Placeholder

    index = reader.index
    trees = index.optimizers[optimizer].state
    tensors = index.optimizer_tensors(optimizer)
    state = {}
    for group in groups:
        for name in group["params"]:
            item = {}
            for key, node in trees.get(name, {}).items():
                if key != parts.ORDERS:
                    item[key] = reader.tree(node)
            for key, tensor in tensors.get(name, {}).items():
                item[key] = Placeholder(tensor, index.tensors[tensor])
            if item:
                state[name] = item
    return state


def _numbered(state: Values, groups: Sequence[Tree]) -> dict[Any, Any]:
    """Number the parameters in the order of the groups, as torch's optimizers do, in these groups too."""
    numbers: dict[str, int] = {}
    for group in groups:
        for name in group["params"]:
            numbers[name] = len(numbers)
        # As torch's optimizers over named parameters write them. New text, so that the file's bytes do not
        # tell whether the model's keys were the same objects.
        group["param_names"] = [name.encode().decode() for name in group["params"]]
        group["params"] = [numbers[name] for name in group["params"]]
    return {numbers[name]: item for name, item in state.items()}


def _once(index: Index, format: str) -> tuple[Names, Names]:
    """Map keys to tensors with each tensor once, and further keys of it to the first one, as safetensors has ties."""
    first_keys: Names = {}
    weights = {}
    tied = {}
    for key, tensor in index.model.keys.items():
        if tensor is None:
            raise CheckpointError(f"format={format!r} holds tensors only, and {key!r} is not one; use format='torch'")
        info = index.tensors[tensor]
        if STORED[info.kind].lanes > 1:
            raise CheckpointError(
                f"format={format!r} has no {info.dtype}, which {key!r} is; use format='torch', or convert the model to "
                "complex64"
            )
        first = first_keys.setdefault(tensor, key)
        if first == key:
            weights[key] = tensor
        else:
            tied[key] = first
    return weights, tied


def _config(given: Any) -> Tree:
    """Return a model's configuration as JSON has it."""
    config = None
    try:
        if isinstance(given, Mapping):
            config = json.loads(json.dumps(dict(given)))
        elif hasattr(given, "to_json_string"):
            config = json.loads(given.to_json_string())
        elif isinstance(given, (str, os.PathLike)):
            path = Path(given)
            if path.is_dir():
                path = path / CONFIG_FILE
            config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"config={given!r} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        got = "the model has none" if given is None else f"got {type(given).__name__}"
        raise ConfigurationError(
            f"format='hf' writes a config.json ({got}); pass config= (--config) the path of a "
            "config.json, a transformers configuration or a mapping"
        )
    return config


class LiveReader(PieceReader):
    """Reads a wrapped model, and optimizers over it, in the memory of all ranks as if it were a checkpoint.

    Collective to make. Rank 0 reads and closes; the others :meth:`serve` till then.
    """

    def __init__(
        self,
        model: ShardedModule,
        optimizers: Callable[[], Mapping[str, ShardedOptimizer]],
        channel: Channel,
        call: str,
    ) -> None:
        settings = model.backend.settings
        self._group = settings.everyone
        self._rank = settings.overall_rank
        self._device = settings.device
        # Rank 0's buffers count, as in a state dict.
        controller_of(model).buffers.sync()
        models = {"": model}

        def collected() -> parts.Collected:
            chosen = optimizers()
            model.backend.reshard()
            return parts.collect(models, chosen, {}, self._rank)

        own = parts.collect_together(collected, models, channel)
        self._parts = own.parts
        tables = []
        trees = []
        announced = dividing.announced_by(own.parts, channel.rank, by_rule=False)
        for table, tree in channel.gather([announced, own.trees(())]):
            tables.append(table)
            trees.append(tree)
        tensors = dividing.divide(tables, call)
        self.index = dividing.make_index(dividing.origin_of(models), own, tensors, trees)
        # The same on all ranks.
        self._numbers = {name: number for number, name in enumerate(tensors)}
        # The ranks that rank 0 needs at all: with whole parameters, none.
        ranks: set[int] = set()
        for info in tensors.values():
            ranks.update(rank_of(piece.file) for piece in pieces_of(info.pieces))
        self._asked = sorted(ranks - {0})

    def fill(
        self,
        out: Tensor,
        name: str,
        piece: Piece,
        low: int,
        high: int,
    ) -> None:
        rank = rank_of(piece.file)
        if rank == 0:
            out.copy_(self._slice(name, low, high))
            return
        self._send([self._numbers[name], low, high], rank)
        buffer = out if self._device.type == "cpu" else torch.empty_like(out, device=self._device)
        dist.recv(_bytes(buffer), group=self._group, group_src=rank)
        if buffer is not out:
            out.copy_(buffer)

    def _slice(self, name: str, low: int, high: int) -> Tensor:
        part = self._parts[name]
        return part.values[low - part.range[0] : high - part.range[0]]

    def __exit__(self, *_: object) -> None:
        """Let the others go on."""
        for rank in self._asked:
            self._send([-1, 0, 0], rank)
        self._asked = []

    def _send(self, request: list[int], rank: int) -> None:
        dist.send(torch.tensor(request, device=self._device), group=self._group, group_dst=rank)

    def serve(self) -> None:
        """Hand out the parts that rank 0 asks for."""
        request = torch.empty(3, dtype=torch.int64, device=self._device)
        names = list(self._numbers)
        while self._rank in self._asked:
            dist.recv(request, group=self._group, group_src=0)
            at, low, high = request.tolist()
            if at < 0:
                return
            # A step's count is on the CPU.
            part = self._slice(names[at], low, high).to(self._device)
            dist.send(_bytes(part), group=self._group, group_dst=0)


def _bytes(values: Tensor) -> Tensor:
    # Every collective library carries bytes; not all of them carry complex numbers and bool.
    return values.contiguous().view(torch.uint8)
