"""Every accepted form of ``auto_wrap_policy`` and ``mixed_precision``, torch's own included."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy
from torch.distributed.fsdp import wrap as torch_wrap

from fsshard import ConfigurationError, Precision, PrecisionError, tensorfy
from fsshard.complex_params.slots import ModuleTable
from fsshard.planning import policies
from fsshard.planning.policies import is_container, resolve_blocks, resolve_precision, resolve_units
from tests.zoo import ZOO, ComplexAffine, ToReal


class Block(nn.Module):
    """Two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Wide(Block):
    """A subclass of the block."""


def blocks() -> nn.Module:
    """Blocks of growing size in a Sequential in a Sequential, a bare Linear at the end."""
    return nn.Sequential(nn.Sequential(Block(2), Block(4), Wide(8)), nn.ModuleDict({"x": Block(3)}), nn.Linear(2, 2))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "blocks": blocks,
    "encoder": encoder,
    "mlp_complex": ZOO["mlp_complex"].build,
    "fno": ZOO["fno"].build,
    "tfno_tucker": ZOO["tfno_tucker"].build,
}


def picked(model: nn.Module, policy: object, owners: tuple[nn.Module, ...] = ()) -> set[str]:
    """Names of the modules that a policy picks."""
    return set(reasons(model, policy, owners))


def reasons(model: nn.Module, policy: object, owners: tuple[nn.Module, ...] = ()) -> dict[str, str]:
    names = {module: name for name, module in model.named_modules()}
    return {names[module]: reason for module, reason in resolve_units(ModuleTable(model), policy, owners).items()}


# ------------------------------------------------------------------------------------------ as torch does it


class Wrapped(nn.Module):
    """Stands where torch would put FullyShardedDataParallel."""

    def __init__(self, module: nn.Module, **_: Any) -> None:
        super().__init__()
        self.module = module


def called_only(policy: Any) -> Any:
    """``policy`` but for containers, which torch wraps although they are never called; not where classes are named."""
    if "transformer_layer_cls" in policy.keywords:
        return policy

    def asked(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        wanted = policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)
        return wanted and (recurse or not is_container(module))

    return asked


def wrapped_by_torch(model: nn.Module, policy: Any) -> set[str]:
    """Names of the modules that torch itself wraps in a copy of ``model``, children only."""
    model = copy.deepcopy(model)
    names = {module: name for name, module in model.named_modules()}
    if isinstance(policy, torch_wrap._Policy):
        targets = policy._run_policy(model, ignored_modules=set(), root_kwargs={})
        torch_wrap._post_order_apply(model, torch_wrap._construct_wrap_fn(model, targets, Wrapped))
    else:
        torch_wrap._recursive_wrap(
            model, called_only(policy), Wrapped, ignored_modules=set(), ignored_params=set(), only_wrap_children=True
        )
    return {names[module.module] for module in model.modules() if isinstance(module, Wrapped)}


def size_policy(minimum: int) -> Any:
    return functools.partial(torch_wrap.size_based_auto_wrap_policy, min_num_params=minimum)


TORCH_POLICIES: dict[str, Any] = {
    **{f"size {minimum}": size_policy(minimum) for minimum in (1, 6, 12, 30, 60, 100, 250, 700, 10**6)},
    "size with leaves": functools.partial(
        torch_wrap.size_based_auto_wrap_policy, min_num_params=6, force_leaf_modules={Block}
    ),
    "size with exclusions": functools.partial(
        torch_wrap.size_based_auto_wrap_policy, min_num_params=6, exclude_wrap_modules={Block, nn.Linear}
    ),
    "transformer": lambda classes: functools.partial(
        torch_wrap.transformer_auto_wrap_policy, transformer_layer_cls=classes
    ),
    "lambda": functools.partial(
        torch_wrap.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.Linear) and m.in_features > 3
    ),
    "either": functools.partial(
        torch_wrap._or_policy, policies=[size_policy(100), torch_wrap.ModuleWrapPolicy({Wide})]
    ),
    "classes": torch_wrap.ModuleWrapPolicy,
    "custom": torch_wrap.CustomPolicy(lambda m: isinstance(m, (nn.Linear, ComplexAffine))),
}


