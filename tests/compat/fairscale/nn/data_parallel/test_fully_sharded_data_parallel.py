"""FullyShardedDataParallel: DDP's numbers to the last bit, FairScale's behaviour and files, every option.

Tests compat/fairscale/nn/data_parallel/_fsdp_engine.py, compat/fairscale/nn/data_parallel/_fsdp_state.py too.
"""

from __future__ import annotations

import copy
import io
import pickle
from datetime import timedelta
from typing import Any

import fairscale.nn.data_parallel as real
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsshard.compat.errors import MisuseError
from fsshard.compat.fairscale.nn import auto_wrap, enable_wrap, wrap
from fsshard.compat.fairscale.nn.data_parallel import FullyShardedDataParallel as FSDP
from fsshard.compat.fairscale.nn.data_parallel import (
    TrainingState,
    auto_wrap_bn,
    get_fsdp_instances,
    no_pre_load_state_dict_hook,
)
from fsshard.compat.fairscale.nn.data_parallel._fsdp_state import NotAllowed
from fsshard.errors import ConfigurationError, StateDictError
from tests.compat.fairscale.nn.data_parallel.fsdp_trainings import (
    MODELS,
    TwoHeads,
    adam,
    against_ddp,
    consolidated,
    ddp,
    differing,
    from_every_rank,
    from_rank_0,
    mlp,
    nested,
    raw,
    sgd,
    step,
    tied,
    told_by,
    train,
    trained,
    unlike,
)
from tests.dropped import PASSES, Known, run_pass
from tests.models import net
from tests.on_ranks import on_ranks

NORMAL = ["0.weight", "0.bias", "1.0.weight", "1.0.bias", "1.1.weight", "1.1.bias"]
NORMAL += ["1.1.running_mean", "1.1.running_var", "1.1.num_batches_tracked", "3.weight", "3.bias"]
HALF, SINGLE = torch.float16, torch.float32


