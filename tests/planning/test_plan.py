"""plan(): units, ties, fp32 units and bytes, decided without touching the model."""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fsshard import ConfigurationError, ModelError, plan, tensorfy
from fsshard.planning.plan import Plan, RecomputingForward, recomputed_by
from tests.zoo import COMPLEX, ZOO, ComplexAffine, ToReal


def units(model: nn.Module, policy: object = "auto") -> tuple[str, ...]:
    """Names of the units below the root, in the model's order."""
    return tuple(unit.name for unit in plan(model, auto_wrap_policy=policy).units[1:])


def unit(found: Plan, name: str) -> Any:
    return next(unit for unit in found.units if unit.name == name)


def facts(model: nn.Module) -> list[Any]:
    """Everything of a model that a careless reader could change."""
    found = []
    for name, module in model.named_modules(remove_duplicate=False):
        members = {key: value for key, value in vars(module).items() if not isinstance(value, dict)}
        held = {
            key: [(k, id(v)) for k, v in value.items()]
            for key, value in vars(module).items()
            if isinstance(value, dict)
        }
        found.append((name, id(module), type(module), {k: id(v) for k, v in members.items()}, held))
    for parameter in [*model.parameters(), *model.buffers()]:
        extra = (dict(parameter.__dict__), dict(parameter._backward_hooks or {}), parameter._version)
        found.append((id(parameter), parameter.data_ptr(), parameter.requires_grad, id(parameter.grad), extra))
    return found


# ------------------------------------------------------------------------------------------ pure


@pytest.mark.parametrize("policy", ["auto", None, 100, lambda m: isinstance(m, nn.Linear)])
@pytest.mark.parametrize("name", ["tied", "holders", "conv_batchnorm", "t5", "uno"])
def test_nothing_is_touched(name: str, policy: object) -> None:
    model = ZOO[name].build()
    before, random = facts(model), torch.get_rng_state()
    plan(model, auto_wrap_policy=policy)
    assert facts(model) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert not dist.is_initialized()


@pytest.mark.parametrize("name", ZOO)
def test_the_plan_is_the_same_after_tensorfy_and_on_meta(name: str) -> None:
    native = ZOO[name].build()
    for policy in ("auto", None, 200):
        expected = plan(native, auto_wrap_policy=policy)
        assert plan(ZOO[name].build(), auto_wrap_policy=policy) == expected
        assert plan(tensorfy(ZOO[name].build()), auto_wrap_policy=policy) == expected
        assert plan(tensorfy(ZOO[name].build(), scalars=True), auto_wrap_policy=policy) == expected
        assert plan(copy.deepcopy(native).to("meta"), auto_wrap_policy=policy) == expected or expected.ties


def test_ties_on_meta() -> None:
    """Moving a model to meta unties it (torch 2.13), so it is built there."""
    with torch.device("meta"):
        model = ZOO["tied"].build()
    assert plan(model) == plan(ZOO["tied"].build())
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("name", ZOO)
def test_bytes_and_parameters_add_up(name: str) -> None:
    model = ZOO[name].build()
    distinct = dict(model.named_parameters())
    for policy in ("auto", None, 200, lambda m: isinstance(m, (nn.Linear, ComplexAffine))):
        found = plan(model, auto_wrap_policy=policy)
        assert found.nbytes == sum(p.numel() * p.element_size() for p in distinct.values())
        assert list(found.parameters) == list(distinct)
        assert sorted(n for u in found.units for n in u.parameters) == sorted(distinct)
        for info in found.parameters.values():
            parameter = distinct[info.name]
            assert info.nbytes == parameter.numel() * parameter.element_size()
            assert (info.shape, info.dtype) == (tuple(parameter.shape), parameter.dtype)
            assert info.requires_grad == parameter.requires_grad
            assert info.name in unit(found, info.unit).parameters
        for one in found.units:
            assert one.nbytes == sum(found.parameters[n].nbytes for n in one.parameters)
            assert set(one.dtypes) == {found.parameters[n].dtype for n in one.parameters}


# ------------------------------------------------------------------------------------------ "auto"


@pytest.mark.parametrize("name", ["fno", "fno_dense", "fno_complex_tt", "tfno_tucker"])
def test_fno_units_are_the_spectral_convolutions(name: str) -> None:
    found = plan(ZOO[name].build())
    assert [u.name for u in found.units] == ["", "fno_blocks.convs.0", "fno_blocks.convs.1"]
    assert {u.reason for u in found.units[1:]} == {"owns complex weights"}
    assert all(u.fp32 for u in found.units[1:]) and not found.units[0].fp32
    assert all(n.startswith("fno_blocks.convs.0.") for n in found.units[1].parameters)
    assert any(n.startswith("fno_blocks.convs.0.weight.") for n in found.units[1].parameters)


