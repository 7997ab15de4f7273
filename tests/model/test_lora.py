"""fsshard.lora against bare replicas with the same adapters, whose gradients are averaged by hand."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from fsshard.errors import AlreadyWrapped, ConfigurationError, ModelError, StateDictError
from fsshard.model.lora import adapters_of
from tests.models import Spectral, batch, take_step
from tests.on_ranks import on_ranks
from tests.optimizers import average
from tests.training_runs import check_equal, differences

ENGINES: tuple[dict[str, Any], ...] = (
    {"backend": "ddp"},
    {"backend": "fairscale", "implementation": "real"},
    {"backend": "fairscale", "implementation": "native"},
    {"backend": "fsdp"},
    {"backend": "fsdp", "auto_wrap_policy": None},
    {"backend": "fsdp2"},
)


class Net(nn.Module):
    """A convolution, a complex weight, a linear layer, and a head that is trained whole."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.spectral, self.linear = nn.Conv1d(1, 4, 3, padding=1), Spectral(4), nn.Linear(16, 6)
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.conv(x[:, None])).transpose(1, 2)
        hidden = torch.tanh(self.spectral(hidden)).flatten(1)
        return self.head(self.norm(torch.tanh(self.linear(hidden))))


def net(target: str = "conv|spectral|linear", alpha: float | None = 8) -> nn.Module:
    torch.manual_seed(0)
    model = fsshard.lora(Net(), rank=2, target=target, alpha=alpha)
    model.head.requires_grad_()
    return model


def operator(factorization: str | None) -> nn.Module:
    """A neural operator, the input of which is made of the batch's."""
    from neuralop.models import TFNO

    torch.manual_seed(0)
    sizes = {"n_modes": (3, 3), "hidden_channels": 4, "in_channels": 1, "out_channels": 1}
    inner = TFNO(**sizes, factorization=factorization, rank=0.5, n_layers=1, implementation="reconstructed")
    fsshard.lora(inner, rank=2, target=r"convs\..*weight")
    return Images(inner)


class Images(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x[:, None, :, None] * x[:, None, None, :])


KINDS: dict[str, Callable[[], nn.Module]] = {
    "net": net,
    **{str(kind): functools.partial(operator, kind) for kind in (None, "Tucker", "ComplexTucker", "ComplexCP")},
}


def train(model: Any, steps: range, optimizer: Any) -> None:
    for step in steps:
        model(batch(step)).square().mean().backward()
        if not isinstance(model, fsshard.ShardedModule):
            average(model)
        take_step(optimizer)


def adam(model: Any) -> Any:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if isinstance(model, fsshard.ShardedModule):
        return fsshard.build_optimizer(model, torch.optim.AdamW, trained, lr=0.1)
    return torch.optim.AdamW(trained, lr=0.1)


def tensors(model: Any) -> dict[str, Tensor]:
    """The state dict, without what neuralop adds; buffers are rank 0's under an engine."""
    found = {key: value for key, value in model.state_dict().items() if isinstance(value, Tensor)}
    return {key: value for key, value in found.items() if dist.get_rank() == 0 or "norm.running" not in key}


def bare(kind: str, steps: int) -> dict[str, Tensor]:
    model = KINDS[kind]()
    train(model, range(steps), adam(model))
    return tensors(model)


def job_trained(kind: str, folder: str) -> list[str]:
    """Two steps under one engine, and one more under the next, into which the trainable part alone was loaded."""
    want, found = bare(kind, 3), []
    for number, engine in enumerate(ENGINES):
        model = fsshard.wrap(KINDS[kind](), **engine)
        optimizer = adam(model)
        train(model, range(2), optimizer)
        fsshard.save(f"{folder}/{number}", model, optimizer, only="trainable")
        model = fsshard.wrap(KINDS[kind](), **ENGINES[(number + 1) % len(ENGINES)])
        optimizer = adam(model)
        loaded = fsshard.load(f"{folder}/{number}", model, optimizer)
        assert loaded.missing and all("lora_" not in key and "head" not in key for key in loaded.missing)
        train(model, range(2, 3), optimizer)
        found += [f"{engine}: {difference}" for difference in differences(want, tensors(model))]
    return found