class Group:
    """Looks like a process group, as FairScale's and fairseq's tests make them: says its rank and size."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


ONE = Group(0, 1)


def alone(module: nn.Module | None = None, **options: Any) -> Any:
    """In a wrapper of one rank, without a process group."""
    return FSDP(nn.Linear(2, 2) if module is None else module, ONE, **options)


def test_attributes() -> None:
    ours, theirs = alone(nn.Linear(4, 4)), raw(nn.Linear(4, 4), ONE)
    absent = {name for name in vars(theirs) if not name.startswith("_")} - {"world_size"}
    assert {name for name in absent if not hasattr(ours, name)} == {
        "buffer_size",
        "has_full_params",
        "uncollected_opt_state",
    }
    names = ["rank", "world_size", "compute_dtype", "buffer_dtype", "bucket_cap_mb", "numel_padded_per_param"]
    names += ["gradient_predivide_factor", "gradient_postdivide_factor", "cpu_offload", "move_grads_to_cpu"]
    assert [getattr(ours, name) for name in names] == [getattr(theirs, name) for name in names]


# ------------------------------------------------------------------------------------------------ as under DDP


@pytest.mark.covering
@pytest.mark.parametrize("wrap_bn", [False, True], ids=["", "bn"])
@pytest.mark.parametrize(
    "options",
    [{}, {"flatten_parameters": False}, {"reshard_after_forward": False}, {"disable_reshard_on_root": False}],
    ids=str,
)
@on_ranks()
def test_mlp_to_the_last_bit(options: dict[str, Any], wrap_bn: bool) -> None:
    assert against_ddp(nested(wrap_bn=wrap_bn, **options), mlp()) == {}


@on_ranks(1)
def test_one_rank() -> None:
    assert against_ddp(nested(wrap_bn=True), mlp()) == {}


@pytest.mark.parametrize("name", MODELS)
@on_ranks()
def test_models_and_bodies_of_a_step_to_the_last_bit(name: str) -> None:
    assert MODELS[name]() == {}


@on_ranks()
def test_wrapped_by_a_policy_and_by_hand() -> None:
    def small(module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool) -> bool:
        return unwrapped_params >= 20 or module_is_root

    with enable_wrap(small, wrapper_cls=FSDP):
        model = auto_wrap(mlp())
    assert against_ddp(model, mlp()) == {} and len(get_fsdp_instances(model)) == 4
    by_hand = mlp()
    with enable_wrap(wrapper_cls=FSDP, reshard_after_forward=False):
        by_hand[1] = wrap(by_hand[1], reshard_after_forward=True)
        by_hand = wrap(by_hand)  # type: ignore[assignment]
    assert [each.reshard_after_forward for each in get_fsdp_instances(by_hand)] == [False, True]
    assert against_ddp(by_hand, mlp()) == {}


@pytest.mark.parametrize("flags", [[False], [True, False, True]], ids=["from the start", "and back"])
@on_ranks()
def test_freezing(flags: list[bool]) -> None:
    """Freeze and unfreeze a wrapper between steps; DDP is built again each time, which it needs."""
    model, plain = nested(bn=False), mlp(bn=False)
    optimizers = sgd(model), sgd(plain)
    for seed, flag in enumerate(flags):
        for parameter in (*model[1].parameters(), *plain[1].parameters()):
            parameter.requires_grad_(flag)
        train(model, optimizers[0], seed=seed)
        train(ddp(plain), optimizers[1], seed=seed)
    assert differing(model, plain) == {}


@pytest.mark.parametrize("backwards", ["in turn", "after both forwards", "of one graph"])
@on_ranks()
def test_gradients_of_two_backwards_are_added(backwards: str) -> None:
    """FairScale adds means over ranks, DDP takes the mean of sums: the same but for the rounding of one addition."""
    model, plain = nested(bn=False).eval(), mlp(bn=False).eval()
    draw = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randn(6, 5, generator=draw) for _ in range(2)]
    if backwards == "of one graph":
        batches[1] = batches[0]
        loss = model(batches[0]).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    elif backwards == "in turn":
        for batch in batches:
            model(batch).square().mean().backward()
    else:
        for loss in [model(batch).square().mean() for batch in batches]:
            loss.backward()
    means = []
    for batch in batches:
        plain.zero_grad()
        plain(batch).square().mean().backward()
        for parameter in plain.parameters():
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)
        means.append([parameter.grad for parameter in plain.parameters()])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    with model.summon_full_params(volatile=True):
        for found, first, second in zip(model.parameters(), *means, strict=True):
            assert torch.equal(found, first + second) and bool(found.abs().sum() > 0)  # equal, without a bound


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@on_ranks()
def test_clipping(norm_type: float) -> None:
    """Norms of 150 elements are sums in another order: 150 eps of the norm, and so of gradients and steps."""
    norms = {True: [], False: []}

    def body(model: Any, draw: torch.Generator) -> None:
        step(model, draw)
        ours = isinstance(model, FSDP)
        clip = model.clip_grad_norm_ if ours else lambda *a: torch.nn.utils.clip_grad_norm_(model.parameters(), *a)
        norms[ours].append(float(clip(0.05, norm_type)))

    wrong = against_ddp(nested(bn=False), mlp(bn=False), body, sgd)
    assert len(norms[True]) == 4
    assert all(abs(a - b) <= 150 * 2**-24 * b for a, b in zip(norms[True], norms[False], strict=True))
    # each of 4 steps moves a parameter by at most lr * (1 + .9 + .81 + .729) * 0.05, known to 150 eps
    assert all(difference <= 4 * 0.1 * 3.44 * 0.05 * 150 * 2**-24 for difference in wrong.values())


@on_ranks()
def test_every_state_is_seen() -> None:
    seen = []
    model = nested(bn=False)
    model[0].register_forward_hook(lambda *_: seen.append(model.training_state.name))
    output = model(torch.ones(2, 5))
    output.register_hook(lambda _: seen.append(model.training_state.name))
    output.sum().backward()
    with model.summon_full_params():
        seen += [model.training_state.name]
    assert [*seen, model.training_state.name] == ["FORWARD", "BACKWARD_PRE", "SUMMON_FULL_PARAMS", "IDLE"]


# ------------------------------------------------------------------------------------------------ out of the ordinary


def doubled_in_place(model: Any, plain: nn.Module) -> None:
    for parameter in (*model.parameters(), *plain.parameters()):
        parameter.data.mul_(2)


def loaded(model: Any, plain: nn.Module) -> None:
    torch.manual_seed(5)
    state = {name: torch.randn_like(value) for name, value in plain.state_dict().items()}
    model.load_state_dict(state)
    plain.load_state_dict(state)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("write", [doubled_in_place, loaded])
@on_ranks()
def test_what_no_sync_leaves_whole_is_not_stale(write: Any, reshard: bool) -> None:
    """Parameters that are written to after a backward without reduction, or a forward alone, are computed with."""
    model, plain = nested(bn=False, reshard_after_forward=reshard).eval(), mlp(bn=False).eval()
    x = torch.ones(2, 5)
    with model.no_sync():
        model(x).sum().backward()
    for _ in range(2):
        write(model, plain)
        output = model(x)
        assert torch.equal(output, plain(x))
    output.sum().backward()


@on_ranks()
def test_replaced_parameters_are_kept() -> None:
    model = nested(bn=False)
    with model.summon_full_params():
        model[0].weight.data = torch.ones(7, 5)
        model[1][0].bias = nn.Parameter(torch.full((7,), 3.0))
    found = model.state_dict()
    assert (found["0.weight"] == 1).all() and (found["1.0.bias"] == 3).all()


@on_ranks()
def test_a_part_before_the_whole_and_wrapped_again_after_use() -> None:
    model = nested()
    model[1].state_dict()
    model.eval()
    model[1](torch.ones(2, 7))
    model.train()
    assert against_ddp(model, mlp()) == {}
    inner = FSDP(mlp(bn=False))
    inner(torch.ones(4, 5)).sum().backward()
    inner.zero_grad()
    outer = FSDP(inner)
    assert against_ddp(outer, mlp(bn=False)) == {} and not outer._has_params


def breaks(*_: Any) -> None:
    raise ZeroDivisionError


def broken_pass(model: nn.Module) -> None:
    output = model(torch.ones(2, 5))
    output.register_hook(breaks)
    output.sum().backward()


@pytest.mark.parametrize("where", ["forward", "backward"])
@on_ranks()
def test_going_on_after_an_exception(where: str) -> None:
    """A forward or a backward breaks off, the script goes on: as if it had not been."""
    (model, mine), (plain, theirs) = trained(nested(bn=False), 2), trained(ddp(mlp(bn=False)), 2)
    hook = model[3].register_forward_pre_hook(breaks) if where == "forward" else None
    for _ in range(2):
        assert told_by(lambda: broken_pass(model)).startswith("ZeroDivisionError")
    if hook is not None:
        hook.remove()
        assert model.training_state is TrainingState.IDLE
    train(model, mine, steps=2, seed=1)
    train(plain, theirs, steps=2, seed=1)
    assert differing(model, plain.module) == {}


@pytest.mark.parametrize("kind", PASSES)
@on_ranks()
def test_a_dropped_model_is_freed(kind: str) -> None:
    """Under torch's, the modules show views of the flat parameter, which knows the modules."""
    plain = net()
    plain.middle = nn.ModuleList([nn.Linear(6, 6)])  # FairScale shards real parameters only
    model = FSDP(plain)
    known = Known(flat=model.params[0])
    run_pass(model, kind)
    dist.barrier()  # who lets go first breaks the pass of a rank that is behind
    del model, plain
    assert known.left() == []


