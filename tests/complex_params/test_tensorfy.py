"""Complex parameters stored as real ones: the model cannot tell, and neither can its user."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Partial

from fsshard import ModelError, tensorfy, untensorfy
from fsshard.complex_params.flattened import Flattened
from fsshard.complex_params.slots import ModuleTable, parameter_slots
from fsshard.complex_params.tensorfy import check_dtensors, dtensor_parameters, has_dtensors, keep_local_parts
from fsshard.errors import StaleParameter
from tests.complex_params.training import equal, train, weights
from tests.on_ranks import on_ranks
from tests.zoo import COMPLEX, ZOO

pytestmark = pytest.mark.filterwarnings("ignore:Complex modules are a new feature under active development")


@pytest.mark.parametrize("name", COMPLEX)
def test_training_is_bit_equal(name: str) -> None:
    native, flat = ZOO[name].build(), tensorfy(ZOO[name].build(), scalars=True)
    assert all(p.dim() and not p.is_complex() for p in flat.parameters())
    assert equal(train(native, name), train(flat, name))
    assert equal(weights(native), weights(flat))


@pytest.mark.parametrize("name", ZOO)
def test_real_models_are_left_alone_and_twice_is_once(name: str) -> None:
    model = ZOO[name].build()
    if name in COMPLEX:
        tensorfy(model)
    before = [(type(m), list(m._parameters.items())) for m in model.modules()]
    tensorfy(model)
    after = [(type(m), list(m._parameters.items())) for m in model.modules()]
    for (cls, old), (again, new) in zip(before, after, strict=True):
        assert again is cls and [k for k, _ in old] == [k for k, _ in new]
        assert all(a is b for (_, a), (_, b) in zip(old, new, strict=True))


@pytest.mark.parametrize("name", COMPLEX)
def test_outside_of_the_model_is_as_before(name: str) -> None:
    native, flat = ZOO[name].build(), ZOO[name].build()
    classes = [type(module) for module in flat.modules()]
    tensorfy(flat)
    assert repr(flat) == repr(native)
    for cls, module in zip(classes, flat.modules(), strict=True):
        assert isinstance(module, cls)
        for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
            assert getattr(type(module), attribute) == getattr(cls, attribute)
    names = [name for name, _ in native.named_parameters(remove_duplicate=False)]
    assert [slot.name for slot in parameter_slots(flat)] == names
    assert [slot.name for slot in parameter_slots(native)] == names
    assert [n.removesuffix("__real") for n, _ in flat.named_parameters(remove_duplicate=False)] == names
    for before, after in zip(parameter_slots(native), parameter_slots(flat), strict=True):
        assert after.is_complex == before.is_complex
        assert after.kind.user_shape(after.parameter.shape) == before.parameter.shape
        assert after.kind.user_dtype(after.parameter.dtype) == before.parameter.dtype


@pytest.mark.parametrize("name", COMPLEX)
def test_untensorfy_restores_everything(name: str) -> None:
    model = ZOO[name].build()
    before = [(type(m), list(m._parameters.items())) for m in model.modules()]
    values = copy.deepcopy(weights(model))
    assert untensorfy(tensorfy(model, scalars=True)) is model
    for (cls, parameters), module in zip(before, model.modules(), strict=True):
        assert type(module) is cls
        assert [name for name, _ in parameters] == list(module._parameters)
        assert all(p is module._parameters[name] for name, p in parameters)
        assert not any(hasattr(p, "_fsshard_stale") for _, p in parameters)
    assert equal(values, weights(model))
    train(model, name)  # no hook is left


def test_ties_are_kept() -> None:
    model = tensorfy(ZOO["tied"].build())
    assert model.first.w__real is model.second.w__real
    assert model._parameters["gain__real"] is model._parameters["alias__real"]
    assert len(list(model.parameters())) == len(list(ZOO["tied"].build().parameters())) == 4


def test_lazy_parameters_are_refused() -> None:
    for model in (nn.Sequential(nn.LazyLinear(3)), nn.Sequential(nn.LazyLinear(3, dtype=torch.complex64))):
        with pytest.raises(ModelError, match=r"lazy ones: 0\.weight, .*; run one forward"):
            tensorfy(model)
    model(torch.ones(2, 5, dtype=torch.complex64))
    assert not any(p.is_complex() for p in tensorfy(model).parameters())


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_parameters_with_hooks_are_refused_and_nothing_is_changed(kind: str) -> None:
    model = ZOO["mlp_complex"].build()
    handle = getattr(model[2].weight, kind)(lambda _: None)
    with pytest.raises(ModelError, match=r"'2\.weight' has gradient hooks"):
        tensorfy(model)
    assert not any(isinstance(m, Flattened) for m in model.modules()) and isinstance(model[1].w, nn.Parameter)
    handle.remove()
    tensorfy(model)
    assert isinstance(model[2], Flattened)


def test_what_torch_jit_has_compiled_is_left_alone_or_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))  # nothing to flatten in either
    assert tensorfy(model) is model
    scripted = torch.jit.trace(nn.Linear(2, 2, dtype=torch.complex64), torch.ones(1, 2, dtype=torch.complex64))
    with pytest.raises(ModelError, match=r"parameter '0\.weight' is inside of a torch\.jit module"):
        tensorfy(nn.Sequential(scripted))


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


def _get(net: nn.Module, name: str) -> Any:
    owner, _, attribute = name.rpartition(".")
    return getattr(net.get_submodule(owner), attribute)


@on_ranks()
def test_kept_as_parts_and_put_back() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    net = Net(mesh)
    assert has_dtensors(net.modules()) and not has_dtensors(net.plain.modules())
    before = {name: parameter for name, _, _, parameter in dtensor_parameters(ModuleTable(net).modules)}
    assert list(before) == ["mixed", "turned", "scalar", "first.weight", "tied.weight"]
    state = {name: value.clone() for name, value in net.state_dict().items()}
    old = net.first.weight
    with contextlib.suppress(InterruptedError), keep_local_parts(ModuleTable(net).modules):
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
        assert all(
            isinstance(value, DTensor) for name, value in net.state_dict().items() if not name.startswith("plain")
        )
        net.load_state_dict({name: value * 2 for name, value in state.items()})
        assert torch.equal(_get(net, "mixed").full_tensor(), state["mixed"].full_tensor() * 2)
        (_get(net, "first.weight").full_tensor().sum() + _get(net, "mixed").full_tensor().real.sum()).backward()
        assert torch.equal(stored["first.weight__real"].grad, torch.ones(2, 4))
        with pytest.raises(StaleParameter, match="was captured before fsshard replaced it"):
            old.full_tensor().sum().backward()
        raise InterruptedError
    assert dict(net.named_parameters())["first.weight"] is old and type(net) is Net
    old.full_tensor().sum().backward()
    assert isinstance(old.grad, DTensor)


@on_ranks()
def test_refused() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    net = nn.Linear(4, 4)
    net.weight = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Partial()], run_check=False))
    with pytest.raises(
        ModelError, match=r"'weight' is a DTensor with placements \(Partial.* expected torch's own DTensor with Shard"
    ):
        check_dtensors(ModuleTable(net))
    hooked = nn.Linear(4, 4)
    hooked.weight = _dtensor(torch.ones(4, 4), mesh, Shard(0))
    hooked.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(ModelError, match="has gradient hooks"):
        check_dtensors(ModuleTable(hooked))


@pytest.mark.parametrize("kind", ["parameter", "buffer", "attribute"])
def test_a_name_that_the_storage_would_take_is_refused(kind: str) -> None:
    module = nn.Module()
    module.w = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    own = torch.ones(3)
    module.w__real = {"parameter": nn.Parameter(own), "buffer": nn.Buffer(own), "attribute": own}[kind]
    with pytest.raises(ModelError, match="rename the module's own 'w__real'"):
        tensorfy(module)
    assert module.w.dtype is torch.complex64 and torch.equal(module.w__real, own)
