"""FullyShardedDataParallel: DDP's numbers to the last bit, FairScale's behaviour and files, every option.

Tests compat/fairscale/nn/data_parallel/_fsdp_engine.py, compat/fairscale/nn/data_parallel/_fsdp_exports.py,
compat/fairscale/nn/data_parallel/_fsdp_marks.py,
compat/fairscale/nn/data_parallel/_fsdp_names.py, compat/fairscale/nn/data_parallel/_fsdp_optim_state.py,
compat/fairscale/nn/data_parallel/_fsdp_shards.py, compat/fairscale/nn/data_parallel/_fsdp_wrapper.py too.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
from typing import Any

import fairscale.nn.data_parallel as real_package
import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsshard.compat.fairscale as mirror
from fsshard.compat.errors import MisuseError
from fsshard.compat.fairscale.nn.data_parallel import (
    FullyShardedDataParallel,
    TrainingState,
    auto_wrap_bn,
    get_fsdp_instances,
    no_pre_load_state_dict_hook,
)
from fsshard.compat.fairscale.nn.data_parallel import fully_sharded_data_parallel as module
from fsshard.errors import ConfigurationError, FsshardError, StateDictError
from fsshard.launching.pool import RankPool
from tests.compat.fairscale.nn.data_parallel import fsdp_trainings as trainings
from tests.dropped import PASSES, Known, run_pass
from tests.models import net

real = real_package.FullyShardedDataParallel
ONE = trainings.Group(0, 1)
NORMAL = ["0.weight", "0.bias", "1.0.weight", "1.0.bias", "1.1.weight", "1.1.bias"]
NORMAL += ["1.1.running_mean", "1.1.running_var", "1.1.num_batches_tracked", "3.weight", "3.bias"]


# ------------------------------------------------------------------------------------------------ names


@pytest.mark.parametrize(
    "name",
    [
        "__init__",
        "set_gradient_divide_factors",
        "append_shared_param",
        "apply",
        "state_dict",
        "local_state_dict",
        "load_state_dict",
        "load_local_state_dict",
        "no_sync",
        "reset_parameters",
        "summon_full_params",
        "forward",
        "local_metadata_dict",
        "consolidate_shard_weights",
        "assert_state",
        "gather_full_optim_state_dict",
        "get_shard_from_optim_state_dict",
        "named_parameters",
    ],
)
def test_signatures(name: str) -> None:
    theirs, ours = (inspect.signature(getattr(kind, name)).parameters for kind in (real, FullyShardedDataParallel))
    assert [(p.name, p.kind, _plain(p.default)) for p in theirs.values()] == [
        (p.name, p.kind, _plain(p.default)) for p in ours.values()
    ]


def _plain(default: Any) -> Any:
    return getattr(default, "value", default)  # enumerations of each side


def test_signatures_of_functions() -> None:
    for ours in (auto_wrap_bn, get_fsdp_instances):
        theirs = getattr(real_package, ours.__name__)
        found = [inspect.signature(each).parameters.values() for each in (theirs, ours)]
        assert [(p.name, p.default) for p in found[0]] == [(p.name, p.default) for p in found[1]]
    assert [each.name for each in TrainingState] == [each.name for each in real_package.TrainingState]


def test_addresses() -> None:
    assert mirror.nn.FullyShardedDataParallel is mirror.nn.data_parallel.FullyShardedDataParallel
    assert mirror.nn.FullyShardedDataParallel is FullyShardedDataParallel is module.FullyShardedDataParallel
    for name in ("auto_wrap_bn", "get_fsdp_instances", "no_pre_load_state_dict_hook", "TrainingState"):
        assert getattr(mirror.nn.data_parallel, name) is getattr(module, name)


def test_torchs_engine_is_imported_with_the_first_wrapper() -> None:
    code = "import sys, fsshard.compat.fairscale.nn.data_parallel; print('torch.distributed.fsdp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_attributes() -> None:
    ours = FullyShardedDataParallel(nn.Linear(4, 4), ONE)
    theirs = real(nn.Linear(4, 4), ONE, ONE, compute_device=torch.device("cpu"))
    absent = {name for name in vars(theirs) if not name.startswith("_")} - {"world_size"}
    assert {name for name in absent if not hasattr(ours, name)} == {"buffer_size", "has_full_params"}
    for name in ("rank", "world_size", "compute_dtype", "buffer_dtype", "bucket_cap_mb", "numel_padded_per_param"):
        assert getattr(ours, name) == getattr(theirs, name), name
    for name in ("gradient_predivide_factor", "gradient_postdivide_factor", "cpu_offload", "move_grads_to_cpu"):
        assert getattr(ours, name) == getattr(theirs, name), name


# ------------------------------------------------------------------------------------------------ as under DDP


OPTIONS: list[dict[str, Any]] = [
    {},
    {"flatten_parameters": False},
    {"reshard_after_forward": False},
    {"disable_reshard_on_root": False},
]


@pytest.mark.covering
@pytest.mark.parametrize("wrap_bn", [False, True], ids=["", "bn"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_mlp_to_the_last_bit(ranks: RankPool, options: dict[str, Any], wrap_bn: bool) -> None:
    assert ranks.run(trainings.parity_mlp, 2, options, wrap_bn) == [{}, {}]


@pytest.mark.parametrize("name", ["t5", "conv", "tied", "tied, unflattened", "twice", "in place"])
def test_models_to_the_last_bit(ranks: RankPool, name: str) -> None:
    assert ranks.run(trainings.parity_model, 2, name) == [{}, {}]


def test_wrapped_by_a_policy(ranks: RankPool) -> None:
    assert ranks.run(trainings.parity_wrapped_by_policy, 2) == [({}, 4), ({}, 4)]


def test_wrapped_by_hand(ranks: RankPool) -> None:
    assert ranks.run(trainings.parity_wrapped_by_hand, 2) == [{}, {}]


@pytest.mark.parametrize("outside", [False, True])
def test_with_checkpoint_wrapper(ranks: RankPool, outside: bool) -> None:
    assert ranks.run(trainings.parity_checkpointed, 2, outside) == [{}, {}]


@pytest.mark.parametrize("body", ["no_sync", "two_forwards", "one_loss"])
def test_bodies_of_a_step(ranks: RankPool, body: str) -> None:
    assert ranks.run(trainings.parity_body, 2, body) == [{}, {}]


@pytest.mark.parametrize("flags", [[False], [True, False, True]], ids=["from the start", "and back"])
def test_freezing(ranks: RankPool, flags: list[bool]) -> None:
    assert ranks.run(trainings.parity_frozen, 2, flags) == [{}, {}]


@pytest.mark.parametrize("backwards", ["in turn", "after both forwards", "of one graph"])
def test_gradients_of_two_backwards_are_added(ranks: RankPool, backwards: str) -> None:
    """FairScale adds means over ranks, DDP takes the mean of sums: the same but for the rounding of one addition."""
    for found, first, second in ranks.run(trainings.gradients_of_accumulation, 2, backwards)[0]:
        # Ours is fl(first + second), first and second being DDP's own: equal, without a bound.
        assert torch.equal(found, first + second) and bool(found.abs().sum() > 0)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping(ranks: RankPool, norm_type: float) -> None:
    """Norms of 150 elements are sums in another order: 150 eps of the norm, and so of gradients and steps."""
    for norms, wrong in ranks.run(trainings.clipping, 2, norm_type):
        assert len(norms) == 4 and all(abs(ours - theirs) <= 150 * 2**-24 * theirs for ours, theirs in norms)
        # each of 4 steps moves a parameter by at most lr * (1 + .9 + .81 + .729) * 0.05, known to 150 eps
        assert all(difference <= 4 * 0.1 * 3.44 * 0.05 * 150 * 2**-24 for difference in wrong.values())


def test_every_state_is_seen(ranks: RankPool) -> None:
    idle, shown = TrainingState.IDLE, TrainingState.SUMMON_FULL_PARAMS
    expected = [TrainingState.FORWARD, idle, TrainingState.BACKWARD_PRE, idle, shown, idle]
    assert ranks.run(trainings.states, 2)[0] == expected


# ------------------------------------------------------------------------------------------------ out of the ordinary


def test_no_stale_parameters(ranks: RankPool) -> None:
    assert ranks.run(trainings.whole_after_a_forward, 2) == [[True] * 3] * 2


def test_replaced_parameters_are_kept(ranks: RankPool) -> None:
    assert ranks.run(trainings.replaced_values, 2) == [True, True]


def test_a_part_before_the_whole(ranks: RankPool) -> None:
    assert ranks.run(trainings.part_before_whole, 2) == [{}, {}]


def test_wrapped_again_after_use(ranks: RankPool) -> None:
    assert ranks.run(trainings.wrapped_again, 2) == [({}, False)] * 2


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_going_on_after_an_exception(ranks: RankPool, where: str) -> None:
    assert ranks.run(trainings.after_an_exception, 2, where) == [{}, {}]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("forward_only", [False, True])
def test_models_are_freed(ranks: RankPool, world_size: int, forward_only: bool) -> None:
    assert all(ranks.run(trainings.freed, world_size, forward_only))


def test_one_rank(ranks: RankPool) -> None:
    assert ranks.run(trainings.parity_mlp, 1, {}, True) == [{}]


# ------------------------------------------------------------------------------------------------ options


def test_mixed_precision(ranks: RankPool) -> None:
    half, single = torch.float16, torch.float32
    low = {"input": half, "output": half, "buffer": half, "reduction": half}
    kept = {"parameter": single, "gradient": single, "saved": {single}}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"fp32_reduce_scatter": True}, {"reduction": single}),
        ({"buffer_dtype": single}, {"buffer": single}),
        ({"compute_dtype": torch.bfloat16}, dict.fromkeys(low, torch.bfloat16)),
    ]
    for options, other in cases:
        found = ranks.run(trainings.dtypes, 2, {"mixed_precision": True, **options})
        assert found == [{**low, **kept, **other}] * 2, options


def test_float32_under_autocast_is_ddp_under_autocast(ranks: RankPool) -> None:
    assert ranks.run(trainings.parity_autocast, 2) == [{}, {}]


def test_clear_autocast_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    cleared: list[bool] = []
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: cleared.append(True))
    FullyShardedDataParallel(nn.Linear(2, 2), ONE, clear_autocast_cache=True)(torch.ones(1, 2))
    assert cleared == [True]
    FullyShardedDataParallel(nn.Linear(2, 2), ONE)(torch.ones(1, 2))
    assert cleared == [True]


def test_buffer_dtype_without_mixed_precision(ranks: RankPool) -> None:
    found = ranks.run(trainings.dtypes, 2, {"buffer_dtype": torch.bfloat16})[0]
    assert (found["buffer"], found["input"], found["parameter"]) == (torch.bfloat16, torch.float32, torch.float32)


def test_batch_norm_in_full_precision(ranks: RankPool) -> None:
    assert ranks.run(trainings.mixed_with_bn, 2)[0] == ({torch.float32}, {torch.float32}, False)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_wrapped_model_under_autocast(ranks: RankPool, world_size: int) -> None:
    """FairScale's own smoke test, which needs CUDA there ("zeros_like(device=cuda)")."""
    assert all(found and all(found) for found in ranks.run(trainings.smoke_under_autocast, world_size))