# ------------------------------------------------------------------------------------------------ options


def dtypes(options: dict[str, Any]) -> dict[str, Any]:
    """Trained a little: dtypes as seen inside, of parameters, gradients, reduction, buffers and state dict."""
    plain = mlp(bn=False)
    plain[1][1].register_buffer("offset", torch.ones(1))  # type: ignore[index, operator]
    plain[1] = FSDP(plain[1], **options)
    model = FSDP(plain, **options)
    seen = {}
    model[0].register_forward_hook(lambda _, x, y: seen.update(input=x[0].dtype, output=y.dtype))
    model[1][1].register_forward_hook(lambda m, *_: seen.update(buffer=m.offset.dtype))
    state = trained(model)[0].state_dict()
    assert all(bool(torch.isfinite(value).all()) for value in state.values())
    seen.update(parameter=model.params[0].dtype, gradient=model.params[0].grad.dtype)
    seen.update(reduction=model.module._handle._reduce_dtype)
    seen.update(saved={value.dtype for value in state.values() if value.is_floating_point()})
    return seen


@on_ranks()
def test_mixed_precision() -> None:
    low = {"input": HALF, "output": HALF, "buffer": HALF, "reduction": HALF}
    kept = {"parameter": SINGLE, "gradient": SINGLE, "saved": {SINGLE}}
    cases = [
        ({}, {}),
        ({"fp32_reduce_scatter": True}, {"reduction": SINGLE}),
        ({"buffer_dtype": SINGLE}, {"buffer": SINGLE}),
        ({"compute_dtype": torch.bfloat16}, dict.fromkeys(low, torch.bfloat16)),
    ]
    for options, other in cases:
        assert dtypes({"mixed_precision": True, **options}) == {**low, **kept, **other}, options
    found = dtypes({"buffer_dtype": torch.bfloat16})
    assert (found["buffer"], found["input"], found["parameter"]) == (torch.bfloat16, SINGLE, SINGLE)


@on_ranks()
def test_an_evaluation_with_gradients_loses_none() -> None:
    """FSDP1 would leave the next gradients of mixed precision on each rank, and not reduce them (torch 2.13)."""
    found = []
    for evaluates in (False, True):
        model = nested(bn=False, mixed_precision=True, compute_dtype=torch.bfloat16)
        if evaluates:
            model(torch.ones(2, 5))
        torch.manual_seed(0)
        model(torch.ones(2, 5) + dist.get_rank()).float().square().mean().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *found)) and len(found[0]) == 2


def test_clear_autocast_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    cleared = []
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: cleared.append(True))
    for clears in (True, False):
        alone(clear_autocast_cache=clears)(torch.ones(1, 2))
    assert cleared == [True]


@on_ranks()
def test_batch_norm_in_full_precision() -> None:
    """BatchNorm in wrappers of its own, float32 in a model that computes in float16."""
    model = auto_wrap_bn(mlp())
    inside = set()
    bn = model[1][1]  # type: ignore[index]
    bn.module.module.register_forward_hook(lambda m, *_: inside.add(m.weight.dtype))
    trained(FSDP(model, mixed_precision=True))
    assert inside == {bn.params[0].dtype} == {SINGLE} and not bn.flatten_parameters


@on_ranks()
def test_conversion_after_wrapping() -> None:
    model = nested(bn=False).half()
    assert model.compute_dtype is HALF
    for dtype in (HALF, SINGLE):
        model.to(dtype)
        output = model(torch.ones(2, 5, dtype=dtype))
        output.float().sum().backward()
        assert output.dtype is model.params[0].grad.dtype is dtype
        model.zero_grad()


def test_pure_float16() -> None:
    wrapped = alone(nn.Linear(3, 3).half(), compute_dtype=HALF)
    assert wrapped(torch.ones(1, 3).half()).dtype is HALF
    with pytest.raises(ValueError, match=r"float32, expected torch\.float16"):
        alone(compute_dtype=HALF)
    with pytest.raises(ConfigurationError, match=r"'weight' is torch\.bfloat16, expected torch\.float32"):
        alone(nn.Linear(3, 3).bfloat16())


@on_ranks()
def test_what_is_kept_for_the_backward() -> None:
    cases = [({}, [True, False]), ({"reshard_after_forward": False}, [True, True])]
    for options, expected in (*cases, ({"disable_reshard_on_root": False}, [False, False])):
        model = nested(bn=False, **options)
        output = model(torch.ones(2, 5))
        assert [not each.module._handle.needs_unshard() for each in get_fsdp_instances(model)] == expected, options
        output.sum().backward()


@on_ranks()
def test_gradient_divide_factors() -> None:
    for options, factors, ratio in (({"gradient_predivide_factor": 1.0}, None, 1), ({}, (1.0, 1.0), 2)):
        found = []
        for kwargs in (options, {}):
            model = nested(bn=False, **kwargs).eval()
            if kwargs is options and factors is not None:
                model.set_gradient_divide_factors(*factors, recursive=True)
            step(model, torch.Generator().manual_seed(dist.get_rank()))
            found.append([parameter.grad for parameter in model.parameters()])
        # by powers of two: exact, whether before or after the sum
        assert all(torch.equal(a, b * ratio) for a, b in zip(*found, strict=True))