CLASSES = {Block, nn.TransformerEncoderLayer, ComplexAffine}


def torch_policy(name: str, model: nn.Module) -> Any:
    """The policy; one over classes names those that the model has."""
    if name not in ("transformer", "classes"):
        return TORCH_POLICIES[name]
    return TORCH_POLICIES[name]({cls for cls in CLASSES if any(isinstance(m, cls) for m in model.modules())})


@pytest.mark.parametrize("name", TORCH_POLICIES)
@pytest.mark.parametrize("model", MODELS)
def test_torch_policies_pick_what_torch_wraps(model: str, name: str) -> None:
    """Counted in reals, as torch counts once complex parameters are stored as pairs."""
    native, flat = MODELS[model](), tensorfy(MODELS[model]())
    policy = torch_policy(name, native)
    expected = wrapped_by_torch(flat, policy)
    assert picked(flat, policy) == expected
    assert picked(native, policy) == expected


# ------------------------------------------------------------------------------------------ fsshard's own forms


def test_none_is_the_root_alone() -> None:
    assert resolve_units(ModuleTable(blocks()), None, ()) == {}


@pytest.mark.parametrize("kind", [set, list])
def test_classes_and_their_subclasses(kind: Any) -> None:
    assert picked(blocks(), kind([Block])) == picked(blocks(), Block) == {"0.0", "0.1", "0.2", "1.x"}
    assert reasons(blocks(), kind([Wide])) == {"0.2": "is a Wide"}


def test_class_names_are_exact() -> None:
    assert picked(blocks(), {"Block"}) == {"0.0", "0.1", "1.x"}
    assert picked(blocks(), {"Wide", nn.ModuleDict}) == {"0.2", "1"}
    model = tensorfy(ZOO["mlp_complex"].build())
    assert picked(model, {ComplexAffine}) == picked(model, {"ComplexAffine"}) == {"1"}


def test_absent_classes_are_named_with_what_there_is() -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve_units(ModuleTable(blocks()), {Wide, nn.Conv2d, "Absent"}, ())
    text = "the model has no Conv2d, Absent; it has Block, Linear, ModuleDict, Sequential, Wide"
    assert str(caught.value) == f"auto_wrap_policy: {text}"


@pytest.mark.parametrize("name", ["transformer", "classes"])
@pytest.mark.parametrize("classes", [{nn.Conv2d}, {Wide, nn.Conv2d}], ids=["none is there", "one is there"])
def test_absent_classes_of_torchs_policies_are_named_too(name: str, classes: Any) -> None:
    """torch itself picks nothing for them, and says nothing."""
    policy, text = TORCH_POLICIES[name](classes), "the model has no Conv2d; it has Block, Linear, ModuleDict"
    with pytest.raises(ConfigurationError, match=f"^auto_wrap_policy: {text}"):
        resolve_units(ModuleTable(blocks()), policy, ())
    with pytest.raises(ConfigurationError, match=f"^activation_checkpointing: {text}"):
        resolve_blocks(ModuleTable(blocks()), policy)