def test_norms_in_float16_under_autocast_of_the_cpu(ranks: RankPool) -> None:
    """torch's kernels of the CPU take no float16 beside bfloat16, the default there; on a GPU it is float16."""
    assert ranks.run(trainings.norms_under_autocast, 2, torch.float16)[0] == ["", "", ""]
    *told, in_float32 = ranks.run(trainings.norms_under_autocast, 2, torch.bfloat16)[0]
    assert all("expect parameter to have scalar type of Float" in text for text in told) and in_float32 == ""


def test_conversion_after_wrapping(ranks: RankPool) -> None:
    half, single = torch.float16, torch.float32
    assert ranks.run(trainings.converted, 2)[0] == [half, half, half, single, single]


def test_pure_float16() -> None:
    wrapped = FullyShardedDataParallel(nn.Linear(3, 3).half(), ONE, compute_dtype=torch.float16)
    assert wrapped(torch.ones(1, 3).half()).dtype is torch.float16
    with pytest.raises(ValueError, match=r"float32, expected torch\.float16"):
        FullyShardedDataParallel(nn.Linear(3, 3), ONE, compute_dtype=torch.float16)
    with pytest.raises(ConfigurationError, match=r"'weight' is torch\.bfloat16, expected torch\.float32"):
        FullyShardedDataParallel(nn.Linear(3, 3).bfloat16(), ONE)