@on_ranks()
def test_force_input_to_fp32() -> None:
    x = torch.ones(2, 5, dtype=HALF, requires_grad=True)
    output = FSDP(nn.Linear(5, 5), force_input_to_fp32=True)(x)
    output.sum().backward()
    assert output.dtype is SINGLE and x.grad is not None and x.grad.dtype is HALF
    with pytest.raises(RuntimeError, match="dtype"):
        FSDP(nn.Linear(5, 5))(x)


@on_ranks()
def test_where_state_dicts_are() -> None:
    assert list(nested(state_dict_on_rank_0_only=True).state_dict()) == (NORMAL if dist.get_rank() == 0 else [])
    state = FSDP(nn.Linear(2, 2), state_dict_device=torch.device("meta")).state_dict()
    assert {value.device.type for value in state.values()} == {"meta"}
    wrapped = FSDP(nn.Linear(2, 2), compute_device=torch.device("cpu"))
    assert wrapped.compute_device == wrapped.state_dict_device == torch.device("cpu")


@on_ranks()
def test_reset_parameters() -> None:
    assert "not allowed" in told_by(FSDP(nn.Linear(5, 5)).reset_parameters)
    wrapped, plain = FSDP(nn.Linear(5, 5), allow_reset_parameters=True), nn.Linear(5, 5)
    for each in (wrapped, plain):
        torch.manual_seed(3)
        each.reset_parameters()
    assert unlike(wrapped.state_dict(), plain.state_dict()) == []


@pytest.mark.parametrize(
    "options", [{"bucket_cap_mb": 0}, {"move_params_to_cpu": True}, {"cpu_offload": True}, {"move_grads_to_cpu": True}]
)
def test_accepted_without_effect_on_the_cpu(options: dict[str, Any]) -> None:
    plain = nn.Linear(2, 2)
    wrapped = alone(copy.deepcopy(plain), **options)
    assert {name: getattr(wrapped, name) for name in options} == options
    assert torch.equal(wrapped(torch.ones(1, 2)), plain(torch.ones(1, 2)))
    assert {parameter.device.type for parameter in wrapped.parameters()} == {"cpu"}


# ------------------------------------------------------------------------------------------------ refused


def test_contradictions() -> None:
    with pytest.raises(ValueError, match="fp32_reduce_scatter requires mixed_precision=True"):
        alone(fp32_reduce_scatter=True)
    with pytest.raises(NotAllowed, match=r"torch\.distributed is not yet initialized"):
        FSDP(nn.Linear(2, 2))


@pytest.mark.filterwarnings("ignore:Complex modules")
def test_parameters_that_cannot_be_sharded() -> None:
    with pytest.raises(MisuseError, match=r'torch\.complex64.*fsshard\.wrap\(model, backend="fsdp2"\)'):
        alone(nn.Linear(2, 2).to(torch.complex64))
    half_frozen = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(ValueError, match="uniform `requires_grad`"):
        alone(half_frozen)
    unflat = alone(half_frozen, flatten_parameters=False)
    assert [parameter.requires_grad for parameter in unflat.parameters()] == [True, True, False, False]


@pytest.mark.parametrize("flatten", [True, False])
def test_ties_across_wrappers(flatten: bool) -> None:
    """FairScale unties them, and says nothing."""
    model = tied()
    model[2] = alone(model[2], flatten_parameters=flatten)  # type: ignore[operator, index]
    with pytest.raises(MisuseError, match=r"'0\.weight' is tied to a parameter that an inner"):
        alone(model)


def test_copies() -> None:
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(RuntimeError, match="save its state_dict"):
            attempt(alone())


@on_ranks()
def test_inner_calls() -> None:
    model = nested(bn=False)
    model(torch.ones(2, 5))
    with pytest.raises(MisuseError, match="clip_grad_norm_ should only be called on the outermost"):
        model[1].clip_grad_norm_(1.0)
    with pytest.raises(MisuseError, match="no_sync on inner FSDP"):
        model[1].no_sync().__enter__()
    model.assert_state([TrainingState.IDLE, TrainingState.FORWARD])
    with model.summon_full_params():
        with pytest.raises(ValueError, match=r"expected to be in states .*SUMMON_FULL_PARAMS"):
            model.summon_full_params().__enter__()


@on_ranks()
def test_an_optimizer_from_before() -> None:
    """In the real library it steps tensors that nobody computes with, in silence."""
    for part in (lambda m: m[0], lambda m: m[1]):  # the outer wrapper's, an inner one's
        plain = mlp(bn=False)
        optimizer = torch.optim.AdamW(part(plain).parameters())
        plain[1] = FSDP(plain[1])
        model = FSDP(plain)
        model(torch.ones(2, 5)).sum().backward()
        told = told_by(optimizer.step)
        assert told.startswith("OptimizerError") and "build the optimizer after wrapping" in told
    plain = mlp(bn=False)
    optimizer = adam(plain)
    plain[1] = FSDP(plain[1], flatten_parameters=False)
    kept = FSDP(plain, flatten_parameters=False)
    assert against_ddp(kept, mlp(bn=False), build=lambda m: optimizer if m is kept else adam(m)) == {}


