"""Ranks that run already, for Lightning, which would start its own; and what both strategies share about them."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

from fsshard.errors import ConfigurationError

__all__ = ["Launched", "WholeLauncher", "check_devices", "lightnings"]

LIGHTNINGS = (
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision",
    "precision_plugin",
    "process_group_backend",
    "timeout",
)
"""Arguments of Lightning's DDP strategies; the others of ours are those of :func:`fsshard.wrap`."""


class Launched(ClusterEnvironment):
    """The ranks of the process group that there is, such as :func:`fsshard.launch`'s."""

    creates_processes_externally = True
    # The process group is there: nobody asks the address, and nobody can set the numbers.
    main_address = property(lambda self: os.environ.get("MASTER_ADDR", "127.0.0.1"))
    main_port = property(lambda self: int(os.environ.get("MASTER_PORT", "0")))

    @staticmethod
    def detect() -> bool:
        """Return whether there is a process group."""
        return dist.is_initialized()

    def world_size(self) -> int:
        """Return the size of the process group."""
        return dist.get_world_size()

    def set_world_size(self, size: int) -> None:
        """Do nothing: the process group fixes this value."""

    def global_rank(self) -> int:
        """Return the rank in the process group."""
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the process group fixes this value."""

    def local_rank(self) -> int:
        """Return the launcher's local rank; on one machine the rank."""
        return int(os.environ.get("LOCAL_RANK", dist.get_rank()))

    def node_rank(self) -> int:
        """Return the launcher's number of this node."""
        return int(os.environ.get("GROUP_RANK", os.environ.get("NODE_RANK", "0")))


def lightnings(settings: dict[str, Any]) -> dict[str, Any]:
    """Take Lightning's own arguments out of ``settings``; ranks that run already are its environment."""
    found = {name: settings.pop(name) for name in LIGHTNINGS if name in settings}
    # torchrun is a launcher that Lightning knows itself.
    if found.get("cluster_environment") is None and Launched.detect() and "TORCHELASTIC_RUN_ID" not in os.environ:
        found["cluster_environment"] = Launched()
    return found


def check_devices(strategy: Any) -> None:
    """Raise ConfigurationError if a strategy does not have a device for every rank that runs already; on every rank."""
    if not isinstance(strategy.cluster_environment, Launched):
        return
    nodes, devices, ranks = strategy.num_nodes, strategy.num_processes, dist.get_world_size()
    if nodes * devices != ranks:
        raise ConfigurationError(
            f"devices={devices} with num_nodes={nodes}: {ranks} ranks run already; pass devices={ranks // nodes}, the "
            "number of ranks on a node"
        )


class WholeLauncher(_MultiProcessingLauncher):
    """Gives the process that has started the ranks whole weights back."""

    def _collect_rank_zero_results(self, trainer: Any, results: Any) -> Any:
        sharded, module = trainer.strategy._sharded, trainer.lightning_module
        if sharded is None:
            return super()._collect_rank_zero_results(trainer, results)
        whole = sharded.state_dict(rank0_only=True, offload_to_cpu=True)  # Lightning asks the module, which has parts
        module.state_dict = lambda: whole
        try:
            return super()._collect_rank_zero_results(trainer, results)
        finally:
            del module.state_dict
