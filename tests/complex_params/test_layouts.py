"""Parts along other mesh dimensions, and the whole of them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fsshard.complex_params.layouts import DTensorLayout, HandSplit, Shared
from tests.on_ranks import on_ranks

SHAPE = (5, 4)  # five rows are no two equal parts


def whole(dtype: torch.dtype) -> Tensor:
    return torch.randn(SHAPE, dtype=dtype, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16])
@on_ranks()
def test_parts_and_wholes(dtype: torch.dtype) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    group, value = mesh.get_group(), whole(dtype)
    cases = []
    for placed in (Shard(0), Shard(1), Replicate()):
        held = distribute_tensor(value, mesh, [placed])
        layout = DTensorLayout(mesh, (placed,), held.shape, held.stride())
        cases.append((layout, held.to_local(), int(placed.is_shard())))
        assert torch.equal(layout.as_dtensor(held.to_local()).full_tensor(), value)  # type: ignore[attr-defined]
    rank = dist.get_rank()
    cases.append((HandSplit(group, 1), value.chunk(2, 1)[rank], 1))
    cases.append((Shared(group), value, 0))
    for layout, part, divided in cases:
        assert torch.equal(layout.part(value), part)
        found = layout.whole(part)
        assert torch.equal(found, value) and found.dtype == dtype and layout.whole_shape(part.shape) == SHAPE
        assert (len(layout.divides), len(layout.shares)) == (divided, 1 - divided)
        assert all(dist.get_process_group_ranks(g) == [0, 1] for g in (*layout.divides, *layout.shares))
    beside = HandSplit(group, None)
    stacked = beside.whole(value + rank)
    assert torch.equal(stacked, torch.stack([value, value + 1])) and beside.whole_shape(value.shape) == (2, *SHAPE)
    assert torch.equal(beside.part(stacked), value + rank)
    if dtype.is_complex:  # pairs of numbers that torch has no complex dtype for
        held = distribute_tensor(value, mesh, [Shard(0)])
        layout = DTensorLayout(mesh, (Shard(0),), held.shape, held.stride())
        pairs = torch.view_as_real(value)
        assert torch.equal(layout.whole(torch.view_as_real(held.to_local())), pairs)
        assert torch.equal(layout.part(pairs), torch.view_as_real(held.to_local()))