@on_ranks()
def test_torchs_clip_grad_norm() -> None:
    """In the real library it takes another norm on each rank, in silence."""
    for options in ({}, {"flatten_parameters": False}):
        model, _ = trained(nested(bn=False, **options))
        model(torch.ones(2, 5)).sum().backward()
        told = told_by(lambda m=model: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.05))
        assert told.startswith("GradientError") and "call fsdp.clip_grad_norm_(max_norm)" in told
        assert float(model.clip_grad_norm_(0.05)) > 0
    assert not any(hasattr(p, "_fsshard_clip_with") for p in alone().parameters())  # one rank has all


@pytest.mark.parametrize(
    ("call", "other"),
    [
        ("gather_full_optim_state_dict", "state_dict"),
        ("load_state_dict", "state_dict"),
        ("summon_full_params", "load_local_state_dict"),
    ],
)
@on_ranks()
def test_ranks_in_other_calls(call: str, other: str) -> None:
    group = dist.new_group(timeout=timedelta(seconds=30))  # its ranks are out of step afterwards
    model = nested(bn=False, process_group=group)
    optimizer = adam(model)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    calls = {
        "gather_full_optim_state_dict": lambda: model.gather_full_optim_state_dict(optimizer),
        "state_dict": model.state_dict,
        "load_state_dict": lambda: model.load_state_dict({}),
        "load_local_state_dict": lambda: model.load_local_state_dict({}),
        "summon_full_params": lambda: model.summon_full_params().__enter__(),
    }
    told = told_by(calls[other if dist.get_rank() else call])
    assert told.startswith("NotTogether: FullyShardedDataParallel.") and call in told and other in told


# ------------------------------------------------------------------------------------------------ as a module


@on_ranks()
def test_names_of_parameters() -> None:
    parameters = [name for name in NORMAL if "running" not in name and "batches" not in name]
    theirs = [name for name, _ in nested(kind=raw).named_parameters()]
    for flatten, expected in ((True, theirs), (False, parameters)):
        model = nested(flatten_parameters=flatten)
        assert [name for name, _ in model.named_parameters()] == expected
        with model.summon_full_params():
            assert [name for name, _ in model.named_parameters()] == parameters
    assert len(theirs) == 2 and "flat_param_0" in theirs[0]


@on_ranks()
def test_falls_through_to_the_module() -> None:
    model = nested(bn=False, verbose=True)
    assert model[3].out_features == 3 and not hasattr(model, "strange")
    assert "bucket_cap_mb=25" in repr(model)
    plain = repr(nested(bn=False))
    assert "world_size=2, flatten_parameters=True, mixed_precision=False, " in plain and "bucket_cap_mb" not in plain


@on_ranks()
def test_apply() -> None:
    model = nested(bn=False)

    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            assert module.weight.dim() == 2
            module.weight.data.fill_(2.0)

    assert model.apply(fill) is model
    assert all(bool((model.state_dict()[f"{name}.weight"] == 2).all()) for name in ("0", "1.0", "3"))


def test_auto_wrap_bn_and_instances() -> None:
    config = {"process_group": ONE, "flatten_parameters": False}
    model = auto_wrap_bn(mlp(), fsdp_config=config)
    assert [type(each.module.module) for each in get_fsdp_instances(model)] == [nn.BatchNorm1d]
    tagged = auto_wrap_bn(mlp(), fsdp_config=config, wrap_it=False)
    assert get_fsdp_instances(tagged) == [] and tagged[1][1].wrapper_config is config  # type: ignore[index]
    with pytest.raises(AssertionError, match=r"'1\.1' has a wrapper_config already"):
        auto_wrap_bn(tagged, fsdp_config=config)
    other = dict(config)
    assert auto_wrap_bn(tagged, fsdp_config=other, wrap_it=False, assert_on_collision=False) is tagged
    assert tagged[1][1].wrapper_config is other  # type: ignore[index]
    inner = alone()
    outer = alone(nn.Sequential(inner))
    assert get_fsdp_instances(outer) == [outer, inner] and get_fsdp_instances(outer, skip_empty=True) == [inner]


# ------------------------------------------------------------------------------------------------ state dicts


@on_ranks()
def test_save_and_load() -> None:
    model, optimizer = trained(nested())
    state = model.state_dict()
    snapshot = {name: value.clone() for name, value in state.items()}
    other, plain = nested(), mlp()
    other.load_state_dict(state)
    plain.load_state_dict(state)
    assert differing(other, plain) == {}
    train(model, optimizer, steps=1)
    assert unlike(state, snapshot) == []  # a copy, buffers too
    with model.summon_full_params():
        inside = model.state_dict()
    outside = model.state_dict()
    assert unlike(inside, outside) == [] and not any(vars(value) for value in outside.values())
    file = io.BytesIO()
    torch.save(outside, file)
    file.seek(0)
    assert unlike(torch.load(file, weights_only=True), inside) == []


@on_ranks()
def test_inside_of_a_plain_model() -> None:
    """Wrappers inside of a module that is none: saved and loaded with nothing around them."""
    model, changed = mlp(), mlp()
    model[1], model[3] = FSDP(model[1]), FSDP(model[3])
    assert differing(model, mlp()) == {}
    state = {name: value + 1 for name, value in mlp().state_dict().items()}
    result = model.load_state_dict(state)
    changed.load_state_dict(state)
    assert differing(model, changed) == {} and result.missing_keys == result.unexpected_keys == []


