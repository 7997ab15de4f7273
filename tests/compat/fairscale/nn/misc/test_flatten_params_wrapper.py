"""FlattenParamsWrapper: FairScale's behaviour, and no loss of a checkpoint or a copy."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fairscale.nn.misc.flatten_params_wrapper import FlattenParamsWrapper as Real
from torch import Tensor, nn

import fsshard.compat.fairscale as mirror
from fsshard.compat.fairscale.nn.misc.flatten_params_wrapper import FlatParameter
from fsshard.compat.fairscale.nn.misc.flatten_params_wrapper import FlattenParamsWrapper as Ours
from tests.model.recomputed import Counter

BOTH = pytest.mark.parametrize("wrapper", [Real, Ours], ids=["real", "ours"])


def layers(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Sequential(nn.Tanh(), nn.Linear(6, 3)))


def tied(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


def transformer(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)


class Recurrent(nn.Module):
    """An LSTM keeps its parameters in a list of its own besides."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(4, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.cell(x)[0]
        return output


def recurrent(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Recurrent()


MODELS: list[Callable[..., nn.Module]] = [layers, tied, transformer, recurrent]
EVERY = pytest.mark.parametrize("make", MODELS)


def batch(make: Any) -> Tensor:
    shape = (5, 7, 4) if make in (transformer, recurrent) else (5, 4)
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def trained(module: nn.Module, x: Tensor, steps: int = 3) -> dict[str, Tensor]:
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    torch.manual_seed(2)
    for _ in range(steps):
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


# ------------------------------------------------------------------------------------------------ names


@pytest.mark.parametrize(
    "name",
    ["__init__", "unflatten_params", "get_param_views", "metadata", "flat_state_dict", "state_dict", "forward"],
)
def test_signatures(name: str) -> None:
    theirs, here = (inspect.signature(getattr(kind, name)).parameters for kind in (Real, Ours))
    assert [(p.name, p.kind, p.default) for p in theirs.values()] == [
        (p.name, p.kind, p.default) for p in here.values()
    ]


def test_addresses() -> None:
    assert mirror.nn.FlattenParamsWrapper is mirror.nn.misc.FlattenParamsWrapper is Ours
    assert list(inspect.signature(Ours(layers()).load_state_dict).parameters)[:2] == ["state_dict", "strict"]


# ------------------------------------------------------------------------------------------------ flat


@BOTH
@EVERY
def test_what_it_is(wrapper: Any, make: Any) -> None:
    plain, module = make(), make()
    flat = wrapper(module)
    assert flat.module is module and flat.is_flattened
    assert [name for name, _ in flat.named_parameters()] == ["flat_param_0"] == flat.flat_param_names
    assert flat.flat_param is flat.flat_params[0] and flat.flat_param.numel() == sum(
        p.numel() for p in plain.parameters()
    )
    assert flat.num_params_managed == len(list(plain.parameters()))
    assert list(module.parameters()) == []
    named = list(plain.named_parameters())
    assert flat.metadata(0) == (
        [f"_fpw_module.{n}" for n, _ in named],
        [p.shape for _, p in named],
        [p.numel() for _, p in named],
    )
    assert all(torch.equal(view, p) for view, (_, p) in zip(flat.get_param_views(), named, strict=True))


@EVERY
def test_trains_as_the_plain_module(make: Any) -> None:
    """Adam, element by element, to the last bit; norm and names with it."""
    assert equal(trained(make(), batch(make)), trained(Ours(make()), batch(make)))


@BOTH
def test_looks_through(wrapper: Any) -> None:
    flat = wrapper(layers())
    assert flat[0] is flat.module[0] and isinstance(flat[1], nn.BatchNorm1d)
    flat.module.note = "mine"
    assert flat.note == "mine"
    with pytest.raises(AttributeError):
        _ = flat.nothing
    flat(batch(layers)).sum().backward()
    assert flat.flat_param.grad is not None and torch.equal(
        flat.module[0].weight.detach().reshape(-1), flat.flat_param[:24]
    )


@BOTH
def test_groups(wrapper: Any) -> None:
    module = layers()
    first, second = list(module[0].parameters()), list(module[2].parameters())
    flat = wrapper(module, [first, second], ["front", "back"])
    assert list(dict(flat.named_parameters())) == [
        "flat_param_front",
        "flat_param_back",
        "_fpw_module.1.weight",
        "_fpw_module.1.bias",
    ]
    assert [p.numel() for p in flat.flat_params] == [30, 21] and flat.num_params_managed == 4
    with pytest.raises(AssertionError):
        _ = flat.flat_param
    assert [tuple(view.shape) for view in flat.get_param_views()] == [(6, 4), (6,), (3, 6), (3,)]
    assert flat.metadata(1)[1] == [torch.Size([3, 6]), torch.Size([3])]


@pytest.mark.parametrize("given", [[], [[]]])
@BOTH
def test_nothing_to_flatten(wrapper: Any, given: list[Any]) -> None:
    plain, flat = layers(), wrapper(layers(), given)
    assert torch.equal(plain(batch(layers)), flat(batch(layers))) and flat.flat_params == []
    assert equal(state(plain), state(flat))
    empty = wrapper(nn.Sequential(nn.Tanh()))
    assert list(empty.parameters()) == [] and not empty.state_dict() and empty(torch.ones(2)).shape == (2,)


@BOTH
def test_bad_groups(wrapper: Any) -> None:
    with pytest.raises(ValueError):
        wrapper(layers(), flat_param_names=["a", "b"])
    module = layers()
    with pytest.raises(ValueError):
        wrapper(module, [list(module[0].parameters()), list(module[2].parameters())], ["a", "a"])
    module[0].half()
    with pytest.raises(AssertionError):
        wrapper(module)
    frozen = layers()
    frozen[0].requires_grad_(False)
    with pytest.raises(AssertionError):
        wrapper(frozen)
    with pytest.raises(ValueError, match=r"(?i)flat"):
        wrapper(wrapper(layers()))
    with pytest.raises(ValueError):
        list(wrapper(layers()).get_param_views([torch.zeros(3)]))
    with pytest.raises(AssertionError):
        list(wrapper(layers()).get_param_views([torch.zeros(3)] * 2))


@pytest.mark.parametrize(("wrapper", "kind"), [(Real, AttributeError), (Ours, ValueError)], ids=["real", "ours"])
def test_a_parameter_in_two_lists(wrapper: Any, kind: type[Exception]) -> None:
    module = layers()
    with pytest.raises(kind):
        wrapper(module, [list(module[0].parameters()), list(module.parameters())])


def test_what_a_bad_call_says() -> None:
    module = layers()
    module[0].half()
    with pytest.raises(AssertionError, match=r"one dtype, got torch.float16 \(_fpw_module.0.bias\), torch.float32"):
        Ours(module)
    with pytest.raises(ValueError, match="at least one parameter"):
        FlatParameter([])
    with pytest.raises(ValueError, match="parameters or tensors"):
        FlatParameter(["text"])  # type: ignore[list-item]
    flat = Ours(layers())
    with flat.unflatten_params():
        with pytest.raises(AssertionError, match="not flat"):
            flat.flat_state_dict()
        with pytest.raises(AssertionError, match="not flat"), flat.unflatten_params([torch.zeros(63)]):
            pass


@BOTH
def test_conversion(wrapper: Any) -> None:
    module = layers()
    flat = wrapper(module, list(module[0].parameters())).to(torch.float64)
    assert flat.flat_param.dtype == flat.module[2][1].weight.dtype == torch.float64
    assert flat(batch(layers).double()).dtype == torch.float64


def test_conversion_moves_the_views() -> None:
    flat = Ours(layers()).double()
    assert flat.module[0].weight.dtype == torch.float64 and flat.flat_params[0] is flat.flat_param_0
    try:
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        flat.float()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert isinstance(flat.flat_param, FlatParameter) and flat.flat_param is flat.flat_param_0
    flat(batch(layers)).sum().backward()
    assert flat.flat_param.grad is not None and flat.metadata(0)[0][0] == "_fpw_module.0.weight"


def test_frozen() -> None:
    flat = Ours(layers().requires_grad_(False))
    assert not flat.flat_param.requires_grad and not flat(batch(layers)).requires_grad
    flat.requires_grad_(True)
    assert flat(batch(layers)).requires_grad


# ------------------------------------------------------------------------------------------------ not flat


@BOTH
@EVERY
def test_unflatten_params(wrapper: Any, make: Any) -> None:
    plain, flat = make(), wrapper(make())
    own = flat.flat_param
    with flat.unflatten_params():
        assert not flat.is_flattened and flat.flat_params == []
        inside = {name.removeprefix("_fpw_module."): value for name, value in flat.named_parameters()}
        assert inside.keys() == dict(plain.named_parameters()).keys()
        with flat.unflatten_params():
            assert not flat.is_flattened
        with torch.no_grad():
            next(iter(inside.values())).add_(1)
    assert flat.flat_param is own and flat.is_flattened
    assert torch.equal(next(flat.get_param_views()), next(plain.parameters()) + 1)


@BOTH
def test_other_data(wrapper: Any) -> None:
    flat = wrapper(layers())
    before = flat.flat_param.detach().clone()
    with flat.unflatten_params([torch.full_like(before, 42.0)]):
        shown = state(flat)
    assert all((value == 42).all() for name, value in shown.items() if "running" not in name and "num" not in name)
    assert torch.equal(flat.flat_param, before)
    flat.load_state_dict(shown)
    assert (flat.flat_param == 42).all()


@BOTH
def test_flat_again_after_an_error(wrapper: Any) -> None:
    flat = wrapper(layers())
    with pytest.raises(KeyError), flat.unflatten_params():
        raise KeyError
    assert flat.is_flattened and len(flat.flat_params) == 1


def test_replaced_parameters_are_kept() -> None:
    """Raw, they are lost without a word."""
    kept = []
    for wrapper in (Real, Ours):
        flat = wrapper(layers())
        with flat.unflatten_params():
            flat.module[0].weight = nn.Parameter(torch.ones(6, 4))
        kept.append(bool((flat.flat_param[:24] == 1).all()))
    assert kept == [False, True]


# ------------------------------------------------------------------------------------------------ state dicts


@EVERY
def test_state_dict_is_the_plain_one(make: Any) -> None:
    plain, flat = make(), Ours(make())
    flat(batch(make)), plain(batch(make))
    assert equal(state(plain), state(flat))
    assert plain.state_dict()._metadata == flat.state_dict()._metadata
    make(3).load_state_dict(flat.state_dict())


def test_order_of_a_partly_flat_module() -> None:
    """Raw, parameters that were flattened come last in their module."""
    found = []
    for wrapper in (Real, Ours):
        module = layers()
        flat = wrapper(module, [module[0].weight, module[2][1].weight])
        found.append(list(flat.state_dict()) == list(layers().state_dict()))
    assert found == [False, True]


@BOTH
@EVERY
def test_load_state_dict(wrapper: Any, make: Any) -> None:
    expected = make().eval()
    flat = wrapper(make(7)).eval()
    flat.load_state_dict(expected.state_dict())
    assert torch.equal(flat(batch(make)), expected(batch(make)))
    with flat.unflatten_params():
        flat.load_state_dict(make(8).state_dict())
    assert torch.equal(flat(batch(make)), make(8).eval()(batch(make)))


@BOTH
def test_flat_state_dict(wrapper: Any) -> None:
    flat, other = wrapper(layers()), wrapper(layers(5))
    saved = flat.flat_state_dict()
    assert next(iter(saved)) == "flat_param_0" and "1.running_mean" in saved
    other.load_state_dict(saved)
    assert equal(state(flat), state(other))


def test_a_flat_state_dict_of_an_older_release() -> None:
    """One ``flat_param`` without a number: FairScale 0.4.13 means to take it, and stops at an assert of its own."""
    older = {key.replace("flat_param_0", "flat_param"): v for key, v in Real(layers()).flat_state_dict().items()}
    keys, flat = list(older), Ours(layers(5))
    with pytest.raises(AssertionError, match="flat_param"):
        Real(layers(5)).load_state_dict(dict(older))
    flat.load_state_dict(older)
    assert equal(state(flat), state(layers())) and list(older) == keys


def nested(wrapper: Any, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    inner = layers(seed)
    return nn.Sequential(nn.Linear(4, 4), wrapper(inner) if wrapper else inner, nn.Linear(3, 2))


@pytest.mark.fairscale_row(29)
def test_row_29_the_raw_faults() -> None:
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"1.flat_param_0\""):
        nested(Real, 1).load_state_dict(nested(Real, 0).state_dict())
    with pytest.raises(ValueError, match="non-empty list"):
        copy.deepcopy(Real(layers()))


@pytest.mark.fairscale_row(29)
def test_row_29_nested_in_a_plain_module() -> None:
    plain, flat, other = nested(None, 0), nested(Ours, 0), nested(Ours, 1)
    assert equal(state(plain), state(flat))
    assert str(other.load_state_dict(flat.state_dict())) == "<All keys matched successfully>"
    assert equal(trained(plain, batch(layers)), trained(other, batch(layers)))
    nested(None, 5).load_state_dict(other.state_dict())
    deeper = nn.ModuleDict({"a": nn.ModuleList([nested(Ours, 3)])})
    deeper.load_state_dict({f"a.0.{name}": value for name, value in flat.state_dict().items()})
    assert equal(state(deeper["a"][0]), state(flat))


@pytest.mark.fairscale_row(29)
def test_row_29_the_optimizer_goes_on() -> None:
    """Loading writes into the parameters that the optimizer holds."""
    flat = nested(Ours, 0)
    parameters = list(flat.parameters())
    flat.load_state_dict(nested(None, 4).state_dict())
    assert [p is q for p, q in zip(flat.parameters(), parameters, strict=True)] == [True] * len(parameters)
    assert equal(trained(flat, batch(layers)), trained(nested(None, 4), batch(layers)))


@pytest.mark.fairscale_row(29)
def test_row_29_what_does_not_fit_is_named() -> None:
    flat, saved = nested(Ours, 0), nested(None, 1).state_dict()
    saved["1.strange"] = saved.pop("1.0.weight")
    with pytest.raises(RuntimeError, match=r"Missing key.*\"1.0.weight\"[^_]*Unexpected key.*\"1.strange\""):
        flat.load_state_dict(saved)
    found = flat.load_state_dict(saved, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["1.0.weight"], ["1.strange"])
    saved["1.0.weight"] = torch.zeros(2, 2)
    with pytest.raises(RuntimeError, match="size mismatch"):
        flat.load_state_dict(saved, strict=False)
    assert flat[1].is_flattened and len(list(flat[1].parameters())) == 1


class Refusing(nn.Linear):
    def _load_from_state_dict(self, *args: Any) -> None:
        raise KeyError("mine")


def test_flat_again_after_a_failed_load() -> None:
    flat = nn.Sequential(Ours(nn.Sequential(nn.Linear(4, 4), Refusing(4, 4))))
    with pytest.raises(KeyError, match="mine"):
        flat.load_state_dict(nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))).state_dict())
    flat(batch(layers)).sum().backward()
    assert flat[0].is_flattened and flat[0].flat_param.grad is not None


