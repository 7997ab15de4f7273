"""Ranks that run already, for Lightning, which would start its own."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment

from fsshard.errors import ConfigurationError

__all__ = ["Launched", "check_devices", "launched"]


class Launched(ClusterEnvironment):
    """The ranks of the process group that there is, such as :func:`fsshard.launch`'s."""

    @property
    def creates_processes_externally(self) -> bool:
        """Return True: they run already."""
        return True

    @property
    def main_address(self) -> str:
        """Return the launcher's address; nobody needs it, for the group is made."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """Return the launcher's port; nobody needs it."""
        return int(os.environ.get("MASTER_PORT", "0"))

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


def launched() -> Launched | None:
    """Return those ranks, if there are any, and no launcher that Lightning knows itself."""
    return Launched() if Launched.detect() and "TORCHELASTIC_RUN_ID" not in os.environ else None


def check_devices(strategy: Any) -> None:
    """Raise if a strategy does not have a device for every rank that runs already.

    Raises:
        ConfigurationError: it has not; on every rank.
    """
    if not isinstance(strategy.cluster_environment, Launched):
        return
    nodes, devices, ranks = strategy.num_nodes, strategy.num_processes, dist.get_world_size()
    if nodes * devices != ranks:
        raise ConfigurationError(
            f"devices={devices} with num_nodes={nodes}: {ranks} ranks run already; pass devices={ranks // nodes}, the "
            "number of ranks on a node"
        )
