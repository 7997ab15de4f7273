"""Mixed precision: one meaning under every backend, to the last bit on two ranks."""

from __future__ import annotations

import collections
import dataclasses
import types
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

import fsshard
from fsshard.errors import PrecisionError
from fsshard.launching.pool import RankPool
from fsshard.model.activation_checkpointing import checkpoint_blocks
from fsshard.model.precision import _cast, _without_autocast, bf16_ready, check_buffers, check_precision
from fsshard.planning.plan import plan
from fsshard.planning.policies import Precision
from tests.models import Spectral, batch, net
from tests.training_runs import DISTRIBUTED, Run, compare, differences, ranks_of, train

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ALL = (*DISTRIBUTED, "none")


# ------------------------------------------------------------------------------------------------ parity


@pytest.mark.parametrize(
    ("case", "precision"),
    [
        pytest.param("plain", "bf16", marks=pytest.mark.long),
        pytest.param("tied", "bf16", marks=pytest.mark.long),
        pytest.param("frozen", "bf16", marks=pytest.mark.long),
        ("buffered", fsshard.bfSixteen),
        ("tfno_tucker", "bf16"),
        pytest.param("tfno_tucker", fsshard.bfSixteen, marks=pytest.mark.long),
        ("tfno_cp", "fp16"),
        pytest.param("uno", fsshard.fpSixteen, marks=pytest.mark.long),
        pytest.param("t5", "bf16", marks=pytest.mark.long),
        ("t5", Precision(param=BF16)),
        pytest.param("t5", "fp16", marks=pytest.mark.long),
        ("conv_batchnorm", "bf16"),
        pytest.param("conv_batchnorm", fsshard.fpSixteen, marks=pytest.mark.long),
        ("dropout", Precision(param=FP16, reduce=BF16, output=BF16)),
        ("dropout", Precision(reduce=BF16)),
        ("fno", fsshard.fp32_policy),
        ("tfno_tucker", MixedPrecision(param_dtype=BF16)),
        ("conv_batchnorm", MixedPrecisionPolicy(param_dtype=BF16)),
    ],
    ids=str,
)
def test_every_backend_computes_the_same(ranks: RankPool, case: str, precision: Any) -> None:
    scaled = FP16 in (getattr(precision, "param", None), getattr(precision, "reduce", None)) or precision == "fp16"
    runs = [Run(case, b, 3, settings={"mixed_precision": precision}, scaled=scaled) for b in DISTRIBUTED]
    assert ranks.run(compare, 2, runs) == [[], []]


@pytest.mark.parametrize(
    ("case", "blocks"),
    [
        pytest.param("t5", True, marks=pytest.mark.long),
        ("tfno_tucker", True),
        ("t5", {"T5Stack"}),
        ("conv_batchnorm", {torch.nn.Linear}),
        ("dropout", {torch.nn.Dropout}),
    ],
    ids=str,
)
def test_with_recomputed_blocks(ranks: RankPool, case: str, blocks: Any) -> None:
    """Recomputed blocks, units or not, see parameters in the same dtype as before: to the last bit as without them."""
    settings: dict[str, Any] = {"mixed_precision": "bf16"}
    if case != "t5" and blocks is not True:
        settings["auto_wrap_policy"] = None
    runs = [Run(case, "ddp", 2, settings=settings)]
    runs += [Run(case, b, 2, settings={**settings, "activation_checkpointing": blocks}) for b in DISTRIBUTED]
    assert ranks.run(compare, 2, runs) == [[], []]


