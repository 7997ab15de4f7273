"""State dicts put together parameter by parameter: the same values everywhere, and how much memory that takes."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType

import fsshard
from fsshard.backends import whole
from fsshard.errors import ConfigurationError, RankMismatch, StateDictError
from tests.memory import LiveBytes
from tests.models import Spectral
from tests.on_ranks import on_backends, on_ranks
from tests.sharded.training import ALL, trained
from tests.training_runs import DISTRIBUTED, check_equal, differences, ranks_of
from tests.zoo import ZOO

BACKENDS = (*DISTRIBUTED, "none")
SLACK = 512
"""Bytes of scalars and flags."""
MESSAGE = 2048
"""Bytes of small parameters that travel together: some here, less than the larger ones have."""


class Layers(nn.Module):
    """Layers of several sizes, complex ones, a tied one, an odd one, and a buffer."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32), Spectral(32), nn.Linear(32, 32), nn.Linear(32, 65)])
        self.tied = nn.Linear(32, 32, bias=False)
        self.tied.weight = self.layers[0].weight
        self.odd = nn.Parameter(torch.randn(7))
        self.register_buffer("table", torch.randn(300))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if layer is not self.layers[-1] else layer(self.tied(x))
        return x.sum() * self.odd.sum()


def layers() -> Layers:
    """The same weights at every call."""
    torch.manual_seed(0)
    return Layers()


def nbytes(state: dict[str, Any]) -> int:
    """Bytes of all tensors, shared ones once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in state.values()}
    return sum(storages.values())


def job_peak(backend: str, rank0_only: bool, forward_first: bool) -> tuple[list[str], int, int, int]:
    expected = layers().state_dict()
    model = fsshard.wrap(layers(), backend=backend, auto_wrap_policy={nn.Linear, Spectral})
    if forward_first:
        with torch.no_grad():
            model.eval()(torch.ones(2, 32))
    with mock.patch.object(whole, "BATCH_BYTES", MESSAGE), LiveBytes() as live:
        state = model.state_dict(rank0_only=rank0_only, offload_to_cpu=True)
    kept = not rank0_only or not dist.get_rank()
    largest = max(unit.nbytes for unit in model.plan.units)
    return list(differences(expected if kept else {}, state)), live.peak, live.now, largest


@pytest.mark.covering
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("forward_first", [False, True])
def test_rank_0_needs_one_copy_and_the_others_nothing(ranks: Any, backend: str, forward_first: bool) -> None:
    copy = nbytes(layers().state_dict())
    results = ranks.run(job_peak, ranks_of(backend), backend, True, forward_first)
    assert [found for found, *_ in results] == [[]] * len(results)
    for rank, (_, peak, left, _) in enumerate(results):
        assert (0 if rank else copy) <= left <= (SLACK if rank else copy + SLACK)
        most = SLACK + MESSAGE + (0 if rank else copy)
        assert peak <= most, f"rank {rank}: {peak} bytes at once, one copy has {copy}"


@pytest.mark.parametrize("backend", ["fsdp", "fsdp2"])
@on_ranks()
def test_rank_0_receives_small_parameters_together(backend: str) -> None:
    """Count what is sent to rank 0 for the state dict of a model of many small parameters."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
    expected = {key: value.clone() for key, value in module.state_dict().items()}
    model = fsshard.wrap(module, backend=backend)
    with mock.patch.object(dist, "batch_isend_irecv", wraps=dist.batch_isend_irecv) as sends:
        state = model.state_dict(rank0_only=True)
    operations = sum(len(call.args[0]) for call in sends.call_args_list)
    assert operations == 1, "one message from the other rank, not forty"
    check_equal({} if dist.get_rank() else expected, state)


@pytest.mark.covering
@pytest.mark.parametrize("backend", DISTRIBUTED)
@pytest.mark.parametrize(
    ("case", "world_size"),
    [("tfno_tucker", 2), ("tfno_tucker", 3), ("t5", 2), ("zero_dim", 3), ("odd_first", 3), ("conv_batchnorm", 2)],
)
@on_ranks()
def test_it_is_the_models_own(case: str, backend: str, world_size: int) -> None:
    expected = ZOO[case].build().state_dict()
    model = fsshard.wrap(ZOO[case].build(), backend=backend)
    states = [
        model.state_dict(rank0_only=True, offload_to_cpu=True),
        model.state_dict(rank0_only=True),
        model.state_dict(config=FullStateDictConfig(offload_to_cpu=True, rank0_only=True)),
    ]
    whole = [model.state_dict(), model.state_dict(config=FullStateDictConfig())]
    if dist.get_rank():
        assert states == [{}, {}, {}]
        states = []
    wrong = [text for state in states + whole for text in differences(expected, state)]
    assert not wrong


# ------------------------------------------------------------------------------------------ torch's own ways to ask


def refusal(ask: Callable[[], Any]) -> str:
    """Return what a call that has to raise says."""
    with pytest.raises(ConfigurationError) as error:
        ask()
    return str(error.value)


