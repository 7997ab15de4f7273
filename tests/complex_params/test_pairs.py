"""Kinds of storage: there and back; what a module sees: the same memory, at no cost, whatever an engine has done."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from fsshard import tensorfy
from fsshard.complex_params.pairs import kind_for
from fsshard.complex_params.shown import raw_state
from fsshard.complex_params.slots import parameter_slots
from tests.complex_params.training import allocated, equal, gradients
from tests.training_runs import call
from tests.zoo import COMPLEX, ZOO, ComplexAffine, number

pytestmark = pytest.mark.filterwarnings("ignore:Complex modules are a new feature under active development")

TLTORCH = ("fno_complex_tucker", "fno_complex_tt")
STORED_COMPLEX = tuple(name for name in COMPLEX if name not in TLTORCH)
"""Cases whose parameters are complex numbers; tltorch's Complex* factors are stored as pairs natively."""


VALUES = {
    "complex": torch.randn(3, 4, dtype=torch.complex64),
    "complex, transposed": torch.randn(3, 4, dtype=torch.complex128).t(),
    "complex, 0-dim": torch.tensor(1 + 2j),
    "real, 0-dim": torch.tensor(3.0),
    "real, channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "real": torch.randn(3, 4),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_there_and_back(value: torch.Tensor) -> None:
    kind = kind_for(torch.nn.Parameter(value), scalars=True, in_order=True)
    stored = kind.to_stored(value)
    assert stored.is_contiguous() and stored.dim() > 0 and not stored.is_complex()
    assert stored.data_ptr() == value.data_ptr()
    seen = kind.to_user(stored)
    assert torch.equal(seen, value) and seen.stride() == value.stride() and seen.data_ptr() == value.data_ptr()
    assert kind.user_shape(stored.shape) == value.shape
    assert kind.user_dtype(stored.dtype) is value.dtype


@pytest.mark.parametrize("name", STORED_COMPLEX)
def test_the_view_shares_memory_with_what_is_stored(name: str) -> None:
    model = ZOO[name].build()
    old = {slot.name: slot.parameter for slot in parameter_slots(model)}
    places = {name: p.data_ptr() for name, p in old.items()}
    contiguous = {name for name, p in old.items() if p.is_contiguous()}
    tensorfy(model, scalars=True)
    for slot in parameter_slots(model):
        seen = getattr(slot.owner, slot.attribute)
        assert seen.data_ptr() == slot.parameter.data_ptr() == old[slot.name].data_ptr()
        assert slot.name not in contiguous or seen.data_ptr() == places[slot.name]
        assert seen.dtype == old[slot.name].dtype and seen.shape == old[slot.name].shape


def test_an_access_allocates_nothing() -> None:
    model = nn.Module()
    model.w = number(256, 256)
    tensorfy(model)
    assert allocated(lambda: model.w.clone()) >= 8 * 256 * 256  # the measurement sees allocations
    assert allocated(lambda: model.w) == 0


def test_a_packed_parameter_at_an_odd_offset_is_read_right() -> None:
    model = tensorfy(ComplexAffine())
    want = model.w.detach().clone()
    packed = torch.zeros(33)
    packed[1:].copy_(model.w__real.detach().flatten())
    model.w__real.data = packed[1:].view(4, 4, 2)
    assert torch.equal(model.w, want)
    model.w.real.sum().backward()
    assert torch.equal(model.w__real.grad[..., 0], torch.ones(4, 4))
    assert torch.equal(model.state_dict()["w"], want)
    model.load_state_dict({"w": want + 1, "b": model.state_dict()["b"]})
    assert torch.equal(torch.view_as_complex(packed[1:].clone().view(4, 4, 2)), want + 1)


def test_a_flat_shard_is_handed_back_unread() -> None:
    """FSDP1 keeps a freed 1-D tensor at rest; reading it is a segmentation fault."""
    model = tensorfy(ComplexAffine())
    flat = model.w__real.detach().flatten()[:7]
    flat.untyped_storage().resize_(0)
    model._parameters["w__real"] = nn.Parameter(flat)
    assert model.w is model._parameters["w__real"]
    with raw_state():
        assert model.state_dict(keep_vars=True)["w"] is model._parameters["w__real"]
    assert model.state_dict()["w"].shape == (7,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_storage_below_float32_is_widened_for_the_view(dtype: torch.dtype) -> None:
    model = tensorfy(ComplexAffine())
    want = torch.view_as_complex(model.w__real.detach().to(dtype).float())
    model.w__real.data = model.w__real.detach().to(dtype)
    assert model.w.dtype == torch.complex64 and torch.equal(model.w, want)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", ["mlp_complex", "zero_dim"])
def test_compiles_in_one_graph(name: str) -> None:
    """aot_eager traces forward and backward; it generates no code, so the arithmetic is the eager one."""
    eager, flat = tensorfy(ZOO[name].build(), scalars=True), tensorfy(ZOO[name].build(), scalars=True)
    compiled = torch.compile(flat, backend="aot_eager", fullgraph=True)
    for model in (eager, compiled):
        ZOO[name].loss(call(model, ZOO[name].batch(0, 0))).backward()
    assert all(g is not None for g in gradients(flat).values())
    assert equal(gradients(eager), gradients(flat))