def test_what_is_kept_for_the_backward(ranks: RankPool) -> None:
    cases = [({}, (True, False)), ({"reshard_after_forward": False}, (True, True))]
    cases += [({"disable_reshard_on_root": False}, (False, False))]
    for options, expected in cases:
        assert ranks.run(trainings.kept_whole, 2, options) == [expected] * 2, options


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("how", trainings.WRITES)
def test_what_no_sync_leaves_whole_is_not_stale(ranks: RankPool, how: str, reshard: bool) -> None:
    assert ranks.run(trainings.written_after_no_sync, 2, how, {"reshard_after_forward": reshard}) == [True] * 2


@pytest.mark.parametrize("build", ["adam", "sgd"])
def test_unflattened_parameters_have_gradients_on_every_rank(ranks: RankPool, build: str) -> None:
    assert ranks.run(trainings.empty_gradients, 2, build) == [([], [], {})] * 2


def test_state_dict_of_the_wrapped_module(ranks: RankPool) -> None:
    for found in ranks.run(trainings.states_of_the_module, 2):
        assert found["parts"] and found["whole"] == [True, True]
        ours, theirs = found["flat"]
        assert "local_state_dict()" in ours and "Incorrect numel of supplied data" in theirs


def test_gradient_divide_factors(ranks: RankPool) -> None:
    for options, factors, ratio in (({"gradient_predivide_factor": 1.0}, None, 1), ({}, (1.0, 1.0), 2)):
        for found, plain in ranks.run(trainings.divided, 2, options, factors):
            # by powers of two: exact, whether before or after the sum
            assert all(torch.equal(a, b * ratio) for a, b in zip(found, plain, strict=True))


