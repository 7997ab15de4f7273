"""The page that ``benchmarks/run_all.py`` writes: a head with machine and versions, and a section per benchmark.

A page can be read back, so that some benchmarks can be run again and the others' sections stay as they are.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import platform
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

__all__ = [
    "PACKAGES",
    "head",
    "machine",
    "page",
    "processor",
    "section",
    "sections_of",
    "shown",
    "versions",
    "without_paths",
]

PACKAGES = (
    "fsshard",
    "torch",
    "fairscale",
    "neuraloperator",
    "tensorly",
    "transformers",
    "accelerate",
    "lightning-fabric",
)
MARK = re.compile(r"^<!-- benchmark: (\S+) -->$", re.MULTILINE)

INTRODUCTION = """# Benchmarks

`make bench` wrote this page; [Benchmarks](../benchmarks.md) has the ratios for users. Each section names its
command and the CPU. Variants are compared in alternating rounds, in one process per rank, and a ratio is a median
over the rounds: trust ratios, not milliseconds. If both times are given, CPU time of the process is less disturbed
by other work on the machine than time by the clock.
"""


def machine() -> str:
    """Cores, memory, system and GPUs; no names of hosts or users. The CPU stands in each section."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parts = [f"{cores} cores"]
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        parts.append(f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB of memory")
    parts.append(f"{platform.system()} {platform.machine()}")
    return ", ".join([*parts, _gpus()])


def processor(path: str = "/proc/cpuinfo") -> str:
    """The CPU's name, with family and model: makers sell several under one name."""
    text = Path(path).read_text() if Path(path).exists() else ""
    found = dict(re.findall(r"^(model name|cpu family|model)\s*:\s*(.+?)\s*$", text, re.MULTILINE))
    name: str = found.get("model name") or platform.processor() or "an unknown processor"
    return f"{name} (family {found['cpu family']}, model {found['model']})" if len(found) == 3 else name


def _gpus() -> str:
    import torch

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ", ".join(f"{len(list(same))} x {name}" for name, same in itertools.groupby(names)) or "no GPU"


def versions() -> str:
    """Python's, and those of the packages that are installed."""
    found = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} not installed")
    return ", ".join(found)


def head() -> str:
    """Everything above the first section."""
    return f"{INTRODUCTION}\n* Machine: {machine()}.\n* Versions: {versions()}.\n"


def without_paths(text: str, root: Path) -> str:
    """``text`` without where things lie on this machine."""
    places = {str(root): ".", sys.prefix: "<venv>", sys.base_prefix: "<python>", str(Path.home()): "~"}
    places[tempfile.gettempdir()] = "<tmp>"
    for place, name in sorted(places.items(), key=lambda item: -len(item[0])):
        if len(place) > 1:
            text = re.sub(re.escape(place) + r"(?=/|\b)", name, text)
    return text


def shown(output: str) -> str:
    """Write what a benchmark printed as Markdown: its tables as they are, the rest in fixed width."""
    blocks: list[str] = []
    for table, group in itertools.groupby(output.strip("\n").splitlines(), key=lambda line: line.startswith("|")):
        text = "\n".join(line.rstrip() for line in group).strip("\n")
        if text:
            blocks.append(text if table else f"```\n{text}\n```")
    return "\n\n".join(blocks)


def section(name: str, title: str, lines: list[str], output: str) -> str:
    """One section: a mark to find it by, its title, lines of explanation, and what was printed."""
    parts = [f"<!-- benchmark: {name} -->\n## {title}", *lines, shown(output)]
    return "\n\n".join(part for part in parts if part) + "\n"


def sections_of(text: str) -> tuple[str, dict[str, str]]:
    """A page's head, and its sections by name."""
    start, *rest = MARK.split(text)
    bodies = zip(rest[::2], rest[1::2], strict=True)
    return start, {name: f"<!-- benchmark: {name} -->\n{body.strip()}\n" for name, body in bodies}


def page(start: str, sections: Mapping[str, str]) -> str:
    """The whole page."""
    return "\n".join([start, *sections.values()])
