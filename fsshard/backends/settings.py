"""Settings that wrap() passes to a backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from fsshard.model.compiling import Compilation
from fsshard.model.ignored import Ignored
from fsshard.model.meta import ValueSource
from fsshard.parallel.model_mesh import ModelMesh
from fsshard.planning.plan import Plan
from fsshard.planning.policies import Precision

# Options about when gathers run, how buckets lie and how they travel. They change no number, and an engine that has
# no such gathers or buckets does what they ask for by having none: every backend takes them.
HINTS = frozenset(
    {
        *("backward_prefetch", "forward_prefetch", "limit_all_gathers"),
        *("bucket_cap_mb", "gradient_as_bucket_view", "static_graph"),
        "fast_collectives",
    }
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of :func:`fsshard.wrap`, checked and in one form.

    Attributes:
        plan: the units and ties to execute.
        group: ranks that share the work; None on one process without a process group.
        mesh: the device mesh handed in, or None.
        device: where the model is.
        sharding_strategy: name of torch's ``ShardingStrategy``, or None for the backend's own.
        cpu_offload: keep shards in host memory between steps.
        find_unused_parameters: a parameter may stay without gradient, on all ranks or on some.
        options: what else the backend's engine takes.
        source: gives a model on the meta device its numbers; None for a real one.
        compilation: how units are compiled; None where they are not.
        model_mesh: the mesh dimensions other than data; None where there are none.
        ignored: parameters of the model that the engine does not have.
        about: whose engine it is, where there are several of one name; filled by the backend's ``check``.
    """

    plan: Plan
    group: dist.ProcessGroup | None
    device: torch.device
    mesh: Any = None
    sharding_strategy: str | None = None
    cpu_offload: bool = False
    find_unused_parameters: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    source: ValueSource | None = None
    compilation: Compilation | None = None
    model_mesh: ModelMesh | None = None
    ignored: Ignored = field(default_factory=Ignored)
    about: str = ""

    @property
    def everyone(self) -> dist.ProcessGroup | None:
        """All ranks of the training: ``group``, and those along other mesh dimensions."""
        return self.group if self.model_mesh is None else self.model_mesh.group

    @property
    def knows_all_ranks(self) -> bool:
        """Return whether all ranks are data-parallel, or ``wrap`` knows what the others do."""
        given = self.model_mesh is not None or self.mesh is None or self.group is None
        return given or self.world_size == dist.get_world_size()

    @property
    def all_ranks(self) -> int:
        """Return how many ranks train: those along other mesh dimensions too."""
        return 1 if self.everyone is None else self.everyone.size()

    @property
    def overall_rank(self) -> int:
        """This process's rank among all of them."""
        return 0 if self.everyone is None else self.everyone.rank()

    @property
    def is_first(self) -> bool:
        """Return whether this process is the first of all ranks of the training."""
        return self.everyone is None or self.everyone.rank() == 0

    @property
    def precision(self) -> Precision:
        """The mixed-precision policy."""
        return self.plan.precision

    @property
    def has_replicas(self) -> bool:
        """Return whether the mesh is one of replicas that are sharded within."""
        return self.mesh is not None and self.mesh.ndim == 2

    @property
    def shards(self) -> int:
        """Ranks that divide one copy where parameters are divided."""
        return int(self.mesh.shape[1]) if self.has_replicas else self.world_size

    @property
    def world_size(self) -> int:
        """Ranks that share the work."""
        return self.group.size() if self.group is not None else 1

    @property
    def rank(self) -> int:
        """This process's rank within the group."""
        return self.group.rank() if self.group is not None else 0