def test_force_input_to_fp32(ranks: RankPool) -> None:
    assert ranks.run(trainings.floats_for_halves, 2) == [(torch.float32, True)] * 2
    with pytest.raises(RuntimeError, match="dtype"):
        FullyShardedDataParallel(nn.Linear(5, 5), ONE)(torch.ones(2, 5, dtype=torch.float16))


def test_state_dict_on_rank_0_only(ranks: RankPool) -> None:
    assert ranks.run(trainings.keys_by_rank, 2, {"state_dict_on_rank_0_only": True}) == [NORMAL, []]
    assert ranks.run(trainings.keys_by_rank, 2, {"state_dict_device": torch.device("cpu")}) == [NORMAL, NORMAL]


def test_state_dict_device() -> None:
    wrapped = FullyShardedDataParallel(nn.Linear(2, 2), ONE, state_dict_device=torch.device("meta"))
    assert {value.device.type for value in wrapped.state_dict().values()} == {"meta"}


def test_reset_parameters(ranks: RankPool) -> None:
    said, *right = ranks.run(trainings.reset, 2)[0]
    assert "reset parameters after FSDP wrapping is not allowed" in said and right == [True, True]


def test_a_group_to_reduce_in(ranks: RankPool) -> None:
    assert ranks.run(trainings.other_groups, 2) == [[2, 2]] * 2
    for name in module.ProcessGroupName:
        assert FullyShardedDataParallel(nn.Linear(2, 2), ONE, name).process_group_reduce_scatter is ONE


@pytest.mark.parametrize(
    "options", [{"bucket_cap_mb": 0}, {"move_params_to_cpu": True}, {"cpu_offload": True}, {"move_grads_to_cpu": True}]
)
def test_accepted_without_effect_on_the_cpu(options: dict[str, Any]) -> None:
    plain = nn.Linear(2, 2)
    wrapped = FullyShardedDataParallel(copy.deepcopy(plain), ONE, **options)
    assert {name: getattr(wrapped, name) for name in options} == options
    assert torch.equal(wrapped(torch.ones(1, 2)), plain(torch.ones(1, 2)))
    assert {parameter.device.type for parameter in wrapped.parameters()} == {"cpu"}


def test_contradictions() -> None:
    with pytest.raises(ValueError, match="fp32_reduce_scatter requires mixed_precision=True"):
        FullyShardedDataParallel(nn.Linear(2, 2), ONE, fp32_reduce_scatter=True)
    from fsshard.compat.fairscale.nn.data_parallel._fsdp_options import check_offload

    cuda = torch.device("cuda", 0)
    for parameters, gradients in ((True, None), (True, True), (False, False)):
        check_offload(parameters, gradients, cuda)
    for parameters, gradients in ((True, False), (False, True)):
        with pytest.raises(NotImplementedError, match=f"move_grads_to_cpu={gradients}"):
            check_offload(parameters, gradients, cuda)


