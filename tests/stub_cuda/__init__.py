"""CUDA without a GPU: torch's CUDA build over a runtime that has devices and computes nothing (``cudart.c``).

What the host does is real: wrap, streams, events, the caching allocator, pinned copies, which device a tensor is on. No
number is right, so nothing here looks at one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import torch

__all__ = ["build", "why_not"]


def why_not() -> str:
    """Why these tests cannot run here; empty if they can."""
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if torch.cuda.is_available():
        return "this machine has a GPU, so `make gpu` does this for real"
    return "" if shutil.which("cc") else "no C compiler (cc), which builds the stub of CUDA's runtime"


def build(folder: Path, devices: int = 8) -> dict[str, str]:
    """Build the stub; the environment of a process that runs over it."""
    source = Path(__file__).with_name("cudart.c")
    command = ["cc", "-O1", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", str(source)]
    subprocess.run([*command, "-o", str(folder / "libcuda.so.1")], check=True)
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(folder),
        "LD_PRELOAD": "libcuda.so.1",
        "STUB_CUDA_DEVICES": str(devices),
    }