SET = "expected module classes, or their names, in a set"
SIZE = "expected a positive number of bytes"


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        *((policy, SET) for policy in (set(), [], {3}, [Block, None], [nn.Linear(1, 1)])),
        *((policy, "auto_wrap_policy=") for policy in ("all", "", 1e8, object(), b"auto", nn.Linear(1, 1))),
        *((policy, SIZE) for policy in (0, -1, True, False)),
        ("tuned", r"wrap\(model, \*\*fsshard\.tune\(.*\)\.settings\)"),
        (torch_wrap.CustomPolicy(lambda m: {"sharding_strategy": 2} if isinstance(m, Block) else False), "per module"),
    ],
)
def test_what_is_no_policy_is_refused(policy: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        resolve_units(ModuleTable(blocks()), policy, ())


@pytest.mark.parametrize(("dtype", "size"), [(torch.complex64, 8), (torch.complex128, 16)])
@pytest.mark.parametrize("flat", [False, True])
def test_sizes_are_in_bytes(dtype: torch.dtype, size: int, flat: bool) -> None:
    """4 * 4 + 4 complex numbers; a float32 has 4 bytes, a complex64 8."""
    model = nn.Sequential(ComplexAffine(4, dtype), nn.Linear(4, 4))
    model = tensorfy(model) if flat else model
    assert picked(model, 20 * size) == {"0"}
    assert picked(model, 20 * size + 1) == set()
    assert picked(model, 80) == {"0", "1"}
    assert reasons(model, 1000 * size) == {}
    assert list(reasons(model, 20 * size).values()) == [f"holds at least {20 * size:,} bytes"]


def test_sizes_count_what_is_left_over_bottom_up() -> None:
    """Blocks of widths 2, 4, 8 hold 48, 160 and 576 bytes; their layers half of it."""
    assert picked(blocks(), 288) == {"0.2.first", "0.2.second"}
    assert picked(blocks(), 289) == {"0.2"}
    assert picked(blocks(), 208) == {"0", "0.2.first", "0.2.second"}
    assert picked(blocks(), 577) == {"0"}


def test_sizes_never_pick_what_is_not_called() -> None:
    """Containers, factorized tensors, and the projection whose weight attention reads itself."""
    assert picked(nn.Sequential(nn.ModuleList([nn.Linear(8, 8)]), nn.Linear(1, 1)), 10) == {"0.0"}
    assert "1.layers.0.self_attn.out_proj" not in picked(encoder(), 16)
    assert "1.layers.0.self_attn" in picked(encoder(), 16)
    model = ZOO["tfno_tucker"].build()
    found = picked(model, 16)
    assert not any(is_container(model.get_submodule(name)) for name in found)
    assert "fno_blocks.convs.0" in found


def test_callables_of_one_argument() -> None:
    assert picked(blocks(), lambda module: isinstance(module, Wide)) == {"0.2"}

    def large(m: nn.Module) -> bool:
        return sum(p.numel() for p in m.parameters()) > 100

    assert reasons(blocks(), large) == {"0": "picked by large", "0.2": "picked by large"}


def test_callables_of_torchs_three_arguments() -> None:
    seen = []

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        seen.append((type(module), recurse, nonwrapped_numel))
        return not isinstance(module, Wide) if recurse else isinstance(module, nn.Linear)

    assert reasons(nn.Sequential(Block(2), Wide(3)), policy) == {
        "0.first": "picked by policy",
        "0.second": "picked by policy",
    }
    assert seen[:3] == [(nn.Sequential, True, 36), (Block, True, 12), (nn.Linear, True, 6)]
    assert (Block, False, 0) in seen  # both layers are units of their own by then
    assert (Wide, False, 24) not in seen  # not entered, so never asked


def test_callable_objects() -> None:
    class Policy:
        def __call__(self, module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
            return recurse or isinstance(module, Wide)

    assert picked(blocks(), Policy()) == {"0.2"}
    assert picked(blocks(), functools.partial(lambda cls, module: isinstance(module, cls), Wide)) == {"0.2"}


# ------------------------------------------------------------------------------------------ "auto"


def test_auto_takes_owners_of_complex_weights() -> None:
    model = ZOO["mlp_complex"].build()
    assert reasons(model, "auto", (model[1],)) == {"1": "owns complex weights"}


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("kind", [set, list])
def test_auto_takes_no_split_modules(inner: bool, kind: Any) -> None:
    """A Hugging Face model names them, or one inside a user's own."""
    model = blocks()
    model._no_split_modules = kind(["Block", "Wide"])
    outer = nn.ModuleDict({"backbone": model}) if inner else model
    start = "backbone." if inner else ""
    assert picked(outer, "auto") == {start + name for name in ("0.0", "0.1", "0.2", "1.x")}
    assert reasons(outer, "auto")[start + "0.2"] == "Wide in _no_split_modules"


def test_auto_takes_transformer_layers() -> None:
    assert reasons(encoder(), "auto") == dict.fromkeys(("1.layers.0", "1.layers.1"), "is an nn.TransformerEncoderLayer")
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 2)
    assert picked(decoder, "auto") == {"layers.0", "layers.1"}


def test_auto_goes_by_size_where_a_model_names_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert picked(blocks(), "auto") == set()
    monkeypatch.setattr(policies, "AUTO_MIN_BYTES", 289)
    assert reasons(blocks(), "auto") == {"0.2": "holds at least 289 bytes"}


def test_auto_means_a_hundred_megabytes() -> None:
    with torch.device("meta"):
        layers = nn.Sequential(nn.Linear(4999, 5000, bias=False), nn.Linear(5000, 5000, bias=False))
    assert reasons(layers, "auto") == {"1": "holds at least 100,000,000 bytes"}


# ------------------------------------------------------------------------------------------ containers


def test_containers() -> None:
    held = [nn.ModuleList(), nn.ModuleDict(), nn.ParameterList(), nn.ParameterDict()]
    assert all(is_container(module) for module in held)
    assert not any(is_container(module) for module in (nn.Sequential(), nn.Linear(1, 1), ComplexAffine(), ToReal()))


@pytest.mark.parametrize("name", ["tfno_tucker", "fno_complex_tucker", "fno_dense"])
@pytest.mark.parametrize("flat", [False, True])
def test_factorized_tensors_are_containers(name: str, flat: bool) -> None:
    model = ZOO[name].build()
    model = tensorfy(model) if flat else model
    conv = model.fno_blocks.convs[0]
    assert is_container(conv.weight) and not is_container(conv)
    assert all(is_container(module) for module in conv.weight.modules())


# ------------------------------------------------------------------------------------------ precision

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, Precision()),
        ("fp32", Precision()),
        ("bf16", Precision(param=BF16, reduce=FP32, output=FP32)),
        ("fp16", Precision(param=FP16, reduce=FP32, output=FP32)),
        (Precision(param=BF16, fp32_units=FP32), Precision(param=BF16, fp32_units=FP32)),
        (MixedPrecision(), Precision()),
        (MixedPrecision(BF16, FP32, FP16), Precision(param=BF16, reduce=FP32, buffer=FP16)),
        (MixedPrecisionPolicy(), Precision()),
        (MixedPrecisionPolicy(BF16, FP32, FP64), Precision(param=BF16, reduce=FP32, output=FP64)),
    ],
)
def test_accepted_precisions(value: object, expected: Precision) -> None:
    assert resolve_precision(value) == expected