@on_backends(DISTRIBUTED)
def test_fsdps_context_is_honoured(backend: str) -> None:
    """Under FSDP.state_dict_type: what differs from what is asked for, and the errors."""
    model = fsshard.wrap(layers(), backend=backend, auto_wrap_policy={nn.Linear, Spectral})
    whole, kinds = layers().state_dict(), StateDictType
    context = functools.partial(FullyShardedDataParallel.state_dict_type, model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        with context(kinds.FULL_STATE_DICT):
            found = [list(differences(whole, model.state_dict()))]
        with context(kinds.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)):
            found.append(list(differences({} if dist.get_rank() else whole, model.state_dict())))
            told = [refusal(lambda: model.state_dict(rank0_only=True))]
        for kind in (kinds.SHARDED_STATE_DICT, kinds.LOCAL_STATE_DICT):
            with context(kind):
                told.append(refusal(model.state_dict))
    if backend in ("ddp", "fsdp2"):  # without a context: until it is set to something else
        FullyShardedDataParallel.set_state_dict_type(model, kinds.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True))
        found.append(list(differences({} if dist.get_rank() else whole, model.state_dict())))
        FullyShardedDataParallel.set_state_dict_type(model, kinds.SHARDED_STATE_DICT)
        told.append(refusal(model.state_dict))
        FullyShardedDataParallel.set_state_dict_type(model, kinds.FULL_STATE_DICT)
    found.append(list(differences(whole, get_model_state_dict(model))))  # it asks FSDP1's own models for shards
    found = [*found, list(differences(whole, model.state_dict()))]
    (both, *others) = told
    assert not any(found)
    assert "give one of them" in both
    for told in others:
        assert "expected torch's FullStateDictConfig" in told and "fsshard.save" in told


@on_backends(DISTRIBUTED)
def test_torchs_get_model_state_dict_gives_the_same_and_set_takes_it(backend: str) -> None:
    model = fsshard.wrap(layers(), backend=backend, auto_wrap_policy={nn.Linear, Spectral})
    whole = layers().state_dict()
    found = [*differences(whole, get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))]
    rank0 = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    found += differences({} if dist.get_rank() else whole, rank0)
    for build, units in ((layers, {nn.Linear, Spectral}), (lambda: nn.Linear(4, 6), {nn.Linear})):
        whole = copy.deepcopy((module := build()).state_dict())
        model = fsshard.wrap(module, backend=backend, auto_wrap_policy=units)
        for options in (StateDictOptions(full_state_dict=True), None):
            model.load_state_dict({key: torch.zeros_like(value) for key, value in whole.items()})
            set_model_state_dict(model, dict(whole), options=options)  # it puts its own tensors in
            found += differences(whole, model.state_dict())
    assert not found


# ------------------------------------------------------------------------------------------ modules that read