@pytest.mark.parametrize("assign", [False, True])
def test_assign(assign: bool) -> None:
    flat = nested(Ours, 0)
    own = flat[1].flat_param
    flat.load_state_dict(nested(None, 1).state_dict(), assign=assign)
    assert equal(state(flat), state(nested(None, 1))) and flat[1].flat_param is own


# ------------------------------------------------------------------------------------------------ copies


@pytest.mark.fairscale_row(29)
@EVERY
@pytest.mark.parametrize("after", ["built", "forward", "backward"])
def test_row_29_a_copy_is_its_own(make: Any, after: str) -> None:
    flat = nn.Sequential(Ours(make()))
    if after != "built":
        torch.manual_seed(2)
        output = flat(batch(make))
        if after == "backward":
            output.sum().backward()
    before = state(flat)
    twin = copy.deepcopy(flat)
    assert equal(state(twin), before) and isinstance(twin[0].flat_param, FlatParameter)
    assert twin[0].flat_param is not flat[0].flat_param and twin[0].metadata(0)[0] == flat[0].metadata(0)[0]
    moved = trained(twin, batch(make))
    assert equal(state(flat), before) and not equal(moved, before)
    if after == "built":
        assert equal(moved, trained(nn.Sequential(make()), batch(make)))


def test_a_copy_with_its_optimizer() -> None:
    flat = Ours(layers())
    optimizer = torch.optim.SGD(flat.parameters(), lr=0.1)
    twin, twin_optimizer = copy.deepcopy((flat, optimizer))
    assert twin_optimizer.param_groups[0]["params"][0] is twin.flat_param
    assert isinstance(copy.deepcopy(flat.flat_param), FlatParameter)
    assert copy.deepcopy(flat.flat_param).metadata() == flat.flat_param.metadata()


