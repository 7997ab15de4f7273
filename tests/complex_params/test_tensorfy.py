"""Complex parameters stored as real ones: the model cannot tell, and neither can its user."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fsshard import ModelError, tensorfy, untensorfy
from fsshard.complex_params.flattened import is_tensorfied
from fsshard.complex_params.pairs import Kind
from fsshard.complex_params.slots import parameter_slots
from tests.complex_params.training import allocated, equal, train, weights
from tests.zoo import COMPLEX, ZOO, number

pytestmark = pytest.mark.filterwarnings("ignore:Complex modules are a new feature under active development")


@pytest.mark.parametrize("scalars", [False, True])
@pytest.mark.parametrize("name", COMPLEX)
def test_training_is_bit_equal(name: str, scalars: bool) -> None:
    native, flat = ZOO[name].build(), tensorfy(ZOO[name].build(), scalars=scalars)
    assert not any(p.is_complex() for p in flat.parameters())
    if scalars:
        assert all(p.dim() for p in flat.parameters())
    assert equal(train(native, name), train(flat, name))
    assert equal(weights(native), weights(flat))


@pytest.mark.parametrize("name", sorted(set(ZOO) - set(COMPLEX)))
def test_real_models_are_left_alone(name: str) -> None:
    model = ZOO[name].build()
    before = [(type(m), list(m._parameters.items())) for m in model.modules()]
    tensorfy(model)
    after = [(type(m), list(m._parameters.items())) for m in model.modules()]
    assert all(a[0] is b[0] for a, b in zip(before, after, strict=True))
    assert all(x[1] is y[1] for a, b in zip(before, after, strict=True) for x, y in zip(a[1], b[1], strict=True))


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
    assert any(is_tensorfied(module) for module in flat.modules())
    assert not any(is_tensorfied(module) for module in native.modules())


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


@pytest.mark.parametrize("name", COMPLEX)
def test_twice_is_once(name: str) -> None:
    model = tensorfy(ZOO[name].build())
    before = [(type(m), list(m._parameters.items())) for m in model.modules()]
    tensorfy(model)
    after = [(type(m), list(m._parameters.items())) for m in model.modules()]
    for (cls, old), (again, new) in zip(before, after, strict=True):
        assert again is cls
        assert [k for k, _ in old] == [k for k, _ in new]
        assert all(a is b for (_, a), (_, b) in zip(old, new, strict=True))


def test_scalars_can_follow_later() -> None:
    model = tensorfy(ZOO["zero_dim"].build())
    assert model._parameters["scale"].shape == ()
    tensorfy(model, scalars=True)
    assert model._parameters["scale__real"].shape == (1,)
    assert model.scale.shape == () and model.state_dict()["scale"].shape == ()
    assert {s.attribute: s.kind for s in parameter_slots(model)} == {
        "turn": Kind.COMPLEX_SCALAR,
        "scale": Kind.SCALAR,
        "w": Kind.COMPLEX,
        "weight": Kind.PLAIN,
        "bias": Kind.PLAIN,
    }


def test_no_allocation_to_store_or_to_restore() -> None:
    model = nn.Module()
    model.w = number(256, 256)
    assert allocated(lambda: tensorfy(model)) < 1024
    assert allocated(lambda: untensorfy(model)) < 1024


def test_ties_are_kept() -> None:
    model = tensorfy(ZOO["tied"].build())
    assert model.first.w__real is model.second.w__real
    assert model._parameters["gain__real"] is model._parameters["alias__real"]
    assert len(list(model.parameters())) == len(list(ZOO["tied"].build().parameters())) == 4


def test_lazy_parameters_are_refused() -> None:
    for model in (nn.Sequential(nn.LazyLinear(3)), nn.Sequential(nn.LazyLinear(3, dtype=torch.complex64))):
        with pytest.raises(ModelError, match=r"'0\.weight' is lazy; run one forward"):
            tensorfy(model)
    model(torch.ones(2, 5, dtype=torch.complex64))
    assert not any(p.is_complex() for p in tensorfy(model).parameters())


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_parameters_with_hooks_are_refused_and_nothing_is_changed(kind: str) -> None:
    model = ZOO["mlp_complex"].build()
    handle = getattr(model[2].weight, kind)(lambda _: None)
    with pytest.raises(ModelError, match=r"'2\.weight' has gradient hooks"):
        tensorfy(model)
    assert not any(is_tensorfied(m) for m in model.modules()) and isinstance(model[1].w, nn.Parameter)
    handle.remove()
    tensorfy(model)
    assert is_tensorfied(model[2])


def test_averaged_models() -> None:
    averages = []
    for model in (ZOO["mlp_complex"].build(), tensorfy(ZOO["mlp_complex"].build())):
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        average.update_parameters(model)
        train(model, "mlp_complex", steps=2)
        average.update_parameters(model)
        averages.append(weights(average))
    assert list(averages[0]) == list(averages[1])
    # lerp of complex and of real numbers round differently: one unit in the last place of values below 1
    assert all(torch.allclose(a, b, rtol=0, atol=1e-7) for a, b in zip(*[x.values() for x in averages], strict=True))


def test_what_torch_jit_has_compiled_is_left_alone_or_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))  # nothing to flatten in either
    assert tensorfy(model) is model
    scripted = torch.jit.trace(nn.Linear(2, 2, dtype=torch.complex64), torch.ones(1, 2, dtype=torch.complex64))
    with pytest.raises(ModelError, match=r"parameter '0\.weight' is inside of a torch\.jit module"):
        tensorfy(nn.Sequential(scripted))


@pytest.mark.parametrize("kind", ["parameter", "buffer", "attribute"])
def test_a_name_that_the_storage_needs_is_taken(kind: str) -> None:
    model: Any = nn.Module()
    model.w = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    values = {"parameter": nn.Parameter(torch.ones(2)), "attribute": 3}
    if kind == "buffer":
        model.register_buffer("w__real", torch.ones(2))
    else:
        model.w__real = values[kind]
    with pytest.raises(ModelError, match=r"'0\.w' is stored under the name 'w__real', which Module has given"):
        tensorfy(nn.Sequential(model))
    assert model.w.is_complex() and not hasattr(type(model), "_fsshard_views")