@pytest.mark.parametrize(
    "kind",
    ["net", "ComplexTucker", *(pytest.param(k, marks=pytest.mark.long) for k in ("None", "Tucker", "ComplexCP"))],
)
def test_trained_saved_and_loaded_as_bare_replicas(ranks: Any, tmp_path: Path, kind: str) -> None:
    if kind != "net":
        pytest.importorskip("neuralop")
    assert ranks.run(job_trained, 2, kind, str(tmp_path)) == [[], []]


def job_on_other_ranks(folder: str, backend: str) -> dict[str, Tensor]:
    model = fsshard.wrap(net(), backend=backend)
    fsshard.load(folder, model)
    return tensors(model)


def job_saved(folder: str) -> dict[str, Tensor]:
    model = fsshard.wrap(net(), backend="fsdp")
    train(model, range(2), adam(model))
    fsshard.save(folder, model, only="trainable")
    return tensors(model)


def test_the_trainable_part_loads_on_any_number_of_ranks(ranks: Any, tmp_path: Path) -> None:
    want = ranks.run(job_saved, 2, f"{tmp_path}/last")[0]
    assert {path.name for path in (tmp_path / "last").iterdir()} > {"index.json"}
    for world_size, backend in ((1, "none"), (4, "fsdp"), (3, "fsdp2")):
        for rank, got in enumerate(ranks.run(job_on_other_ranks, world_size, f"{tmp_path}/last", backend)):
            mine = want if rank == 0 else {key: want[key] for key in got}
            check_equal(mine, got)


@on_ranks()
def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    """More is trainable than was saved; another argument; another model."""
    folder = f"{tmp_path}/last"
    told = []
    model = fsshard.wrap(net(), backend="fsdp2")
    fsshard.save(folder, model, only="trainable")
    try:
        fsshard.save(folder, model, only="frozen")
    except ConfigurationError as error:
        told.append(str(error))
    whole = net()
    whole.requires_grad_()
    for other in (whole, net(target="spectral")):
        try:
            fsshard.load(folder, fsshard.wrap(other, backend="fsdp2"))
        except StateDictError as error:
            told.append(str(error))
    argument, more, fewer = told
    assert "'trainable'" in argument and "conv.weight_lora.base" in more and "linear.weight_lora.lora_A" in fewer


def test_adapters_change_nothing_at_first_and_copies_are_their_own() -> None:
    x = torch.linspace(-1, 1, 12).view(3, 4)
    torch.manual_seed(0)
    want, model = Net().eval()(x), net().eval()
    assert torch.equal(model(x), want)
    assert sorted(adapters_of(model)) == ["conv.weight", "linear.weight", "spectral.weight"]
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        *(f"{layer}.weight_lora.lora_{part}" for layer in ("conv", "spectral", "linear") for part in "AB"),
        "head.weight",
        "head.bias",
    }
    with torch.no_grad():
        model.get_submodule("spectral.weight_lora").lora_B.normal_()  # type: ignore[union-attr, operator]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other.linear) is type(model.linear) and torch.equal(other(x), model(x))
    assert not torch.equal(model(x), want)


class Added(nn.Module):
    """A replica of what is added to a weight, by torch's own parametrization."""

    def __init__(self, kept: Any, scale: float) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Parameter(kept.lora_A.clone()), nn.Parameter(kept.lora_B.clone()), scale

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.scale * (self.b @ self.a)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("alpha", "scale"), [(None, 1.0), (1, 1 / 3), (0.1, 0.1 / 3)])
def test_the_scale_is_alpha_by_rank(dtype: torch.dtype, alpha: float | None, scale: float) -> None:
    """To the last bit in every dtype, and after casts, a copy and a state dict, which holds alpha."""
    x = torch.linspace(-1, 1, 12, dtype=dtype).view(3, 4)
    model = fsshard.lora(nn.Sequential(nn.Linear(4, 4, dtype=dtype)), rank=3, target="weight", alpha=alpha)
    want = nn.Sequential(nn.Linear(4, 4, dtype=dtype))
    kept = model.get_submodule("0.weight_lora")
    with torch.no_grad():
        kept.lora_B.normal_()
        want[0].weight.copy_(kept.base)
        want[0].bias.copy_(model.get_parameter("0.bias"))
    torch.nn.utils.parametrize.register_parametrization(want[0], "weight", Added(kept, scale))
    model(x).sum().backward()
    want(x).sum().backward()
    added = want.get_submodule("0.parametrizations.weight.0")
    assert torch.equal(kept.lora_A.grad, added.a.grad) and torch.equal(kept.lora_B.grad, added.b.grad)
    cast = copy.deepcopy(model).to(torch.bfloat16).to(dtype)
    other = fsshard.lora(nn.Sequential(nn.Linear(4, 4, dtype=dtype)), rank=3, target="weight", alpha=5)
    for again in (model, cast, pickle.loads(pickle.dumps(model)), other):
        again.load_state_dict(model.state_dict())
        assert again.get_submodule("0.weight_lora").alpha == kept.alpha
        assert torch.equal(again(x), want(x))