class Transposed(nn.Module):
    """Reads an older version's ``kernel`` as its weight, and fills in a table that older versions did not save."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("table", torch.zeros(3))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        if prefix + "kernel" in state_dict:
            state_dict[prefix + "weight"] = state_dict.pop(prefix + "kernel").t()
        state_dict.setdefault(prefix + "table", torch.full((3,), 7.0))
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Joined(nn.Module):
    """A hook of it reads real and imaginary parts as a complex weight; another notes what was missing."""

    def __init__(self) -> None:
        super().__init__()
        self.spectral = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.norm = nn.BatchNorm1d(4)
        self.optional = nn.Parameter(torch.randn(2))
        self.register_load_state_dict_pre_hook(self._join)
        self.register_load_state_dict_post_hook(lambda _, keys: keys.missing_keys.remove("1.optional"))

    @staticmethod
    def _join(_: nn.Module, state_dict: Any, prefix: str, *rest: Any) -> None:
        state_dict[prefix + "spectral"] = torch.complex(state_dict.pop(prefix + "re"), state_dict.pop(prefix + "im"))


def older_version() -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {
        "0.kernel": torch.randn(4, 4),
        "1.re": torch.randn(4),
        "1.im": torch.randn(4),
        **{f"1.norm.{key}": torch.rand(4) for key in ("weight", "bias", "running_mean", "running_var")},
    }


@on_backends(["none", *DISTRIBUTED])
def test_modules_read_state_dicts_as_their_code_says(backend: str) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(Transposed(), Joined())

    bare, before = build(), dict(build().state_dict())
    bare.load_state_dict(older_version())
    model = fsshard.wrap(build(), backend=backend, auto_wrap_policy={Transposed})
    for wrong in ({"0.other": torch.zeros(1)}, {"0.table": torch.zeros(5)}, {"0.kernel": torch.zeros(4, 3)}):
        with pytest.raises(StateDictError):
            model.load_state_dict(older_version() | wrong)
        check_equal(before, model.state_dict())
    model.load_state_dict(older_version())
    check_equal(dict(bare.state_dict()), model.state_dict())
    norms = fsshard.wrap(nn.BatchNorm1d(4), backend=backend)
    norms.load_state_dict({key.removeprefix("1.norm."): v for key, v in older_version().items() if "norm" in key})


# ------------------------------------------------------------------------------------------------ loading


@on_backends(ALL)
def test_load_lists_what_does_not_fit_and_changes_nothing(backend: str) -> None:
    model, _ = trained(backend)
    before = model.state_dict()
    bad = {k: v for k, v in before.items() if k != "first.bias"}
    bad["middle.0.weight"] = torch.zeros(2, 2, dtype=torch.complex64)
    bad["stranger"] = torch.zeros(1)
    bad["last.weight"] = torch.full_like(before["last.weight"], 9.0)
    try:
        model.load_state_dict(bad)
    except StateDictError as error:
        listed = [error.missing, error.unexpected, error.mismatched, str(error)]
    unchanged = not list(differences(before, model.state_dict()))
    with pytest.raises(ConfigurationError):
        model.load_state_dict(before, assign=True)
    result = model.load_state_dict({"last.bias": torch.full((1,), 4.0), "stranger": torch.zeros(1)}, strict=False)
    assert "first.weight" in result.missing_keys and "last.bias" not in result.missing_keys
    assert result.unexpected_keys == ["stranger"] and bool((model.state_dict()["last.bias"] == 4).all())
    (missing, unexpected, mismatched, text) = listed
    assert missing == ["first.bias"]
    assert unexpected == ["stranger"]
    assert mismatched == {"middle.0.weight": ((6, 6), (2, 2))}
    assert "__real" not in text
    assert unchanged


@on_backends(DISTRIBUTED)
def test_ranks_that_load_different_dicts_are_told(backend: str) -> None:
    """Rank 1 gives another dict than rank 0; a file with equal parts is not another one."""
    model, optimizer = trained(backend)
    second = dist.get_rank() == 1
    before, state = model.state_dict(), optimizer.state_dict()
    fresh = before["last.weight"] + int(second)  # as of a new layer in a job that seeds each rank otherwise
    swapped = before["first.weight"].flip(0) if second else before["first.weight"]
    lacking = {key: value for key, value in before.items() if not second or key != "first.bias"}
    wider = before["last.bias"].new_zeros(1 + second)
    for given, strict, name in (
        ({**before, "last.weight": fresh}, True, "'last.weight' is"),
        ({**before, "first.weight": swapped}, True, "'first.weight' is"),
        (lacking, True, "'first.bias' is"),
        (lacking, False, "'first.bias' is"),
        ({**before, "last.bias": wider}, False, r"shape \(1,\) with digest \w+ and float32 of shape \(2,\)"),
        (None if second else before, True, "the state dict is a mapping and a NoneType"),
    ):
        with pytest.raises(RankMismatch, match=f"ranks 0 and 1 were given different things: .*{name}"):
            model.load_state_dict(given, strict=strict)
    with pytest.raises(RankMismatch, match="broadcast_from_rank0 is True and False"):
        model.load_state_dict(before, broadcast_from_rank0=not second)
    moments = {**state["state"]["last.weight"]}
    moments["exp_avg"] = moments["exp_avg"] + int(second)
    rates = [{**group, "lr": 0.01 * (1 + second)} for group in state["param_groups"]]
    fewer = {name: value for name, value in state["state"].items() if not second or name != "first.bias"}
    for other, name in (
        ({**state, "state": {**state["state"], "last.weight": moments}}, "'exp_avg' of 'last.weight' is"),
        ({**state, "param_groups": rates}, r"param_groups\[0\]\['lr'\] is 0.01 and 0.02"),
        ({**state, "state": fewer}, r"'step' of 'first.bias' is tensor\(2.0\) and not given"),
        ({} if second else state, r"\['amsgrad'\] is False and not given"),
    ):
        with pytest.raises(RankMismatch, match=f"ranks 0 and 1 were given different things: .*{name}"):
            optimizer.load_state_dict(other)
    check_equal(before, model.state_dict())
    optimizer.load_state_dict(state)
    check_equal(state, optimizer.state_dict())


@pytest.mark.parametrize(("broadcast", "means"), [(True, [1.0, 1.0]), (False, [1.0, 2.0])])
@on_ranks()
def test_buffers_that_ranks_load_are_the_first_ones_or_their_own(broadcast: bool, means: Any) -> None:
    model = fsshard.wrap(nn.BatchNorm1d(3), backend="ddp", broadcast_buffers=broadcast)
    model.load_state_dict({**model.state_dict(), "running_mean": torch.full((3,), 1.0 + dist.get_rank())})
    assert float(model.module.running_mean[0]) == means[dist.get_rank()]


class WritesItsOwn(Spectral):
    """Asks for each parameter by its name, as a module with a state dict of its own may."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name in self._parameters:
            parameter = self._parameters[name]
            destination[prefix + name] = parameter if keep_vars else parameter.detach()


@on_backends(DISTRIBUTED)
def test_a_module_that_writes_its_own_is_whole_too(backend: str) -> None:
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(6, 6), WritesItsOwn(6))
    whole = {name: value.clone() for name, value in bare.state_dict().items()}
    found = fsshard.wrap(bare, backend=backend).state_dict()
    assert all(found[name].dtype == value.dtype and torch.equal(found[name], value) for name, value in whole.items())
