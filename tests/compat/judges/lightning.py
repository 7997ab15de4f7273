"""A pytest plugin that puts a strategy of ours, or Lightning's own DDP, into Lightning's tests; see :mod:`.run`.

``-p tests.compat.judges.lightning`` with ``FSSHARD_JUDGED`` naming an engine, or ``theirs``. Wherever a test says
``"ddp"``, ``"ddp_spawn"`` and the like, ``DDPStrategy(...)``, or leaves the strategy of one device to the Trainer, it
gets that engine.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import lightning.fabric.connector
import lightning.fabric.strategies
import lightning.pytorch.strategies
import lightning.pytorch.trainer.connectors.accelerator_connector
import pytest
import torch
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver

import fsshard.compat.lightning

from .record import ENGINE, RECORD, pytest_runtest_makereport  # noqa: F401

FABRIC, TRAINER = lightning.fabric.strategies.DDPStrategy, lightning.pytorch.strategies.DDPStrategy


class JudgedStrategy(fsshard.compat.lightning.Strategy):
    """With the arguments of Lightning's DDPStrategy, in processes that a test starts too."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(ENGINE, **_named(args), **given)


class JudgedFabricStrategy(fsshard.compat.lightning.FabricStrategy):
    """Likewise."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(ENGINE, **_named(args), **given)


def _named(args: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(("accelerator", "parallel_devices", "cluster_environment"), args, strict=False))


def pytest_configure(config: pytest.Config) -> None:
    """Substitute, before a test module is imported."""
    config.addinivalue_line("markers", "flaky: of a plugin that Lightning's tests have and need not")
    # Lightning's watcher of the processes it has started, which looks every five seconds, is waited for by each test.
    _ChildProcessObserver.__init__.__defaults__ = (0.05,)
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    trainer = TRAINER if ENGINE == "theirs" else JudgedStrategy
    fabric = FABRIC if ENGINE == "theirs" else JudgedFabricStrategy
    for registry, theirs, judged in (
        (lightning.pytorch.strategies.StrategyRegistry, TRAINER, trainer),
        (lightning.fabric.strategies.STRATEGY_REGISTRY, FABRIC, fabric),
    ):
        for entry in registry.values():
            if entry["strategy"] is theirs:
                entry["strategy"] = judged
    for module, connector, judged in (
        (lightning.pytorch.strategies, lightning.pytorch.trainer.connectors.accelerator_connector, trainer),
        (lightning.fabric.strategies, lightning.fabric.connector, fabric),
    ):
        setattr(module, "DDPStrategy", judged)  # noqa: B010
        _choose_ours(connector)
        RECORD.watch(judged, "__init__")


def _choose_ours(connector: Any) -> None:
    """One CPU gets it too, where Lightning would take a strategy without processes."""
    kind = connector._AcceleratorConnector if hasattr(connector, "_AcceleratorConnector") else connector._Connector
    choose = kind._choose_strategy

    @functools.wraps(choose)
    def chosen(self: Any) -> Any:
        found = choose(self)
        one = type(found).__name__ == "SingleDeviceStrategy" and found.root_device.type == "cpu"
        return "ddp" if one else found

    kind._choose_strategy = chosen