def test_compute_device() -> None:
    wrapped = FullyShardedDataParallel(nn.Linear(2, 2), ONE, compute_device=torch.device("cpu"))
    assert wrapped.compute_device == wrapped.state_dict_device == torch.device("cpu")


# ------------------------------------------------------------------------------------------------ refused


def test_no_process_group() -> None:
    with pytest.raises(RuntimeError, match=r"torch\.distributed is not yet initialized") as caught:
        FullyShardedDataParallel(nn.Linear(2, 2))
    assert isinstance(caught.value, FsshardError)


@pytest.mark.filterwarnings("ignore:Complex modules")
def test_parameters_that_cannot_be_sharded() -> None:
    complex_one = nn.Linear(2, 2).to(torch.complex64)
    with pytest.raises(MisuseError, match=r'torch\.complex64.*fsshard\.wrap\(model, backend="fsdp2"\)'):
        FullyShardedDataParallel(complex_one, ONE)
    whole = nn.Linear(2, 2)
    whole.count = nn.Parameter(torch.ones(2, dtype=torch.long), requires_grad=False)
    with pytest.raises(MisuseError, match=r"'count' is torch\.int64"):
        FullyShardedDataParallel(whole, ONE)
    half_frozen = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(AssertionError, match=r"same requires_grad; '1\.weight'"):
        FullyShardedDataParallel(half_frozen, ONE)
    unflat = FullyShardedDataParallel(half_frozen, ONE, flatten_parameters=False)
    assert [parameter.requires_grad for parameter in unflat.parameters()] == [True, True, False, False]
    with pytest.raises(MisuseError, match=r"expected a torch\.nn\.Module, got str"):
        FullyShardedDataParallel("model", ONE)  # type: ignore[arg-type]


@pytest.mark.parametrize("flatten", [True, False])
def test_ties_across_wrappers(flatten: bool) -> None:
    """FairScale unties them, and says nothing."""
    model, theirs = trainings.tied(), trainings.tied()
    model[2] = FullyShardedDataParallel(model[2], ONE, flatten_parameters=flatten)  # type: ignore[operator, index]
    with pytest.raises(MisuseError, match=r"'0\.weight' is tied to a parameter that an inner"):
        FullyShardedDataParallel(model, ONE)
    if flatten:
        cpu = torch.device("cpu")
        theirs[2] = real(theirs[2], ONE, ONE, compute_device=cpu)  # type: ignore[operator, index]
        whole = real(theirs, ONE, ONE, compute_device=cpu)
        assert (
            sum(parameter.numel() for parameter in whole.parameters()) == 25 + 5 + 10 + 25 + 5
        )  # the weight is there twice
    with pytest.raises(NotImplementedError, match="wrap the modules that share the parameter in one wrapper"):
        FullyShardedDataParallel(nn.Linear(2, 2), ONE).append_shared_param(nn.Parameter(torch.ones(1)))


def test_copies() -> None:
    wrapped = FullyShardedDataParallel(nn.Linear(2, 2), ONE)
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(RuntimeError, match="save its state_dict"):
            attempt(wrapped)


def test_inner_calls(ranks: RankPool) -> None:
    clip, sync, twice = ranks.run(trainings.inner_calls, 2)[0]
    assert "clip_grad_norm_ should only be called on the outermost" in clip and "no_sync on inner FSDP" in sync
    assert "expected to be in states" in twice and "SUMMON_FULL_PARAMS" in twice


def test_an_optimizer_from_before(ranks: RankPool) -> None:
    """In the real library it steps tensors that nobody computes with, in silence."""
    for found in ranks.run(trainings.optimizers_from_before, 2):
        assert found.pop("unflattened") == {}
        for name, said in found.items():
            assert said.startswith("OptimizerError") and "build the optimizer after wrapping" in said, name


def test_torchs_clip_grad_norm(ranks: RankPool) -> None:
    """In the real library it takes another norm on each rank, in silence."""
    for case in ranks.run(trainings.clipped_by_torch, 2):
        for marks, said, same, works in case:
            (mark,) = marks
            assert mark.startswith("call fsdp.clip_grad_norm_(max_norm)")
            assert said.startswith("GradientError") and mark in said and same and works
    alone = FullyShardedDataParallel(nn.Linear(2, 2), ONE)  # has all, and torch's norm is right
    assert not any(hasattr(p, "_fsshard_clip_with") for p in alone.parameters())


