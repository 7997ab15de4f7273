"""DTensor parameters, stored as parts and seen as DTensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsshard.complex_params.local_parts import check_dtensors, dtensor_parameters, has_dtensors, keep_local_parts
from fsshard.errors import ModelError, StaleParameter


class Net(nn.Module):
    """Two places of one DTensor, a complex one, a turned one, one without dimensions, and a plain parameter."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.plain = nn.Linear(4, 4)
        self.first, self.tied = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.first.weight = self.tied.weight = _dtensor(torch.randn(4, 4), mesh, Shard(0))
        self.mixed = _dtensor(torch.randn(3, 4, dtype=torch.complex64), mesh, Shard(1))
        self.turned = _dtensor(torch.randn(6, 4).t(), mesh, Replicate())
        self.scalar = _dtensor(torch.tensor(2.0), mesh, Replicate())


def _dtensor(value: Tensor, mesh: DeviceMesh, placed: Any) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(value, mesh, [placed]))


def job_kept() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    net = Net(mesh)
    assert has_dtensors(net) and not has_dtensors(net.plain)
    before = {name: parameter for name, _, _, parameter in dtensor_parameters(net)}
    assert list(before) == ["mixed", "turned", "scalar", "first.weight", "tied.weight"]
    state = {name: value.clone() for name, value in net.state_dict().items()}
    old = net.first.weight
    undo = keep_local_parts(net)
    stored = dict(net.named_parameters())
    assert not any(isinstance(parameter, DTensor) for parameter in stored.values()), "engines see plain tensors"
    assert stored["mixed__real"].shape == (3, 2, 2) and stored["scalar__real"].shape == (1,)
    assert all(parameter.is_contiguous() for parameter in stored.values())
    for name, value in before.items():  # over the same memory, with the same strides
        seen = _get(net, name)
        assert isinstance(seen, DTensor) and seen.placements == value.placements and seen.stride() == value.stride()
        assert torch.equal(seen.full_tensor(), value.full_tensor())
        assert seen.to_local().data_ptr() == value.to_local().data_ptr()
    assert net.first.weight.to_local().data_ptr() == net.tied.weight.to_local().data_ptr()
    assert list(net.state_dict()) == list(state)
    assert all(isinstance(value, DTensor) for name, value in net.state_dict().items() if not name.startswith("plain"))
    net.load_state_dict({name: value * 2 for name, value in state.items()})
    assert torch.equal(_get(net, "mixed").full_tensor(), state["mixed"].full_tensor() * 2)
    (_get(net, "first.weight").full_tensor().sum() + _get(net, "mixed").full_tensor().real.sum()).backward()
    assert torch.equal(stored["first.weight__real"].grad, torch.ones(2, 4))
    with pytest.raises(StaleParameter, match="was captured before fsshard replaced it"):
        old.full_tensor().sum().backward()
    undo()
    assert dict(net.named_parameters())["first.weight"] is old and type(net) is Net
    old.full_tensor().sum().backward()
    assert isinstance(old.grad, DTensor)


def _get(net: nn.Module, name: str) -> Any:
    owner, _, attribute = name.rpartition(".")
    return getattr(net.get_submodule(owner), attribute)


def test_kept_as_parts_and_put_back(ranks: Any) -> None:
    ranks.run(job_kept, 2)


def job_refused() -> None:
    from torch.distributed.tensor.placement_types import Partial

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    net = nn.Linear(4, 4)
    net.weight = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Partial()], run_check=False))
    with pytest.raises(ModelError, match="'weight' is a DTensor with placement Partial"):
        check_dtensors(net)
    hooked = nn.Linear(4, 4)
    hooked.weight = _dtensor(torch.ones(4, 4), mesh, Shard(0))
    hooked.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(ModelError, match="has gradient hooks"):
        check_dtensors(hooked)

    class Other(DTensor):
        """As PhysicsNeMo's ShardTensor."""

    strange = nn.Linear(4, 4)
    strange.weight = _dtensor(torch.ones(4, 4), mesh, Shard(0))
    strange.weight.__class__ = Other
    with pytest.raises(ModelError, match=r"is a Other: only torch's own DTensor is taken"):
        check_dtensors(strange)


def test_refused(ranks: Any) -> None:
    ranks.run(job_refused, 2)