def job_checkpointed_before(backend: str, how: str) -> list[bool]:
    """Blocks that the user has wrapped before: by torch's wrapper module, or by a forward of ours."""
    ends = []
    for way in ("", how):
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2)))
        if way == "torch":
            for i in range(2):
                module[i] = checkpoint_wrapper(module[i])
        elif way == "ours":
            checkpoint_blocks(module, {nn.Sequential})
        model = fsshard.wrap(module, backend=backend, mixed_precision="bf16", auto_wrap_policy=None)
        optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
        for step in range(2):
            model(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(list(model.state_dict().values()))
    return [torch.equal(a, b) for a, b in zip(*ends, strict=True)]


@pytest.mark.parametrize("how", ["torch", "ours"])
@pytest.mark.parametrize("backend", ALL)
def test_with_blocks_that_were_checkpointed_before(ranks: RankPool, backend: str, how: str) -> None:
    for equal in ranks.run(job_checkpointed_before, ranks_of(backend), backend, how):
        assert equal and all(equal)


@pytest.mark.parametrize(
    ("case", "extra"),
    [
        ("mlp_complex", {"autocast": True}),  # for tensors that the forward makes
        ("recurrent", {"autocast": True}),
        ("tfno_tucker", {"clip": (0.1, 2.0)}),
        ("tfno_tucker", {"groups": True}),
        ("tfno_tucker", {"micro_batches": 3}),
    ],
    ids=str,
)
def test_ways_of_training(ranks: RankPool, case: str, extra: dict[str, Any]) -> None:
    backends = [b for b in DISTRIBUTED if b != "fsdp" or "micro_batches" not in extra]
    runs = [Run(case, b, 3, settings={"mixed_precision": "bf16"}, **extra) for b in backends]
    assert ranks.run(compare, 2, runs) == [[], []]


def job_accumulated(backend: str) -> dict[str, Tensor | None]:
    return train(Run("tfno_tucker", backend, 1, settings={"mixed_precision": "bf16"}, micro_batches=3)).gradients[0]


def test_accumulation_under_fsdp(ranks: RankPool) -> None:
    """FSDP1 would add the micro-batches in bfloat16. Here it adds their means in float32: another order of six terms.

    Each of the five additions rounds by half an ulp (2^-24) of a partial sum, in either order, and no partial sum is
    larger than the sum of the terms' moduli, here bounded by four times the largest gradient.
    """
    fsdp, ddp = (ranks.run(job_accumulated, 2, backend)[0] for backend in ("fsdp", "ddp"))
    for name, gradient in ddp.items():
        assert gradient is not None and fsdp[name] is not None
        assert (fsdp[name] - gradient).abs().max() <= 10 * 2**-24 * 4 * gradient.abs().max(), name


def test_fewer_units_compute_the_same(ranks: RankPool) -> None:
    """Where units end changes nothing: what is cast at a unit is in that dtype already."""
    runs = [Run("t5", "ddp", 2, settings={"mixed_precision": "bf16", "auto_wrap_policy": p}) for p in (None, 1000)]
    assert ranks.run(compare, 2, runs) == [[], []]


# ------------------------------------------------------------------------------------------------ what is cast where


class Probe(nn.Module):
    """A linear layer that notes what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("shift", torch.zeros(4))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, extra: dict[str, Any]) -> dict[str, Any]:
        self.seen = [x.dtype, extra["mask"].dtype, extra["index"].dtype, self.linear.weight.dtype, self.shift.dtype]
        return {"y": self.linear(x) + self.shift.to(x.dtype) + extra["mask"], "index": extra["index"]}


class Probed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.probe, self.spectral, self.norm = Probe(), Spectral(4), nn.BatchNorm1d(4)
        self.seen: list[torch.dtype] = []
        self.inside: list[torch.dtype] = []
        for module in (self.spectral, self.norm):
            module.register_forward_pre_hook(lambda m, args: self.inside.extend([args[0].dtype, m.weight.dtype]))

    def forward(self, x: Tensor) -> dict[str, Any]:
        self.inside.clear()
        out = self.probe(x, extra={"mask": torch.zeros(4), "index": torch.arange(4)})
        y = self.spectral(out["y"])
        z = self.norm(y)
        self.seen = [x.dtype, out["y"].dtype, y.dtype, z.dtype]
        return {**out, "z": z}


def job_casts(backend: str, precision: Any) -> list[Any]:
    torch.manual_seed(0)
    module = Probed()
    model = fsshard.wrap(module, backend=backend, mixed_precision=precision, auto_wrap_policy={Probe})
    fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    out = model(torch.randn(3, 4, dtype=torch.float64))
    out["z"].float().sum().backward()
    found = [entry.grad() for entry in model.backend.entries.values()]
    gradients = {gradient.dtype for gradient in found if gradient is not None}
    stored = {e.local().dtype for e in model.backend.entries.values()}
    state = {key: value.dtype for key, value in model.state_dict().items()}
    return [module.probe.seen, module.seen, module.inside, out["y"].dtype, out["index"].dtype, gradients, stored, state]


@pytest.mark.parametrize("backend", ALL)
def test_what_is_cast_where(ranks: RankPool, backend: str) -> None:
    precision = Precision(param=BF16, reduce=FP32, buffer=BF16, output=FP16)
    for result in ranks.run(job_casts, ranks_of(backend), backend, precision):
        probe, outer, inside, output, index, gradients, stored, state = result
        assert probe == [BF16, BF16, torch.int64, BF16, BF16]
        assert outer == [BF16, BF16, BF16, BF16]
        assert inside == [FP32, torch.complex64, FP32, FP32]  # fp32 units: inputs cast in, outputs cast out
        assert output == FP16 and index == torch.int64
        assert gradients == stored == {FP32}  # master weights
        assert state["probe.shift"] == FP32 and state["norm.running_mean"] == FP32
        assert state["spectral.weight"] == torch.complex64 and state["probe.linear.weight"] == FP32


class Sharing(nn.Module):
    """One buffer of two modules, one of which sits in two places; another one of an fp32 unit."""

    def __init__(self, fp32_unit: bool) -> None:
        super().__init__()
        self.one, self.two, self.norm = Probe(), Probe(), nn.BatchNorm1d(4)
        self.again, self.norms = self.one, nn.ModuleList([self.norm])
        self.two.register_buffer("shift", self.one.shift)
        if fp32_unit:
            self.one.register_buffer("mean", self.norm.running_mean)

    def forward(self, x: Tensor) -> Tensor:
        extra = {"mask": torch.zeros(4), "index": torch.arange(4)}
        self.one.shift.add_(1)
        return self.two(self.one(x, extra=extra)["y"], extra=extra)["y"] + self.again.shift


def job_shared_buffers(backend: str) -> list[Any]:
    module = Sharing(False)
    model = fsshard.wrap(module, backend=backend, mixed_precision=fsshard.bfSixteen, auto_wrap_policy={Probe})
    fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    model(batch(0))
    state = model.state_dict()
    shared = [name for name in state if name.endswith(".shift")]
    assert module.norms[0].running_mean.dtype == FP32
    held = module.one.shift is module.two.shift, module.one.shift.dtype
    return [*held, {name: (state[name].dtype, float(state[name].sum())) for name in shared}]


@pytest.mark.parametrize("backend", ["ddp", "fsdp", "fsdp2"])
def test_shared_buffers_stay_shared(ranks: RankPool, backend: str) -> None:
    for same, dtype, state in ranks.run(job_shared_buffers, 2, backend):
        assert same and dtype == BF16
        assert state == {f"{name}.shift": (FP32, 4.0) for name in ("one", "two", "again")}


def test_a_buffer_shared_with_an_fp32_unit_is_refused() -> None:
    text = r"norm\.running_mean belongs to a float32 unit, and is the same tensor as one\.mean"
    with pytest.raises(PrecisionError, match=text):
        check_buffers(Sharing(True), plan(Sharing(True), mixed_precision=fsshard.bfSixteen))
    check_buffers(Sharing(True), plan(Sharing(True), mixed_precision="bf16"))  # nothing is cast


@dataclasses.dataclass
class Held:
    """Fields that no constructor fills, and a constructor that computes."""

    x: Tensor
    start: dataclasses.InitVar[int]
    count: int = dataclasses.field(default=0, init=False)
    later: Any = dataclasses.field(default=None, init=False)

    def __post_init__(self, start: int) -> None:
        self.x, self.count = self.x * 2, start


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Tensor
    n: int = 3


class Tagged(list[Any]):
    def __init__(self, items: Any, tag: str) -> None:
        super().__init__(items)
        self.tag = tag


class Point(collections.namedtuple("Point", "x name")):
    def __new__(cls, x: Tensor) -> Point:
        return super().__new__(cls, x, "made")


class Uncopied(dict[str, Any]):
    def __copy__(self) -> Uncopied:
        raise TypeError("one of a kind")


def test_dataclasses_keep_what_no_constructor_takes() -> None:
    held = Held(torch.ones(1), 5)
    held.later, held.note = [torch.ones(1), 7], "a user's"  # type: ignore[attr-defined]
    cast = _cast(held, BF16)
    assert type(cast) is Held and cast is not held and held.x.dtype == FP32
    assert torch.equal(cast.x, torch.tensor([2.0], dtype=BF16)) and cast.count == 5 and cast.note == "a user's"
    assert cast.later[0].dtype == BF16 and cast.later[1] == 7
    assert _cast(Frozen(torch.ones(1)), BF16).x.dtype == BF16
    slotted = _cast(Slotted(torch.ones(1), 4), BF16)
    assert slotted.x.dtype == BF16 and slotted.n == 4
    assert _cast(cast, BF16) is cast


def test_containers_are_cast_without_their_constructors() -> None:
    x = torch.ones(2)
    tagged, point = _cast(Tagged([x, 1], "t"), BF16), _cast(Point(x), BF16)
    assert type(tagged) is Tagged and tagged.tag == "t" and tagged[0].dtype == BF16 and tagged[1] == 1
    assert type(point) is Point and point.x.dtype == BF16 and point.name == "made"
    queue = _cast(collections.deque([x], maxlen=3), BF16)
    assert queue[0].dtype == BF16 and queue.maxlen == 3
    default = _cast(collections.defaultdict(list, x=x), BF16)
    assert default["x"].dtype == BF16 and default["new"] == []
    assert _cast(torch.max(x.reshape(1, 2), 1), BF16).values.dtype == BF16
    packed = _cast(nn.utils.rnn.pack_sequence([x, x[:1]]), BF16)
    assert packed.data.dtype == BF16 and packed.batch_sizes.tolist() == [2, 1]
    with pytest.raises(
        PrecisionError, match=r"no copy of a Uncopied can be made: one of a kind; give the class a __copy__"
    ):
        _cast(Uncopied(x=x), BF16)
    plain = Uncopied(n=1)
    assert _cast(plain, BF16) is plain


def test_the_outputs_of_transformers_are_cast_in_both_their_places() -> None:
    output = BaseModelOutput(last_hidden_state=torch.ones(1), hidden_states=(torch.ones(1),))
    cast = _cast(output, BF16)
    assert type(cast) is BaseModelOutput and list(cast) == ["last_hidden_state", "hidden_states"]
    assert cast.last_hidden_state.dtype == cast["last_hidden_state"].dtype == cast[1][0].dtype == BF16
    assert cast.hidden_states is cast["hidden_states"] and output[0].dtype == FP32


def test_every_mapping_is_cast() -> None:
    x = torch.ones(2)
    encoding = BatchEncoding({"x": x, "ids": torch.ones(2, dtype=torch.long)})
    cast = _cast(encoding, BF16)
    assert type(cast) is BatchEncoding and cast["x"].dtype == BF16 and cast["ids"] is encoding["ids"]
    assert encoding["x"] is x
    assert _cast(collections.UserDict(x=x), BF16)["x"].dtype == BF16
    assert _cast(collections.UserList([x]), BF16)[0].dtype == BF16
    proxy = _cast(types.MappingProxyType({"x": x, "n": 1}), BF16)
    assert type(proxy) is types.MappingProxyType and proxy["x"].dtype == BF16 and proxy["n"] == 1
    chained = _cast(collections.ChainMap({"a": x}, {"b": x}), BF16)
    assert {key: value.dtype for key, value in chained.items()} == {"a": BF16, "b": BF16}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rnn, self.last = nn.Embedding(20, 4), nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.last(self.rnn(self.embedding(tokens))[0])
        return out


def job_in_full_parameters(backend: str) -> list[Any]:
    torch.manual_seed(0)
    model = fsshard.wrap(Recurrent(), backend=backend, mixed_precision="bf16", auto_wrap_policy={nn.LSTM, nn.Linear})
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.5)
    tokens, outputs = torch.arange(8).reshape(2, 4) + dist.get_rank(), []
    for _ in range(2):
        outputs.append(model(tokens))
        outputs[-1].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        outputs.append(model(tokens))
        with model.full_parameters():
            outputs.append(model.module(tokens))
        outputs.append(model(tokens))
    return outputs


def test_whole_parameters_are_computed_with_in_the_same_dtype(ranks: RankPool) -> None:
    """As in training, where a unit of the user's model is called within full_parameters(), as generate() does."""
    first: list[Tensor] | None = None
    for backend in DISTRIBUTED:
        found = ranks.run(job_in_full_parameters, 2, backend)[1]
        first = first or found
        assert all(torch.equal(one, two) for one, two in zip(first, found, strict=True)), backend
        assert torch.equal(found[2], found[3]) and torch.equal(found[2], found[4])


class Statistics(nn.Module):
    """Normalisations whose only numbers are statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4, affine=False)
        self.instance, self.last = nn.InstanceNorm1d(4, track_running_stats=True), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.instance(self.norm(self.conv(x))).mean(-1))


def job_statistics(backend: str) -> list[Any]:
    torch.manual_seed(0)
    module = Statistics()
    seen: list[torch.dtype] = []
    for norm in (module.norm, module.instance):
        norm.register_forward_hook(lambda m, args, y: seen.extend([args[0].dtype, y.dtype]))
    model = fsshard.wrap(module, backend=backend, mixed_precision=fsshard.bfSixteen, auto_wrap_policy=None)
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    for step in range(2):
        torch.manual_seed(step)
        model(torch.randn(8, 1, 10) + 100).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()(torch.randn(2, 1, 10))
    fp32_units = [unit.name for unit in model.plan.units if unit.fp32]
    return [
        fp32_units,
        seen[:4],
        module.norm.running_mean.dtype,
        module.instance.running_mean.dtype,
        model.state_dict(),
    ]


def test_a_batchnorm_without_weights_is_an_fp32_unit_and_an_instance_norm_is_none(ranks: RankPool) -> None:
    """As for torch's FSDP1, which goes by the class: running statistics in bfloat16 would stop to move."""
    first: dict[str, Tensor] | None = None
    for backend in DISTRIBUTED:
        for fp32_units, seen, mean, other, state in ranks.run(job_statistics, 2, backend):
            assert fp32_units == ["norm"] and seen == [FP32, FP32, BF16, BF16]
            assert mean == FP32 and other == BF16
            first = first or state
            assert list(differences(first, state)) == []


class Watchful(Spectral):
    """Notes in which dtype a product of its own comes out."""

    seen: torch.dtype

    def forward(self, x: Tensor) -> Tensor:
        self.seen = (x @ torch.eye(6)).dtype
        return super().forward(x)


def job_fp32_unit_under_autocast(backend: str) -> torch.dtype:
    module = nn.Sequential(nn.Linear(4, 6), Watchful())
    model = fsshard.wrap(module, backend=backend, mixed_precision="bf16")
    with model.autocast():
        model(batch(0))
    return module[1].seen


def test_fp32_units_leave_the_autocast_of_every_device() -> None:
    """Also where no argument is a tensor; there need not be such a device."""
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        assert not _without_autocast(lambda box: torch.is_autocast_enabled("cuda"), {"x": [1]})
        assert torch.is_autocast_enabled("cuda")
    finally:
        torch.set_autocast_enabled("cuda", before)


@pytest.mark.parametrize("backend", ["none", "fsdp2"])
def test_fp32_units_leave_autocast(ranks: RankPool, backend: str) -> None:
    assert set(ranks.run(job_fp32_unit_under_autocast, ranks_of(backend), backend)) == {FP32}


def job_parameters_after(backend: str) -> list[Any]:
    """Parameters are what they were, after a forward, and after one that raises."""
    model = fsshard.wrap(net(), backend=backend, mixed_precision="bf16")
    fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    module = model.module

    def raises(*_: Any) -> None:
        raise RuntimeError("planned")

    model(batch(0))
    first = [parameter.dtype for parameter in module.parameters()]
    hook = module.last.register_forward_pre_hook(raises)
    with pytest.raises(RuntimeError, match="planned"):
        model(batch(0))
    hook.remove()
    return [first, [parameter.dtype for parameter in module.parameters()]]


@pytest.mark.parametrize("backend", ["none", "ddp", "fairscale"])
def test_float32_outside_of_the_forward(ranks: RankPool, backend: str) -> None:
    for result in ranks.run(job_parameters_after, ranks_of(backend), backend):
        assert all(dtype in (FP32, torch.complex64) for dtypes in result for dtype in dtypes)


# ------------------------------------------------------------------------------------------------ the plan


def test_fp32_units_become_units_whatever_the_policy() -> None:
    found = plan(Probed(), auto_wrap_policy=None, mixed_precision="bf16")
    assert {unit.name: (unit.compute, unit.fp32) for unit in found.units} == {
        "": (BF16, False),
        "spectral": (FP32, True),
        "norm": (FP32, True),
    }
    assert [unit.name for unit in plan(Probed(), auto_wrap_policy=None).units] == [""]
    assert all(unit.compute is None for unit in plan(Probed(), auto_wrap_policy=None).units)


def test_a_batchnorm_without_weights_is_a_unit_where_dtypes_are_mixed() -> None:
    for policy in (None, {nn.BatchNorm1d}):
        (_, norm) = plan(Statistics(), auto_wrap_policy=policy, mixed_precision="bf16").units
        assert (norm.name, norm.fp32, norm.compute, norm.parameters) == ("norm", True, FP32, ())
    found = plan(Statistics(), auto_wrap_policy={nn.BatchNorm1d})
    assert [unit.name for unit in found.units] == [""] and found.dropped == {"norm": "has no parameters"}


def test_a_unit_that_cannot_part_with_complex_weights_is_an_fp32_unit() -> None:
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, dtype=torch.complex64))
            self.inner = nn.Linear(2, 2)

    found = plan(Direct(), mixed_precision="bf16", auto_wrap_policy={nn.Linear})
    assert {unit.name: unit.compute for unit in found.units} == {"": FP32, "inner": BF16}