@EVERY
def test_pickle(make: Any) -> None:
    module = make()
    flat = Ours(module, [list(module.parameters())[:2]])
    flat(batch(make))
    before = state(flat)
    file = io.BytesIO()
    torch.save(flat, file)
    assert len(file.getvalue()) < 40_000
    file.seek(0)
    for twin in (pickle.loads(pickle.dumps(flat)), torch.load(file, weights_only=False)):
        assert equal(state(twin), before) and len(twin.flat_params) == 1
        flat.load_state_dict(before)
        torch.manual_seed(3)
        expected = flat(batch(make))
        torch.manual_seed(3)
        assert torch.equal(twin(batch(make)), expected)


def test_with_checkpoint_wrapper() -> None:
    wrap = mirror.nn.checkpoint_wrapper
    outside, inside = wrap(Ours(layers())), Ours(wrap(layers()))
    expected = trained(layers(), batch(layers))
    assert equal(trained(outside, batch(layers)), expected) and equal(trained(inside, batch(layers)), expected)
    twin = copy.deepcopy(nn.Sequential(outside, nn.Linear(3, 3)))
    assert twin[0].forward.module is twin[0] and twin(batch(layers)).shape == (5, 3)


class Counting(nn.Linear):
    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.counter = Counter()

    def forward(self, input: Tensor) -> Tensor:
        self.counter.count += 1
        return super().forward(input)


@BOTH
def test_frozen_fronts_are_not_recomputed(wrapper: Any) -> None:
    torch.manual_seed(0)
    stack = nn.Sequential(*(wrapper(mirror.nn.checkpoint_wrapper(Counting(4, 4))) for _ in range(4)))
    stack[0].requires_grad_(False)
    stack[1].requires_grad_(False)
    stack(batch(layers)).sum().backward()
    assert [part.counter.count for part in stack] == [1, 1, 2, 2]
    assert [part.flat_param.grad is None for part in stack] == [True, True, False, False]