def test_assert_state() -> None:
    wrapped = FullyShardedDataParallel(nn.Linear(2, 2), ONE)
    wrapped.assert_state([TrainingState.IDLE, TrainingState.FORWARD])
    with pytest.raises(ValueError, match=r"current state is TrainingState\.IDLE"):
        wrapped.assert_state(TrainingState.FORWARD)


@pytest.mark.parametrize(
    ("call", "other"),
    [
        ("gather_full_optim_state_dict", "state_dict"),
        ("load_state_dict", "state_dict"),
        ("summon_full_params", "load_local_state_dict"),
    ],
)
def test_ranks_in_other_calls(ranks: RankPool, call: str, other: str) -> None:
    for said in ranks.run(trainings.apart, 2, call, other):
        assert said.startswith("NotTogether: FullyShardedDataParallel.") and call in said and other in said


# ------------------------------------------------------------------------------------------------ as a module


def test_only_looks_like_a_group() -> None:
    """FairScale's and fairseq's tests build wrappers on groups that can do nothing but say their rank and size."""
    wrapped = FullyShardedDataParallel(nn.Linear(5, 5), trainings.Group(1, 2))
    assert (wrapped.rank, wrapped.world_size) == (1, 2) and wrapped.params[0].shape == (15,)


def test_names_of_parameters(ranks: RankPool) -> None:
    flat, whole, theirs = ranks.run(trainings.names, 2, {})[0]
    parameters = [name for name in NORMAL if "running" not in name and "batches" not in name]
    assert flat == theirs and len(flat) == 2 and "flat_param_0" in flat[0] and whole == parameters
    assert ranks.run(trainings.names, 2, {"flatten_parameters": False})[0][:2] == (parameters, parameters)


def test_falls_through_to_the_module(ranks: RankPool) -> None:
    features, verbose, plain = ranks.run(trainings.reported, 2)[0]
    assert features == 3
    assert "world_size=2, flatten_parameters=True, mixed_precision=False, " in plain and "bucket_cap_mb" not in plain
    assert "bucket_cap_mb=25" in verbose and "is_root=None" in verbose
    with pytest.raises(AttributeError, match="strange"):
        _ = FullyShardedDataParallel(nn.Linear(2, 2), ONE).strange


def test_apply(ranks: RankPool) -> None:
    assert ranks.run(trainings.applied, 2) == [True, True]


def test_auto_wrap_bn() -> None:
    config = {"process_group": ONE, "flatten_parameters": False}
    model = auto_wrap_bn(trainings.mlp(), fsdp_config=config)
    assert [type(each.module.module) for each in get_fsdp_instances(model)] == [nn.BatchNorm1d]
    tagged = auto_wrap_bn(trainings.mlp(), fsdp_config=config, wrap_it=False)
    assert get_fsdp_instances(tagged) == [] and tagged[1][1].wrapper_config is config  # type: ignore[index]
    with pytest.raises(AssertionError, match=r"'1\.1' has a wrapper_config already"):
        auto_wrap_bn(tagged, fsdp_config=config)
    other = dict(config)
    assert auto_wrap_bn(tagged, fsdp_config=other, wrap_it=False, assert_on_collision=False) is tagged
    assert tagged[1][1].wrapper_config is other  # type: ignore[index]


def test_instances() -> None:
    inner = FullyShardedDataParallel(nn.Linear(2, 2), ONE)
    outer = FullyShardedDataParallel(nn.Sequential(inner), ONE)
    assert get_fsdp_instances(outer) == [outer, inner] and get_fsdp_instances(outer, skip_empty=True) == [inner]
    assert get_fsdp_instances(nn.Linear(2, 2)) == []


# ------------------------------------------------------------------------------------------------ state dicts


def test_save_and_load(ranks: RankPool) -> None:
    assert ranks.run(trainings.saved_and_loaded, 2) == [[True] * 5] * 2


def test_inside_of_a_plain_model(ranks: RankPool) -> None:
    assert ranks.run(trainings.in_a_plain_model, 2) == [({}, {}, True)] * 2