@pytest.mark.parametrize("name", COMPLEX)
def test_fp32_units_are_the_called_modules_that_own_complex_weights(name: str) -> None:
    for policy in ("auto", None):
        assert plan(ZOO[name].build(), auto_wrap_policy=policy).fp32_units == ZOO[name].owners


@pytest.mark.parametrize("name", sorted(set(ZOO) - set(COMPLEX)))
def test_real_models_have_no_fp32_units(name: str) -> None:
    found = plan(ZOO[name].build())
    assert found.fp32_units == () and not any(u.fp32 for u in found.units)


def test_whoever_owns_complex_weights_is_an_fp32_unit() -> None:
    """Also when the policy puts them into the root, or into a larger unit."""
    assert plan(ZOO["mlp_complex"].build(), auto_wrap_policy=None).units[0].fp32
    found = plan(ZOO["fno"].build(), auto_wrap_policy={"FNOBlocks"})
    assert [(u.name, u.fp32) for u in found.units] == [("", False), ("fno_blocks", True)]


def test_t5_units_are_its_blocks() -> None:
    found = plan(ZOO["t5"].build())
    blocks = [f"{side}.block.{i}" for side in ("encoder", "decoder") for i in range(2)]
    assert [u.name for u in found.units[1:]] == blocks
    assert {u.reason for u in found.units[1:]} == {"T5Block in _no_split_modules"}
    assert "shared.weight" in found.units[0].parameters
    tied = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    assert found.ties == (tied,)
    assert found.dropped == {}


# ------------------------------------------------------------------------------------------ what cannot be a unit


