"""Models built on the meta device: sharded first, filled then."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fsshard
from fsshard.errors import ModelError
from fsshard.launching.pool import RankPool
from tests.models import take_step
from tests.on_ranks import on_backends, on_ranks
from tests.training_runs import DISTRIBUTED, call, check_equal, differences, ranks_of, zoo

ALL = (*DISTRIBUTED, "none")
CASES = ("tied", "buffered", "tfno_tucker", "zero_dim", "t5", "conv_batchnorm", "frozen")


def on_meta(case: str) -> nn.Module:
    with torch.device("meta"):
        module = zoo()[case].build()
    return module


def steps(model: Any, case: str, count: int = 2) -> dict[str, Any]:
    optimizer = fsshard.build_optimizer(model, torch.optim.Adam, lr=0.01)
    for step in range(count):
        zoo()[case].loss(call(model, zoo()[case].batch(dist.get_rank(), step))).backward()
        take_step(optimizer)
    return dict(model.state_dict())


def real(case: str, backend: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state dict of the real model, and that after training it under the backend."""
    module = zoo()[case].build()
    start = {key: value.clone() if isinstance(value, Tensor) else value for key, value in module.state_dict().items()}
    return start, steps(fsshard.wrap(module, backend=backend), case)


# ------------------------------------------------------------------------------------------------ three ways to fill


@pytest.mark.covering
@pytest.mark.parametrize("backend", DISTRIBUTED)
@pytest.mark.parametrize("case", CASES)
@on_ranks()
def test_from_rank_0(case: str, backend: str) -> None:
    _, expected = real(case, backend)
    model = fsshard.wrap(zoo()[case].build() if dist.get_rank() == 0 else on_meta(case), backend=backend)
    check_equal(expected, steps(model, case))


@pytest.mark.covering
@pytest.mark.parametrize(
    ("case", "backend"), [*itertools.product(["tied", "tfno_tucker", "t5", "conv_batchnorm"], ALL)]
)
@on_ranks(ranks_of)
def test_from_a_state_dict(case: str, backend: str) -> None:
    start, expected = real(case, backend)
    found = {}
    for way, from_rank0 in (("everywhere", False), ("from rank 0", True)):
        model = fsshard.wrap(on_meta(case), backend=backend)
        given = start if not from_rank0 or dist.get_rank() == 0 else None
        model.load_state_dict(given, broadcast_from_rank0=from_rank0)
        found[way] = list(differences(expected, steps(model, case)))
    assert found == {"everywhere": [], "from rank 0": []}


class Noted(nn.Module):
    """Fills itself, a non-persistent buffer included; a complex weight that is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.weight = nn.Parameter(torch.empty(4, 4, dtype=torch.complex64))
        self.register_buffer("table", torch.empty(4), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(torch.randn(4, 4, dtype=torch.complex64, device=self.weight.device))
            self.table.copy_(torch.arange(4.0, device=self.table.device))

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(self.linear(x)).to(torch.complex64) @ self.weight).real * self.table


def job_reset(backend: str, init: object) -> tuple[dict[str, Tensor], Tensor, list[bool]]:
    torch.manual_seed(dist.get_rank())
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 4), Noted())
    model = fsshard.wrap(module, backend=backend, param_init_fn=init)
    fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    out = model(torch.ones(3, 4) + dist.get_rank())
    return model.state_dict(), module[1].table.clone(), [bool(torch.isfinite(out).all())]


def reset_all(module: nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


@pytest.mark.parametrize("init", ["reset_parameters", reset_all], ids=["name", "function"])
def test_by_reset_parameters(ranks: RankPool, init: object) -> None:
    """Ranks with other seeds hold rank 0's numbers, which are drawn alike under every backend."""
    expected = None
    for backend in ALL:
        for state, table, finite in ranks.run(job_reset, ranks_of(backend), backend, init):
            expected = expected or {**state, "1.norm.running_mean": None, "1.norm.running_var": None}
            assert finite == [True] and torch.equal(table, torch.arange(4.0))
            assert state["1.weight"].abs().mean() > 0.1 and state["0.weight"].abs().max() <= 0.5
            assert state["1.norm.num_batches_tracked"] == 1
            drawn = {name: value for name, value in expected.items() if value is not None}
            check_equal(drawn, {name: state[name] for name in drawn})