@on_ranks()
def test_a_state_that_does_not_fit_on_one_rank() -> None:
    model = nested()
    state = model.state_dict()
    if dist.get_rank() == 1:
        state = {name: value + 1 for name, value in state.items() if name != "3.bias"}
        state["0.weight"], state["strange"] = torch.zeros(2, 2), torch.zeros(1)
    told = told_by(lambda: model.load_state_dict(state))
    assert told.startswith("StateDictError") and "missing: 3.bias" in told and "unexpected: strange" in told
    assert "0.weight: expected (7, 5), got (2, 2)" in told and differing(model, mlp()) == {}
    assert ("rank 1: " in told) == (dist.get_rank() == 0)


@on_ranks()
def test_loading_loosely_and_with_the_wrappers_levels() -> None:
    model = nested()
    state = {"0.bias": torch.full((7,), 2.0), "1.strange": torch.zeros(1)}
    result, plain = model.load_state_dict(state, strict=False), mlp().load_state_dict(state, strict=False)
    assert result.missing_keys == plain.missing_keys and result.unexpected_keys == ["1.strange"]
    assert (model.state_dict()["0.bias"] == 2).all()
    wrapped = FSDP(nn.Linear(2, 2))
    state = {f"_fsdp_wrapped_module.{name}": value + 1 for name, value in wrapped.state_dict().items()}
    with no_pre_load_state_dict_hook():
        wrapped.load_state_dict(state)
    assert unlike(state, {f"_fsdp_wrapped_module.{k}": v for k, v in wrapped.state_dict().items()}) == []


@on_ranks()
def test_state_dict_of_the_wrapped_module() -> None:
    """An unflattened wrapper gives this rank's parts, as in the real library; a flattened one raises."""
    ours, theirs = FSDP(tied(), flatten_parameters=False), raw(tied(), flatten_parameters=False)
    wanted, found = theirs.module.state_dict(), ours.module.state_dict()
    assert found.keys() == wanted.keys() and unlike(found, wanted) == []
    flat = FSDP(tied())
    assert "local_state_dict()" in told_by(flat.module.state_dict)
    with flat.summon_full_params():
        whole = flat.module.state_dict()
    single = FSDP(tied(), dist.new_subgroups(group_size=1)[0])
    for state in (whole, single.module.state_dict()):
        assert state.keys() == tied().state_dict().keys() and unlike(state, tied().state_dict()) == []


@pytest.mark.parametrize("flatten", [True, False])
@on_ranks()
def test_parts_of_each_rank(flatten: bool) -> None:
    """Ours and the real library put them together alike; they are loaded again."""
    buffers = [name for name in NORMAL if "running" in name or "batches" in name]
    model, _ = trained(nested(flatten_parameters=flatten))
    part, whole = model.local_state_dict(), model.state_dict()
    assert list(part) == (["flat_param_0", "1.flat_param_0", *buffers] if flatten else NORMAL)
    for kind in (FSDP, real.FullyShardedDataParallel):
        found = consolidated(kind, model)
        assert found.keys() == whole.keys()
        assert dist.get_rank() or unlike(found, whole) == []  # the first rank's statistics are taken
    other, plain = nested(flatten_parameters=flatten), mlp()
    other.load_local_state_dict(part)
    plain.load_state_dict(whole)
    assert differing(other, plain) == {}


@on_ranks()
def test_parts_that_the_real_library_wrote() -> None:
    """The real library writes its parts as we write ours, and we load them."""
    theirs, ours, plain = nested(kind=raw), nested(), mlp()
    with torch.no_grad():
        for parameter in (*theirs.parameters(), *plain.parameters()):
            parameter.add_(1)
    part, own = theirs.local_state_dict(), ours.local_state_dict()
    assert list(part) == list(own) and all(part[name].shape == own[name].shape for name in own)
    assert theirs.local_metadata_dict() == ours.local_metadata_dict()
    shared = from_every_rank((part, theirs.local_metadata_dict()))
    whole = FSDP.consolidate_shard_weights([each[0] for each in shared], [each[1] for each in shared])
    assert whole.keys() == plain.state_dict().keys() and unlike(whole, plain.state_dict()) == []
    ours.load_local_state_dict(part)
    assert differing(ours, plain) == {}


@pytest.mark.parametrize("flatten", [True, False])
@on_ranks(3)
def test_fewer_elements_than_ranks(flatten: bool) -> None:
    """Parts that are padding and nothing else: cut as the real library cuts them, and nothing is lost."""

    def tiny(kind: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 1), nn.Linear(1, 1), nn.Linear(1, 3))
        model[1] = kind(model[1], flatten_parameters=flatten)
        return kind(model, flatten_parameters=flatten)

    theirs, ours, other = tiny(raw), tiny(FSDP), tiny(FSDP)
    part, wanted = ours.local_state_dict(), theirs.local_state_dict()
    assert ours.local_metadata_dict() == theirs.local_metadata_dict()
    assert part.keys() == wanted.keys() and unlike(part, wanted) == []
    _, optimizer = trained(ours)
    other.load_local_state_dict(ours.local_state_dict())
    assert differing(other, ours) == {}
    if flatten:
        full = from_rank_0(ours.gather_full_optim_state_dict(optimizer))
        assert_same_states(ours.get_shard_from_optim_state_dict(full), optimizer)


