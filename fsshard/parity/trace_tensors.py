"""The tensors of a recorded training: the files of its ranks as one safetensors file, and a reader of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from fsshard.parity.recorded import Trace

__all__ = ["Tensors", "merged"]

_COMPLEX = "complex:"


def merged(folder: Path) -> Path:
    """One file of all that the ranks have written into ``folder``; keys are ``"step0-gradient-rank0/<name>"``."""
    parts = sorted(folder.glob("step*.safetensors"))
    held = {f"{part.stem}/{key}": value for part in parts for key, value in load_file(part).items()}
    for part in parts:
        part.unlink()
    save_file(held, folder / "tensors.safetensors")
    return folder / "tensors.safetensors"


class Tensors:
    """Tensors of a trace, each read when asked for."""

    def __init__(self, trace: Trace) -> None:
        self._file: Any = None if trace.tensors is None else safe_open(trace.tensors, framework="pt")
        self._keys = frozenset() if self._file is None else frozenset(self._file.keys())

    def get(self, step: int, quantity: str, rank: int, name: str) -> Tensor | None:
        """What a rank had, or rank 0 where that is the same; None where it is not kept."""
        for holder in (rank, 0):
            for mark in ("", _COMPLEX):
                key = f"step{step}-{quantity}-rank{holder}/{mark}{name}"
                if key in self._keys:
                    value: Tensor = self._file.get_tensor(key)
                    return torch.view_as_complex(value) if mark else value
        return None
