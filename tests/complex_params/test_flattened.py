"""Modules with flattened parameters: state dicts, containers, attributes, copies and casts are the native ones."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fsshard import ModelError, PrecisionError, StaleParameter, tensorfy, untensorfy
from fsshard.complex_params.flattened import is_tensorfied, raw_state
from fsshard.complex_params.pairs import Kind
from fsshard.complex_params.slots import parameter_slots
from tests.complex_params.training import changed, equal, gradients, train, weights
from tests.training_runs import call
from tests.zoo import COMPLEX, ZOO, ComplexAffine, Holders, ToReal, number

pytestmark = pytest.mark.filterwarnings("ignore:Complex modules are a new feature under active development")


def test_one_new_parameter_assigned_twice_is_a_tie() -> None:
    one, other, new = tensorfy(ComplexAffine()), tensorfy(ComplexAffine()), number(4, 4)
    one.w = new
    other.w = new
    assert one.w__real is other.w__real
    assert torch.equal(one.w, new)


@pytest.mark.parametrize("scalars", [False, True])
@pytest.mark.parametrize("name", COMPLEX)
def test_state_dict_is_the_native_one(name: str, scalars: bool) -> None:
    native, flat = ZOO[name].build(), tensorfy(ZOO[name].build(), scalars=scalars)
    one, other = native.state_dict(), flat.state_dict()
    assert list(one) == list(other)
    assert equal(
        {k: v for k, v in one.items() if k != "_metadata"}, {k: v for k, v in other.items() if k != "_metadata"}
    )
    assert one.get("_metadata") is None or set(one["_metadata"]) == set(other["_metadata"])
    assert list(getattr(one, "_metadata", {})) == list(getattr(other, "_metadata", {}))
    assert not any("__real" in key for key in other)


@pytest.mark.parametrize("name", COMPLEX)
def test_state_dict_loads_both_ways(name: str) -> None:
    native, flat = ZOO[name].build(), tensorfy(ZOO[name].build(), scalars=True)
    new = changed(weights(native))
    storage = [p.data_ptr() for p in flat.parameters()]
    assert str(flat.load_state_dict(new)) == "<All keys matched successfully>"
    assert [p.data_ptr() for p in flat.parameters()] == storage
    assert equal(weights(flat), new)
    native.load_state_dict(weights(flat))
    assert equal(weights(native), new)


def test_state_dict_shares_memory_and_keep_vars_is_differentiable() -> None:
    model = tensorfy(ComplexAffine())
    assert model.state_dict()["w"].data_ptr() == model.w__real.data_ptr()
    assert not model.state_dict()["w"].requires_grad
    model.state_dict(keep_vars=True)["w"].real.sum().backward()
    assert torch.equal(model.w__real.grad[..., 0], torch.ones(4, 4))


def test_raw_state_has_the_stored_parameters_under_the_users_names() -> None:
    model = tensorfy(ZOO["zero_dim"].build(), scalars=True)
    with raw_state():
        state = model.state_dict(keep_vars=True)
        with raw_state():
            pass
        again = model.state_dict(keep_vars=True)
    assert list(state) == list(ZOO["zero_dim"].build().state_dict())
    for slot in parameter_slots(model):
        assert state[slot.name] is slot.parameter is again[slot.name]
    assert model.state_dict()["w"].is_complex()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param({"1.w": None}, 'Missing key(s) in state_dict: "1.w"', id="missing"),
        pytest.param({"1.x": torch.ones(1)}, 'Unexpected key(s) in state_dict: "1.x"', id="unexpected"),
        pytest.param({"1.w": torch.ones(3, 8)}, "size mismatch for 1.w: copying a param with shape", id="shape"),
        pytest.param({"1.w": "text"}, 'the parameter named "1.w", expected torch.Tensor', id="type"),
    ],
)
def test_loading_errors_are_the_native_ones(damage: dict[str, Any], message: str) -> None:
    native, flat = ZOO["mlp_complex"].build(), tensorfy(ZOO["mlp_complex"].build())
    state = {key: value for key, value in {**native.state_dict(), **damage}.items() if value is not None}
    texts = []
    for model in (native, flat):
        with pytest.raises(RuntimeError) as caught:
            model.load_state_dict(state)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    assert message in texts[0]
    assert "__real" not in texts[1]


def test_loading_not_strictly_reports_the_same_keys() -> None:
    native, flat = ZOO["mlp_complex"].build(), tensorfy(ZOO["mlp_complex"].build())
    state = changed(weights(native))
    del state["1.w"]
    state["1.x"] = torch.ones(1)
    assert native.load_state_dict(state, strict=False) == flat.load_state_dict(state, strict=False)
    assert equal(weights(native), weights(flat))


class Renamed(ComplexAffine):
    """Reads old checkpoints in both of torch's ways: a hook renames ``old_w``, an override scales by ``factor``."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(self.rename)

    @staticmethod
    def rename(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if prefix + "old_w" in state:
            state[prefix + "w"] = state.pop(prefix + "old_w")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        factor = state_dict.pop(prefix + "factor", 1.0)
        state_dict[prefix + "b"] = state_dict[prefix + "b"] * factor
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "w"] = destination[prefix + "w"].conj().resolve_conj()