@pytest.mark.parametrize("flatten", [True, False])
@on_ranks(1)
def test_parts_of_one_rank(flatten: bool) -> None:
    """Parts are what the real library's are, and come back; flat ones, as fsshard 0.1.0 wrote them, too."""
    ours, other = (FSDP(tied(), flatten_parameters=flatten) for _ in range(2))
    part, wanted = ours.local_state_dict(), raw(tied(), flatten_parameters=flatten).local_state_dict()
    assert part.keys() == wanted.keys() and unlike(part, wanted) == []
    expected = {name: value + 1 for name, value in tied().state_dict().items()}
    changed = {name: value + 1 for name, value in part.items()}
    for given in (changed, {name: value.reshape(-1) for name, value in changed.items()}):
        with other.summon_full_params(), torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        other.load_local_state_dict(given)
        assert unlike(other.state_dict(), expected) == []
        assert unlike(FSDP.consolidate_shard_weights([given], [ours.local_metadata_dict()]), expected) == []


@on_ranks()
def test_ties_in_parts() -> None:
    """FairScale 0.4.13 looks at the ties of its last wrapper only, and without that one's path."""
    wanted, model = TwoHeads().state_dict(), TwoHeads()
    model.body = FSDP(model.body)
    state = consolidated(FSDP, FSDP(model))
    assert state.keys() == wanted.keys() and unlike(state, wanted) == []


@on_ranks()
def test_parts_that_do_not_fit() -> None:
    model = nested()
    part = model.local_state_dict()
    with model.summon_full_params():  # what is shown would be written over the part when it ends
        assert "SUMMON_FULL_PARAMS" in told_by(lambda: model.load_local_state_dict(part))
    if dist.get_rank() == 1:
        part["flat_param_0"] = part["flat_param_0"][:-1]
        del part["1.flat_param_0"]
    told = told_by(lambda: model.load_local_state_dict(part))
    assert "missing: 1.flat_param_0" in told and "flat_param_0: expected (33,), got (32,)" in told
    assert ("rank 1: " in told) == (dist.get_rank() == 0)


def test_consolidation_of_what_is_not_there() -> None:
    consolidate = FSDP.consolidate_shard_weights
    with pytest.raises(ValueError, match="of every rank"):
        consolidate([], [])
    wrapped = alone(mlp())
    part, meta = wrapped.local_state_dict(), wrapped.local_metadata_dict()
    some = {name: value for name, value in part.items() if "running" in name}
    with pytest.raises(StateDictError, match="missing: flat_param_0"):
        consolidate([some], [meta])
    assert consolidate([some], [meta], strict=False).keys() == some.keys()
    bare = consolidate([part], [meta], with_module_buffers=False)
    assert list(bare) == [name for name, _ in mlp().named_parameters()]
    cut = {**part, "flat_param_0": part["flat_param_0"][:-1]}
    with pytest.raises(StateDictError, match=r"flat_param_0: expected 136.*, got 135"):
        consolidate([cut], [meta])


def test_a_subclass_whose_state_dict_is_its_parts() -> None:
    class Local(FSDP):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return self.local_state_dict(*args, **kwargs)

    assert list(Local(nn.Linear(3, 3), ONE).state_dict()) == ["flat_param_0"]


# ------------------------------------------------------------------------------------------------ optimizer states


def assert_same_states(part: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    found, wanted = part["state"], optimizer.state_dict()["state"]
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[n][k], wanted[n][k]) for n in wanted for k in wanted[n])


def own_names(model: nn.Module, instance: Any) -> list[str]:
    path = next(name for name, module in model.named_modules() if module is instance)
    path = ".".join(part for part in path.split(".") if part != "_fsdp_wrapped_module")
    return [f"{path}.{each.name}" if path else each.name for each in instance.module.own()]


@pytest.mark.parametrize("wrap_bn", [False, True], ids=["", "bn"])
@on_ranks()
def test_whole_optimizer_state(wrap_bn: bool) -> None:
    """A gathered state is that of the plain optimizer under DDP; it is cut and loaded again, and trained on with."""
    (model, optimizer), (reference, plain) = trained(nested(wrap_bn=wrap_bn)), trained(ddp(mlp()))
    full = model.gather_full_optim_state_dict(optimizer, recipient_rank=0)
    assert (full is None) == (dist.get_rank() != 0)
    full = from_rank_0(full)
    assert set(full) == {"state", "param_groups", "param_id_map", "uncollected_local_ids"}
    if not wrap_bn:
        assert list(full["param_id_map"].values()) == [0] * 4 + [1] * 4 and full["uncollected_local_ids"] == []
        assert full["state"][0]["step"] == 4.0 and full["state"][4]["exp_avg"].shape == (7, 7)
    order = [name for each in get_fsdp_instances(model, skip_empty=True) for name in own_names(model, each)]
    place = {name: index for index, (name, _) in enumerate(reference.module.named_parameters())}
    assert full["param_groups"][0]["params"] == list(range(len(place)))
    wanted = plain.state_dict()["state"]
    for number, state in full["state"].items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), wanted[place[order[number]]][key])
    other = nested(wrap_bn=wrap_bn)
    again = adam(other)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(other.get_shard_from_optim_state_dict(full))
    assert "param_id_map" not in full  # changed in place
    for each, with_ in ((model, optimizer), (other, again), (reference, plain)):
        train(each, with_, steps=2, seed=1)
    assert differing(other, reference.module) == differing(model, reference.module) == {}


