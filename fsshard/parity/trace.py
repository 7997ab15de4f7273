"""The reference's run on disk, tensor by tensor.

One safetensors file per step, quantity and rank. A rank writes only what differs from rank 0's, so replicas are kept
once; nothing is unpickled, and a reader holds one tensor at a time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from fsshard.errors import RecipeError

__all__ = ["Tensors", "TraceReader", "TraceWriter", "digest", "merged_tensors", "real_view"]

_COMPLEX = "complex:"


def real_view(tensor: Tensor) -> Tensor:
    """``tensor`` itself, or the pairs of a complex one."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def digest(value: Any, *, strict: bool = True) -> str:
    """A short digest of every tensor and number in a nested structure, bit for bit.

    Args:
        value: tensors, arrays, numbers and texts in containers of any kind, and objects that hold such.
        strict: raise for what cannot be looked into; else its type alone counts.

    Raises:
        RecipeError: ``strict``, and there is such a thing.
    """
    found = hashlib.blake2b(digest_size=16)
    _feed(found, value, strict, [])
    return found.hexdigest()


def _feed(found: Any, value: Any, strict: bool, above: list[int]) -> None:
    if id(value) in above:
        return  # an object that holds itself
    above = [*above, id(value)]
    if isinstance(value, Tensor):
        dense = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
        plain = real_view(dense).contiguous().cpu()
        found.update(f"{value.dtype}{tuple(value.shape)}".encode())
        found.update(plain.reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, (np.ndarray, np.generic)) and value.dtype != object:
        found.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, (bool, int, float, complex, str, bytes, type(None), type, Enum, torch.dtype, torch.device)):
        found.update(repr(value).encode())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            found.update(repr(key).encode())
            _feed(found, item, strict, above)
    elif isinstance(value, (list, tuple, np.ndarray)):
        found.update(f"{type(value).__name__}{len(value)}".encode())
        for item in value:
            _feed(found, item, strict, above)
    elif isinstance(value, (set, frozenset)):
        _feed(found, sorted(digest(item, strict=strict) for item in value), strict, above)
    elif hasattr(value, "__dict__") or hasattr(value, "__slots__"):  # what it holds, not where it lies
        names = [*getattr(value, "__dict__", ()), *getattr(value, "__slots__", ())]
        held = {name: getattr(value, name) for name in names if hasattr(value, name)}
        _feed(found, {type(value).__qualname__: held}, strict, above)
    elif strict:
        raise RecipeError(
            f"a batch, or an optimizer's state, holds a {type(value).__name__}, whose contents cannot be compared; use "
            "tensors, arrays, numbers, texts, and containers of them"
        )
    else:
        found.update(type(value).__qualname__.encode())


class TraceWriter:
    """Writes one rank's part of a reference run."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._rank, self._world = dist.get_rank(), dist.get_world_size()

    def tensors(self, step: int, quantity: str, items: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Write tensors under their names; returns the names. Collective."""
        held = {name: value.detach().cpu() for name, value in items}
        kept = held
        if self._world > 1:
            digests = [{name: digest(value) for name, value in held.items()} if self._rank == 0 else {}]
            dist.broadcast_object_list(digests, src=0)
            if self._rank:
                kept = {name: value for name, value in held.items() if digests[0].get(name) != digest(value)}
        plain = {
            (_COMPLEX if value.is_complex() else "") + name: real_view(value).contiguous().clone()
            for name, value in kept.items()
        }
        save_file(plain, _file(self._folder, step, quantity, self._rank), {"names": json.dumps(list(held))})
        return list(held)

    def facts(self, step: int, facts: dict[str, Any]) -> None:
        """Write numbers and digests of a step."""
        _facts_file(self._folder, step, self._rank).write_text(json.dumps(facts))


class TraceReader:
    """Reads a reference run as one of its ranks saw it."""

    def __init__(self, folder: str, rank: int) -> None:
        self._folder, self._rank = Path(folder), rank

    def facts(self, step: int, rank: int | None = None) -> dict[str, Any]:
        """Numbers and digests of a step."""
        found: dict[str, Any] = json.loads(
            _facts_file(self._folder, step, self._rank if rank is None else rank).read_text()
        )
        return found

    def open(self, step: int, quantity: str) -> _Shelf:
        """The tensors of one quantity of one step."""
        return _Shelf(self._folder, step, quantity, self._rank)


class _Shelf(Mapping[str, Tensor]):
    """Tensors by name, each read when asked for."""

    def __init__(self, folder: Path, step: int, quantity: str, rank: int) -> None:
        # Opening costs more than reading a small tensor; the files stay open, mapped, as long as the shelf lives.
        self._files = [safe_open(_file(folder, step, quantity, r), framework="pt") for r in sorted({rank, 0})]
        self._where: dict[str, tuple[Any, str]] = {}
        for file in self._files:  # this rank's own file comes last, and wins
            self._where.update({key.removeprefix(_COMPLEX): (file, key) for key in file.keys()})  # noqa: SIM118
        self._names: list[str] = json.loads(self._files[-1].metadata()["names"])
        self._set = frozenset(self._names)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._set:
            raise KeyError(name)
        file, key = self._where[name]
        value: Tensor = file.get_tensor(key)
        return torch.view_as_complex(value) if key.startswith(_COMPLEX) else value

    def __contains__(self, name: object) -> bool:
        return name in self._set

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _file(folder: Path, step: int, quantity: str, rank: int) -> Path:
    return folder / f"step{step}-{quantity.replace(' ', '-')}-rank{rank}.safetensors"


def _facts_file(folder: Path, step: int, rank: int) -> Path:
    return folder / f"step{step}-rank{rank}.json"


# ------------------------------------------------------------------------------------------- one file of all tensors


def merged_tensors(folder: Path) -> Path:
    """One file of all that the ranks have written into ``folder``; keys are ``"step0-gradient-rank0/<name>"``."""
    parts = sorted(folder.glob("step*.safetensors"))
    held = {f"{part.stem}/{key}": value for part in parts for key, value in load_file(part).items()}
    for part in parts:
        part.unlink()
    save_file(held, folder / "tensors.safetensors")
    return folder / "tensors.safetensors"


class Tensors:
    """Tensors in a file of :func:`merged_tensors`, each read when asked for; None has none."""

    def __init__(self, file: Path | None) -> None:
        self._file: Any = None if file is None else safe_open(file, framework="pt")
        self._keys = frozenset() if self._file is None else frozenset(self._file.keys())

    def get(self, step: int, quantity: str, rank: int, name: str) -> Tensor | None:
        """Return what a rank had, or rank 0 where that is the same; None where it is not kept."""
        for holder in (rank, 0):
            for mark in ("", _COMPLEX):
                key = f"step{step}-{quantity}-rank{holder}/{mark}{name}"
                if key in self._keys:
                    value: Tensor = self._file.get_tensor(key)
                    return torch.view_as_complex(value) if mark else value
        return None