class Embedding(nn.Module):
    """Holds a table and uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.scale = nn.Embedding(7, 4), nn.Linear(4, 4)


TIED = "holds a parameter tied to another module; it stays in the root"


def test_a_parameter_tied_across_units_keeps_them_in_the_root() -> None:
    model = nn.ModuleDict({"a": Embedding(), "b": Embedding(), "c": Embedding()})
    model["b"].table.weight = model["a"].table.weight
    found = plan(model, auto_wrap_policy={Embedding})
    assert [u.name for u in found.units] == ["", "c"]
    assert found.dropped == {"a": TIED, "b": TIED}
    assert found.ties == (("a.table.weight", "b.table.weight"),)
    assert found.parameters["a.table.weight"].unit == ""
    assert "b.table.weight" not in found.parameters


def test_modules_in_several_places_keep_what_holds_them_in_the_root() -> None:
    """There is one owner, but it is called from inside both."""
    model = nn.ModuleDict({"a": Embedding(), "b": Embedding()})
    model["b"].table = model["a"].table
    found = plan(model, auto_wrap_policy={Embedding})
    assert found.dropped == {"a": TIED, "b": TIED} and [u.name for u in found.units] == [""]
    assert found.ties == (("a.table.weight", "b.table.weight"),)
    assert units(model, {Embedding, nn.Linear}) == ("a.scale", "b.scale")
    model = nn.ModuleDict({"a": Embedding()})
    model["again"] = model["a"].table
    assert plan(model, auto_wrap_policy={Embedding}).dropped == {"a": TIED}
    assert units(model, {nn.Embedding, nn.Linear}) == ("a.table", "a.scale")  # itself it may well be one


def test_a_tie_within_a_unit_stays_there() -> None:
    model = nn.Sequential(Embedding(), ZOO["tied"].build())
    found = plan(model, auto_wrap_policy={"Tied"})
    assert [u.name for u in found.units] == ["", "1"]
    assert found.dropped == {}
    assert found.ties == (("1.gain", "1.alias"), ("1.first.w", "1.second.w"))
    assert unit(found, "1").parameters == ("1.gain", "1.first.w", "1.first.b", "1.second.b")
    assert found.parameters["1.first.w"].unit == "1"


def test_modules_without_parameters_are_dropped() -> None:
    found = plan(ZOO["mlp_complex"].build(), auto_wrap_policy={ToReal, ComplexAffine})
    assert [u.name for u in found.units] == ["", "1"]
    assert found.dropped == {"3": "has no parameters"}


def test_what_attention_reads_itself_is_dropped() -> None:
    """nn.MultiheadAttention never calls its projection: sharded, its weight would be read as it lies."""
    found = plan(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1), auto_wrap_policy={nn.Linear}
    )
    assert [u.name for u in found.units] == ["", "layers.0.linear1", "layers.0.linear2"]
    name, reason = next(iter(found.dropped.items()))
    assert name == "layers.0.self_attn.out_proj" and "reads the weights itself" in reason


@pytest.mark.parametrize(
    ("name", "policy", "what"),
    [
        ("holders", {nn.ParameterList}, "'several', a ParameterList"),
        ("tfno_tucker", lambda m: "Tucker" in type(m).__name__, "'fno_blocks.convs.0.weight', a ComplexTuckerTensor"),
    ],
)
def test_containers_are_refused(name: str, policy: object, what: str) -> None:
    model = ZOO[name].build()
    with pytest.raises(ConfigurationError) as caught:
        plan(model, auto_wrap_policy=policy)
    text = str(caught.value)
    assert text.startswith("auto_wrap_policy picked ") and "it is never called" in text
    assert what.split(", a ")[0] in text


def test_models_without_parameters_are_refused() -> None:
    with pytest.raises(ModelError, match="expected parameters, got a ToReal without any; use it as it is"):
        plan(ToReal())


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_lazy_models_are_refused(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3, dtype=dtype))
    with pytest.raises(ModelError, match=r"with shapes, got lazy ones: 1\.weight, 1\.bias; run one forward first"):
        plan(model)


# ------------------------------------------------------------------------------------------ several dtypes


def test_modules_of_another_dtype_become_units() -> None:
    """Flat engines hold one dtype per unit; complex64 is stored as float32, complex128 as float64."""
    model = nn.Sequential(nn.Linear(9, 9), ZOO["two_precisions"].build())
    found = plan(model, auto_wrap_policy=None)
    assert [(u.name, u.reason) for u in found.units[1:]] == [("1.high", "holds float64 in a unit of another dtype")]
    assert unit(found, "1.high").dtypes == (torch.complex128,) and unit(found, "1.high").fp32
    assert unit(found, "").dtypes == (torch.complex64, torch.float32)


def test_the_dtype_of_most_bytes_stays() -> None:
    assert units(ZOO["two_precisions"].build(), None) == ("linear", "low")  # 320 bytes of float64, 240 of float32


def test_the_outermost_module_of_another_dtype_is_the_unit() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))).double()
    model = nn.Sequential(nn.Linear(9, 9), inner, nn.ModuleList([nn.Linear(3, 3).double(), nn.Linear(3, 3).double()]))
    assert units(model, None) == ("1", "2.0", "2.1")


def test_dtypes_are_split_within_a_unit_too() -> None:
    block = nn.Sequential(nn.Linear(5, 5).double(), nn.Linear(2, 2))
    model = nn.Sequential(nn.Linear(9, 9), block)
    found = plan(model, auto_wrap_policy=lambda m: m is block)
    assert {u.name: u.dtypes for u in found.units} == {
        "": (torch.float32,),
        "1": (torch.float64,),
        "1.1": (torch.float32,),
    }


def test_units_below_do_not_count_when_dtypes_are_split() -> None:
    inner = nn.Linear(4, 4)
    model = nn.Sequential(nn.Linear(9, 9), nn.Sequential(nn.Linear(2, 2).double(), inner, nn.Linear(2, 2).double()))
    assert units(model, lambda m: m is inner) == ("1", "1.1")


def test_tied_modules_of_another_dtype_stay() -> None:
    model = nn.Sequential(nn.Linear(9, 9), nn.Linear(2, 2).double(), nn.Linear(2, 2).double())
    model[2].weight = model[1].weight
    assert units(model, None) == ()
    within = nn.Sequential(nn.Linear(9, 9), nn.Sequential(*model[1:]))
    assert units(within, None) == ("1",)


def test_equal_sizes_are_split_alike_on_every_rank() -> None:
    """The first dtype in the model's order stays; by the order of a set of parameters it would be either."""
    pairs = [(nn.Linear(4, 4, bias=False), nn.Linear(2, 4, bias=False).double()) for _ in range(30)]
    for start in range(10):
        model = nn.Sequential(*(layer for pair in pairs[start : start + 20] for layer in pair))
        assert units(model, None) == tuple(str(i) for i in range(1, 40, 2))


# ------------------------------------------------------------------------------------------ order and words


