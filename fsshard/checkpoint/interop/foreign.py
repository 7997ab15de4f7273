"""Opens other programs' checkpoints: their kind and the saved tree, with tensors still on disk."""

from __future__ import annotations

import logging
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from fsshard.checkpoint.format.division import RANK_FILE, Range
from fsshard.checkpoint.format.index import INDEX_FILE
from fsshard.checkpoint.format.tensors_file import Shape, StrPath, TensorsFile, open_regular, parse_json
from fsshard.checkpoint.interop.deepspeed import read_zero, zero_folder
from fsshard.checkpoint.interop.pickles import UNPICKLING, needs_trust, stand_in
from fsshard.errors import CheckpointError, CorruptCheckpoint

# By name: the first name of what is tied, or a file.
Names = dict[str, str]

log = logging.getLogger("fsshard")
KINDS = ("safetensors", "hf", "torch", "dcp", "deepspeed", "neuralop")

MAX_INDEX = 100_000_000
HF_INDEXES = re.compile(r".+\.(safetensors|bin)\.index\.json")
HF_FILES = ("model.safetensors", "diffusion_pytorch_model.safetensors", "pytorch_model.bin")
# What the Trainer of transformers and Accelerate's save_state put beside the weights.
HF_PARTS = ("optimizer.pt", "optimizer.bin", "scheduler.pt", "scheduler.bin", "scaler.pt")
STATE_FILES = (".pt", ".pth", ".bin", ".pkl", ".safetensors", ".ckpt")
NEURALOP_MODEL = "_state_dict.pt"
NEURALOP_PARTS = ("optimizer", "scheduler", "regularizer")
ZIP = b"PK\x03\x04"
PICKLE = b"\x80"
# Attribute of a tensor of the tree that is still to be read: a function of a range.
READER = "_fsshard_reader"
# Dicts and lists of values and tensors, as they were saved.
Tree = dict[Any, Any]


def foreign(path: StrPath) -> str | None:
    """Tell the kind of a checkpoint that fsshard did not write, by names and first bytes; nothing is unpickled.

    ``"safetensors"`` and ``"torch"`` are files; ``"hf"``, ``"dcp"``, ``"deepspeed"`` and ``"neuralop"`` directories, as
    on the Hugging Face Hub, of ``torch.distributed.checkpoint``, of ZeRO and of neuraloperator's trainer. None: ours,
    or not known.
    """
    try:
        path = Path(path)
        if path.is_dir():
            return _kind_of_directory(path)
        if path.is_file():
            return _kind_of_file(path)
        return None
    except (OSError, TypeError, ValueError):
        # Whoever reads it then says what is wrong with the path.
        return None


def _kind_of_directory(path: Path) -> str | None:
    names = {entry.name for entry in os.scandir(path)}
    if INDEX_FILE in names:
        return None
    if ".metadata" in names:
        return "dcp"
    if any((path / name / INDEX_FILE).is_file() for name in names):
        # These are checkpoints of ours, and what was exported next to them.
        return None
    if zero_folder(path) is not None:
        return "deepspeed"
    if any(name in HF_FILES or HF_INDEXES.fullmatch(name) for name in names):
        return "hf"
    if len(_single_file(names)) == 1:
        return "hf"
    if any(name.endswith(NEURALOP_MODEL) for name in names):
        return "neuralop"
    return None


def _single_file(names: set[str]) -> list[str]:
    return [name for name in names if name.endswith(".safetensors") and not RANK_FILE.fullmatch(name)]


def _kind_of_file(path: Path) -> str | None:
    with path.open("rb") as stream:
        head = stream.read(9)
    if path.suffix == ".safetensors":
        return "safetensors"
    header_bytes = int.from_bytes(head[:8], "little")
    if head[8:] == b"{" and header_bytes <= path.stat().st_size:
        return "safetensors"
    if head.startswith((ZIP, PICKLE)):
        return "torch"
    return None


