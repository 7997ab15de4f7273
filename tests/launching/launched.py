"""Helpers for tests of launching: environments, scripts, and functions that ranks run."""

from __future__ import annotations

import os
from pathlib import Path

from fsshard.launching.context import Context

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
CPU = {"CUDA_VISIBLE_DEVICES": ""}
PATIENCE = 100  # seconds; a hang becomes a failure


def listeners(port: int) -> list[str]:
    """The addresses on which somebody of this machine waits for connections to the port, as the kernel writes them."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return [line[1].partition(":")[0] for line in lines if line[3] == "0A" and line[1].endswith(f":{port:04X}")]


ON_LOOPBACK = "0100007F"


def nested(ctx: Context, word: str) -> tuple[int, str]:
    return ctx.rank, word


def environment(**values: str) -> dict[str, str]:
    """This environment without any launcher's variables, and with those given."""
    kept = {k: v for k, v in os.environ.items() if k not in NAMES and not k.startswith(("SLURM_", "TORCHELASTIC_"))}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**kept, **CPU, "PYTHONPATH": path, **values}


def script(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(text)
    return path