@pytest.mark.parametrize(
    ("build", "settings", "words"),
    [
        (Net, {"rank": 0, "target": "conv"}, "rank=0"),
        (Net, {"target": {nn.Linear}}, "regular expression"),
        (Net, {"target": "attention"}, "none matches"),
        (Net, {"rank": 64, "target": "."}, "none matches"),
    ],
)
def test_arguments_without_meaning(build: Any, settings: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        fsshard.lora(build(), **settings)


def test_models_that_cannot_be_adapted() -> None:
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    with pytest.raises(ModelError, match="shared"):
        fsshard.lora(tied, rank=2, target="weight")
    with pytest.raises(ModelError, match="recurrent"):
        fsshard.lora(nn.LSTM(4, 4), rank=2, target="weight")
    with pytest.raises(ModelError, match=r"no shape yet; run a forward of the model before"):
        fsshard.lora(nn.Sequential(nn.LazyLinear(4)), rank=2, target="weight")
    with pytest.raises(ModelError, match=r"one call, target='a\|b'"):
        fsshard.lora(net(), rank=2, target="head")
    with pytest.raises(AlreadyWrapped, match=r"call lora\(model\), then wrap it"):
        fsshard.lora(fsshard.tensorfy(Net()), rank=2, target="conv")


def test_a_weight_with_an_adapter_is_not_assigned() -> None:
    model = fsshard.lora(nn.Linear(4, 4), rank=2, target="weight")
    for value in (nn.Parameter(torch.ones(4, 4)), torch.ones(4, 4)):
        with pytest.raises(ModelError, match=r"cannot be assigned; under torch.no_grad\(\) call "):
            model.weight = value
    with torch.no_grad():
        model.weight_lora.base.copy_(torch.ones(4, 4))
    assert torch.equal(model.weight, torch.ones(4, 4))
    model.bias = nn.Parameter(torch.ones(4))


@on_ranks()
def test_second_derivatives() -> None:
    """FSDP1's passes of derivatives through units of two flat parameters."""
    want = []
    for engine in (None, *ENGINES):
        inner = net()
        inner.eval()
        model = inner if engine is None else fsshard.wrap(inner, **engine)
        optimizer = adam(model)
        x = batch(0).requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        (slope.square().mean() + output.square().mean()).backward()
        if engine is None:
            average(model)
        optimizer.step()
        weights = tensors(model)
        want = want or list(weights.values())
        check_equal(want, list(weights.values()), f"{engine}")


def job_gradients_of_t5(backend: str) -> float:
    """Return a rank's bytes of gradients after a backward, as a share of the adapters'."""
    from fsshard.recipes.models import small_t5

    torch.manual_seed(0)
    inner = small_t5(words=40, width=32, heads=4, layers=2, d_ff=48, dropout_rate=0.0)
    fsshard.lora(inner, rank=2, target=r"\.(q|v)\.weight$")
    trained = sum(parameter.nbytes for parameter in inner.parameters() if parameter.requires_grad)
    model = fsshard.wrap(inner, backend=backend)
    words = torch.arange(1, 9).view(2, 4)
    model(input_ids=words, labels=words).loss.backward()
    return model.memory_report().ranks[0].by_kind["gradients"] / trained


@pytest.mark.parametrize("backend", ["fsdp", "fsdp2"])
def test_a_frozen_t5_has_gradients_of_its_adapters_alone(ranks: Any, backend: str) -> None:
    """Raw FSDP1 holds one as long as each unit."""
    pytest.importorskip("transformers")
    assert all(0.4 < share < 0.6 for share in ranks.run(job_gradients_of_t5, 2, backend))