def test_explain_says_what_computes_in_what() -> None:
    text = plan(Probed(), auto_wrap_policy={Probe}, mixed_precision=fsshard.bfSixteen).explain()
    assert "mixed precision: weights and optimizer float32" in text and "gradients are sent in bfloat16" in text
    lines = {line.split()[0]: line for line in text.splitlines()}
    assert "bfloat16" in lines["probe"] and "float32 unit" in lines["spectral"]
    assert "BatchNorm, which computes in float32; float32 unit" in lines["norm"]
    assert "computes in" not in plan(Probed()).explain()


def test_without_reduce_gradients_travel_in_the_dtype_of_their_unit() -> None:
    found = plan(Probed(), auto_wrap_policy={Probe}, mixed_precision=Precision(param=BF16))
    assert {u.name: u.reduce_dtype for u in found.units} == {"": BF16, "probe": BF16, "spectral": None, "norm": None}
    assert "gradients are sent in bfloat16 (float32 units: float32)" in found.explain()
    found = plan(Probed(), mixed_precision=fsshard.bfSixteen)
    assert {unit.reduce_dtype for unit in found.units} == {BF16} and "(float32 units" not in found.explain()


@pytest.mark.parametrize(
    ("value", "reduce_dtype"),
    [
        ("bf16", None),
        ("fp16", None),
        (None, None),
        (fsshard.bfSixteen, BF16),
        (fsshard.fpSixteen, FP16),
        (MixedPrecision(param_dtype=BF16), BF16),
        (MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32), None),
    ],
    ids=str,
)
def test_what_gradients_travel_in(value: Any, reduce_dtype: torch.dtype | None) -> None:
    assert plan(net(), mixed_precision=value).precision.reduce_dtype == reduce_dtype


