"""Facts that the last digits of a training may depend on: versions, the processor, threads, math libraries, commit."""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fsshard.recipes.recipe import Recipe

__all__ = ["changes", "commit_of", "environment", "told"]

PACKAGES = ("fsshard", "fairscale", "numpy", "neuraloperator", "transformers")
VARIABLES = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
TOLD = ("name", "seed", "hyper", "precision", "activation_checkpointing", "accumulate", "no_sync", "clip", "settings")


def environment(device: str = "cpu") -> dict[str, str]:
    """Return the environment of this process, each fact as a text; to be asked on a rank, which has its own threads."""
    built = [line.strip(" -") for line in torch.__config__.show().splitlines()]
    libraries = "; ".join(line for line in built if "Math Kernel Library" in line or "MKL-DNN" in line)
    found = {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": _processor(),
        "kernels": str(torch.backends.cpu.get_cpu_capability()),
        "math libraries": libraries or "none",
        "threads": str(torch.get_num_threads()),
        "float32 matmul": torch.get_float32_matmul_precision(),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
    }
    if device != "cpu":
        found["device"] = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    found |= {name: os.environ[name] for name in VARIABLES if name in os.environ}
    return found | {name: version for name in PACKAGES if (version := _version(name))}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    facts: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    named = facts.get("model name", "") or platform.processor() or "unknown"
    kind = [facts[key] for key in ("cpu family", "model") if key in facts]
    return f"{named} (family {kind[0]}, model {kind[1]})" if len(kind) == 2 else named


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def told(recipe: Recipe) -> dict[str, str]:
    """Return what a recipe says of itself, as texts."""
    found = {name: repr(getattr(recipe, name)) for name in TOLD if name != "name"}
    return {"name": recipe.name, "optimizer": recipe.optimizer.__qualname__, **found}


def commit_of(recipe: Recipe) -> str:
    """Return the commit of the recipe's code, with ``+`` where files are changed; "" if there is none, or no git."""
    build: Any = getattr(recipe.build, "func", recipe.build)
    try:
        folder = Path(inspect.getfile(build)).resolve().parent
    except (TypeError, OSError):  # a class of C, a function of an interactive session
        return ""
    head = _git(folder, "rev-parse", "HEAD")
    return f"{head}+" if head and _git(folder, "status", "--porcelain", "--untracked-files=no") else head


def _git(folder: Path, *words: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return ``"torch 2.13.0 -> 2.15.0"`` for each fact that is another."""
    names = [*before, *(name for name in now if name not in before)]
    pairs = [(name, before.get(name, "none"), now.get(name, "none")) for name in names]
    return [f"{name} {old or 'unknown'} -> {new or 'unknown'}" for name, old, new in pairs if old != new]