def test_order_of_units() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))), nn.Linear(2, 2))
    found = plan(model, auto_wrap_policy=lambda m: not isinstance(m, nn.Linear) or m.in_features == 2)
    assert [u.name for u in found.units] == ["", "0", "0.0", "0.1", "0.1.0", "1"]
    order = found.unit_names
    assert sorted(order) == sorted(u.name for u in found.units[1:])
    assert all(
        order.index(child) < order.index(name) for name in order for child in order if child.startswith(name + ".")
    )
    assert unit(found, "0.1").parameters == () and unit(found, "0").nbytes == 0


class Ours(RecomputingForward):
    origin = "somebody"


class GradientCheckpointingLayer(nn.Linear):
    """Named as transformers' class is."""

    gradient_checkpointing = False


def test_who_recomputes_a_block_already_is_recognised() -> None:
    def forward(*args: Any) -> Any: ...

    forward.__module__ = "fairscale.nn.checkpoint.checkpoint_activations"
    replaced = {
        "somebody, before wrap": Ours(),
        "FairScale's checkpoint_wrapper, before wrap": functools.partial(forward, None),
        "": functools.partial(print),
    }
    for said, other in replaced.items():
        module = nn.Linear(2, 2)
        module.__dict__["forward"] = other
        assert recomputed_by(module) == said
    assert recomputed_by(checkpoint_wrapper(nn.Linear(2, 2))) == "torch's checkpoint_wrapper, before wrap"
    layer = GradientCheckpointingLayer(2, 2)
    assert recomputed_by(layer) == ""
    layer.gradient_checkpointing = True
    assert recomputed_by(layer) == "the model's own gradient checkpointing"
    found = plan(nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), nn.Linear(2, 2)))
    assert found.recomputed_before == {"0": "torch's checkpoint_wrapper, before wrap"} and not found.recomputed
    said = "recomputed in backward: 1 block (by torch's checkpoint_wrapper, before wrap): 0"
    assert said in found.explain().splitlines()


class Explained(nn.Module):
    """A bit of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(2, 500)
        self.spectral = ComplexAffine(500)
        self.real = ToReal()
        self.one, self.two = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.two.weight = self.one.weight
        self.lift.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x


EXPLAINED = """\
2 units, 5 parameters (1 frozen), 1.92 MiB
unit           bytes  share  dtypes     why
(root)      5.89 KiB   0.3%  float32    the root: everything else
  spectral  1.91 MiB  99.7%  complex64  is a ComplexAffine; float32 unit
tied, in one unit: one.weight = two.weight
no unit: real (has no parameters)"""


def test_explain() -> None:
    found = plan(Explained(), auto_wrap_policy={ComplexAffine, ToReal})
    assert found.explain() == EXPLAINED


def test_explain_is_a_tree() -> None:
    """A unit inside a unit is indented below it."""
    inner = nn.Sequential(nn.Linear(2, 2))
    model = nn.Sequential(nn.Sequential(inner, nn.Linear(2, 2)), nn.Linear(2, 2))
    units = {id(model[0]), id(inner)}
    lines = plan(model, auto_wrap_policy=lambda module: id(module) in units).explain().splitlines()
    names = [line for line in lines if line.lstrip().startswith(("(root)", "0"))]
    assert [len(line) - len(line.lstrip()) for line in names] == [0, 2, 4]


def test_each_block_of_before_is_told_by_its_own_reason() -> None:
    """One that is only offloaded does not make the others so that follow it."""
    before = {"0": "activation offloading, before wrap", "1": "torch's checkpoint_wrapper, before wrap"}
    found = dataclasses.replace(plan(nn.Linear(2, 2)), recomputed_before=before)
    assert found.explain().splitlines()[-2:] == [
        f"activations in host memory: 1 block (by {before['0']}): 0",
        f"recomputed in backward: 1 block (by {before['1']}): 1",
    ]


class Tied(nn.Module):
    """A block within which a weight is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.second.weight = self.first.weight


def calls_of_a_plan(blocks: int) -> int:
    model = nn.Sequential(*(Tied() for _ in range(blocks)))
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        plan(model, auto_wrap_policy={Tied}, activation_checkpointing={Tied})
    finally:
        sys.setprofile(None)
    return calls


def test_the_work_grows_as_the_model_does() -> None:
    """It walked over the model once per block that is recomputed, and over all ties once per unit."""
    calls_of_a_plan(1)
    few, many = calls_of_a_plan(20), calls_of_a_plan(80)
    assert many < 4.5 * few