@pytest.mark.parametrize("where", ["everywhere", "on one rank"])
def test_a_state_that_does_not_fit(ranks: RankPool, where: str) -> None:
    for text, changed in ranks.run(trainings.misfit, 2, where):
        assert text.startswith("StateDictError") and "nothing was loaded" in text and not changed
        assert "missing: 3.bias" in text and "unexpected: strange" in text
        assert "0.weight: expected (7, 5), got (2, 2)" in text
        assert ("rank 1: " in text) == (where == "on one rank" and "rank 1" in text)


def test_loading_loosely(ranks: RankPool) -> None:
    missing, unexpected, loaded = ranks.run(trainings.loosely, 2)[0]
    assert missing and unexpected == ["1.strange"] and loaded


def test_names_with_the_wrappers_levels() -> None:
    wrapped = FullyShardedDataParallel(nn.Linear(2, 2), ONE)
    state = {f"_fsdp_wrapped_module.{name}": value + 1 for name, value in wrapped.state_dict().items()}
    with no_pre_load_state_dict_hook():
        wrapped.load_state_dict(state)
    found = wrapped.state_dict()
    assert all(torch.equal(found[name], state[f"_fsdp_wrapped_module.{name}"]) for name in found)


@pytest.mark.parametrize("flatten", [True, False])
def test_parts_of_each_rank(ranks: RankPool, flatten: bool) -> None:
    buffers = [name for name in NORMAL if "running" in name or "batches" in name]
    for part, right, wrong in ranks.run(trainings.local_parts, 2, {"flatten_parameters": flatten}):
        assert part == (["flat_param_0", "1.flat_param_0", *buffers] if flatten else NORMAL)
        assert right == [True, True] and not wrong


def test_parts_that_the_real_library_wrote(ranks: RankPool) -> None:
    assert ranks.run(trainings.real_parts, 2) == [(True, True, True, {})] * 2


@pytest.mark.parametrize("flatten", [True, False])
def test_fewer_elements_than_ranks(ranks: RankPool, flatten: bool) -> None:
    assert ranks.run(trainings.fewer_elements_than_ranks, 3, flatten) == [[True] * (4 if flatten else 3)] * 3


@pytest.mark.parametrize("flatten", [True, False])
def test_parts_of_one_rank(ranks: RankPool, flatten: bool) -> None:
    assert ranks.run(trainings.parts_of_one_rank, 1, flatten) == [[True] * 5]


def test_ties_in_parts(ranks: RankPool) -> None:
    """FairScale 0.4.13 looks at the ties of its last wrapper only, and without that one's path."""
    assert ranks.run(trainings.shared_parts, 2) == [{"ours": True, "real": False}] * 2


def test_parts_that_do_not_fit(ranks: RankPool) -> None:
    first, second = ranks.run(trainings.local_misfit, 2)
    assert "missing: 1.flat_param_0" in second and "flat_param_0: expected (33,), got (32,)" in second
    assert first == second.replace("Error: ", "Error: rank 1: ", 1)


def test_consolidation_of_what_is_not_there() -> None:
    with pytest.raises(ValueError, match="of each rank"):
        FullyShardedDataParallel.consolidate_shard_weights([], [])
    wrapped = FullyShardedDataParallel(trainings.mlp(), ONE)
    part, meta = wrapped.local_state_dict(), wrapped.local_metadata_dict()
    some = {name: value for name, value in part.items() if "running" in name}
    with pytest.raises(StateDictError, match="missing: flat_param_0"):
        FullyShardedDataParallel.consolidate_shard_weights([some], [meta])
    loose = FullyShardedDataParallel.consolidate_shard_weights([some], [meta], strict=False)
    assert loose.keys() == some.keys()
    bare = FullyShardedDataParallel.consolidate_shard_weights([part], [meta], with_module_buffers=False)
    assert list(bare) == [name for name, _ in trainings.mlp().named_parameters()]
    cut = {**part, "flat_param_0": part["flat_param_0"][:-1]}
    with pytest.raises(StateDictError, match="flat_param_0: expected 136 elements in all, got 135"):
        FullyShardedDataParallel.consolidate_shard_weights([cut], [meta])


@pytest.mark.parametrize("parts", [False, True])
def test_a_subclass_with_fairseqs_habits(ranks: RankPool, parts: bool) -> None:
    first, second = ranks.run(trainings.subclassed, 2, parts)
    assert first[1] == "Sequential" and first[2] and second[2]
    assert first[0][:1] == (["flat_param_0"] if parts else ["0.weight"])
    assert (second[0] == []) == (not parts)


