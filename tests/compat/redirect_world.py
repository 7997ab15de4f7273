"""A small world for the redirect: a front to serve, a library to keep out, and an fsshard that brings no torch.

The redirect does not depend on what it serves. With these, its scripts start in a tenth of a second each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import fsshard

T = TypeVar("T")

FRONT = "standin"

# fsshard/__init__.py imports torch; its parts that the redirect needs do not. Also shows that a sitecustomize of the
# user's own is run, because this one stands behind ours.
LIGHT_FSSHARD = f"""
import sys, types
light = types.ModuleType("fsshard")
light.__path__ = [{str(Path(fsshard.__file__).parent)!r}]
sys.modules["fsshard"] = light
"""

# FairScale's shape: fairscale.nn.wrap is a function and a package, old paths, absolute imports among its parts.
LIBRARY = {
    "__init__.py": "from . import nn, optim\n__version__ = '0.4.13'",
    "nn/__init__.py": "from .checkpoint import checkpoint_wrapper\nfrom .wrap import auto_wrap, wrap",
    "nn/checkpoint.py": "def checkpoint_wrapper(module, offload_to_cpu=False): return module",
    "nn/wrap/__init__.py": "from .auto_wrap import auto_wrap, wrap",
    "nn/wrap/auto_wrap.py": "def wrap(module): return module\ndef auto_wrap(module): return module",
    "optim/__init__.py": "from .oss import OSS",
    "optim/oss.py": "class OSS: pass",
}
# How a module of the front ends.
REFUSES = "\nfrom fsshard.compat.not_served import missing_from\n__getattr__ = missing_from(__name__, 'standin')"
# What only the library to keep out has.
MORE = {
    "nn/model_parallel/__init__.py": "from .layers import Column\nfrom . import layers, late",
    "nn/model_parallel/layers.py": """
from fairscale.internal.tools import helper
class Column:
    library = helper()
    @staticmethod
    def oss():
        from fairscale.optim.oss import OSS    # while it runs, long after its import
        return OSS
""",
    "nn/model_parallel/late.py": "from ...optim import OSS",
    "nn/pipe/__init__.py": "from fairscale.nn.model_parallel import Column\nclass Pipe: column = Column",
    "nn/moe.py": "class MOELayer: pass",
    "nn/extra.py": "",
    "internal/__init__.py": "",
    "internal/tools.py": "import fairscale.optim.oss\ndef helper(): return fairscale.optim.oss.OSS.library",
}


@dataclass(frozen=True)
class World:
    """Folders on the path of scripts, and how to run one."""

    folder: Path

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def run(
        self, *arguments: str, light: bool = True, library: bool = True, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Python in this world; ``library``: with the stand-in for the real FairScale in place of an installed one."""
        parts = [self.folder / "front"]
        parts += [self.folder / "light"] if light else []
        parts += [self.folder / "library"] if library else []
        variables = {
            **{name: value for name, value in os.environ.items() if name not in ("RANK", "SLURM_PROCID")},
            "PYTHONPATH": os.pathsep.join(map(str, parts)),
            "OMP_NUM_THREADS": "1",
            # How a process tells those below what to serve; it is fsshard.compat.fairscale without.
            "FSSHARD_REDIRECT": f"{FRONT}@{sys.prefix}",
            **environment,
        }
        return subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            env=dict(variables),
            cwd=self.folder,
            timeout=300,
            check=False,
        )

    def facts(self, name: str, *before: str, **options: Any) -> Any:
        """Run a script that prints one JSON object last."""
        done = self.run(*before, str(self.folder / name), **options)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


def build(folder: Path) -> World:
    world = World(folder)
    world.write("light/sitecustomize.py", LIGHT_FSSHARD)
    for name, text in LIBRARY.items():
        ours = text.replace("class OSS: pass", "class OSS: library = 'front'") + REFUSES
        world.write(f"front/{FRONT}/{name}", ours)
        world.write(
            f"library/fairscale/{name}", text.replace("class OSS: pass", "class OSS: library = 'the real library'")
        )
    for name, text in MORE.items():
        world.write(f"library/fairscale/{name}", text)
    return world


def together(*runs: Callable[[], T]) -> list[T]:
    """Return the results of several runs, two at a time: each mostly imports torch, which keeps one core busy."""
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda run: run(), runs))