# ------------------------------------------------------------------------------------------------ hardware


def test_readiness_has_a_reason() -> None:
    answer = bf16_ready("cpu")
    assert answer and answer.ready and "CPU" in answer.reason
    assert not bf16_ready("meta") and "meta" in bf16_ready("meta").reason
    if not torch.cuda.is_available():
        assert "no GPU" in bf16_ready("cuda").reason


def test_an_old_gpu_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla V100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 0))
    assert "Tesla V100 has compute capability 7.0" in bf16_ready("cuda").reason
    with pytest.raises(PrecisionError, match=r"Tesla V100.*use 'fp16' with fsshard\.GradScaler"):
        check_precision(plan(net(), mixed_precision="bf16"), torch.device("cuda"))
    check_precision(plan(net(), mixed_precision="fp16"), torch.device("cuda"))


# ------------------------------------------------------------------------------------------------ float16 alone


def job_unscaled(backend: str, scaled: bool, disabled: bool = False) -> list[str]:
    model = fsshard.wrap(net(), backend=backend, mixed_precision="fp16")
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    scaler = fsshard.GradScaler(model, init_scale=4.0, enabled=not disabled) if scaled else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            loss = model(batch(step)).square().mean()
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
    return [str(warning.message) for warning in caught if "float16" in str(warning.message)]


@pytest.mark.parametrize("backend", ["none", "ddp", "fsdp2"])
def test_float16_without_scaler_warns_once(ranks: RankPool, backend: str) -> None:
    for told in ranks.run(job_unscaled, ranks_of(backend), backend, False):
        assert len(told) == 1 and "fsshard.GradScaler(model)" in told[0]
    assert ranks.run(job_unscaled, ranks_of(backend), backend, True)[0] == []
    assert len(ranks.run(job_unscaled, ranks_of(backend), backend, True, True)[0]) == 1  # one that does nothing