def test_the_classes_own_hooks_and_overrides_see_the_users_names() -> None:
    native, flat = nn.Sequential(Renamed()), tensorfy(nn.Sequential(Renamed()))
    old = {"0.old_w": number(4, 4).detach(), "0.b": number(4).detach(), "0.factor": 3.0}
    for model in (native, flat):
        model.load_state_dict(old)
        assert torch.equal(model[0].w, old["0.old_w"]) and torch.equal(model[0].b, old["0.b"] * 3)
    assert equal(dict(native.state_dict()), dict(flat.state_dict()))
    assert torch.equal(flat.state_dict()["0.w"], old["0.old_w"].conj())


def test_assigned_state() -> None:
    native, flat = ZOO["zero_dim"].build(), tensorfy(ZOO["zero_dim"].build(), scalars=True)
    new = changed(weights(native))
    native.load_state_dict(copy.deepcopy(new), assign=True)
    flat.load_state_dict(new, assign=True)
    assert equal(weights(native), weights(flat))
    assert flat.w.data_ptr() == new["w"].data_ptr()
    assert not any(p.is_complex() or p.dim() == 0 for p in flat.parameters())
    assert [s.name for s in parameter_slots(flat)] == [s.name for s in parameter_slots(native)]
    assert equal(train(native, "zero_dim"), train(flat, "zero_dim"))


def test_state_is_loaded_when_torch_swaps_tensors() -> None:
    flat = tensorfy(ComplexAffine())
    new = changed(weights(flat))
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        flat.load_state_dict(new)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert equal(weights(flat), new)


def test_meta_then_materialised() -> None:
    native = ZOO["mlp_complex"].build()
    with torch.device("meta"):
        flat = tensorfy(ZOO["mlp_complex"].build())
    assert all(p.is_meta and not p.is_complex() for p in flat.parameters())
    assert flat[1].w.is_meta and flat[1].w.dtype == torch.complex64
    flat.to_empty(device="cpu")
    flat.load_state_dict(native.state_dict())
    assert not any(p.is_complex() for p in flat.parameters())
    assert equal(train(native, "mlp_complex"), train(flat, "mlp_complex"))


def gradients_of_two(model: Holders, read: Callable[[Holders], Tensor]) -> dict[str, Tensor | None]:
    model.zero_grad()
    (read(model) ** 2).abs().sum().backward()
    return gradients(model)


READS: dict[str, Callable[[Holders], Tensor]] = {
    "slice": lambda m: sum(p.sum() for p in m.several[:2]),
    "slice from the end": lambda m: sum(p.sum() for p in m.several[-3:-1]),
    "stepped slice": lambda m: sum(p.sum() for p in m.several[::2]),
    "iteration": lambda m: sum(p.sum() for p in m.several),
    "negative index": lambda m: m.several[-2].sum(),
    "copy": lambda m: sum(p.sum() for p in m.named.copy().values()),
    "union": lambda m: sum(p.sum() for p in (m.named | {"x": torch.ones(1)}).values()),
    "union with a ParameterDict": lambda m: sum(p.sum() for p in (m.named | nn.ParameterDict()).values()),
    "right union": lambda m: sum(p.sum() for p in ({"x": torch.ones(1)} | m.named).values()),
    "left union of a ParameterDict": lambda m: sum(p.sum() for p in (nn.ParameterDict() | m.named).values()),
    "items": lambda m: sum(p.sum() for _, p in m.named.items()),
    "get": lambda m: m.named.get("u").sum(),
}


@pytest.mark.parametrize("read", READS)
def test_containers_keep_gradients(read: str) -> None:
    """torch's slice and copy make new Parameters of what they find; of a view that is a copy without a gradient."""
    native = ZOO["holders"].build()
    flat = tensorfy(ZOO["holders"].build())
    values = [READS[read](model) for model in (native, flat)]
    assert torch.equal(*values)
    found = gradients_of_two(flat, READS[read])
    assert any(g is not None for name, g in found.items() if name.startswith(("several", "named.u")))
    assert equal(found, gradients_of_two(native, READS[read]))


