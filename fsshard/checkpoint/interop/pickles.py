"""What stands for classes in other programs' pickles, and the error for those that would run code."""

from __future__ import annotations

import pathlib
import pickle
import re
import types
from pathlib import Path
from typing import Any

from fsshard.errors import CheckpointError


class Inert:
    """Stands for an object of DeepSpeed's in a file: takes anything, and does nothing."""

    def __init__(self, *_: Any) -> None: ...


def stand_in(name: str) -> Any:
    """Return what stands for a harmless class of a file; a WindowsPath cannot be made elsewhere."""
    if name in ("pathlib.PosixPath", "pathlib.WindowsPath"):
        return getattr(pathlib, f"Pure{name[8:]}")
    return Inert if name.startswith("deepspeed.") else None


class Unpickler(pickle.Unpickler):
    """Reads a trusted file, on any system and without DeepSpeed."""

    def find_class(self, module: str, name: str) -> Any:
        return stand_in(f"{module}.{name}") or super().find_class(module, name)


UNPICKLING: Any = types.SimpleNamespace(**vars(pickle) | {"Unpickler": Unpickler})


def needs_trust(path: Path, error: pickle.UnpicklingError) -> CheckpointError:
    """Return the error for what only an unrestricted unpickler reads."""
    unknown = re.search(r"(?:GLOBAL |^)(\w+\.[\w.]+)", str(error))
    reason = unknown[1] if unknown else str(error).strip()[-200:]
    return CheckpointError(
        f"{path} holds more than tensors and plain values ({reason}): reading it runs whatever "
        "code the file asks for. Pass trust_pickle=True (--trust-pickle) if you know who wrote it"
    )