# ------------------------------------------------------------------------------------------------ what an init does


class Table(nn.Module):
    """Its method leaves out buffers that its constructor fills: floating-point, integer and persistent ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("index", torch.arange(4), persistent=False)
        self.register_buffer("kept", torch.ones(2))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.table[self.index]


def halves(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.weight[:2] = 1.0
    else:
        reset_all(module)


LEFT_ALONE = {
    "nothing": (lambda module: None, ["0.bias", "0.weight", "1.kept", "1.weight"], ["1.index", "1.table"]),
    "empties": (lambda module: module.to_empty(device="cpu", recurse=False), ["0.bias", "0.weight"], ["1.table"]),
    "some buffers": ("reset_parameters", ["for 1.kept:"], ["1.index, 1.table, non-persistent"]),
    "a half": (halves, ["for 0.bias, 0.weight, 1.kept:"], ["1.index"]),
}


def job_left_alone(backend: str, what: str, folder: str) -> list[str]:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 4), Table())
    model = fsshard.wrap(module, backend=backend, param_init_fn=LEFT_ALONE[what][0]).eval()
    told = []
    for read in (lambda: model(torch.ones(2, 4)), model.state_dict, lambda: next(iter(whole(model)))):
        try:
            read()
        except ModelError as error:
            told.append(str(error))
    try:
        fsshard.save(f"{folder}/{backend}", model)
    except ModelError as error:
        told.append(str(error))
    return told


def whole(model: Any) -> Iterable[Any]:
    with model.full_parameters() as parameters:
        yield parameters


@pytest.mark.covering
@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("what", LEFT_ALONE)
def test_what_an_init_leaves_alone_is_named(ranks: RankPool, tmp_path: Path, backend: str, what: str) -> None:
    """At the first forward, and where numbers would be handed out or saved."""
    for told in ranks.run(job_left_alone, ranks_of(backend), backend, what, str(tmp_path)):
        assert len(told) == 4 and len(set(told)) == 1
        assert all(text in told[0] for text in (*LEFT_ALONE[what][1], *LEFT_ALONE[what][2]))
    assert list(tmp_path.iterdir()) == []


class Assigned(nn.Module):
    """A complex weight, a scalar, a tied weight, and two buffers that are one."""

    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.zeros(4, 4, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.one, self.two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.two.weight = self.one.weight
        self.one.register_buffer("table", torch.zeros(4))
        self.two.register_buffer("table", self.one.table)
        self.scale.marked = "kept"  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x) * self.scale).to(torch.complex64) @ self.number


def assign(module: nn.Module) -> None:
    if isinstance(module, Assigned):
        module.number = nn.Parameter(torch.full((4, 4), 1 + 2j))
        module.scale = nn.Parameter(torch.tensor(3.0))
        module.two.weight = nn.Parameter(torch.arange(16.0).view(4, 4).t())  # its own child, which came first
    else:
        module.weight = nn.Parameter(torch.zeros(4, 4))
        module.table = torch.arange(4.0)


@on_backends(ALL)
def test_an_init_may_assign_new_parameters(backend: str) -> None:
    with torch.device("meta"):
        module = Assigned()
    model = fsshard.wrap(module, backend=backend, param_init_fn=assign)
    state = model.state_dict()
    fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    model(torch.ones(2, 4)).abs().sum().backward()
    ties = [model.plan.ties == (("one.weight", "two.weight"),), module.one.table is module.two.table]
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    expected = {
        "number": torch.full((4, 4), 1 + 2j),
        "scale": torch.tensor(3.0),
        "one.weight": torch.arange(16.0).view(4, 4).t(),
        "one.table": torch.arange(4.0),
        "two.weight": torch.arange(16.0).view(4, 4).t(),
        "two.table": torch.arange(4.0),
    }
    facts = [*ties, state["one.weight"] is state["two.weight"], frozen]
    check_equal(expected, state)
    assert facts == [True, True, True, ["scale"]]


def fails(module: nn.Module) -> None:
    if dist.get_rank() and isinstance(module, nn.LayerNorm):
        raise ValueError("no such number")
    reset_all(module)


def shapes(module: nn.Module) -> None:
    reset_all(module)
    if isinstance(module, nn.LayerNorm):
        module.bias = nn.Parameter(torch.zeros(5))


BAD_INITS = {
    "raises on rank 1": (fails, "param_init_fn on 1 (LayerNorm) failed: ValueError: no such number"),
    "shape": (shapes, "assigned to 1.bias: expected torch.float32 of shape (4,), got torch.float32 of shape (5,)"),
}


def job_bad_init(backend: str, what: str) -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    fsshard.wrap(module, backend=backend, auto_wrap_policy={nn.Linear}, param_init_fn=BAD_INITS[what][0])


@pytest.mark.covering
@pytest.mark.parametrize("backend", DISTRIBUTED)
@pytest.mark.parametrize("what", BAD_INITS)
def test_an_init_that_cannot_be_right_raises_on_every_rank(ranks: RankPool, backend: str, what: str) -> None:
    errors = ranks.run_expecting_errors(job_bad_init, 2, backend, what)
    assert [type(error) for error in errors] == [ModelError] * 2
    assert all(BAD_INITS[what][1] in str(error) for error in errors)
    assert str(errors[0]).startswith("rank 1: ") == (what == "raises on rank 1")


# ------------------------------------------------------------------------------------------------ transformers


def transformer() -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 16}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))


def job_transformer(backend: str, init: bool) -> tuple[str, list[str]]:
    def losses(model: Any) -> list[Any]:
        optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
        found = []
        for step in range(2):
            tokens = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
            torch.manual_seed(step)  # dropout
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            take_step(optimizer)
            found.append(loss.detach())
        return [*found, model.state_dict(), dict(model.named_buffers())]

    expected, told = losses(fsshard.wrap(transformer(), backend=backend)), ""
    with torch.device("meta"):
        module = transformer()
    given = module._init_weights if init else None
    model = fsshard.wrap(module, backend=backend, param_init_fn=given)
    model.load_state_dict(transformer().state_dict())
    try:
        return told, list(differences(expected, losses(model)))
    except ModelError as error:
        return str(error), []


@pytest.mark.parametrize("backend", ALL)
def test_a_transformer_starts_from_a_checkpoint(ranks: RankPool, backend: str) -> None:
    assert not any(told or found for told, found in ranks.run(job_transformer, ranks_of(backend), backend, True))


def test_constants_that_no_state_dict_has_are_named_as_such(ranks: RankPool) -> None:
    for told, _ in ranks.run(job_transformer, 2, "fsdp2", False):
        assert told.startswith(
            "no values yet for model.rotary_emb.inv_freq, model.rotary_emb.original_inv_freq, non-persistent buffers"
        )
        assert "param_init_fn=model._init_weights" in told


# ------------------------------------------------------------------------------------------------ memory


class Peak(TorchDispatchMode):
    """The most bytes of memory alive at once, of what was made within; on the meta device there is none."""

    def __init__(self, before: Iterable[Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self.before = {tensor.untyped_storage()._cdata for tensor in before}
        self.known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (list, tuple)) else [out]:
            if type(tensor) is Tensor and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                if storage._cdata not in self.before:
                    self.known[storage._cdata] = weakref.ref(storage)
        alive = [storage for ref in self.known.values() if (storage := ref()) is not None]
        self.peak = max(self.peak, sum(storage.nbytes() for storage in alive))  # engines resize storages to nothing
        return out


@pytest.mark.parametrize("way", ["reset", "load"])
@on_backends(["fsdp", "fsdp2"])
def test_no_rank_holds_the_whole_model(backend: str, way: str) -> None:
    width, count = 64, 12
    whole = 4 * count * width * width
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))
    source = {f"{i}.weight": torch.full((width, width), float(i)) for i in range(count)}
    with Peak(source.values()) as memory:
        init = "reset_parameters" if way == "reset" else None
        apart = {"merge_below": 0} if backend == "fsdp2" else {}
        model = fsshard.wrap(module, backend=backend, auto_wrap_policy={nn.Linear}, param_init_fn=init, **apart)
        if way == "load":
            model.load_state_dict(source if dist.get_rank() == 0 else None, broadcast_from_rank0=True)
    assert len(model.plan.units) == count + 1
    peak = memory.peak
    unit = whole / 12
    # Its half, and a unit or a parameter on the way: whole, flattened or padded, received and copied.
    assert whole / 2 <= peak <= whole / 2 + 4 * unit