def test_a_subclass_whose_state_dict_is_its_parts() -> None:
    class Local(FullyShardedDataParallel):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return self.local_state_dict(*args, **kwargs)

    assert list(Local(nn.Linear(3, 3), ONE).state_dict()) == ["flat_param_0"]


# ------------------------------------------------------------------------------------------------ optimizer states


@pytest.mark.parametrize("wrap_bn", [False, True], ids=["", "bn"])
def test_whole_optimizer_state(ranks: RankPool, wrap_bn: bool) -> None:
    for found in ranks.run(trainings.optimizer_states, 2, wrap_bn):
        assert found == {
            "none elsewhere": True,
            "states": True,
            "in place": True,
            "resumed": {},
            "uninterrupted": {},
        }


def test_form_of_a_whole_state(ranks: RankPool) -> None:
    full, none = ranks.run(trainings.gathered_form, 2)
    assert none is None
    assert set(full) == {"state", "param_groups", "param_id_map", "uncollected_local_ids"}
    assert full["param_id_map"] == {0: 0, 1: 0, 2: 0, 3: 0, 4: 1, 5: 1, 6: 1, 7: 1}
    assert full["uncollected_local_ids"] == [] and full["param_groups"][0]["params"] == list(range(8))
    assert full["state"][0]["step"] == 4.0 and full["state"][4]["exp_avg"].shape == (7, 7)


def test_a_state_that_the_real_library_gathered(ranks: RankPool) -> None:
    """The real one makes numbers of the live optimizer's steps while it gathers; Adam stops at the next step."""
    for same, keys, raised in ranks.run(trainings.real_optimizer_state, 2):
        assert same and all(same) and keys and raised


@pytest.mark.parametrize("first_frozen", [False, True])
def test_parameters_without_state(ranks: RankPool, first_frozen: bool) -> None:
    outer = None if first_frozen else 0
    expected = {0: outer, 1: outer, 2: None, 3: None, 4: 2, 5: 2}
    assert ranks.run(trainings.unused_states, 2, first_frozen) == [(expected, True)] * 2


def test_wrappers_of_one_rank(ranks: RankPool) -> None:
    first, second = ranks.run(trainings.alone, 2)
    assert first.pop("uncollected") == [1, 2] and first.pop("first rank's")
    assert first == second and "clip_grad_value_" in first["clip"]
    assert first["kept out"] and first["own gradients"] and first["norm of one group"] > 0


def test_of_another_model(ranks: RankPool) -> None:
    for said in ranks.run(trainings.of_another_model, 2):
        assert said[0] == said[1] and said[0].startswith("OptimizerError") and "parameter 0 of the optimizer" in said[0]
        assert said[2].startswith("MisuseError: Param groups are not supported: expected 1, got 2")
        assert said[3].startswith("UnsupportedHere") and "flatten_parameters=False" in said[3]
        assert said[4].startswith("MisuseError: Including itself, this model has 1 nested instances with 8 parameters")
        assert said[5].startswith("MisuseError") and "param_id_map" in said[5]
        assert said[6].startswith("StateDictError") and "0.weight.exp_avg: expected (7, 5), got (2, 2)" in said[6]
        assert said[7] == ""


def test_the_state_of_another_rank_than_the_first() -> None:
    wrapped = FullyShardedDataParallel(nn.Linear(2, 2), ONE)
    with pytest.raises(MisuseError, match=r"expected a dict, got NoneType; .*broadcast_object_list"):
        wrapped.get_shard_from_optim_state_dict(None)  # type: ignore[arg-type]


def job_drops(kind: str) -> list[str]:
    plain = net()
    plain.middle = nn.ModuleList([nn.Linear(6, 6)])  # FairScale shards real parameters only
    model = FullyShardedDataParallel(plain)
    known = Known(flat=model.params[0])
    run_pass(model, kind)
    dist.barrier()  # who lets go first breaks the pass of a rank that is behind
    del model, plain
    return known.left()


@pytest.mark.parametrize("kind", PASSES)
def test_a_dropped_model_is_freed(ranks: RankPool, kind: str) -> None:
    """Under torch's, the modules show views of the flat parameter, which knows the modules."""
    assert ranks.run(job_drops, 2, kind) == [[], []]
