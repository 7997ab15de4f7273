"""Mixed precision: one meaning under every backend, to the last bit on two ranks."""

from __future__ import annotations

import dataclasses
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
from fsshard.complex_params.slots import ModuleTable
from fsshard.errors import PrecisionError
from fsshard.launching.pool import RankPool
from fsshard.model.activation_checkpointing import checkpoint_blocks
from fsshard.model.precision import _cast, bf16_ready, bfSixteen, check_buffers, check_precision, fp32_policy, fpSixteen
from fsshard.planning.plan import plan
from fsshard.planning.policies import Precision
from tests.models import Spectral, batch, net, take_step, with_sgd
from tests.on_ranks import on_backends, on_ranks
from tests.parity.bare import average
from tests.training_runs import DISTRIBUTED, Run, check_equal, compare, train

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ALL = (*DISTRIBUTED, "none")


# ------------------------------------------------------------------------------------------------ parity


@pytest.mark.parametrize(
    ("case", "precision"),
    [
        pytest.param("tied", "bf16", marks=pytest.mark.long),
        ("buffered", bfSixteen),
        pytest.param("tfno_tucker", "bf16", marks=pytest.mark.long),
        pytest.param("tfno_cp", "fp16", marks=pytest.mark.long),
        pytest.param("uno", fpSixteen, marks=pytest.mark.long),
        pytest.param("t5", Precision(param=BF16), marks=pytest.mark.long),
        pytest.param("t5", "fp16", marks=pytest.mark.long),
        ("conv_batchnorm", "bf16"),
        pytest.param("conv_batchnorm", fpSixteen, marks=pytest.mark.long),
        ("dropout", Precision(param=FP16, reduce=BF16, output=BF16)),
        ("dropout", Precision(reduce=BF16)),
        ("mlp_complex", fp32_policy),
        ("buffered", MixedPrecision(param_dtype=BF16)),
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
        pytest.param("t5", {"T5Stack"}, marks=pytest.mark.long),
        ("conv_batchnorm", {torch.nn.Linear}),
        ("dropout", {torch.nn.Dropout}),
    ],
    ids=str,
)
def test_with_recomputed_blocks(ranks: RankPool, case: str, blocks: Any) -> None:
    """Recomputed blocks, units or not, see parameters in the same dtype as before: to the last bit as without them."""
    settings = {"mixed_precision": "bf16"}
    if case != "t5" and blocks is not True:
        settings["auto_wrap_policy"] = None
    runs = [Run(case, "ddp", 2, settings=settings)]
    runs += [Run(case, b, 2, settings={**settings, "activation_checkpointing": blocks}) for b in DISTRIBUTED]
    assert ranks.run(compare, 2, runs) == [[], []]


def with_blocks_checkpointed(how: str) -> list[Tensor]:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2)))
    if how == "torch":
        module = nn.Sequential(*map(checkpoint_wrapper, module))
    elif how == "ours":
        checkpoint_blocks(module, {nn.Sequential})
    model, optimizer = with_sgd(module, backend="none", mixed_precision="bf16", auto_wrap_policy=None)
    for step in range(2):
        model(batch(step)).square().mean().backward()
        take_step(optimizer)
    return list(model.state_dict().values())


@pytest.mark.parametrize("how", ["torch", "ours"])
@on_ranks(1)
def test_with_blocks_that_were_checkpointed_before(how: str) -> None:
    """Blocks that the user has wrapped before: by torch's wrapper module, or by a forward of ours."""
    check_equal(*(with_blocks_checkpointed(way) for way in ("", how)))


@pytest.mark.parametrize(
    ("case", "extra"),
    [
        ("mlp_complex", {"autocast": True, "micro_batches": 3}),  # for tensors that the forward makes
        ("recurrent", {"autocast": True}),
        ("conv_batchnorm", {"clip": (0.1, 2.0)}),
        ("conv_batchnorm", {"groups": True}),
    ],
    ids=str,
)
def test_ways_of_training(ranks: RankPool, case: str, extra: dict[str, Any]) -> None:
    backends = [b for b in DISTRIBUTED if b != "fsdp" or "micro_batches" not in extra]
    runs = [Run(case, b, 3, settings={"mixed_precision": "bf16"}, **extra) for b in backends]
    assert ranks.run(compare, 2, runs) == [[], []]