def unknown(path: Path) -> str:
    """Return what is at a path of no known kind, in one line: names, and what below them can be read."""
    what = "a file"
    if path.is_dir():
        names = sorted(os.listdir(path))[:8] or ["nothing"]
        what = f"with {', '.join(names)}"
    files = sorted([*path.glob("*"), *path.glob("*/*")])
    checkpoints = [each for each in files if foreign(each) and not RANK_FILE.fullmatch(each.name)]
    folders = [each for each in checkpoints if each.is_dir()]
    inside = ""
    if checkpoints:
        shown = (folders or checkpoints)[:5]
        inside = f"; pass one of those in it: {', '.join(map(str, shown))}"
    return f"{path} ({what}) is not a checkpoint of a known kind, which are: {', '.join(KINDS)}{inside}"


def awaited(
    dtype: torch.dtype,
    shape: Shape,
    read: Callable[[Range], Tensor],
) -> Tensor:
    """Return a tensor on the meta device for one that is read by and by."""
    tensor = torch.empty(shape, dtype=dtype, device="meta")
    setattr(tensor, READER, read)
    return tensor


def open_tree(path: Path, kind: str, files: ExitStack, *, trust_pickle: bool) -> tuple[Tree, Names]:
    """Open another program's checkpoint, of the ``kind`` that :func:`foreign` said; ``files`` closes what stays open.

    Returns the tree; and key -> the key under which the same tensor was saved, where the format ties keys by name.
    A CheckpointError says that it must be unpickled, which runs whatever code it asks for, and is not trusted.
    """
    tied: Names = {}
    try:
        if kind == "safetensors":
            return _safetensors(path, files, tied), tied
        if kind == "hf":
            return _hf(path, files, tied, trust_pickle), tied
        readers = {"torch": _unpickled, "dcp": _dcp, "deepspeed": _deepspeed, "neuralop": _neuralop}
        return readers[kind](path, trust_pickle), tied
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error


def _safetensors(path: Path, files: ExitStack, tied: Names) -> Tree:
    # The Hub's cache holds links, which a checkpoint of ours may not.
    file = files.enter_context(TensorsFile(os.path.realpath(path)))
    for key, first in file.metadata.items():
        if first in file.entries:
            tied[key] = first

    def read(key: str, wanted: Range) -> Tensor:
        start, stop = wanted
        return file.read(key, start, stop)

    tree = Tree()
    for key, entry in file.entries.items():
        tree[key] = awaited(entry.dtype, entry.shape, partial(read, key))
    return tree


def _hf(path: Path, files: ExitStack, tied: Names, trust_pickle: bool) -> Tree:
    names = {entry.name for entry in os.scandir(path)}
    indexes = [name for name in names if HF_INDEXES.fullmatch(name)]
    indexes.sort(key=lambda name: ".bin." in name)
    file_of = {}
    if indexes:
        file_of = _weight_map(path / indexes[0])
    weights = list(dict.fromkeys(file_of.values()))
    if not weights:
        single = [name for name in (*HF_FILES, *_single_file(names)) if name in names]
        weights = single[:1]
    tree = Tree()
    for name in weights:
        if name.endswith(".safetensors"):
            part = _safetensors(path / name, files, tied)
        else:
            part = _unpickled(path / name, trust_pickle)
        both = tree.keys() & part.keys()
        if both:
            raise CorruptCheckpoint(f"{path / name}: has {min(both)!r}, which another file has too")
        tree |= part
    absent = sorted(file_of.keys() - tree.keys() - tied.keys())
    if absent:
        raise CorruptCheckpoint(f"{path / indexes[0]} lists tensors that its files lack: {', '.join(absent[:5])}")
    beside = [name for name in HF_PARTS if name in names]
    _tell_what_is_left(path, names - set(beside) - set(weights))
    if not beside:
        return tree
    parts = Tree(model=tree)
    for name in beside:
        parts[name.partition(".")[0]] = _unpickled(path / name, trust_pickle)
    return parts


