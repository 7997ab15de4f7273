"""The public names, and what importing them costs."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import fsshard

NAMES = [
    "AlreadyWrapped",
    "CheckpointError",
    "Checkpointing",
    "ConfigurationError",
    "Context",
    "CorruptCheckpoint",
    "EMA",
    "DoesNotFit",
    "FsshardError",
    "GradScaler",
    "LaunchError",
    "MemoryTracker",
    "MissingExtra",
    "ModelError",
    "OptimizerError",
    "ParityError",
    "Precision",
    "PrecisionError",
    "RankFailed",
    "RankHung",
    "RankMismatch",
    "ShardedModule",
    "ShardedOptimizer",
    "StateDictError",
    "Throughput",
    "UnknownBackend",
    "UnsupportedByBackend",
    "__version__",
    "build_optimizer",
    "export",
    "checkpoint_blocks",
    "clip_grad_norm_",
    "data_rank",
    "estimate",
    "init",
    "join",
    "latest",
    "launch",
    "load",
    "lora",
    "plan",
    "register_forward_method",
    "save",
    "tensorfy",
    "trace",
    "tune",
    "untensorfy",
    "leaf_samples",
    "wait_for_saves",
    "wrap",
]


def test_names_are_pinned() -> None:
    assert sorted(fsshard.__all__) == sorted(NAMES) and len(NAMES) <= 50
    assert all(hasattr(fsshard, name) for name in NAMES)


def test_every_error_is_an_fsshard_error() -> None:
    kinds = [
        value for value in vars(fsshard.errors).values() if isinstance(value, type) and issubclass(value, Exception)
    ]
    assert kinds and all(issubclass(kind, fsshard.FsshardError) for kind in kinds)


def test_import_brings_torch_and_nothing_heavier() -> None:
    heavy = [
        "fairscale",
        "transformers",
        "neuralop",
        "tltorch",
        "matplotlib",
        "rich",
        "scipy",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "fsshard.simulation.simulation",
        "fsshard.simulation.tracking",
        "fsshard.checkpoint.saving",
        "fsshard.parity",
    ]
    code = (
        "import torch, sys; before = set(sys.modules); import fsshard; "
        "print([m for m in sys.modules if m.startswith('fsshard.sharded') or m == 'fsshard.wrapping']); "
        "fsshard.launch, fsshard.wrap, fsshard.build_optimizer; "
        f"print([m for m in {heavy} if m in sys.modules and m not in before]); "
        "sys.modules['fairscale'] = None; import fsshard.compat.fairscale as f; "
        "print(f.nn.checkpoint.checkpoint_activations.__name__, f.nn.wrap.__name__, "
        "'torch.distributed.fsdp' in sys.modules); "
        "import fsshard.backends as b; b.backend_names(); fsshard.wrap(torch.nn.Linear(2, 2), backend='none'); "
        "print([path for path in b.registry._OURS.values() if path.partition(':')[0] in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "[]",
        "[]",
        "fsshard.compat.fairscale.nn.checkpoint.checkpoint_activations wrap False",
        "['fsshard.backends.none:SingleBackend']",
    ]


def test_what_is_imported_later_is_there_and_is_itself() -> None:
    for name, module in fsshard._LATER.items():
        assert getattr(fsshard, name) is getattr(importlib.import_module(module), name)
    for room in fsshard._ROOMS:
        assert getattr(fsshard, room) is importlib.import_module(f"fsshard.{room}")
    assert set(fsshard.__all__) <= set(dir(fsshard))
    with pytest.raises(AttributeError, match="module 'fsshard' has no attribute 'lode'"):
        fsshard.lode  # noqa: B018


def test_compat_is_part_of_the_package() -> None:
    assert importlib.import_module("fsshard.compat").__name__ == "fsshard.compat"