@on_ranks()
def test_accumulation_under_fsdp() -> None:
    """FSDP1 would add the micro-batches in bfloat16. Here it adds their means in float32: another order of six terms.

    Each of the five additions rounds by half an ulp (2^-24) of a partial sum, in either order, and no partial sum is
    larger than the sum of the terms' moduli, here bounded by four times the largest gradient.
    """
    run = Run("tfno_tucker", "fsdp", 1, settings={"mixed_precision": "bf16"}, micro_batches=3)
    fsdp, ddp = (train(each).gradients[0] for each in (run, dataclasses.replace(run, backend="ddp")))
    for name, gradient in ddp.items():
        assert gradient is not None and fsdp[name] is not None
        assert (fsdp[name] - gradient).abs().max() <= 10 * 2**-24 * 4 * gradient.abs().max(), name


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


@on_backends(ALL)
def test_what_is_cast_where(backend: str) -> None:
    torch.manual_seed(0)
    module, precision = Probed(), Precision(param=BF16, reduce=FP32, buffer=BF16, output=FP16)
    model = fsshard.wrap(module, backend=backend, mixed_precision=precision, auto_wrap_policy={Probe})
    fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    out = model(torch.randn(3, 4, dtype=torch.float64))
    out["z"].float().sum().backward()
    found = [entry.grad() for entry in model.backend.entries.values()]
    gradients = {gradient.dtype for gradient in found if gradient is not None}
    stored = {e.local().dtype for e in model.backend.entries.values()}
    state = {key: value.dtype for key, value in model.state_dict().items()}
    assert module.probe.seen == [BF16, BF16, torch.int64, BF16, BF16]
    assert module.seen == [BF16, BF16, BF16, BF16]
    assert module.inside == [FP32, torch.complex64, FP32, FP32]  # fp32 units: inputs cast in, outputs cast out
    assert out["y"].dtype == FP16 and out["index"].dtype == torch.int64
    assert gradients == stored == {FP32}  # master weights
    assert state["probe.shift"] == FP32 and state["norm.running_mean"] == FP32
    assert state["spectral.weight"] == torch.complex64 and state["probe.linear.weight"] == FP32


@on_ranks(1)
def test_a_state_dict_has_the_users_dtypes_within_torchs_checkpoint_wrapper() -> None:
    model = fsshard.wrap(
        nn.Sequential(checkpoint_wrapper(Probe())), backend="none", mixed_precision=Precision(buffer=BF16)
    )
    assert next(model.buffers()).dtype == BF16
    assert model.state_dict()["0.shift"].dtype == FP32


def test_a_buffer_shared_with_an_fp32_unit_is_refused() -> None:
    sharing = nn.ModuleDict({"one": Probe(), "norm": nn.BatchNorm1d(4)})
    sharing["one"].register_buffer("mean", sharing["norm"].running_mean)
    text = r"norm\.running_mean belongs to a float32 unit, and is the same tensor as one\.mean"
    with pytest.raises(PrecisionError, match=text):
        check_buffers(ModuleTable(sharing), plan(sharing, mixed_precision=bfSixteen))
    check_buffers(ModuleTable(sharing), plan(sharing, mixed_precision="bf16"))  # nothing is cast


class Uncopied(dict[str, Any]):
    def __copy__(self) -> Uncopied:
        raise TypeError("one of a kind")


def test_containers_are_cast_without_their_constructors() -> None:
    x = torch.ones(2)
    packed = _cast(nn.utils.rnn.pack_sequence([x, x[:1]]), BF16)
    assert packed.data.dtype == BF16 and packed.batch_sizes.tolist() == [2, 1]
    encoding = BatchEncoding({"x": x, "ids": torch.ones(2, dtype=torch.long)})
    cast = _cast(encoding, BF16)
    assert type(cast) is BatchEncoding and cast["x"].dtype == BF16 and cast["ids"] is encoding["ids"]
    output = _cast(BaseModelOutput(last_hidden_state=x, hidden_states=(x,)), BF16)
    assert output.last_hidden_state.dtype == output["last_hidden_state"].dtype == output[1][0].dtype == BF16
    text = r"no copy of a Uncopied can be made: one of a kind; give the class a __copy__"
    with pytest.raises(PrecisionError, match=text):
        _cast(Uncopied(x=x), BF16)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rnn, self.last = nn.Embedding(20, 4), nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.rnn(self.embedding(tokens))[0])


def outputs_in_full_parameters(backend: str) -> list[Any]:
    torch.manual_seed(0)
    model = fsshard.wrap(Recurrent(), backend=backend, mixed_precision="bf16", auto_wrap_policy={nn.LSTM, nn.Linear})
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.5)
    tokens, outputs = torch.arange(8).reshape(2, 4) + dist.get_rank(), []
    for _ in range(2):
        outputs.append(model(tokens))
        outputs[-1].square().mean().backward()
        take_step(optimizer)
    with torch.no_grad():
        outputs.append(model(tokens))
        with model.full_parameters():
            outputs.append(model.module(tokens))
        outputs.append(model(tokens))
    return outputs