@on_ranks()
def test_a_state_that_the_real_library_gathered() -> None:
    """The real one makes numbers of the live optimizer's steps while it gathers; Adam stops at the next step."""
    theirs, ours = nested(kind=raw), nested()
    draw = torch.Generator().manual_seed(dist.get_rank())
    for each in real.get_fsdp_instances(theirs):
        for parameter, padding in zip(each.params, each.numel_padded_per_param, strict=True):
            parameter.grad = torch.randn(parameter.shape, generator=draw)
            parameter.grad[parameter.numel() - padding :] = 0
            parameter._full_param_padded = torch.zeros(parameter.numel() * dist.get_world_size())  # as after a forward
    optimizer = torch.optim.Adam(theirs.parameters())
    optimizer.step()
    before = {n: {k: v.clone() for k, v in s.items()} for n, s in optimizer.state_dict()["state"].items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "cpu", Tensor.clone)  # as from a GPU: it gathers into one buffer
        full = theirs.gather_full_optim_state_dict(optimizer)
    part = ours.get_shard_from_optim_state_dict(from_rank_0(full))
    assert all(torch.equal(part["state"][n][k], before[n][k]) for n in before for k in before[n])
    assert part.keys() == optimizer.state_dict().keys() and told_by(optimizer.step)
    torch.optim.Adam(ours.parameters()).load_state_dict(part)


class Unused(nn.Module):
    """A frozen wrapper in the middle, without state in the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l = nn.Linear(4, 4)
        self.not_trained = FSDP(nn.Linear(4, 4).requires_grad_(False))
        self.l2 = FSDP(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.l2(self.l(x)) - self.not_trained(x)


@pytest.mark.parametrize("first_frozen", [False, True])
@on_ranks()
def test_parameters_without_state(first_frozen: bool) -> None:
    whole = Unused()
    whole.l.requires_grad_(not first_frozen)
    model = FSDP(whole)
    optimizer = sgd(model)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    full = from_rank_0(model.gather_full_optim_state_dict(optimizer))
    outer = None if first_frozen else 0
    assert full["param_id_map"] == {0: outer, 1: outer, 2: None, 3: None, 4: 2, 5: 2}
    assert_same_states(model.get_shard_from_optim_state_dict(full), optimizer)


@on_ranks()
def test_wrappers_of_one_rank() -> None:
    """BatchNorms of one rank each: not gathered, not to be clipped."""
    model, optimizer = trained(FSDP(auto_wrap_bn(mlp(), single_rank_pg=True)))
    assert "clip_grad_value_" in told_by(lambda: model.clip_grad_norm_(1.0))
    together, _ = trained(FSDP(auto_wrap_bn(mlp(), single_rank_pg=False)))
    assert together.clip_grad_norm_(1.0).item() > 0
    full = model.gather_full_optim_state_dict(optimizer)
    bn = get_fsdp_instances(model)[1]
    first, second = from_every_rank(bn.params[0].grad)
    assert bn.no_broadcast_optim_state and not torch.equal(first, second)
    if full is not None:
        assert full["uncollected_local_ids"] == [1, 2]
        assert_same_states(model.get_shard_from_optim_state_dict(full), optimizer)


@on_ranks()
def test_numbers_of_optimizers() -> None:
    """A tensor without dimensions is written as FairScale reads it: one of each rank, bare where one rank has all."""
    model = FSDP(auto_wrap_bn(mlp(), single_rank_pg=True))
    optimizer = torch.optim.NAdam(model.parameters())
    train(model, optimizer)
    optimizer.state[model.params[0]]["mu_product"].fill_(dist.get_rank())
    full = from_rank_0(model.gather_full_optim_state_dict(optimizer))
    written, *_, of_batch_norm = [state["mu_product"] for state in full["state"].values()]
    assert [float(each) for each in written] == [0, 1] and isinstance(of_batch_norm, Tensor)
    part = model.get_shard_from_optim_state_dict(full)
    assert float(part["state"][0]["mu_product"]) == dist.get_rank()
    optimizer.state[model.params[0]]["RMS"] = dist.get_rank()
    told = told_by(lambda: model.gather_full_optim_state_dict(optimizer))
    assert told.startswith("OptimizerError: state 'RMS' of '0.weight' differs between ranks: [0, 1]")


@on_ranks()
def test_of_another_model() -> None:
    model, other = nested(bn=False), nested(bn=False)
    for optimizer in (adam(other), adam(mlp(False))):
        told = told_by(lambda optimizer=optimizer: model.gather_full_optim_state_dict(optimizer))
        assert told.startswith("OptimizerError") and "parameter 0 of the optimizer" in told
    groups = [{"params": [parameter]} for parameter in model.parameters()]
    with pytest.raises(MisuseError, match="Param groups are not supported: expected 1, got 2"):
        model.gather_full_optim_state_dict(torch.optim.Adam(groups))
    unflat = nested(bn=False, flatten_parameters=False)
    with pytest.raises(NotImplementedError, match="flatten_parameters=False"):
        unflat.gather_full_optim_state_dict(adam(unflat))
    _, optimizer = trained(model, 1)
    full = from_rank_0(model.gather_full_optim_state_dict(optimizer))
    with pytest.raises(MisuseError, match="Including itself, this model has 1 nested instances with 8 parameters"):
        FSDP(mlp(False)).get_shard_from_optim_state_dict(dict(full))
    with pytest.raises(MisuseError, match=r"expected a dict .*got NoneType; .*broadcast_object_list"):
        model.get_shard_from_optim_state_dict(None)  # type: ignore[arg-type]
    wider = {n: {**s, "exp_avg": torch.zeros(2, 2)} if n == 0 else s for n, s in full["state"].items()}
    with pytest.raises(StateDictError, match=r"0\.weight\.exp_avg: expected \(7, 5\), got \(2, 2\)"):
        model.get_shard_from_optim_state_dict({**full, "state": wider})
    other.load_state_dict(model.state_dict())