def _tell_what_is_left(path: Path, names: set[str]) -> None:
    left = [name for name in names if name.endswith(STATE_FILES) and not name.startswith("pytorch_model")]
    if left:
        log.warning("%s: not read are %s", path, ", ".join(sorted(left)))


def _weight_map(index: Path) -> Names:
    with os.fdopen(open_regular(index, follow=True), "rb") as stream:
        value = parse_json(stream.read(MAX_INDEX), str(index))
    files = None
    if isinstance(value, dict):
        files = value.get("weight_map")
    names = files.values() if isinstance(files, dict) else [None]
    for name in names:
        if not _is_file_name(name):
            raise CorruptCheckpoint(f"{index}: has no weight_map of keys to files next to it, but {name!r:.100}")
    return cast(Names, files)


def _is_file_name(name: object) -> bool:
    if not isinstance(name, str) or name in ("", ".", ".."):
        return False
    return name == os.path.basename(name)


def _neuralop(path: Path, trust_pickle: bool) -> Tree:
    names = sorted(entry.name for entry in os.scandir(path) if entry.name.endswith(".pt"))
    manifest = Tree()
    if "manifest.pt" in names:
        manifest = _unpickled(path / "manifest.pt", trust_pickle)
    models = [name for name in names if name.endswith(NEURALOP_MODEL)]
    preferred = (manifest.get("model"), f"model{NEURALOP_MODEL}")
    model = next((name for name in preferred if name in models), None)
    if model is None:
        if len(models) > 1:
            raise CheckpointError(f"{path} has several models ({', '.join(models)}); pass the path of one")
        model = models[0]
    tree = Tree(model=_unpickled(path / model, trust_pickle))
    for part in NEURALOP_PARTS:
        if f"{part}.pt" in names:
            tree[part] = _unpickled(path / f"{part}.pt", trust_pickle)
    if "epoch" in manifest:
        tree["epoch"] = manifest["epoch"]
    return tree


def _deepspeed(path: Path, trust_pickle: bool) -> Tree:
    folder = zero_folder(path)
    assert folder is not None
    if folder != path:
        _tell_what_is_left(path, set(os.listdir(path)))
    return read_zero(folder, partial(_unpickled, trust_pickle=trust_pickle), awaited)


def _dcp(path: Path, trust_pickle: bool) -> Tree:
    from fsshard.checkpoint.interop.torch_formats import DcpDirectory

    return DcpDirectory(path, trust_pickle).tree(awaited)


def _unpickled(path: Path, trust_pickle: bool) -> Tree:
    """Return what ``torch.save`` wrote; its tensors are mapped, not read, where the file's format allows it.

    Plain tensors and containers are read by torch's own restricted unpickler, which runs no code.
    """
    with os.fdopen(open_regular(path, follow=True), "rb") as stream:
        zipped = stream.read(4) == ZIP
    options: dict[str, Any] = {"map_location": "cpu", "mmap": zipped}
    stand_ins: list[Any] = []
    try:
        if zipped:
            _check_stored(path)
            for name in torch.serialization.get_unsafe_globals_in_checkpoint(os.fspath(path)):
                kind = stand_in(name)
                if kind:
                    stand_ins.append((kind, name))
        try:
            with torch.serialization.safe_globals(stand_ins):
                value = torch.load(os.fspath(path), weights_only=True, **options)
        except pickle.UnpicklingError as error:
            if not trust_pickle:
                raise needs_trust(path, error) from None
            value = torch.load(os.fspath(path), weights_only=False, pickle_module=UNPICKLING, **options)
        if isinstance(value, nn.Module):
            value = value.state_dict()
    except CheckpointError:
        raise
    except Exception as error:  # of a damaged file anything can come
        raise CorruptCheckpoint(f"{path}: {type(error).__name__}: {error}") from error
    if not isinstance(value, dict):
        raise CorruptCheckpoint(f"{path} holds a {type(value).__name__}; expected a state dict, or a dict of them")
    return value


def _check_stored(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if member.compress_type != zipfile.ZIP_STORED:
                raise CorruptCheckpoint(f"{path}: a compressed archive, which could unfold without end")