def test_containers_can_grow_and_change() -> None:
    model = tensorfy(Holders())
    model.several.append(number(2))
    model.several[0] = number(4, 4)
    model.named["z"] = number(3)
    assert len(model.several) == 5 and list(model.named) == ["u", "v", "z"]
    assert not any(p.is_complex() for p in model.parameters())
    assert model.several[4].is_complex() and model.named["z"].is_complex()
    popped = model.named.pop("u")
    assert popped.is_complex() and list(model.named) == ["v", "z"]
    assert list(model.state_dict()) == [*(f"several.{i}" for i in range(5)), "named.v", "named.z"]


class _Afterwards(type):
    """A metaclass in the usual style."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        made.after = True
        return made


class _OfItsOwn(type):
    """As fastai's: initialises what is of the class that was called, and nothing else."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = cls.__new__(cls)
        if type(made) is cls:
            made.__init__(*args, **kwargs)
            made.after = True
        return made


@pytest.mark.parametrize("metaclass", [type, _Afterwards, _OfItsOwn])
def test_what_a_module_makes_of_its_own_class_is_made_once_and_by_its_metaclass(metaclass: type) -> None:
    made = []

    class Grows(nn.Module, metaclass=metaclass):
        def __init__(self, size: int) -> None:
            super().__init__()
            made.append(size)
            self.w = number(size)

        def larger(self) -> Any:
            return type(self)(self.w.numel() + 1)

    model = tensorfy(Grows(3))
    larger = model.larger()
    assert made == [3, 4] and type(larger) is Grows and larger.w.shape == (4,) and larger.w.is_complex()
    assert metaclass is type or larger.after
    assert [p.is_complex() for p in tensorfy(larger).parameters()] == [False]
    assert not copy.deepcopy(model)._parameters["w__real"].is_complex()


