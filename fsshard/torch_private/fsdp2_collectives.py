"""The classes that ``set_custom_all_gather`` and ``set_custom_reduce_scatter`` of FSDP2 take subclasses of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsshard.torch_private.registry import Area

AREA = Area(
    "fsdp2_collectives", otherwise="backend 'fsdp2' on gloo but by torch's own collectives: fast_collectives=False"
)

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
else:
    AllGather = AREA.take(
        "torch.distributed.fsdp._fully_shard._fsdp_api:AllGather", use="gathers a unit by other means"
    )
    ReduceScatter = AREA.take(
        "torch.distributed.fsdp._fully_shard._fsdp_api:ReduceScatter", use="reduces a unit's gradients by other means"
    )
