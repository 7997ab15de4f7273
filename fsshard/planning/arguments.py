"""Types of the arguments of ``wrap()`` and ``plan()``, so that editors complete them and type checkers look at them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

import torch
from torch import nn

from fsshard.planning.policies import Checkpointing, Precision

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import (
        BackwardPrefetch,
        CPUOffload,
        MixedPrecision,
        MixedPrecisionPolicy,
        OffloadPolicy,
        ShardingStrategy,
    )
    from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy

# Texts, since they name classes of torch that only a script which uses them has to import.
BackendName: TypeAlias = Literal["auto", "none", "ddp", "fairscale", "fsdp", "fsdp2"] | str
Blocks: TypeAlias = (
    "type[nn.Module] | Collection[type[nn.Module] | str] | Callable[..., Any] | ModuleWrapPolicy | CustomPolicy"
)
WrapPolicy: TypeAlias = "Literal['auto'] | int | Blocks | None"
PrecisionChoice: TypeAlias = (
    "Literal['fp32', 'bf16', 'fp16'] | str | Precision | MixedPrecision | MixedPrecisionPolicy | None"
)
Recomputed: TypeAlias = "bool | Blocks | Checkpointing | None"
Strategy: TypeAlias = (
    "Literal['FULL_SHARD', 'SHARD_GRAD_OP', 'NO_SHARD', 'HYBRID_SHARD'] | str | ShardingStrategy | None"
)
Initialiser: TypeAlias = "Literal['reset_parameters'] | Callable[[nn.Module], None] | None"
IgnoredStates: TypeAlias = "Collection[nn.Module | nn.Parameter] | None"
Replicated: TypeAlias = "Mapping[Any, DeviceMesh | tuple[DeviceMesh, str]] | None"
Sharded: TypeAlias = "Mapping[Any, DeviceMesh | tuple[DeviceMesh, int]] | None"


class EngineOptions(TypedDict, total=False):
    """Options of engines, and arguments of torch's wrappers by their own names (docs/torch-arguments.md)."""

    implementation: Literal["real", "native"]
    fast_collectives: bool
    merge_below: int
    reshard_after_forward: bool | int
    backward_prefetch: BackwardPrefetch | str | None
    forward_prefetch: bool
    limit_all_gathers: bool
    bucket_cap_mb: float | None
    gradient_as_bucket_view: bool
    static_graph: bool
    fsdp_auto_wrap_policy: WrapPolicy
    mesh: DeviceMesh | None
    mp_policy: PrecisionChoice
    init_sync: bool
    device_id: torch.device | int | None
    device_ids: list[torch.device | int] | None
    output_device: torch.device | int | None
    process_group: ProcessGroup | None
    offload_policy: OffloadPolicy | None
    ignored_modules: Collection[nn.Module] | None
    ignored_parameters: Collection[nn.Parameter] | None
    ignored_params: Collection[nn.Parameter] | None
    use_orig_params: bool
    shard_placement_fn: None
    dim: int


class WrapSettings(EngineOptions, total=False):
    """Keyword arguments of ``wrap()``."""

    backend: BackendName
    auto_wrap_policy: WrapPolicy
    mixed_precision: PrecisionChoice
    activation_checkpointing: Recomputed
    sharding_strategy: Strategy
    cpu_offload: bool | CPUOffload
    device_mesh: DeviceMesh | None
    device: torch.device | str | None
    sync_module_states: bool
    find_unused_parameters: bool
    broadcast_buffers: bool
    param_init_fn: Initialiser
    compile: bool | Mapping[str, Any]
    replicated: Replicated
    sharded: Sharded
    ignored_states: IgnoredStates