def test_a_module_may_copy_itself_into_a_blank_of_its_class() -> None:
    class Copies(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.w = number(size)

        def __deepcopy__(self, memo: Any) -> Copies:
            blank = type(self).__new__(type(self))
            memo[id(self)] = blank
            blank.__dict__.update(copy.deepcopy(self.__dict__, memo))
            return blank

    model = tensorfy(Copies(3))
    copied = copy.deepcopy(model)
    assert equal([copied.w], [model.w]) and copied.w.data_ptr() != model.w.data_ptr()
    assert list(copied.state_dict()) == ["w"] and not copied._parameters["w__real"].is_complex()


def test_a_parameter_can_be_replaced() -> None:
    model = tensorfy(ZOO["zero_dim"].build(), scalars=True)
    new = number(3, 4)
    model.w = new
    assert torch.equal(model.w, new) and model.w.data_ptr() == new.data_ptr()
    assert [s.name for s in parameter_slots(model)] == [s.name for s in parameter_slots(ZOO["zero_dim"].build())]
    model.scale = nn.Parameter(torch.tensor(3.0))
    assert model._parameters["scale__real"].shape == (1,) and model.scale.item() == 3.0
    with pytest.raises(StaleParameter, match="'w' was captured"):
        new.real.sum().backward()


@pytest.mark.parametrize(
    "shapes", [((3,), (2, 5)), ((3,), ()), ((), (3,)), ((), ())], ids=lambda shapes: f"{shapes[0]} to {shapes[1]}"
)
def test_a_replacement_may_have_another_shape(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    model = nn.Module()
    model.w, model.v = number(*shapes[0]), number(2)
    tensorfy(model)
    new = number(*shapes[1])
    model.w = new
    assert torch.equal(model.w, new) and model.w.shape == shapes[1]
    assert list(model.state_dict()) == ["w", "v"]
    assert equal(model.state_dict()["w"], new.detach())
    assert not any(p.is_complex() for p in model.parameters())


def test_a_replacement_may_be_real_or_frozen_and_others_may_come() -> None:
    model, new = tensorfy(ComplexAffine()), number(4, 4).requires_grad_(False)
    model.w = nn.Parameter(torch.ones(4, 4))
    assert isinstance(model.w, nn.Parameter) and model.w.dtype == torch.float32
    assert [name for name, _ in model.named_parameters()] == ["w", "b__real"]
    new.mark = "mine"
    model.w, model.extra = new, number(2)
    model.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
    assert [name for name, _ in model.named_parameters()] == ["w__real", "b__real", "extra__real"]
    assert model.extra.is_complex() and list(model.state_dict()) == ["w", "b", "extra", "phase"]
    assert model.w__real.mark == "mine" and not model.w__real.requires_grad


def test_none_and_back() -> None:
    native, flat = ComplexAffine(), tensorfy(ComplexAffine())
    for model in (native, flat):
        model.w = None
        assert model.w is None
        assert list(model.state_dict()) == ["b"]
        model.w = number(4, 4)
        assert list(model.state_dict()) == ["w", "b"]
    assert [name for name, _ in flat.named_parameters()] == ["w__real", "b__real"]


def test_deleting_and_setting_again() -> None:
    native, flat = ComplexAffine(), tensorfy(ComplexAffine())
    for model in (native, flat):
        del model.w
        assert not hasattr(model, "w") and list(model.state_dict()) == ["b"]
        with pytest.raises(AttributeError, match="has no attribute 'w'"):
            model.w  # noqa: B018
        model.w = torch.ones(4, 4, dtype=torch.complex64)  # an ordinary tensor, as weight_norm and its like put there
        assert "w" not in model.state_dict() and not model.w.requires_grad
        del model.w
        model.w = number(4, 4)
        assert list(model.state_dict()) == ["b", "w"]
    assert [name for name, _ in flat.named_parameters()] == ["b__real", "w__real"]
    with pytest.raises(AttributeError):
        del flat.absent


@pytest.mark.parametrize("value", [3.0, torch.ones(4, 4, dtype=torch.complex64), "text"])
def test_wrong_types_are_refused_as_natively(value: Any) -> None:
    texts = []
    for model in (ComplexAffine(), tensorfy(ComplexAffine())):
        before = model.w.detach().clone()
        with pytest.raises(TypeError, match="as parameter 'w'") as caught:
            model.w = value
        texts.append(str(caught.value))
        assert torch.equal(model.w, before)
    assert texts[0] == texts[1]


def test_a_parameter_with_hooks_is_no_replacement() -> None:
    model, new = tensorfy(ComplexAffine()), number(4, 4)
    before = model.w.detach().clone()
    new.register_hook(lambda g: g)
    with pytest.raises(ModelError, match="'w' has gradient hooks"):
        model.w = new
    assert torch.equal(model.w, before)


def through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": through_pickle, "torch.save": through_torch_save}


def copyable(name: str, how: str) -> bool:
    """torch refuses to pickle parametrized modules ("Serialization of parametrized modules is only supported ...")."""
    return how == "deepcopy" or name != "orthogonal"


@pytest.mark.covering
@pytest.mark.parametrize(("name", "how"), [(name, how) for name in COMPLEX for how in COPIES if copyable(name, how)])
def test_copies_train_on_their_own(name: str, how: str) -> None:
    native, flat = ZOO[name].build(), tensorfy(ZOO[name].build())
    twin = COPIES[how](flat)
    assert [type(m) for m in twin.modules()] == [type(m) for m in flat.modules()]
    assert not {p.data_ptr() for p in twin.parameters()} & {p.data_ptr() for p in flat.parameters()}
    before = copy.deepcopy(weights(flat))
    assert equal(train(native, name), train(twin, name))
    assert equal(weights(flat), before)
    untensorfy(twin)
    assert equal(weights(twin), weights(native))
    assert [type(m) for m in twin.modules()] == [type(m) for m in ZOO[name].build().modules()] or name == "orthogonal"


def test_a_pickle_can_be_read_where_nothing_was_tensorfied(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    torch.save(tensorfy(ZOO["mlp_complex"].build()), file)
    code = (
        "import sys, torch; m = torch.load(sys.argv[1], weights_only=False); "
        "print(type(m[1]).__name__, m[1].w.dtype, *m.state_dict())"
    )
    command, root = [sys.executable, "-c", code, str(file)], Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["ComplexAffine", "torch.complex64", *ZOO["mlp_complex"].build().state_dict()]


CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "double": lambda m: m.double(),
    "float": lambda m: m.float(),
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "to(complex128)": lambda m: m.to(torch.complex128),
    "to(complex64)": lambda m: m.to(torch.complex64),
    "to(cpu)": lambda m: m.to("cpu"),
    "cpu": lambda m: m.cpu(),
    "type": lambda m: m.type(torch.complex128),
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("name", ["two_precisions", "zero_dim", "tied", "holders", "tfno_tucker", "fno_complex_tucker"])
def test_casts_are_the_native_ones(name: str, cast: str) -> None:
    native, flat = ZOO[name].build(), tensorfy(ZOO[name].build(), scalars=True)
    for model in (native, flat):
        ZOO[name].loss(call(model, ZOO[name].batch(0, 0))).backward()
        assert CASTS[cast](model) is model
    assert equal(weights(native), weights(flat))
    assert equal(gradients(native), gradients(flat))


@pytest.mark.filterwarnings("ignore:Casting complex values to real discards the imaginary part")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_casts_that_natively_drop_the_imaginary_part_raise(dtype: torch.dtype) -> None:
    native, flat = ZOO["plain"].build(), tensorfy(ZOO["plain"].build())
    before = copy.deepcopy(weights(flat))
    native.to(dtype)
    assert native.w.dtype == dtype and before["w"].imag.any()  # lost, with a warning at most
    with pytest.raises(PrecisionError, match="would discard its imaginary part"):
        flat.to(dtype)
    assert equal(weights(flat), before)


def test_shared_memory() -> None:
    model = tensorfy(ZOO["zero_dim"].build(), scalars=True)
    before = copy.deepcopy(weights(model))
    model.share_memory()
    assert all(p.is_shared() for p in model.parameters())
    assert model.w.is_shared() and equal(weights(model), before)


def test_channels_last() -> None:
    native, flat = nn.Conv2d(2, 3, 3, dtype=torch.complex64), nn.Conv2d(2, 3, 3, dtype=torch.complex64)
    flat.load_state_dict(native.state_dict())
    tensorfy(flat)
    for model in (native, flat):
        model.to(memory_format=torch.channels_last)
    assert flat.weight.stride() == native.weight.stride()
    assert torch.equal(flat.weight, native.weight)


@pytest.fixture
def one_rank() -> Iterator[DeviceMesh]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["plain", "zero_dim", "holders", "tfno_tucker", "fno_complex_tucker"])
def test_sharded_state_dicts_are_complex(name: str, one_rank: DeviceMesh) -> None:
    """DTensors of the users' names, shapes and dtypes over the shards; 0-dim ones stay as the engine holds them."""
    native, flat = ZOO[name].build(), tensorfy(ZOO[name].build(), scalars=True)
    fully_shard(flat, mesh=one_rank)
    expected, found = weights(native), weights(flat)
    assert list(found) == list(expected)
    kinds = {slot.name: slot.kind for slot in parameter_slots(flat)}
    for key, value in found.items():
        assert isinstance(value, DTensor)
        if kinds[key] in (Kind.COMPLEX_SCALAR, Kind.SCALAR):
            assert value.shape == ((1, 2) if kinds[key].is_complex else (1,))
        else:
            assert (value.dtype, value.shape) == (expected[key].dtype, expected[key].shape)
            assert value.stride() == torch.empty(value.shape, device="meta").stride()
            assert torch.equal(value.to_local(), expected[key])
    new = {key: value.clone() * 3 for key, value in found.items()}
    flat.load_state_dict(new)
    assert all(torch.equal(weights(flat)[key].to_local(), new[key].to_local()) for key in new)
    assert not any(p.is_complex() for p in flat.parameters())


def test_sharded_models_keep_their_parameters(one_rank: DeviceMesh) -> None:
    model = tensorfy(nn.Sequential(ComplexAffine(), ToReal()))
    fully_shard(model[0], mesh=one_rank)
    with pytest.raises(ModelError, match="untensorfy works on whole models only"):
        untensorfy(model)
    with pytest.raises(ModelError, match="'w' cannot be replaced now: an engine has sharded FSDPComplexAffine"):
        model[0].w = number(4, 4)
    assert is_tensorfied(model[0]) and isinstance(model[0]._parameters["w__real"], DTensor)


def test_a_sharded_model_loads_into_its_shards_between_forward_and_backward(one_rank: DeviceMesh) -> None:
    """After such a forward FSDP2 holds whole parameters; its own pre-hook puts the shards back before loading."""
    model = tensorfy(ComplexAffine())
    fully_shard(model, mesh=one_rank, reshard_after_forward=False)
    new = {key: value.clone() * 3 for key, value in model.state_dict().items()}
    model(torch.ones(2, 4))
    assert not isinstance(model._parameters["w__real"], DTensor)
    model.load_state_dict(new)
    assert isinstance(model._parameters["w__real"], DTensor)
    assert torch.equal(model.state_dict()["w"].to_local(), new["w"].to_local())
