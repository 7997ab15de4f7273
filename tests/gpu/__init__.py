"""Tests that need a GPU: `make gpu` runs them on a machine with one or more, and writes build/gpu-report.md.

Elsewhere each module is skipped with its reason. tests/stub_cuda takes the same ways without a GPU, and looks at no
number.
"""

from __future__ import annotations

import torch

__all__ = ["lacking"]


def lacking(gpus: int) -> str:
    """Why tests that need so many GPUs cannot run here; empty if they can."""
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return (
        ""
        if found >= gpus
        else f"needs {gpus} GPU{'s' if gpus > 1 else ''}, and torch sees {found}: run `make gpu` there"
    )
