"""neuralop's training-state files, written whole by rank 0 and read under any backend.

The names are those of ``neuralop.training.training_state`` 2.0.0: ``<name>_state_dict.pt``, ``<name>_metadata.pkl``,
``optimizer.pt``, ``scheduler.pt``, ``regularizer.pt``, ``manifest.pt``. On one process, without fsshard,
``TFNO.from_checkpoint(folder, name)`` reads the first two.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from fsshard.errors import ConfigurationError
from fsshard.model.checks import agree
from fsshard.sharded.module import ShardedModule
from fsshard.sharded.optimizer import ShardedOptimizer

from ..trainers import State, by_name

log = logging.getLogger("fsshard")
PLAIN = (str, bytes, int, float, complex, type(None), Tensor, torch.dtype, torch.device, torch.Size)


# ------------------------------------------------------------------------------------------------ writing


def save_training_state(
    save_dir: str | os.PathLike[str],
    save_name: str,
    model: ShardedModule,
    manifest: Mapping[str, Any],
    **parts: Any,
) -> None:
    """Write the whole state, once. Collective; an error of the writing rank is raised on all.

    Args:
        save_dir: the folder; it is made if it is not there.
        save_name: ``"model"`` or ``"best_model"``.
        model: the wrapped model.
        manifest: what else goes into ``manifest.pt`` (the epoch).
        **parts: ``optimizer``, ``scheduler``, ``regularizer``: what has a state to write, or None.
    """
    # neuralop 2.0.0 does this on rank 0 alone: under FSDP1 its save_checkpoint writes a rank's flattened part of the
    # parameters, without an error, and under FSDP2 rank 0 waits for the others until the timeout.
    settings = model.backend.settings
    weights = model.state_dict(rank0_only=True, offload_to_cpu=True)
    given = {name: part for name, part in parts.items() if part is not None}
    states = {
        name: part.state_dict(rank0_only=True) if isinstance(part, ShardedOptimizer) else part.state_dict()
        for name, part in given.items()
    }

    def write() -> None:
        if settings.rank:
            return
        files: State = {f"{save_name}_state_dict.pt": weights}
        # neuralop's BaseModel has them: from_checkpoint rebuilds the model from them.
        if hasattr(model.module, "_init_kwargs"):
            files[f"{save_name}_metadata.pkl"] = model.module._init_kwargs
        files |= {f"{name}.pt": state for name, state in states.items()}
        index = {"model": f"{save_name}_state_dict.pt", **{name: f"{name}.pt" for name in states}, **manifest}
        _write_all(Path(save_dir), {**files, "manifest.pt": index}, plain={f"{name}.pt" for name in states})

    agree(settings.group, write)


def _write_all(folder: Path, files: Mapping[str, Any], plain: set[str]) -> None:
    """Write everything next to its place, then rename: no file is ever half written, and the manifest comes last."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = {name: folder / f".{name}.{os.getpid()}.part" for name in files}
    try:
        for name, content in files.items():
            with parts[name].open("wb") as file:
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
            # A resume refuses what torch does not unpickle.
            if name in plain and (strange := get_unsafe_globals_in_checkpoint(parts[name])):
                raise ConfigurationError(
                    f"{name} would hold objects that torch.load(weights_only=True) refuses ({', '.join(strange)}); "
                    "nothing was written. Leave them out of that state_dict, or allow them with "
                    "torch.serialization.add_safe_globals"
                )
        for name, part in parts.items():
            os.replace(part, folder / name)
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------ reading


def load_training_state(
    save_dir: str | os.PathLike[str],
    save_name: str,
    model: ShardedModule,
    **parts: Any,
) -> State:
    """Read what :func:`save_training_state`, or neuralop's own Trainer, wrote; give the manifest. Collective.

    Every rank reads the files; nothing is unpickled but plain data and what the live model's own metadata holds.

    Args:
        save_dir: the folder.
        save_name: ``"model"`` or ``"best_model"``.
        model: the wrapped model.
        **parts: ``optimizer``, ``scheduler``, ``regularizer``: what takes a state, or None.
    """
    folder = Path(save_dir)
    wanted = [name for name, part in parts.items() if part is not None]
    manifest, found = agree(model.backend.settings.group, lambda: _read_all(folder, save_name, model, wanted))
    model.load_state_dict(found.pop("model"))
    for name, state in found.items():
        part = parts[name]
        part.load_state_dict(by_name(state, part) if isinstance(part, ShardedOptimizer) else state)
    return dict(manifest)


def _read_all(
    folder: Path,
    save_name: str,
    model: ShardedModule,
    wanted: list[str],
) -> tuple[State, State]:
    globals_of_model = dict(_globals_of(getattr(model.module, "_init_kwargs", {})))
    manifest = _read(folder / "manifest.pt", {}) if (folder / "manifest.pt").exists() else {}
    states = {"model": _read(folder / f"{save_name}_state_dict.pt", globals_of_model)}
    for name in wanted:
        path = folder / f"{name}.pt"
        if path.exists():
            states[name] = _read(path, {})
        elif name in manifest:
            raise ConfigurationError(f"{folder} is incomplete: its manifest names {path.name}, which is not there")
        else:
            log.warning("%s holds no state of the %s; it starts from scratch", folder, name)
    return manifest, states


def _read(path: Path, allowed: Mapping[str, object]) -> Any:
    needed = get_unsafe_globals_in_checkpoint(path)
    strange = [name for name in needed if name not in allowed]
    if strange:
        raise ConfigurationError(
            f"{path} refers to {', '.join(strange)}, which this model's arguments do not hold; if you trust the file, "
            "allow them with torch.serialization.add_safe_globals"
        )
    with safe_globals([(allowed[name], name) for name in needed]):  # type: ignore[misc]
        return torch.load(os.fspath(path), map_location="cpu", weights_only=True, mmap=True)


def _globals_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield functions and classes in a model's constructor arguments (F.gelu, say), by pickle's name for them."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _globals_of(item)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _globals_of(item)
    elif isinstance(value, functools.partial):
        yield "functools.partial", functools.partial
        yield from _globals_of([value.func, value.args, value.keywords])
    elif not isinstance(value, PLAIN):
        thing = value if hasattr(value, "__qualname__") else type(value)
        yield f"{thing.__module__}.{thing.__qualname__}", thing