@on_ranks()
def test_whole_parameters_are_computed_with_in_the_same_dtype() -> None:
    """As in training, where a unit of the user's model is called within full_parameters(), as generate() does."""
    first = None
    for backend in DISTRIBUTED:
        found = outputs_in_full_parameters(backend)
        first = first or found
        check_equal(first, found, backend)
        assert torch.equal(found[2], found[3]) and torch.equal(found[2], found[4])


class Watchful(Spectral):
    """Notes in which dtype a product of its own comes out."""

    seen: torch.dtype

    def forward(self, x: Tensor) -> Tensor:
        self.seen = (x @ torch.eye(6)).dtype
        return super().forward(x)


@on_backends(["none", "fsdp2"])
def test_fp32_units_leave_autocast(backend: str) -> None:
    module = nn.Sequential(nn.Linear(4, 6), Watchful())
    model = fsshard.wrap(module, backend=backend, mixed_precision="bf16")
    with model.autocast():
        model(batch(0))
    assert module[1].seen == FP32


# ------------------------------------------------------------------------------------------------ the plan


def test_fp32_units_become_units_whatever_the_policy() -> None:
    found = plan(Probed(), auto_wrap_policy=None, mixed_precision="bf16")
    assert {unit.name: (unit.compute, unit.fp32) for unit in found.units} == {
        "": (BF16, False),
        "spectral": (FP32, True),
        "norm": (FP32, True),
    }
    without_weights = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False))  # statistics would stop to move
    (_, norm) = plan(without_weights, auto_wrap_policy=None, mixed_precision="bf16").units
    assert (norm.name, norm.fp32, norm.compute, norm.parameters) == ("1", True, FP32, ())


def test_without_reduce_gradients_travel_in_the_dtype_of_their_unit() -> None:
    found = plan(Probed(), auto_wrap_policy={Probe}, mixed_precision=Precision(param=BF16))
    assert {u.name: u.reduce_dtype for u in found.units} == {"": BF16, "probe": BF16, "spectral": None, "norm": None}
    assert "gradients are sent in bfloat16 (float32 units: float32)" in found.explain()
    found = plan(Probed(), mixed_precision=bfSixteen)
    assert {unit.reduce_dtype for unit in found.units} == {BF16} and "(float32 units" not in found.explain()


# ------------------------------------------------------------------------------------------------ hardware


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


def job_unscaled(scaled: bool) -> list[str]:
    model, optimizer = with_sgd(net(), backend="ddp", mixed_precision="fp16")
    scaler = fsshard.GradScaler(model, init_scale=4.0, enabled=scaled)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            scaler.scale(model(batch(step)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return [str(warning.message) for warning in caught if "float16" in str(warning.message)]


def test_float16_without_scaler_warns_once(ranks: RankPool) -> None:
    for told in ranks.run(job_unscaled, 2, False):
        assert len(told) == 1 and "fsshard.GradScaler(model)" in told[0]
    assert ranks.run(job_unscaled, 2, True) == [[], []]


def autocast_steps(model: Any, optimizer: Any, regions: int) -> list[float]:
    """Train three steps within one region of autocast, or each in its own; gradients of bare models are averaged."""
    losses = []
    for _ in range(regions):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(3 // regions):
                loss = model(batch(len(losses))).square().mean()
                loss.backward()
                if not isinstance(model, fsshard.ShardedModule):
                    average(model)
                take_step(optimizer)
                losses.append(loss.item())
    return losses


@on_ranks()
def test_several_steps_in_one_region_of_autocast() -> None:
    """docs/precision.md says so: under ``fsdp`` weights are cast anew in each forward."""

    def layers() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))

    bare, found = {}, {}
    for regions in (3, 1):
        replica = layers()
        bare[regions] = autocast_steps(replica, torch.optim.SGD(replica.parameters(), lr=0.5), regions)
    for backend in DISTRIBUTED:
        models = [fsshard.wrap(layers(), backend=backend) for _ in range(2)]
        optimizers = [fsshard.build_optimizer(model, torch.optim.SGD, lr=0.5) for model in models]
        alike = autocast_steps(models[0], optimizers[0], 3) == bare[3]
        found[backend] = alike, autocast_steps(models[1], optimizers[1], 1) == bare[3 if backend == "fsdp" else 1]
    assert bare[1] != bare[3], "torch keeps the casts of weights until a region ends"
    assert found == dict.fromkeys(DISTRIBUTED, (True, True))