@pytest.mark.parametrize("value", ["bfloat16", "", BF16, 16, {"param": BF16}, object()])
def test_what_is_no_precision_is_refused(value: object) -> None:
    with pytest.raises(PrecisionError, match=r"expected None, 'fp32', 'bf16', 'fp16', fsshard\.Precision, or torch's"):
        resolve_precision(value)


@pytest.mark.parametrize(
    ("value", "setting"),
    [
        (MixedPrecision(param_dtype=BF16, keep_low_precision_grads=True), "keep_low_precision_grads=True"),
        (MixedPrecision(param_dtype=BF16, cast_forward_inputs=True), "cast_forward_inputs=True"),
        (MixedPrecision(param_dtype=BF16, cast_root_forward_inputs=False), "cast_root_forward_inputs=False"),
        (MixedPrecision(param_dtype=BF16, _module_classes_to_ignore=()), r"_module_classes_to_ignore=\(\)"),
        (MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False), "cast_forward_inputs=False"),
    ],
)
def test_settings_of_torchs_policies_that_would_be_lost_are_refused(value: object, setting: str) -> None:
    with pytest.raises(PrecisionError, match=setting):
        resolve_precision(value)


def test_fp32_units_compute_in_float32() -> None:
    with pytest.raises(PrecisionError, match="compute in float32 under every backend; leave fp32_units=None"):
        Precision(fp32_units=BF16)
    assert Precision(fp32_units=FP32).is_full


@pytest.mark.parametrize("field", ["param", "reduce", "buffer", "output", "fp32_units"])
@pytest.mark.parametrize("value", [torch.complex64, "bf16"])
def test_precisions_are_floating_point_dtypes(field: str, value: Any) -> None:
    with pytest.raises(PrecisionError, match=rf"Precision\({field}=\.\.\.\): expected a floating-point dtype or None"):
        Precision(**{field: value})


def test_full_precision_is_full_in_every_field() -> None:
    for field in ("param", "reduce", "buffer", "output"):
        assert Precision(**{field: FP32}).is_full
        assert not Precision(**{field: BF16}).is_full and not Precision(**{field: FP64}).is_full
